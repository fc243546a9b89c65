"""Results of many runs: a folder that keeps what is sound, and what it says of a new run.

A run is one small JSON file with a figure of each benchmark, so a folder of years is read at once.
What was wrong, failed or disturbed is not kept. Imports rich, its neighbours and
`d5suite.statistics`.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.errors import ConfigurationError, JobError
from d5suite.files import read_json, write_bytes
from d5suite.report.formats import figure
from d5suite.report.reading import printable
from d5suite.report.runs import Entry, Run, positive, read_run
from d5suite.report.thresholds import Threshold, Thresholds
from d5suite.report.verdicts import (
    ALPHA,
    CONFIDENCE,
    MEMORY_BYTES,
    Comparison,
    Verdict,
    beside_time,
    differ,
    measure_of,
    missing,
    of_times,
    unpaired,
    wrong_answers,
)
from d5suite.statistics.changes import Change, Series, exp
from d5suite.statistics.steps import P_VALUE, steps

SCHEMA = "d5suite-history-1"

LATEST = 200
"""Latest runs of a benchmark that are analysed: finding changes takes quadratic time."""

LOOKED_BACK = 10
"""Latest runs whose benchmarks a new run must have: one failed run must not shrink the list."""

ENOUGH = 3
"""Fewest runs of a level needed to judge a new run."""

RESOLUTION = 0.002
"""Least spread of a figure from run to run: a few equal runs do not make it 0."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A benchmark's name and conditions."""


class Point(NamedTuple):
    """A benchmark in one run.

    Attributes
    ----------
    date, run : str
        When it was measured, and the name of the run's file.
    entry : Entry
    """

    date: str
    run: str
    entry: Entry


class Step(NamedTuple):
    """A change of a benchmark's level.

    Attributes
    ----------
    since : Point
        The first run of the new level.
    ratio : float
        The median of the new level over that of the old one.
    """

    since: Point
    ratio: float


@dataclass(frozen=True)
class Kept:
    """The outcome of adding a result file.

    Attributes
    ----------
    path : Path or None
        Where it is kept; None if nothing of it is.
    benchmarks : int
        How many are kept.
    left_out : list of str
        What is not, with reasons.
    wrong : bool
        Whether an answer was wrong.
    known : bool
        Whether it was kept before.
    """

    path: Path | None
    benchmarks: int
    left_out: list[str]
    wrong: bool
    known: bool = False


def add(folder: Path, result: Path) -> Kept:
    """Add the valid benchmarks of a result file.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    result : Path
        A file of d5suite, pytest-benchmark or asv.

    Raises
    ------
    JobError, ConfigurationError
        If the file is malformed, or the folder cannot be written.
    """
    run = read_run(result)
    left_out = [f"{name}: it failed: {failed.message}" for name, failed in run.failed.items()]
    sound = []
    for entry in run.entries:
        reasons = [f"its answer was wrong: {each}" for each in entry.wrong] + [f"disturbed: {e}" for e in entry.doubts]
        left_out += [f"{entry.name}: {each}" for each in reasons[:1]]
        if not reasons:
            sound.append(entry)
    wrong = any(entry.wrong for entry in run.entries) or any(failed.wrong for failed in run.failed.values())
    if not sound:
        return Kept(None, 0, left_out, wrong)
    try:
        digest = hashlib.sha256(result.read_bytes()).hexdigest()[:12]
        date = _utc(run.date) or datetime.fromtimestamp(result.stat().st_mtime, timezone.utc).isoformat()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{date[:19].replace(':', '')}-{digest}.json"
        if path.exists():
            return Kept(path, len(sound), left_out, wrong, known=True)
        content = {
            "schema": SCHEMA,
            "date": date,
            "source": result.name,
            "benchmarks": [_record(each) for each in sound],
        }
        write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigurationError(f"the run cannot be kept: {error.strerror}", where=str(folder)) from None
    return Kept(path, len(sound), left_out, wrong)


def _utc(date: str) -> str:
    try:
        read = datetime.fromisoformat(date)
    except ValueError:
        return ""
    return (read if read.tzinfo else read.replace(tzinfo=timezone.utc)).astimezone(timezone.utc).isoformat()


def _record(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "conditions": entry.conditions,
        "facts": entry.facts,
        "median": entry.series.median,
        "is_memory": entry.is_memory,
        "memory_bytes": entry.memory_bytes,
        "first_call_s": entry.first_call_s,
        "error": entry.error,
    }


