"""What a report says: sentences of text and figures, and tables of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import NamedTuple

from d5suite.report.page.csv_files import safe
from d5suite.report.study.figures import Figure


class Claim(NamedTuple):
    """A sentence; its figures say where they come from."""

    parts: tuple[str | Figure, ...]

    @property
    def text(self) -> str:
        """The sentence as it reads."""
        return "".join(each if isinstance(each, str) else each.text for each in self.parts)


def say(*parts: str | Figure | None) -> Claim | None:
    """Return a sentence; None if a figure of it is missing."""
    if any(each is None for each in parts):
        return None
    return Claim(tuple(each for each in parts if each is not None and each != ""))


def said(claims: Iterable[Claim | None]) -> list[Claim]:
    """Return the sentences that can be said."""
    return [each for each in claims if each is not None]


class Cell(NamedTuple):
    """A cell of a table: text and figures, which CSV files hold in columns of their own."""

    parts: tuple[str | Figure, ...] = ()
    mark: str = ""

    @property
    def text(self) -> str:
        """As the report shows it."""
        return "".join(each if isinstance(each, str) else each.text for each in self.parts)

    @property
    def figures(self) -> list[Figure]:
        """Its figures."""
        return [each for each in self.parts if isinstance(each, Figure)]


def cell(*parts: str | Figure | None, mark: str = "") -> Cell:
    """Return a cell; an empty one if a figure of it is missing."""
    return Cell() if any(each is None for each in parts) else Cell(tuple(each for each in parts if each), mark)


class Heading(NamedTuple):
    """A column's heading, and the names of its columns in the CSV file."""

    text: str
    names: tuple[str, ...] = ()
    numbers: bool = True


class Table(NamedTuple):
    """A table of a report, and of a CSV file.

    Attributes
    ----------
    name : str
        Of the file, without suffix.
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

    @property
    def shown(self) -> list[list[Cell]]:
        """The rows that the report shows."""
        return self.rows[: self.most]

    def csv(self) -> bytes:
        """Return the table as a CSV file; figures are in SI units."""
        target = io.StringIO()
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow([name for each in self.headings for name in each.names or (each.text,)])
        for row in self.rows:
            line: list[object] = []
            for heading, each in zip(self.headings, row, strict=True):
                values: list[object] = [one.value for one in each.figures] if heading.numbers else [safe(each.text)]
                width = len(heading.names or (heading.text,))
                line += (values + [None] * width)[:width]
            writer.writerow(line)
        return target.getvalue().encode()


def noun(figure: Figure | None, one: str, more: str) -> str:
    """Return the noun that follows a figure."""
    return f" {one if figure and figure.value == 1 else more}"
