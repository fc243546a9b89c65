"""Writes a page, the fragment for a notebook, and the tables beside it.

Imports its neighbours.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from d5suite.files import write_bytes
from d5suite.models.ceilings import Ceilings
from d5suite.report.outputs import refused
from d5suite.report.page.csv_files import csv_files
from d5suite.report.page.facts import shortened
from d5suite.report.page.figures import draw, pictures
from d5suite.report.page.gather import Page, gather
from d5suite.report.page.history import BenchmarkHistory
from d5suite.report.page.history_charts import history_charts
from d5suite.report.page.render import render
from d5suite.report.page.svg import to_png, to_svg
from d5suite.report.tuning import CourseRows
from d5suite.statistics.decisions import Threshold

HEIGHT = "80vh"
"""Height of an embedded page."""


class NotebookPage:
    """A page for a notebook, which shows it in a frame of its own.

    Parameters
    ----------
    page : str
        HTML.
    """

    def __init__(self, page: str) -> None:
        self.page = page

    def _repr_html_(self) -> str:
        return embedded(self.page)


def embedded(page: str) -> str:
    """Return the page as a fragment: a frame that isolates it from the page around."""
    return (
        f'<iframe title="d5suite report" sandbox="allow-scripts allow-popups" srcdoc="{html.escape(page)}" '
        f'style="width:100%;height:{HEIGHT};border:0"></iframe>\n'
    )


def page_of(
    paths: Sequence[Path],
    *,
    between_runs: float = Threshold().between_runs,
    title: str = "",
    histories: Sequence[BenchmarkHistory] = (),
    ceilings: Ceilings | None = None,
    courses: Sequence[CourseRows] = (),
) -> tuple[Page, str]:
    """Gather result files and render their page.

    Raises
    ------
    JobError, ConfigurationError
        As `gather` does.
    """
    page = gather(paths, between_runs)
    cases = dict.fromkeys(section.title for section in page.sections)
    named = ", ".join(shortened(case, 40) for case in list(cases)[:3]) + (
        f" and {len(cases) - 3} more" * (len(cases) > 3)
    )
    return page, render(page, shortened(title or f"Benchmarks of {named}", 160), histories, ceilings, courses)


def save(path: Path, content: str) -> None:
    """Write a page atomically.

    Raises
    ------
    ConfigurationError
        If the file cannot be written.
    """
    with refused("the page cannot be written", path):
        write_bytes(path, content.encode())


def save_tables(folder: Path, page: Page, histories: Sequence[BenchmarkHistory]) -> None:
    """Write the numbers of a page as CSV files into a folder, which is made if needed.

    Raises
    ------
    ConfigurationError
        If the files cannot be written.
    """
    _save_all(folder, csv_files(page, histories).items())


def save_pictures(folder: Path, page: Page, kind: str, histories: Sequence[BenchmarkHistory] = ()) -> list[str]:
    """Write every picture into a folder, which is made if needed.

    Parameters
    ----------
    folder : Path
    page : Page
    histories : sequence of BenchmarkHistory, optional
    kind : {"png", "svg"}

    Returns
    -------
    list of str
        What could not be drawn, with reasons.

    Raises
    ------
    ConfigurationError
        If the files cannot be written.
    """
    failed: list[str] = []

    def files() -> Iterator[tuple[str, bytes]]:
        for picture in itertools.chain(pictures(page, failed), history_charts(histories)):
            if (figure := draw(picture, failed)) is not None:
                yield f"{picture.name}.{kind}", to_png(figure) if kind == "png" else to_svg(figure)

    _save_all(folder, files())
    return failed


def _save_all(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    with refused("it cannot be written", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files:
            write_bytes(folder / name, content)
