"""A machine of several nodes, as a file describes it: ceilings, links, and the source of each.

Imports `d5suite.errors` and `d5suite.files`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.files import read_json

SCHEMA = "d5suite-machine-1"
"""The only format that is read."""

MEASURED = ("ceilings", "host", "not_kept", "missing")
"""What ``d5suite machine`` adds; `d5suite.models.ceilings` reads it."""


@dataclass(frozen=True)
class Calibration:
    """How far real software stays below the ceilings, on this kind of machine.

    Attributes
    ----------
    gemm_peak_share : float
        Share of the peak rate that a very large matrix product reaches.
    gemm_half_size, gemm_exponent : float
        A product of relative size x (tokens × width² / tensor-parallel devices) reaches the share
        ``gemm_peak_share / (1 + (gemm_half_size / x) ** gemm_exponent)``.
    elementwise_passes : float
        How often each byte of a layer's activations is moved per direction.
    layer_floor_s : float
        Least seconds of a layer, forward and backward: its kernels must be launched.
    head_passes : float
        How often the scores over the vocabulary, in float32, are moved per direction.
    reduction_latency_s : float
        Seconds of a tensor-parallel all-reduce besides its bytes, times log2 of the devices.
    exposed_share : float
        Share of the time of the gradients' all-reduce that computing does not hide.
    fixed_s : float
        Seconds of a step that depend on nothing.
    error_90 : float
        Relative error that nine in ten predictions stay below, on points left out of the fit.
    """

    gemm_peak_share: float
    gemm_half_size: float
    gemm_exponent: float
    elementwise_passes: float
    layer_floor_s: float
    head_passes: float
    reduction_latency_s: float
    exposed_share: float
    fixed_s: float
    error_90: float


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices.

    Attributes
    ----------
    name : str
    devices_per_node : int
    peak_flops : float
        Floating-point operations per second of a device in half precision, with float32 sums.
    memory_bytes, memory_bandwidth : float
        Per device: bytes, and bytes per second.
    link_bandwidth : float
        Bytes per second that a device sends to the others of its node in a collective operation.
    network_bandwidth : float
        Bytes per second that a device sends to other nodes.
    network_latency_s : float
        Seconds of a message between nodes, besides its bytes.
    calibration : Calibration
    sources : mapping of str to str
        By attribute: where its figure comes from.
    """

    name: str
    devices_per_node: int
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    network_latency_s: float
    calibration: Calibration
    sources: Mapping[str, str]


PLAUSIBLE: Mapping[str, tuple[float, float, str]] = {
    "devices_per_node": (1, 1e6, "a number of devices"),
    "peak_flops": (1e8, 1e20, "operations per second"),
    "memory_bytes": (2**20, 1e16, "bytes"),
    "memory_bandwidth": (1e7, 1e17, "bytes per second"),
    "link_bandwidth": (1e4, 1e17, "bytes per second"),
    "network_bandwidth": (1e4, 1e17, "bytes per second"),
    "network_latency_s": (1e-9, 1.0, "seconds"),
}
"""Least and most that a figure may be: what is outside was written in another unit."""

KEYS = ("schema", *(each.name for each in fields(Machine) if each.name != "sources"), *MEASURED, "steps")
"""What a machine file may have."""


