"""The benchmarks in ``benchmarks/`` see what they are to see: planted costs, other work, slower
formats."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_formats, bench_operators, bench_training_loop
from benchmarks.handwritten import OperatorCall, handwritten
from d5suite.backends import discover
from d5suite.instruments.sampling import sample_kernel
from d5suite.instruments.settings import SamplingSettings
from d5suite.network.operation import Operation

BUILT_IN = ("deep500", "jax", "keras", "mxnet", "tensorflow", "torch")
INSTALLED = [name for name in BUILT_IN if discover()[0][name].problem() is None]
WITH_BASELINE = [name for name in INSTALLED if "baseline" not in discover()[0][name].absent]

needs_a_baseline = pytest.mark.skipif(not WITH_BASELINE, reason="no framework installed that has a baseline")


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("operation", [bench_operators.LONG, bench_operators.SHORT], ids=["long", "short"])
def test_level_0_calls_the_native_callable_itself(name: str, operation: Operation) -> None:
    operator, *_ = bench_operators.pair(discover()[0][name], operation)  # which compares the answers
    assert not isinstance(operator.forward, types.FunctionType)  # whose work would be the adapter's


@needs_a_baseline
@pytest.mark.alone
def test_what_an_adapter_adds_to_a_call_is_seen() -> None:
    operator, feed, native = bench_operators.pair(discover()[0][WITH_BASELINE[-1]], bench_operators.SHORT)
    forward, planted = operator.forward, 500e-6

    def wrapped(*inputs: Any) -> Any:
        end = time.perf_counter() + planted
        while time.perf_counter() < end:
            pass
        return forward(*inputs)

    operator.forward = wrapped
    found = bench_operators.alternate(operator, feed, native, least=3)
    assert found.added_s > planted / 2
    assert not found.acceptable


def test_the_limit_is_a_part_of_long_calls_and_a_time_of_short_ones() -> None:
    for bare, added, accepted in (
        (1e-3, 19e-6, True),
        (1e-3, 21e-6, False),
        (5e-6, 0.9e-6, True),
        (5e-6, 1.1e-6, False),
    ):
        rounds = bench_operators.Rounds([bare + added] * 15, [bare] * 15)
        assert rounds.acceptable is accepted
        assert not rounds.undecided
    noisy = [5e-6 + (0.9e-6 if index % 2 else 1.2e-6) for index in range(15)]
    assert bench_operators.Rounds(noisy, [5e-6] * 15).undecided


@needs_a_baseline
def test_a_call_that_gives_another_answer_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = discover()[0][WITH_BASELINE[-1]]
    module = handwritten(backend)
    assert module is not None
    honest = module.operator_call

    def other(*arguments: Any, **settings: Any) -> OperatorCall:
        found: OperatorCall = honest(*arguments, **settings)
        return OperatorCall(found.call, found.arguments, found.synchronize, lambda output: found.fetch(output) + 1)

    monkeypatch.setattr(module, "operator_call", other)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        bench_operators.pair(backend, bench_operators.SHORT)


def test_a_kernel_is_waited_for_by_its_last_result() -> None:
    issued: list[int] = []
    waited: list[tuple[object, ...]] = []

    def call() -> int:
        issued.append(len(issued))
        return issued[-1]

    def synchronize(*results: object) -> None:
        waited.append((*results, len(issued) - 1))

    sample_kernel(call, (), synchronize, SamplingSettings(max_time_s=0.01))
    pending = [each for each in waited if len(each) == 2]
    assert len(pending) > 5
    assert all(result == last for result, last in pending)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("mxnet", "torch") else pytest.mark.slow) for n in INSTALLED]
)
def test_both_training_loops_do_the_same_work(name: str) -> None:
    both = bench_training_loop.Pair(discover()[0][name])
    ours, theirs = both.neutral(), both.by_hand()
    assert len(ours) == 1437 // bench_training_loop.BATCH
    bench_training_loop.require_same_losses(ours, theirs)
    assert ours[-1] < ours[0] / 4


@needs_a_baseline
def test_a_baseline_shares_no_code_with_its_adapter() -> None:
    for name in WITH_BASELINE:
        package = discover()[0][name].package
        for written in (f"{package}.baseline", f"benchmarks.handwritten.{name}"):
            spec = importlib.util.find_spec(written)
            assert spec is not None and spec.origin is not None
            source = Path(spec.origin).read_text(encoding="utf-8")
            for module in ("operators", "network", "training", "engine", "custom"):
                assert f"{package}.{module}" not in source, f"{written} imports the adapter's {module}"


def test_other_work_is_refused() -> None:
    losses = [2.3, 1.5, 0.9]
    bench_training_loop.require_same_losses(losses, [2.30001, 1.50001, 0.90001])
    with pytest.raises(AssertionError):
        bench_training_loop.require_same_losses(losses, [2.3, 1.48, 0.9])
    with pytest.raises(AssertionError):
        bench_training_loop.require_same_losses(losses, losses[:2])


def series(median: float, spread: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of a folder, and of a format that takes so many times as long, with this relative
    spread."""
    factors = 1 + spread * np.linspace(-1, 1, rounds)
    return {"folder": [1.0] * rounds, "records": (median * factors).tolist()}


def test_a_format_that_is_slower_within_the_noise_fails_after_more_rounds() -> None:
    few = series(1.05, 0.3, bench_formats.LEAST_ROUNDS)
    assert bench_formats.undecided(bench_formats.beside_the_folder(few)["records"])
    assert bench_formats.goes_on(few)
    many = series(1.05, 0.3, bench_formats.MOST_ROUNDS)
    assert not bench_formats.goes_on(many)
    assert bench_formats.slower(many) == ["records"]


def test_a_format_that_is_clearly_faster_or_slower_needs_no_more_rounds() -> None:
    for median, found in ((0.8, []), (1.3, ["records"])):
        times = series(median, 0.05, bench_formats.LEAST_ROUNDS)
        assert not bench_formats.goes_on(times)
        assert bench_formats.slower(times) == found
    assert bench_formats.goes_on(series(0.8, 0.05, bench_formats.LEAST_ROUNDS - 1))


def test_a_run_over_limited_links_that_is_ended_leaves_none_behind(tmp_path: Path) -> None:
    said = tmp_path / "said"
    for name in ("ip", "tc"):  # which note what they are asked for
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{said}"\n')
        program.chmod(0o755)
    code = (
        "import time\nfrom benchmarks.bench_transfers import links\n"
        "with links(2, '1gbit'):\n    print('made', flush=True)\n"
        "    for _ in range(600):\n        time.sleep(0.1)\n"  # a signal that another thread gets does not end a sleep
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    here = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=here, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "made\n"
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
    lines = said.read_text().splitlines()
    made = {line.split()[-1] for line in lines if line.startswith("ip netns add")}
    assert len(made) == 2 and made == {line.split()[-1] for line in lines if line.startswith("ip netns del")}
    assert any(line.startswith("ip link del") for line in lines)
