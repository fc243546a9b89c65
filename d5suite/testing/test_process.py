"""What a backend does to its process: threads, random numbers, asynchronous work, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from d5suite.errors import BackendError
from d5suite.levels.network import Native
from d5suite.levels.training import SGD
from d5suite.testing.networks import classifier, dropping, heavy, random_batch
from d5suite.testing.subject import Subject
from d5suite.testing.waiting import elapsed, lasting, require_waiting

WORKING = 1.25
"""Processor time over wall time that one thread may show; a second one shows 2."""

FEWEST, MOST = 4, 2048
"""Images of the step that `synchronize` has to wait for; on a fast device it takes many to keep it busy."""


@lru_cache
def _probe(backend: str, device: str, threads: int, seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.testing.probe", backend, device, str(threads), str(seed)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendError(f"{backend.strip()!r} failed in a process of its own: {last}", hint=done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _seeded(subject: Subject, seed: int, repeat: int = 0) -> dict[str, Any]:
    # A second run with the same seed must be another process: a name of its own keeps it out of the cache.
    return _probe(f"{subject.backend.name}:{subject.mode}" + " " * repeat, subject.device, 1, seed)


def test_a_seed_decides_the_random_numbers(subject: Subject) -> None:
    subject.require(dropping(), gradient=True)
    first, again, other = (_seeded(subject, *seed)["losses"] for seed in ((3,), (3, 1), (4,)))
    subject.hold("runtime.seed", first == again, "two processes with one seed differ")
    subject.hold("runtime.seed", first != other, "two seeds give the same numbers")


def test_the_thread_budget_is_obeyed(subject: Subject) -> None:
    if subject.device != "cpu":
        pytest.skip("threads are counted on the CPU")
    subject.require(heavy())
    ratio = min(_seeded(subject, seed, repeat)["cpu_per_wall"] for seed, repeat in ((3, 0), (4, 0)))
    subject.hold("runtime.threads", ratio <= WORKING, f"{ratio:.2f} threads work where 1 was asked for")


@pytest.mark.parametrize("kind", ["inference", "gradients", "updates"])
def test_synchronize_waits_for(subject: Subject, kind: str) -> None:
    network = heavy()
    subject.require(network, gradient=kind != "inference", level=2 if kind == "updates" else 1)
    executor = subject.executor(network, _timed(subject))
    issue: Callable[..., Native] = executor.forward
    read: Callable[[Native], Any] = executor.fetch
    if kind == "gradients":
        issue = executor.forward_backward
    if kind == "updates":
        issue = subject.trainer(executor, SGD(2.0**-10, momentum=0.5)).step
        read = lambda _: executor.parameters()  # noqa: E731

    def feed(size: int) -> Native:
        images, labels = random_batch(network, size)
        return executor.feed({"image": images} | ({} if kind == "inference" else {"label": labels}))

    def seconds(size: int) -> float:
        fed = feed(size)
        return elapsed(lambda: read(issue(fed)))

    fed = feed(lasting(seconds, FEWEST, MOST))
    read(issue(fed))
    require_waiting(subject, "executor.synchronize", lambda: issue(fed), lambda _: executor.synchronize(), read)


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
    subject.hold("executor.quiet", not printed, f"it printed {printed[:200]!r}")
