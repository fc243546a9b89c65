"""The share of a machine's ceilings that an operator reaches, and what a share above 1 means.

A share above 1 is explained, or it is not believed. Imports the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

FEWER_OPERATIONS = {"Conv": 6.0, "ConvTranspose": 6.0, "Attention": 4.0}
"""By operator: how many times fewer operations than counted an algorithm may need. Winograd's
F(6×6, 3×3) needs 5.06 times fewer (Lavin and Gray, CVPR 2016); attention may skip masked values."""

FASTER_PRODUCT = 2.0
"""How many times as fast as the matrix product that sets the ceiling another one may be: that one
is not the largest, and does not fill a GPU."""

NEAR = 1.1
"""How many times as fast as the copy that sets the ceiling another may be without a cache."""

CEILING_BYTES = {"cpu": 60 << 20, "cuda": 512 << 20}
"""Bytes that the copy which sets the ceiling reads and writes, by device: fewer bytes may stay in a
cache whose size the result file does not state."""


RATES = {"flops_per_s": ("arithmetic", "GFLOP/s"), "bytes_per_s": ("memory traffic", "GB/s")}
"""The quantity that a ceiling limits, and its unit."""


class Share(NamedTuple):
    """Part of a ceiling.

    Attributes
    ----------
    value : float or None
        1 is the ceiling; None if no ceiling is known, or nothing is computed or moved.
    why : str
        What a value above 1 means; empty up to 1.
    believed : bool
        Whether the value is at most 1, or explained.
    """

    value: float | None
    why: str = ""
    believed: bool = True


def share_of_ceiling(record: Mapping[str, Any], rate: str) -> Share:
    """Return the part of a ceiling that an operator reaches.

    Parameters
    ----------
    record : mapping
    rate : str
        "flops_per_s" or "bytes_per_s".
    """
    value = (record.get("fraction_of_ceiling") or {}).get(rate)
    if not isinstance(value, int | float) or value <= 1:
        return Share(value if isinstance(value, int | float) else None)
    return Share(float(value), *(_arithmetic(record, value) if rate == "flops_per_s" else _memory(record, value)))


def _arithmetic(record: Mapping[str, Any], value: float) -> tuple[str, bool]:
    fewer = FEWER_OPERATIONS.get(record.get("operator", ""), 1.0)
    if fewer > 1 and value <= fewer * FASTER_PRODUCT:
        return "its algorithm needs fewer operations than are counted", True
    if value <= FASTER_PRODUCT:
        return "the product that sets the ceiling is not the fastest one possible", True
    return f"it claims {value:.3g} times the machine's ceiling of arithmetic, and nothing explains that", False


def _memory(record: Mapping[str, Any], value: float) -> tuple[str, bool]:
    moved = (record.get("work") or {}).get("bytes") or 0
    cache = _cache_bytes(record)
    if cache is not None and moved <= cache:
        return f"its {_mega(moved)} fit into the cache of {_mega(cache)}, so memory does not limit it", True
    if cache is None and moved < CEILING_BYTES[record.get("device", "cpu")]:
        return f"its {_mega(moved)} may stay in a cache, whose size this file does not tell", True
    if value <= NEAR:
        return "the copy that sets the ceiling is not the fastest one possible", True
    return f"it claims {value:.3g} times the machine's ceiling of memory, and does not fit into a cache", False


def _cache_bytes(record: Mapping[str, Any]) -> int | None:
    """Return the bytes of the cache that the tensors may be in; 0 if it was made cold."""
    if record.get("l2_cold"):
        return 0
    found = ((record.get("environment") or {}).get("cpu") or {}).get("cache_bytes")
    return found if isinstance(found, int) and record.get("device") == "cpu" else None


def _mega(value: float) -> str:
    return f"{value / 1e6:.3g} MB"


def not_believed(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a rate above a ceiling is not believed: nothing follows from such times."""
    for rate in record.get("fraction_of_ceiling") or ():
        share = share_of_ceiling(record, rate)
        if not share.believed:
            yield share.why


def describe_share(record: Mapping[str, Any], rate: str) -> str:
    """Name the ceiling of a rate, the part of it that a result reaches, and what above 1 means."""
    kind, unit = RATES.get(rate, (rate.replace("_", " "), ""))
    ceiling = (record.get("ceiling") or {}).get(rate)
    text = f", {ceiling['value'] / 1e9:.4g} {unit} with {ceiling['backend']}" if ceiling and unit else ""
    share = share_of_ceiling(record, rate)
    return f"{100 * (share.value or 0):.0f}% of the ceiling of {kind}{text}" + (f"; {share.why}" if share.why else "")
