"""Who is fastest in a case, by how much, and how sure that is.

Imports its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from d5suite.report.order import Rounds, fastest_first, rounds_of
from d5suite.statistics.changes import Change, Series, change, series_of

CONFIDENCE = 0.95
"""Confidence of a lead's interval."""

_T = TypeVar("_T")


class Lead(NamedTuple):
    """The fastest result of some that can be compared.

    Attributes
    ----------
    first : int
        Place of the fastest.
    second : int or None
        Place of the next; None if there is no other.
    by : Change or None
        How many times as long the next takes, with its interval.
    close : list of int
        Places of those that may be as fast: their interval includes 1. The next is one of them if
        there are any.
    """

    first: int
    second: int | None
    by: Change | None
    close: list[int]


def lead_of(results: Sequence[_T], record: Callable[[_T], Any], between_runs: float) -> Lead:
    """Find the fastest of results by the time of an item.

    Parameters
    ----------
    results : sequence
        At least one; of one case, measurement and set of conditions.
    record : callable
        The record of a result.
    between_runs : float
        Standard deviation of a median's logarithm from process to process
        (`d5suite.report.thresholds.Threshold`): each backend ran in a process of its own. Those
        that took turns with each other are compared by their rounds instead, as
        `d5suite.report.order` does.
    """
    records = [record(result) for result in results]
    rounds = _in_turn(records)
    if rounds:  # drifts of the machine are in all of them
        order = fastest_first(dict(enumerate(rounds)))
        places = [place for place, _ in order]
        by = {place: Change(each.ratio, each.low, each.high) for place, each in order[1:]}
    else:
        samples = [_of_items(info) for info in records]
        places = sorted(range(len(samples)), key=lambda place: samples[place].median)
        by = {
            place: change(samples[places[0]], samples[place], between_runs=between_runs, confidence=CONFIDENCE)
            for place in places[1:]
        }
    first, *others = places
    if not others:
        return Lead(first, None, None, [])
    return Lead(first, others[0], by[others[0]], [place for place in others if by[place].low <= 1])


def _of_items(info: Any) -> Series:
    """Return a record's samples divided by their items, so that sample sizes do not matter."""
    items = info["throughput"]["value"] * info["median_s"]
    return series_of([seconds / items for seconds in info["data"]])


def _in_turn(records: Sequence[Any]) -> list[Rounds]:
    """Return the rounds of results that were all measured in turn; empty if they were not."""
    tokens = {tuple(each["group"] for each in info.get("turns", ())) for info in records}
    if len(tokens) != 1 or tokens == {()}:
        return []
    rounds = [rounds_of(info) for info in records]
    return rounds if len({tuple(map(len, each)) for each in rounds}) == 1 else []
