"""Results of many runs: a folder that keeps the valid ones, and the levels of its benchmarks.

A run is one small JSON file with one figure per benchmark, so a folder of years is read quickly.
Wrong, failed and disturbed results are not kept. Imports rich, its neighbours and
`d5suite.statistics`.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.errors import ConfigurationError, JobError
from d5suite.files import read_json, write_json
from d5suite.report.formats import figure
from d5suite.report.outputs import refused
from d5suite.report.reading import printable
from d5suite.report.runs import BenchmarkRun, Entry, positive, read_run
from d5suite.report.thresholds import Thresholds, chosen_names
from d5suite.statistics.decisions import Costs, Threshold, current_level
from d5suite.statistics.figures import Figure
from d5suite.statistics.history import Level, LevelChange, level_changes
from d5suite.statistics.medians import Summary

SCHEMA = "d5suite-history-1"

LATEST = 200
"""Latest runs of a benchmark that are analysed: finding changes takes quadratic time."""

AHEAD = timedelta(days=1)
"""How far in the future the date of a run may lie."""

HistoryKey = tuple[str, tuple[tuple[str, str], ...]]
"""A benchmark's name and conditions."""


class HistoryPoint(NamedTuple):
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


@dataclass(frozen=True)
class AddedRun:
    """The outcome of adding a result file.

    Attributes
    ----------
    path : Path or None
        Where the run is kept; None if nothing is kept.
    benchmarks : int
        Number of benchmarks that are kept.
    left_out : list of str
        Benchmarks that are not kept, with reasons.
    noted : list of str
        Warnings of benchmarks that are kept all the same.
    wrong : bool
        Whether an answer was wrong.
    known : bool
        Whether the run was kept before.
    """

    path: Path | None
    benchmarks: int
    left_out: list[str]
    noted: list[str]
    wrong: bool
    known: bool = False


def add(folder: Path, result: Path) -> AddedRun:
    """Add the valid benchmarks of a result file.

    Parameters
    ----------
    folder : Path
        Created if it does not exist.
    result : Path
        A file of d5suite, pytest-benchmark or asv.

    Raises
    ------
    JobError, ConfigurationError
        If the file is malformed or from the future, or the folder cannot be written.
    """
    run = read_run(result)
    left_out = [f"{name}: it failed: {failed.message}" for name, failed in run.failed.items()]
    sound = []
    for entry in run.entries:
        reasons = [f"its answer was wrong: {each}" for each in entry.wrong]
        reasons += [f"disturbed: {each}" for each in entry.disturbed]
        left_out += [f"{entry.name}: {each}" for each in reasons[:1]]
        if not reasons:
            sound.append(entry)
    wrong = any(entry.wrong for entry in run.entries) or any(failed.wrong for failed in run.failed.values())
    if not sound:
        return AddedRun(None, 0, left_out, [], wrong)
    noted = [f"{entry.name}: {each}" for entry in sound for each in entry.warnings]
    with refused("the run cannot be kept", folder):
        digest = digest_of(result)
        date = utc(run) or datetime.fromtimestamp(result.stat().st_mtime, timezone.utc).isoformat()
        if datetime.fromisoformat(date) > datetime.now(timezone.utc) + AHEAD:
            raise JobError(f"its date, {date}, lies in the future", where=str(result))
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*-{digest}.json"):
            return AddedRun(path, len(sound), left_out, noted, wrong, known=True)
        path = folder / f"{date[:19].replace(':', '')}-{digest}.json"
        benchmarks = [_record(each) for each in sound]
        write_json(path, {"schema": SCHEMA, "date": date, "source": result.name, "benchmarks": benchmarks})
    return AddedRun(path, len(sound), left_out, noted, wrong)


def digest_of(result: Path) -> str:
    """Return the digest that names a file in a history."""
    return hashlib.sha256(result.read_bytes()).hexdigest()[:12]


