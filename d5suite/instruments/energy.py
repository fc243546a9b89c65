"""Energy per step, of a GPU by NVML or of CPUs by RAPL, with its error.

A separate pass repeats the step, waits for each step to finish, and reads a meter between steps. An
energy counter moves in ticks: NVML's about ten times a second, RAPL's a thousand times.
So the energy between the first and the last tick is divided by the steps between them, and each end
may be off by one tick. If a GPU has no energy counter, a thread reads its power, which is then
integrated. The energy is what the whole GPU, or whole CPU packages, used, idle or not.

Imports the standard library, `d5suite.errors` and its neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from d5suite.errors import D5Error
from d5suite.instruments.background import repeated
from d5suite.instruments.clock import Clock, now
from d5suite.instruments.environment import read_text
from d5suite.instruments.gpus import GpuSensors
from d5suite.instruments.nvml import Gpu, used_gpu

ENERGY_S = 2.0
"""Longest time to measure the energy of one step: 20 ticks of NVML's counter."""

PRECISION = 0.02
"""Relative error at which measuring ends; the same as for samples."""

POWER_PERIOD_S = 0.02
"""Seconds between two readings of the power: NVML updates its value every 20 to 100 ms."""

SENSOR_ERROR = 0.05
"""Error of a GPU's power; NVML's is "accurate to within +/- 5% of current power draw"
(nvmlDeviceGetPowerUsage). AMD states none for its GPUs, so the same is assumed."""

RAPL = Path("/sys/class/powercap")
"""Folder of Linux's energy counters of Intel and AMD CPUs (Documentation/power/powercap)."""


class EnergyError(D5Error):
    """Raised when energy cannot be measured; states why."""


@dataclass(frozen=True)
class EnergyReading:
    """The energy of a step.

    Attributes
    ----------
    joules_per_step : float
    error_j : float
        Largest error of ``joules_per_step``.
    steps : int
        Number of steps between the first and the last reading.
    seconds : float
        Duration of these steps.
    mean_power_w : float
        Mean power during these steps.
    method : {"counter", "sampled power"}
    of : str
        What used the energy.
    """

    joules_per_step: float
    error_j: float
    steps: int
    seconds: float
    mean_power_w: float
    method: Literal["counter", "sampled power"]
    of: str

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON-able values."""
        return asdict(self)


class Meter(ABC):
    """Measures the energy of a step.

    Attributes
    ----------
    of : str
        What uses the energy.
    """

    of: str

    @abstractmethod
    def measure(self, step: Callable[[], object], *, longest_s: float = ENERGY_S, clock: Clock = now) -> EnergyReading:
        """Run a step repeatedly and return its energy.

        Parameters
        ----------
        step : callable
            Does all of its work before it returns.
        longest_s : float
            No step begins after this many seconds.
        clock : callable
            Seconds, monotonic.

        Raises
        ------
        EnergyError
            If it could not be measured.
        """


class Counter(Meter):
    """A meter that counts joules.

    Parameters
    ----------
    read : callable
        Returns joules since some moment; None if it cannot be read.
    of : str
    """

    def __init__(self, read: Callable[[], float | None], of: str) -> None:
        self._read, self.of = read, of

    def measure(self, step: Callable[[], object], *, longest_s: float = ENERGY_S, clock: Clock = now) -> EnergyReading:
        """See `Meter.measure`; it ends early once the error is at most `PRECISION`."""
        step()  # wakes threads and clocks
        start, last, count = clock(), self._joules(), 0
        ticks: list[tuple[int, float, float]] = []
        while clock() - start < longest_s:
            step()
            count += 1
            joules = self._joules()
            if joules < last:
                raise EnergyError(f"the energy counter went backwards, from {last:.6g} to {joules:.6g} J")
            if joules > last:
                last = joules
                ticks.append((count, clock(), joules))
                if len(ticks) > 2 and self._error(ticks) <= PRECISION:
                    break
        if len(ticks) < 2:
            raise EnergyError(f"the energy counter moved {len(ticks)} times in {count} steps, {longest_s:g} s")
        (first, begin, before), (final, end, after) = ticks[0], ticks[-1]
        steps, energy = final - first, after - before
        error = self._error(ticks) * energy / steps
        return EnergyReading(energy / steps, error, steps, end - begin, energy / (end - begin), "counter", self.of)

    def _joules(self) -> float:
        found = self._read()
        if found is None:
            raise EnergyError("the energy counter stopped answering")
        return found

    @staticmethod
    def _error(ticks: Sequence[tuple[int, float, float]]) -> float:
        """Return the longest tick over the whole time: the error of both ends together."""
        longest = max(later - earlier for (_, earlier, _), (_, later, _) in pairwise(ticks))
        return longest / (ticks[-1][1] - ticks[0][1])


class Power(Meter):
    """A meter that reads power, which is integrated by trapezoids.

    The error is `SENSOR_ERROR`, and half the difference between the sums that take the lower and
    the higher reading of each interval.

    Parameters
    ----------
    read : callable
        Returns watts; None if it cannot be read.
    of : str
    """

    def __init__(self, read: Callable[[], float | None], of: str) -> None:
        self._read, self.of = read, of

    def measure(self, step: Callable[[], object], *, longest_s: float = ENERGY_S, clock: Clock = now) -> EnergyReading:
        """See `Meter.measure`; it always takes ``longest_s``."""
        step()
        readings: list[tuple[float, float | None]] = []

        def note() -> None:
            readings.append((clock(), self._read()))

        note()
        start, count = readings[0][0], 0
        with repeated(note, POWER_PERIOD_S, "power"):
            while count == 0 or clock() - start < longest_s:
                step()
                count += 1
        known = [(at, watts) for at, watts in readings if watts is not None]
        if len(known) < len(readings):
            raise EnergyError(f"the power could not be read {len(readings) - len(known)} of {len(readings)} times")
        seconds = known[-1][0] - start
        energy = sum((q + p) / 2 * (t - s) for (s, p), (t, q) in pairwise(known))
        between = sum(abs(q - p) / 2 * (t - s) for (s, p), (t, q) in pairwise(known))
        error = (SENSOR_ERROR * energy + between) / count
        return EnergyReading(energy / count, error, count, seconds, energy / seconds, "sampled power", self.of)


class _Zone:
    """One counter of RAPL, in µJ, which wraps around."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int(read_text(folder / "max_energy_range_uj") or 0)
        self._last = self._counted()
        self._joules = 0.0

    def joules(self) -> float | None:
        """Return the joules since this object was made."""
        counted = self._counted()
        if counted is None or self._last is None:
            return None
        self._joules += ((counted - self._last) % (self._range + 1) if self._range else counted - self._last) / 1e6
        self._last = counted
        return self._joules

    def _counted(self) -> int | None:
        text = read_text(self._file)
        return int(text) if text and text.isdecimal() else None


