"""The numbers of a page as CSV files; the result files have all of them, too.

Imports its neighbours.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from d5suite.report.contests import RatioToFastest
from d5suite.report.formats import at
from d5suite.report.page.gather import Page, Row
from d5suite.report.page.history import BenchmarkHistory

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet read text as a formula: https://owasp.org, CSV
Injection."""

COMMON = ("median_s", "first_call_s", "compile_s", "peak_memory_bytes", "macs", "threads", "ranks", "seed")

ENERGY = "energy.joules_per_item"
"""Column that is written if a result has it."""


def csv_files(page: Page, histories: Sequence[BenchmarkHistory]) -> dict[str, bytes]:
    """Return CSV files by name: results, samples, the fastest, and the history if there is one."""
    files = {"results.csv": _results(page), "samples.csv": _samples(page), "fastest.csv": _fastest(page)}
    if histories:
        head = ["benchmark", "conditions", "date", "run", "median_s", "changed"]
        lines = (
            [each.name, each.conditions, point.date, point.run, point.entry.summary.median, place in changed]
            for each in histories
            for changed in [{change.place for change in each.changes}]
            for place, point in enumerate(each.points)
        )
        files["history.csv"] = csv_bytes(head, lines)
    return files


def _results(page: Page) -> bytes:
    columns = dict.fromkeys(
        column.value
        for section in page.sections
        for shown in section.tables
        for column in shown.columns
        if column.value not in COMMON and column.value != "validation.checks"
    )
    if any(at(row.record, ENERGY) is not None for row in page.rows):
        columns[ENERGY] = None
    conditions = dict.fromkeys(name for section in page.sections for name in section.conditions)
    head = ["id", "file", "case", "measurement", "backend", "mode", "version", "passed", "marks", *COMMON]
    head += ["median_low_s", "median_high_s", "median_confidence", "throughput", "unit", *columns, *conditions]
    lines = []
    for section in page.sections:
        for row in section.rows:
            info = row.record
            line = [*_named(row), info["backend"]["mode"], info["backend"]["version"], not row.failed]
            line += ["".join(mark.sign for mark in row.marks), *(info.get(name) for name in COMMON)]
            line += [*info["median_ci95"], info["median_ci_confidence"]]
            line += [info["throughput"]["value"], info["throughput"]["unit"]]
            line += [_plain(at(info, path)) for path in columns]
            lines.append([*line, *(section.conditions.get(name) for name in conditions)])
    return csv_bytes(head, lines)


def _samples(page: Page) -> bytes:
    lines = ([row.id, place, seconds] for row in page.rows for place, seconds in enumerate(row.record["data"]))
    return csv_bytes(["id", "sample", "seconds"], lines)


def _fastest(page: Page) -> bytes:
    head = ["case", "measurement", "ranks", "file", "fastest", "fastest_id", "next", "next_id"]
    head += ["ratio", "low", "high", "close"]
    lines = []
    for section, group in page.groups:
        for contest in group.contests:
            (first, _), *others = contest.standing
            line: list[Any] = [section.title, group.measurement, group.ranks(contest), contest.file]
            if contest.rivals:
                line += ["undecided", None, None, None]
            else:
                line += [first.backend, first.id, *([others[0][0].backend, others[0][0].id] if others else [None] * 2)]
            line += [others[0][1].value, *others[0][1].interval] if others and not contest.vetoes else [None] * 3
            lines.append([*line, " ".join(row.backend for row in contest.leaders) if contest.rivals else ""])
    return csv_bytes(head, lines)


def _named(row: Row) -> list[str]:
    return [row.id, row.file, row.case, row.measurement, row.backend]


def _plain(value: Any) -> Any:
    if isinstance(value, RatioToFastest):
        return value.text() if value.is_view else value.value
    if isinstance(value, dict):
        return "; ".join(f"{name}={_plain(each)}" for name, each in value.items())
    return "; ".join(str(_plain(each)) for each in value) if isinstance(value, list) else value


def csv_bytes(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> bytes:
    """Return lines as a CSV file, in which no spreadsheet finds a formula."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        writer.writerow([_safe(value) for value in line])
    return target.getvalue().encode()


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
