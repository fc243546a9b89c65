"""What a backend does to its process: threads, random numbers, asynchronous work, and what it prints."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from d5suite.levels.contract import ContractError
from d5suite.levels.training import SGD
from d5suite.testing.networks import classifier, heavy, random_batch
from d5suite.testing.subject import Subject

REPEATS = 7
UNFINISHED = 0.2
"""Part of a step's time that may remain after `synchronize`."""

WORKING = 1.25
"""Processor time over wall time that one thread may show; a second one shows 2."""

LEAST_S = 0.02
"""A step must take this long, or what remains after it cannot be told from noise."""


@lru_cache
def _probe(backend: str, device: str, threads: int, seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.testing.probe", backend, device, str(threads), str(seed)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _seeded(subject: Subject, seed: int, repeat: int = 0) -> dict[str, Any]:
    # A second run with the same seed must be another process: a name of its own keeps it out of the cache.
    return _probe(f"{subject.backend.name}:{subject.mode}" + " " * repeat, subject.device, 1, seed)


def test_a_seed_decides_the_random_numbers(subject: Subject) -> None:
    first = _seeded(subject, 3)["losses"]
    if first is None:
        pytest.skip("no random operator: no Dropout, or no gradient")
    again, other = _seeded(subject, 3, repeat=1)["losses"], _seeded(subject, 4)["losses"]
    name = subject.backend.name
    assert first == again, ContractError(name, "runtime.seed", "two processes with one seed differ")
    assert first != other, ContractError(name, "runtime.seed", "two seeds give the same numbers")


def test_the_thread_budget_is_obeyed(subject: Subject) -> None:
    if subject.device != "cpu":
        pytest.skip("threads are counted on the CPU")
    ratio = min(_seeded(subject, seed, repeat)["cpu_per_wall"] for seed, repeat in ((3, 0), (4, 0)))
    assert ratio <= WORKING, ContractError(
        subject.backend.name, "runtime.threads", f"{ratio:.2f} threads work where 1 was asked for"
    )


def _remains(
    subject: Subject, work: Callable[[], Any], synchronize: Callable[[], None], read: Callable[[Any], Any]
) -> None:
    """Fail unless, after work and synchronize, reading the result takes next to no time."""
    read(work())  # compile
    whole, rest = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = work()
        synchronize()
        middle = time.perf_counter()
        read(result)
        end = time.perf_counter()
        whole.append(end - start)
        rest.append(end - middle)
    step, remaining = statistics.median(whole), statistics.median(rest)
    if step < LEAST_S:
        pytest.skip(f"a step of {step * 1e3:.1f} ms is too short to tell")
    assert remaining <= UNFINISHED * step, ContractError(
        subject.backend.name,
        "executor.synchronize",
        f"{remaining * 1e3:.1f} ms of a step of {step * 1e3:.1f} ms were still to do after it",
    )


def test_synchronize_waits_for_inference(subject: Subject) -> None:
    network = heavy()
    subject.require(network)
    executor = subject.executor(network, _timed(subject))
    images, _ = random_batch(network, 16)
    feed = executor.feed({"image": images})
    _remains(subject, lambda: executor.forward(feed), executor.synchronize, executor.fetch)


def test_synchronize_waits_for_gradients_and_updates(subject: Subject) -> None:
    network = heavy()
    subject.require(network, gradient=True)
    executor = subject.executor(network, _timed(subject))
    images, labels = random_batch(network, 8)
    feed = executor.feed({"image": images, "label": labels})
    _remains(subject, lambda: executor.forward_backward(feed), executor.synchronize, executor.fetch)
    if 2 in subject.backend.levels:
        trainer = subject.trainer(executor, SGD(2.0**-10, momentum=0.5))
        _remains(subject, lambda: trainer.step(feed), executor.synchronize, lambda _: executor.parameters())


def _timed(subject: Subject) -> str:
    return "fp32" if "fp32" in subject.backend.precisions else subject.exact


def test_nothing_is_printed_while_a_network_runs(subject: Subject, capfd: pytest.CaptureFixture[str]) -> None:
    network = classifier()
    subject.require(network)
    executor = subject.executor(network, _timed(subject))
    images, labels = random_batch(network)
    feed = executor.feed(
        {"image": images, "label": labels} if "gradient" not in subject.backend.absent else {"image": images}
    )
    steps: list[Callable[[], Any]] = [lambda: executor.forward(feed)]
    if "gradient" not in subject.backend.absent:
        steps.append(lambda: executor.forward_backward(feed))
        if 2 in subject.backend.levels:
            trainer = subject.trainer(executor, SGD(0.125))
            steps.append(lambda: trainer.step(feed))
    for step in steps:  # compilation may speak
        step()
        executor.synchronize()
    capfd.readouterr()
    for step in steps:
        for _ in range(3):
            step()
        executor.synchronize()
    printed = "".join(capfd.readouterr())
    assert not printed, ContractError(subject.backend.name, "executor.quiet", f"it printed {printed[:200]!r}")
