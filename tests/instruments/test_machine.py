"""Memory, environment, machine state, noise and threads: what is ours, what is not, and what is
missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from d5suite.errors import ConfigurationError
from d5suite.instruments import environment, gpus, machine, memory, quiet, threads
from d5suite.instruments.control_groups import control_groups
from d5suite.instruments.machine import Disturbance, MachineState, ProcessTimes, disturbance, snapshot
from d5suite.instruments.nvml import GpuState

MEBIBYTE = 1 << 20
SPIN = "while True: pass"


# Peak memory


@pytest.mark.alone
def test_the_peak_counts_memory_that_was_freed_before_the_end() -> None:
    found = memory.peak_memory(lambda: bytearray(96 * MEBIBYTE) and None)
    assert found.peak_bytes - found.baseline_bytes >= 60 * MEBIBYTE if found.method == "VmHWM" else found.peak_bytes > 0


@pytest.mark.alone
def test_an_earlier_peak_is_not_reported() -> None:
    large = bytearray(96 * MEBIBYTE)
    before = psutil.Process().memory_info().rss
    del large
    assert memory.peak_memory(lambda: None).peak_bytes < before - 48 * MEBIBYTE


@pytest.mark.alone
def test_without_the_kernels_peak_the_resident_set_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_kernel_peak", lambda: False)
    kept: list[bytearray] = []
    found = memory.peak_memory(lambda: kept.append(bytearray(64 * MEBIBYTE)))
    assert found.method == "sampled"
    assert found.peak_bytes - found.baseline_bytes >= 48 * MEBIBYTE


def test_a_failing_function_leaves_no_sampling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(memory, "_reset_kernel_peak", lambda: False)
    with pytest.raises(ZeroDivisionError):
        memory.peak_memory(lambda: 1 // 0)
    assert "peak-memory" not in {thread.name for thread in threading.enumerate()}


def test_device_memory_is_what_the_device_says() -> None:
    peak = [900]

    def reset() -> None:
        peak[0] = 100

    def work() -> None:
        peak[0] = 700

    assert memory.peak_memory(work, (reset, lambda: peak[0])).to_dict() == {
        "peak_bytes": 700, "baseline_bytes": 100, "method": "device",
    }  # fmt: skip


# Disturbance, on made-up snapshots


def process(
    own: float, parent: int = 1, group: int = 999, children: float = 0.0, name: str = "chrome", created: float = 5.0
) -> ProcessTimes:
    return ProcessTimes(name=name, parent=parent, group=group, created=created, own_s=own, children_s=children)


def states(
    processes_before: dict[int, ProcessTimes], processes_after: dict[int, ProcessTimes], busy: float, **changes: Any
) -> tuple[MachineState, MachineState]:
    """Two snapshots of a two-CPU machine 10 s apart, taken by process 100 of group 100."""
    before = MachineState(
        time_s=0.0, pid=100, group=100, cpus=(0, 1), busy_s={0: 50.0, 1: 50.0}, steal_s={0: 0.0, 1: 0.0},
        processes=processes_before, load_average=(0.0, 0.0, 0.0), pressure_s={"cpu": 1.0, "memory": 0.0},
        throttled_s=0.0, thermal_throttles=0, swapped_bytes=0,
    )  # fmt: skip
    after = replace(
        before, time_s=10.0, busy_s={0: 50.0 + busy / 2, 1: 50.0 + busy / 2}, processes=processes_after, **changes
    )
    return before, after


QUIET_BEFORE = {100: process(20.0, group=100, name="python")}
QUIET_AFTER = {100: process(38.0, group=100, name="python")}


def test_a_run_alone_is_not_disturbed() -> None:
    found = disturbance(*states(QUIET_BEFORE, QUIET_AFTER, busy=18.3))
    assert not found.disturbed
    assert found.reasons == []
    assert found.details["own_cpus"] == pytest.approx(1.8)


def test_other_processes_are_named_with_figures() -> None:
    after = QUIET_AFTER | {200: process(7.1), 201: process(1.2, name="backup"), 202: process(0.01, name="sshd")}
    found = disturbance(*states(QUIET_BEFORE | {202: process(0.01)}, after, busy=18.0 + 8.3))
    assert found.disturbed
    assert found.reasons == ["other processes used 0.83 of 2 CPUs: chrome (0.71), backup (0.12)"]
    assert [each["pid"] for each in found.details["competitors"]] == [200, 201]


def test_others_that_cannot_be_seen_are_found_by_subtraction() -> None:
    found = disturbance(*states(QUIET_BEFORE, QUIET_AFTER, busy=23.0))
    assert found.reasons == ["other processes used 0.50 of 2 CPUs"]


def test_what_the_named_ones_did_not_use_is_told_too() -> None:
    found = disturbance(*states(QUIET_BEFORE, QUIET_AFTER | {200: process(2.0)}, busy=18.0 + 9.0))
    assert found.reasons == [
        "other processes used 0.90 of 2 CPUs: chrome (0.20), ended, small or invisible ones (0.70)"
    ]


def test_descendants_the_process_group_and_named_processes_are_ours() -> None:
    before = {100: process(0.0, group=100), 300: process(0.0, group=300)}
    after = {
        100: process(5.0, group=100),
        101: process(5.0, parent=100, group=101),  # a child in a session of its own
        102: process(3.0, parent=101, group=101),
        103: process(2.0, parent=50, group=100),  # a wrapper in our group
        300: process(2.0, group=300),  # another rank, named by the caller
        301: process(1.0, parent=300, group=301),
    }
    assert not disturbance(*states(before, after, busy=18.0), own_pids=[300]).disturbed
    assert disturbance(*states(before, after, busy=18.0)).reasons == [
        "other processes used 0.30 of 2 CPUs: chrome (0.20), chrome (0.10)"
    ]


def test_our_children_that_ended_are_ours() -> None:
    before = {100: process(1.0, group=100), 101: process(4.0, parent=100, group=101)}
    after = {100: process(1.5, group=100, children=12.0)}
    found = disturbance(*states(before, after, busy=8.5))
    assert not found.disturbed
    assert found.details["own_cpus"] == pytest.approx(0.85)


def test_a_process_id_used_again_counts_from_its_start() -> None:
    before = QUIET_BEFORE | {200: process(500.0, created=1.0)}
    after = QUIET_AFTER | {200: process(1.0, created=7.0)}
    assert "chrome (0.10)" in disturbance(*states(before, after, busy=19.5)).reasons[0]


def test_others_on_cpus_the_run_does_not_need_count_only_when_they_crowd_the_machine() -> None:
    small = states(QUIET_BEFORE, {100: process(24.0, group=100)}, busy=8.0)
    assert not disturbance(*small, threads=1).disturbed
    assert disturbance(*small).disturbed
    assert disturbance(*states(QUIET_BEFORE, {100: process(24.0, group=100)}, busy=12.0), threads=1).disturbed


def test_a_short_run_is_not_blamed_on_the_ticks_of_the_kernel() -> None:
    before, after = states(QUIET_BEFORE, {100: process(20.1, group=100)}, busy=0.14)
    assert not disturbance(before, replace(after, time_s=0.1)).disturbed


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"steal_s": {0: 0.4, 1: 0.2}}, "hypervisor took 3.0%"),
        ({"throttled_s": 2.5}, "quota of the container stopped it during 25.0%"),
        ({"thermal_throttles": 3}, "heat 3 times"),
        ({"swapped_bytes": 300 * MEBIBYTE}, "swapped 300 MiB"),
        ({"pressure_s": {"cpu": 1.0, "memory": 0.5}}, "waited for memory during 5.0%"),
    ],
)
def test_each_source_gives_its_reason(changes: dict[str, Any], word: str) -> None:
    found = disturbance(*states(QUIET_BEFORE, QUIET_AFTER, busy=18.0, **changes))
    assert len(found.reasons) == 1
    assert word in found.reasons[0]


def test_our_own_pressure_on_the_cpu_is_recorded_and_is_no_reason() -> None:
    found = disturbance(*states(QUIET_BEFORE, QUIET_AFTER, busy=18.0, pressure_s={"cpu": 9.0}))
    assert not found.disturbed
    assert found.details["pressure_share"]["cpu"] == pytest.approx(0.8)


def test_other_users_of_the_gpu_and_its_slowdown_are_reasons() -> None:
    gpu = GpuState(name="GPU X", processes={100: "python", 200: "trainer", 4711: "not visible here"}, slowdown=0x4)
    after = QUIET_AFTER | {200: process(0.0)}
    assert disturbance(*states(QUIET_BEFORE, after, busy=18.0, gpus=(gpu,))).reasons == [
        "GPU X was in use by other processes: trainer (200)"
    ]
    hot = replace(gpu, processes={}, slowdown=0x44)
    assert "0x44" in disturbance(*states(QUIET_BEFORE, after, busy=18.0, gpus=(hot,))).reasons[0]


def test_nothing_but_the_time_is_enough_to_compare() -> None:
    bare = MachineState(time_s=0.0, pid=100, group=100, cpus=(0,), missing=("memory",))
    found = disturbance(bare, replace(bare, time_s=1.0))
    assert not found.disturbed
    assert found.details["missing"] == ["memory"]
    json.dumps(found.to_dict(), allow_nan=False)


# The real machine


@pytest.fixture
def foreign_spinner() -> Iterator[psutil.Process]:
    """A busy process in a session of its own whose parent is gone: nothing ties it to this one."""
    start = (
        "import subprocess, sys\nnull = subprocess.DEVNULL\n"
        f"print(subprocess.Popen([sys.executable, '-c', '{SPIN}'], stdout=null, stderr=null).pid)"
    )
    output = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, start_new_session=True)
    spinner = psutil.Process(int(output.stdout))
    try:
        yield spinner
    finally:
        spinner.kill()


def wait_for_cpu_time(process: psutil.Process, seconds: float) -> None:
    start = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) < start + seconds:
        pass


@pytest.mark.alone
def test_a_foreign_process_competes_and_a_child_does_not(foreign_spinner: psutil.Process) -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True) as child:
        try:
            before = snapshot()
            wait_for_cpu_time(psutil.Process(child.pid), 0.1)
            wait_for_cpu_time(foreign_spinner, 0.1)
            found = disturbance(before, snapshot())
        finally:
            child.kill()
    competitors = {each["pid"] for each in found.details["competitors"]}
    assert found.disturbed
    assert foreign_spinner.pid in competitors
    assert not competitors & {child.pid, os.getpid()}


def test_a_snapshot_is_strict_json() -> None:
    values = json.loads(json.dumps(snapshot().to_dict(), allow_nan=False))
    assert "processes" not in values
    assert values["pid"] == os.getpid()


def test_a_snapshot_works_where_every_source_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(machine, "read_text", lambda path: None)
    monkeypatch.setattr(environment, "read_text", lambda path: None)
    for name in ("cpu_times", "virtual_memory", "swap_memory"):
        monkeypatch.setattr(psutil, name, fails)
    monkeypatch.setattr(os, "getloadavg", fails)
    before = snapshot(gpu=True)
    assert {"busy time of the CPUs", "memory", "load average", "CPU frequency"} <= set(before.missing)
    assert not disturbance(before, snapshot()).disturbed


def test_the_environment_describes_this_machine_and_publishes_listed_variables_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_FRAMEWORK_FLAGS", "fast")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-11111111-2222-3333-4444-555555555555")
    for secret in (
        "SECRET_TOKEN",
        "MKL_LICENSE_TOKEN",
        "OMP_X",
        "CUDA_PASSWORD",
        "MY_FRAMEWORK_FLAGS_TOKEN",
        "LD_PRELOAD_X",
    ):
        monkeypatch.setenv(secret, "hidden")
    found = environment.describe(["numpy", "not-a-distribution"], variables=["MY_FRAMEWORK_FLAGS"])
    assert "hidden" not in json.dumps(found, allow_nan=False)
    assert found["cpu"]["model"]
    assert set(found["cpu"]["allowed_cpus"]) == set(threads.allowed_cpus())
    assert found["environment_variables"]["OMP_NUM_THREADS"] == "3"
    assert found["environment_variables"]["MY_FRAMEWORK_FLAGS"] == "fast"
    assert found["environment_variables"]["CUDA_VISIBLE_DEVICES"].startswith("1,GPU-")
    assert "2222-3333" not in json.dumps(found)
    assert found["distributions"]["numpy"] == np.__version__
    assert found["distributions"]["not-a-distribution"] is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.stat": "", "cpu.max": "150000 100000"}, 1.5),
        ({"cpu.stat": "", "cpu.max": "max 100000"}, None),
        ({"cpu.stat": "", "cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.stat": "", "cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"cpu.stat": ""}, None),
    ],
)
def test_the_cpu_quota_of_both_versions_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment, "control_groups", lambda controller: [tmp_path])
    assert environment.cpu_quota() == expected


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a made-up nvidia-smi first on the path, where there is no nvidia-ml-py."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_gpus_are_described_and_their_users_seen(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi(
        "if 'compute-apps' in sys.argv[1]: print('GPU-1, 4242, trainer')\n"
        "elif 'uuid' in sys.argv[1]: print('GPU-1, Big GPU, 0x0000000000000040')\n"
        "elif 'compute_cap' in sys.argv[1]: sys.exit(2)\n"
        "else: print('Big GPU, 555.1, 141000')"
    )
    assert gpus.describe_gpus() == [{"name": "Big GPU", "driver_version": "555.1", "memory_total": "141000"}]
    assert snapshot(gpu=True).gpus == (GpuState("Big GPU", {4242: "trainer"}, 0x40),)


@pytest.mark.parametrize(("visible", "expected"), [("0", []), ("1", [4242]), ("GPU-2", [4242]), ("", None)])
def test_nvidia_smi_tells_of_gpus_that_the_run_can_see(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[int] | None
) -> None:
    nvidia_smi(
        "if 'compute-apps' in sys.argv[1]: print('GPU-2, 4242, trainer')\n"
        "else: print('GPU-1, Big GPU, 0x0\\nGPU-2, Big GPU, 0x0')"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [list(each.processes) for each in snapshot(gpu=True).gpus] == ([] if expected is None else [expected])


def test_a_hung_nvidia_smi_is_given_up(nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi("import threading; threading.Event().wait()")
    monkeypatch.setattr(gpus, "NVIDIA_SMI_LIMIT_S", 0.2)
    assert gpus.describe_gpus() == []


def test_the_noise_probe_gives_a_verdict_of_one_line() -> None:
    found = quiet.probe_noise(0.05)
    assert found.samples >= 2
    assert found.spread >= 1
    assert found.verdict.startswith("quiet" if found.quiet else "noisy")
    assert "\n" not in found.verdict
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.alone
def test_the_noise_probe_sees_a_foreign_process(foreign_spinner: psutil.Process) -> None:
    found = quiet.probe_noise(0.5)
    assert not found.quiet
    assert any("other processes used" in reason for reason in found.reasons)


def test_to_wait_for_a_quiet_machine_ends_with_quiet_or_at_the_limit() -> None:
    quiet_after, clock = 3, iter(range(100))
    told: list[str] = []

    def look(threads: int | None) -> Disturbance:
        nonlocal quiet_after
        quiet_after -= 1
        reasons = ["others are busy"] if quiet_after >= 0 and threads == 2 else []
        return Disturbance(bool(reasons), reasons, {})

    assert quiet.await_quiet(50, told.append, threads=2, look=look, clock=lambda: next(clock)) == ""
    assert told == [f"waiting for a quiet machine, {left} s more at most: others are busy" for left in (49, 48, 47)]
    quiet_after = 99
    assert quiet.await_quiet(5, threads=2, look=look, clock=lambda: next(clock)) == "others are busy"
    assert 90 < quiet_after < 99


def test_to_wait_takes_no_cpu_so_that_two_runs_that_wait_do_not_wait_for_each_other() -> None:
    """A busy loop looked whether others are busy, and each run that waited saw the other's loop."""
    before = time.process_time()
    quiet.await_quiet(1.2)
    assert time.process_time() - before < 0.5