def utc(run: BenchmarkRun) -> str:
    """Return when a run was measured, in UTC; empty if that is unknown."""
    try:
        read = datetime.fromisoformat(run.date)
        return (read if read.tzinfo else read.replace(tzinfo=timezone.utc)).astimezone(timezone.utc).isoformat()
    except ValueError:
        return ""
    except OverflowError:
        raise JobError(f"its date is {run.date}", where=str(run.path)) from None


def _record(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "conditions": entry.conditions,
        "facts": entry.facts,
        "median": entry.summary.median,
        "is_memory": entry.is_memory,
        **entry.costs._asdict(),
        **({"figures": {name: each._asdict() for name, each in entry.figures.items()}} if entry.figures else {}),
    }


def read(folder: Path) -> dict[HistoryKey, list[HistoryPoint]]:
    """Read the latest `LATEST` points of each benchmark in order of time.

    Raises
    ------
    ConfigurationError
        If the folder does not exist or holds no run.
    JobError
        If a file in it is malformed.
    """
    where, hint = str(folder), "Keep a run first: d5suite history add FOLDER RESULT.json"
    if not folder.is_dir():
        raise ConfigurationError("there is no such folder", where=where, hint=hint)
    history: dict[HistoryKey, list[HistoryPoint]] = defaultdict(list)
    for path, date, content in _contents(folder):
        seen: set[HistoryKey] = set()
        for place, given in enumerate(_listed(content, "benchmarks", path)):
            entry = _entry(given, at := f"{path}, benchmarks.{place}")
            key = _key(entry)
            if key in seen:
                raise JobError(f"{entry.name} occurs twice", where=at, hint="Remove one of them.")
            seen.add(key)
            history[key].append(HistoryPoint(date, printable(path.stem), entry))
    if not history:
        raise ConfigurationError("it holds no run", where=where, hint=hint)
    return {key: sorted(points, key=lambda point: point.date)[-LATEST:] for key, points in history.items()}


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
        content = printable(content)
        date = content.get("date")
        yield path, date if isinstance(date, str) else "", content


def _listed(content: Mapping[str, Any], name: str, path: Path) -> list[Any]:
    values = content.get(name, [])
    if not isinstance(values, list):
        raise JobError(f"{name} is not a list", where=str(path))
    return values


def retire(folder: Path, pattern: str) -> list[str]:
    """Mark benchmarks as retired: new runs are no longer expected to have them.

    Their runs stay. A retired benchmark that is measured again is expected again.

    Parameters
    ----------
    folder : Path
    pattern : str
        A name, or a shell pattern of names.

    Returns
    -------
    list of str
        The names that fit.

    Raises
    ------
    ConfigurationError
        If no name fits, or the folder cannot be written.
    JobError
        If a file in it is malformed.
    """
    names = sorted(chosen_names((name for name, _ in read(folder)), pattern))
    if not names:
        raise ConfigurationError(f"no benchmark's name fits {pattern!r}", where=str(folder))
    date = datetime.now(timezone.utc).isoformat()
    digest = hashlib.sha256(pattern.encode()).hexdigest()[:12]
    content = {"schema": SCHEMA, "date": date, "benchmarks": [], "retired": names}
    with refused("the folder cannot be written", folder):
        write_json(folder / f"{date[:19].replace(':', '')}-retired-{digest}.json", content)
    return names


def retired(folder: Path) -> dict[str, str]:
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
        Summary(positive(given.get("median"), f"{where}.median"), math.inf, 1),
        _texts(given, "conditions", where),
        _texts(given, "facts", where),
        costs=Costs(*(_figure(given, name, where) for name in Costs._fields)),
        figures=_figures(given, where),
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


def _figures(given: Mapping[str, Any], where: str) -> dict[str, Figure]:
    table = given.get("figures", {})
    if not isinstance(table, dict) or not all(isinstance(each, dict) for each in table.values()):
        raise JobError("figures is not a table of figures", where=where)
    found = {}
    for name, each in table.items():
        value, least = (_figure(each, key, f"{where}.figures.{name}") for key in ("value", "least"))
        if value is None or each.get("better") not in ("lower", "higher"):
            raise JobError("it has no value, or does not say what is better", where=f"{where}.figures.{name}")
        found[name] = Figure(value, each["better"], least or 0.0)
    return found


