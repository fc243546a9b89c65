"""GPUs through a made-up NVML: what is recorded of them, what disturbs, and each refusal."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from d5suite.instruments import energy, environment, gpus, memory, nvml
from d5suite.instruments.machine import MachineState, disturbance, snapshot

FAKE = Path(__file__).parents[1] / "fake_nvml" / "pynvml.py"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"
UUID = "GPU-11111111-2222-3333-4444-555555555555"
INSTANCE = "MIG-11111111-aaaa-bbbb-cccc-dddddddddddd"
GIBIBYTE = 2**30


def load_fake() -> Any:
    """A made-up nvidia-ml-py with one GPU."""
    specification = importlib.util.spec_from_file_location("pynvml", FAKE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load_fake()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", nvml.RUN_GPUS):
        monkeypatch.delenv(name, raising=False)
    return module


def ten_seconds(fake: Any, **later: Any) -> tuple[MachineState, MachineState]:
    """Two snapshots of a quiet machine, between which the GPU's answers change."""
    quiet = MachineState(time_s=0.0, pid=os.getpid(), group=os.getpgid(0), cpus=(0,), processes=snapshot().processes)
    before = replace(quiet, gpus=gpus.gpu_states())
    fake.gpus[0].update(later)
    return before, replace(quiet, time_s=10.0, gpus=gpus.gpu_states())


def held(**seconds: float) -> dict[int, Any]:
    """Answers of nvmlDeviceGetViolationStatus, in the order of its policies."""
    return {
        policy: SimpleNamespace(referenceTime=0, violationTime=round(1e9 * seconds.get(name, 2.0)))
        for policy, name in ((0, "power"), (1, "heat"), (2, "boost"), (3, "board"), (5, "reliability"))
    }


# What is recorded


def test_a_gpu_is_described_and_its_uuid_hashed(fake: Any) -> None:
    (found,) = gpus.describe_gpus()
    assert found == {
        "name": "NVIDIA H100 80GB HBM3", "uuid_sha256": found["uuid_sha256"], "driver_version": "570.86.10",
        "cuda_version": "12.8", "memory_total": "81920", "compute_cap": "9.0", "power_limit": "700.00",
        "clocks_max_sm": "1980", "clocks_max_mem": "2619", "clocks_applications_sm": "1980",
        "mig_mode_current": "Disabled", "ecc_mode_current": "Enabled",
    }  # fmt: skip
    assert "11111111" not in json.dumps(found)
    fake.gpus[0]["nvmlDeviceGetUUID"] = OTHER.encode()  # as older versions of nvidia-ml-py give it
    assert gpus.describe_gpus()[0]["uuid_sha256"] != found["uuid_sha256"]


@pytest.mark.parametrize(
    ("value", "published"),
    [
        ("0,1", "0,1"),
        ("all", "all"),
        (UUID, "GPU-{}"),
        (f"{OTHER},{UUID}", "GPU-{},GPU-{}"),
        ("GPU-9999", "GPU-{}"),
        (INSTANCE, "MIG-{}"),
        (f"MIG-{UUID}/3/0", "MIG-GPU-{}/3/0"),
        (INSTANCE.upper(), "MIG-{}"),
        ("a-gpu-device", "a-gpu-device"),
    ],
)
def test_no_uuid_is_published(fake: Any, monkeypatch: pytest.MonkeyPatch, value: str, published: str) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, value)
    fake.gpus[0]["nvmlDeviceGetUUID"] = "GPU-another"  # so that each place quotes the variable
    described = environment.describe()
    quoted: list[Any] = [described, snapshot(gpu=True).to_dict(), nvml.used_gpu()[1], memory.gpu_memory(lambda: None)]
    try:
        energy.meter_of("cuda")
    except energy.EnergyError as error:
        quoted.append(str(error))
    found = described["environment_variables"]["CUDA_VISIBLE_DEVICES"]
    assert found == described["environment_variables"]["NVIDIA_VISIBLE_DEVICES"]
    digits = re.findall(r"\b[0-9a-f]{16}\b", found)
    assert published.format(*digits) == found
    for uuid in (UUID[4:], OTHER[4:], INSTANCE[4:], "GPU-9999"):
        assert uuid.lower() not in json.dumps(quoted).lower()


