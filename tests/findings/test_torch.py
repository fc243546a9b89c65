"""Faults of PyTorch and its exporters, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.findings.mended import require


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def test_the_older_exporter_merges_running_statistics_of_different_layers(torch: Any) -> None:
    onnx = pytest.importorskip("onnx")
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.BatchNorm2d(2)).eval()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (torch.ones(1, 2, 3, 3),), file, dynamo=False)
    stored = {tensor.name for tensor in onnx.load_from_string(file.getvalue()).graph.initializer}
    merged = len(stored & {"0.running_mean", "2.running_mean"}) < 2
    require(merged, "torch", "d5suite/network/normalise.py (_separate_statistics)")


def test_a_fused_update_pairs_elements_by_their_place_in_memory(torch: Any) -> None:
    """One step of SGD from zero with rate 1 is the negative gradient."""
    gradient = torch.arange(16.0).reshape(1, 4, 2, 2)
    parameter = torch.zeros(1, 4, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    parameter.grad = gradient.clone()
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    wrong = not torch.equal(parameter.detach(), -gradient)
    require(wrong, "torch", "d5suite/backends/torch/training.py (_laid_out)")


MESSAGES = """
import os, sys, time
from pathlib import Path
import torch
from torch.distributed import FileStore, ProcessGroupGloo

file, rank, batch = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "batch"
os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
group = ProcessGroupGloo(FileStore(file, 2), rank, 2)
loops = [each for each in Path("/proc/self/task").iterdir() if (each / "comm").read_text() == "gloo_tcp_loop\\n"]
assert loops
for each in loops if batch else []:
    os.sched_setscheduler(int(each.name), os.SCHED_BATCH, os.sched_param(0))
tensor = torch.zeros(256)
start = time.perf_counter()
for _ in range(200):
    group.barrier().wait()
    for sender in (0, 1):
        work = group.send([tensor], 1 - rank, 7) if sender == rank else group.recv([tensor], 1 - rank, 7)
        work.wait()
print(time.perf_counter() - start)
group.barrier().wait()
"""


def seconds_of_messages(file: Path, policy: str) -> float:
    """Return how long two ranks of one core each take for 200 barriers and messages both ways."""
    command = [sys.executable, "-c", MESSAGES, str(file)]
    ranks = [subprocess.Popen([*command, str(rank), policy], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    return max(float(each.communicate(timeout=300)[0]) for each in ranks)


@pytest.mark.alone  # another program's turns are as long
def test_gloos_thread_spins_on_the_lock_of_the_thread_that_it_interrupted(torch: Any, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    ratios: list[float] = []

    def spins() -> bool:  # Linux 6.18 shows ratios of 1.6 to 2.7
        return max(ratios) > 2 or (len(ratios) > 2 and statistics.median(ratios) > 1.3)

    while len(ratios) < 6 and not (ratios and spins()):
        number = len(ratios)
        seconds = seconds_of_messages(tmp_path / f"plain{number}", "plain")
        ratios.append(seconds / seconds_of_messages(tmp_path / f"batch{number}", "batch"))
    if max(ratios) < 0.8:
        pytest.skip("other programs run: they go before threads of SCHED_BATCH")
    require(spins(), "torch", "d5suite/distributed/loops.py")
