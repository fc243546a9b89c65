"""Spans of time: begin and end of each in an array, (n, 2). Imports NumPy."""

from __future__ import annotations

import numpy as np


def merged(spans: np.ndarray) -> np.ndarray:
    """Return the union of spans, in order: those that overlap or touch are one."""
    begin, end = spans[spans[:, 1] > spans[:, 0]].T
    if not len(begin):
        return spans[:0]
    order = np.argsort(begin, kind="stable")
    begin, until = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, begin[1:] > until[:-1]))
    last = np.append(first[1:] - 1, len(begin) - 1)
    return np.stack([begin[first], until[last]], axis=1)


def common(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return how much of each span of a union, from `merged`, another union covers."""
    if not len(other):
        return np.zeros(len(one), other.dtype)
    lengths = np.append(0, np.cumsum(other[:, 1] - other[:, 0]))

    def covered(at: np.ndarray) -> np.ndarray:
        """Return the length of the other union before each time."""
        place = np.searchsorted(other[:, 0], at, side="right")
        begin, end = other[np.maximum(place - 1, 0)].T
        inside = np.minimum(at, end) - begin
        return np.where(place > 0, lengths[np.maximum(place - 1, 0)] + np.maximum(inside, 0), 0)

    return covered(one[:, 1]) - covered(one[:, 0])
