"""The machine's state before and after a run, and whether something else disturbed the run.

`snapshot` reads counters; `disturbance` compares two snapshots. A disturbed run is marked, never
hidden. ``MachineState.missing`` lists unavailable sources; they give no reasons.

CPU use of others is the busy time of the CPUs less the CPU time of this process, its group, its
descendants and the processes given as own. It is thus detected even if the other processes are
invisible, as from inside a container; visible ones are named. Pressure-stall totals (PSI, the
kernel's Documentation/accounting/psi.rst) are recorded, but CPU pressure is no reason: a framework
with more threads than CPUs causes it itself.

Imports the standard library, its neighbours, and psutil lazily.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from d5suite.instruments.clock import now
from d5suite.instruments.control_groups import available_memory, control_groups
from d5suite.instruments.environment import current_frequency_mhz, read_text
from d5suite.instruments.gpus import GpuSensors, gpu_states
from d5suite.instruments.nvml import SLOWDOWNS, GpuState
from d5suite.instruments.threads import allowed_cpus

COMPETING_SHARE = 0.05
"""Share of the run's CPUs that others may use: daemons stay below 1-2%; more than 5% can move a
median by more than the sampling precision."""

CROWDED_SHARE = 0.25
"""Share of the machine that other processes may use on CPUs outside the run: they reduce memory
bandwidth and clock frequency."""

COMPETING_CPU_S = 0.05
"""CPU time of others below this is ignored: the kernel counts in ticks of 10 ms per CPU."""

NAMED_SHARE = 0.02
"""Processes that use at least this share of a CPU are named."""

NAMED_PROCESSES = 5
"""Largest number of competing processes that are named."""

STEAL_SHARE = 0.01
"""Share of CPU time taken by the hypervisor, when nothing can run: half the sampling precision."""

THROTTLED_SHARE = 0.01
"""Share of the run in which the control group's quota stopped it: half the sampling precision."""

MEMORY_STALL_SHARE = 0.01
"""Share of the run in which a process waited for memory to be reclaimed or swapped in:
half the sampling precision."""

SWAPPED_BYTES = 1 << 20
"""Bytes swapped during a run that count as a disturbance; less may be a stray page."""

GPU_LIMITS = ("heat", "the board's limit", "reliability")
"""Limits of a GPU's clocks that disturb. The power limit does not: any full load reaches it."""


@dataclass(frozen=True)
class ProcessTimes:
    """CPU time of one process, and of the children that it has waited for."""

    name: str
    parent: int
    group: int
    created: float
    own_s: float
    children_s: float


@dataclass(frozen=True)
class MachineState:
    """Counters and gauges at one moment; None or empty if unavailable.

    Attributes
    ----------
    time_s : float
        On the clock of `d5suite.instruments.clock`.
    pid, group : int
        This process and its process group.
    cpus : tuple of int
        The CPUs this process may use.
    busy_s, steal_s : mapping of int to float
        By CPU of the machine: seconds busy with processes (without interrupts), and taken by the
        hypervisor.
    processes : mapping of int to ProcessTimes
        Every visible process.
    load_average : tuple of float or None
        Over 1, 5 and 15 minutes.
    pressure_s : mapping of str to float
        Seconds in which a task waited for ``cpu``, ``memory`` or ``io`` (PSI totals).
    throttled_s : float or None
        Seconds in which the CPU quota stopped this process's control group.
    thermal_throttles : int or None
        Thermal throttling events of all cores and packages.
    frequency_mhz : float or None
        Mean frequency of ``cpus`` now.
    temperature_c : float or None
        The hottest CPU sensor.
    swapped_bytes : int or None
        Swapped in and out since boot.
    available_memory_bytes : int or None
        Memory available without swapping.
    gpus : tuple of GpuState
        GPUs that the run can use; empty unless requested.
    missing : tuple of str
        Unavailable sources.
    """

    time_s: float
    pid: int
    group: int
    cpus: tuple[int, ...]
    busy_s: Mapping[int, float] = field(default_factory=dict)
    steal_s: Mapping[int, float] = field(default_factory=dict)
    processes: Mapping[int, ProcessTimes] = field(default_factory=dict)
    load_average: tuple[float, float, float] | None = None
    pressure_s: Mapping[str, float] = field(default_factory=dict)
    throttled_s: float | None = None
    thermal_throttles: int | None = None
    frequency_mhz: float | None = None
    temperature_c: float | None = None
    swapped_bytes: int | None = None
    available_memory_bytes: int | None = None
    gpus: tuple[GpuState, ...] = ()
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able values, without the table of all processes."""
        values = asdict(self)
        values.pop("processes")
        for name in ("busy_s", "steal_s"):
            values[name] = {str(cpu): seconds for cpu, seconds in values[name].items()}
        for gpu in values["gpus"]:
            for name in ("processes", "process_bytes"):
                gpu[name] = {str(pid): each for pid, each in gpu[name].items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True)
class Disturbance:
    """Whether something disturbed a run, the reasons as sentences, and all figures."""

    disturbed: bool
    reasons: list[str]
    details: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON-able values."""
        return asdict(self)