def meter_of(device: str, name: str = "", sensors: GpuSensors | None = None) -> Meter:
    """Return the meter of a device.

    Parameters
    ----------
    device : {"cpu", "cuda"}
    name : str
        The framework's name for the device.
    sensors : GpuSensors, optional
        Sensors of the GPU in use, where NVML lists no GPU.

    Raises
    ------
    EnergyError
        If the device has no meter; states the reason.
    """
    return _meter_of_cpus() if device == "cpu" else _meter_of_gpu(*used_gpu(name), sensors)


def _meter_of_gpu(gpu: Gpu | None, problem: str, sensors: GpuSensors | None) -> Meter:
    if gpu is None and sensors is not None:
        if sensors.power_w() is None:
            raise EnergyError(f"{sensors.name} does not report its power")
        return Power(sensors.power_w, sensors.name)
    if gpu is None:
        raise EnergyError(problem)
    if gpu.is_divided:
        raise EnergyError(f"{gpu.name} is divided (MIG), and its energy is not counted by instance")
    if gpu.energy_j() is not None:
        return Counter(gpu.energy_j, gpu.name)
    if gpu.power_w() is not None:
        return Power(gpu.power_w, gpu.name)
    raise EnergyError(f"{gpu.name} reports neither energy nor power: {'; '.join(dict.fromkeys(gpu.refused.values()))}")


def _meter_of_cpus() -> Meter:
    """Return the meter of all CPU packages, with their memory if counted separately."""
    packages = [each for each in RAPL.glob("intel-rapl:*") if (read_text(each / "name") or "").startswith("package")]
    memories = [each for one in packages for each in one.glob("intel-rapl:*") if read_text(each / "name") == "dram"]
    if not packages:
        raise EnergyError(f"this machine counts no energy of its CPUs (RAPL: {RAPL}/intel-rapl:*)")
    zones = [_Zone(folder) for folder in [*packages, *memories]]
    if any(zone.joules() is None for zone in zones):
        raise EnergyError(f"the energy of the CPUs may not be read (RAPL: {packages[0]}/energy_uj)")

    def read() -> float | None:
        found = [zone.joules() for zone in zones]
        return None if None in found else sum(each for each in found if each is not None)

    return Counter(read, "CPU packages and memory" if memories else "CPU packages")
