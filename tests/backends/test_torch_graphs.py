"""PyTorch's mode ``cuda_graphs``: the conformance kit on graphs that are scripted on the CPU, and
planted mistakes of code that replays them; and, where there is a GPU, real ones.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from d5suite.backends import discover, select
from d5suite.errors import BackendError
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import random_batch
from d5suite.validate.norms import relative_l2
from tests.conftest import plugin_environment

pytestmark = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

MODULES = ("test_discovery", "test_answers", "test_gradients", "test_networks", "test_training")
ANSWERS = "test_every_call_of_one_shape_is_answered_anew"

# By mode: a case of the kit, and what it says.
MISTAKES = {
    "uncopied": (ANSWERS, "executor.lifetime"),
    "unrestored": ("test_running_statistics", "executor"),
    "unfed": (ANSWERS, "executor"),
    "moved": ("test_every_precision_is_within_its_tolerance", "executor.parameters"),
    "one_size": ("test_output_equals_the_reference_at_any_batch_size", "executor"),
}

REPEATED = ("unfed", "one_size")
"""Mistakes whose clauses also catch a quicker mistake."""


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def kit(mode: str, *options: str) -> subprocess.CompletedProcess[str]:
    modules = [f"d5suite.testing.{name}" for name in MODULES]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--pyargs", *modules]
    return subprocess.run(
        [*command, "--backend", f"graphed:{mode}", *options],
        env=plugin_environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
def test_replayed_answers_conform() -> None:
    done = kit("right", "-m", "not slow")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=pytest.mark.slow if each in REPEATED else ()) for each in MISTAKES]
)
def test_a_mistake_with_graphs_is_caught(mode: str) -> None:
    case, clause = MISTAKES[mode]
    done = kit(mode, "-k", case)
    assert done.returncode == 1 and f"breaks clause '{clause}" in done.stdout, done.stdout


def test_it_is_refused_where_nothing_replays_graphs() -> None:
    torch = select("torch:cuda_graphs")
    assert torch.backend.levels == {1, 2} and torch.backend.devices == ["cuda"]
    network = build("lenet5", classes=10, image_size=32)
    for backend in (torch.backend, discover()[0]["torch"]):
        with pytest.raises(BackendError, match="no device 'cpu': CUDA graphs are recorded"):
            backend.executor(network, mode="cuda_graphs", device="cpu")
        with pytest.raises(BackendError, match="no precision 'fp16': each step"):
            backend.executor(network, mode="cuda_graphs", device="cuda", precision="fp16")


@pytest.mark.gpu
@pytest.mark.skipif(not _has_gpu(), reason="PyTorch sees no CUDA GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replayed_step_is_the_eager_one(precision: str) -> None:
    torch = discover()[0]["torch"]
    network = build("resnet50", classes=10, image_size=64)
    images, labels = random_batch(network, 8, seed=0)
    found = {}
    for mode in ("eager", "cuda_graphs"):
        executor = torch.executor(network, mode=mode, device="cuda", precision=precision)
        trainer = torch.trainer(executor, SGD(2.0**-7, momentum=0.5))
        for number in range(6):  # as many answers of one shape
            arrays = network.arrays(np.roll(images, number, axis=3)) | {network.require_loss()[0]: labels}
            answer = executor.fetch(trainer.step(executor.feed(arrays)))
        output = executor.fetch(executor.forward(executor.feed(network.arrays(images))))
        found[mode] = {**answer, **output, **executor.parameters()}
    for name, value in found["eager"].items():
        assert relative_l2(found["cuda_graphs"][name], value) < (1e-3 if precision == "fp32" else 0.2), name
