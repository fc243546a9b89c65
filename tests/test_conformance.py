"""The conformance kit itself: it passes what is right, catches what is wrong, and a run that proves nothing fails."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from d5suite.backends import discover
from tests.conftest import plugin_environment

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mistakes are made in PyTorch")


def kit(backend: str, module: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    """Run one file of the kit, or all of it, as ``pytest --pyargs`` does for a user."""
    where = f"d5suite.testing.{module}" if module else "d5suite.testing"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", where, "--backend", backend, *options],
        env=plugin_environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )


BUILT_IN = ("deep500", "jax", "keras", "mxnet", "tensorflow", "torch")


@pytest.fixture(scope="module")
def kits() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """The whole kit of every adapter that can run here, as many at once as there are processors."""
    usable = [name for name in BUILT_IN if not discover()[0][name].problem()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {name: pool.submit(kit, name) for name in usable}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_adapter_conforms(kits: dict[str, Future[subprocess.CompletedProcess[str]]], name: str) -> None:
    problem = discover()[0][name].problem()
    if problem:
        pytest.skip(problem)
    done = kits[name].result()
    assert done.returncode == 0, done.stdout[-5000:]
    total = next(line.split() for line in done.stdout.splitlines() if line.startswith("total"))
    assert int(total[1]) > 300 and int(total[2]) == 0


MISTAKES = [
    ("padding", "test_operators", "test_operator_means_what_onnx_says[Conv", ""),
    ("sum", "test_gradients", "test_gradient_of_network[classifier", ""),
    ("dampening", "test_training", "test_optimizer_follows_its_formula[momentum]", ""),
    ("unsynchronized", "test_process", "test_synchronize_waits_for_inference", "executor.synchronize"),
    ("threads", "test_process", "test_the_thread_budget_is_obeyed", "runtime.threads"),
    ("seedless", "test_process", "test_a_seed_decides_the_random_numbers", "runtime.seed"),
    ("chatty", "test_process", "test_nothing_is_printed_while_a_network_runs", "executor.quiet"),
    ("statistics", "test_networks", "test_inference_changes_nothing", ""),
]


@needs_torch
@pytest.mark.parametrize(("mistake", "module", "case", "clause"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_caught(mistake: str, module: str, case: str, clause: str) -> None:
    done = kit(f"wrong:{mistake}", module)
    assert done.returncode == 1, done.stdout[-3000:]
    assert any(line.startswith("FAILED") and case in line for line in done.stdout.splitlines()), done.stdout[-3000:]
    if clause:
        assert f"backend 'wrong' breaks clause '{clause}'" in done.stdout


@needs_torch
def test_the_same_backend_without_a_mistake_passes() -> None:
    for module in sorted({module for _, module, _, _ in MISTAKES}):
        done = kit("wrong:right", module)
        assert done.returncode == 0, done.stdout[-3000:]


def test_a_run_in_which_nothing_passes_fails() -> None:
    done = kit("faulty", "test_training")
    assert done.returncode == 1
    assert "no case passed: nothing is proved" in done.stdout


def test_the_kit_wants_one_backend_that_is_there() -> None:
    for backend, message in [("torch,tensorflow", "takes one backend"), ("no-such", "there is no backend 'no-such'")]:
        done = kit(backend, "test_training")
        assert done.returncode == 4
        assert message in done.stdout + done.stderr
