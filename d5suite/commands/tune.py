"""``d5suite tune``: find faster settings of a backend, prove them, and write them down."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.commands.ab import add_decide_disturbed, add_selection, benchmark_selection
from d5suite.errors import ConfigurationError
from d5suite.files import given_path

if TYPE_CHECKING:
    from d5suite.levels.knobs import TuningKnob
    from d5suite.pytest_plugin.stash import BenchmarkTarget
    from d5suite.tuning.profiles import Tuned
    from d5suite.tuning.proposals import StepLayers

UNITS = {"s": 1, "m": 60, "h": 3600}

ACCURACY = "time_to_accuracy"
"""The goal that minimizes the time of a training run to its target."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "tune", help="find faster settings of a backend, prove them, and write them down",
        description="Search threads, allocators, modes and the backend's own options. Each candidate is proved and "
        "measured in turn with the default. Further options of pytest follow after --.",
        epilog="exit codes: 0 something faster was found and confirmed, 1 the default is kept, 2 usage",
    )  # fmt: skip
    add_selection(command)
    command.add_argument("--network", metavar="FILE.onnx", help="as for pytest")
    command.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="as for pytest: select tests")
    command.add_argument(
        "--measurement", metavar="NAME", help="measurement to make faster (default: the one with the highest level)"
    )
    command.add_argument(
        "--budget", default="10m", metavar="TIME", help="time per case and backend: 90s, 10m or 2h (default: 10m)"
    )
    command.add_argument(
        "--goal", default="time", choices=("time", ACCURACY, "p99", "memory", "energy", "energy_delay"),
        help="figure to minimize (default: time)",
    )  # fmt: skip
    command.add_argument("--trials", type=int, default=200, metavar="N", help="limit on trials (default: %(default)s)")
    command.add_argument(
        "--launches",
        type=int,
        default=4,
        metavar="N",
        help="fresh launches that confirm the result (default: %(default)s)",
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the search (default: %(default)s)")
    command.add_argument(
        "--knobs", metavar="NAME,…", help="search only these knobs (default: all knobs of the backend)"
    )
    command.add_argument(
        "--precisions", metavar="NAME,…", help="allow other precisions, such as fp32,bf16; the first is the default"
    )
    command.add_argument(
        "--batch-sizes", metavar="N,…", help="allow other batch sizes; the first is the default; times are per item"
    )
    command.add_argument(
        "--layers",
        type=given_path,
        metavar="FILE.json",
        help="result with --passes layers, which shows what to try first (default: launch the default to find out)",
    )
    command.add_argument(
        "--machine",
        type=given_path,
        metavar="FILE.json",
        help="ceilings of this machine (d5suite machine -o): try first what the roofline says, and skip thread counts "
        "that must be slower",
    )
    add_decide_disturbed(command)
    command.add_argument(
        "-o", "--out", type=given_path, default=Path("tuned.toml"), metavar="FILE.toml",
        help="settings for pytest --tuned; the course of the search is beside it, as .json (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--resume", action="store_true", help="continue the trials of an interrupted run")
    command.add_argument("--plot", type=given_path, metavar="FILE.svg", help="draw the course of the search")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Tune all that was chosen; write the settings and the course; return the exit code."""
    from d5suite.files import check_targets, read_json, write_json
    from d5suite.models.ceilings import read_ceilings
    from d5suite.pytest_plugin.interrupts import Interrupts
    from d5suite.report.tuning import SCHEMA
    from d5suite.tuning.profiles import kind_of_machine, read_tuned, write_tuned
    from d5suite.tuning.proposals import StepLayers
    from d5suite.tuning.tune import Tuning, TuningRequest

    out, beside = options.out, options.out.with_suffix(".json")
    if options.out.suffix != ".toml":
        raise ConfigurationError("the file must end in .toml", where=f"--out {out}")
    if not 1 <= options.trials <= 10_000 or not 3 <= options.launches <= 100:
        raise ConfigurationError("--trials must be from 1 to 10000, --launches from 3 to 100")
    check_targets(out, beside, options.plot)
    plan = TuningRequest(
        seconds_of(options.budget), options.goal, options.trials, options.launches, options.seed,
        options.decide_disturbed, further_knobs(options), read_layers=layers_of,
        ceilings=read_ceilings(options.machine) if options.machine else None,
        only=tuple(filter(None, (options.knobs or "").split(","))),
    )  # fmt: skip
    earlier = _courses(read_json(beside), beside) if options.resume and beside.exists() else []
    interrupts = Interrupts()
    interrupts.install()
    try:
        selection = benchmark_selection(options)
        if options.keyword:
            selection.options.append(f"-k={options.keyword}")
        if options.network:
            selection.options.append(f"--network={options.network}")
        here = selection.here
        assert here.settings is not None
        targets = chosen_targets(here.targets, options.measurement, options.goal)
        machine = kind_of_machine(here.settings.device)
        entries: dict[tuple[str, str], Tuned] = {}
        if out.exists():
            known_machine, known = read_tuned(out)
            if known_machine == machine:
                entries = {(each.case, each.backend): each for each in known}
        courses: list[dict[str, Any]] = []
        found = 0
        for target in targets:
            layers = given_layers(options.layers, target) if options.layers else StepLayers()
            known_course = next((each for each in earlier if is_of(each, target, options.goal)), None)
            place = len(courses)

            def save(course: dict[str, Any], place: int = place) -> None:
                courses[place:] = [course]
                later = [each for each in earlier if not any(_same(each, one) for one in courses)]
                write_json(beside, {"schema": SCHEMA, "machine": machine, "courses": [*courses, *later]})

            name = f"{target.wanted.key} {target.selection}"
            tell = partial(_tell_of, name)
            tuning = Tuning(target.wanted, here.settings, replace(plan, layers=layers), tell, save, known_course)
            tell(f"tuning for {options.budget}")
            tuned = tuning.run()
            entries.pop((target.case.name, target.selection.backend.name), None)
            if tuned is not None:
                found += 1
                entries[tuned.case, tuned.backend] = tuned
            write_tuned(out, machine, list(entries.values()))
        if options.plot:
            from d5suite.report.tuning import draw_courses

            draw_courses(courses, options.plot)
    finally:
        interrupts.restore()
    for course in courses:
        for line in summary(course):
            print(line)
    print(f"the course is in {beside}" + f"; use {out} with pytest --tuned {out}" * bool(found))
    return 0 if found else 1


def seconds_of(text: str) -> float:
    """Return the seconds of a time such as 90s, 10m or 2h.

    Raises
    ------
    ConfigurationError
        If the text is no such time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or not float(match[1]) > 0:
        raise ConfigurationError(f"{text!r} is not a time", where="--budget", hint="Write 90s, 10m or 2h.")
    return float(match[1]) * UNITS[match[2] or "s"]


def further_knobs(options: argparse.Namespace) -> list[TuningKnob]:
    """Return the knobs that the user's options allow."""
    from d5suite.levels.knobs import TuningKnob

    found = []
    for option, name in (("precisions", "precision"), ("batch_sizes", "batch_size")):
        given = getattr(options, option)
        if given is None:
            continue
        values = tuple(each.strip() for each in given.split(","))
        where = f"--{option.replace('_', '-')} {given}"
        if len(set(values)) < max(2, len(values)):
            raise ConfigurationError("give two or more, all different; the first is the default", where=where)
        if name == "batch_size" and not all(each.isascii() and each.isdigit() and int(each) > 0 for each in values):
            raise ConfigurationError("batch sizes are whole numbers from 1 on", where=where)
        found.append(TuningKnob(name, values, "the user"))
    return found


def chosen_targets(
    targets: list[BenchmarkTarget], measurement: str | None, goal: str = "time"
) -> list[BenchmarkTarget]:
    """Return one measurement of each case and backend.

    It is the named one, or training to a target if that is the goal. Otherwise it has the highest
    level of those whose samples can be taken in turn, or of those with several ranks if there are
    any.

    Raises
    ------
    ConfigurationError
        If there is none, or the named one does not train to a target, but the goal asks for it.
    """
    able = [each for each in targets if each.ranks is None or each.ranks.size > 1]

    def fits(each: BenchmarkTarget) -> bool:
        if measurement is not None:
            return each.measurement.name == measurement
        if goal == ACCURACY or each.measurement.trains:
            return goal == ACCURACY and each.measurement.trains
        return each.ranks is not None or each.measurement.takes_turns

    fitting = [each for each in able if fits(each)]
    together = [each for each in fitting if each.ranks is not None]
    found: dict[tuple[str, str], BenchmarkTarget] = {}
    for each in together or fitting:
        key = each.case.name, each.wanted.runner
        if key not in found or each.measurement.level > found[key].measurement.level:
            found[key] = each
    if not found:
        names = ", ".join(dict.fromkeys(each.measurement.name for each in able))
        lacking = "; none of them trains to a target" * (goal == ACCURACY)
        raise ConfigurationError(
            "there is nothing to tune", hint=f"Measurements that can be tuned: {names or 'none'}{lacking}."
        )
    for each in found.values():
        if goal == ACCURACY and not each.measurement.trains:
            raise ConfigurationError(f"{each.measurement.name} does not train to a target", where=f"--goal {goal}",
                                     hint="Leave --measurement out.")  # fmt: skip
    return list(found.values())


SAME = ("case", "measurement", "backend", "mode", "goal", "ranks")
"""What an earlier course must have in common to be resumed."""


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all((one.get(name) or "") == (other.get(name) or "") for name in SAME)


def is_of(course: dict[str, Any], target: BenchmarkTarget, goal: str) -> bool:
    """Return whether an earlier course searched for the same measurement, backend and goal."""
    backend, mode = target.selection.backend.name, target.selection.mode
    mine = (target.case.name, target.measurement.name, backend, mode, goal, str(target.ranks or ""))
    return _same(course, dict(zip(SAME, mine, strict=True)))


def _courses(content: Any, path: Path) -> list[dict[str, Any]]:
    from d5suite.report.tuning import SCHEMA

    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("courses"), list):
        raise ConfigurationError("not the course of a search", where=str(path), hint="Leave --resume out.")
    return [each for each in content["courses"] if isinstance(each, dict)]


