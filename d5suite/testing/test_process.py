"""A backend in its process: threads, random numbers, asynchronous work and printed output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from d5suite.errors import BackendError
from d5suite.instruments.memory import watch_peak
from d5suite.levels.network import Native
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import classifier, dropping, heavy, random_batch, roomy
from d5suite.testing.probe import GIVEN, LOSSES, verdict
from d5suite.testing.subject import Subject
from d5suite.testing.waiting import elapsed, lasting, require_waiting

FEWEST, MOST = 1, 2048
"""Fewest and most images per step that `synchronize` waits for; a fast device needs many."""

LATER_CALLS = 6

LATER_MIB = 128
"""MiB that may be taken after the first two calls of a network that needs about 30."""


@lru_cache
def _probe(backend: str, device: str, threads: int, seed: int, *further: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.testing.probe", backend, device, str(threads), str(seed), *further],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BackendError(f"{backend!r} failed in a fresh process: {last}", hint=done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _seeded(subject: Subject, seed: int, *further: str) -> dict[str, Any]:
    return _probe(subject.selection, subject.device, 1, seed, *further)


def test_a_seed_decides_the_random_numbers(subject: Subject) -> None:
    subject.require(dropping(), gradient=True)
    found = [_seeded(subject, *seed) for seed in ((3,), (3, LOSSES), (4, LOSSES))]
    precision, (first, again, other) = found[0]["precision"], [each["losses"] for each in found]
    subject.hold("runtime.seed", not subject.apart(again, first, precision), "two processes with one seed differ")
    subject.hold("runtime.seed", subject.apart(other, first, precision), "two seeds give the same numbers")


@pytest.mark.parametrize("kind", ["inference", "gradients"])
def test_the_thread_budget_is_obeyed(subject: Subject, kind: str) -> None:
    if subject.device != "cpu":
        pytest.skip("threads are counted on the CPU")
    subject.require(heavy(), gradient=kind == "gradients")
    key = "windows" if kind == "inference" else "gradient_windows"
    windows = _seeded(subject, 3)[key]
    if not verdict(windows):  # what a second process shows could change no other verdict
        windows = [*windows, *_seeded(subject, 4)[key]]
    obeyed, wanted = verdict(windows), max(wanted for _, wanted, *_ in windows)
    if obeyed is None:
        used = min(used for used, *_ in windows)
        pytest.skip(f"proves nothing: the machine gave the process {used:.2f} processors; it takes {GIVEN} to tell")
    subject.hold("runtime.threads", obeyed, f"{wanted:.2f} threads work, not 1")


def test_later_calls_take_no_more_memory(subject: Subject) -> None:
    """A recipe records the peak of the first calls."""
    network = roomy()
    subject.require(network)
    executor = subject.executor(network, subject.timed)
    gradient = "gradient" not in subject.backend.absent
    images, labels = random_batch(network)
    feed = executor.feed({"image": images, **({"label": labels} if gradient else {})})
    calls: list[Callable[[Native], Native]] = [executor.forward, *([executor.forward_backward] if gradient else [])]
    peak = subject.backend.load("runtime", subject.mode).device_memory(subject.device)
    for call in calls:

        def make(count: int, call: Callable[[Native], Native] = call) -> None:
            for _ in range(count):
                executor.fetch(call(feed))

        make(2)
        grown = watch_peak(peak)
        if grown is None:
            pytest.skip("this system tracks no peak of a process's memory")
        make(LATER_CALLS)
        more = grown() / 2**20
        text = f"{call.__name__}: {more:.0f} MiB more in {LATER_CALLS} calls after the first two"
        subject.hold("executor.memory", more <= LATER_MIB, text)


@pytest.mark.parametrize("kind", ["inference", "gradients", "updates"])
def test_synchronize_waits_for(subject: Subject, kind: str) -> None:
    network = heavy()
    subject.require(network, gradient=kind != "inference", level=2 if kind == "updates" else 1)
    executor = subject.executor(network, subject.timed)
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


def test_nothing_is_printed_while_a_network_runs(subject: Subject, capfd: pytest.CaptureFixture[str]) -> None:
    network = classifier()
    subject.require(network)
    executor = subject.executor(network, subject.timed)
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
    for step in steps:  # compilation may print
        step()
        executor.synchronize()
    capfd.readouterr()
    for step in steps:
        for _ in range(3):
            step()
        executor.synchronize()
    printed = "".join(capfd.readouterr())
    subject.hold("executor.quiet", not printed, f"it printed {printed[:200]!r}")
