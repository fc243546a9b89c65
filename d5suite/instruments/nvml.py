"""NVIDIA's GPUs through NVML: their properties, their state, and the processes on them.

NVML is the driver's library. Meanings and units here are those of NVIDIA's "NVML API Reference
Guide". The Python binding, nvidia-ml-py (module ``pynvml``), is optional: without it, or without a
driver, `open_gpus` gives the reason. A driver may refuse any query, for example with ``Not
Supported`` or ``GPU is lost``. The answer is then missing, and the reason is kept.

Imports the standard library, and pynvml and psutil lazily.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

INSTALL = "pip install 'd5suite[gpu]'"

RUN_GPUS = "D5SUITE_RUN_GPUS"
"""Environment variable: ``CUDA_VISIBLE_DEVICES`` of all ranks on this machine together."""

_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f][0-9a-f-]*\b", re.IGNORECASE)

SLOWDOWNS = {
    0x008: "hardware slowdown",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
}
"""Reasons for low clocks that disturb a measurement (nvmlClocksEventReasons)."""

CLOCK_REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x010: "sync boost",
    0x100: "display clocks",
    **SLOWDOWNS,
}
"""All reasons for low clocks. Neither the power cap, which any full load reaches, nor application
clocks, which are set on purpose, disturb a measurement."""

POLICIES = {"power": 0, "heat": 1, "sync boost": 2, "the board's limit": 3, "reliability": 5}
"""Counters of the time in which clocks were held down (nvmlPerfPolicyType_t)."""

_SM, _MEMORY = 1, 2
"""nvmlClockType_t."""


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU at one moment; None or empty where the driver reports nothing.

    Attributes
    ----------
    name : str
    processes : mapping of int to str
        Names of the processes that compute on it, by process id.
    slowdown : int
        Bit mask of the reasons for low clocks: `CLOCK_REASONS`.
    clock_mhz, memory_clock_mhz : float or None
        Clocks of the multiprocessors and of the memory.
    temperature_c : float or None
        Temperature of the chip.
    used_bytes : int or None
        GPU memory in use by all processes and the driver.
    process_bytes : mapping of int to int
        GPU memory in use, by process id.
    limited_s : mapping of str to float
        By one of `POLICIES`: seconds in which it held clocks down, since the driver was loaded.
    problem : str
        Why the GPU answers nothing at all, such as that it is lost; empty if it answers.
    refused : mapping of str to str
        By NVML's function: why it gave no answer.
    """

    name: str
    processes: Mapping[int, str]
    slowdown: int
    clock_mhz: float | None = None
    temperature_c: float | None = None
    memory_clock_mhz: float | None = None
    used_bytes: int | None = None
    process_bytes: Mapping[int, int] = field(default_factory=dict)
    limited_s: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def clock_reasons(self) -> list[str]:
        """Reasons for low clocks, in words."""
        return [text for bit, text in sorted(CLOCK_REASONS.items()) if self.slowdown & bit]