def given_layers(path: Path, target: BenchmarkTarget) -> StepLayers:
    """Return a case's layers from a result, if possible those of the measurement that is tuned.

    Raises
    ------
    ConfigurationError
        If the file has no layer times of this case.
    """
    from d5suite.report.reading import load_results

    found = [
        (title == target.wanted.key, layers)
        for (title, _, _), record in load_results(path).items()
        if title.partition("/")[0] == target.case.name and (layers := layers_of(record)).shares
    ]
    if not found:
        raise ConfigurationError(f"there are no layer times of {target.case.name}", where=f"--layers {path}",
                                 hint="Measure with --passes layers.")  # fmt: skip
    same, layers = max(found, key=lambda each: each[0])
    return layers if same else replace(layers, works=())


def layers_of(record: Mapping[str, Any]) -> StepLayers:
    """Return a record's layer times as parts of all that was timed, and the counted work."""
    from d5suite.levels.knobs import UPDATE
    from d5suite.report.roofline import timed_nodes
    from d5suite.tuning.proposals import StepLayers

    part = record.get("layers") or {}
    sums: dict[str, float] = {}
    works = []
    if not part.get("times"):
        return StepLayers()
    for _, operator, work in timed_nodes(part):
        sums[operator] = sums.get(operator, 0.0) + work.seconds
        works.append(work)
    sums[UPDATE] = float((part.get("other") or {}).get("optimizer") or 0.0)
    total = sum(sums.values())
    return StepLayers({name: each / total for name, each in sums.items() if each > 0} if total > 0 else {}, works)


