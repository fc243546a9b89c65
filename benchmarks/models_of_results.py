"""Errors of the models against this suite's own results: memory, steps, messages, loading.

Every prediction is of what its model has not seen: networks are left out one at a time, and every
second size of a message between the smallest and the largest.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from d5suite.backends import discover
from d5suite.distributed.schemes import settings_from_dict
from d5suite.errors import ConfigurationError, D5Error
from d5suite.files import GZIP, read_json
from d5suite.models.ceilings import Ceilings, read_ceilings
from d5suite.models.communication import Link, fed_step_s
from d5suite.models.fitting import FEWEST_NETWORKS, Judged, by_network, judge
from d5suite.models.node_time import fit_once, predicted_s
from d5suite.models.peak import fit_once as fit_peak_once
from d5suite.models.peak import predicted_bytes
from d5suite.network.zoo import build, name_in
from d5suite.report.contests import rounds_of
from d5suite.report.model_points import MEASUREMENTS, PointKind, Points, points_of
from d5suite.report.reading import load_results
from d5suite.simulation import engine
from d5suite.simulation.platform import machine_figures, part_of_machine
from d5suite.simulation.simulate import Setup, node_of, simulate
from d5suite.simulation.step import from_record
from d5suite.statistics.messages import fit_line

ROOT = Path(__file__).parents[1]
SMALL = 64 << 10
"""Bytes up to which a message is small: its latency counts."""

NETWORKS = ("alexnet", "googlenet", "mobilenet_v2", "resnet50", "vgg16")
"""Networks of the zoo that are measured, at the sizes of their presets ``smoke``."""

LAUNCHES = 3
"""Of steps of one rank and of several, in turn: on a shared machine one launch may take half as
long again as the next."""

Records = Sequence[Mapping[str, Any]]


class Line(NamedTuple):
    """A row of the table."""

    what: str
    errors: Sequence[float]
    covered: float | None = None


def commands(folder: Path, backends: str, batches: str, networks: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands that measure a small set into a folder."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    chosen = ["--backend", backends] if backends else []
    files = [f"recipes/test_imagenet_{each}.py" for each in networks]
    one = ["--threads", "1"]
    yield [sys.executable, "-m", "d5suite.cli", "machine", "-o", str(folder / "machine.json"), "--threads", "1,2"]
    yield [
        *pytest, *files, "-k", "inference or training_step", "--passes", "layers,memory", *one, *chosen,
        "--sweep", f"batch-size={batches}", "--benchmark-json", str(folder / "networks.json"),
    ]  # fmt: skip
    yield [
        *pytest, "collectives/test_ping_pong.py", "collectives/test_all_reduce.py", "--preset", "standard",
        "--algorithm", "native,ring,recursive_doubling", "--ranks", "2", "--benchmark-max-time", "0.1",
        "--benchmark-json", str(folder / "collectives.json"),
    ]  # fmt: skip
    for again, ranks in itertools.product(range(LAUNCHES), ("1", "2")):  # a thread each, in turn
        yield [
            *pytest, *files[1:3], "-k", "distributed_step", "--ranks", ranks, "--scheme", "all_reduce",
            "--threads", ranks, *chosen, "--benchmark-json", str(folder / f"ranks{ranks}-{again + 1}.json"),
        ]  # fmt: skip
    yield [
        *pytest, files[0], files[1], "-k", "training_step or input_pipeline or step_breakdown", *one, *chosen,
        "--loader-workers", "1", "--benchmark-json", str(folder / "loading.json"),
    ]  # fmt: skip


def measure(folder: Path, backends: str, batches: str, networks: Sequence[str]) -> list[Path]:
    """Measure a small set; return its files. What a folder holds is not measured again."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    for command in commands(folder, backends, batches, networks):
        target = Path(next(each for each in command if each.startswith(str(folder))))
        if not target.exists():
            subprocess.run(command, cwd=ROOT, check=False)
    return sorted(each for each in folder.glob("*.json") if each.name != "machine.json")


def result_files(folder: Path) -> tuple[list[Path], Path | None]:
    """Return the result files in a folder, such as ``raw/NAME`` of a study, and its ceilings.

    Raises
    ------
    ConfigurationError
        If it has no results.
    """
    found = [path for path in sorted(folder.glob("*.json*")) if path.suffix in (".json", GZIP) and _holds_results(path)]
    if not found:
        raise ConfigurationError("this folder holds no results", where=str(folder), hint="Give raw/NAME of a study.")
    machine = folder / "machine.json"
    return found, machine if machine.exists() else None


