"""The chapters of a study's report, with their pictures; a chapter without content is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from d5suite.errors import describe_error
from d5suite.report.page.figures import draw, file_name, pictures
from d5suite.report.page.gather import Row
from d5suite.report.page.svg import inline, to_svg
from d5suite.report.roofline_picture import draw_rooflines
from d5suite.report.study.claims import Claim, ReportTable, noun, said, say
from d5suite.report.study.commands import crossed, crossing_pictures, simulated, tuned
from d5suite.report.study.doubts import method, threats
from d5suite.report.study.explained import models_and_measured, under_roofs, where_time_goes
from d5suite.report.study.figures import place_in
from d5suite.report.study.findings import Found, find, ordered, served, swept, topic_of
from d5suite.report.study.gathered import Gathered, StudyRun
from d5suite.report.study.held import compare_studies, sentence
from d5suite.report.study.held import table as held_table
from d5suite.report.study.origins import joined
from d5suite.study.declaration import TOPICS, Question
from d5suite.study.state import DONE

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

MOST_PICTURES, MOST_OF_CHAPTER = 32, 4
"""Most pictures in the report, and in one of its chapters; the folder of figures has all."""

MOST_OF_ANSWER = 4
"""Most sentences on one kind of result in the answer to a question."""

MOST_OF_ABSTRACT = 22
"""Most sentences of the abstract: the first of each kind of result, then the second ones."""


@dataclass
class ChapterPicture:
    """A picture.

    Attributes
    ----------
    name : str
        File name, without suffix.
    label : str
    runs : list of str
        Runs that it is drawn from.
    file : bytes
        The picture as SVG.
    markup : Markup
        The picture inside the report; empty if the report leaves it out.
    """

    name: str
    label: str
    runs: list[str]
    file: bytes
    markup: Markup


@dataclass
class Chapter:
    """A section of the report."""

    id: str
    title: str
    claims: Sequence[Claim | str] = ()
    tables: Sequence[ReportTable] = ()
    pictures: list[ChapterPicture] = field(default_factory=list)

    @property
    def has_content(self) -> bool:
        """Whether the chapter has any content."""
        return bool(self.claims or self.tables or self.pictures)


class Answer(NamedTuple):
    """The answer to a question.

    Attributes
    ----------
    ask : str
    claims : list of Claim
    lacking : str
        What was not measured for the question; empty if all was.
    is_open : bool
        Whether nothing was measured for it.
    """

    ask: str
    claims: list[Claim]
    lacking: str
    is_open: bool


@dataclass
class Report:
    """What a report says.

    Attributes
    ----------
    abstract : list of Claim or str
    answers : list of Answer
    chapters : list of Chapter
        Chapters with content; ``method`` first and ``threats`` last.
    """

    abstract: list[Claim | str]
    answers: list[Answer]
    chapters: list[Chapter]

    def chapter(self, name: str) -> Chapter | None:
        """Return a chapter by its id."""
        return next((each for each in self.chapters if each.id == name), None)


def compose(found: Gathered, earlier: Gathered | None) -> Report:
    """Return what the report of a study says.

    Parameters
    ----------
    found : Gathered
    earlier : Gathered, optional
        An earlier run of the study.
    """
    topics = find(found)
    layers, roofs, models = where_time_goes(found), under_roofs(found), models_and_measured(found)
    chapters = [Chapter("method", "How it was measured", said(method(found)))]
    chapters += [Chapter(each.topic.key, each.topic.title, each.claims, each.tables) for each in topics]
    chapters += [
        Chapter("knobs", "Threads and batch sizes", swept(found, found.rows)),
        Chapter("layers", "Where the time goes", *layers),
        Chapter("rooflines", "Rooflines and trajectories", *roofs[:2]),
        Chapter("models", "Models and measurements", *models),
    ]
    others = {name: (title, *reader(found)) for name, title, reader in READERS}
    chapters += [Chapter(name, *content) for name, content in others.items()]
    threatening = Chapter("threats", "Threats to validity", [each for each in threats(found) if each is not None])
    drawer = _Drawer(found)
    drawer.add(chapters, topics)
    for machine, placed in roofs[2]:
        for title in dict.fromkeys(each.title for each in placed):
            own = [each for each in placed if each.title == title]
            files = {found.file_of(row) for row in found.rows if f"{row.case}/{row.measurement}" == title}
            files.add(found.ceilings[machine])
            runs = [run for run in found.runs if run.machine == machine and run.file in files]
            name, label = f"rooflines-{machine}-{title}", f"Roofline of {machine}: {title.replace('/', ' ')}"
            drawer.place(_named(chapters, "rooflines"), name, label, runs, partial(draw_rooflines, own))
    for each in crossing_pictures(found):
        drawer.place(_named(chapters, "ordering"), each.name, each.label, each.runs, each.draw)
    if drawer.failed:
        threatening.claims = [*threatening.claims, *drawer.failed]
    held: list[Claim | str] = []
    if earlier is not None:
        again, gone = compare_studies(earlier, found)
        held = [sentence(again, gone)]
        chapters.append(Chapter("held", "Which findings held", held, [held_table(found, again)] if again else []))
    chapters.append(threatening)
    answers = [_answer(found, each) for each in found.study.questions]
    abstract: list[Claim | str] = [*said([_extent(found)]), *_open(answers)]
    kinds = [each.summary for each in topics] + [claims for _, claims, _ in others.values()]
    kinds += [claims[:1] for claims in (layers[0], roofs[0], models[0])]
    abstract += [*_first(kinds, MOST_OF_ABSTRACT - len(abstract) - len(held)), *held]
    return Report(abstract, answers, [each for each in chapters if each.has_content])


def _first(kinds: Sequence[Sequence[Claim]], most: int) -> list[Claim]:
    """Return ``most`` sentences in their order: the first of each kind, then the second ones."""
    turns = sorted((turn, kind) for kind, claims in enumerate(kinds) for turn in range(len(claims)))[: max(0, most)]
    return [kinds[kind][turn] for kind, turn in sorted((kind, turn) for turn, kind in turns)]


def _ordering(found: Gathered) -> tuple[list[Claim], list[ReportTable]]:
    claims, tables = ordered(found)
    predicted, others = crossed(found)
    return [*served(found), *claims, *predicted], [*tables, *others]


READERS: tuple[tuple[str, str, Callable[[Gathered], tuple[list[Claim], list[ReportTable]]]], ...] = (
    ("tuned", "Tuned against stock", tuned),
    ("ordering", "Ordering, and parameter servers against all-reduce", _ordering),
    ("simulated", "Simulated ranks", simulated),
)
"""Id, title and reader of the chapters on results of other commands."""


def _named(chapters: Sequence[Chapter], name: str) -> Chapter:
    return next(each for each in chapters if each.id == name)


def _answer(found: Gathered, question: Question) -> Answer:
    parts = question.parts
    rows = [row for row in found.rows if found.run_of(row).state.part in parts]
    topics = [each for each in find(found, parts) if each.topic.key in (question.topics or TOPICS)]
    claims = [claim for each in topics for claim in each.summary] + swept(found, rows)[:MOST_OF_ANSWER]
    own = replace(found, files={file: each for file, each in found.files.items() if each[0].state.part in parts})
    claims += [claim for reader in (tuned, crossed, simulated) for claim in reader(own)[0][:MOST_OF_ANSWER]]
    some = {run.state.part for run in found.runs if run.file}
    whole = {run.name for run in found.runs if run.file and run.state.state == DONE}
    lacking = [run.name for part in parts for run in found.study.parts[part].runs if run.name not in whole]
    if not some.intersection(parts):
        what = f"the part {parts[0]} has" if len(parts) == 1 else f"the parts {joined(parts)} have"
        return Answer(question.ask, claims, f"Not answered: {what} no result yet.", is_open=True)
    told = f"Answered in part: there is no whole result of {joined(lacking)}." if lacking else ""
    return Answer(question.ask, claims, told, is_open=False)


def _open(answers: Sequence[Answer]) -> list[str]:
    """Name the questions for which nothing was measured."""
    asks = [each.ask for each in answers if each.is_open]
    return [f"Not answered yet, because nothing was measured for it: {' '.join(asks)}"] if asks else []


def _extent(found: Gathered) -> Claim | None:
    """Say how many results there are, of how many backends, and how many passed their proof."""
    places = [found.place(row) for row in found.rows]
    names = [place_in(place, "backend.name") for place in places]
    cases = [place_in(place, "recipe") for place in places]
    results, backends = found.figure("count", places), found.figure("distinct", names)
    several = found.figure("distinct", cases)
    return say(
        results, noun(results, "result of ", "results of "), backends, noun(backends, "backend on ", "backends on "),
        several, noun(several, "case was measured, and ", "cases were measured, and "),
        found.figure("such:passed", places), " of them passed their proof.",
    )  # fmt: skip


class _Drawer:
    """Draws the pictures of results, once each, into the chapters that they belong to."""

    def __init__(self, found: Gathered) -> None:
        self.found, self.failed, self.count, self.shown = found, list[str](), 0, 0
        self.taken: set[str] = set()

    def add(self, chapters: Sequence[Chapter], topics: Sequence[Found]) -> None:
        """Draw the pictures that the measurements declare."""
        if self.found.page is None:
            return
        by_name = {each.topic.key: _named(chapters, each.topic.key) for each in topics}
        for each in pictures(self.found.page, self.failed):
            assert each.section is not None
            rows = list(each.section.rows)
            own = [row for row in rows if f".{row.measurement}" in each.name] or rows
            runs = list(self._runs(own))
            self.place(by_name[topic_of(own[0].record).key], each.name, each.label, runs,
                       lambda each=each: draw(each, self.failed))  # type: ignore[misc]  # fmt: skip

    def _runs(self, rows: Sequence[Row]) -> Iterator[StudyRun]:
        yield from {run.file: run for run in map(self.found.run_of, rows)}.values()

    def place(
        self, chapter: Chapter, name: str, label: str, runs: Sequence[StudyRun], made: Callable[[], Drawing | None]
    ) -> None:
        """Draw a picture into a chapter."""
        try:
            drawing = made()
        except Exception as error:  # raw data may hold anything that a picture cannot show
            self.failed.append(f"There is no picture of {label}: {describe_error(error)}.")
            return
        if drawing is not None:
            self.count += 1
            own = sum(bool(each.markup) for each in chapter.pictures)
            shown = own < MOST_OF_CHAPTER and self.shown < MOST_PICTURES
            self.shown += shown
            markup = Markup(inline(drawing, f"f{self.count}", label)) if shown else Markup()  # noqa: S704  a tree, serialised
            names = [f"{run.machine}/{run.name}" for run in runs]
            chapter.pictures.append(
                ChapterPicture(file_name(name, taken=self.taken), label, names, to_svg(drawing), markup)
            )
