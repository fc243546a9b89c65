"""A page's content from result files: sections of rows, verdicts, sources and machines.

Files come from anywhere: their texts are printable already (`d5suite.report.reading`), and stay
text. Imports its neighbours.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError, D5Error
from d5suite.files import read_json
from d5suite.measurements.tables import Column, Table
from d5suite.report.colours import places
from d5suite.report.compare import (
    TIMES_FASTEST,
    TableKey,
    TableRow,
    apart,
    differing,
    failures,
    grouped,
    is_reduced,
    not_ranked,
    reasons_to_doubt,
    setting_parts,
)  # fmt: skip
from d5suite.report.contests import Contest, RatioToFastest, contests_of, ranked
from d5suite.report.formats import at, text_of, with_passes, worst_share
from d5suite.report.reading import ResultKey, printable, results_of
from d5suite.report.runs import machine_of

MOST_ROWS = 80
"""Most rows of an HTML table; the browser lays out only visible tables (``content-visibility``)."""


@dataclass(frozen=True)
class Mark:
    """A reason to look twice at a result.

    Attributes
    ----------
    sign : {"✗", "†", "*", "!"}
    word : str
        The meaning of the sign.
    reasons : list of str
    """

    sign: str
    word: str
    reasons: list[str]


@dataclass
class Row:
    """One result.

    Attributes
    ----------
    id : str
        Target of links to the result; the same on every page made from the same results.
    case, measurement, backend : str
        Where it stands; the backend includes what distinguishes rows, such as ranks.
    colour : int
        Colour of its backend; see `Page.backends`.
    record : dict
    marks : list of Mark
    file : str
        Mark of its file if there are several.
    cells : list of (str, float or None)
        Text and sort key of each declared column.
    longest : float
        Seconds at which the axis of the samples ends.
    to_fastest : RatioToFastest
    """

    id: str
    case: str
    measurement: str
    backend: str
    colour: int
    record: dict[str, Any]
    marks: list[Mark]
    file: str
    cells: list[tuple[str, float | None]] = field(default_factory=list)
    longest: float = 0.0
    to_fastest: RatioToFastest = field(default_factory=RatioToFastest)

    @property
    def failed(self) -> bool:
        """Whether its answer was wrong; then its times mean nothing."""
        return any(mark.sign == "✗" for mark in self.marks)

    @property
    def reduced(self) -> bool:
        """Whether its size differs from the others in its table."""
        return any(mark.sign == "†" for mark in self.marks)


@dataclass
class RowGroup:
    """The rows of one measurement in a section, which can be compared.

    Attributes
    ----------
    measurement : str
    rows : list of Row
    contests : list of Contest
        Contests of the rows that passed their proof, have the usual size and compute something.
    """

    measurement: str
    rows: list[Row]
    contests: list[Contest[Row]]

    def ranks(self, contest: Contest[Row]) -> str:
        """Return the ranks and scheme of a contest; empty if all contests have the same."""
        return contest.ranks if len({each.ranks for each in self.contests}) > 1 else ""


@dataclass
class PageTable:
    """The groups of one declared table."""

    table: Table
    groups: list[RowGroup]

    @property
    def columns(self) -> tuple[Column, ...]:
        """All declared columns: a page is wide, and scrolls where it is not."""
        return self.table.columns

    @property
    def parts(self) -> Iterator[list[RowGroup]]:
        """Groups for one HTML table each, of at most `MOST_ROWS` rows if no group has more."""
        part: list[RowGroup] = []
        for group in self.groups:
            if part and sum(len(each.rows) for each in part) + len(group.rows) > MOST_ROWS:
                yield part
                part = []
            part.append(group)
        yield part


@dataclass
class Section:
    """The results of a recipe or a family of operators under one set of conditions."""

    id: str
    title: str
    setting: list[str]
    apart: list[str]
    conditions: dict[str, str]
    tables: list[PageTable]

    @property
    def rows(self) -> Iterator[Row]:
        """All rows, in order."""
        return (row for table in self.tables for group in table.groups for row in group.rows)

    @property
    def records(self) -> dict[ResultKey, dict[str, Any]]:
        """The records as `d5suite.report.reading` has them; files are told apart by their marks."""
        conditions = tuple(self.conditions.items())
        names = ((row, " ".join(filter(None, (row.backend, row.file)))) for row in self.rows)
        return {(f"{row.case}/{row.measurement}", conditions, name): row.record for row, name in names}

    @property
    def level(self) -> int:
        """The benchmark level."""
        return int(next(self.rows).record["level"])


@dataclass
class ResultFile:
    """A result file.

    Attributes
    ----------
    name : str
        The file's path, as given.
    mark : str
        Short name in rows if there are several files.
    content : mapping
        The file's content without its benchmarks.
    results : int
    series : str
        Says whether its series are there.
    left_out : str
        Why its results are not shown; empty if they are.
    refused : list of mapping
        See `d5suite.report.reading.Results`.
    """

    name: str
    mark: str
    path: Path
    content: Mapping[str, Any]
    results: int = 0
    series: str = ""
    left_out: str = ""
    refused: Sequence[Mapping[str, Any]] = ()

    @property
    def ours(self) -> Mapping[str, Any]:
        """The file's ``d5suite`` object."""
        facts = self.content.get("d5suite")
        return facts if isinstance(facts, dict) else {}

    @property
    def commit(self) -> str:
        """The Git revision of the folder where it was measured; empty if unknown."""
        facts = self.content.get("commit_info")
        return str(facts.get("id") or "") if isinstance(facts, dict) else ""

    @property
    def command(self) -> str:
        """The command that wrote the file; empty if unknown."""
        words = self.ours.get("command")
        return shlex.join(map(str, words)) if isinstance(words, list) else ""

    @property
    def beside(self) -> Path | None:
        """The file of its series; None if it names none, or if that file is missing."""
        name = Path(str(self.ours.get("series") or "")).name
        path = self.path.resolve().parent / name
        return path if name and path.is_file() else None


