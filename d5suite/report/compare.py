"""Tables of one result file, or of several side by side.

Imports rich, `d5suite.measurements` and its neighbours; knows results, never adapters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from d5suite.errors import ConfigurationError
from d5suite.files import read_json
from d5suite.measurements.tables import Column, Table
from d5suite.report.ceilings import RATES, not_believed, share_of_ceiling
from d5suite.report.contests import Competing, Contest, RatioToFastest, contests_of, is_view, notes_on, ranked
from d5suite.report.formats import text_of, with_passes
from d5suite.report.parts import negative_parts
from d5suite.report.placement import placement_lines, straggler_lines
from d5suite.report.reading import Conditions, ResultKey, data_of, printable, results_of
from d5suite.report.reading import read_benchmarks as read_benchmarks
from d5suite.report.sizes import NOTE as SIZES_NOTE
from d5suite.report.sizes import size_table
from d5suite.report.workflows import workflow_lines


class TableRow(NamedTuple):
    """A result's place in a table: measurement, backend, mark of the file, and the record."""

    measurement: str
    backend: str
    file: str
    record: dict[str, Any]


TableKey = tuple[str, Conditions]
"""A table's title and the conditions of all its results."""

_SIZES = ("preset", "batch", "image size", "classes")
"""Conditions that differ at a reduced size, beside those of the optimizer."""

WIDE = 100
"""Least columns of a terminal in which tables show more."""

MOST_COLUMNS = 10_000
"""Columns of a terminal in which every table fits."""


class _Fit(NamedTuple):
    """What a table shows: a wide terminal's columns, intervals, and columns without any value."""

    wide: bool
    of_ratios: bool
    of_medians: bool
    empty: bool = True


FITS = (_Fit(True, True, True), _Fit(False, True, True), _Fit(False, False, True), _Fit(False, True, False),
        _Fit(False, False, False), _Fit(False, False, False, empty=False))  # fmt: skip
"""From the widest to the narrowest; the first is for wide terminals."""

TIMES_FASTEST = Column("× fastest", "times_fastest", "text")
"""A row's `d5suite.report.contests.RatioToFastest`."""

_SHOWN = {
    "always": lambda wide, several: True,
    "wide": lambda wide, several: wide,
    "one file": lambda wide, several: not several,
    "wide, one file": lambda wide, several: wide and not several,
    "wide or one file": lambda wide, several: wide or not several,
}
"""`Column.shown` by name."""


LEGEND = {
    TIMES_FASTEST.heading: "time divided by the fastest backend's (95% interval for a repeat run); of backends that "
    "took turns round by round, so it is not the ratio of the medians",
    "view": "every answer is a view of memory that was there: nothing is computed or moved, so it is not ranked",
    "interval": "95% interval of the median; of 5 samples 94%, of 4 88%, of 3 75%",
    "err/tol": "largest validation error divided by its tolerance",
}
"""Meanings of headings that several tables share."""


def show(paths: Sequence[Path], console: Console, *, by_size: bool = False) -> None:
    """Print one table per recipe or family of operators, with the backends side by side.

    Failed benchmarks are listed last, after the tables of collectives by size if ``by_size``.

    Parameters
    ----------
    paths : sequence of Path
        Result files. With more than one, each row also gives its median divided by the first
        file's.
    console : rich.console.Console
    by_size : bool
    """
    found = [results_of(read_json(path, any_number=True), path) for path in paths]
    files = [(f"({number})", each.records) for number, each in enumerate(found, 1)]
    failed = [
        f"  {number} {each['group']}, {each['backend']}: {'wrong answer: ' * each['wrong']}{each['message']}"
        for (number, _), results in zip(files, found, strict=True)
        for each in (*results.failures, *results.refused)
    ]
    if len(files) > 1:
        for (number, _), path in zip(files, paths, strict=True):
            console.print(printable(f"{number} {path}"), highlight=False)
        console.print()
    else:
        failed = [line.replace("(1) ", "", 1) for line in failed]
    if any(records for _, records in files):
        show_results(files, console)
    if by_size:
        _show_sizes(files, console)
    if failed:
        console.print("\n".join(["failed, without a result:", *failed]), highlight=False)