def test_a_published_hash_is_the_described_gpus(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    found = environment.describe()
    assert found["environment_variables"]["CUDA_VISIBLE_DEVICES"] == f"GPU-{found['gpus'][0]['uuid_sha256']}"


def test_a_state_has_every_answer_in_its_unit(fake: Any) -> None:
    (found,) = gpus.gpu_states()
    assert (found.clock_mhz, found.memory_clock_mhz, found.temperature_c) == (1755, 2619, 41)
    assert (found.used_bytes, found.process_bytes) == (3 * GIBIBYTE, {os.getpid(): 2 * GIBIBYTE})
    assert found.processes == {os.getpid(): psutil.Process().name()}
    assert found.limited_s["heat"] == 2.0
    assert found.clock_reasons == ["power cap"]
    assert not found.refused
    json.dumps(replace(snapshot(), gpus=(found,)).to_dict(), allow_nan=False)


@pytest.mark.parametrize("function", sorted(load_fake().GPU))
@pytest.mark.parametrize("kind", ["NOT_SUPPORTED", "unknown"])
def test_any_answer_may_be_refused(fake: Any, function: str, kind: str) -> None:
    whole = gpus.describe_gpus()[0], gpus.gpu_states()[0]
    if kind == "unknown":  # to this version of nvidia-ml-py
        del fake.gpus[0][function], fake.GPU[function]
    else:
        fake.gpus[0][function] = fake.NOT_SUPPORTED
    described, state = gpus.describe_gpus()[0], gpus.gpu_states()[0]
    assert set(described) >= {"name", "driver_version"}
    assert set(described.items()) <= {*whole[0].items(), ("name", "GPU 0")}
    reason = "Not Supported" if kind == "NOT_SUPPORTED" else "unknown to this version of nvidia-ml-py"
    assert set(state.refused.values()) <= {reason, "unknown to this version of nvidia-ml-py"}
    assert not state.problem
    found = disturbance(*ten_seconds(fake))
    assert not found.disturbed
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_older_name_of_the_clocks_reasons_is_asked_too(fake: Any) -> None:
    del fake.gpus[0]["nvmlDeviceGetCurrentClocksEventReasons"], fake.GPU["nvmlDeviceGetCurrentClocksEventReasons"]
    fake.gpus[0]["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x44
    assert gpus.gpu_states()[0].slowdown == 0x44


# What disturbs


def test_a_gpu_used_by_this_run_alone_at_its_power_limit_is_not_disturbed(fake: Any) -> None:
    found = disturbance(*ten_seconds(fake, nvmlDeviceGetViolationStatus=held(power=9.0)))
    assert not found.disturbed
    (gpu,) = found.details["gpus"]
    assert gpu["limited_share"]["power"] == pytest.approx(0.7)
    assert gpu["clock_reasons"] == ["power cap"]


def test_heat_between_two_snapshots_is_found_by_its_counter(fake: Any) -> None:
    found = disturbance(*ten_seconds(fake, nvmlDeviceGetViolationStatus=held(heat=2.5)))
    assert found.reasons == ["NVIDIA H100 80GB HBM3 was held down by heat during 5.0% of the run"]


def test_slowdowns_now_and_other_processes_are_reasons(fake: Any) -> None:
    parent = os.getppid()
    found = disturbance(
        *ten_seconds(
            fake,
            nvmlDeviceGetCurrentClocksEventReasons=0x44,
            nvmlDeviceGetComputeRunningProcesses=[
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
                SimpleNamespace(pid=1, usedGpuMemory=None),
                SimpleNamespace(pid=2**30, usedGpuMemory=1),  # of another PID namespace: it may be this one
            ],
        ),
        own_pids=[parent],
    )
    users, slow = sorted(found.reasons, key=lambda reason: "slowed" in reason)
    assert "was in use by other processes" in users and "(1)" in users and str(2**30) not in users
    assert "hardware thermal slowdown (NVML reasons 0x44)" in slow


def test_a_gpu_that_is_lost_is_a_reason_and_no_traceback(fake: Any) -> None:
    lost = dict.fromkeys(fake.GPU, fake.LOST)
    found = disturbance(*ten_seconds(fake, **lost))
    assert found.reasons == ["GPU 0 does not answer: GPU is lost"]
    assert found.details["gpus"][0]["missing"]["nvmlDeviceGetTemperature"] == "GPU is lost"
    fake.gpus[0]["handle"] = fake.LOST
    assert [state.problem for state in gpus.gpu_states()] == ["GPU is lost"]
    assert nvml.used_gpu() == (None, "GPU 0: GPU is lost")


# Which GPUs may disturb


@pytest.fixture
def two_gpus(fake: Any) -> Any:
    """Two GPUs of a kind, each with its UUID."""
    fake.gpus.append({**fake.GPU, "nvmlDeviceGetUUID": OTHER})
    return fake


SEEN = [
    (None, "", [0, 1]),
    ("", "", []),
    ("0", "", [0]),
    (" 1", "", [1]),
    ("1,0", "", [0, 1]),
    ("0,-1,1", "", [0]),  # CUDA stops at the first that is none
    ("2", "", []),
    ("NoDevFiles", "", []),
    (OTHER, "", [1]),
    ("GPU-9999", "", [1]),
    ("GPU-0000", "", [0, 1]),  # unknown
    ("1", "0", [0]),  # all ranks' before one rank's
]


@pytest.mark.parametrize(("visible", "ranks", "expected"), SEEN)
@pytest.mark.parametrize("neighbours", [0, 1])
def test_a_neighbour_disturbs_on_gpus_that_the_run_can_see(
    two_gpus: Any,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    ranks: str,
    expected: list[int],
    neighbours: int,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if ranks:
        monkeypatch.setenv(nvml.RUN_GPUS, ranks)
    busy = two_gpus.gpus[neighbours]
    busy["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=1, usedGpuMemory=1)]
    before, after = ten_seconds(two_gpus)
    busy["nvmlDeviceGetViolationStatus"] = held(heat=3.0)
    after = replace(after, gpus=gpus.gpu_states())
    found = disturbance(before, after)
    assert len(after.gpus) == len(expected)
    assert found.disturbed == (neighbours in expected)
    assert len(found.reasons) == 2 * found.disturbed
    assert len(gpus.describe_gpus()) == 2


def test_all_gpus_count_where_cuda_may_order_them_otherwise(two_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus.gpus[1]["nvmlDeviceGetName"] = "Small GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(gpus.gpu_states()) == 2
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [state.name for state in gpus.gpu_states()] == ["Small GPU"]


@pytest.mark.parametrize("neighbour", ["instance", "another", "GPU"])
def test_of_a_divided_gpu_those_on_other_instances_do_not_disturb(
    two_gpus: Any, monkeypatch: pytest.MonkeyPatch, neighbour: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", INSTANCE)
    assert len(gpus.gpu_states()) == 2  # unknown
    stranger = [SimpleNamespace(pid=1, usedGpuMemory=1)]
    two_gpus.parts[INSTANCE] = {
        **dict.fromkeys(two_gpus.GPU, two_gpus.NOT_SUPPORTED),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": two_gpus.gpus[1],
        "nvmlDeviceGetComputeRunningProcesses": stranger if neighbour == "instance" else [],
    }
    busy = two_gpus.gpus[neighbour == "another"]  # a whole GPU lists the processes of all its instances
    busy["nvmlDeviceGetComputeRunningProcesses"] = stranger
    (state,) = gpus.gpu_states()
    assert set(state.processes) == ({1} if neighbour == "instance" else set())
    found = disturbance(*ten_seconds(two_gpus))
    assert found.disturbed == (neighbour == "instance")
    two_gpus.gpus[1]["nvmlDeviceGetCurrentClocksEventReasons"] = 0x40  # heat is the whole GPU's
    assert "hardware thermal slowdown" in disturbance(*ten_seconds(two_gpus)).reasons[-1]


def test_another_number_of_gpus_is_not_compared(two_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", OTHER)
    two_gpus.gpus[0]["nvmlDeviceGetViolationStatus"] = held(heat=9.0)
    found = disturbance(*ten_seconds(two_gpus))
    assert not found.disturbed
    before, _ = ten_seconds(two_gpus)
    two_gpus.gpus[1].update(dict.fromkeys(two_gpus.GPU, two_gpus.LOST))
    found = disturbance(before, replace(before, time_s=10.0, gpus=gpus.gpu_states()))
    assert found.reasons == ["GPU 1 does not answer: GPU is lost"]


# Which GPU it is


def test_without_the_library_or_a_driver_there_is_one_reason(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.system["nvmlInit"] = fake.NO_DRIVER
    assert nvml.open_gpus().problem == "NVML does not answer: Driver Not Loaded; check the driver with nvidia-smi"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'd5suite[gpu]'" in nvml.open_gpus().problem
    assert nvml.used_gpu()[0] is None
    assert gpus.describe_gpus() == []
    assert snapshot(gpu=True).missing[-1] == "GPU"


@pytest.mark.parametrize(
    ("visible", "order", "name", "expected"),
    [
        ("", "", "", "several GPUs"),
        ("1", "PCI_BUS_ID", "", "Small GPU"),
        ("0,1", "PCI_BUS_ID", "", "NVIDIA H100 80GB HBM3"),
        ("0", "", "Small GPU", "Small GPU"),  # CUDA counts the fastest one first, NVML does not
        ("GPU-9999", "", "", "Small GPU"),
        ("GPU-", "", "", "NVML lists no GPU 'GPU-'"),
        ("7", "PCI_BUS_ID", "", "NVML lists no GPU 7"),
    ],
)
def test_the_gpu_that_the_framework_uses_is_found(
    fake: Any, monkeypatch: pytest.MonkeyPatch, visible: str, order: str, name: str, expected: str
) -> None:
    fake.gpus.append({**fake.GPU, "nvmlDeviceGetName": "Small GPU", "nvmlDeviceGetUUID": OTHER})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    gpu, problem = nvml.used_gpu(name)
    assert gpu.name == expected if gpu is not None else expected in problem


def test_an_instance_of_a_divided_gpu_is_found_by_its_uuid(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", INSTANCE)
    assert "does not know" in nvml.used_gpu()[1]
    fake.parts[INSTANCE] = {
        **dict.fromkeys(fake.GPU, fake.NOT_SUPPORTED), "nvmlDeviceGetName": "H100 MIG 1g.10gb",
        "nvmlDeviceIsMigDeviceHandle": 1,
    }  # fmt: skip
    gpu, _ = nvml.used_gpu()
    assert gpu is not None and gpu.is_divided
    assert gpu.describe()["mig_mode_current"] == "Enabled, one instance"


# Memory


def test_the_drivers_memory_is_this_processs_own(fake: Any) -> None:
    def step() -> str:
        fake.gpus[0]["nvmlDeviceGetComputeRunningProcesses"] = [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * GIBIBYTE)
        ]
        return "answer"

    assert memory.gpu_memory(step) == (
        "answer", {"peak_bytes": 5 * GIBIBYTE, "baseline_bytes": 2 * GIBIBYTE, "of": "this process"},
    )  # fmt: skip


def test_where_processes_are_not_told_apart_it_is_the_whole_gpus(fake: Any) -> None:
    fake.gpus[0]["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=2**30, usedGpuMemory=None)]
    assert memory.gpu_memory(lambda: None)[1]["of"] == "the whole GPU"
    fake.gpus[0]["nvmlDeviceGetMemoryInfo"] = fake.NOT_SUPPORTED
    assert memory.gpu_memory(lambda: 7) == (7, {"missing": "NVIDIA H100 80GB HBM3: Not Supported"})
    fake.system["nvmlInit"] = fake.NO_DRIVER
    assert "Driver Not Loaded" in memory.gpu_memory(lambda: None)[1]["missing"]


@pytest.mark.parametrize(
    ("listed", "more", "unused"),
    [
        (True, 0, False),
        (False, 0, True),
        (False, 300 * 2**20, False),  # a container may hide its processes
        (False, None, False),  # the driver does not say how much is used
    ],
)
def test_a_process_is_on_a_gpu_if_the_driver_lists_it_or_more_memory_is_used(
    fake: Any, listed: bool, more: int | None, unused: bool
) -> None:
    fake.gpus[0]["nvmlDeviceGetComputeRunningProcesses"] = []
    before = gpus.driver_states()
    if listed:
        fake.gpus[0]["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    used = before[0].used_bytes or 0
    memory_now = SimpleNamespace(total=80 * GIBIBYTE, used=used + (more or 0), free=0)
    fake.gpus[0]["nvmlDeviceGetMemoryInfo"] = memory_now if more is not None else fake.NOT_SUPPORTED
    assert bool(gpus.unused_by(os.getpid(), before, gpus.driver_states())) is unused
    assert not gpus.unused_by(os.getpid(), (), gpus.driver_states())  # nobody asked before
