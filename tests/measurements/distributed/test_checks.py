"""What several ranks timed is proved: a scheme or communicator that goes wrong later is no result.

Ranks are threads; each is proved once, and then times one lie after the other.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from d5suite.distributed.communicators.threads import run
from d5suite.distributed.schemes import SCHEMES
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import Distributed, Job, NetworkCase
from d5suite.levels.distributed import Communicator, Replica
from d5suite.measurements.distributed.checks import declared_bytes, equal_parameters
from d5suite.measurements.distributed.distributed_step import DistributedTraining
from d5suite.measurements.distributed.proof import prove_scheme
from d5suite.measurements.distributed.steps import DistributedStep
from d5suite.measurements.training.training_step import prove_training
from d5suite.workloads.network import NetworkWorkload
from tests.training.small import needs_torch

pytestmark = needs_torch

PATIENCE = 12
"""Steps after which a scheme begins to lie; the proof before timing makes fewer."""

SETTINGS = SamplingSettings(max_time_s=0.01, min_rounds=20, warmup="off")


def being_timed() -> bool:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_together":
        frame = frame.f_back
    return frame is not None


class Lies:
    """How one rank's scheme goes wrong; each answers whether it does so in this step."""

    def __init__(self, lie: str, rank: int, size: int) -> None:
        self.lie, self.rank, self.size, self.steps = lie, rank, size, 0
        self.kept: dict[Any, Any] = {}

    def gradients(self, replica: Replica, name: str, call: Callable[..., Any], *given: Any) -> Any:
        """Compute gradients as the lie wants them."""
        loss, found = call(*given)
        if self.lie == "forgets a rank" and self.rank == 1 and self.late:
            for each in found.values():
                each[...] = 0
        if self.lie == "stale" and self.late:
            kept = self.kept.setdefault("gradients", {key: value.copy() for key, value in found.items()})
            for key, each in found.items():
                each[...] = kept[key]
        if self.lie == "stale loss" and self.late:
            loss = self.kept.setdefault("loss", loss)
        return loss, found

    @property
    def late(self) -> bool:
        return self.steps > PATIENCE


def lying(lie: str, replica: Replica, communicator: Any, scheme: Any) -> Any:
    """Make a scheme lie from a step on."""
    lies = Lies(lie, communicator.rank, communicator.size)
    right, step = scheme.replica, scheme.step

    class Lying(type(right)):  # type: ignore[misc]
        gradients_early = Replica.gradients_early

        def gradients(self, feed: Any) -> Any:
            return lies.gradients(self, "gradients", super().gradients, feed)

    def counted(feed: Any) -> Any:
        lies.steps += 1
        if lie == "alone" and lies.late:
            return replica.trainer.step(feed)
        if lie == "wrong while timed" and being_timed():
            return {name: value * 1.5 for name, value in step(feed).items()}
        return step(feed)

    mine = copy.copy(right)
    mine.__class__ = Lying
    scheme.replica, scheme.step = mine, counted
    if lie == "sums":

        class Summing(type(communicator)):  # type: ignore[misc]
            def all_reduce(self, array: np.ndarray) -> None:
                super().all_reduce(array)
                if lies.late and array.dtype == np.float32:
                    array *= self.size

        communicator.__class__ = Summing
    if lie == "counts wrongly":

        class Counting(type(communicator)):  # type: ignore[misc]
            def _send(self, array: np.ndarray, to: int, tag: int) -> None:
                super()._send(array, to, tag)
                self._outermost.bytes_sent += 8

        communicator.__class__ = Counting
    return scheme


SYNCHRONOUS: Mapping[str, str] = {
    "no": "",
    "forgets a rank": "weights after step 1 of all_reduce on batches never fed before",
    "stale": "weights after step",
    "stale loss": "losses of the first timed steps",
    "sums": "weights after step",
    "alone": "parameters after the timed steps, bit by bit",
    "wrong while timed": "losses of the first timed steps",
    "counts wrongly": "counted as sent and not as received",
}
LIES: Mapping[str, Mapping[str, str]] = {
    "all_reduce": SYNCHRONOUS,
    "gossip": {"no": "", "alone": "weights after step 2 of gossip", "forgets a rank": "of gossip on batches"},
    "top_k": {"no": "", "stale": "weights after step"},
    "quantised": {"no": "", "forgets a rank": "weights after step"},
    "model_averaging": {"no": "", "alone": "weights after step"},
    "parameter_server": {"no": "", "forgets a rank": "weights after step"},
    "asynchronous": {"no": ""},
}
"""By scheme and lie: a part of the check that finds it."""

QUICK = ("all_reduce", "gossip")


Failed = Callable[[str, str], list[str]]


