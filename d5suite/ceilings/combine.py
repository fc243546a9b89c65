"""Several ways to one ceiling: the best way counts, and the source says whether another agrees.

Imports the standard library, NumPy and `d5suite.statistics`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from d5suite.statistics.intervals import median_interval

AGREE = 0.05
"""Largest relative difference of two ways that count as agreeing."""

KEYS = ("what", "precision", "level", "capacity_bytes", "working_set_bytes", "threads", "device")
"""Keys that tell ceilings apart; a way holds the keys that apply."""


def way_of(
    way: str, by: Sequence[str], work: float, samples_s: Sequence[float], disturbed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the rates of one way.

    Parameters
    ----------
    way : str
        How the ceiling was measured, for people to read.
    by : sequence of str
        The libraries that computed: ways that share a library do not confirm each other.
    work : float
        Operations or bytes of a call.
    samples_s : sequence of float
        Seconds of calls. The fastest call sets the ceiling, as in STREAM; the median shows how
        steady the calls are.
    disturbed : sequence of str
        Why the machine was not quiet; empty if it was.
    """
    low, high = median_interval(samples_s)
    return {
        "way": way,
        "by": list(by),
        "value": work / min(samples_s),
        "median": work / statistics.median(samples_s),
        "interval": [work / high, work / low],
        "samples": len(samples_s),
        "disturbed": list(disturbed),
    }


def combined(ways: Iterable[Mapping[str, Any]], when: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the ceilings, and the ways that a disturbed machine spoiled.

    Parameters
    ----------
    ways : iterable of mapping
        Ways from `way_of`, with the keys among `KEYS` that apply.
    when : str
        Date and time, for the source of the ceilings.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    spoiled = []
    for each in ways:
        if each["disturbed"]:
            spoiled.append(dict(each))
        else:
            groups.setdefault(tuple(each.get(key) for key in KEYS), []).append(each)
    return [_ceiling(group, own, when) for group, own in groups.items()], spoiled


def _ceiling(group: Sequence[Any], ways: list[Mapping[str, Any]], when: str) -> dict[str, Any]:
    best, *others = sorted(ways, key=lambda each: -each["value"])
    other = next((each for each in others if not set(each["by"]) & set(best["by"])), None)
    apart = None if other is None else 1 - other["value"] / best["value"]
    if other is None or apart is None:
        said = "no independent way confirms it"
    elif apart <= AGREE:
        said = f"{other['way']} agrees within {apart:.1%}"
    else:
        said = f"the best independent way, {other['way']}, is {apart:.0%} below: they do not agree"
    return {
        **{key: value for key, value in zip(KEYS, group, strict=True) if value is not None},
        "value": best["value"],
        "source": f"measured {when}: {best['way']}; {said}",
        "agrees": None if apart is None else apart <= AGREE,
        "apart": apart,
        "ways": [
            {key: value for key, value in each.items() if key not in KEYS and key != "disturbed"}
            for each in (best, *others)
        ],
    }