def _key(entry: Entry) -> HistoryKey:
    return entry.name, tuple(sorted(entry.conditions.items()))


def figures_of(points: Sequence[HistoryPoint]) -> list[float]:
    """Return each run's median."""
    return [point.entry.summary.median for point in points]


def changes(points: Sequence[HistoryPoint], threshold: Threshold) -> list[LevelChange]:
    """Return the changes of a benchmark's level, the oldest first."""
    return level_changes(figures_of(points), effect=threshold.effect)


def changes_beside(points: Sequence[HistoryPoint], threshold: Threshold) -> dict[str, list[LevelChange]]:
    """Return the changes of peak memory and of the first call, the oldest first."""
    by_cost = {}
    for what, effect in (("memory", threshold.memory), ("first call", threshold.first_call - 1)):
        known = [(place, cost) for place, point in enumerate(points) if (cost := _BESIDE[what](point.entry.costs))]
        steps = level_changes([cost for _, cost in known], effect=effect)
        by_cost[what] = [LevelChange(known[step.place][0], step.ratio) for step in steps]
    return by_cost


_BESIDE: Mapping[str, Callable[[Costs], float | None]] = {
    "memory": attrgetter("memory_bytes"),
    "first call": attrgetter("first_call_s"),
}
"""Costs beside time whose changes are dated."""


def dated(point: HistoryPoint) -> str:
    """Return the day and the name of a run."""
    return f"{point.date[:10]} ({point.run})"


def latest_level(points: Sequence[HistoryPoint], threshold: Threshold, tests: int = 1) -> tuple[Entry, Level]:
    """Return the runs since the level last changed, as an entry and as a level.

    Peak memory and the first call are the medians since these last changed.
    """
    since, level = current_level(figures_of(points), threshold, tests)
    costs = {}
    for what, changes in changes_beside(points, threshold).items():
        place = changes[-1].place if changes else 0
        costs[what] = _median(_BESIDE[what](point.entry.costs) for point in points[place:])
    error = _median(point.entry.costs.error for point in points[since:])
    summary = Summary(level.median, level.spread / math.sqrt(level.runs), level.runs)
    figures = {
        name: each._replace(value=statistics.median(_values(points[since:], name)))
        for name, each in points[-1].entry.figures.items()
    }
    costs_now = Costs(costs["memory"], costs["first call"], error)
    return replace(points[-1].entry, summary=summary, costs=costs_now, figures=figures), level


def _values(points: Sequence[HistoryPoint], name: str) -> list[float]:
    return [point.entry.figures[name].value for point in points if name in point.entry.figures]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show(
    history: Mapping[HistoryKey, Sequence[HistoryPoint]], pattern: str, thresholds: Thresholds, console: Console
) -> None:
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
    names = chosen_names((name for name, _ in history), pattern)
    chosen = {key: points for key, points in history.items() if key[0] in names}
    if not chosen:
        raise ConfigurationError(f"no benchmark's name fits {pattern!r}")
    for (name, _), points in sorted(chosen.items()):
        threshold = thresholds.of(name)
        entry, level = latest_level(points, threshold)
        steps = [("", changes(points, threshold))]
        steps += [(f"{what} ", found) for what, found in changes_beside(points, threshold).items()]
        lines = [f"{what}×{ratio:.2f} since {dated(points[place])}" for what, found in steps for place, ratio in found]
        median = f"{level.median / 2**20:.4g} MiB" if entry.is_memory else figure(1e3 * level.median)
        spread = f"{level.spread:.1%}" if level.spread < math.inf else "–"
        table.add_row(name, str(len(points)), median, spread, "\n".join(lines) or "–")
    console.print(table, highlight=False)
