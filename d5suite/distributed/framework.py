"""Tracks calls in which a framework communicates itself, where no communicator can see it.

Imports the standard library only.
"""

from __future__ import annotations


class _Inside:
    """A counter of calls that begin and end; only the main thread may use it."""

    def __init__(self) -> None:
        self.entered = self.left = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        self.left = self.entered


INSIDE = _Inside()
"""``with INSIDE:`` is such a call."""


def calls() -> tuple[int, int]:
    """Return how many such calls this process has entered, and how many it has left."""
    return INSIDE.entered, INSIDE.left