def _show_sizes(files: Sequence[tuple[str, dict[ResultKey, dict[str, Any]]]], console: Console) -> None:
    tables = [
        size_table(" ".join([group.partition("/")[0], backend, *([name] if len(files) > 1 else [])]), info)
        for name, found in files
        for (group, _, backend), info in found.items()
        if info["measurement"] == "collectives" and not failures(info)
    ]
    if not tables:
        raise ConfigurationError("no result is of a collective", where="--by-size")
    for table in tables:
        console.print()
        console.print(table)
    console.print(SIZES_NOTE, style="dim")


def show_results(files: Sequence[tuple[str, dict[ResultKey, dict[str, Any]]]], console: Console) -> None:
    """Print the tables of results.

    Parameters
    ----------
    files : sequence
        The name of each file, and its results as `read_benchmarks` returns them.
    console : rich.console.Console
    """
    several, headings = len(files) > 1, set()
    tables = grouped(files)
    for (title, conditions), rows in tables.items():
        console.print(f"{title}  ({setting(rows[0].record)})", style="bold", highlight=False)
        differences = apart(dict(conditions), [dict(other) for its_title, other in tables if its_title == title])
        if differences:
            console.print(f"apart from others by: {', '.join(differences)}", highlight=False)
        for table in dict.fromkeys(info["table"] for *_, info in rows):
            chosen = [row for row in rows if row[3]["table"] == table]
            table = with_passes(table, [info for *_, info in chosen])
            drawn = _drawn(table, chosen, console, several=several)
            headings |= {str(column.header) for column in drawn.columns}
            headings |= {"view"} if any(is_view(row.record) for row in chosen) else set()
            console.print(drawn, highlight=False)
            console.print()
    _show_notes(files, headings, console)


def setting(info: Mapping[str, Any]) -> str:
    """Return the conditions that a reader needs to know, the most important ones first."""
    return ", ".join(setting_parts(info))


def setting_parts(info: Mapping[str, Any]) -> list[str]:
    """Return the parts of `setting`."""
    each = info["threads"] // info["ranks"]
    facts = [
        info["preset"],
        f"{info['image_size']} px" if info.get("image_size") else "",
        f"batch {info['batch_size']}" if "batch_size" in info else "",
        info["precision"],
        f"{each} thread{'s' * (each != 1)}{' per rank' * (info['level'] == 3)}",
        info["device"],
        data_of(info, 6),
    ]
    return list(filter(None, facts))


def contests_in_turn(found: Mapping[ResultKey, dict[str, Any]]) -> list[Contest[TableRow]]:
    """Return the contests between backends of a file that took turns."""
    groups: dict[tuple[str, Conditions], list[TableRow]] = defaultdict(list)
    for (group, conditions, backend), info in found.items():
        if not failures(info):
            groups[group, conditions].append(TableRow(info["measurement"], backend, "", info))
    return [contest for rows in groups.values() for contest in contests_of(rows, in_turn=True)]


