"""The console of all commands. Text may come from untrusted files, so it is escaped here."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from d5suite.errors import escaped


def table(*headings: str, words: Container[str] = ("",)) -> Table:
    """Return a table without lines; columns of words are aligned left, those of numbers right."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for each in headings:
        drawn.add_column(each, justify="left" if each in words else "right", overflow="fold")
    return drawn


class Console(rich.console.Console):
    """Rich's console; control characters of what is printed are escaped.

    An operator's name in an ONNX file, for example, could clear the screen or set the title.
    """

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text to be measured and printed."""
        return super().render_str(escaped(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escaped(text), style, control)