# Threads


def test_cpus_are_chosen_core_by_core_then_their_second_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_core_of", lambda cpu: (cpu // 2 % 2, cpu % 2))  # two packages, two cores each, SMT
    everything = range(8)
    assert threads.choose_cpus(1, everything) == [0]
    assert threads.choose_cpus(2, everything) == [0, 1]  # both cores of the first package
    assert threads.choose_cpus(4, everything) == [0, 1, 2, 3]
    assert threads.choose_cpus(5, everything) == [0, 1, 2, 3, 4]
    assert threads.choose_cpus(99, everything) == list(everything)
    assert threads.choose_cpus(2, [1, 5, 7]) == [1, 7]  # 1 and 5 share a core


def test_another_placement_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_core_of", lambda cpu: (cpu // 2 % 2, cpu % 2))  # as above
    everything = range(8)
    assert threads.choose_cpus(2, everything, "siblings") == [0, 4]  # both threads of one core
    assert threads.choose_cpus(2, everything, "packages") == [0, 2]
    assert threads.choose_cpus(4, everything, "packages") == [0, 1, 2, 3]
    assert threads.count_cores(everything) == 4
    monkeypatch.setenv(threads.PLACEMENT, "siblings")
    assert threads.choose_cpus(2, everything) == [0, 4]
    monkeypatch.setenv(threads.PLACEMENT, "anywhere")
    with pytest.raises(ConfigurationError, match="there is no placement 'anywhere'"):
        threads.choose_cpus(2, everything)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_affinity_confines_the_process_and_reports_what_could_not_be_done() -> None:
    code = (
        "import os\nfrom d5suite.instruments.threads import allowed_cpus, set_affinity\n"
        "notes = []\nmany = set_affinity(10_000, notes)\nassert set(many) == os.sched_getaffinity(0), many\n"
        "os.sched_setaffinity(0, many[:1])  # as OpenMP does\nassert allowed_cpus() == many\n"
        "one = set_affinity(1)\nassert set(one) == os.sched_getaffinity(0) and len(one) == 1, one\n"
        "print(len(notes), notes[0])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("1 10000 threads share")


def test_affinity_that_the_system_refuses_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: list[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    notes: list[str] = []
    assert threads.set_affinity(1, notes) == []
    assert notes == ["CPU affinity was not set: Operation not permitted"]


def test_the_thread_environment_names_the_budget_for_every_library() -> None:
    assert set(threads.thread_environment(3).values()) == {"3"}
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"} <= set(threads.thread_environment(3))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_a_thread_budget_is_a_whole_number(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="thread budget"):
        threads.thread_environment(wrong)
    with pytest.raises(ConfigurationError, match="thread budget"):
        threads.choose_cpus(wrong)


def test_control_groups_are_folders_with_cpu_figures() -> None:
    assert all((folder / "cpu.stat").exists() for folder in control_groups("cpu"))
    assert all(isinstance(folder, Path) for folder in control_groups("cpu"))