def summary(course: dict[str, Any]) -> list[str]:
    """Return what a course found, in lines."""
    name = f"{course['case']}/{course['measurement']} {course['backend']}"
    decision = course.get("decision") or {"taken": False, "reason": "it was interrupted"}
    trials, goal = course["trials"], course.get("goal", "time")
    counts = {status: sum(each["status"] == status for each in trials) for status in ("pruned", "wrong", "failed")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    lines = [f"{name}: {len(trials)} trials of {course['size']} candidates in {course.get('seconds', 0):.0f} s"
             + (f" ({told})" if told else "")]  # fmt: skip
    for each in course.get("wrong", []):
        knobs = ", ".join(f"{knob}={value}" for knob, value in each["knobs"].items())
        fast = "" if each["time"] is None else f"faster but wrong ({each['time']:.2f} times): " * (each["time"] < 1)
        lines.append(f"  {fast or 'wrong: '}{knobs}: {each['reason']}")
    if not decision["taken"]:
        lines.append(f"  the default is kept: {decision['reason']}")
    for part in course.get("ablation", []) if decision["taken"] else ():
        if part["stays"] and part["without"]:
            unit = "as long" if goal in ("time", ACCURACY) else f"the {goal}"
            lines.append(f"  {part['knob']} = {part['value']}: without it {part['without']:.3f} times {unit}")
    of_taken = (
        (f"{goal}_versus_default", f"needs {{}} times the {goal} of d5suite's default"),
        ("versus_default", "takes {} times as long as d5suite's default"),
        ("versus_stock", "takes {} times as long as stock"),
    )
    of_default = (("default_versus_stock", "d5suite's default takes {} times as long as stock"),)
    for over, text in of_taken if decision["taken"] else of_default:
        if over in course.get("confirmed", {}):
            value, *interval = course["confirmed"][over]
            between = f" ({interval[0]:.3f} to {interval[1]:.3f})" if len(interval) == 2 else ""
            lines.append(f"  {text.format(f'{value:.3f}')}{between}")
    return lines


def _tell_of(name: str, what: str) -> None:
    from d5suite.report.reading import printable

    print(f"d5suite tune: {name}: {printable(what)}", file=sys.stderr, flush=True)
