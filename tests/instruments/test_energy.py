"""Energy per step from counters and from power, against scripted meters, and why there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d5suite.instruments import energy
from d5suite.instruments.energy import Counter, EnergyError, Power, meter_of
from d5suite.instruments.machine import snapshot
from tests.instruments.test_nvml import INSTANCE, fake, load_fake

__all__ = ["fake"]


class World:
    """A clock that only steps move, and a counter of energy that moves in ticks."""

    def __init__(self, step_s: float, tick_s: float, watts: float) -> None:
        self.time_s, self.step_s, self.tick_s, self.watts = 0.0, step_s, tick_s, watts

    def clock(self) -> float:
        return self.time_s

    def step(self) -> None:
        self.time_s += self.step_s

    def joules(self) -> float:
        return 1e6 + self.watts * self.tick_s * int(self.time_s / self.tick_s + 1e-9)


@pytest.mark.parametrize("step_s", [0.0003, 0.01, 0.07, 0.26])
@pytest.mark.parametrize("tick_s", [0.001, 0.1])
def test_a_counters_ticks_are_allowed_for(step_s: float, tick_s: float) -> None:
    world = World(step_s, tick_s, 400.0)
    found = Counter(world.joules, "GPU X").measure(world.step, clock=world.clock)
    assert abs(found.joules_per_step - 400.0 * step_s) <= found.error_j
    assert found.error_j < 0.2 * found.joules_per_step
    assert found.seconds <= energy.ENERGY_S + step_s
    assert (found.method, found.of) == ("counter", "GPU X")


def test_without_the_ticks_allowed_for_the_energy_would_be_off() -> None:
    """What the error is for: whole windows of a counter that moves seldom are wrong by a tick."""
    world = World(0.07, 0.1, 400.0)
    before = world.joules()
    for _ in range(5):
        world.step()
    naive = (world.joules() - before) / 5
    assert abs(naive / (400.0 * 0.07) - 1) > 0.1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([5.0] * 1000, "moved 0 times"),
        ([5.0, 5.0, 6.0] + [6.0] * 1000, "moved 1 times"),
        ([5.0, 6.0, 7.0, 3.0], "went backwards, from 7 to 3 J"),
        ([5.0, 6.0, None], "stopped answering"),
    ],
)
def test_a_counter_that_cannot_be_trusted_gives_no_energy(script: list[float | None], reason: str) -> None:
    world, answers = World(0.01, 1, 1), iter(script)
    with pytest.raises(EnergyError, match=reason):
        Counter(lambda: next(answers), "GPU X").measure(world.step, clock=world.clock)


def test_power_is_integrated_with_its_error() -> None:
    """A ramp of power: each trapezoid is exact."""
    world = World(0.25, 1, 1)

    def ramp() -> float:
        return 100.0 + 100.0 * world.time_s

    found = Power(ramp, "GPU X").measure(world.step, clock=world.clock, longest_s=1.0)
    assert found.steps == 4
    assert found.seconds == pytest.approx(1.0)
    joules = 125.0 * 1.0 + 50.0 * 1.0  # from 0.25 s to 1.25 s: 125 W to 225 W
    assert abs(found.joules_per_step - joules / 4) < found.error_j - energy.SENSOR_ERROR * found.joules_per_step
    assert found.method == "sampled power"


def test_power_that_stops_answering_gives_no_energy() -> None:
    world, answers = World(0.25, 1, 1), iter([300.0])
    with pytest.raises(EnergyError, match="could not be read"):
        Power(lambda: next(answers, None), "GPU X").measure(world.step, clock=world.clock, longest_s=1.0)


# Whose meter


def test_a_gpu_counts_its_energy_else_its_power_is_read(fake: Any) -> None:
    assert isinstance(meter_of("cuda"), Counter)
    fake.gpus[0]["nvmlDeviceGetTotalEnergyConsumption"] = fake.NOT_SUPPORTED
    assert isinstance(meter_of("cuda"), Power)
    fake.gpus[0]["nvmlDeviceGetPowerUsage"] = fake.NOT_SUPPORTED
    with pytest.raises(EnergyError, match="neither energy nor power: Not Supported"):
        meter_of("cuda")
    fake.gpus[0]["nvmlDeviceGetMigMode"] = [1, 1]
    with pytest.raises(EnergyError, match="divided"):
        meter_of("cuda")


def test_millijoules_and_milliwatts_are_converted(fake: Any) -> None:
    world = World(0.01, 0.02, 250.0)
    fake.gpus[0]["nvmlDeviceGetTotalEnergyConsumption"] = lambda: round(1e3 * world.joules())
    found = meter_of("cuda").measure(world.step, clock=world.clock)
    assert found.mean_power_w == pytest.approx(250.0, rel=0.05)
    fake.gpus[0]["nvmlDeviceGetTotalEnergyConsumption"] = fake.NOT_SUPPORTED
    assert meter_of("cuda").measure(world.step, clock=world.clock).mean_power_w == pytest.approx(300.0)


def test_an_instance_of_a_divided_gpu_has_no_meter(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", INSTANCE)
    fake.parts[INSTANCE] = {**load_fake().GPU, "nvmlDeviceIsMigDeviceHandle": 1}
    with pytest.raises(EnergyError, match="divided"):
        meter_of("cuda")


def test_without_nvml_there_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnergyError, match="nvidia-ml-py is not installed"):
        meter_of("cuda")


@pytest.fixture
def rapl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes counters of RAPL, as Linux lays them out: zones in µJ by folder."""
    monkeypatch.setattr(energy, "RAPL", tmp_path)

    def write(**zones: tuple[str, int]) -> None:
        for place, (name, microjoules) in zones.items():
            folder = tmp_path / place.replace("__", "/").replace("_", ":").replace("rapl", "intel-rapl")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "name").write_text(f"{name}\n")
            (folder / "energy_uj").write_text(f"{microjoules}\n")
            (folder / "max_energy_range_uj").write_text("9999999\n")

    return write


