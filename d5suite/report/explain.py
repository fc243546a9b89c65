"""What bounds a result, in sentences, each with the figures that it rests on.

A sentence is left out where its figure is missing, and nothing is concluded from a wrong answer or
a disturbed machine. Imports `d5suite.models` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import Ceilings, Roof, other_machine
from d5suite.models.roofline import ABOVE, ARITHMETIC, Placed, RooflineStep, Segment, TimedWork, place
from d5suite.report.ceilings import describe_share
from d5suite.report.compare import failures, setting
from d5suite.report.reading import ResultKey
from d5suite.report.roofline import SLOWED, timed_nodes

TOLD = 0.05
"""Smallest share of a step that a sentence mentions."""

MOST_OPERATORS = 4
"""Most operators of a step that sentences mention, the slowest first."""

EXPLAINED = 0.5
"""Share of a step that nodes must explain before sentences mention operators."""

AS_FAST = 1.05
"""Ratio from which on two rates count as different."""

ALMOST_ALL = 0.9
"""Part of the time at all ceilings from which on one ceiling is named alone."""

UNDECIDED = ", but their intervals overlap, so another run may turn it"
"""Follows a ratio that the samples do not decide."""


@dataclass(frozen=True)
class Sentence:
    """A sentence, and the places in the record of the figures that it rests on."""

    text: str
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """A result, and the sentences about it."""

    title: str
    backend: str
    setting: str
    sentences: list[Sentence]


@dataclass(frozen=True)
class _Given:
    """A result, all results by case, measurement and backend, and the roof above it."""

    key: ResultKey
    record: Mapping[str, Any]
    beside: Mapping[tuple[str, str, str], Sequence[tuple[ResultKey, Mapping[str, Any]]]]
    roof: Roof | None

    def others(self, *turned: str, measurement: str = "") -> Iterator[Mapping[str, Any]]:
        """Yield sound results of this case and backend that differ in the named conditions only."""
        title, conditions, backend = self.key
        wanted = (title.partition("/")[0], measurement or title.partition("/")[2], backend)
        own = {name: value for name, value in conditions if name not in turned}
        for (_, theirs, _), record in self.beside.get(wanted, ()):
            alike = {name: value for name, value in theirs if name not in turned} == own
            if alike and record is not self.record and not doubt(record):
                yield record


def explain(
    records: Mapping[ResultKey, Mapping[str, Any]], case: str | None = None, ceilings: Ceilings | None = None
) -> list[Told]:
    """Say what is known of each result.

    Parameters
    ----------
    records : mapping
        From `d5suite.report.reading.load_results`.
    case : str, optional
        Only this case, or ``case/measurement``.
    ceilings : Ceilings, optional
        Ceilings of the machine that made the results.

    Raises
    ------
    ConfigurationError
        If there is no such case, or the ceilings are another machine's.
    """
    chosen = {key: each for key, each in records.items() if case in (None, key[0], key[0].partition("/")[0])}
    if not chosen:
        known = dict.fromkeys(title.partition("/")[0] for title, _, _ in records)
        raise ConfigurationError(f"there is no case {case!r} here", hint=f"Cases: {', '.join(known)}.")
    beside: dict[tuple[str, str, str], list[tuple[ResultKey, Mapping[str, Any]]]] = {}
    for key, record in records.items():
        title, _, backend = key
        beside.setdefault((*title.partition("/")[::2], backend), []).append((key, record))
    found = []
    for (title, conditions, backend), record in chosen.items():
        sentences = doubt(record)
        if not sentences:
            roof = _roof(record, ceilings)
            given = _Given((title, conditions, backend), record, beside, roof)
            sentences = [sentence for reader in READERS for sentence in reader(given)]
        found.append(Told(title, backend, setting(record), sentences))
    return found


def doubt(record: Mapping[str, Any]) -> list[Sentence]:
    """Return why nothing is concluded from a result; empty if it is sound."""
    if wrong := failures(record):
        return [Sentence(f"its answer is wrong, so its times mean nothing: {wrong[0]}", ("validation.checks",))]
    if reasons := record["machine"]["reasons"]:
        return [
            Sentence(
                f"something disturbed the machine while it was measured, so nothing is concluded: {reasons[0]}",
                ("machine.reasons",),
            )
        ]
    return []


def _roof(record: Mapping[str, Any], ceilings: Ceilings | None) -> Roof | None:
    if ceilings is None:
        return None
    device, name = record["device"], str(record.get("device_name", ""))
    if differs := other_machine(ceilings.host, record["environment"], device, name):
        raise ConfigurationError(
            f"the machine file is of another machine: {differs}", hint="Give the file of the machine that measured."
        )
    roof = ceilings.roof(device=device, precision=record["precision"], threads=record["threads"])
    return roof if isinstance(roof, Roof) else None


def _layers(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    part = record.get("layers")
    return None if part is None or part.get("missing") else part


def _time(given: _Given) -> Iterator[Sentence]:
    record = given.record
    low, high = record["median_ci95"]
    what = "step" if record["macs"] is not None else "call" if record["level"] in (0, 3) else "sample"
    yield Sentence(
        f"a {what} takes {1e3 * record['median_s']:.3g} ms (95% interval {1e3 * low:.3g} to {1e3 * high:.3g})",
        ("median_s", "median_ci95"),
    )


def _operators(given: _Given) -> Iterator[Sentence]:
    """Say which operators take the step's time, and the part of the ceiling that they reach."""
    part = _layers(given.record)
    if part is None:
        return
    if part["coverage"] < EXPLAINED:
        yield Sentence(
            f"the profiler tells the nodes of {part['coverage']:.0%} of the step only, so nothing is said of operators",
            ("layers.coverage",),
        )
        return
    slowed = part["slowdown"] > SLOWED
    if slowed:
        yield Sentence(
            f"the profiler slows the step down {part['slowdown']:.2f} times, short nodes most: all parts are of the "
            "profiled step",
            ("layers.slowdown",),
        )
    seconds, ideal = _by_operator(part, given.roof)
    slowest = sorted(seconds, key=lambda name: -seconds[name])
    for name in slowest[:MOST_OPERATORS]:
        share = seconds[name] / part["step_s"]
        if share < TOLD:
            break
        text, figures = f"{share:.0%} of the step is in {name}", ["layers.times", "layers.step_s"]
        if placed := ideal.get(name):
            text += f", {_of_ceilings(placed, slowed)}"
            figures += ["layers.graph", "the machine file's ceilings"]
        yield Sentence(text, tuple(figures))
    lost = {name: sum(max(0.0, each.work.seconds - each.ideal_s) for each in placed) for name, placed in ideal.items()}
    most = max(lost, key=lost.__getitem__, default="")
    if most and not slowed and TOLD < lost[most] / part["step_s"] < 1:
        yield Sentence(
            f"at its ceilings {most} would take {1e3 * lost[most]:.3g} ms less, and the step be at most "
            f"{1 / (1 - lost[most] / part['step_s']):.2f} times as fast",
            ("layers.times", "layers.graph", "the machine file's ceilings"),
        )


