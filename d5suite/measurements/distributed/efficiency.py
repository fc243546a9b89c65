"""Scaling of results of several ranks: speed-up and efficiency.

Imports the standard library and `d5suite.measurements.base`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from d5suite.measurements.base import Measurement


class MeasurementOfRanks(Measurement):
    """A measurement of several ranks, compared with fewer ranks in the same run."""

    level = 3
    derived = ("scaling",)

    @classmethod
    def derive(cls, records: Sequence[dict[str, Any]]) -> None:
        add_efficiency(records)


def add_efficiency(records: Sequence[dict[str, Any]]) -> None:
    """Add speed-up and efficiency to each result with more ranks than the fewest in its run.

    The baseline has the same case, backend and threads per rank, and the same scheme if there is
    such a result. Weak scaling keeps the batch per rank, strong scaling the total batch. A result
    of neither kind gets no scaling.
    """
    for each in records:
        each.pop("scaling", None)
        alike = [other for other in records if other["ranks"] < each["ranks"] and _pair(other) == _pair(each)]
        alike.sort(key=lambda other: (other["ranks"], _scheme(other) != _scheme(each)))
        for baseline in alike[:1]:
            mode = _mode(baseline, each)
            if mode is not None:
                speed_up = each["throughput"]["value"] / baseline["throughput"]["value"]
                each["scaling"] = {
                    "mode": mode,
                    "baseline": {"ranks": baseline["ranks"], "throughput": baseline["throughput"]["value"]},
                    "speed_up": speed_up,
                    "efficiency": speed_up * baseline["ranks"] / each["ranks"],
                }


def _pair(record: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("recipe", "measurement", "device", "precision", "preset", "seed")
    per_rank = record["threads"] // record["ranks"] if record["device"] == "cpu" else 0
    return (record["backend"]["name"], record["backend"]["mode"], per_rank, *(record[name] for name in names))


def _scheme(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["distributed"]["scheme"], record["distributed"]["settings"]


def _mode(baseline: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    if baseline["batch_size"] == record["batch_size"]:
        return "weak"
    same = baseline["batch_size"] * baseline["ranks"] == record["batch_size"] * record["ranks"]
    return "strong" if same else None
