"""Figures of a report: a rule makes each from named places in the raw data, and can make it again.

A place is ``FILE#POINTER``: a file in the study's folder, and a JSON Pointer (RFC 6901) as in a
URI's fragment. Places joined by ``&`` are one comparison.
"""

from __future__ import annotations

import html.parser
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from d5suite.errors import ConfigurationError, D5Error, JobError
from d5suite.files import read_json
from d5suite.models.ceilings import read_ceilings
from d5suite.report.compare import TableRow, failures, is_reduced
from d5suite.report.contests import Contest, ratio_between
from d5suite.report.formats import figure, times
from d5suite.report.page.facts import seconds
from d5suite.report.reading import results_of
from d5suite.report.roofline import rooflines
from d5suite.report.scaling import size_text
from d5suite.statistics.decisions import Threshold
from d5suite.statistics.ratios import Ratio

BETWEEN_RUNS = Threshold().between_runs
"""By how much medians vary between processes that took no turns; see `Threshold`."""

RECORD = "/extra_info/d5suite"
"""Where the record is inside a benchmark: a JSON Pointer."""


class StatedFigure(NamedTuple):
    """A number that a report states.

    Attributes
    ----------
    rule : str
        A key of `RULES`; an argument may follow after a colon.
    places : tuple of str
    form : str
        A key of `FORMS`.
    value : float
    """

    rule: str
    places: tuple[str, ...]
    form: str
    value: float

    @property
    def text(self) -> str:
        """The figure as the report shows it."""
        return FORMS[self.form](self.value)


FORMS: Mapping[str, Callable[[float], str]] = {
    "count": lambda value: f"{value:.0f}",
    "figure": figure,
    "time": seconds,
    "ms": lambda value: figure(1e3 * value),
    "µs": lambda value: figure(1e6 * value),
    "times": times,
    "percent": lambda value: f"{100 * value:.0f}%",
    "MiB": lambda value: figure(value / 2**20),
    "size": size_text,
    "GB/s": lambda value: figure(value / 1e9),
    "GFLOP/s": lambda value: figure(value / 1e9),
}
"""How figures are shown, by name; values are in SI units."""


@dataclass
class RawData:
    """The raw data of a study, each file read once.

    Attributes
    ----------
    folder : Path
        The study's folder.
    records : dict of (str, str) to mapping
        By file and ``benchmarks.N``, as `d5suite.report.reading.results_of` returns them.
    """

    folder: Path
    records: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    _files: dict[str, Any] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    _contests: dict[str, Contest[TableRow]] = field(default_factory=dict)
    _made: dict[tuple[str, tuple[str, ...], str], StatedFigure | None] = field(default_factory=dict)

    def content(self, name: str) -> Any:
        """Return a file's content."""
        if name not in self._files:
            self._files[name] = read_json(self.path(name), any_number=True)
        return self._files[name]

    def path(self, name: str) -> Path:
        """Return the path of a file, which lies in the folder."""
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise JobError("a figure names a file outside of the study", where=name)
        return path

    def value(self, place: str) -> Any:
        """Return what is at a place."""
        name, _, pointer = place.partition("#")
        found = self.content(name)
        for token in pointer.split("/")[1:]:
            key = unquote(token).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise JobError("there is no such value", where=place) from None
        return found

    def number(self, place: str) -> float:
        """Return the number at a place."""
        found = self.value(place)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise JobError("this is no number", where=place)
        return float(found)

    def record(self, place: str) -> Mapping[str, Any]:
        """Return the record of the benchmark at a place, or around it."""
        name, _, pointer = place.partition("#")
        key = ".".join(pointer.split("/")[1:3])
        if (name, key) not in self.records and name not in self._read:
            self._read.add(name)
            for each in results_of(self.content(name), self.path(name)).records.values():
                self.records[name, each["place"]] = each
        if (name, key) not in self.records:
            raise JobError("there is no such result", where=place)
        return self.records[name, key]

    def contest(self, place: str) -> Contest[TableRow]:
        """Return the comparison of the benchmarks at a place."""
        if place not in self._contests:
            records = [dict(self.record(each)) for each in place.split("&")]
            rows = [
                TableRow(each["measurement"], each["backend"]["name"], str(n), each) for n, each in enumerate(records)
            ]
            self._contests[place] = Contest("", "", rows, BETWEEN_RUNS)
        return self._contests[place]

    def figure(self, rule: str, places: Sequence[str], form: str) -> StatedFigure | None:
        """Return a figure; None if a value that it needs is missing."""
        key = (rule, tuple(places), form)
        if key not in self._made:
            name, _, argument = rule.partition(":")
            try:
                self._made[key] = StatedFigure(*key, float(RULES[name](self, places, argument)))
            except (D5Error, ArithmeticError, KeyError, TypeError, ValueError):  # raw data may be anything
                self._made[key] = None
        return self._made[key]


def pointer(*parts: object) -> str:
    """Return a JSON Pointer in a URI's fragment."""
    return "".join("/" + quote(str(each).replace("~", "~0").replace("/", "~1"), safe="~") for each in parts)