@pytest.fixture(scope="module")
def failed(small_onnx: Path, imagenet_tree: Path) -> Iterator[Failed]:
    """Give the findings of both ranks' checks that failed, by scheme and lie."""
    import torch

    case = NetworkCase(
        "small", "smoke", ["distributed_step"], validation_steps=3, batch_size=4,
        network={"onnx": str(small_onnx), "classes": 4, "image_size": 32},
        dataset={"kind": "imagenet", "root": str(imagenet_tree)},
        optimizer={"name": "sgd", "learning_rate": 0.125, "momentum": 0.5},
    )  # fmt: skip
    job = Job({"name": "torch", "mode": "eager"}, "cpu", "fp32", 2, 0, ranks=2, cases=[case])
    workloads = [NetworkWorkload(job, case, NetworkWorkload.select(job)) for _ in range(2)]

    def rank(communicator: Communicator, name: str) -> dict[str, list[str]]:
        """Prove the scheme, and then time each lie."""
        kind, workload, found = type(communicator), workloads[communicator.rank], {}
        workload.communicator = communicator
        workload.job = replace(job, distributed=Distributed(scheme=name, communicator="gloo", launcher="process"))
        for lie in LIES[name]:
            measurement = DistributedTraining()
            step = measurement.prepare(workload)
            assert isinstance(step, DistributedStep)
            if lie == "no":
                assert all(check.passed for check in (*prove_training(workload), *prove_scheme(workload, step)))
            make = step.make_scheme

            def make_scheme(replica: Any, make: Any = make, lie: str = lie, **more: Any) -> Any:
                return lying(lie, replica, communicator, make(replica, **more))

            step.make_scheme = make_scheme  # type: ignore[method-assign]
            step.begin()
            step.time(SETTINGS)
            found[lie] = [check.finding for check in measurement.check_timed(workload, step) if not check.passed]
            communicator.__class__ = kind
        return found

    @cache
    def measure(name: str) -> Mapping[str, list[str]]:
        one, other = run(2, partial(rank, name=name))
        return {lie: one[lie] + other[lie] for lie in one}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d5suite.distributed.communicators.threads.PATIENCE_S", 1000.0)  # the machine may be busy
        yield lambda name, lie: measure(name)[lie]
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        pytest.param(name, lie, marks=() if name in QUICK else pytest.mark.slow)
        for name, lies in LIES.items()
        for lie in lies
    ],
)
def test_a_scheme_that_goes_wrong_after_its_proof_is_no_result(failed: Failed, name: str, lie: str) -> None:
    findings, said = failed(name, lie), LIES[name][lie]
    assert any(said in each for each in findings) if said else not findings, findings


def test_every_scheme_is_attacked() -> None:
    assert set(SCHEMES) - set(LIES) == {"stale_synchronous"}  # which is `asynchronous` but for when it answers


@pytest.mark.parametrize("stops", [False, True])
def test_a_framework_that_stopped_to_communicate_cannot_make_up_for_it_at_the_end(stops: bool) -> None:
    """Its ranks have different weights until ``finish`` makes them equal."""

    def rank(communicator: Communicator) -> list[str]:
        weights = {"w": np.full(3, communicator.rank if stops else 7.0)}
        step: Any = SimpleNamespace(
            is_opaque=True,
            serving=False,
            communicator=communicator,
            scheme=SimpleNamespace(
                synchronous=True, weights=lambda: weights, finish=lambda: weights.update(w=np.ones(3))
            ),
        )
        workload: Any = SimpleNamespace(
            network=SimpleNamespace(parameters=["w"]), executor=SimpleNamespace(parameters=lambda: weights)
        )
        return [check.finding for check in equal_parameters(workload, step) if not check.passed]

    for found in run(2, rank):
        assert len(found) == stops
        assert not stops or "weights after the timed steps, before the scheme finishes, bit by bit" in found[0]


@pytest.mark.parametrize("part", [1.0, 0.25])
def test_bytes_declared_too_small_are_told(part: float) -> None:
    """Each of two ranks sends 2 MB in 4 steps."""

    def rank(communicator: Communicator) -> list[str]:
        step: Any = SimpleNamespace(
            is_opaque=True,
            communicator=communicator,
            tcp_bytes=2_000_000,
            counted=4,
            facts=lambda: {"bytes_per_step": part * 1e6},
        )
        return [check.finding for check in declared_bytes(SimpleNamespace(), step) if not check.passed]  # type: ignore[arg-type]

    for found in run(2, rank):
        assert bool(found) == (part < 1)
        assert part == 1 or "1e+06 bytes a step went through TCP, 2.5e+05 are declared" in found[0]