def _holds_results(path: Path) -> bool:
    content = read_json(path)
    return isinstance(content, dict) and isinstance(content.get("benchmarks"), list)


def lines(files: Sequence[Path], machine: Path | None, *, disturbed: bool = False) -> tuple[list[Line], list[str]]:
    """Return the table's rows from result files, and what is missing."""
    records: Records = [record for path in files for record in load_results(path).values()]
    found: list[Line] = []
    missing: list[str] = []
    if machine is not None and not machine.exists():
        missing.append(f"memory and steps: there are no ceilings, because {machine.name} was not measured")
    elif machine is not None:
        own, lost = network_lines(all_points(files, read_ceilings(machine), disturbed=disturbed))
        found, missing = found + own, missing + lost
    sound = [each for each in records if disturbed or not each["machine"]["reasons"]]
    for make in (launch_lines, message_lines, rank_lines, loading_lines):
        own = list(make(sound))
        found += own
        if not own:
            missing.append(f"{make.__name__.replace('_', ' ')}: these results hold none that can be judged")
    if machine is not None and machine.exists():
        own, lost = simulated_lines(sound, machine)
        found, missing = found + own, missing + lost
    return found, missing


def all_points(files: Sequence[Path], ceilings: Ceilings, *, disturbed: bool) -> Points:
    """Return the points of all files."""
    points = Points({}, {}, {}, {})
    for path in files:
        own = points_of(load_results(path), ceilings, disturbed=disturbed)
        for kind, steps in own.steps.items():
            points.steps.setdefault(kind, []).extend(steps)
        for kind, peaks in own.peaks.items():
            points.peaks.setdefault(kind, []).extend(peaks)
        points.missing.update(own.missing)
    return points


def network_lines(points: Points) -> tuple[list[Line], list[str]]:
    """Judge peaks and steps of each backend and measurement, each network left out in turn."""
    reasons = Counter(points.missing.values())
    found, missing = [], [f"{count} results are no points: {why}" for why, count in reasons.items()]
    together: dict[str, list[Judged]] = {}
    models: Sequence[
        tuple[str, Mapping[Any, Any], Callable[..., Any], Callable[..., float | None], Callable[[Any], float]]
    ] = (
        ("peak memory", points.peaks, fit_peak_once, predicted_bytes, lambda each: each.bytes),
        ("step", points.steps, fit_once, predicted_s, lambda each: each.seconds),
    )
    for what, kinds, fit, predict, measured in models:
        for kind, own in sorted(kinds.items()):
            groups = by_network(own)
            if len(groups) < FEWEST_NETWORKS:
                missing.append(f"{what}, {kind}: {len(groups)} networks are too few")
                continue
            judged = judge(groups, fit, predict, measured)
            silent = sorted(set(groups) - {each.network for each in judged})
            if silent:
                missing.append(
                    f"{what}, {kind}: nothing is said of {', '.join(silent)}, of whose operators the others know too "
                    "little"
                )
            if judged:
                together.setdefault(f"{what}, {kind.measurement}", []).extend(judged)
                found.append(_line(f"{what}, {kind.backend}, {kind.measurement}", judged))
    return [*(_line(f"{what}, all", judged) for what, judged in together.items()), *found], missing


class ClassError(NamedTuple):
    """How far the nodes of a class are off, of networks that were left out.

    Attributes
    ----------
    kind : PointKind
    name, direction : str
        Of the class.
    share : float
        Part of the steps' time.
    networks : dict of str to float
        Predicted time over measured time, by network.
    """

    kind: PointKind
    name: str
    direction: str
    share: float
    networks: Mapping[str, float]


def class_errors(points: Points) -> Iterator[ClassError]:
    """Yield, for each kind, classes of nodes with the error of their time, the largest part first.

    Nodes that ran as one count as the class of the one with most operations.
    """
    for kind, own in sorted(points.steps.items()):
        groups = by_network(own)
        if len(groups) < FEWEST_NETWORKS:
            continue
        sums: dict[tuple[str, str], dict[str, list[float]]] = {}
        for name, steps in groups.items():
            model = fit_once([each for other, rest in groups.items() if other != name for each in rest])
            for step, timed in ((each, one) for each in steps for one in each.timed):
                main = max(timed.nodes, key=lambda each: (each.flops, each.bytes))
                both = sums.setdefault((main.family, main.direction), {}).setdefault(name, [0.0, 0.0])
                both[0] += model.nodes_s(timed.nodes, step.roof, step.far)
                both[1] += timed.seconds
        whole = sum(step.seconds for step in own)
        found = [
            ClassError(kind, *place, sum(each[1] for each in both.values()) / whole,
                       {name: one / other for name, (one, other) in both.items()})
            for place, both in sums.items()
        ]  # fmt: skip
        yield from sorted(found, key=lambda each: -each.share)


