"""Links between ranks, as SimGrid's platform: one switch, islands, a fat tree, a dragonfly.

Each rank has a link of its own, in both directions at once. A message of n bytes takes α + n · β
where it shares no link. Imports `d5suite.errors` and `d5suite.models`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import MemoryLevel, Roof
from d5suite.models.machine import figure, read_content

TOPOLOGIES = ("switch", "fat-tree", "dragonfly", "nvlink")

HEAD = (
    "<?xml version='1.0'?>", '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">', '<platform version="4.1">',
)  # fmt: skip

MOST_ISLANDS = 64
"""Islands of a simulation: each pair of them has a route of its own."""

ASSUMED: Mapping[str, tuple[float, str]] = {
    "peak_flops": (19.5e12, "assumed: an A100's float32, by its data sheet; no --machine"),
    "memory_bandwidth": (1.555e12, "assumed: an A100's memory, by its data sheet; no --machine"),
    "network_bandwidth": (25e9, "assumed: 200 Gb/s a rank; no --machine"),
    "network_latency_s": (5e-6, "assumed; no --machine"),
    "link_bandwidth": (235e9, "assumed: NVLink 3; no --machine"),
    "devices_per_node": (8, "assumed; no --machine"),
}
"""Figures of a simulation without a machine file."""


DEVICE = frozenset(("peak_flops", "memory_bandwidth"))
"""Figures of a machine file that are those of a device."""


@dataclass(frozen=True)
class Interconnect:
    """Links of ranks.

    Attributes
    ----------
    latency_s : float
        α: seconds of an empty message.
    bytes_per_s : float
        1 / β, of a rank's link; of an island's link, with NVLink, for each of its ranks.
    topology : str
        One of `TOPOLOGIES`.
    island : int
        Ranks of a node; with NVLink they have links among themselves.
    island_bytes_per_s : float
    busy_s, busy_s_per_byte : float
        Seconds, and seconds per byte, for which a message keeps a core busy at each of its ends.
    sources : mapping of str to str
        Where ``latency`` and ``bandwidth`` come from.
    """

    latency_s: float
    bytes_per_s: float
    topology: str = "switch"
    island: int = 1
    island_bytes_per_s: float = 0.0
    busy_s: float = 0.0
    busy_s_per_byte: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputeNode:
    """What ranks compute, copy and send with.

    Attributes
    ----------
    bytes_per_s : float
        With which a core copies and adds arrays, read and written bytes together; infinite: that
        takes no time.
    threads : int
        Threads per rank; computing takes all of them.
    cores : int
        Cores per node, which all ranks on the node share; 0: nothing waits for a core.
    """

    bytes_per_s: float = math.inf
    threads: int = 1
    cores: int = 0

    def hosts(self, ranks: int, island: int) -> tuple[list[int], int]:
        """Return by rank which cores it has, and how many each set of cores has.

        Where a node has a core for each of its ranks, each has its own; else all share.
        """
        together = min(ranks, island)
        if self.cores >= together:
            return list(range(ranks)), self.cores // together
        return [rank // island for rank in range(ranks)], self.cores


def machine_figures(path: Path | None, *, transport: str | None, threads: int) -> tuple[Roof, Interconnect, str]:
    """Return ceilings and links of a machine file, and where the ceilings come from.

    A file of ``examples/machines/`` has a network; one of ``d5suite machine`` has transports, whose
    α and β were measured between two ranks.

    Parameters
    ----------
    path : Path or None
        None: `ASSUMED`.
    transport : str or None
        One of the measured transports; by default the first.
    threads : int
        Threads per rank; measured ceilings are chosen by this number.

    Raises
    ------
    JobError, ConfigurationError
        If the file cannot be read, or lacks a figure.
    """
    content = {name: {"value": value, "source": source} for name, (value, source) in ASSUMED.items()} if path is None \
        else read_content(path)  # fmt: skip

    def known(name: str) -> tuple[float, str] | None:
        return figure(content, name, f"{path}, {name}")

    roof: Roof | None = None
    source = ""
    if (peak := known("peak_flops")) and (memory := known("memory_bandwidth")):
        roof, source = Roof(peak[0], (MemoryLevel("memory", 0, memory[0]),)), f"roofline of {peak[1]}"
    links: list[Any] = []
    if path is not None and "ceilings" in content:
        from d5suite.models.ceilings import read_ceilings

        ceilings = read_ceilings(path)
        links = [each for each in ceilings.entries if each["what"] == "transport" and "alpha_s" in each]
        if roof is None:
            found = ceilings.roof(device="cpu", precision="fp32", threads=threads)
            if isinstance(found, str):
                raise ConfigurationError(found, where=str(path), hint="Choose --threads, or give --step-seconds.")
            roof, source = found, f"roofline of {ceilings.name}, {threads} threads a rank"
    if roof is None:
        raise ConfigurationError("this machine file has no ceilings", where=str(path), hint="docs/models.md")
    if transport is not None:
        names = [each.get("transport") for each in links]
        if transport not in names:
            raise ConfigurationError(
                f"the machine file has no transport {transport!r}", where=str(path),
                hint=f"It has: {', '.join(map(str, names)) or 'none'}.",
            )  # fmt: skip
        links = [each for each in links if each["transport"] == transport]
    latency, bandwidth = known("network_latency_s"), known("network_bandwidth")
    busy_s, busy_s_per_byte = 0.0, 0.0
    if links and (transport is not None or bandwidth is None):
        one = links[0]
        said = f"{one.get('transport', 'transport')} of the machine file: {one['source']}"
        beta = float(one.get("beta_s_per_byte", 0.0))
        if not beta > 0:
            raise ConfigurationError("this transport has no bandwidth", where=f"{path}, {one.get('transport')}")
        latency, bandwidth = (float(one["alpha_s"]), said), (1 / beta, said)
        # Between ranks of one machine is no wire: the latency is the work of both ends' cores.
        busy_s, busy_s_per_byte = latency[0] / 2, beta
    if latency is None or bandwidth is None:
        raise ConfigurationError(
            "this machine file says nothing of links between ranks", where=str(path),
            hint="Measure them: d5suite machine --only transport -o FILE; or add network_bandwidth and "
            "network_latency_s.",
        )  # fmt: skip
    link, node = known("link_bandwidth"), known("devices_per_node")
    network = Interconnect(
        latency[0], bandwidth[0], island=int(node[0]) if node else 1, island_bytes_per_s=link[0] if link else 0.0,
        busy_s=busy_s, busy_s_per_byte=busy_s_per_byte, sources={"latency": latency[1], "bandwidth": bandwidth[1]},
    )  # fmt: skip
    return roof, network, source


def part_of_machine(path: Path | None, *, ranks: int, threads: int) -> tuple[Roof | None, str]:
    """Return a rank's part of what all ranks of a machine reach together, and what is missing.

    Ceilings that name no number of threads are those of a device, which no ranks share.

    Parameters
    ----------
    path : Path or None
        The machine file.
    ranks : int
        Ranks that compute at the same time.
    threads : int
        Threads per rank.

    Returns
    -------
    part : Roof or None
    missing : str
        Which ceilings the file lacks, for people; empty if none.

    Raises
    ------
    JobError, ConfigurationError
        If the file cannot be read.
    """
    from d5suite.models.ceilings import read_ceilings

    if path is None or ranks < 2 or not DEVICE.isdisjoint(read_content(path)):
        return None, ""
    known = read_ceilings(path)
    named = replace(known, entries=[each for each in known.entries if "threads" in each])
    if isinstance(named.roof(device="cpu", precision="fp32", threads=threads), str):
        return None, ""
    both = ranks * threads
    whole = named.roof(device="cpu", precision="fp32", threads=both)
    if isinstance(whole, str):
        return None, (
            f"Ranks do not compete for memory bandwidth here: the machine file has no ceilings for {both} threads. "
            f"Measure them: d5suite machine --threads {threads},{both} -o FILE."
        )
    levels = tuple(
        MemoryLevel(each.name, each.capacity_bytes // ranks, each.bytes_per_s / ranks) for each in whole.levels
    )
    return Roof(whole.flops_per_s / ranks, levels, whole.notes), ""


def platform_xml(network: Interconnect, size: int, used: Collection[tuple[int, int]], cores: Sequence[int] = ()) -> str:
    """Return SimGrid's description of so many ranks, ``h0`` and on.

    Parameters
    ----------
    network : Interconnect
    size : int
    used : collection of (int, int)
        Pairs of ranks that send; a rank that sends to itself, as it stands for several, does so
        over its own link.
    cores : sequence of int
        Number of cores in each set of cores that computes, ``c0`` and on.
    """
    lines: list[str] = []
    half, speed = f"{network.latency_s / 2:.17g}s", f"{network.bytes_per_s:.17g}Bps"

    def cluster(name: str, radical: str, bandwidth: str, latency: str, more: str = "") -> str:
        return (
            f'<cluster id="{name}" prefix="h" suffix="" radical="{radical}" speed="1Gf" bw="{bandwidth}" '
            f'lat="{latency}" sharing_policy="SPLITDUPLEX" {more}/>'
        )

    if network.topology == "switch" and any(one == other for one, other in used):
        lines.append('<zone id="all" routing="Full">')
        for rank in range(size):
            lines.append(f'<host id="h{rank}" speed="1Gf"/>')
            lines += [f'<link id="{way}{rank}" bandwidth="{speed}" latency="{half}"/>' for way in ("up", "down")]
        for one, other in sorted(used):
            lines.append(
                f'<route src="h{one}" dst="h{other}" symmetrical="NO"><link_ctn id="up{one}"/>'
                f'<link_ctn id="down{other}"/></route>'
            )
        lines.append("</zone>")
    elif network.topology == "switch":
        lines.append(cluster("all", f"0-{size - 1}", speed, half))
    elif network.topology == "fat-tree":
        width = max(2, math.ceil(math.sqrt(size)))
        parameters = f'topology="FAT_TREE" topo_parameters="2;{width},{width};1,{width};1,1"'
        lines.append(cluster("all", f"0-{width * width - 1}", speed, half, parameters))
    elif network.topology == "dragonfly":
        width = next(each for each in range(2, size + 2) if each * each * max(1, each // 2) >= size)
        nodes = max(1, width // 2)
        parameters = f'topology="DRAGONFLY" topo_parameters="{width},1;1,1;{width},1;{nodes}"'
        lines.append(cluster("all", f"0-{width * width * nodes - 1}", speed, half, parameters))
    else:
        lines += _islands(network, size, cluster)
    if cores:
        hosts = [f'<host id="c{number}" speed="1Gf" core="{count}"/>' for number, count in enumerate(cores)]
        lines = [
            '<zone id="world" routing="Full">',
            *lines,
            '<zone id="cores" routing="Full">',
            *hosts,
            "</zone>",
            "</zone>",
        ]
    return "\n".join([*HEAD, *lines, "</platform>"])


def _islands(network: Interconnect, size: int, cluster: Any) -> list[str]:
    """Ranks of a node have fast links; the node's adapters are shared by its ranks."""
    count = -(-size // network.island)
    if count > MOST_ISLANDS:
        raise ConfigurationError(
            f"{size} ranks are {count} islands of {network.island}; at most {MOST_ISLANDS} are simulated",
            where="--topology nvlink", hint="Choose fewer ranks, or --topology switch.",
        )  # fmt: skip
    if not network.island_bytes_per_s:
        raise ConfigurationError("the machine file has no link_bandwidth", where="--topology nvlink")
    inside = network.island_bytes_per_s
    lines = ['<zone id="all" routing="Full">']
    for island in range(count):
        last = min(size, (island + 1) * network.island) - 1
        own = f'router_id="gate{island}"'
        lines.append(cluster(f"i{island}", f"{island * network.island}-{last}", f"{inside:.17g}Bps", "0s", own))
    wide = network.bytes_per_s * network.island
    for island in range(count):
        lines += [
            f'<link id="{way}{island}" bandwidth="{wide:.17g}Bps" latency="{network.latency_s / 2:.17g}s"/>'
            for way in ("out", "in")
        ]
    for one in range(count):
        for other in range(count):
            if one != other:
                lines.append(
                    f'<zoneRoute src="i{one}" dst="i{other}" gw_src="gate{one}" gw_dst="gate{other}" '
                    f'symmetrical="NO"><link_ctn id="out{one}"/><link_ctn id="in{other}"/></zoneRoute>'
                )
    return [*lines, "</zone>"]
