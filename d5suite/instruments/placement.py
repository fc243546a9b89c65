"""Where this process runs: its cores, their sockets and NUMA nodes, its GPU and network card.

Unreadable facts are empty or None; nothing here raises. Imports its neighbours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d5suite.instruments.nvml import hide_uuids
from d5suite.instruments.threads import allowed_cpus

SYSTEM = Path("/sys")
"""Linux's sysfs(5)."""


def describe_placement(device: str, interface: str | None) -> dict[str, Any]:
    """Return the place of this process, JSON-able.

    Parameters
    ----------
    device : str
    interface : str or None
        The network interface that it uses.

    Returns
    -------
    dict
        ``cpus``, ``sockets`` and ``numa_nodes``: lists of int, ascending; ``gpu``, as CUDA counts
        them on this host, or None; ``nic_numa_node``: the NUMA node of the interface's card, or
        None.
    """
    cpus = allowed_cpus()
    return {
        "cpus": cpus,
        "sockets": _sockets(cpus),
        "numa_nodes": _numa_nodes(cpus),
        "gpu": hide_uuids(os.environ.get("CUDA_VISIBLE_DEVICES") or "") or None if device != "cpu" else None,
        "nic_numa_node": _number(SYSTEM / "class/net" / interface / "device/numa_node") if interface else None,
    }


def _sockets(cpus: Sequence[int]) -> list[int]:
    found = {_number(SYSTEM / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id") for cpu in cpus}
    return sorted(each for each in found if each is not None)


def _numa_nodes(cpus: Sequence[int]) -> list[int]:
    found = set()
    for cpu in cpus:
        with contextlib.suppress(OSError, ValueError):
            names = [each.name for each in (SYSTEM / f"devices/system/cpu/cpu{cpu}").glob("node[0-9]*")]
            found |= {int(name.removeprefix("node")) for name in names}
    return sorted(found)


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it cannot be read or is negative: unknown."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None
