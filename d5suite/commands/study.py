"""``d5suite study``: run a study, and write its report."""

from __future__ import annotations

import argparse
import platform
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.commands.status_line import StatusLine
from d5suite.errors import ConfigurationError, escaped
from d5suite.files import given_path, write_bytes

if TYPE_CHECKING:
    from d5suite.study.declaration import Study
    from d5suite.study.run import PlannedRun, StudyProgress
    from d5suite.study.state import MachineRuns


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "study", help="run a study that a file declares, and write its report",
        description="Run what a study declares, part by part, and write a report whose every figure names its raw "
        "data. Run it in the folder to which the study's recipe paths are relative.",
        epilog="exit codes: 0 finished, 1 a run has no result or a figure differs, 2 usage, 130 interrupted "
        "(docs/study.md)",
    )  # fmt: skip
    command.add_argument("study", type=given_path, nargs="?", metavar="STUDY.toml", help="such as studies/*.toml")
    command.add_argument("-o", "--output", type=given_path, metavar="FOLDER", help="folder for results and report")
    command.add_argument("--plan", action="store_true", help="print the runs and their expected time; run nothing")
    command.add_argument("--resume", action="store_true", help="continue: keep finished runs, repeat interrupted runs")
    parts = command.add_mutually_exclusive_group()
    parts.add_argument("--only", metavar="PART", default="", help="only this part")
    parts.add_argument(
        "--again", metavar="PART", default="", help="measure this part again; every earlier result stays until the new "
        "one is finished",
    )  # fmt: skip
    command.add_argument(
        "--budget", metavar="TIME", help="time limit for this call, such as 3h or 45m (default: the study's)"
    )
    command.add_argument(
        "--machine", metavar="NAME", help="name of this machine in the report (default: its host name)"
    )
    command.add_argument(
        "--earlier", type=given_path, metavar="FOLDER", help="an earlier run: times to expect, findings to look for"
    )
    other = command.add_mutually_exclusive_group()
    other.add_argument("--report", type=given_path, metavar="FOLDER", help="only write the report of a study's folder")
    other.add_argument(
        "--check", type=given_path, metavar="FOLDER", help="recompute every figure of a report from the raw data"
    )
    other.add_argument(
        "--pack", type=given_path, metavar="FOLDER", help="make a study's folder small enough for a repository, and "
        "write its report again",
    )  # fmt: skip
    other.add_argument(
        "--held", type=given_path, nargs=2, metavar=("OLD", "NEW"), help="print which findings of OLD held in NEW"
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    reading = options.report or options.check or options.pack or options.held
    if (options.study is None) == (reading is None):
        raise ConfigurationError("give a study to run, or one of --report, --check, --pack and --held")
    if options.held:
        return _held(*options.held)
    if options.check:
        return _check(options.check)
    if options.pack:
        return _pack(options.pack, options.earlier)
    if options.report:
        return _report(options.report, options.earlier)
    return _measure(options)


def _held(old: Path, new: Path) -> int:
    from d5suite.report.study.gathered import gather_study
    from d5suite.report.study.held import compare_studies, sentence

    held, gone = compare_studies(gather_study(old), gather_study(new))
    print(sentence(held, gone))
    for each in held:
        print(escaped(f"  {each.title} {each.measurement}: {each.old} then, {each.new} now: {each.outcome}"))
    for name in gone:
        print(escaped(f"  {name}: only the earlier run has it"))
    return 0


def _check(folder: Path) -> int:
    from d5suite.report.study.figures import check_report

    count, faults = check_report(folder)
    for each in faults:
        print(f"wrong: {each}")
    print(f"{count} figures made again from the raw data: {len(faults) or 'none'} differ{'s' * (len(faults) == 1)}")
    return int(bool(faults))


def _pack(folder: Path, earlier: Path | None) -> int:
    from d5suite.report.study.gathered import gather_study
    from d5suite.study.pack import pack

    before, after = pack(folder, gather_study(folder).drawn_series)
    print(f"raw data and job files: {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB now")
    return _report(folder, earlier)


def _report(folder: Path, earlier: Path | None) -> int:
    from d5suite.report.study.write import write_report

    for line in write_report(folder, earlier):
        print(line)
    return 0


def _measure(options: argparse.Namespace) -> int:
    from d5suite.report.study.gathered import DECLARATION
    from d5suite.study.declaration import duration, read_study
    from d5suite.study.run import measure, plan
    from d5suite.study.state import FAILED, LEFT_OUT, RAW, machines, read_state

    study = read_study(options.study, Path())
    budget = duration(options.budget, "--budget") if options.budget else study.budget_s
    if options.output is None and not options.plan:
        raise ConfigurationError("where do the results go?", hint="Give -o FOLDER, or --plan to run nothing.")
    folder = options.output or Path("study")
    state = read_state(folder / RAW / _machine_name(options.machine, folder))
    made_on, made_with = machine_here(), software_here()
    _check_hardware(state, made_on)
    earlier = machines(options.earlier) if options.earlier else ()
    planned = plan(study, state, only=options.only or options.again, again=bool(options.again), earlier=earlier)
    if options.plan:
        show_plan(study, planned, budget, state, {**made_on, **made_with})
        return 0
    if state.runs and not options.resume and not options.again:
        raise ConfigurationError(
            "this machine has results of a study here", where=str(state.folder),
            hint="Go on with --resume, or choose another folder.",
        )  # fmt: skip
    state.folder.mkdir(parents=True, exist_ok=True)
    if not (folder / DECLARATION).exists() or not options.study.samefile(folder / DECLARATION):
        write_bytes(folder / DECLARATION, options.study.read_bytes())
    show_plan(study, planned, budget, state, {**made_on, **made_with})
    shown = _Progress(state)
    try:
        measure(study, state, planned, budget_s=budget, tell=shown.tell, made_on=made_on, made_with=made_with)
    except KeyboardInterrupt:
        shown.clear()
        print(f"go on: d5suite study {options.study} --resume -o {folder}", flush=True)
        raise
    finally:
        shown.clear()
    code = _report(folder, options.earlier)
    ended = [state.runs[each.run.name] for each in planned]
    return code or int(any(each.state in (FAILED, LEFT_OUT) or each.again for each in ended))


def _machine_name(given: str | None, folder: Path) -> str:
    """Return the name that this machine has in a study's folder."""
    from d5suite.study.declaration import NAME
    from d5suite.study.state import machines

    name = given or re.sub(r"[^A-Za-z0-9_-]+", "-", platform.node()).strip("-_")[:40] or "here"
    if not NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of a machine: letters, digits, - and _", where="--machine")
    known = [each.name for each in machines(folder) if each.runs]
    if given is None and known and name not in known:
        raise ConfigurationError(
            f"the results here are of {' and '.join(known)}, and this host is called {name}", where=str(folder),
            hint=f"Give --machine {known[0]} if it is that machine, or --machine {name} to measure this one, too.",
        )  # fmt: skip
    return name


def machine_here() -> dict[str, str]:
    """Return the facts of this machine that a study notes with each run."""
    from d5suite.instruments.environment import describe
    from d5suite.report.runs import machine_of

    return {"host": platform.node(), **machine_of(describe())}


def software_here() -> dict[str, str]:
    """Return the versions that a study notes with each run: d5suite's, Python's and frameworks'."""
    from d5suite import __version__
    from d5suite.backends import discover
    from d5suite.session.tools import commit_of, git
    from d5suite.study.state import COMMIT, WITH_CHANGES

    package = Path(__file__).parents[1]
    found = {"d5suite": __version__, "Python": platform.python_version()}
    try:
        git(str(package), "ls-files", "--error-unmatch", "__init__.py", folder=package)
        found[COMMIT] = commit_of("HEAD", str(package), package)[:12]
        if git(str(package), "status", "--porcelain", "--untracked-files=no", ".", folder=package):
            found[COMMIT] += f" {WITH_CHANGES}"
    except ConfigurationError:  # it was not installed from a clone
        found.pop(COMMIT, None)
    versions = {name: each.version() for name, each in discover()[0].items()}
    return found | {name: version for name, version in versions.items() if version}


def _check_hardware(state: MachineRuns, here: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` if results under this machine's name are of another machine."""
    from d5suite.study.state import HARDWARE

    for name, run in state.runs.items():
        for fact in HARDWARE:
            was, now = run.made_on.get(fact, ""), here.get(fact, "")
            if run.sha256 and run.made_on and was != now:
                raise ConfigurationError(
                    f"{state.name} was another machine when {name} was measured: {fact} was {was or 'not there'}, and "
                    f"is {now or 'not there'}",
                    where=str(state.folder), hint="Give this machine a name of its own: --machine NAME.",
                )  # fmt: skip


def show_plan(
    study: Study, planned: list[PlannedRun], budget_s: float, state: MachineRuns, here: Mapping[str, str]
) -> None:
    """Print the runs in their order, their expected time, and whether the budget holds them."""
    print(f"{study.title}: {len(planned)} runs")
    for each in planned:
        source = "finished" if each.kept else f"{span(each.seconds)}, {each.source}"
        print(f"  {each.run.name:<28} {source:<24} {each.command}")
    for line in _changed([each for each in planned if each.kept], state, here):
        print(f"  {line}")
    left = sum(each.seconds for each in planned if not each.kept)
    fits = "they fit" if left <= budget_s else "the runs that come last will not fit"
    print(f"expected: {span(left)} of a budget of {span(budget_s)}: {fits}", flush=True)


def _changed(kept: list[PlannedRun], state: MachineRuns, here: Mapping[str, str]) -> Iterator[str]:
    """Say what has changed since finished runs were measured."""
    from d5suite.study.state import parts_by

    states = [(each.run.name, state.runs[each.run.name]) for each in kept]
    runs = [(each.part, name, {**each.made_on, **each.made_with}) for name, each in states]
    for fact in dict.fromkeys(name for *_, facts in runs for name in facts):
        for value, parts in parts_by(runs, fact).items():
            if value != here.get(fact):
                now = f"is {here[fact]} now" if fact in here else "is not there now"
                yield escaped(f"{fact} was {value} for {', '.join(parts)}, and {now}; measure again: --again PART")


def span(seconds: float) -> str:
    """Format a time as people plan with it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


class _Progress(StatusLine):
    """Progress: a line for each ended run, and on a terminal one that is updated."""

    def __init__(self, state: MachineRuns) -> None:
        super().__init__()
        self.state, self._shown_s = state, 0.0

    def tell(self, progress: StudyProgress) -> None:
        """Show progress."""
        name = progress.run.run.name
        if progress.ended is not None:
            self.clear()
            ended = progress.ended
            why = f": {ended.why}" if ended.why else ""
            print(f"[{progress.number}/{progress.count}] {name} {ended.state}, {span(ended.seconds)}{why}", flush=True)
        elif self.is_shown and time.monotonic() - self._shown_s >= 1:
            self._shown_s = time.monotonic()
            self.show(f"[{progress.number}/{progress.count}] {name}; about {span(progress.left_s)} left")