def snapshot(*, gpu: bool = False, sensors: GpuSensors | None = None) -> MachineState:
    """Read the machine's state (about 10 ms for 100 processes; never while timing).

    Parameters
    ----------
    gpu : bool
        Whether to read the state of GPUs, too, for runs on a GPU; nvidia-smi may take a second.
    sensors : GpuSensors, optional
        Sensors of the GPU in use, where the driver's tools list none.
    """
    import psutil

    missing: list[str] = []
    cpus = tuple(allowed_cpus())
    busy: dict[int, float] = {}
    steal: dict[int, float] = {}
    try:
        for cpu, times in zip(_online_cpus(), psutil.cpu_times(percpu=True), strict=False):
            busy[cpu] = times.user + getattr(times, "nice", 0.0) + times.system
            steal[cpu] = getattr(times, "steal", 0.0)
    except (OSError, RuntimeError):
        missing.append("busy time of the CPUs")
    available: int | None = None
    swapped: int | None = None
    try:
        swap = psutil.swap_memory()
        available, swapped = available_memory(), int(swap.sin + swap.sout)
    except (OSError, RuntimeError):
        missing.append("memory")
    pressure = {name: total for name in ("cpu", "memory", "io") if (total := _pressure_total(name)) is not None}
    state = MachineState(
        time_s=now(),
        pid=os.getpid(),
        group=_process_group(os.getpid()),
        cpus=cpus,
        busy_s=busy,
        steal_s=steal,
        processes=_process_times(),
        load_average=_load_average(),
        pressure_s=pressure,
        throttled_s=_throttled_seconds(),
        thermal_throttles=_thermal_throttles(),
        frequency_mhz=current_frequency_mhz(cpus),
        temperature_c=_temperature_c(),
        swapped_bytes=swapped,
        available_memory_bytes=available,
        gpus=gpu_states(sensors) if gpu else (),
    )
    for what, absent in (
        ("load average", state.load_average is None),
        ("pressure of CPU, memory and input/output", not pressure),
        ("CPU quota of the control group", state.throttled_s is None),
        ("thermal throttling", state.thermal_throttles is None),
        ("CPU frequency", state.frequency_mhz is None),
        ("GPU", gpu and not state.gpus),
    ):
        if absent:
            missing.append(what)
    return replace(state, missing=tuple(missing))


