"""A machine of several nodes, as a file describes it: ceilings, links, and the source of each.

Imports `d5suite.errors` and `d5suite.files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
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
        Of a device: bytes, and bytes per second.
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


def read_machine(path: Path) -> Machine:
    """Read a machine file.

    Every figure is an object with ``value`` and ``source``.

    Raises
    ------
    JobError
        If the file cannot be read or is not JSON.
    ConfigurationError
        If it lacks a figure or its source, or has one that is not positive.
    """
    content = read_content(path)
    name = content["name"]
    if "ceilings" in content and not any(each.name in content for each in fields(Machine) if each.name != "name"):
        raise ConfigurationError(
            "this machine file has measured ceilings, but none of the figures of devices and links",
            where=str(path),
            hint="Add those of a file in examples/machines/; docs/models.md explains them.",
        )
    sources: dict[str, str] = {}
    own = _figures(content, Machine, path, "", sources, leave=("name", "calibration", "sources", *MEASURED))
    inner = content.get("calibration")
    if not isinstance(inner, dict):
        raise ConfigurationError("the machine has no calibration", where=f"{path}, calibration")
    calibration = Calibration(**_figures(inner, Calibration, path, "calibration.", sources))
    if own["devices_per_node"] != int(own["devices_per_node"]):
        raise ConfigurationError("this must be a whole number", where=f"{path}, devices_per_node")
    own["devices_per_node"] = int(own["devices_per_node"])
    return Machine(name=name, calibration=calibration, sources=sources, **own)


def read_content(path: Path) -> dict[str, Any]:
    """Read a machine file as it is; only its schema and name are checked.

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
    return content


def _figures(
    content: Mapping[str, Any],
    kind: type,
    path: Path,
    prefix: str,
    sources: dict[str, str],
    leave: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Read the figures that a class has, and note their sources."""
    names = [each.name for each in fields(kind) if each.name not in leave]
    known = {*names, *leave, "schema"}
    if unknown := sorted(set(content) - known):
        raise ConfigurationError(f"unknown: {', '.join(unknown)}", where=str(path), hint=f"Known: {', '.join(names)}.")
    values: dict[str, Any] = {}
    for name in names:
        where, found = f"{path}, {prefix}{name}", content.get(name)
        if not isinstance(found, dict) or not {"value", "source"} >= set(found) >= {"value"}:
            raise ConfigurationError('this must be {"value": NUMBER, "source": TEXT}', where=where)
        value, source = found["value"], found.get("source")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigurationError(f"{value!r} is not a positive number", where=where)
        if not isinstance(source, str) or not source.strip():
            raise ConfigurationError(
                "this figure has no source", where=where, hint="Say who measured it, or that you assume it."
            )
        values[name], sources[f"{prefix}{name}"] = value, source
    return values
