"""Texts of a picture's marks, which a page shows on hover. Imports the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.container import BarContainer


def set_tooltips(artist: Artist, tips: Sequence[str]) -> None:
    """Attach a text to each mark of an artist: to each point, bar, cell or line."""
    vars(artist)["d5suite_tips"] = list(tips)


def set_bar_tooltips(bars: BarContainer, tips: Sequence[str]) -> None:
    """Attach a text to each bar, and to the line of its interval if it has one."""
    for bar, tip in zip(bars.patches, tips, strict=True):
        set_tooltips(bar, [tip])
    if bars.errorbar is not None:
        for lines in bars.errorbar.lines[2]:
            set_tooltips(lines, tips)


def tooltips_of(artist: Artist) -> list[str]:
    """Return the texts of an artist's marks; empty if it has none."""
    return list(vars(artist).get("d5suite_tips", ()))
