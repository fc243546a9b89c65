"""The page of gathered results, as one HTML text. Imports jinja2 and its neighbours."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from d5suite.measurements.tables import IN_WIDE_TERMINAL
from d5suite.models.ceilings import Ceilings
from d5suite.report.compare import passed
from d5suite.report.contests import Contest, ranks_of
from d5suite.report.document import document
from d5suite.report.formats import times
from d5suite.report.history import dated, figures_of
from d5suite.report.page.facts import distinct, facts_of, rate, seconds, shortened
from d5suite.report.page.figures import draw, pictures
from d5suite.report.page.gather import MOST_ROWS, Page, Row, RowGroup, Section, command_of
from d5suite.report.page.history import BenchmarkHistory
from d5suite.report.page.history_charts import history_charts
from d5suite.report.page.layers import layer_tables
from d5suite.report.page.sentences import conditions, headline, noise, notices, subtitle, summary
from d5suite.report.page.sparklines import history_strip, lead_strip, samples_strip
from d5suite.report.page.svg import inline
from d5suite.report.page.why import why
from d5suite.report.parts import negative_parts
from d5suite.report.runs import machine_of
from d5suite.report.tuning import CourseRows
from d5suite.report.tuning import draw as draw_course
from d5suite.statistics.ratios import Ratio

LARGEST_LEAD = 100.0
"""Largest ratio on the axis of leads."""

MOST_PICTURES = 40
"""Most pictures on a page; one takes 50 kB and a tenth of a second."""

MOST_TRENDS = 12
"""Most pictures of a history on a page; changed benchmarks come first."""

MOST_TRIALS = 300
"""Most trials of a search on a page."""

MOST_CHECKS = 60
"""Most checks among a row's details."""

PARTS = (
    ("verdict", "Verdict"),
    ("grid", "Cases and backends"),
    ("cases", "Results"),
    ("why", "Why"),
    ("tuning", "Tuning"),
    ("layers", "Layers"),
    ("history", "History"),
    ("machine", "Machines"),
)


class LeadRow(NamedTuple):
    """A line of the verdict."""

    section: Section
    title: str
    measurement: str
    ranks: str
    contest: Contest[Row]
    first: Row
    lead: Ratio | None
    median: str
    rate: str
    over: list[Row]
    drawn: Markup
    label: str
    search: str
    names: dict[str, str]


class GridCell(NamedTuple):
    """Cell of the grid: the best result of a case on a backend."""

    row: Row
    text: str
    tip: str
    best: bool
    failed: bool


class GridRow(NamedTuple):
    """A line of the grid; a cell is None where there is no result."""

    section: Section
    title: str
    measurement: str
    ranks: str
    cells: list[GridCell | None]
    search: str


def render(
    page: Page, title: str, histories: Sequence[BenchmarkHistory] = (), ceilings: Ceilings | None = None,
    courses: Sequence[CourseRows] = (),
) -> str:  # fmt: skip
    """Return the page as HTML.

    Parameters
    ----------
    page : Page
    title : str
    histories : sequence of BenchmarkHistory, optional
    ceilings : Ceilings, optional
        Ceilings of the machine that made the results.
    courses : sequence of CourseRows, optional
        Rows from searches for faster settings.
    """
    from d5suite import __version__

    filters: dict[str, Callable[..., Any]] = {
        "shortened": shortened,
        "cut": _cut(page),
        "negative_parts": negative_parts,
        "times": times,
        "without_terminal": lambda note: note.replace(IN_WIDE_TERMINAL, ""),
        "drawn": _drawn,
        "told_samples": _told_samples,
        "sum_rows": lambda groups: sum(len(group.rows) + 1 for group in groups),
    }
    drawn, undrawn = _pictures(page, histories)
    explained = why(page, ceilings)
    layers, wrong = list(layer_tables(page)), [row for row in page.rows if row.failed]
    optional: dict[str, object] = {
        "history": histories, "layers": layers, "why": explained.told or explained.pictures, "tuning": courses,
    }  # fmt: skip
    content = document(
        Path(__file__).with_name("page.html"),
        filters=filters,
        page=page,
        title=title,
        subtitle=subtitle(page),
        parts=[part for part in PARTS if optional.get(part[0], True)],
        layers=layers,
        why=explained,
        tuning=[
            (each, _course_picture(each, number), max(0, len(each.trials) - MOST_TRIALS))
            for number, each in enumerate(courses)
        ],
        most_trials=MOST_TRIALS,
        pictures=drawn,
        histories=list(_divided([_history_row(each) for each in histories])),
        data=_details(page),
        notices=[*notices(page), *undrawn],
        summary=summary(page),
        leads=list(_divided(list(_leads(page)))),
        headline=headline(page),
        conditions=conditions(page),
        noise=noise(page),
        wrong=wrong,
        grid=list(_divided(list(_grid(page)))),
        environments=list(_environments(page)),
        version=__version__,
    )
    return re.sub(r">\n\s*<", "><", content)  # each gap would become a node in the browser