def launch_lines(records: Records) -> Iterator[Line]:
    """Tell how far launches of one step differ from its median: no model can be better."""
    errors = [
        statistics.median(launch) / each["median_s"] - 1
        for each in records
        if each["measurement"] in MEASUREMENTS and len(each.get("turns", ())) > 1
        for launch in rounds_of(each)
        if launch
    ]
    if errors:
        yield Line("one launch of a step, against the median of all", errors)


def _line(what: str, judged: Sequence[Judged]) -> Line:
    return Line(what, [each.error for each in judged], float(np.mean([each.covered for each in judged])))


def message_lines(records: Records) -> Iterator[Line]:
    """Judge lines over sizes on every second size, and algorithms by what a ping-pong takes."""
    measured = [each for each in records if each["measurement"] == "collectives"]
    errors: dict[str, list[float]] = {}
    for each in measured:
        sizes = each["sizes"]
        if len(sizes) < 4:
            continue
        left = sizes[1:-1:2]
        known = [one for one in sizes if one not in left]
        line = fit_line([one["bytes"] for one in known], [one["median_s"] for one in known])
        for one in left:
            name = "small" if one["bytes"] <= SMALL else "large"
            what = f"messages, α + β n, {name} sizes left out"
            errors.setdefault(what, []).append(line.seconds(one["bytes"]) / one["median_s"] - 1)
    yield from (Line(what, own) for what, own in sorted(errors.items()))
    links = {each["communicator"]: _link(each) for each in measured if each["recipe"] == "ping_pong"}
    for algorithm in sorted({each["algorithm"] for each in measured} - {"native"}):
        own = [each for each in measured if each["algorithm"] == algorithm and each["communicator"] in links]
        yield from (
            Line(f"{algorithm}, from ping-pong, {name} sizes", found)
            for name, found in _from_ping_pong(own, links).items()
        )


