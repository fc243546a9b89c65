"""The conformance kit itself: it passes what is right, catches what is wrong, and a run that proves nothing fails."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from d5suite.backends import discover
from d5suite.levels.contract import CLAUSES
from d5suite.testing.networks import LIGHT
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
    total = _total(done)
    assert int(total[1]) > 300 and int(total[2]) == 0


def _total(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The last row of the table."""
    return next(line.split() for line in done.stdout.splitlines() if line.startswith("total"))


MISTAKES = [
    ("padding", "test_operators", "test_operator_means_what_onnx_says[Conv", "operators.meaning"),
    ("sum", "test_gradients", "test_gradient_of_network[classifier", "gradient.meaning"),
    ("tripled", "test_gradients", "test_gradient_of_network[classifier", "gradient.meaning"),
    ("tripled", "test_level0", "test_backward[Softmax", "operator.backward"),
    ("dampening", "test_training", "test_optimizer_follows_its_formula[momentum-fp64]", "trainer.meaning"),
    ("uphill", "test_training", "test_optimizer_follows_its_formula[adam-fp32]", "trainer.meaning"),
    ("forgetful", "test_training", "test_training_goes_on_from_a_saved_state", "trainer.state"),
    ("lenient", "test_networks", "test_bad_input_is_refused", "executor.feed"),
    ("axis", "test_level0", "test_forward[Softmax", "operators.meaning"),
    ("dropped", "test_level0", "test_backward[Softmax", "operator.backward"),
    ("unsynchronized", "test_level0", "test_synchronize_waits_for_an_operator", "operator.synchronize"),
    ("unsynchronized", "test_process", "test_synchronize_waits_for[inference]", "executor.synchronize"),
    ("threads", "test_process", "test_the_thread_budget_is_obeyed", "runtime.threads"),
    ("seedless", "test_process", "test_a_seed_decides_the_random_numbers", "runtime.seed"),
    ("chatty", "test_process", "test_nothing_is_printed_while_a_network_runs", "executor.quiet"),
    ("statistics", "test_networks", "test_inference_changes_nothing", "executor.inference"),
]
"""The mode, the file and the case that catch it, and the clause that it breaks."""

ALONE = {
    "test_training": "goes_on_from_a_saved_state or formula and (momentum or adam) and not clip and not rates",
    "test_level0": "Softmax or synchronize",
    "test_networks": "bad_input or inference_changes",
    "test_gradients": "test_gradient_of_network",
}
"""By file: the cases that are run to catch a mistake, where all of them would take long."""


def _selection(module: str) -> list[str]:
    return ["-k", ALONE[module]] if module in ALONE else []


@needs_torch
@pytest.mark.parametrize(
    ("mistake", "module", "case", "clause"), MISTAKES, ids=[f"{mistake}, {module}" for mistake, module, *_ in MISTAKES]
)
def test_a_mistake_is_caught(mistake: str, module: str, case: str, clause: str) -> None:
    """And is told in two lines: adapter, clause and figures, and the clause's words."""
    name = "single" if mistake == "tripled" else "wrong"
    done = kit(f"{name}:{mistake}", module, *_selection(module))
    assert done.returncode == 1, done.stdout[-3000:]
    lines = done.stdout.splitlines()
    assert any(line.startswith("FAILED") and case in line for line in lines), done.stdout[-3000:]
    titles = [index for index, line in enumerate(lines) if line.startswith("___") and case.split("[")[0] in line]
    for index in titles:
        assert lines[index + 1].startswith(f"backend '{name}' breaks clause '{clause}' of the contract: ")
        assert lines[index + 2] == f"  The clause: {CLAUSES[clause]}."
        assert lines[index + 3].startswith(("___", "===", "---"))
    assert titles


@needs_torch
def test_the_same_backends_without_a_mistake_pass() -> None:
    for name, module in sorted({("single" if m == "tripled" else "wrong", module) for m, module, *_ in MISTAKES}):
        done = kit(f"{name}:right", module, *_selection(module))
        assert done.returncode == 0, done.stdout[-3000:]
        assert name != "single" or not re.search(r"^level 1: gradients .* [1-9]\d*$", done.stdout, re.MULTILINE)


@needs_torch
def test_a_run_of_the_whole_kit_wants_every_level_proved() -> None:
    done = kit("partial", "", "-q")
    assert done.returncode == 1
    assert int(_total(done)[2]) == 0, done.stdout[-3000:]
    for claim in ("gradient", "level 2"):
        assert f"backend 'partial' declares {claim}, and no case of it passed: it is not proved" in done.stdout
    assert "declares level 1," not in done.stdout


def test_the_kit_has_the_networks_that_onnx_ships() -> None:
    assert len(LIGHT) == 9


def test_a_run_in_which_nothing_passes_fails() -> None:
    done = kit("faulty", "test_training")
    assert done.returncode == 1
    assert "no case passed: nothing is proved" in done.stdout


def test_the_kit_wants_one_backend_that_is_there() -> None:
    for backend, message in [("torch,tensorflow", "takes one backend"), ("no-such", "there is no backend 'no-such'")]:
        done = kit(backend, "test_training")
        assert done.returncode == 4
        assert message in done.stdout + done.stderr