def _cut(page: Page) -> Callable[[str, int], str]:
    """Return a function that shortens names, so that different names of the page stay different."""
    names = [name for section, group in page.groups for name in (_title(section), section.title, group.measurement)]
    known = list(dict.fromkeys([*names, *(row.backend for row in page.rows)]))
    shorter: dict[int, dict[str, str]] = {}

    def cut(name: str, most: int = 90) -> str:
        if most not in shorter:
            shorter[most] = distinct(known, most)
        return shorter[most].get(name) or shortened(name, most)

    return cut


def _course_picture(course: CourseRows, number: int) -> Markup:
    return Markup(inline(draw_course([course]), f"t{number}", f"Course of the search: {course.title}"))  # noqa: S704


def _divided(lines: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(lines), MOST_ROWS):
        yield lines[start : start + MOST_ROWS]


def _drawn(row: Row) -> Markup:
    info = row.record
    inside = samples_strip(info["data"], info["median_ci95"], info["median_s"], row.longest)
    return Markup(inside)  # noqa: S704  numbers only


def _told_samples(row: Row) -> str:
    info = row.record
    low, high = (seconds(value) for value in info["median_ci95"])
    count = len(info["data"])
    sure = f"{info['median_ci_confidence']:.0%}"
    return (
        f"{count} sample{'s' * (count > 1)} from {seconds(min(info['data']))} to {seconds(max(info['data']))}; "
        f"median {seconds(info['median_s'])}, {low} to {high} ({sure}); {rate(info)}"
    )


