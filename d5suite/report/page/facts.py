"""The numbers of a result in a row's details. Imports its neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from d5suite.report.ceilings import describe_share
from d5suite.report.formats import figure

_Told = Mapping[str, Callable[[Any], str]]
"""Functions that format a field, by the field's name."""


def shortened(text: str, most: int = 90) -> str:
    """Return the text, or its beginning with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def distinct(names: Sequence[str], most: int) -> dict[str, str]:
    """Shorten names so that different ones stay different: if alike, they keep their ends, too."""
    cut = {name: shortened(name, most) for name in names}
    alike = Counter(cut.values())
    for name, text in cut.items():
        if alike[text] > 1:
            end = name[-(most // 2) :]
            cut[name] = f"{name[: most - 1 - len(end)]}…{end}"
    return cut


def seconds(value: float) -> str:
    """Format a time with its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * scale >= 1 or unit == "µs":
            return f"{figure(value * scale)}\N{NO-BREAK SPACE}{unit}"
    raise AssertionError


def rate(info: Mapping[str, Any]) -> str:
    """Format a throughput with its unit."""
    return f"{figure(info['throughput']['value'])} {shortened(info['throughput']['unit'], 20)}"


def facts_of(info: Mapping[str, Any]) -> list[list[str]]:
    """Return names and texts of a record's numbers."""
    low, high = info["median_ci95"]
    lines = [
        [
            "median",
            f"{seconds(info['median_s'])} ({seconds(low)} to {seconds(high)}, {info['median_ci_confidence']:.1%})",
        ],
        ["throughput", rate(info)],
        ["samples", f"{len(info['data'])}, stopped by {info['stopped_by']}"],
        ["steady", "yes" if info["steady"] else "no: it was still changing when sampling began"],
        ["first call", f"{seconds(info['first_call_s'])}, {seconds(info['compile_s'])} beyond the median"],
    ]
    known = info.get("fraction_of_ceiling") or {}
    lines += [["ceiling", describe_share(info, rate)] for rate, share in known.items() if share is not None]
    memory = info.get("memory", {})
    for name, value in memory.items():
        if name.endswith("_bytes"):
            lines.append([f"{name.removesuffix('_bytes').replace('_', ' ')} memory", _mebibytes(value)])
        elif name not in ("nvml", "missing"):
            lines.append([name.replace("_", " "), shortened(str(value), 300)])
    if "missing" in memory:
        lines.append(["memory", f"not taken: {shortened(str(memory['missing']), 300)}"])
    for title, facts, tell in (
        ("memory by the driver", memory.get("nvml"), _DRIVER),
        ("energy", info.get("energy"), _ENERGY),
        ("device's clock", info.get("device_events"), _CLOCK),
        ("L2 cache", info.get("l2_cold"), _COLD),
    ):
        if facts:
            missing = facts.get("missing")
            text = f"not taken: {missing}" if missing else "; ".join(_known(facts, tell))
            lines.append([title, shortened(text, 300)])
    return lines


def _mebibytes(value: float) -> str:
    return f"{figure(value / 2**20)} MiB"


def _known(facts: Mapping[str, Any], texts: _Told) -> Iterator[str]:
    return filter(None, (tell(facts[name]) for name, tell in texts.items() if name in facts))


_DRIVER: _Told = {
    "peak_bytes": lambda value: f"peak {_mebibytes(value)}",
    "baseline_bytes": lambda value: f"{_mebibytes(value)} before",
    "of": lambda value: f"of {value}",
}

_ENERGY: _Told = {
    "joules_per_item": lambda value: f"{figure(value)} J per item",
    "joules_per_step": lambda value: f"{figure(value)} J per step",
    "error_j": lambda value: f"which may be off by {figure(value)} J",
    "mean_power_w": lambda value: f"{figure(value)} W on average",
    "steps": lambda value: f"{value} steps",
    "seconds": seconds,
    "method": str,
    "of": lambda value: f"of {value}",
}

_CLOCK: _Told = {
    "trusted": lambda value: "" if value else "not trusted, because it went backwards",
    "agree": lambda value: "agrees with the host's" if value else "disagrees with the host's",
    "median_s": lambda value: f"median {seconds(value)}",
    "difference_s": lambda value: f"the host's is {seconds(abs(value))} {'shorter' if value < 0 else 'longer'}",
    "launch_overhead_s": lambda value: f"launch overhead {seconds(value)}",
}

_COLD: _Told = {
    "cache_bytes": lambda value: f"cold: {_mebibytes(value)}",
    "buffer_bytes": lambda value: f"{_mebibytes(value)} written before each sample",
}
