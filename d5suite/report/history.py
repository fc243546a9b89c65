"""Results of many runs: a folder that keeps what is sound, and the levels of its benchmarks.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from itertools import pairwise
from operator import attrgetter
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
from d5suite.report.verdicts import ALPHA
from d5suite.statistics.changes import Series
from d5suite.statistics.steps import P_VALUE, steps

SCHEMA = "d5suite-history-1"

LATEST = 200
"""Latest runs of a benchmark that are analysed: finding changes takes quadratic time."""

RESOLUTION = 0.002
"""Least run-to-run standard deviation of a figure: a few equal runs do not make it 0."""

WILD = 7.5
"""Median deviations beyond which a run is wild; 5 standard deviations of normal ones."""

AHEAD = timedelta(days=1)
"""By how much a run's clock may be ahead."""

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
    noted : list of str
        What is known of those kept that does not speak against them.
    wrong : bool
        Whether an answer was wrong.
    known : bool
        Whether it was kept before.
    """

    path: Path | None
    benchmarks: int
    left_out: list[str]
    noted: list[str]
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
        If the file is malformed or from the future, or the folder cannot be written.
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
        return Kept(None, 0, left_out, [], wrong)
    noted = [f"{entry.name}: {each}" for entry in sound for each in entry.warnings]
    try:
        digest = digest_of(result)
        date = utc(run) or datetime.fromtimestamp(result.stat().st_mtime, timezone.utc).isoformat()
        if datetime.fromisoformat(date) > datetime.now(timezone.utc) + AHEAD:
            raise JobError(f"its date, {date}, lies in the future", where=str(result))
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*-{digest}.json"):
            return Kept(path, len(sound), left_out, noted, wrong, known=True)
        path = folder / f"{date[:19].replace(':', '')}-{digest}.json"
        content = {
            "schema": SCHEMA,
            "date": date,
            "source": result.name,
            "benchmarks": [_record(each) for each in sound],
        }
        write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigurationError(f"the run cannot be kept: {error.strerror}", where=str(folder)) from None
    return Kept(path, len(sound), left_out, noted, wrong)


def digest_of(result: Path) -> str:
    """Return the digest by which a history knows a file."""
    return hashlib.sha256(result.read_bytes()).hexdigest()[:12]


def utc(run: Run) -> str:
    """Return when a run was measured, in UTC; empty if it does not say."""
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


def changes_beside(points: Sequence[Point], threshold: Threshold) -> dict[str, list[Step]]:
    """Return the changes of peak memory and of the first call by what changed, the oldest first."""
    found = {}
    for what, effect in (("memory", threshold.memory), ("first call", threshold.first_call - 1)):
        value = _BESIDE[what]
        known = [(point, figure) for point in points if (figure := value(point.entry))]
        places = steps([figure for _, figure in known], effect=effect) if known else []
        bounds = [0, *places, len(known)]
        levels = [_median(figure for _, figure in known[start:end]) or 1.0 for start, end in pairwise(bounds)]
        found[what] = [Step(known[place][0], levels[i + 1] / levels[i]) for i, place in enumerate(places)]
    return found


_BESIDE: Mapping[str, Callable[[Entry], float | None]] = {
    "memory": attrgetter("memory_bytes"),
    "first call": attrgetter("first_call_s"),
}
"""Figures beside time whose changes are dated."""


def with_levels_beside(base: Entry, points: Sequence[Point], threshold: Threshold) -> Entry:
    """Return a level's entry with the memory and the first call since these last changed."""
    levels = {}
    for what, found in changes_beside(points, threshold).items():
        since = next((i for i, point in enumerate(points) if found and point is found[-1].since), 0)
        levels[what] = _median(_BESIDE[what](point.entry) for point in points[since:])
    return replace(base, memory_bytes=levels["memory"], first_call_s=levels["first call"])


def level_of(points: Sequence[Point], since: int = 0) -> tuple[Entry, float]:
    """Return the runs of one level as an entry, and the standard deviation of their logarithms.

    Wild runs change neither: the middle is the median, and runs beyond `WILD` times the median
    deviation from it are left out of the standard deviation.
    """
    level = points[since:]
    logs = [math.log(point.entry.series.median) for point in level]
    middle = statistics.median(logs)
    farthest = WILD * statistics.median(abs(each - middle) for each in logs)
    near = [each for each in logs if abs(each - middle) <= farthest]
    spread = max(statistics.stdev(near), RESOLUTION) if len(near) > 1 else math.inf
    series = Series(math.exp(middle), spread / math.sqrt(len(logs)), len(logs))
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


def _dated(found: Sequence[Step], what: str = "") -> list[str]:
    return [f"{what}×{each.ratio:.2f} since {each.since.date[:10]} ({each.since.run})" for each in found]


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
        found, beside = changes(points, thresholds.of(name)), changes_beside(points, thresholds.of(name))
        since = next((i for i, point in enumerate(points) if found and point is found[-1].since), 0)
        level, spread = level_of(points, since)
        shown = level.series.median
        told = "\n".join(_dated(found) + [line for what, each in beside.items() for line in _dated(each, f"{what} ")])
        figures = f"{shown / 2**20:.4g} MiB" if level.is_memory else figure(1e3 * shown)
        table.add_row(name, str(len(points)), figures, f"{spread:.1%}" if spread < math.inf else "–", told or "–")
    console.print(table, highlight=False)
