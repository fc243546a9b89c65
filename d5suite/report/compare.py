"""Tables from result files: one file read by a person, or several side by side.

Imports rich, `d5suite.measurements` and its neighbours; knows results, never adapters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from d5suite.files import read_json
from d5suite.measurements.tables import Column, Table
from d5suite.report.contests import Contest, contests_of, ranking_lines
from d5suite.report.formats import text_of, with_passes
from d5suite.report.reading import Conditions, Key, data_of, failures_in, load_results, printable
from d5suite.report.reading import read_benchmarks as read_benchmarks


class Row(NamedTuple):
    """A result's place in a table: measurement, backend, mark of the file, and the record."""

    measurement: str
    backend: str
    file: str
    record: dict[str, Any]


Place = tuple[str, Conditions]
"""A table's title and the conditions of all its results."""

_SIZES = ("preset", "batch", "image size", "classes")
"""Conditions that differ at a reduced size, and the optimizer's."""

WIDE = 100
"""Columns of a terminal from which on tables show more."""

MOST_COLUMNS = 10_000
"""Columns of a terminal in which every table fits."""

_SHOWN = {
    "always": lambda wide, several: True,
    "wide": lambda wide, several: wide,
    "one file": lambda wide, several: not several,
    "wide, one file": lambda wide, several: wide and not several,
    "wide or one file": lambda wide, several: wide or not several,
}
"""`Column.shown` by name."""


def show(paths: Sequence[Path], console: Console) -> None:
    """Print one table per recipe or family of operators, with the backends side by side.

    What failed is named below.

    Parameters
    ----------
    paths : sequence of Path
        Result files. With more than one, each row also gives its median divided by the first
        file's.
    console : rich.console.Console
    """
    files = [(f"({number})", load_results(path)) for number, path in enumerate(paths, 1)]
    failed = [
        f"  {number} {each['group']}, {each['backend']}: {'wrong answer: ' * each['wrong']}{each['message']}"
        for (number, _), path in zip(files, paths, strict=True)
        for each in failures_in(read_json(path), path)
    ]
    if len(files) > 1:
        for (number, _), path in zip(files, paths, strict=True):
            console.print(printable(f"{number} {path}"), highlight=False)
        console.print()
    else:
        failed = [line.replace("(1) ", "", 1) for line in failed]
    if any(found for _, found in files):
        show_results(files, console)
    if failed:
        console.print("\n".join(["failed, without a result:", *failed]), highlight=False)


def show_results(files: Sequence[tuple[str, dict[Key, dict[str, Any]]]], console: Console) -> None:
    """Print the tables of results.

    Parameters
    ----------
    files : sequence
        What each file is called, and `read_benchmarks` of it.
    console : rich.console.Console
    """
    several = len(files) > 1
    tables = grouped(files)
    for (title, conditions), rows in tables.items():
        info = rows[0][3]
        setting = [info["preset"], info["device"], info["precision"]]
        if "batch_size" in info:
            setting += [f"batch {info['batch_size']}", *filter(None, [data_of(info, 6)])]
        console.print(f"{title}  ({', '.join(setting)})", style="bold", highlight=False)
        told = apart(dict(conditions), [dict(other) for its_title, other in tables if its_title == title])
        if told:
            console.print(f"apart from others by: {', '.join(told)}", highlight=False)
        for table in dict.fromkeys(info["table"] for *_, info in rows):
            chosen = [row for row in rows if row[3]["table"] == table]
            table = with_passes(table, [info for *_, info in chosen])
            console.print(_drawn(table, chosen, console, several=several), highlight=False)
    _show_notes(files, console)


def contests_in_turn(found: Mapping[Key, dict[str, Any]]) -> list[Contest[Row]]:
    """Return the contests of the backends of a file that took turns."""
    groups: dict[tuple[str, Conditions], list[Row]] = defaultdict(list)
    for (group, conditions, backend), info in found.items():
        if not failures(info):
            groups[group, conditions].append(Row(info["measurement"], backend, "", info))
    return [contest for rows in groups.values() for contest in contests_of(rows, in_turn=True)]


