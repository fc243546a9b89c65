"""The raw data of a study, by machine and run, as the other reports read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError, D5Error
from d5suite.files import GZIP, read_json
from d5suite.report.contests import Contest
from d5suite.report.page.figures import with_curves
from d5suite.report.page.gather import Page, Row, RowGroup, Section, gather
from d5suite.report.reading import printable
from d5suite.report.study.figures import BETWEEN_RUNS, RawData, StatedFigure, place_in, pointer
from d5suite.statistics.contests import veto_of
from d5suite.study.declaration import Study, read_study
from d5suite.study.state import COMMIT, JOB_FILES, RAW, WITH_CHANGES, MachineRuns, RunState, machines

DECLARATION = "study.toml"
"""The study's own copy of its declaration."""


@dataclass(frozen=True)
class StudyRun:
    """A run of the study on one machine.

    Attributes
    ----------
    machine, name : str
    state : RunState
    file : str
        Path of its result in the study's folder; empty if there is none.
    whole : bool
        Whether the result is as it was written.
    current : bool
        Whether the results that the run has read are still the same.
    content : mapping
        Content of the result file, without benchmarks.
    """

    machine: str
    name: str
    state: RunState
    file: str
    whole: bool
    current: bool
    content: Mapping[str, Any]

    @property
    def commit(self) -> str:
        """The Git revision of d5suite, or of the recipes if that is not noted; empty if unknown."""
        if noted := self.state.made_with.get(COMMIT):
            return noted
        facts = self.content.get("commit_info")
        if not isinstance(facts, dict) or not facts.get("id"):
            return ""
        return f"{str(facts['id'])[:12]}{f' {WITH_CHANGES}' if facts.get('dirty') else ''}"


