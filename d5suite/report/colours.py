"""The colours of backends, the same in every picture and page.

They come from a search: among sets of eight colours with enough contrast on white, these differ
most by CIEDE2000, also for colour-blind readers (Machado, Oliveira and Fernandes, 2009). The
frameworks that people compare most have the colours that differ most in hue. A test checks this.
Imports `d5suite.backends` as data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

PALETTE = ("#003c78", "#b400e1", "#00695a", "#6996c3", "#969600", "#d27878", "#874b00", "#690f2d")
"""Colours on white; ``page.css`` has those on a dark background."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", (0, (1, 1)))
"""Markers and line styles tell lines of one backend apart, and help readers who see no colours."""


class Style(NamedTuple):
    """Style of a line."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[int, int]]


def places(names: Iterable[str]) -> dict[str, int]:
    """Return a number for each backend's name; a built-in one always has the same.

    The colour is the number modulo eight; no two of up to eight names share one.
    """
    from d5suite.backends import discover

    used, known = set(names), discover()[0]
    own = sorted(name for name, backend in known.items() if backend.package.startswith("d5suite."))
    others = sorted(set(known) - set(own))
    order = [*own, *others, *sorted(used - set(known))]
    found = {name: place for place, name in enumerate(order) if name in used}
    free = iter(sorted(set(range(len(PALETTE))) - set(found.values()), reverse=True))
    return {name: place if place < len(PALETTE) else next(free, place) for name, place in found.items()}


def styles(names: Iterable[str]) -> list[Style]:
    """Return a style for each line; a line's name begins with its backend, before a ``-``."""
    lines = list(names)
    backends = [name.partition("-")[0].partition(",")[0] for name in lines]
    numbers = places(backends)
    seen: dict[str, itertools.count[int]] = {}
    chosen = []
    for backend in backends:
        turn = next(seen.setdefault(backend, itertools.count()))
        colour = PALETTE[numbers[backend] % len(PALETTE)]
        chosen.append(Style(colour, MARKERS[turn % len(MARKERS)], LINES[turn // len(MARKERS) % len(LINES)]))
    return chosen