def _of_ceilings(placed: list[Placed], slowed: bool) -> str:
    """Say what share of their ceilings nodes reach, and what a share above 1 means."""
    bounds: dict[str, float] = {}
    for each in placed:
        bounds[each.bound] = bounds.get(each.bound, 0.0) + each.ideal_s
    bound, total = max(bounds, key=bounds.__getitem__), sum(bounds.values())
    share = total / sum(each.work.seconds for each in placed)
    named = (
        f"the ceiling of {bound}" if bounds[bound] >= ALMOST_ALL * total else f"its ceilings, mostly that of {bound}"
    )
    if share <= ABOVE:
        part = f"{share:.0%}" if share >= 0.005 else "less than 1%"
        return f"{'reaching at least' if slowed else 'at'} {part} of {named}"
    why = "fewer operations are made than counted" if bound == ARITHMETIC else "a nearer cache still holds the data"
    return f"{share:.2f} times as fast as {named}: {why}, or the ceiling is too low"


def _by_operator(part: Mapping[str, Any], roof: Roof | None) -> tuple[dict[str, float], dict[str, list[Placed]]]:
    """Return seconds by operator, and places under the roof of nodes whose work is counted."""
    seconds: dict[str, float] = {}
    placed: dict[str, list[Placed]] = {}
    for _, op_type, work in timed_nodes(part):
        seconds[op_type] = seconds.get(op_type, 0.0) + work.seconds
        if roof is not None and (work.flops or work.bytes):
            placed.setdefault(op_type, []).append(place(work, roof))
    return seconds, placed


def _ceilings_of_run(given: _Given) -> Iterator[Sentence]:
    """Say which part of a ceiling an operator reaches, where its run has measured ceilings."""
    for rate, share in (given.record.get("fraction_of_ceiling") or {}).items():
        if share is not None:
            yield Sentence(
                f"it reaches {describe_share(given.record, rate)}", (f"fraction_of_ceiling.{rate}", "ceiling")
            )


def _elsewhere(given: _Given) -> Iterator[Sentence]:
    """Say what belongs to no node: the optimizer, changes of layout, time between events."""
    part = _layers(given.record)
    if part is None:
        return
    for name, seconds in part["other"].items():
        if seconds / part["step_s"] >= TOLD:
            yield Sentence(f"{seconds / part['step_s']:.0%} of the step is {name}", (f"layers.other.{name}",))
    if part["left_over_s"] / part["step_s"] >= TOLD:
        yield Sentence(
            f"{part['left_over_s'] / part['step_s']:.0%} of the step is in no event of the profiler, such as Python "
            "between two calls",
            ("layers.left_over_s",),
        )
    reorders = sum(each.get("reorder_s", 0.0) for each in part["times"])
    if reorders / part["plain_step_s"] >= TOLD:
        yield Sentence(
            f"{reorders / part['plain_step_s']:.0%} of the step is spent on changing layouts",
            ("layers.times.reorder_s", "layers.plain_step_s"),
        )