class Gpu:
    """A GPU, or an instance of a divided GPU (MIG), that can be queried.

    Parameters
    ----------
    api : module
        pynvml, started.
    handle : object
        None if NVML gives none.
    number : int
        Its index in NVML's list.

    Attributes
    ----------
    refused : dict of str to str
        By NVML's function: why it gave no answer.
    parts : list of Gpu
        Its instances that this run uses; processes on other instances do not matter.
    """

    def __init__(self, api: Any, handle: Any, number: int) -> None:
        self.api, self.handle, self.number = api, handle, number
        self.refused: dict[str, str] = {}
        self.parts: list[Gpu] = []

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call an NVML function; None if the driver refuses, with the reason in `refused`."""
        if self.handle is None:
            return None
        try:
            found = getattr(self.api, function)(self.handle, *arguments)
        except AttributeError:
            self.refused[function] = "unknown to this version of nvidia-ml-py"
        except self.api.NVMLError as error:
            self.refused[function] = str(error)
        else:
            self.refused.pop(function, None)
            return found
        return None

    @property
    def name(self) -> str:
        """The vendor's name, or the GPU's number if it has none."""
        return _text(self.ask("nvmlDeviceGetName")) or f"GPU {self.number}"

    @property
    def uuid(self) -> str:
        """The permanent identifier, which must not be published; empty if unknown."""
        return _text(self.ask("nvmlDeviceGetUUID")) or ""

    @property
    def is_divided(self) -> bool:
        """Whether this is a GPU divided into instances (MIG), or one of the instances."""
        return bool(self.is_part or (self.ask("nvmlDeviceGetMigMode") or [0])[0])

    @property
    def is_part(self) -> bool:
        """Whether this is an instance of a divided GPU (MIG)."""
        return bool(self.ask("nvmlDeviceIsMigDeviceHandle"))

    def energy_j(self) -> float | None:
        """Return the energy since the driver was loaded in joules (counted in mJ from Volta on)."""
        counted = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if counted is None else counted / 1e3

    def power_w(self) -> float | None:
        """Return the power of the whole board in watts (read in mW)."""
        drawn = self.ask("nvmlDeviceGetPowerUsage")
        return None if drawn is None else drawn / 1e3

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return used and total memory in bytes; None if the driver refuses."""
        found = self.ask("nvmlDeviceGetMemoryInfo")
        return None if found is None else (int(found.used), int(found.total))

    def process_bytes(self) -> dict[int, int | None]:
        """Return the bytes that each computing process uses; None where the driver hides them."""
        asked = [gpu.ask("nvmlDeviceGetComputeRunningProcesses") for gpu in self.parts or [self]]
        found = [each for processes in asked for each in processes or []]
        return {int(each.pid): each.usedGpuMemory and int(each.usedGpuMemory) for each in found}

    def describe(self) -> dict[str, str]:
        """Return the facts that do not change during a run, named as in nvidia-smi.

        ``memory_total`` is in MiB, ``power_limit`` in W, clocks are in MHz. The UUID is hashed.
        """
        memory, uuid = self.memory_bytes(), self.uuid
        capability = self.ask("nvmlDeviceGetCudaComputeCapability")
        limit = self.ask("nvmlDeviceGetPowerManagementLimit")
        named = {
            "name": self.name,
            "uuid_sha256": hash_uuid(uuid) if uuid else None,
            "driver_version": _text(_asked(self.api, "nvmlSystemGetDriverVersion")),
            "cuda_version": _cuda_version(_asked(self.api, "nvmlSystemGetCudaDriverVersion_v2")),
            "memory_total": memory and memory[1] // 2**20,
            "compute_cap": capability and ".".join(map(str, capability)),
            "power_limit": limit and f"{limit / 1e3:.2f}",
            "clocks_max_sm": self.ask("nvmlDeviceGetMaxClockInfo", _SM),
            "clocks_max_mem": self.ask("nvmlDeviceGetMaxClockInfo", _MEMORY),
            "clocks_applications_sm": self.ask("nvmlDeviceGetApplicationsClock", _SM),
            "mig_mode_current": _switch(self.ask("nvmlDeviceGetMigMode")),
            "ecc_mode_current": _switch(self.ask("nvmlDeviceGetEccMode")),
        }
        if self.is_part:
            named["mig_mode_current"] = "Enabled, one instance"
        return {key: str(value) for key, value in named.items() if value is not None}

    def state(self) -> GpuState:
        """Return the current state."""
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before CUDA 12
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        clock, memory_clock = (self.ask("nvmlDeviceGetClockInfo", kind) for kind in (_SM, _MEMORY))
        memory, held = self.memory_bytes(), self.process_bytes()
        limited = {name: self.ask("nvmlDeviceGetViolationStatus", policy) for name, policy in POLICIES.items()}
        lost = [each for each in self.refused.values() if "lost" in each.lower()]
        return GpuState(
            name=self.name,
            processes={pid: process_name(pid) for pid in held},
            slowdown=int(reasons or 0),
            clock_mhz=clock,
            temperature_c=self.ask("nvmlDeviceGetTemperature", 0),
            memory_clock_mhz=memory_clock,
            used_bytes=memory and memory[0],
            process_bytes={pid: size for pid, size in held.items() if size is not None},
            limited_s={name: each.violationTime / 1e9 for name, each in limited.items() if each is not None},
            problem=lost[0] if lost else "",
            refused=dict(self.refused),
        )


class Gpus(NamedTuple):
    """The GPUs that NVML lists, or the reason why it lists none."""

    found: list[Gpu]
    problem: str = ""


def open_gpus() -> Gpus:
    """Start NVML, which stays open until the process ends, and list the GPUs."""
    try:
        import pynvml as api
    except (ImportError, OSError):
        return Gpus([], f"nvidia-ml-py is not installed; install it with: {INSTALL}")
    try:
        api.nvmlInit()
        count = api.nvmlDeviceGetCount()
    except api.NVMLError as error:
        return Gpus([], f"NVML does not answer: {error}; check the driver with nvidia-smi")
    found = []
    for number in range(count):
        gpu = Gpu(api, None, number)
        try:
            gpu.handle = api.nvmlDeviceGetHandleByIndex(number)
        except api.NVMLError as error:
            gpu.refused["nvmlDeviceGetHandleByIndex"] = str(error)
        found.append(gpu)
    return Gpus(found, "" if found else "NVML lists no GPU")


