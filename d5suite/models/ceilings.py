"""The ceilings in a machine file: measured by ``d5suite machine``, or written by hand.

Imports `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.models.machine import check_positive, check_source, figure, read_content

KINDS = ("flops", "bandwidth", "host_to_device", "storage", "transport")
"""What a ceiling limits."""

WHOLE = 0
"""Capacity of a level that holds everything: memory."""

HALF = ("bf16", "fp16")
"""Precisions of the figure ``peak_flops``."""

FIGURES = ("value", "alpha_s", "beta_s_per_byte")
"""Figures of a ceiling, of which it has at least one."""


@dataclass(frozen=True)
class MemoryLevel:
    """A level of memory.

    Attributes
    ----------
    name : str
        L1, L2, … or memory.
    capacity_bytes : int
        `WHOLE` for memory.
    bytes_per_s : float
    """

    name: str
    capacity_bytes: int
    bytes_per_s: float

    def holds(self, size: float) -> bool:
        """Return whether so many bytes fit."""
        return self.capacity_bytes == WHOLE or size <= self.capacity_bytes


@dataclass(frozen=True)
class Roof:
    """What limits a step on so many threads.

    Attributes
    ----------
    flops_per_s : float
    levels : tuple of MemoryLevel
        The smallest first.
    notes : tuple of str
        Which ceilings are in doubt.
    """

    flops_per_s: float
    levels: tuple[MemoryLevel, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of a machine.

    Attributes
    ----------
    name : str
    host : mapping
        What identifies the machine; empty in a file written by hand.
    entries : sequence of mapping
        Each with ``what``, a figure and ``source``.
    not_kept, missing : sequence
        What was measured on a disturbed machine, and what is missing.
    """

    name: str
    host: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]
    not_kept: Sequence[Mapping[str, Any]] = field(default=())
    missing: Sequence[str] = field(default=())

    def roof(self, *, device: str, precision: str, threads: int) -> Roof | str:
        """Return the roof at some conditions, or why there is none."""
        peaks = [each for each in self._of("flops", device, threads) if each.get("precision", precision) == precision]
        levels = self._of("bandwidth", device, threads)
        at = f"of {threads} thread{'s' * (threads != 1)} on {device}"
        if not peaks:
            return f"the machine file has no ceiling of arithmetic in {precision} {at}"
        if not levels:
            return f"the machine file has no bandwidth {at}"
        known = [
            MemoryLevel(str(each.get("level", "memory")), int(each.get("capacity_bytes", WHOLE)), float(each["value"]))
            for each in levels
        ]
        known.sort(key=lambda each: (each.capacity_bytes == WHOLE, each.capacity_bytes))
        notes = [
            f"{each.get('level', 'arithmetic')}: {each['source']}"
            for each in (*peaks, *levels)
            if each.get("agrees") is False
        ]
        peak = max(float(each["value"]) for each in peaks)
        fewer = [one for count in self._fewer(device, threads) for one in self._of("flops", device, count)]
        best = max([peak, *(float(one["value"]) for one in fewer if one.get("precision", precision) == precision)])
        if best > peak:
            notes.append("arithmetic: measured slower than on fewer threads, whose ceiling counts")
        if known[-1].capacity_bytes != WHOLE:
            notes.append(f"memory has no ceiling: what is larger than {known[-1].name} is held against that")
        return Roof(best, tuple(self._raised(known, device, threads, notes)), tuple(notes))

    def _raised(
        self, levels: Sequence[MemoryLevel], device: str, threads: int, notes: list[str]
    ) -> Iterator[MemoryLevel]:
        """Yield levels, each at least as fast as on fewer threads, and as larger levels are.

        More threads, and a nearer level, can do all that fewer threads and a farther level do.
        """
        fastest: dict[str, float] = {}
        for one in (one for count in self._fewer(device, threads) for one in self._of("bandwidth", device, count)):
            name = str(one.get("level", "memory"))
            fastest[name] = max(fastest.get(name, 0.0), float(one["value"]))
        found: list[MemoryLevel] = []
        for each in reversed(levels):
            ways = {"": each.bytes_per_s, "on fewer threads": fastest.get(each.name, 0.0)}
            if found:
                ways[found[-1].name] = found[-1].bytes_per_s
            best = max(ways, key=ways.__getitem__)
            if best:
                notes.append(f"{each.name}: measured slower than {best}, whose ceiling counts")
            found.append(replace(each, bytes_per_s=ways[best]))
        yield from reversed(found)

    def _fewer(self, device: str, threads: int) -> list[int]:
        """Return smaller numbers of threads that have ceilings."""
        known = {each.get("threads", threads) for each in self.entries} if device == "cpu" else set()
        return sorted(each for each in known if each < threads)

    def _of(self, what: str, device: str, threads: int) -> list[Mapping[str, Any]]:
        """Return the ceilings of a kind; on a device other than the CPU, threads do not matter."""
        return [
            each
            for each in self.entries
            if each["what"] == what
            and each.get("device", device) == device
            and (device != "cpu" or each.get("threads", threads) == threads)
        ]