def _from_ping_pong(records: Records, links: Mapping[str, Link]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in records:
        for one in each["sizes"]:
            sent = one["traffic"]
            guess = links[each["communicator"]].seconds(sent["messages_sent"], sent["bytes_sent"])
            found.setdefault("small" if one["bytes"] <= SMALL else "large", []).append(guess / one["median_s"] - 1)
    return found


def _link(record: Mapping[str, Any]) -> Link:
    """Return what a message in one direction takes."""
    line = fit_line([one["bytes"] for one in record["sizes"]], [one["median_s"] / 2 for one in record["sizes"]])
    return Link(line.alpha_s, line.beta_s_per_byte)


def rank_lines(records: Records) -> Iterator[Line]:
    """Judge steps of several ranks: the step of one, and an all-reduce of its gradients."""
    steps = [each for each in _launched(records) if each["distributed"]["scheme"] == "all_reduce"]
    reductions = {
        (each["communicator"], each["ranks"]): each
        for each in records
        if each["measurement"] == "collectives" and each["recipe"] == "all_reduce" and each["algorithm"] == "native"
    }
    alone = {_place(each): each for each in steps if each["ranks"] == 1}
    errors = []
    for each in steps:
        reduction = reductions.get((each["distributed"]["communicator"], each["ranks"]))
        one = alone.get(_place(each))
        if reduction is None or one is None or each["ranks"] == 1:
            continue
        size = each["distributed"]["ranks"][0]["payload_bytes"]
        sizes = reduction["sizes"]
        line = fit_line([own["bytes"] for own in sizes], [own["median_s"] for own in sizes])
        errors.append((one["median_s"] + line.seconds(size)) / each["median_s"] - 1)
    if errors:
        yield Line("step of several ranks, from one rank and an all-reduce", errors)


def _launched(records: Records) -> list[dict[str, Any]]:
    """Return distributed steps on one machine, each with the median of all its launches."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in records:
        if each["measurement"] == "distributed_step" and len({one.get("host") for one in _ranks(each)}) <= 1:
            known = each["distributed"]
            how = (*(repr(known.get(name)) for name in ("scheme", "settings", "communicator", "algorithm", "native")),
                   *(each.get(name) for name in ("precision", "image_size")))  # fmt: skip
            found.setdefault((_place(each), each["ranks"], how), []).append(each)
    return [{**own[0], "median_s": statistics.median(each["median_s"] for each in own)} for own in found.values()]


def _ranks(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return record["distributed"].get("ranks") or ()


def simulated_lines(records: Records, machine: Path) -> tuple[list[Line], list[str]]:
    """Judge steps of several ranks by ``d5suite simulate`` of the step of one; also why not."""
    steps = _launched(records)
    if not any(each["ranks"] > 1 for each in steps):
        return [], []
    if problem := engine.problem():
        return [], [f"steps of several ranks, simulated: {problem}"]
    errors: dict[str, list[float]] = {}
    missing: Counter[str] = Counter()
    for each in steps:
        alone = [one for one in steps if one["ranks"] == 1 and _place(one) == _place(each)]
        alone.sort(key=lambda one: one["distributed"].get("settings") != each["distributed"].get("settings"))
        if each["ranks"] == 1 or not alone:
            continue
        try:
            guess = simulated_s(alone[0], each, machine)
        except D5Error as error:
            missing[error.what] += 1
            continue
        errors.setdefault(_describe(each["distributed"]["settings"]), []).append(guess / each["median_s"] - 1)
    reasons = [f"{count} steps of several ranks are not simulated: {why}" for why, count in missing.items()]
    return [Line(f"step of several ranks, simulated, {what}", found) for what, found in errors.items()], reasons


def _describe(settings: Mapping[str, Any]) -> str:
    """Return the name of a scheme, with its order and whether it overlaps the backward pass."""
    order = f" in order {settings['order']}" if settings.get("order") else ""
    return f"{settings['name']}{order}{'' if settings.get('overlap', True) else ' without overlap'}"


def simulated_s(one: Mapping[str, Any], several: Mapping[str, Any], machine: Path) -> float:
    """Return the seconds of a step of several ranks, from the record of one.

    Raises
    ------
    D5Error
        If it cannot be simulated, or the machine file lacks what the ranks share.
    """
    known, ranks = several["distributed"], several["ranks"]
    backend, name = discover()[0].get(one["backend"]["name"]), name_in(one["recipe"])
    if backend is None or name is None or "settings" not in known:
        raise ConfigurationError(f"nothing is known of the network or backend of {one['recipe']}")
    threads = several["threads"] // ranks
    roof, network, source = machine_figures(machine, transport=known["communicator"], threads=threads)
    cores = len({cpu for each in _ranks(several) for cpu in each.get("cpus", ())}) or ranks * threads
    part, lacks = part_of_machine(machine, ranks=min(ranks, cores // threads), threads=threads)
    if lacks:
        raise ConfigurationError(lacks)
    zoo = build(name, classes=one.get("classes", 1000), image_size=one.get("image_size", 224))
    step = from_record(one, zoo, roof, title=name, source=source)
    step = step if part is None else step.beside(roof, part)
    setup = Setup(
        step, settings_from_dict(known["settings"]), "ring" if known["algorithm"] == "native" else known["algorithm"],
        ranks, replace(network, island=ranks), "early gradients" not in backend.absent, None,
        node_of(step, [roof, part or roof], threads=threads, cores=cores), "shared gradients" in backend.absent,
    )  # fmt: skip
    return simulate(setup).step_s


def _place(record: Mapping[str, Any]) -> tuple[Any, ...]:
    backend = record["backend"]
    threads = record["threads"] // record.get("ranks", 1)
    return record["recipe"], backend["name"], backend["mode"], record.get("batch_size"), threads


def loading_lines(records: Records) -> Iterator[Line]:
    """Judge steps from files: the step on data that are there, and the loader alone."""
    known = {(each["measurement"], *_place(each)): each for each in records}
    errors, bound = [], 0
    for each in records:
        place = _place(each)
        step, loader = (known.get((name, *place)) for name in ("training_step", "input_pipeline"))
        if each["measurement"] != "step_breakdown" or step is None or loader is None:
            continue
        batch_s = each["batch_size"] / loader["throughput"]["value"]
        guess = fed_step_s(step["median_s"], batch_s, apart=_has_room(each, loader))
        bound += batch_s > step["median_s"]
        errors.append(guess / each["median_s"] - 1)
    if errors:
        yield Line(f"step fed by its loader, which bounds {bound} of {len(errors)}", errors)


def _has_room(step: Mapping[str, Any], loader: Mapping[str, Any]) -> bool:
    cpus = step["environment"]["cpu"].get("allowed_cpus") or ()
    return int(step["threads"]) + int(loader.get("loader_workers", 1)) <= len(cpus)


def figures(errors: Iterable[float]) -> tuple[float, float, float, float]:
    """Return mean, median, 90th percentile and worst size of errors."""
    size = np.abs(np.fromiter(errors, np.float64))
    return float(size.mean()), float(np.median(size)), float(np.percentile(size, 90)), float(size.max())