def read(folder: Path) -> dict[Key, list[Point]]:
    """Read a folder: the points of each benchmark in order of time, the latest `LATEST`.

    Raises
    ------
    ConfigurationError
        If there is none, or it holds no run.
    JobError
        If a file in it is malformed.
    """
    where, hint = str(folder), "Keep a run first: d5suite history add FOLDER RESULT.json"
    if not folder.is_dir():
        raise ConfigurationError("there is no such folder", where=where, hint=hint)
    found: dict[Key, list[Point]] = defaultdict(list)
    for path, date, content in _contents(folder):
        seen: set[Key] = set()
        for place, given in enumerate(_listed(content, "benchmarks", path)):
            entry = _entry(given, at := f"{path}, benchmarks.{place}")
            key = _key(entry)
            if key in seen:
                raise JobError(f"{entry.name} occurs twice", where=at, hint="Remove one of them.")
            seen.add(key)
            found[key].append(Point(date, printable(path.stem), entry))
    if not found:
        raise ConfigurationError("it holds no run", where=where, hint=hint)
    return {key: sorted(points, key=lambda point: point.date)[-LATEST:] for key, points in found.items()}


def _contents(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield each file of a history with its date, printable."""
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise JobError(
                "not a run of a history",
                where=str(path),
                hint="Move it elsewhere; result files are kept by d5suite history add.",
            )
        try:
            content = printable(content)
        except RecursionError:
            raise JobError("it is nested too deeply", where=str(path)) from None
        date = content.get("date")
        yield path, date if isinstance(date, str) else "", content


def _listed(content: Mapping[str, Any], name: str, path: Path) -> list[Any]:
    found = content.get(name, [])
    if not isinstance(found, list):
        raise JobError(f"{name} is not a list", where=str(path))
    return found


def retire(folder: Path, pattern: str) -> list[str]:
    """Mark benchmarks as retired: new runs are no longer expected to have them.

    Their runs stay. A retired benchmark that is measured again is expected again.

    Parameters
    ----------
    folder : Path
    pattern : str
        A shell pattern of names.

    Returns
    -------
    list of str
        The names that fit.

    Raises
    ------
    ConfigurationError
        If none fits, or the folder cannot be written.
    JobError
        If a file in it is malformed.
    """
    names = sorted({name for name, _ in read(folder) if fnmatchcase(name, pattern)})
    if not names:
        raise ConfigurationError(f"no benchmark's name fits {pattern!r}", where=str(folder))
    date = datetime.now(timezone.utc).isoformat()
    digest = hashlib.sha256(pattern.encode()).hexdigest()[:12]
    content = {"schema": SCHEMA, "date": date, "benchmarks": [], "retired": names}
    try:
        path = folder / f"{date[:19].replace(':', '')}-retired-{digest}.json"
        write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigurationError(f"the folder cannot be written: {error.strerror}", where=str(folder)) from None
    return names


def _retired(folder: Path) -> dict[str, str]:
    """Return the time at which each benchmark was retired."""
    return {
        name: date
        for path, date, content in _contents(folder)
        for name in _listed(content, "retired", path)
        if isinstance(name, str)
    }


def _entry(given: Any, where: str) -> Entry:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise JobError("this benchmark has no name", where=where)
    return Entry(
        given["name"],
        Series(positive(given.get("median"), f"{where}.median"), math.inf, 1),
        _texts(given, "conditions", where),
        _texts(given, "facts", where),
        memory_bytes=_figure(given, "memory_bytes", where),
        first_call_s=_figure(given, "first_call_s", where),
        error=_figure(given, "error", where),
        is_memory=given.get("is_memory") is True,
    )


def _texts(given: Mapping[str, Any], name: str, where: str) -> dict[str, str]:
    table = given.get(name, {})
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise JobError(f"{name} is not a table of strings", where=where)
    return table


def _figure(given: Mapping[str, Any], name: str, where: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise JobError(f"{name} is {str(value)[:100]!r}", where=where)
    return float(value)


def _key(entry: Entry) -> Key:
    return entry.name, tuple(sorted(entry.conditions.items()))


def changes(points: Sequence[Point], threshold: Threshold, tests: int = 1) -> list[Step]:
    """Return the changes of a benchmark's level, the oldest first; so many are tested together."""
    figures = [point.entry.series.median for point in points]
    places = steps(figures, effect=threshold.effect, p_value=min(P_VALUE, ALPHA / tests))
    bounds = [0, *places, len(points)]
    levels = [statistics.median(figures[start:end]) for start, end in pairwise(bounds)]
    return [Step(points[place], levels[i + 1] / levels[i]) for i, place in enumerate(places)]


def compare_with_history(folder: Path, new: Run, thresholds: Thresholds, *, force: bool = False) -> Comparison:
    """Judge a run by many others.

    A benchmark is held to the runs since its level last changed: the interval in which the next run
    lies, as wide as those runs vary. A run beyond it is uncertain, until as many runs in a row
    agree as chance does not make. A change that this run makes visible, and that began with an
    earlier one, is a regression, too: so a slow drift is found.

    Raises
    ------
    JobError, ConfigurationError
        As `read` does.
    """
    history = read(folder)
    by_name: dict[str, list[Key]] = defaultdict(list)
    for key in history:
        by_name[key[0]].append(key)
    differences: dict[str, list[str]] = defaultdict(list)
    pairs: list[tuple[Key, Entry]] = []
    fresh: list[Entry] = []
    for entry in new.entries:
        keys = by_name.get(entry.name)
        if not keys:
            fresh.append(entry)
            continue
        key = min(keys, key=lambda key: len(differ(dict(key[1]), entry.conditions)))
        for each in differ(dict(key[1]), entry.conditions):
            differences[each].append(entry.name)
        pairs.append((key, entry))
    base = Run(folder, "history", [_level(history[key])[0] for key, _ in pairs], {})
    notes = [printable(f"{new.path}: left out: {each}") for each in new.left_out]
    if differences and not force:
        return Comparison(base, new, wrong_answers(new), dict(differences), notes)
    judged = [_judge(history[key], entry, thresholds.of(entry.name), new, max(len(pairs), 1)) for key, entry in pairs]
    judged += [missing(each, new.failed.get(each.name)) for each in _expected(history, pairs, _retired(folder))]
    judged += unpaired(new, fresh, judged)
    notes += [f"the threshold for {pattern!r} matches no benchmark" for pattern in thresholds.unmatched]
    return Comparison(base, new, judged, dict(differences), notes, forced=force)


def _level(points: Sequence[Point], since: int = 0) -> tuple[Entry, float]:
    """Return the runs of one level as an entry, and the robust spread of their logarithms.

    The median and its absolute deviations: a few wild runs change neither. The factor for few runs
    is Croux and Rousseeuw's, COMPSTAT 1992.
    """
    level = points[since:]
    logs = [math.log(point.entry.series.median) for point in level]
    middle, count = statistics.median(logs), len(logs)
    deviation = 1.4826 * statistics.median(abs(each - middle) for each in logs) * count / (count - 0.8)
    spread = max(deviation, RESOLUTION) if count > 1 else math.inf
    series = Series(math.exp(middle), spread / math.sqrt(count), count)
    entries = [point.entry for point in level]
    found = replace(
        entries[-1],
        series=series,
        memory_bytes=_median(each.memory_bytes for each in entries),
        first_call_s=_median(each.first_call_s for each in entries),
        error=_median(each.error for each in entries),
    )
    return found, spread


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _judge(points: Sequence[Point], new: Entry, threshold: Threshold, run: Run, tests: int) -> Verdict:
    before = changes(points, threshold, tests)
    since = next((i for i, point in enumerate(points) if before and point is before[-1].since), 0)
    base, spread = _level(points, since)
    notes = differ(base.facts, new.facts) + [f"reason to doubt it: {each}" for each in new.warnings]
    if new.wrong:
        return Verdict(new.name, "invalid", new.wrong, base, new, notes=notes)
    level = f"{base.series.rounds} runs since {points[since].date[:10]}"
    if base.series.rounds < ENOUGH:
        reasons = [f"only {level} to compare with; {ENOUGH} are needed"]
        return Verdict(new.name, "uncertain", reasons, base, new, notes=notes)
    shown, sure = (_prediction(base.series, spread, new, c) for c in (CONFIDENCE, 1 - ALPHA / tests))
    if new.is_memory and abs(new.series.median - base.series.median) < MEMORY_BYTES:
        return Verdict(new.name, "same", [], base, new, shown, None, [], notes)
    verdict, reasons = of_times(base, new, threshold, shown, sure, None, tests)
    figures = [point.entry.series.median for point in points[since:]]
    agreed = None if new.doubts else _agreed([*figures, new.series.median], threshold, tests)
    if agreed:
        verdict, runs, ratio = agreed
        reasons = [f"{ratio:.2f} times {measure_of(new)}, as the latest {runs} runs agree"]
    if verdict in ("slower", "faster"):
        reasons.append(f"than {level}")
        if not agreed:
            verdict = "uncertain"
            reasons.append(_asked(len(figures), tests))
    kind = "memory" if new.is_memory else "time"
    regressions = [kind] if verdict == "slower" else []
    here = Point(_utc(run.date) or datetime.now(timezone.utc).isoformat(), printable(run.path.name), new)
    fresh = [] if new.doubts else _visible(before, changes([*points, here], threshold, tests))
    if fresh and verdict != "slower":
        step = fresh[-1]
        when = f"{step.since.date[:10]} ({step.since.run})"
        reasons.append(f"{step.ratio:.2f} times {measure_of(new)} since {when}")
        verdict, regressions = ("slower", [kind]) if step.ratio > 1 else ("faster", [])
    for what, reason in beside_time(base, new, threshold):
        regressions.append(what)
        reasons.append(reason)
    return Verdict(new.name, verdict, reasons, base, new, shown, None, regressions, notes)


def _agreed(figures: Sequence[float], threshold: Threshold, tests: int) -> tuple[str, int, float] | None:
    """Return what the latest runs of a level agree on: a verdict, their number, their ratio.

    All of them lie above, or below, all earlier ones. Of n runs of one level, the latest k are the
    largest with a probability of 1 / C(n, k), whatever the noise.
    """
    for runs in range(1, len(figures) // 2 + 1):
        before, latest = figures[:-runs], figures[-runs:]
        ratio = statistics.median(latest) / statistics.median(before)
        apart = min(latest) > max(before) or max(latest) < min(before)
        if apart and max(ratio, 1 / ratio) >= 1 + threshold.effect and _sure(len(figures), runs, tests):
            return "slower" if ratio > 1 else "faster", runs, ratio
    return None


def _sure(count: int, runs: int, tests: int) -> bool:
    return ALPHA * math.comb(count, runs) >= tests


def _asked(earlier: int, tests: int) -> str:
    """Say how many runs in a row make sure that a run which stands out is no wild one."""
    needed = next((runs for runs in range(1, earlier + 1) if _sure(earlier + runs, runs, tests)), None)
    if needed is None:
        return f"one run may stand out by chance, and {earlier} earlier ones are too few to tell: measure again"
    return f"one run may stand out by chance: measure again; {needed} in a row, each added, decide"


def _visible(before: Sequence[Step], after: Sequence[Step]) -> list[Step]:
    """Return the changes that the latest run revealed; later runs may shift the others slightly."""
    return list(after[len(before) :])


def _prediction(level: Series, spread: float, new: Entry, confidence: float) -> Change:
    """Return the ratio of one more run to a level, with its prediction interval.

    Student's t interval of a next observation: Hahn and Meeker, "Statistical Intervals", 1991, 4.7.
    """
    from scipy.stats import t

    ratio = math.log(new.series.median / level.median)
    half = float(t.ppf((1 + confidence) / 2, level.rounds - 1)) * spread * math.sqrt(1 + 1 / level.rounds)
    return Change(exp(ratio), exp(ratio - half), exp(ratio + half))


def _expected(
    history: Mapping[Key, Sequence[Point]], pairs: Sequence[tuple[Key, Entry]], retired: Mapping[str, str]
) -> list[Entry]:
    """Return the benchmarks of the latest runs that this run lacks.

    Runs count that have a benchmark in common with this one, or all if none has: a folder may keep
    several machines and suites. Whatever was measured since under other conditions is not missing.
    """
    paired = {key for key, _ in pairs}
    kin = {point.run: point.date for key in paired or history for point in history[key]}
    latest = sorted(kin, key=lambda run: kin[run])[-LOOKED_BACK:]
    since = {name: history[name, conditions][-1].date for name, conditions in paired}
    return [
        points[-1].entry
        for (name, conditions), points in history.items()
        if (name, conditions) not in paired
        and points[-1].run in latest
        and points[-1].date >= since.get(name, "")
        and points[-1].date > retired.get(name, "")
    ]


def show(history: Mapping[Key, Sequence[Point]], pattern: str, thresholds: Thresholds, console: Console) -> None:
    """Print each benchmark's latest level, how its runs vary, and its changes with their runs.

    Raises
    ------
    ConfigurationError
        If no name fits the pattern.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for heading in ("runs", "latest ms", "varies by"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("changes", overflow="fold")
    chosen = {key: points for key, points in history.items() if fnmatchcase(key[0], pattern)}
    if not chosen:
        raise ConfigurationError(f"no benchmark's name fits {pattern!r}")
    for (name, _), points in sorted(chosen.items()):
        found = changes(points, thresholds.of(name))
        since = next((i for i, point in enumerate(points) if found and point is found[-1].since), 0)
        level, spread = _level(points, since)
        shown = level.series.median
        told = "\n".join(f"×{each.ratio:.2f} since {each.since.date[:10]} ({each.since.run})" for each in found)
        figures = f"{shown / 2**20:.4g} MiB" if level.is_memory else figure(1e3 * shown)
        table.add_row(name, str(len(points)), figures, f"{spread:.1%}" if spread < math.inf else "–", told or "–")
    console.print(table, highlight=False)