def disturbance(
    before: MachineState, after: MachineState, *, own_pids: Iterable[int] = (), threads: int | None = None
) -> Disturbance:
    """Compare two snapshots to find whether something disturbed the run between them.

    Parameters
    ----------
    before, after : MachineState
        Taken by the same process.
    own_pids : iterable of int
        Further processes of the run, such as other ranks on this machine; their descendants count
        too. This process, its group and its descendants always count.
    threads : int, optional
        CPUs that the run needs, by default all that this process may use. Others may use the rest.

    Returns
    -------
    Disturbance
    """
    elapsed = max(after.time_s - before.time_s, 1e-9)
    own = _own_processes(before, after, own_pids)
    reasons: list[str] = []
    details: dict[str, Any] = {"elapsed_s": elapsed, "missing": sorted({*before.missing, *after.missing})}

    shared = [cpu for cpu in after.cpus if cpu in before.busy_s and cpu in after.busy_s]
    needed = min(threads or len(after.cpus), len(after.cpus)) or 1
    own_s = _own_cpu_time(before, after, own)
    if shared:
        busy_here = sum(after.busy_s[cpu] - before.busy_s[cpu] for cpu in shared)
        busy_everywhere = sum(after.busy_s[cpu] - before.busy_s[cpu] for cpu in after.busy_s if cpu in before.busy_s)
        others_here, others = (max(0.0, busy - own_s) / elapsed for busy in (busy_here, busy_everywhere))
        named = _competitors(before, after, own, elapsed)
        details |= {"own_cpus": own_s / elapsed, "others_cpus": others, "others_on_our_cpus": others_here}
        details["competitors"] = [{"pid": pid, "name": name, "cpus": used} for pid, name, used in named]
        competing = others_here > (len(shared) - needed) + COMPETING_SHARE * needed
        crowded = others > CROWDED_SHARE * len(after.busy_s) and len(after.busy_s) > needed
        if (competing or crowded) and others * elapsed >= COMPETING_CPU_S:
            parts = [f"{name} ({used:.2f})" for _, name, used in named]
            unnamed = others - sum(used for _, _, used in named)
            if parts and unnamed > COMPETING_SHARE:
                parts.append(f"ended, small or invisible ones ({unnamed:.2f})")
            listed = ", ".join(parts)
            reasons.append(
                f"other processes used {others:.2f} of {len(after.busy_s)} CPUs" + (f": {listed}" if listed else "")
            )
        stolen = sum(after.steal_s.get(cpu, 0.0) - before.steal_s.get(cpu, 0.0) for cpu in shared)
        details["steal_share"] = stolen / (elapsed * len(shared))
        if details["steal_share"] > STEAL_SHARE:
            reasons.append(f"the hypervisor took {details['steal_share']:.1%} of the CPU time for other machines")

    details["pressure_share"] = {
        name: (after.pressure_s[name] - before.pressure_s[name]) / elapsed
        for name in after.pressure_s
        if name in before.pressure_s
    }
    if (stalled := details["pressure_share"].get("memory", 0.0)) > MEMORY_STALL_SHARE:
        reasons.append(f"processes waited for memory during {stalled:.1%} of the run")
    if before.swapped_bytes is not None and after.swapped_bytes is not None:
        details["swapped_bytes"] = after.swapped_bytes - before.swapped_bytes
        if details["swapped_bytes"] > SWAPPED_BYTES:
            reasons.append(f"the machine swapped {details['swapped_bytes'] / 2**20:.0f} MiB in and out")
    if before.throttled_s is not None and after.throttled_s is not None:
        details["throttled_share"] = (after.throttled_s - before.throttled_s) / elapsed
        if details["throttled_share"] > THROTTLED_SHARE:
            share = details["throttled_share"]
            reasons.append(f"the CPU quota of the container stopped it during {share:.1%} of the run")
    if before.thermal_throttles is not None and after.thermal_throttles is not None:
        details["thermal_throttles"] = after.thermal_throttles - before.thermal_throttles
        if details["thermal_throttles"] > 0:
            reasons.append(f"the CPU was slowed down by heat {details['thermal_throttles']} times")
    details["frequency_mhz"] = [before.frequency_mhz, after.frequency_mhz]
    details["temperature_c"] = [before.temperature_c, after.temperature_c]
    if after.gpus:
        earlier = before.gpus if len(before.gpus) == len(after.gpus) else ()  # else which is which is unknown
        details["gpus"] = [_gpu_details(*pair, elapsed) for pair in zip_longest(earlier, after.gpus) if pair[1]]
        reasons += [reason for each in details["gpus"] for reason in _limit_reasons(each)]
    details["taken_share"] = _taken_share(details)
    details["load_average_1min"] = [state.load_average[0] if state.load_average else None for state in (before, after)]
    for state in (before, after):
        reasons += [reason for reason in _gpu_reasons(state, own) if reason not in reasons]
    return Disturbance(bool(reasons), reasons, details)


def _taken_share(details: Mapping[str, Any]) -> float:
    """Return the largest share of the run's CPU time that something else took or stopped."""
    own, others = details.get("own_cpus", 0.0), details.get("others_on_our_cpus", 0.0)
    shares = (
        others / (own + others) if others else 0.0,
        details.get("steal_share", 0.0),
        details.get("throttled_share", 0.0),
        details["pressure_share"].get("memory", 0.0),
    )
    return float(max(shares))


def _own_processes(before: MachineState, after: MachineState, own_pids: Iterable[int]) -> set[int]:
    """Return the run's pids: this process, its group, ``own_pids`` and all descendants."""
    everyone = {**before.processes, **after.processes}
    own = {after.pid, *own_pids}
    if after.group > 0:  # 0 is the group of processes outside this PID namespace
        own |= {pid for pid, process in everyone.items() if process.group == after.group}
    found = True
    while found:
        children = {pid for pid, process in everyone.items() if process.parent in own} - own
        own |= children
        found = bool(children)
    return own


def _own_cpu_time(before: MachineState, after: MachineState, own: set[int]) -> float:
    """Sum the CPU seconds of the run's processes; ended children count with their parents."""
    used = sum(process.own_s + process.children_s for pid, process in after.processes.items() if pid in own)
    for pid, process in before.processes.items():
        if pid in own and (pid in after.processes or process.parent in own):
            used -= process.own_s + process.children_s
    return used