@dataclass
class Gathered:
    """All that a report is made from.

    Attributes
    ----------
    study : Study
    runs : list of StudyRun
    raw : RawData
    page : Page or None
        None without benchmarks.
    ceilings : dict of str to str
        By machine: the machine file in the study's folder.
    files : dict of str to (StudyRun, mapping)
        Other results, by file.
    left_out : dict of str to str
        By file: why it cannot be read.
    """

    study: Study
    runs: list[StudyRun]
    raw: RawData
    page: Page | None = None
    ceilings: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[StudyRun, Mapping[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The study's folder."""
        return self.raw.folder

    @property
    def rows(self) -> list[Row]:
        """All benchmarks."""
        return list(self.page.rows) if self.page else []

    @property
    def groups(self) -> Iterator[tuple[Section, RowGroup]]:
        """All groups of benchmarks, with their sections."""
        return self.page.groups if self.page else iter(())

    @property
    def drawn_series(self) -> set[Path]:
        """The files of series that curves are drawn from."""
        if self.page is None:
            return set()
        marks = {mark for mark, _ in with_curves(self.page)}
        return {path for each in self.page.sources if each.mark in marks and (path := each.beside) is not None}

    @property
    def is_packed(self) -> bool:
        """Whether results are packed."""
        return any(run.file.endswith(GZIP) for run in self.runs)

    @property
    def job_files(self) -> set[tuple[str, str]]:
        """Machine and name of the runs whose job files are kept."""
        keys = {(run.machine, run.name) for run in self.runs}
        return {key for key in keys if (self.folder / JOB_FILES / key[0] / key[1]).is_dir()}

    def file_of(self, row: Row) -> str:
        """Return the file that a row is from, in the study's folder."""
        assert self.page is not None
        source = next(each for each in self.page.sources if each.mark == row.file)
        return source.path.relative_to(self.folder).as_posix()

    def run_of(self, row: Row) -> StudyRun:
        """Return the run that measured a row."""
        file = self.file_of(row)
        return next(run for run in self.runs if run.file == file)

    def place(self, row: Row) -> str:
        """Return the place of a row's benchmark."""
        return f"{self.file_of(row)}#{pointer(*row.record['place'].split('.'))}"

    def contest(self, contest: Contest[Row]) -> str:
        """Return the place of a comparison."""
        return "&".join(self.place(each) for each in contest.results)

    def of(self, row: Row, path: str, form: str) -> StatedFigure | None:
        """Return a figure of a row's record, by its dotted path."""
        return self.raw.figure("value", [place_in(self.place(row), path)], form)

    def figure(self, rule: str, places: Sequence[str], form: str = "count") -> StatedFigure | None:
        """Return a figure; see `RawData.figure`. None without places."""
        return self.raw.figure(rule, places, form) if places else None

    def ratio(self, one: Row, other: Row) -> list[StatedFigure | None]:
        """Return how many times as long ``other`` takes as ``one``, and the interval's ends."""
        places = [self.place(one), self.place(other)]
        return [self.figure(rule, places, "times") for rule in ("ratio", "ratio:low", "ratio:high")]

    def decides(self, *rows: Row) -> bool:
        """Return whether something may be concluded from the times of rows."""
        return not any(row.failed or veto_of(row.record.get("machine") or {}) for row in rows)

    def machine_of(self, row: Row) -> str:
        """Return a row's machine if the study has several; otherwise nothing."""
        return self.run_of(row).machine if len({run.machine for run in self.runs}) > 1 else ""


def gather_study(folder: Path) -> Gathered:
    """Read a study's folder.

    Raises
    ------
    ConfigurationError
        If it is no study's folder, or no run has a result.
    JobError
        If the state of a machine is damaged.
    """
    if not (folder / DECLARATION).is_file():
        raise ConfigurationError("this is no folder of a study", where=str(folder),
                                 hint="Make one: d5suite study STUDY.toml -o FOLDER.")  # fmt: skip
    study = read_study(folder / DECLARATION)
    found = Gathered(study, [], RawData(folder))
    results: list[Path] = []
    declared = {run.name for run in study.runs}
    for machine in machines(folder):
        for name, state in machine.runs.items():
            path = machine.result(name)
            file = f"{RAW}/{machine.name}/{path.name}"
            if name not in declared:
                found.left_out[file] = "the study no longer has this run"
                continue
            content = _content(path, file, found) if state.sha256 and path.is_file() else None
            facts = printable({**content, "benchmarks": []}) if content is not None else {}
            there = content is not None
            found.runs.append(_run(machine, name, file if there else "", state, facts))
            if content is None:
                continue
            if "benchmarks" in content:
                results.append(path)
            elif "ceilings" in content:
                found.ceilings[machine.name] = file
            else:
                found.files[file] = (found.runs[-1], printable(content))
    found.page = _page(results, found)
    if not any(run.file for run in found.runs):
        raise ConfigurationError("no run of this study has a result yet", where=str(folder),
                                 hint="Run it: d5suite study STUDY.toml --resume -o FOLDER.")  # fmt: skip
    for row in found.rows:
        found.raw.records[found.file_of(row), row.record["place"]] = row.record
    return found


def _run(machine: MachineRuns, name: str, file: str, state: RunState, facts: Mapping[str, Any]) -> StudyRun:
    return StudyRun(machine.name, name, state, file, machine.is_whole(name), machine.is_current(name), facts)


def _content(path: Path, file: str, found: Gathered) -> Mapping[str, Any] | None:
    try:
        content = read_json(path, any_number=True)
    except D5Error as error:
        found.left_out[file] = error.what
        return None
    if isinstance(content, dict):
        return content
    found.left_out[file] = "this is not a result file"
    return None


def _page(paths: list[Path], found: Gathered) -> Page | None:
    """Return the benchmarks of files; leave out files that cannot be read, and say why."""
    if not paths:
        return None
    try:
        return gather(paths, BETWEEN_RUNS)
    except D5Error:
        readable = []
        for path in paths:
            try:
                gather([path], BETWEEN_RUNS)
                readable.append(path)
            except D5Error as error:
                found.left_out[path.relative_to(found.folder).as_posix()] = error.what
        if readable == paths:
            raise
        return _page(readable, found)
