"""What a report says: sentences of text and figures, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from d5suite.report.page.csv_files import csv_bytes
from d5suite.report.study.figures import StatedFigure

Part = str | StatedFigure | None
"""What sentences and cells are made of; None is a figure that the data lack."""


def _joined(parts: Iterable[str | StatedFigure]) -> str:
    return "".join(each if isinstance(each, str) else each.text for each in parts)


class Claim(NamedTuple):
    """A sentence; its figures say where they come from."""

    parts: tuple[str | StatedFigure, ...]

    @property
    def text(self) -> str:
        """The sentence as it reads."""
        return _joined(self.parts)


def say(*parts: Part) -> Claim | None:
    """Return a sentence; None if a figure of it is missing."""
    if any(each is None for each in parts):
        return None
    return Claim(tuple(each for each in parts if each is not None and each != ""))


def said(claims: Iterable[Claim | None]) -> list[Claim]:
    """Return the sentences that can be said."""
    return [each for each in claims if each is not None]


class Cell(NamedTuple):
    """A cell of a table: text and figures, which CSV files hold in columns of their own."""

    parts: tuple[str | StatedFigure, ...] = ()
    mark: str = ""

    @property
    def text(self) -> str:
        """The cell as the report shows it."""
        return _joined(self.parts)

    @property
    def figures(self) -> list[StatedFigure]:
        """The figures of the cell."""
        return [each for each in self.parts if isinstance(each, StatedFigure)]


def cell(*parts: Part, mark: str = "") -> Cell:
    """Return a cell; an empty one if a figure of it is missing."""
    return Cell() if any(each is None for each in parts) else Cell(tuple(each for each in parts if each), mark)


def interval(figures: Sequence[StatedFigure | None], *after: Part) -> tuple[Part, ...]:
    """Return the parts that say a figure, what follows it, and its interval: value, low, high."""
    value, low, high = figures
    return value, *after, " (95% interval ", low, " to ", high, ")"


def interval_cell(figures: Sequence[StatedFigure | None]) -> Cell:
    """Return a cell with a figure and its interval: value, low, high."""
    value, low, high = figures
    return cell(value, " (", low, "–", high, ")")


class Heading(NamedTuple):
    """A column's heading, and the names of its columns in the CSV file."""

    text: str
    names: tuple[str, ...] = ()
    numbers: bool = True


def words(*texts: str) -> list[Heading]:
    """Return the headings of columns that hold words."""
    return [Heading(text, numbers=False) for text in texts]


class ReportTable(NamedTuple):
    """A table of a report, and of a CSV file.

    Attributes
    ----------
    name : str
        File name, without suffix.
    caption : str
    headings : list of Heading
    rows : list of list of Cell
    most : int
        Rows that the report shows; the file has all.
    """

    name: str
    caption: str
    headings: list[Heading]
    rows: list[list[Cell]]
    most: int = 60

    @classmethod
    def of(cls, name: str, caption: str, headings: list[Heading], rows: Iterable[Iterable[Cell | Part]]) -> ReportTable:
        """Return a table; texts and figures of its rows are cells."""
        cells = [[each if isinstance(each, Cell) else cell(each) for each in row] for row in rows]
        return cls(name, caption, headings, cells)

    @property
    def shown(self) -> list[list[Cell]]:
        """The rows that the report shows."""
        return self.rows[: self.most]

    def csv(self) -> bytes:
        """Return the table as a CSV file; figures are in SI units."""
        lines = []
        for row in self.rows:
            line: list[object] = []
            for heading, each in zip(self.headings, row, strict=True):
                values: list[object] = [one.value for one in each.figures] if heading.numbers else [each.text]
                width = len(heading.names or (heading.text,))
                line += (values + [None] * width)[:width]
            lines.append(line)
        return csv_bytes([name for each in self.headings for name in each.names or (each.text,)], lines)


def noun(figure: StatedFigure | None, one: str, more: str) -> str:
    """Return the noun that follows a figure."""
    return f" {one if figure and figure.value == 1 else more}"