def used_gpu(name: str = "") -> tuple[Gpu | None, str]:
    """Return the GPU that CUDA calls device 0, or None with the reason why it is unknown.

    ``CUDA_VISIBLE_DEVICES`` lists it first, by number or by the beginning of a UUID. NVML numbers
    GPUs in the order of the PCI bus; CUDA does so only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

    Parameters
    ----------
    name : str
        The framework's name for the GPU. It decides if GPUs of several models are numbered by CUDA
        and only one of them has this name.
    """
    gpus = open_gpus()
    if not gpus.found:
        return None, gpus.problem
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0].strip()
    if first.startswith("MIG-"):
        return _instance(gpus.found[0].api, first)
    if not first.isdecimal():
        chosen = [gpu for gpu in gpus.found if gpu.uuid.startswith(first)]
        problem = f"NVML lists no GPU {hide_uuids(first)!r} (CUDA_VISIBLE_DEVICES)"
        return (chosen[0], "") if len(chosen) == 1 else (None, problem)
    if not _counts_as_cuda([gpu.name for gpu in gpus.found]):
        chosen = [gpu for gpu in gpus.found if gpu.name == name]
        hint = "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        return (chosen[0], "") if len(chosen) == 1 else (None, f"several GPUs, which CUDA may count otherwise; {hint}")
    if int(first) >= len(gpus.found):
        return None, f"NVML lists no GPU {first} (CUDA_VISIBLE_DEVICES)"
    gpu = gpus.found[int(first)]
    return (gpu, "") if gpu.handle is not None else (None, f"{gpu.name}: {'; '.join(gpu.refused.values())}")


def _instance(api: Any, uuid: str) -> tuple[Gpu | None, str]:
    try:
        return Gpu(api, api.nvmlDeviceGetHandleByUUID(uuid), 0), ""
    except api.NVMLError as error:
        return None, f"NVML does not know {hide_uuids(uuid)!r} (CUDA_VISIBLE_DEVICES): {error}"


def visible_gpus() -> list[Gpu]:
    """List the GPUs that this run can use; for an instance (MIG), the GPU that it belongs to."""
    found, entries = open_gpus().found, visible_entries()
    if not found or entries is None:
        return found
    parts: dict[str, list[Gpu]] = {}
    for place, entry in enumerate(entries):
        part = _instance(found[0].api, entry)[0] if entry.startswith("MIG-") else None
        whole = part and part.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        if part is not None and whole is not None:
            entries[place] = Gpu(part.api, whole, 0).uuid or entry
            parts.setdefault(entries[place], []).append(part)
    uuids = [gpu.uuid for gpu in found]
    chosen = visible(entries, uuids, [gpu.name for gpu in found])
    for place in chosen:
        for part in parts.get(uuids[place], ()):
            part.refused = found[place].refused
            found[place].parts.append(part)
    return [found[place] for place in chosen]


def visible_entries() -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` for all ranks; None if it is unset."""
    listed = os.environ.get(RUN_GPUS, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return None if listed is None else [entry.strip() for entry in listed.split(",")]


def visible(entries: Sequence[str] | None, uuids: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the indices of the GPUs that a run can use; all indices if that is unknown.

    Parameters
    ----------
    entries : sequence of str or None
        Numbers, or beginnings of UUIDs. As in CUDA, the first invalid entry ends the list.
    uuids, names : sequence of str
        UUIDs and names of all GPUs, in the order of the PCI bus.
    """
    everything = list(range(len(uuids)))
    if entries is None:
        return everything
    found: set[int] = set()
    for entry in entries:
        if entry.startswith(("GPU-", "MIG-")):
            chosen = [place for place, uuid in enumerate(uuids) if uuid.startswith(entry)]
            if len(chosen) != 1:
                return everything
            found.update(chosen)
        elif not entry.isdecimal() or int(entry) >= len(uuids):
            break
        elif not _counts_as_cuda(names):
            return everything
        else:
            found.add(int(entry))
    return sorted(found)


def _counts_as_cuda(names: Sequence[str]) -> bool:
    """Whether CUDA numbers GPUs in NVML's order: by default it puts the fastest GPU first."""
    return len(set(names)) < 2 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def hash_uuid(uuid: str) -> str:
    """Return 16 digits of a UUID's hash; the UUID would identify the machine permanently."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:16]


def hide_uuids(text: str) -> str:
    """Replace the UUIDs of GPUs and of their instances in a text with their hashes."""
    return _UUID.sub(lambda found: f"{found[1]}-{hash_uuid(found[0])}", text)


def process_name(pid: int) -> str:
    """Return a process's name, or ``unknown`` if it is invisible, as from inside a container."""
    import psutil

    try:
        return psutil.Process(pid).name() or "unknown"
    except psutil.Error:
        return "unknown"


def _asked(api: Any, function: str) -> Any:
    try:
        return getattr(api, function)()
    except (AttributeError, api.NVMLError):
        return None


def _text(value: Any) -> str | None:
    """Return an answer as text; older versions of nvidia-ml-py return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _cuda_version(number: int | None) -> str | None:
    """Format 12080, 1000 times the major plus 10 times the minor version, as 12.8."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _switch(modes: Any) -> str | None:
    """Return the current one of two modes; the other takes effect after a restart."""
    return None if modes is None else ("Disabled", "Enabled")[bool(modes[0])]
