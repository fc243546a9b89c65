"""A study's report in files: HTML in one file, PDF, figures as SVG and tables as CSV."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from d5suite.files import write_bytes
from d5suite.report.document import filled_in
from d5suite.report.outputs import refused
from d5suite.report.study.chapters import Report, compose
from d5suite.report.study.claims import Claim
from d5suite.report.study.figures import RECORD, StatedFigure
from d5suite.report.study.gathered import Gathered, gather_study
from d5suite.report.study.origins import origins, told
from d5suite.report.study.pdf import print_pdf
from d5suite.study.pack import SMALL

REPORT, PDF, TABLES, FIGURES = "report.html", "report.pdf", "tables", "figures"

MOST_PLACES = 6
"""Places of a sentence's figures that its note names."""


class _References:
    """Numbers of sentences, and the places of their figures."""

    def __init__(self) -> None:
        self.numbers: dict[Claim, int] = {}

    def sentence(self, claim: Claim | str) -> Markup:
        """Return a sentence with its figures and its number."""
        if isinstance(claim, str):
            return escape(claim)
        number = self.numbers.setdefault(claim, len(self.numbers) + 1)
        link = Markup('<a class="ref" href="#ref-{0}" title="where its figures are">{0}</a>')
        return marked(claim.parts) + link.format(number)

    @property
    def notes(self) -> Iterator[tuple[int, dict[str, list[str]], int]]:
        """Number of each sentence, its places by file, and how many more there are."""
        for claim, number in self.numbers.items():
            figures = [each for each in claim.parts if isinstance(each, StatedFigure)]
            places = dict.fromkeys(one for each in figures for place in each.places for one in place.split("&"))
            shown: dict[str, list[str]] = {}
            for place in list(places)[:MOST_PLACES]:
                file, _, inside = place.partition("#")
                shown.setdefault(file, []).append(inside.replace(RECORD, "/…"))
            yield number, shown, max(0, len(places) - MOST_PLACES)


def marked(parts: Sequence[str | StatedFigure]) -> Markup:
    """Return text and figures; each figure says by which rule it is made, and from where."""
    return Markup("").join(_figure(each) if isinstance(each, StatedFigure) else escape(each) for each in parts)


def _figure(each: StatedFigure) -> Markup:
    shared = _prefix(each.places) if len(each.places) > 1 else ""
    rest = " ".join(place[len(shared) :] for place in each.places)
    within = Markup(' data-in="{}"').format(shared) if shared else ""
    return Markup('<data value="{:.6g}" data-rule="{}" data-form="{}"{} data-places="{}">{}</data>').format(
        each.value, each.rule, each.form, within, rest, each.text
    )


def _prefix(texts: Sequence[str]) -> str:
    """Return the characters that all texts begin with."""
    first, last = min(texts), max(texts)
    return first[: next((place for place, each in enumerate(first) if last[place] != each), len(first))]


def write_report(folder: Path, earlier: Path | None = None) -> list[str]:
    """Write the report of a study into its folder, and return lines on what was written.

    Parameters
    ----------
    folder : Path
    earlier : Path, optional
        The folder of an earlier run, whose findings are looked for again.

    Raises
    ------
    ConfigurationError
        If there is nothing to report, or a file cannot be written.
    JobError
        If a state is damaged.
    """
    found = gather_study(folder)
    report = compose(found, gather_study(earlier) if earlier is not None else None)
    references = _References()
    page = _render(found, report, references)
    with refused("the report cannot be written", folder):
        for name in (TABLES, FIGURES):
            shutil.rmtree(folder / name, ignore_errors=True)  # of results that are no more
            (folder / name).mkdir(parents=True)
        for chapter in report.chapters:
            for table in chapter.tables:
                write_bytes(folder / TABLES / f"{table.name}.csv", table.csv())
            for picture in chapter.pictures:
                write_bytes(folder / FIGURES / f"{picture.name}.svg", picture.file)
        write_bytes(folder / REPORT, page.encode())
    tables = sum(len(chapter.tables) for chapter in report.chapters)
    pictures = sum(len(chapter.pictures) for chapter in report.chapters)
    return [
        f"{folder / REPORT}: {len(references.numbers)} sentences with figures, {tables} tables, {pictures} pictures",
        print_pdf(folder / REPORT, folder / PDF),
    ]


def _render(found: Gathered, report: Report, references: _References) -> str:
    from d5suite import __version__

    folder = Path(__file__).parent
    style = (folder.parent / "page" / "page.css").read_text(encoding="utf-8")
    style += (folder / "study.css").read_text(encoding="utf-8")
    machines = [(each.name, told(each.machine), told(each.software)) for each in origins(found)]
    dates = sorted({run.state.started[:10] for run in found.runs if run.state.started})
    content = filled_in(
        folder / "study.html",
        {"sentence": references.sentence, "marked": marked},
        found=found,
        report=report,
        references=references,
        style=Markup(re.sub(r"\n\s*", "\n", style)),  # noqa: S704  our own files
        machines=machines,
        small=SMALL,
        when=" to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
        version=__version__,
    )
    return re.sub(r">\n\s*<", "><", content)