def read_ceilings(path: Path) -> Ceilings:
    """Read the ceilings of a machine file.

    The figures ``peak_flops``, in 16 bits, and ``memory_bandwidth`` are ceilings, too, where
    ``ceilings`` has none of their kind.

    Raises
    ------
    JobError
        If the file cannot be read or is not JSON.
    ConfigurationError
        If a ceiling lacks its figure or source, or the file has none.
    """
    content = read_content(path)
    given = content.get("ceilings", [])
    if not isinstance(given, list):
        raise ConfigurationError("this must be a list of ceilings", where=f"{path}, ceilings")
    for number, each in enumerate(given):
        _check(each, f"{path}, ceilings.{number}")
    entries = [*given, *_by_hand(content, given, path)]
    if not entries:
        raise ConfigurationError(
            "this machine file has no ceilings",
            where=f"{path}, ceilings",
            hint="Measure them: d5suite machine -o FILE.",
        )
    host = content.get("host", {})
    if not isinstance(host, dict):
        raise ConfigurationError("this must be an object", where=f"{path}, host")
    lists = {key: content.get(key, []) for key in ("not_kept", "missing")}
    for key, kind in (("not_kept", dict), ("missing", str)):
        if not isinstance(lists[key], list) or not all(isinstance(each, kind) for each in lists[key]):
            raise ConfigurationError("this must be a list, as d5suite machine writes it", where=f"{path}, {key}")
    return Ceilings(content["name"], host, entries, lists["not_kept"], lists["missing"])


def _by_hand(
    content: Mapping[str, Any], given: Sequence[Mapping[str, Any]], path: Path
) -> Iterator[Mapping[str, Any]]:  # fmt: skip
    """Yield the figures that are ceilings of a kind of which none is given."""
    peak, memory = (figure(content, name, f"{path}, {name}") for name in ("peak_flops", "memory_bandwidth"))
    precisions = {each.get("precision") for each in given if each["what"] == "flops"}
    levels = {each.get("level", "memory") for each in given if each["what"] == "bandwidth"}
    if peak is not None:
        for precision in HALF:
            if not {precision, None} & precisions:
                yield {"what": "flops", "precision": precision, "value": peak[0], "source": peak[1]}
    if memory is not None and "memory" not in levels:
        yield {"what": "bandwidth", "level": "memory", "value": memory[0], "source": memory[1]}


def _check(each: Any, where: str) -> None:
    """Raise `ConfigurationError` unless a ceiling has a kind, a positive figure and a source."""
    if not isinstance(each, dict) or each.get("what") not in KINDS:
        raise ConfigurationError(f"a ceiling's 'what' is one of {', '.join(KINDS)}", where=where)
    figures = [key for key in FIGURES if key in each]
    if not figures or (each["what"] in ("flops", "bandwidth") and "value" not in each):
        raise ConfigurationError("this ceiling has no value", where=where)
    for key in (*figures, "threads", "capacity_bytes"):
        or_zero = key in ("capacity_bytes", "alpha_s", "beta_s_per_byte")
        check_positive(each.get(key, 1), f"{where}.{key}", or_zero=or_zero)
    check_source(each.get("source"), "this ceiling", where)
    for key in ("precision", "level", "device", "transport"):
        if key in each and not isinstance(each[key], str):
            raise ConfigurationError("this must be text", where=f"{where}.{key}")


def other_machine(host: Mapping[str, Any], environment: Mapping[str, Any], device: str, device_name: str) -> str | None:
    """Return how a result's machine differs from that of a file, or None.

    Parameters
    ----------
    host : mapping
        Host in the machine file; a file written by hand need not have these facts.
    environment : mapping
        Environment in the result's record.
    device, device_name : str
        Device in the record.
    """
    cpu = environment.get("cpu") or {}
    pairs = [("CPU", host.get("cpu"), cpu.get("model"))]
    pairs.append(("number of CPUs", host.get("cpus"), cpu.get("logical_cores")))
    if device != "cpu":
        pairs.append(("device", host.get("device_name"), device_name))
    for what, theirs, ours in pairs:
        if theirs is not None and ours is not None and theirs != ours:
            return f"the {what} of the machine file is {theirs}, and of the result {ours}"
    return None