def _pictures(page: Page, histories: Sequence[BenchmarkHistory]) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return the pictures of each section as markup, and notes on missing ones."""
    by_section: dict[str, list[dict[str, Any]]] = {}
    failed: list[str] = []
    total = left_out = 0
    for most, several in ((MOST_PICTURES, pictures(page, failed)), (MOST_TRENDS, history_charts(histories))):
        for number, picture in enumerate(several):
            total += 1
            if number >= most:
                left_out += 1
            elif (figure_drawn := draw(picture, failed)) is not None:
                section = picture.section.id if picture.section else "history"
                name = hashlib.sha256(f"{section} {picture.name}".encode()).hexdigest()[:12]
                svg = Markup(inline(figure_drawn, f"f{total}", picture.label))  # noqa: S704  a tree, serialised
                by_section.setdefault(section, []).append({"id": name, "label": picture.label, "svg": svg})
    notices = [shortened(each, 300) for each in failed]
    if left_out:
        notices.append(
            f"{left_out:,} of {total:,} pictures are left out, so that the page opens fast; "
            "--svg and --png write all of them."
        )
    return by_section, notices


def _history_row(history: BenchmarkHistory) -> dict[str, Any]:
    points = history.points
    figures = figures_of(points)
    memory = points[-1].entry.is_memory

    def text(value: float) -> str:
        return f"{value / 2**20:.4g} MiB" if memory else seconds(value)

    every = [("", history.changes), *((f"{what} ", changes) for what, changes in history.beside.items())]
    changed = "; ".join(
        f"{what}{times(change.ratio)}× since {dated(points[change.place])}"
        for what, changes in every
        for change in changes
    )
    drawn = Markup(history_strip(figures, [change.place for change in history.changes]))  # noqa: S704
    span = f"from {text(min(figures))} to {text(max(figures))}"
    return {
        "name": history.name,
        "conditions": history.conditions,
        "runs": len(figures),
        "first": text(figures[0]),
        "latest": text(figures[-1]),
        "drawn": drawn,
        "label": f"{len(figures)} runs, {span}, {len(history.changes)} changes",
        "changes": changed or "no change",
        "gaps": "; ".join(history.gaps),
    }


def _leads(page: Page) -> Iterator[LeadRow]:
    contests = [contest for _, group in page.groups for contest in group.contests]
    highs = [contest.standing[1][1].high for contest in contests if len(contest.results) > 1]
    largest = min(max([high for high in highs if math.isfinite(high)], default=2.0), LARGEST_LEAD)
    for section, group in page.groups:
        for contest in group.contests:
            (first, _), *others = contest.standing
            (second, lead), rivals = others[0] if others else (None, None), contest.rivals
            drawn, label = Markup(), ""
            if lead:
                drawn = Markup(lead_strip(lead.value, *lead.interval, largest))  # noqa: S704
                label = f"lead {times(lead.value)}, from {times(lead.low)} to {times(lead.high)}"
            yield LeadRow(
                section, _title(section), group.measurement, group.ranks(contest), contest, first, lead,
                "–" if rivals else seconds(first.record["median_s"]), "–" if rivals else rate(first.record),
                contest.leaders if rivals else [second] if second else [], drawn, label,
                _search(section, group, contest.results), brief([row.backend for row in contest.results]),
            )  # fmt: skip


def brief(names: Sequence[str]) -> dict[str, str]:
    """Remove the parts after a ``-`` that all names end with."""
    parts, count = [name.split("-") for name in names], 0
    most = min(map(len, parts)) - 1 if len(parts) > 1 else 0
    while count < most and len({each[-count - 1] for each in parts}) == 1:
        count += 1
    return {name: "-".join(each[: len(each) - count]) for name, each in zip(names, parts, strict=True)}


def _title(section: Section) -> str:
    return section.title + (f" ({', '.join(section.apart)})" if section.apart else "")


def _search(section: Section, group: RowGroup, rows: Sequence[Row]) -> str:
    names = " ".join(dict.fromkeys(shortened(row.backend) for row in rows))
    return shortened(f"{shortened(section.title)} {shortened(group.measurement)} {names}", 400).lower()


def _grid(page: Page) -> Iterator[GridRow]:
    for section, group in page.groups:
        for ranks in dict.fromkeys(map(group.ranks, group.contests)) or [""]:
            rows = [row for row in group.rows if not ranks or ranks_of(row.record) == ranks]
            yield GridRow(
                section, _title(section), group.measurement, ranks,
                [_cell_of(rows, name) for name in page.backends], _search(section, group, rows),
            )  # fmt: skip


def _cell_of(rows: Sequence[Row], backend: str) -> GridCell | None:
    own = [row for row in rows if row.record["backend"]["name"] == backend]
    if not own:
        return None

    def order(row: Row) -> tuple[bool, bool, bool, float]:
        ratio = row.to_fastest.ratio
        return row.failed, row.reduced, row.to_fastest.is_view, ratio.value if ratio else 0.0

    row = min(own, key=order)
    if row.failed:
        return GridCell(row, "failed", f"{row.backend}: failed its proof", False, True)
    more = f"; best of {len(own)}" if len(own) > 1 else ""
    tip = f"{row.backend}: {_told_samples(row)}{more}"
    if row.reduced:
        return GridCell(row, "other size", tip, False, False)
    found = row.to_fastest
    text = times(found.ratio.value) if found.ratio and not found.undecided else found.text()
    return GridCell(row, text, tip, found.is_fastest and not (found.undecided or found.is_close), False)


def _details(page: Page) -> dict[str, Any]:
    """Return the details of rows that the page's script shows on request."""
    conditions, versions = _Shared(), _Shared()
    rows = {}
    groups = (
        (section, shown, group) for section in page.sections for shown in section.tables for group in shown.groups
    )
    for number, (section, shown, group) in enumerate(groups):
        for row in group.rows:
            info = row.record
            own = [[shortened(k, 60), shortened(v, 300)] for k, v in section.conditions.items()]
            if row.reduced:
                own = [["preset", "reduced"], ["batch", str(info.get("batch_size", "–"))]]
            rows[row.id] = {
                "title": f"{shortened(section.title, 60)} {shortened(group.measurement, 60)}: "
                f"{shortened(row.backend, 60)}{' ' + row.file if row.file else ''}",
                "marks": [shortened(f"{mark.word}: {'; '.join(mark.reasons)}", 600) for mark in row.marks],
                "commands": _commands(page, row),
                "facts": [["times", "not shown: the answer was wrong"]] if row.failed else facts_of(info),
                "group": number,
                "figures": [
                    [shortened(column.heading, 40), *(("–", None) if row.failed else cell)]
                    for column, cell in zip(shown.columns, row.cells, strict=True)
                ],
                **_checks(info),
                "conditions": conditions.place_of(own),
                "versions": versions.place_of(_versions(info)),
            }
    return {"rows": rows, "conditions": conditions.values, "versions": versions.values}