def place_in(place: str, path: str) -> str:
    """Return the place of a value in the record of a benchmark, by its dotted path."""
    return f"{place}{RECORD}{pointer(*path.split('.'))}"


def _ratio(raw: RawData, places: Sequence[str]) -> Ratio:
    one, other = map(raw.record, places)
    return ratio_between(one, other, BETWEEN_RUNS)


def _clear(raw: RawData, places: Sequence[str], backend: str) -> float:
    """Count comparisons with a clear winner; with ``backend``, only those that it wins."""
    contests = [each for each in map(raw.contest, places) if not each.rivals]
    return sum(backend in ("", _backend(each.leaders[0])) for each in contests)


def _backend(row: TableRow) -> str:
    return str(row.record["backend"]["name"])


def _roof(raw: RawData, places: Sequence[str], what: str) -> float:
    """Return a value of a step under the machine's roof."""
    place, machine = places
    found, _ = rooflines({("", (), ""): raw.record(place)}, read_ceilings(raw.path(machine.partition("#")[0])))
    placed = found[0].step.placed
    return {"share": placed.share or 0.0, "flops": placed.work.flops_per_s, "intensity": placed.work.intensity}[what]


def _such(raw: RawData, places: Sequence[str], what: str) -> float:
    return sum(bool(ABOUT[what](raw.record(each))) for each in places)


ABOUT: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "passed": lambda each: not failures(each),
    "disturbed": lambda each: each["machine"]["disturbed"] or each["machine"]["reasons"],
    "reduced": is_reduced,
    "unsteady": lambda each: not each["steady"],
    "doubtful": lambda each: each.get("warnings"),
    "in turn": lambda each: each.get("turns"),
}
"""Properties by which results are counted."""

RULES: Mapping[str, Callable[[RawData, Sequence[str], str], float]] = {
    "value": lambda raw, places, _: raw.number(*places),
    "sum": lambda raw, places, _: sum(map(raw.number, places)),
    "least": lambda raw, places, _: min(map(raw.number, places)),
    "most": lambda raw, places, _: max(map(raw.number, places)),
    "median": lambda raw, places, _: statistics.median(map(raw.number, places)),
    "share": lambda raw, places, _: sum(map(raw.number, places[:-1])) / raw.number(places[-1]),
    "quotient": lambda raw, places, _: raw.number(places[0]) / raw.number(places[1]),
    "over sum": lambda raw, places, _: raw.number(places[0]) / sum(map(raw.number, places[1:])),
    "length": lambda raw, places, _: len(raw.value(*places)),
    "median length": lambda raw, places, _: statistics.median(len(raw.value(each)) for each in places),
    "least length": lambda raw, places, _: min(len(raw.value(each)) for each in places),
    "total length": lambda raw, places, _: sum(len(raw.value(each)) for each in places),
    "distinct": lambda raw, places, _: len({raw.value(each) for each in places}),
    "count": lambda raw, places, _: len([raw.value(each) for each in places]),
    "below": lambda raw, places, limit: sum(raw.number(each) < float(limit) for each in places),
    "false": lambda raw, places, _: sum(raw.value(each) is False for each in places),
    "such": _such,
    "ratio": lambda raw, places, end: float(getattr(_ratio(raw, places), end or "value")),
    "contests": lambda raw, places, _: len([raw.contest(each) for each in places]),
    "clear": _clear,
    "undecided": lambda raw, places, _: sum(bool(raw.contest(each).rivals) for each in places),
    "vetoed": lambda raw, places, _: sum(bool(raw.contest(each).vetoes) for each in places),
    "roof": _roof,
}
"""How figures are made, by name."""


class _Reader(html.parser.HTMLParser):
    """Collects the figures that a report states."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, tuple[str, ...], str, str]] = []
        self._open: tuple[str, tuple[str, ...], str] | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        if tag == "data" and own.get("data-rule"):
            form = str(own.get("data-form"))
            shared, rest = own.get("data-in") or "", str(own.get("data-places")).split(" ")
            places = tuple(shared + each for each in rest)
            self._open, self._text = (str(own["data-rule"]), places, form), ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "data" and self._open is not None:
            self.found.append((*self._open, self._text))
            self._open = None


def check_report(folder: Path, name: str = "report.html") -> tuple[int, list[str]]:
    """Make every figure of a report again from the raw data, and compare.

    Parameters
    ----------
    folder : Path
        The study's folder.
    name : str
        The report's file in the folder.

    Returns
    -------
    count : int
        Figures that the report states.
    faults : list of str
        Those that the raw data do not give, with both texts.

    Raises
    ------
    ConfigurationError
        If there is no report.
    """
    reader, raw, faults = _Reader(), RawData(folder), list[str]()
    try:
        reader.feed((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the report cannot be read: {error}", where=str(folder / name)) from None
    for rule, places, form, text in reader.found:
        what = f"{text!r} by {rule!r} from {places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")
        made = raw.figure(rule, places, form) if rule.partition(":")[0] in RULES and form in FORMS else None
        if made is None:
            faults.append(f"{what}: the raw data do not hold it")
        elif made.text != text:
            faults.append(f"{what}: the raw data give {made.text!r}")
    return len(reader.found), faults