def _competitors(
    before: MachineState, after: MachineState, own: set[int], elapsed: float
) -> list[tuple[int, str, float]]:
    """Return (pid, name, CPUs used) of the busiest other processes, without their children."""
    used: list[tuple[int, str, float]] = []
    for pid, process in after.processes.items():
        earlier = before.processes.get(pid)
        known = earlier.own_s if earlier is not None and earlier.created == process.created else 0.0
        share = (process.own_s - known) / elapsed
        if pid not in own and share >= NAMED_SHARE:
            used.append((pid, process.name, share))
    return sorted(used, key=lambda each: -each[2])[:NAMED_PROCESSES]


def _gpu_reasons(state: MachineState, own: set[int]) -> list[str]:
    reasons: list[str] = []
    for gpu in state.gpus:
        # In a container the driver may list the host's pids, even this run's: count visible ones.
        others = [f"{name} ({pid})" for pid, name in gpu.processes.items() if pid in state.processes and pid not in own]
        if others:
            reasons.append(f"{gpu.name} was in use by other processes: {', '.join(sorted(others))}")
        slow = ", ".join(text for bit, text in SLOWDOWNS.items() if gpu.slowdown & bit)
        if slow:
            reasons.append(f"{gpu.name} slowed down: {slow} (NVML reasons {gpu.slowdown:#x})")
        if gpu.problem:
            reasons.append(f"{gpu.name} does not answer: {gpu.problem}")
    return reasons


def _gpu_details(before: GpuState | None, after: GpuState, elapsed: float) -> dict[str, Any]:
    """Return the record of a GPU, with the changes since an earlier state of the same GPU."""
    earlier = before.limited_s if before is not None else {}
    shares = {name: (now - earlier[name]) / elapsed for name, now in after.limited_s.items() if name in earlier}
    return {
        "name": after.name,
        "clock_mhz": after.clock_mhz,
        "memory_clock_mhz": after.memory_clock_mhz,
        "temperature_c": after.temperature_c,
        "clock_reasons": after.clock_reasons,
        "limited_share": shares,
        "used_bytes": after.used_bytes,
        "process_bytes": {str(pid): size for pid, size in after.process_bytes.items()},
        "processes": len(after.processes),
        "missing": dict(after.refused),
    }


def _limit_reasons(gpu: Mapping[str, Any]) -> list[str]:
    return [
        f"{gpu['name']} was held down by {name} during {share:.1%} of the run"
        for name, share in gpu["limited_share"].items()
        if name in GPU_LIMITS and share > THROTTLED_SHARE
    ]


def _process_times() -> dict[int, ProcessTimes]:
    import psutil

    table: dict[int, ProcessTimes] = {}
    for process in psutil.process_iter(["name", "ppid", "create_time", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is None:  # another user's process, where the system hides its times
            continue
        table[process.pid] = ProcessTimes(
            name=process.info["name"] or "unknown",
            parent=process.info["ppid"] or 0,
            group=_process_group(process.pid),
            created=process.info["create_time"] or 0.0,
            own_s=times.user + times.system,
            children_s=getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0),
        )
    return table


def _process_group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except (AttributeError, OSError):
        return 0


def _online_cpus() -> list[int]:
    """Return the numbers of the CPUs in the order of /proc/stat; without it, from 0 on."""
    lines = (read_text("/proc/stat") or "").splitlines()
    listed = [line.split()[0][3:] for line in lines if line.startswith("cpu")]
    return [int(number) for number in listed if number] or list(range(os.cpu_count() or 1))


def _load_average() -> tuple[float, float, float] | None:
    try:
        return os.getloadavg()
    except (AttributeError, OSError):
        return None


def _pressure_total(resource: str) -> float | None:
    """Read the seconds of the line ``some ... total=<microseconds>``."""
    for line in (read_text(f"/proc/pressure/{resource}") or "").splitlines():
        kind, *pairs = line.split()
        total = dict(pair.split("=", 1) for pair in pairs if "=" in pair).get("total", "")
        if kind == "some" and total.isdigit():
            return int(total) / 1e6
    return None


def _throttled_seconds() -> float | None:
    """Return the longest time that a quota stopped a control group (v2 counts µs, v1 ns)."""
    seconds: list[float] = []
    for folder in control_groups("cpu"):
        for line in (read_text(folder / "cpu.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time") and value.isdigit():
                seconds.append(int(value) / (1e6 if name == "throttled_usec" else 1e9))
    return max(seconds, default=None)


def _thermal_throttles() -> int | None:
    folder = Path("/sys/devices/system/cpu")
    counts = [read_text(path) for path in folder.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")]
    known = [int(count) for count in counts if count and count.isdigit()]
    return sum(known) if known else None


def _temperature_c() -> float | None:
    """Return the temperature of the hottest CPU sensor in °C; None without one, as in many VMs."""
    import psutil

    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    found = [each.current for name in ("coretemp", "k10temp", "cpu_thermal") for each in sensors.get(name, [])]
    return max(found, default=None)