def apart(own: Mapping[str, str], all_of_title: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the conditions in which the tables of a title differ, with a table's own values."""
    return [f"{name} {own.get(name, 'none')}" for name in differing(all_of_title)]


def differing(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of conditions in which tables differ."""
    names = dict.fromkeys(name for conditions in tables for name in conditions)
    return [name for name in names if len({conditions.get(name) for conditions in tables}) > 1]


def _show_notes(
    files: Sequence[tuple[str, dict[ResultKey, dict[str, Any]]]], headings: Container[str], console: Console
) -> None:
    for name, found in files:
        if lines := notes_on(contests_in_turn(found)):
            console.print("\n".join([*([name] if len(files) > 1 else []), *lines]), highlight=False)
    shown = [(f"{group}, {backend}", info) for _, found in files for (group, _, backend), info in found.items()]
    reduced = {(info["backend"]["name"], info.get("batch_size")) for _, info in shown if is_reduced(info)}
    for backend, size in sorted(reduced):
        what = f"{backend} is measured at a reduced size, batch {size}, and not ranked"
        console.print(f"† {what}: compare its images/s", highlight=False)
    for heading, reasons in (
        ("✗ failed validation, so its times mean nothing:", failures),
        ("* disturbed while measured; compare with care:", lambda info: info["machine"]["reasons"]),
        ("! measured, with a reason to doubt it:", reasons_to_doubt),
    ):
        notes = dict.fromkeys(f"  {name}: {reason}" for name, info in shown for reason in reasons(info))
        if notes:
            console.print("\n".join([heading, *notes]), highlight=False)
    for line in (
        *(f"{name}: {told}" for name, info in shown for told in negative_parts(info)),
        *_above_ceilings(shown),
        *workflow_lines([(name, info) for name, info in shown if not failures(info)]),
        *straggler_lines(shown),
        *placement_lines([info for _, info in shown]),
    ):
        console.print(line, highlight=False)
    for heading, meaning in LEGEND.items():
        if heading in headings:
            console.print(f"{heading}: {meaning}", style="dim")
    for note in dict.fromkeys(info["table"].note for _, info in shown if info["table"].note):
        console.print(note, style="dim")


def failures(info: Mapping[str, Any]) -> list[str]:
    """Return why a result fails its validation, judged from its own checks; empty if it passes."""
    validation = info["validation"]
    wrong = [
        f"{each['name']}: error {each['error']:.3g} of {each['tolerance']:.3g} accepted"
        for each in validation["checks"]
        if not passed(each)
    ]
    return wrong or ([] if validation["passed"] else ["it says so itself"])


def passed(check: Mapping[str, Any]) -> bool:
    """Return whether a check has passed, judged from its own numbers."""
    return check.get("passed", True) and check["error"] <= check["tolerance"]


def reasons_to_doubt(info: Mapping[str, Any]) -> list[str]:
    """Return the warnings of a result, and why its rates are not believed."""
    return [*info.get("warnings", []), *not_believed(info)]


def _above_ceilings(shown: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a line for each ceiling that results exceed for a known reason, with an example."""
    for rate, (kind, _) in RATES.items():
        above = [(name, share) for name, info in shown if (share := share_of_ceiling(info, rate)).why]
        if explained := [(name, share) for name, share in above if share.believed]:
            name, share = max(explained, key=lambda each: each[1].value or 0.0)
            count = f"{len(explained)} result{'s' * (len(explained) > 1)}"
            yield f"above 100% of the ceiling of {kind}: {count}; {name} ({100 * (share.value or 0):.0f}%): {share.why}"


def grouped(files: Sequence[tuple[str, dict[ResultKey, dict[str, Any]]]]) -> dict[TableKey, list[TableRow]]:
    """Return the rows of each table; those of reduced size join the only table that matches."""
    tables: dict[TableKey, list[TableRow]] = {}
    for name, found in files:
        for (group, conditions, backend), info in found.items():
            title, _, row = group.partition("." if info["level"] == 0 else "/")
            tables.setdefault((title, conditions), []).append(TableRow(row, backend, name, info))
    alike: dict[tuple[str, frozenset[tuple[str, str]]], set[TableKey]] = defaultdict(set)
    for key in tables:
        alike[_but_for_size(key)].add(key)
    for key, rows in list(tables.items()):
        if is_reduced(rows[0][3]):
            candidates = alike[_but_for_size(key)]
            if len(candidates) == 2:
                candidates.remove(key)
                tables[next(iter(candidates))] += tables.pop(key)
    return tables


def _but_for_size(place: TableKey) -> tuple[str, frozenset[tuple[str, str]]]:
    title, conditions = place
    kept = (pair for pair in conditions if pair[0] not in _SIZES and not pair[0].startswith("optimizer"))
    return title, frozenset(kept)


def is_reduced(info: Mapping[str, Any]) -> bool:
    """Return whether a result was measured at a smaller size than requested."""
    return bool(info["preset"] == "reduced")


def _drawn(table: Table, chosen: Sequence[TableRow], console: Console, *, several: bool) -> RichTable:
    """Return a table that fits.

    It drops a wide terminal's columns first, then intervals, then columns without any value, and
    wraps names last.
    """
    order = _order(chosen)
    rows = chosen if several else [row for row, _ in order]
    to_fastest = {id(row): ratio for row, ratio in order}
    names = [_name(row, several) for row in rows]
    longest = max(map(len, names))
    for fit in FITS[console.width < WIDE :]:
        ratios = [to_fastest[id(row)].text(interval=fit.of_ratios) for row in rows]
        drawn = _filled(table, rows, names, ratios, fit, 0, several=several)
        room = max(longest, table.width) - (_width(drawn, console) - console.width)
        if room >= table.width:
            break
    if room < max(longest, table.width):  # passes may add columns
        table = replace(table, width=min(longest, room))
        names = [_divided(name, room, _IN_BACKENDS) for name in names]
    return _filled(table, rows, names, ratios, fit, room, several=several)


def _order(chosen: Sequence[TableRow]) -> list[tuple[TableRow, RatioToFastest]]:
    """Sort rows by time within each measurement, the failed ones last."""
    measurements = dict.fromkeys(row.measurement for row in chosen)
    return [
        each
        for measurement in measurements
        for each in ranked([row for row in chosen if row.measurement == measurement], not_ranked)
    ]


def not_ranked(row: Competing) -> int:
    """Return 2 for a result that failed its proof, 1 for one of reduced size, 0 for any other."""
    return 2 if failures(row.record) else int(is_reduced(row.record))


def _name(row: TableRow, several: bool) -> str:
    _, backend, file, info = row
    mark = "✗" * bool(failures(info)) + "†" * is_reduced(info) + "*" * info["machine"]["disturbed"]
    mark += "!" * bool(reasons_to_doubt(info))
    return f"  {backend}{mark}" + (f" {file}" if several else "")


_IN_BACKENDS, _IN_MEASUREMENTS = re.compile(r"(?<=[^- ])(?=[- ])"), re.compile(r"(?<=[/_])(?=.)")
"""Where names may be wrapped."""


def _divided(name: str, room: int, places: re.Pattern[str], indent: int = 2) -> str:
    """Wrap a name into lines, at these places where possible; indent all lines but the first."""
    lines = [""]
    for part in places.split(name):
        if lines[-1] and len(lines[-1] + part) > room:
            lines.append(" " * indent + part.strip())
        else:
            lines[-1] += part
    return "\n".join(lines)


def _width(drawn: RichTable, console: Console) -> int:
    """Return the width of a table in a terminal that is wide enough."""
    return Measurement.get(console, console.options.update_width(MOST_COLUMNS), drawn).maximum


def _filled(
    table: Table, chosen: Sequence[TableRow], names: Sequence[str], ratios: Sequence[str], fit: _Fit, room: int, *,
    several: bool,
) -> RichTable:  # fmt: skip
    """Return a table whose measurements' names have ``room`` columns; 0 leaves the names out."""
    columns = [
        column
        for column in table.columns
        if _SHOWN[column.shown](fit.wide, several) and (fit.of_medians or column.value != "median_ci95")
    ]
    if set(ratios) - {"–"} and (fit.wide or not several):
        times = [place for place, column in enumerate(columns, 1) if column.value in ("median_s", "median_ci95")]
        columns.insert(max(times, default=len(columns)), TIMES_FASTEST)
    if not fit.empty:
        right = [row.record for row in chosen if not failures(row.record)]
        columns = [
            column for column in columns
            if column is TIMES_FASTEST or not right or any(text_of(column, record, fit.wide) != "–" for record in right)
        ]  # fmt: skip
    if several:  # before the column of errors, which is the last
        place = len(columns) - (columns[-1].value == "validation.checks")
        columns.insert(place, Column("÷ first", "over_first", "thousandths"))
    divided = any("\n" in name for name in names)
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    drawn.add_column("", overflow="fold", min_width=None if divided else table.width)
    for column in columns:
        drawn.add_column(column.heading, justify="right", no_wrap=True)
    first: dict[tuple[str, str], float] = {}
    for measurement in dict.fromkeys(measurement for measurement, *_ in chosen):
        drawn.add_row(_divided(measurement, room, _IN_MEASUREMENTS, indent=4) if room else "", style="bold")
        for name, (its_measurement, backend, _, info), ratio in zip(names, chosen, ratios, strict=True):
            if its_measurement != measurement:
                continue
            if failures(info):
                drawn.add_row(name, "failed", *("–" for _ in columns[1:]), style="red")
                continue
            first.setdefault((measurement, backend), info["median_s"])
            over_first = info["median_s"] / first[measurement, backend]
            record = {**info, "over_first": over_first, "times_fastest": ratio}
            drawn.add_row(name, *(text_of(column, record, fit.wide) for column in columns))
    return drawn
