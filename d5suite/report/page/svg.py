"""A matplotlib figure as SVG: for a file, and inside a page, where it takes the page's colours.

Text stays text, and every point has its numbers as a tooltip. The markup is parsed and written
again as a tree, so that text cannot become markup. Imports NumPy, matplotlib (late) and its
neighbours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np

from d5suite.report.colours import PALETTE
from d5suite.report.tooltips import tooltips_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
XLINK = "{http://www.w3.org/1999/xlink}href"

_THEMED = {
    **{colour: f"var(--b{place})" for place, colour in enumerate(PALETTE)},
    "#000000": "var(--ink)",
    "#ffffff": "var(--paper)",
    "#262626": "var(--ink)",
    "#b0b0b0": "var(--rule)",
    "#cccccc": "var(--rule)",
}
"""Variables of the page's style by colour in pictures."""

_FONT = re.compile(r"'DejaVu Sans'[^;]*?sans-serif")


@contextmanager
def drawing(salt: str = "d5suite") -> Iterator[None]:
    """Return a context to draw in: names are not formulas, and text stays text."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": salt}):
        yield


def to_svg(figure: Figure, salt: str = "d5suite") -> bytes:
    """Return the figure as an SVG file."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    target = io.BytesIO()
    with drawing(salt):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None})
    return target.getvalue()


def to_png(figure: Figure) -> bytes:
    """Return the figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    target = io.BytesIO()
    with drawing():
        FigureCanvasAgg(figure).print_png(target)
    return target.getvalue()


def inline(figure: Figure, prefix: str, label: str) -> str:
    """Return the figure as an element of a page.

    Parameters
    ----------
    figure : Figure
    prefix : str
        Prefix of all its identifiers, which must differ between the figures of a page.
    label : str
        Description for screen readers.
    """
    tips = _tips(figure)
    root = ElementTree.fromstring(to_svg(figure, prefix))  # noqa: S314  matplotlib's own
    for child in list(root):
        if child.tag == f"{{{SVG}}}metadata":
            root.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # HTML knows SVG without its namespace
        own = element.get("id", "")
        if own in tips:
            marks = next(filter(None, (list(element.iter(f"{{{SVG}}}{kind}")) for kind in ("use", "path"))), [element])
            if len(marks) == len(tips[own]):
                for mark, tip in zip(marks, tips[own], strict=True):
                    mark.set("data-tip", tip)
        for name, value in list(element.attrib.items()):
            if name == "id":
                element.set(name, f"{prefix}-{value}")
            elif name == XLINK:
                del element.attrib[name]
                element.set("href", value.replace("#", f"#{prefix}-", 1))
            elif name in ("style", "clip-path", "fill", "stroke"):
                element.set(name, _themed(value.replace("url(#", f"url(#{prefix}-")))
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _themed(value: str) -> str:
    for colour, variable in _THEMED.items():
        value = value.replace(colour, variable)
    return _FONT.sub("Inter, system-ui, sans-serif", value)


def _tips(figure: Figure) -> dict[str, list[str]]:
    """Name each artist with tooltips and each line of points; return their tooltips by name."""
    tips: dict[str, list[str]] = {}
    for number, axes in enumerate(figure.axes):
        for place, artist in enumerate(axes.get_children()):
            if texts := tooltips_of(artist) or _points(axes, artist):
                name = f"tip-{number}-{place}"
                artist.set_gid(name)
                tips[name] = texts
    return tips


def _points(axes: Axes, artist: Artist) -> list[str]:
    """Return the coordinates of each point of a line as text."""
    from matplotlib.lines import Line2D

    if not isinstance(artist, Line2D) or artist.get_marker() in (None, "None", ""):
        return []
    across, up = axes.get_xlabel(), axes.get_ylabel() or axes.get_title()
    label = str(artist.get_label())
    label = "" if label.startswith("_") else f"{label}: "
    points = np.asarray(artist.get_xydata(), np.float64)
    finite = points[np.isfinite(points).all(axis=1)].tolist()
    return [f"{label}{x:.4g} {across}, {y:.4g} {up}" for x, y in finite]