def apart(own: Mapping[str, str], all_of_title: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the conditions in which the tables of a title differ, with a table's own values."""
    names = dict.fromkeys(name for each in all_of_title for name in each)
    return [f"{name} {own.get(name, 'none')}" for name in names if len({each.get(name) for each in all_of_title}) > 1]


def _show_notes(files: Sequence[tuple[str, dict[Key, dict[str, Any]]]], console: Console) -> None:
    for name, found in files:
        lines = ranking_lines(contests_in_turn(found))
        if lines:
            console.print("\n".join([*([name] if len(files) > 1 else []), *lines]), highlight=False)
    shown = [(f"{group}, {backend}", info) for _, found in files for (group, _, backend), info in found.items()]
    reduced = {(info["backend"]["name"], info.get("batch_size")) for _, info in shown if is_reduced(info)}
    for backend, size in sorted(reduced):
        console.print(f"† {backend} is measured at a reduced size, batch {size}: compare its images/s", highlight=False)
    for heading, reasons in (
        ("✗ failed validation, so that its times mean nothing:", failures),
        ("* disturbed while measured; compare with care:", lambda info: info["machine"]["reasons"]),
        ("! with reasons to doubt it:", lambda info: info.get("warnings", [])),
    ):
        notes = dict.fromkeys(f"  {name}: {reason}" for name, info in shown for reason in reasons(info))
        if notes:
            console.print("\n".join([heading, *notes]), highlight=False)
    console.print("interval: of the median, 95% sure; of 5 samples 94%, of 4 88%, of 3 75%", style="dim")
    console.print("err/tol: the worst validation error as a part of what is accepted", style="dim")
    for note in dict.fromkeys(info["table"].note for _, info in shown if info["table"].note):
        console.print(note, style="dim")


def failures(info: Mapping[str, Any]) -> list[str]:
    """Return why a result fails its validation, judged from its own checks; empty if it passes."""
    validation = info["validation"]
    wrong = [
        f"{each['name']}: error {each['error']:.3g} of {each['tolerance']:.3g} accepted"
        for each in validation["checks"]
        if not each.get("passed", True) or each["error"] > each["tolerance"]
    ]
    return wrong or ([] if validation["passed"] else ["it says so itself"])


def grouped(files: Sequence[tuple[str, dict[Key, dict[str, Any]]]]) -> dict[Place, list[Row]]:
    """Return the rows of each table; those of reduced size join the only table that matches."""
    tables: dict[Place, list[Row]] = {}
    for name, found in files:
        for (group, conditions, backend), info in found.items():
            title, _, row = group.partition("." if info["level"] == 0 else "/")
            tables.setdefault((title, conditions), []).append(Row(row, backend, name, info))
    for key, rows in list(tables.items()):
        if is_reduced(rows[0][3]):
            alike = [other for other in tables if other != key and _but_for_size(other) == _but_for_size(key)]
            if len(alike) == 1:
                tables[alike[0]] += tables.pop(key)
    return tables


def _but_for_size(place: Place) -> tuple[str, dict[str, str]]:
    title, conditions = place
    return title, {name: value for name, value in conditions if name not in _SIZES and not name.startswith("optimizer")}


def is_reduced(info: Mapping[str, Any]) -> bool:
    """Return whether a result is of a smaller size than the options ask for."""
    return bool(info["preset"] == "reduced")


def _drawn(table: Table, chosen: Sequence[Row], console: Console, *, several: bool) -> RichTable:
    """Return a table that fits: it drops a wide terminal's columns first, then wraps names."""
    names = [_name(row, several) for row in chosen]
    longest = max(map(len, names))
    for wide in (True, False) if console.width >= WIDE else (False,):
        drawn = _filled(table, chosen, names, several=several, wide=wide)
        room = max(longest, table.width) - (_width(drawn, console) - console.width)
        if room >= table.width:
            break
    if room < longest:
        return _filled(table, chosen, [_divided(name, room) for name in names], several=several, wide=wide)
    return drawn


def _name(row: Row, several: bool) -> str:
    _, backend, file, info = row
    mark = "✗" * bool(failures(info)) + "†" * is_reduced(info) + "*" * info["machine"]["disturbed"]
    mark += "!" * bool(info.get("warnings"))
    return f"  {backend}{mark}" + (f" {file}" if several else "")


def _divided(name: str, room: int) -> str:
    """Wrap a name into lines, at its hyphens or spaces where possible."""
    lines = [""]
    for part in re.split(r"(?<=[^- ])(?=[- ])", name):
        if lines[-1] and len(lines[-1] + part) > room:
            lines.append(f"    {part.strip()}")
        else:
            lines[-1] += part
    return "\n".join(lines)


def _width(drawn: RichTable, console: Console) -> int:
    """Return the width of a table in a terminal that is wide enough."""
    return Measurement.get(console, console.options.update_width(MOST_COLUMNS), drawn).maximum


def _filled(table: Table, chosen: Sequence[Row], names: Sequence[str], *, several: bool, wide: bool) -> RichTable:
    columns = [column for column in table.columns if _SHOWN[column.shown](wide, several)]
    if several:  # before the column of errors, which is the last
        place = len(columns) - (columns[-1].value == "validation.checks")
        columns.insert(place, Column("÷ first", "over_first", "thousandths"))
    divided = any("\n" in name for name in names)
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    drawn.add_column("", overflow="fold", min_width=None if divided else table.width)
    for column in columns:
        drawn.add_column(column.heading, justify="right", no_wrap=True)
    first: dict[tuple[str, str], float] = {}
    for measurement in dict.fromkeys(measurement for measurement, *_ in chosen):
        drawn.add_row(measurement, style="bold")
        for name, (its_measurement, backend, _, info) in zip(names, chosen, strict=True):
            if its_measurement != measurement:
                continue
            if failures(info):
                drawn.add_row(name, "failed", *("–" for _ in columns[1:]), style="red")
                continue
            first.setdefault((measurement, backend), info["median_s"])
            record = {**info, "over_first": info["median_s"] / first[measurement, backend]}
            drawn.add_row(name, *(text_of(column, record, wide) for column in columns))
    return drawn