class _Shared:
    """Values that many rows have, each stored once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def place_of(self, value: Any) -> int:
        """Return the place of a value, which is added if it is new."""
        place = self._places.setdefault(json.dumps(value), len(self.values))
        self.values += [value] * (place == len(self.values))
        return place


def _commands(page: Page, row: Row) -> list[str]:
    given = next((source.ours.get("command") for source in page.sources if source.mark == row.file), None)
    words = [str(word) for word in given] if isinstance(given, list) else []
    commands = [shortened(command_of(row.record, words), 2000)] if row.record["fullname"] else []
    if job := row.record.get("job"):
        commands.append(shortened(shlex.join(["python", "-m", "d5suite.worker", str(job)]), 2000))
    return commands


def _checks(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return checks with error and tolerance, failed ones first, and how many are left out."""
    ordered = sorted(info["validation"]["checks"], key=passed)
    shown: dict[str, Any] = {
        "checks": [
            [shortened(f"{'✓' if passed(each) else '✗'} {each['name']}", 160), each["error"], each["tolerance"]]
            for each in ordered[:MOST_CHECKS]
        ]
    }
    if left_out := ordered[MOST_CHECKS:]:
        failed = sum(not passed(each) for each in left_out)
        shown["left_out"] = f"{len(left_out)} further checks are left out here; {failed or 'none'} of them failed."
    return shown


def _versions(info: Mapping[str, Any]) -> list[list[str]]:
    backend = info["backend"]
    versions = {f"{backend['name']}, {backend['mode']}": backend["version"], **(backend.get("versions") or {})}
    return [[shortened(str(name), 60), shortened(str(value), 120)] for name, value in versions.items()]


def _environments(page: Page) -> Iterator[dict[str, Any]]:
    """Yield each machine with its software once."""
    seen: dict[str, list[Row]] = {}
    for row in page.rows:
        environment = row.record["environment"]
        told = json.dumps(
            [machine_of(environment), *(environment.get(each) for each in ("os", "python", "distributions"))]
        )
        seen.setdefault(told, []).append(row)
    for rows in seen.values():
        environment = rows[0].record["environment"]
        machine = machine_of(environment)
        python, system = (environment.get(each) or {} for each in ("python", "os"))
        facts = [*machine.items()]
        facts.append(
            ("system", f"{system.get('name', '')} {system.get('system', '')} {system.get('release', '')}".strip())
        )
        facts.append(("Python", f"{python.get('version', '')}, {python.get('compiler', '')}".strip(", ")))
        facts += [(name, str(value)) for name, value in (environment.get("virtualization") or {}).items() if value]
        facts += [(str(name), str(value)) for name, value in (environment.get("distributions") or {}).items()]
        variables = environment.get("environment_variables") or {}
        facts.append(("environment", " ".join(f"{name}={value}" for name, value in variables.items())))
        for name in page.backends:
            own = dict.fromkeys(
                ", ".join(f"{key} {value}" for key, value in _versions(row.record))
                for row in rows
                if row.record["backend"]["name"] == name
            )
            if own:
                facts.append((name, "; ".join(own)))
        yield {
            "title": f"Machine: {machine.get('CPU', 'unknown')}, {len(rows):,} result{'s' * (len(rows) > 1)}",
            "facts": [(name, value) for name, value in facts if value],
        }
