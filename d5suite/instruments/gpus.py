"""The GPUs of this machine, as reported by NVML, nvidia-smi or the framework, tried in this order.

nvidia-ml-py is optional. Without it nvidia-smi, which comes with every driver, still names GPUs,
drivers, processes and slowdowns. Energy, memory by process and the time spent slowed down need
NVML. For AMD's GPUs the framework reads power, temperature, clock and used memory.

Imports the standard library and its neighbours.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Protocol

from d5suite.instruments.nvml import GpuState, open_gpus, visible, visible_entries, visible_gpus

NVIDIA_SMI_LIMIT_S = 10.0
"""nvidia-smi answers within two seconds, or never if the driver hangs."""

LEAST_BYTES = 16 * 2**20
"""Least GPU memory of a process that computes on a GPU: a context alone takes some 100 MiB."""


def describe_gpus() -> list[dict[str, str]]:
    """List each NVIDIA GPU: `d5suite.instruments.nvml.Gpu.describe`; empty if there is none.

    From nvidia-smi: name, driver, memory in MiB, compute capability, power limit in W, MIG, ECC.
    """
    found = open_gpus().found
    if found:
        return [gpu.describe() for gpu in found]
    keys = ("name", "driver_version", "memory.total", "compute_cap", "power.limit", "mig.mode.current",
            "ecc.mode.current")  # fmt: skip
    rows = query_nvidia_smi("gpu", keys) or query_nvidia_smi("gpu", keys[:3]) or []  # older drivers know fewer keys
    return [{key.replace(".", "_"): value for key, value in row.items() if value[:1] != "["} for row in rows]


class GpuSensors(Protocol):
    """Readings of a GPU by the framework: see `d5suite.levels.device.Sensors`."""

    name: str

    def power_w(self) -> float | None:
        """Return watts."""

    def temperature_c(self) -> float | None:
        """Return degrees Celsius."""

    def clock_mhz(self) -> float | None:
        """Return MHz."""

    def used_bytes(self) -> int | None:
        """Return bytes."""


def gpu_states(sensors: GpuSensors | None = None) -> tuple[GpuState, ...]:
    """Return the state of each GPU that this run can use, or of the one that ``sensors`` read."""
    found = _listed_states()
    if found or sensors is None:
        return found
    clock, heat, used = sensors.clock_mhz(), sensors.temperature_c(), sensors.used_bytes()
    return (GpuState(sensors.name, {}, 0, clock_mhz=clock, temperature_c=heat, used_bytes=used),)


def driver_states() -> tuple[GpuState, ...]:
    """Return the state of each GPU that this run can use, by NVML; empty without NVML."""
    return tuple(gpu.state() for gpu in visible_gpus()) if open_gpus().found else ()


def unused_by(pid: int, before: Sequence[GpuState], after: Sequence[GpuState]) -> str:
    """Return a message that a process computes on no GPU; empty if it may compute on one.

    A container may hide processes or give them other numbers. So the used memory must not have
    changed, either.

    Parameters
    ----------
    pid : int
    before, after : sequence of GpuState
        States of the same GPUs, before and after the process began to use them.
    """
    changes = []
    for one, other in zip(before, after, strict=False):
        if pid in other.processes or other.problem or one.used_bytes is None or other.used_bytes is None:
            return ""
        changes.append(abs(other.used_bytes - one.used_bytes))
    if not changes or len(before) != len(after) or max(changes) >= LEAST_BYTES:
        return ""
    names = ", ".join(dict.fromkeys(state.name for state in after))
    return f"the driver of {names} lists no process {pid}, and no more memory is used than before it began"


def _listed_states() -> tuple[GpuState, ...]:
    if open_gpus().found:
        return driver_states()
    keys = ("uuid", "name", "clocks_throttle_reasons.active")
    rows = query_nvidia_smi("gpu", (*keys, "clocks.sm", "temperature.gpu")) or query_nvidia_smi("gpu", keys) or []
    names, uuids = ([row[key] for row in rows] for key in ("name", "uuid"))
    rows = [rows[place] for place in visible(visible_entries(), uuids, names)]
    users = query_nvidia_smi("compute-apps", ("gpu_uuid", "pid", "process_name")) or []
    return tuple(
        GpuState(
            name=row["name"],
            processes={
                int(user["pid"]): user["process_name"]
                for user in users
                if user["gpu_uuid"] == row["uuid"] and user["pid"].isdigit()
            },
            slowdown=_hexadecimal(row["clocks_throttle_reasons.active"]),
            clock_mhz=_number(row.get("clocks.sm", "")),
            temperature_c=_number(row.get("temperature.gpu", "")),
        )
        for row in rows
    )


def free_gpu_memory() -> int | None:
    """Return the free bytes of the first visible GPU; None if nvidia-smi does not report them."""
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    for row in query_nvidia_smi("gpu", ("index", "uuid", "memory.free")) or []:
        if (row["index"] == first or row["uuid"].startswith(first)) and row["memory.free"].isdecimal():
            return int(row["memory.free"]) * 2**20
    return None


def query_nvidia_smi(what: str, keys: tuple[str, ...]) -> list[dict[str, str]] | None:
    """Return the rows of ``nvidia-smi --query-<what>=<keys>``; None if it fails or hangs."""
    command = ["nvidia-smi", f"--query-{what}={','.join(keys)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdecimal() else None


def _hexadecimal(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