def test_cpus_count_the_energy_of_packages_and_memory_and_begin_anew(rapl: Callable[..., None]) -> None:
    counted = {"package-0": 9_000_000, "package-1": 0, "dram": 500_000, "core": 77, "psys": 42}
    places = {
        "rapl_0": "package-0", "rapl_1": "package-1", "rapl_0__rapl_0_0": "dram", "rapl_0__rapl_0_1": "core",
        "rapl_2": "psys",
    }  # fmt: skip

    def write() -> None:
        rapl(**{place: (name, counted[name] % 10_000_000) for place, name in places.items()})

    write()
    meter, world = meter_of("cpu"), World(0.1, 1, 1)

    def step() -> None:
        world.step()
        for name, watts in (("package-0", 30), ("package-1", 20), ("dram", 5), ("core", 25), ("psys", 99)):
            counted[name] += round(1e6 * watts * 0.1)
        write()

    found = meter.measure(step, clock=world.clock)
    assert counted["package-0"] > 10_000_000  # so it has begun anew
    assert found.joules_per_step == pytest.approx(5.5)
    assert found.of == "CPU packages and memory"


def test_a_machine_without_readable_counters_says_so(rapl: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(EnergyError, match="counts no energy of its CPUs"):
        meter_of("cpu")
    rapl(rapl_0=("package-0", 1))
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()  # as for anyone but root
    with pytest.raises(EnergyError, match="may not be read"):
        meter_of("cpu")


class AmdSensors:
    """What a framework reads of a GPU that NVML does not know."""

    name = "Instinct"

    def __init__(self, watts: float | None = 200.0) -> None:
        self.watts = watts

    def power_w(self) -> float | None:
        return self.watts

    def temperature_c(self) -> float | None:
        return 55.0

    def clock_mhz(self) -> float | None:
        return 1700.0

    def used_bytes(self) -> int | None:
        return 2**30


def test_a_gpu_that_only_the_framework_reads_has_power_and_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = meter_of("cuda", "Instinct", AmdSensors())
    energy = meter.measure(lambda: sum(range(10_000)), longest_s=0.1)
    assert meter.of == "Instinct" and energy.method == "sampled power"
    assert energy.mean_power_w == pytest.approx(200) and energy.error_j == pytest.approx(0.05 * energy.joules_per_step)
    with pytest.raises(EnergyError, match="Instinct does not report its power"):
        meter_of("cuda", "Instinct", AmdSensors(None))
    with pytest.raises(EnergyError, match="nvidia-ml-py is not installed"):
        meter_of("cuda", "Instinct")
    (state,) = snapshot(gpu=True, sensors=AmdSensors()).gpus
    assert (state.name, state.clock_mhz, state.temperature_c, state.used_bytes) == ("Instinct", 1700, 55, 2**30)
    assert snapshot(gpu=True).gpus == ()
