"""Where a network is to be trained: devices, their memory and roof, and the link between them.

Imports its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import Ceilings, Roof
from d5suite.models.communication import Link
from d5suite.models.machine import figure, read_content

TYPICAL_MESSAGE = 1 << 20
"""Bytes of a message by which transports are ranked."""


@dataclass(frozen=True)
class Site:
    """Equal devices.

    Attributes
    ----------
    devices : int
    memory_bytes : float
        Memory of one device.
    roof : Roof
    link : Link or None
        Between devices; None if there is one only, or the machine file has none.
    assumptions : tuple of str
        What the figures rest on.
    """

    devices: int
    memory_bytes: float
    roof: Roof
    link: Link | None
    assumptions: tuple[str, ...] = ()


def read_site(path: Path, ceilings: Ceilings, *, nodes: int, device: str, precision: str, threads: int) -> Site:
    """Return the site that a machine file describes.

    A measured machine has, by default, as many devices as its CPUs have room for ranks.

    Parameters
    ----------
    path : Path
    ceilings : Ceilings
        Ceilings in this file.
    nodes : int
    device, precision : str
    threads : int
        Threads per rank.

    Raises
    ------
    ConfigurationError
        If the file lacks a roof, the memory, or the network between nodes.
    """
    content = read_content(path)

    def value(name: str) -> float | None:
        found = figure(content, name, f"{path}, {name}")
        return None if found is None else found[0]

    roof = ceilings.roof(device=device, precision=precision, threads=threads)
    if isinstance(roof, str):
        measure = f"d5suite machine -o FILE --device {device} --precision {precision} --threads {threads}"
        raise ConfigurationError(
            roof, where=str(path), hint=f"Measure it: {measure}; or add it to ceilings by hand: docs/rooflines.md."
        )
    host = ceilings.host
    fitting = max(1, int(host.get("cpus", threads)) // threads) if device == "cpu" else 1
    own = int(value("devices_per_node") or fitting)
    memory = value("memory_bytes")
    if memory is None and device == "cpu" and isinstance(host.get("memory_bytes"), int):
        memory = host["memory_bytes"] / own
    if memory is None:
        raise ConfigurationError("this machine file does not say a device's memory", where=f"{path}, memory_bytes")
    link, assumptions = None, []
    if nodes > 1:
        bandwidth, latency = value("network_bandwidth"), value("network_latency_s")
        if bandwidth is None or latency is None:
            raise ConfigurationError(
                "this machine file says nothing of the network between nodes",
                where=str(path),
                hint="Add network_bandwidth and network_latency_s, each with value and source.",
            )
        inside = value("link_bandwidth") or math.inf
        link = Link(latency, 1 / min(own * bandwidth, inside))
        assumptions.append(
            "rings use all adapters of a node; no measurement stands behind gradients that cross the network"
        )
    elif own > 1:
        link = _inside(value("link_bandwidth"), ceilings)
        if link is None:
            assumptions.append("the machine file has no link between its devices: only plans on one are known")
        elif device == "cpu":
            assumptions.append("ranks of one node do not slow each other down, although they share its memory")
    return Site(nodes * own, float(memory), roof, link, tuple(assumptions))


def _inside(bandwidth: float | None, ceilings: Ceilings) -> Link | None:
    """Return the link inside a node: the best measured transport, or the figure by hand."""
    measured = [
        Link(float(each["alpha_s"]), float(each["beta_s_per_byte"]))
        for each in ceilings.entries
        if each["what"] == "transport" and {"alpha_s", "beta_s_per_byte"} <= set(each)
    ]
    if measured:
        return min(measured, key=lambda each: each.seconds(1, TYPICAL_MESSAGE))
    return Link(0.0, 1 / bandwidth) if bandwidth else None
