"""Who is fastest, by how much, and who is within noise of whom: from rounds taken in turn.

Only backends that took turns with each other, under equal conditions, are put in order. Imports
`d5suite.statistics` and its neighbours.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from d5suite.errors import JobError
from d5suite.statistics.rounds import LAUNCH_SD, Relation, relation

_Key = TypeVar("_Key")

Rounds = list[list[float]]
"""Median time of each round in seconds, by launch."""


class Order(NamedTuple):
    """Backends that took turns in one measurement, the fastest first.

    Attributes
    ----------
    group : str
        Case and measurement.
    backends : sequence of (str, Relation)
        Each with how many times as long it takes as the fastest.
    noise : sequence of (str, str)
        Pairs without a clear winner.
    notes : sequence of str
        Why not all backends took turns with each other.
    """

    group: str
    backends: Sequence[tuple[str, Relation]]
    noise: Sequence[tuple[str, str]]
    notes: Sequence[str]


def rounds_of(record: Mapping[str, Any]) -> Rounds:
    """Return the rounds of a record from `d5suite.report.reading`; none if it took no turns.

    Raises
    ------
    JobError
        If they do not hold all of its samples.
    """
    launches = record.get("turns", [])
    data = iter(record["data"])
    counts = [count for each in launches for count in each["rounds"]]
    if launches and sum(counts) != len(record["data"]):
        raise JobError(f"its rounds hold {sum(counts)} samples, not {len(record['data'])}", where=record["place"])
    return [[statistics.median(itertools.islice(data, count)) for count in each["rounds"]] for each in launches]


def orders_of(found: Mapping[tuple[str, Any, str], Mapping[str, Any]]) -> list[Order]:
    """Put backends in order, for each measurement that several took turns in.

    Parameters
    ----------
    found : mapping
        Of `d5suite.report.reading.read_benchmarks`, without what failed its validation.

    Raises
    ------
    JobError
        If rounds do not fit the samples, or those of two backends that took turns do not pair.
    """
    together: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for (group, conditions, backend), record in found.items():
        if record.get("turns"):
            tokens = tuple(each["group"] for each in record["turns"])
            together.setdefault((group, conditions, tokens), {})[backend] = record
    orders = []
    for (group, _, _), records in together.items():
        rounds = {backend: rounds_of(record) for backend, record in records.items()}
        notes = [each["note"] for record in records.values() for each in record["turns"] if "note" in each]
        if len(rounds) > 1 or notes:
            orders.append(_order(group, rounds, list(dict.fromkeys(notes)), next(iter(records.values()))["place"]))
    return orders


def _order(group: str, rounds: Mapping[str, Rounds], notes: Sequence[str], place: str) -> Order:
    shapes = {tuple(map(len, each)) for each in rounds.values()}
    if len(shapes) > 1:
        raise JobError("its rounds differ from those of a backend measured in turn", where=place)
    backends = fastest_first(rounds)
    pairs = itertools.combinations((name for name, _ in backends), 2)
    noise = [(one, other) for one, other in pairs if relation(rounds[one], rounds[other]).is_noise]
    return Order(group, backends, noise, notes)


def fastest_first(rounds: Mapping[_Key, Rounds]) -> list[tuple[_Key, Relation]]:
    """Sort backends that took turns, each with the ratio of its time to that of the first."""
    # Medians of ratios do not multiply: the fastest is the one that least is faster than.
    fastest = max(rounds, key=lambda one: min(relation(rounds[one], other).ratio for other in rounds.values()))
    found = [(key, relation(rounds[fastest], own)) for key, own in rounds.items()]
    return sorted(found, key=lambda each: (each[0] != fastest, each[1].ratio))


def order_lines(orders: Sequence[Order]) -> list[str]:
    """Return the lines below the tables that state the order; empty without any."""
    lines = []
    compared = [each for each in orders if len(each.backends) > 1]
    for each in compared:
        (fastest, _), *others = each.backends
        said = [f"{name} {its.ratio:.3f} ({its.low:.2f}–{its.high:.2f})" for name, its in others]
        lines.append(f"  {each.group}: {', '.join([fastest, *said])}")
        if each.noise:
            lines.append(f"    within noise: {', '.join(f'{one} and {other}' for one, other in each.noise)}")
    if lines:
        lines.insert(0, "fastest first, by rounds taken in turn; times as long as the first (95%: another run):")
        if any(first.launches == 1 for each in compared for _, first in each.backends):
            lines.append(
                f"  of one launch: {LAUNCH_SD:.0%} from launch to launch are assumed; --launches 3 measures it"
            )
    return lines + [f"! {note}" for note in dict.fromkeys(note for each in orders for note in each.notes)]
