"""Lines under a table that say where ranks ran, and which is slow.

Imports `d5suite.measurements` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from d5suite.measurements.distributed.placement import SCHEMA
from d5suite.report.reading import printable

MOST_RANKS = 16
"""Ranks of one map that get a line."""

STRAGGLER = 1.25
"""Least ratio at which a line names the slowest rank."""


def placement_lines(shown: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of each distinct placement of ranks.

    Parameters
    ----------
    shown : sequence of mapping
        Records; those without a ``placement``, or of one rank, have no map.
    """
    from jsonschema import Draft202012Validator

    fits = Draft202012Validator(SCHEMA).is_valid  # a measurement of another package may record anything
    maps: dict[tuple[str, ...], list[str]] = {}
    for info in shown:
        ranks = info.get("placement")
        if ranks and fits(ranks) and len(ranks) > 1:
            name = str(info.get("communicator") or info.get("distributed", {}).get("communicator", ""))
            names = maps.setdefault(tuple(map(_place, ranks)), [])
            names += [name] * (name not in names)
    for places, names in maps.items():
        yield printable(f"{len(places)} ranks over {', '.join(names)}:")
        yield from (printable(f"  rank {rank}: {place}") for rank, place in enumerate(places[:MOST_RANKS]))
        if len(places) > MOST_RANKS:
            yield f"  and {len(places) - MOST_RANKS} more, in the record"


def straggler_lines(shown: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a line for each result in which one rank computes much longer than the others.

    Parameters
    ----------
    shown : sequence of (str, mapping)
        Names and records.
    """
    for name, info in shown:
        facts = info.get("distributed", {})
        ratio, rank = facts.get("straggler_ratio"), facts.get("slowest_rank")
        if rank is not None and ratio is not None and ratio >= STRAGGLER:
            host = next((each["host"] for each in facts["ranks"] if each["rank"] == rank), "its host")
            yield printable(f"{name}: rank {rank} on {host} computes {ratio:.2f} times as long as the others' mean")


def _place(rank: Mapping[str, Any]) -> str:
    """Return a rank's place in words."""
    way = [rank["transport"], rank["interface"], rank["address"]]
    parts = [
        rank["host"],
        _named("core", rank["cpus"]),
        _named("socket", rank["sockets"]),
        _named("NUMA node", rank["numa_nodes"]),
        f"GPU {rank['gpu']}" if rank["gpu"] else "",
        " ".join(filter(None, way)),
        f"its card at NUMA node {rank['nic_numa_node']}" if rank["nic_numa_node"] is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _named(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {_ranges(numbers)}" if numbers else ""


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as in ``0-3,8``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