@dataclass
class Page:
    """Everything that a page shows.

    Attributes
    ----------
    sources : list of ResultFile
    sections : list of Section
    backends : dict of str to int
        The colour of each backend.
    missed : list of mapping
        Measurements without a result: see ``failures`` in ``results/schema.json``.
    apart : list of str
        Conditions in which sections of one title differ.
    between_runs : float
        See `d5suite.statistics.contests.Ranking`.
    """

    sources: list[ResultFile]
    sections: list[Section]
    backends: dict[str, int]
    missed: list[Mapping[str, Any]]
    apart: list[str]
    between_runs: float

    @property
    def rows(self) -> Iterator[Row]:
        """All rows, in order."""
        return (row for section in self.sections for row in section.rows)

    @property
    def groups(self) -> Iterator[tuple[Section, RowGroup]]:
        """All groups, in order."""
        return ((s, group) for s in self.sections for table in s.tables for group in table.groups)


def gather(paths: Sequence[Path], between_runs: float) -> Page:
    """Read result files for a page.

    A file of another schema version is left out with a note, unless it is the only file.

    Raises
    ------
    JobError, ConfigurationError
        If a file is malformed, or none has results.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigurationError("one file is given twice", hint="Name each result file once.")
    sources: list[ResultFile] = []
    files: list[tuple[str, dict[Any, dict[str, Any]]]] = []
    missed: list[Mapping[str, Any]] = []
    for number, path in enumerate(paths, 1):
        content = read_json(path, any_number=True)
        facts = {**content, "benchmarks": []} if isinstance(content, dict) else {}
        source = ResultFile(printable(str(path)), f"({number})" if len(paths) > 1 else "", path, printable(facts))
        sources.append(source)
        try:
            results, _, source.refused = results_of(content, path)
        except D5Error as error:
            if len(paths) == 1 or not _of_another_version(content):
                raise
            source.left_out = str(error)
            continue
        source.results, source.series = len(results), _series(source)
        apart_by_machine = {
            (group, (*conditions, *(("machine: " + name, value) for name, value in _machine(info))), backend): info
            for (group, conditions, backend), info in results.items()
        }
        files.append((source.mark, apart_by_machine))
        missed += [*source.ours.get("failures", []), *source.refused]
    if not files:
        raise ConfigurationError("none of these files can be shown", where=sources[0].name, hint=sources[0].left_out)
    backends = places(info["backend"]["name"] for _, results in files for info in results.values())
    tables = grouped(files)
    titles: dict[str, list[dict[str, str]]] = defaultdict(list)
    for title, conditions in tables:
        titles[title].append(dict(conditions))
    apart_by = dict.fromkeys(name for alike in titles.values() for name in differing(alike))
    sections = [_section(key, rows, titles[key[0]], backends, between_runs) for key, rows in tables.items()]
    return Page(sources, sections, backends, missed, list(apart_by), between_runs)


def _machine(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the facts that distinguish machines with the same processor."""
    facts = machine_of(info["environment"])
    return ((name, facts[name]) for name in ("CPU", "cores", "memory", "GPUs") if name in facts)


def _of_another_version(content: Any) -> bool:
    """Return whether a file declares another schema than this version's."""
    from d5suite.report.schema import result_schema

    known = result_schema()["$defs"]["record"]["properties"]["schema"]["const"]
    ours = content.get("d5suite") if isinstance(content, dict) else None
    version = ours.get("schema") if isinstance(ours, dict) else None
    return isinstance(version, str) and version != known


def _series(source: ResultFile) -> str:
    """Say whether the series that a file names are there."""
    name = source.ours.get("series", "")
    if not name:
        return "it names no series"
    there = source.beside is not None
    return f"series: {name}" if there else f"the series {name} are not beside it: nothing is drawn from them"