def read_machine(path: Path) -> Machine:
    """Read a machine file.

    Every figure is an object with ``value`` and ``source``.

    Raises
    ------
    JobError
        If the file cannot be read or is not JSON.
    ConfigurationError
        If it lacks a figure or its source, or has one that cannot be.
    """
    content = read_content(path)
    if "ceilings" in content and not any(each in content for each in PLAUSIBLE):
        raise ConfigurationError(
            "this machine file has measured ceilings, but none of the figures of devices and links",
            where=str(path),
            hint="Add those of a file in examples/machines/; docs/models.md explains them.",
        )
    sources: dict[str, str] = {}
    own: dict[str, Any] = {}
    for name in PLAUSIBLE:
        own[name], sources[name] = required_figure(content, name, f"{path}, {name}")
    own["devices_per_node"] = int(own["devices_per_node"])
    inner, where = content.get("calibration"), f"{path}, calibration"
    if not isinstance(inner, dict):
        raise ConfigurationError(
            "the machine has no calibration",
            where=where,
            hint="docs/models.md explains it; copy that of a like machine.",
        )
    names = [each.name for each in fields(Calibration)]
    _refuse_unknown(inner, names, where)
    values: dict[str, float] = {}
    for name in names:
        values[name], sources[f"calibration.{name}"] = required_figure(inner, name, f"{where}.{name}")
    return Machine(name=content["name"], calibration=Calibration(**values), sources=sources, **own)


def read_content(path: Path) -> dict[str, Any]:
    """Read a machine file as it is; only its schema, its name and the names in it are checked.

    Raises
    ------
    JobError
        If the file cannot be read or is not JSON.
    ConfigurationError
        If it is not a machine file.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"this is not a machine file: its schema is not {SCHEMA!r}",
            where=str(path),
            hint="Measure this machine with d5suite machine -o FILE, or copy a file of examples/machines/ and replace "
            "its figures; docs/models.md explains them.",
        )
    name = content.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError("the machine has no name", where=f"{path}, name")
    _refuse_unknown(content, KEYS, str(path))
    return content


def figure(content: Mapping[str, Any], name: str, where: str) -> tuple[float, str] | None:
    """Return a figure of a machine file and its source; None if it is not there.

    Raises
    ------
    ConfigurationError
        If it has no source, or is not a positive number that can be.
    """
    found = content.get(name)
    if found is None:
        return None
    if not isinstance(found, dict) or not {"value", "source"} >= set(found) >= {"value"}:
        raise ConfigurationError('this must be {"value": NUMBER, "source": TEXT}', where=where)
    value, source = found["value"], found.get("source")
    check_positive(value, where)
    check_source(source, "this figure", where)
    least, most, unit = PLAUSIBLE.get(name, (0.0, float("inf"), ""))
    if not least <= value <= most:
        raise ConfigurationError(
            f"{value:g} cannot be: this figure is in {unit}", where=where,
            hint=f"It is from {least:g} to {most:g}: 900 GB/s is 900e9, 16 GiB is 17179869184, and 5 µs is 5e-6.",
        )  # fmt: skip
    if name == "devices_per_node" and value != int(value):
        raise ConfigurationError("this must be a whole number", where=where)
    return float(value), str(source)


def check_positive(value: Any, where: str, *, kind: type | UnionType = int | float, or_zero: bool = False) -> None:
    """Raise `ConfigurationError` unless a value is finite and above 0, or 0 if that is right."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not (value >= 0 if or_zero else value > 0) or value == float("inf"):
        raise ConfigurationError(f"{value!r} is not a positive number", where=where)


def check_source(source: Any, what: str, where: str) -> None:
    """Raise `ConfigurationError` unless something says where it comes from."""
    if not isinstance(source, str) or not source.strip():
        hint = "Say who measured it, or that you assume it."
        raise ConfigurationError(f"{what} has no source", where=where, hint=hint)


def required_figure(content: Mapping[str, Any], name: str, where: str) -> tuple[float, str]:
    """Return a figure and its source, as `figure` does, or raise if it is not there."""
    found = figure(content, name, where)
    if found is None:
        raise ConfigurationError('this must be {"value": NUMBER, "source": TEXT}, and is missing', where=where)
    return found


def _refuse_unknown(content: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise `ConfigurationError` if a name is misspelt: its figure would be taken for missing."""
    if unknown := sorted(set(content) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1)
        raise ConfigurationError(
            f"unknown: {', '.join(unknown)}" + (f"; is {unknown[0]} meant to be {near[0]}?" if near else ""),
            where=where,
            hint=f"Known: {', '.join(known)}.",
        )
