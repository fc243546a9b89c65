"""The component of a workflow that a rank belongs to. Imports `d5suite.errors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from d5suite.errors import ConfigurationError


def placed(components: Sequence[Mapping[str, Any]], size: int, *, interleaved: bool = False) -> dict[str, list[int]]:
    """Return the job's ranks by component.

    Parameters
    ----------
    components : sequence of mapping
        Components with ``name`` and ``ranks``; None for all ranks that the others leave.
    size : int
        Number of ranks of the job.
    interleaved : bool
        Whether components take turns in the order of ranks, instead of following each other.

    Raises
    ------
    ConfigurationError
        If the components do not fit this number of ranks.
    """
    fixed = sum(each["ranks"] or 0 for each in components)
    open_ones = [each for each in components if each["ranks"] is None]
    left = size - fixed
    if left < len(open_ones) or (left and not open_ones):
        least = fixed + len(open_ones)
        raise ConfigurationError(
            f"the workflow needs {least}{' or more' if open_ones else ''} ranks, not {size}", where="--ranks",
            hint=f"Give --ranks {least}.",
        )  # fmt: skip
    counts = {each["name"]: each["ranks"] for each in components}
    for number, each in enumerate(open_ones):
        counts[each["name"]] = left // len(open_ones) + (number < left % len(open_ones))
    if interleaved:
        turns = max(counts.values())
        order = [name for turn in range(turns) for name, count in counts.items() if turn < count]
    else:
        order = [name for name, count in counts.items() for _ in range(count)]
    return {name: [rank for rank, own in enumerate(order) if own == name] for name in counts}


def rank_named(rank: int, ranks: int, places: Mapping[str, Sequence[int]]) -> str:
    """Return a text such as ``rank 1 of 2``, with the rank's component, if any."""
    component = next((f" ({name})" for name, own in places.items() if rank in own), "")
    return f"rank {rank} of {ranks}{component}"