def _loader(given: _Given) -> Iterator[Sentence]:
    """Say whether the loader feeds a training step fast enough."""
    record = given.record
    if record["measurement"] != "training_step":
        return
    for other in given.others(measurement="input_pipeline"):
        loaded, trained = other["throughput"], record["throughput"]
        if loaded["unit"] != trained["unit"]:
            continue
        text = f"the loader gives {loaded['value']:.4g} {loaded['unit']} and the step takes {trained['value']:.4g}"
        figures = ["throughput.value", "throughput.value of input_pipeline"]
        cpus = record["environment"]["cpu"].get("allowed_cpus") or ()
        busy = record["threads"] + other.get("loader_workers", 1)
        if record["device"] == "cpu" and cpus and busy > len(cpus):
            both = 1 / (1 / loaded["value"] + 1 / trained["value"])
            text += f", each alone ({len(cpus)} CPU{'s' * (len(cpus) != 1)} for both do {both:.4g} together)"
            figures += ["threads", "environment.cpu.allowed_cpus"]
        is_bound = loaded["value"] / trained["value"] < AS_FAST
        text += ": the loader is the bound" if is_bound else ": the loader is not the bound"
        yield Sentence(text, tuple(figures))


def _knobs(given: _Given) -> Iterator[Sentence]:
    """Say what more threads or larger batches gain, where the file holds both."""
    record = given.record
    rate, threads, batch = record["throughput"]["value"], record["threads"], record.get("batch_size")
    fewer = [each for each in given.others("threads") if each["threads"] < threads and each["level"] != 3]
    if fewer:
        base = min(fewer, key=lambda each: each["threads"])
        gain = rate / base["throughput"]["value"]
        work = [TimedWork(1.0, 1.0, 1 / each["throughput"]["value"]) for each in (base, record)]
        one, other = (RooflineStep(each["threads"], 1, own) for each, own in zip((base, record), work, strict=True))
        serial = Segment("strong", one, other).serial_part
        said = f": serial part {serial:.0%}" if serial is not None else ""
        yield Sentence(
            f"{threads} threads give {gain:.2f} times the rate of {base['threads']}"
            + (UNDECIDED if _overlap(base, record) else said),
            ("throughput.value", f"throughput.value at {base['threads']} thread{'s' * (base['threads'] != 1)}"),
        )
    smaller = [each for each in given.others("batch") if batch and each.get("batch_size", batch) < batch]
    if smaller:
        base = min(smaller, key=lambda each: each["batch_size"])
        gain = rate / base["throughput"]["value"]
        yield Sentence(
            f"batches of {batch} give {gain:.2f} times the {record['throughput']['unit']} of {base['batch_size']}"
            + UNDECIDED * _overlap(base, record),
            ("throughput.value", f"throughput.value at batch {base['batch_size']}"),
        )


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the intervals of two rates overlap."""
    ends = []
    for each in (one, other):
        done = each["throughput"]["value"] * each["median_s"]
        low, high = each["median_ci95"]
        ends.append((done / high, done / low))
    (low, high), (least, most) = ends
    return bool(low <= most and least <= high)


def _ranks(given: _Given) -> Iterator[Sentence]:
    """Say how long ranks wait, and how much communication computing does not hide."""
    parts = (given.record.get("distributed") or {}).get("parts")
    if not parts:
        return
    step, ranks = given.record["median_s"], given.record["ranks"]
    for name, said in (("communicating", "communicating"), ("waiting", "waiting for other ranks")):
        seconds = parts.get(f"{name}_s")
        if seconds and seconds / step >= TOLD:
            text = f"{seconds / step:.0%} of a step of {ranks} ranks is {said}"
            yield Sentence(text, (f"distributed.parts.{name}_s", "median_s"))


READERS: tuple[Callable[[_Given], Iterator[Sentence]], ...] = (
    _time, _operators, _ceilings_of_run, _elsewhere, _loader, _knobs, _ranks,
)  # fmt: skip
"""Functions that make the sentences, in the order of the sentences."""


def silent(records: Mapping[ResultKey, Mapping[str, Any]], ceilings: Ceilings | None) -> list[str]:
    """Return which figures are missing from all results, and how to get them."""
    sound = [record for record in records.values() if not doubt(record)]
    missing = []
    if sound and not any(_layers(record) for record in sound):
        missing.append("times of operators: measure with --passes layers")
    elif sound and ceilings is None:
        missing.append("parts of the ceilings: d5suite machine -o FILE, then --machine FILE")
    return missing


def to_dict(told: Told) -> dict[str, Any]:
    """Return what is said as JSON values."""
    return {
        "measurement": told.title,
        "backend": told.backend,
        "setting": told.setting,
        "sentences": [{"text": each.text, "figures": list(each.figures)} for each in told.sentences],
    }