def _section(
    key: TableKey, rows: Sequence[TableRow], alike: Sequence[Mapping[str, str]], colours: Mapping[str, int],
    between_runs: float,
) -> Section:  # fmt: skip
    """Return a section; ``alike`` are the conditions of all sections of its title."""
    title, conditions = key
    info = rows[0].record
    own, tables = dict(conditions), []
    for declared in dict.fromkeys(row.record["table"] for row in rows):
        chosen = [row for row in rows if row.record["table"] == declared]
        table = _with_ratios(with_passes(declared, [row.record for row in chosen]))
        groups: dict[str, list[Row]] = defaultdict(list)
        for measurement, backend, file, info in chosen:
            row_id = f"r-{_digest(title, measurement, backend, file, conditions, info['preset'])}"
            colour = colours[info["backend"]["name"]]
            row = Row(row_id, title, measurement, backend, colour, info, _marks(info), file)
            groups[measurement].append(row)
        tables.append(PageTable(table, [_group(name, group, between_runs) for name, group in groups.items()]))
        for row in (row for group in tables[-1].groups for row in group.rows):
            row.cells = [_cell(column, row.record) for column in table.columns]
    known = setting_parts(rows[0].record)
    return Section(f"s-{_digest(title, conditions)}", title, known, apart(own, alike), own, tables)


def _with_ratios(table: Table) -> Table:
    """Return a table with the column of ratios to the fastest, after the one of medians."""
    columns = list(table.columns)
    medians = [place for place, column in enumerate(columns, 1) if column.value == "median_s"]
    columns.insert(min(medians, default=len(columns)), TIMES_FASTEST)
    return replace(table, columns=tuple(columns))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _cell(column: Column, info: Mapping[str, Any]) -> tuple[str, float | None]:
    value = at(info, column.value)
    if isinstance(value, RatioToFastest):
        return value.text(), value.value
    if column.format == "worst share":
        value = worst_share(value)
    while isinstance(value, list) and value:
        value = value[0]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return text_of(column, info, True), float(value) if number else None


def _marks(info: Mapping[str, Any]) -> list[Mark]:
    marks = []
    if wrong := failures(info):
        marks.append(Mark("✗", "failed its proof", wrong))
    if is_reduced(info):
        marks.append(Mark("†", "reduced size", ["this backend is measured at a smaller size than the others"]))
    if info["machine"]["disturbed"] or info["machine"]["reasons"]:
        marks.append(Mark("*", "disturbed", info["machine"]["reasons"] or ["the machine was disturbed"]))
    if warnings := reasons_to_doubt(info):
        marks.append(Mark("!", "doubtful", warnings))
    return marks


def _group(measurement: str, rows: list[Row], between_runs: float) -> RowGroup:
    sound = [row for row in rows if not row.failed and not row.reduced]
    longest = max((max(*row.record["data"], row.record["median_s"]) for row in sound), default=0.0)
    typical = max((row.record["median_s"] for row in sound), default=0.0)
    for row in sound:
        row.longest = min(longest, 1.3 * typical)
    order = ranked(rows, not_ranked, between_runs)
    for row, row.to_fastest in order:
        row.record = {**row.record, TIMES_FASTEST.value: row.to_fastest}
    return RowGroup(measurement, [row for row, _ in order], contests_of(sound, between_runs=between_runs))


def command_of(info: Mapping[str, Any], given: Sequence[str] = ()) -> str:
    """Return the command that repeats a measurement under its conditions.

    Parameters
    ----------
    info : mapping
        The measurement's record.
    given : sequence of str
        The command that wrote the result file; its options are repeated. Without it, the options
        come from the record, which lacks folders of data and a network's file.
    """
    name, how = info["fullname"], info.get("distributed") or {}
    wanted = {
        "--device": info["device"], "--precision": info["precision"], "--threads": info["threads"],
        "--seed": info["seed"],
    }  # fmt: skip
    if not is_reduced(info):
        wanted["--preset"] = info["preset"]
    if info["level"] == 3 and how.get("scheme"):
        wanted |= {"--ranks": info["ranks"], "--scheme": how["scheme"]}
        if info["ranks"] > 1 and not how.get("native"):
            wanted["--communicator"] = how["communicator"]
    if named := re.search(rf"(?<!\w){re.escape(info['backend']['name'])}(:\w+)?(?!\w)", name.partition("[")[2]):
        wanted["--backend"] = named[0]
    options = _options(given, name, (*_NOT_REPEATED, *wanted)) if list(given[:1]) == ["pytest"] else []
    options += [word for option, value in wanted.items() for word in (option, str(value))]
    if info.get("l2_cold") and "--l2-cold" not in options:
        options.append("--l2-cold")
    return shlex.join(["pytest", name, *options, "--benchmark-json", "again.json"])


_NOT_REPEATED = ("--benchmark-json", "-k", "-m", "--jobs", "-n")
"""Options with a value that choose tests or name an output."""


def _options(given: Sequence[str], name: str, without: Sequence[str]) -> list[str]:
    """Return the options of a pytest command, without its files and the options ``without``."""
    file, kept, words = name.partition("::")[0], list[str](), iter(given[1:])
    for word in words:
        path = word.partition("::")[0].rstrip("/")
        if word in without:
            next(words, None)
        elif not (
            word.startswith(tuple(f"{option}=" for option in without))
            or path.endswith(file)
            or f"{file}/".startswith(f"{path}/")
            or path == "."
        ):
            kept.append(word)
    return kept
