"""Proof after timing on several ranks, at weights and on batches never seen before.

A scheme that was right in its first steps may go wrong in a later one, on all ranks alike. Rules
are those of the proof before timing, with gradients in the precision that was timed; these are
proved by themselves, against float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from d5suite.distributed.gathering import gather
from d5suite.levels.distributed import Communicator, Replica
from d5suite.levels.network import Arrays, Native
from d5suite.measurements.network.gradient import UNSEEN, check_drawn, check_whole_batch
from d5suite.validate.check import Check
from d5suite.validate.distributed.rules import IN_TURN, expected
from d5suite.validate.network.timed import apart_of_way, check_update, sampled, widened
from d5suite.validate.norms import relative_l2
from d5suite.workloads.network import FEEDS, NetworkWorkload, turned

if TYPE_CHECKING:
    from d5suite.measurements.distributed.step import DistributedStep

STEPS = 2
"""The second one starts from what the first one left: weights that differ, gradients not sent."""


Batches = Sequence[Sequence[Arrays | None]]
"""Batches by step and rank; None on a server rank."""


def right_weights(step: DistributedStep, replica: Replica, batches: Batches) -> list[Arrays]:
    """Return the expected weights of `DistributedStep.train`: of one process, or by the rule."""
    start, feed = replica.weights(), replica.trainer.executor.feed
    if step.scheme.synchronous:
        weights = []
        for each in batches:
            replica.trainer.step(*(feed(arrays) for arrays in each if arrays is not None))
            weights.append(replica.weights())
        return [*weights, weights[-1]]

    def gradient(weights: Arrays, arrays: Arrays) -> Arrays:
        replica.load_weights({name: value.astype(start[name].dtype) for name, value in weights.items()})
        _, found = replica.gradients(feed(arrays))
        return {name: np.array(value, np.float64) for name, value in found.items()}

    rank, settings = step.communicator.rank, step.scheduled(replica).settings.to_dict()
    rule = IN_TURN if step.how.native else step.how.scheme
    right = expected(rule, settings, gradient, start, batches, step.workload.optimizer)
    return [each[rank] for each in (right if rank in step.trainers else right[-1:])]


def check_messages(communicator: Communicator, traffic: dict[str, float]) -> Check:
    """Check that ranks count the same bytes as sent and as received."""
    found = gather(communicator, traffic)
    lost = {
        kind: sum(each[f"{kind}_sent"] - each[f"{kind}_received"] for each in found) for kind in ("messages", "bytes")
    }
    what = ", ".join(f"{count:g} {kind}" for kind, count in lost.items())
    return Check("messages counted as sent and not as received", max(abs(each) for each in lost.values()), 0.0, what)


def check_scheme(step: DistributedStep) -> Iterator[Check]:
    """Check the timed scheme against its rule and against an untimed run.

    Two steps from the generic point on batches never fed before; then the first timed steps once
    more, unless chance decides their order. No two passes of a network with Dropout are alike:
    only the latter, with the same values dropped.
    """
    executor = step.workload.executor
    if not executor.drops:
        yield from _check_rule(step)
    if not step.serving:
        yield _check_first(step)


def _check_rule(step: DistributedStep) -> Iterator[Check]:
    workload = step.workload
    executor, trainer = workload.executor, workload.trainer
    replica = step.replica

    def begin() -> Arrays:
        workload.to_generic_point(executor)
        trainer.load_state(trainer.initial_state())
        return replica.weights()

    batches = step.by_rank(lambda rank, number: _unseen(step, rank, number), STEPS)
    start = begin()
    scheme = step.scheduled(replica) if step.serving else step.scheme
    scheme.restart()
    _, found = step.train(scheme, batches)
    begin()
    right = right_weights(step, replica, batches)
    assert workload.references is not None  # the proof made them
    name = f"of {step.how.scheme} on batches never fed before, {executor.mode} {executor.precision} vs {step.rule_name}"
    limit, joined = widened(workload.references.limit), scheme.compresses
    checks = [
        apart_of_way(
            f"weights {'at the end' if number == len(right) else f'after step {number}'} {name}",
            executor.precision,
            _joined(_less(own, wanted), joined),
            _joined(_less(wanted, start), joined),
            _joined(start, joined),
            limit,
        )
        for number, (own, wanted) in enumerate(zip(found, right, strict=True), start=1)
    ]
    yield max(checks, key=lambda check: check.error)


def _unseen(step: DistributedStep, rank: int, number: int) -> Arrays:
    """Return a rank's batch as no step has seen it: images turned, other inputs reversed."""
    images, labels = step.batches(rank)[number % FEEDS]
    workload = step.workload
    other = images[::-1].copy() if workload.is_drawn else turned(images, 1)
    return workload.arrays((other, labels[::-1].copy()))


def _less(one: Arrays, other: Arrays) -> Arrays:
    return {name: np.asarray(one[name], np.float64) - value for name, value in other.items()}


def _joined(values: Arrays, joined: bool) -> Arrays:
    return {"all weights": np.concatenate([each.reshape(-1) for each in values.values()])} if joined else values


def _check_first(step: DistributedStep) -> Check:
    """Check the losses of the first timed steps against a repetition."""
    workload, executor = step.workload, step.workload.executor
    step.replica_of(executor)
    if step.random:
        executor.load_random_state(step.random)
    step.scheme.restart()
    _, name = workload.network.require_loss()
    again = [
        float(executor.fetch(step.scheme.step(feed))[name])
        for _, feed in zip(step.first_losses, step.feeds, strict=False)
    ]
    error = relative_l2(np.array(step.first_losses[: len(again)]), np.array(again))
    what = f"losses of the first timed steps, {executor.mode} {executor.precision} vs the same steps untimed"
    return Check(what, error, step.losses_tolerance)


def check_replica(workload: NetworkWorkload, replica: Replica) -> Iterator[Check]:
    """Check one rank's own loss, gradients and update against float64 and the formula."""
    executor, trainer, known = workload.executor, workload.trainer, workload.references
    _, loss = workload.network.require_loss()

    def call(feed: Native) -> Native:
        workload.to_generic_point(executor)
        return replica.gradients(feed)[0]

    if executor.drops:
        yield from check_drawn(workload, "a replica", call)
        return
    assert known is not None  # the proof made them
    text = f"{UNSEEN} ({executor.mode} {executor.precision}) vs {known.source} fp64"
    trainer.load_state(trainer.initial_state())
    workload.to_generic_point(executor)
    found, gradients = replica.gradients(executor.feed(workload.arrays(workload.unseen)))
    answer, names = known.answers[-1], workload.network.parameters
    error = relative_l2(executor.fetch(found)[loss], np.array(answer.loss))
    yield Check(f"loss of a replica on {text}", error, known.loss_limit)
    before, state = executor.parameters(), trainer.state()
    replica.apply(gradients)
    after = executor.parameters()
    yield from check_update(
        f"update of a replica by {text}",
        trainer,
        sampled({name: before[name] for name in names}),
        {key: value if "/" not in key else sampled({key: value})[key] for key, value in state.items()},
        sampled({name: after[name] for name in names}),
        answer,
        widened(known.limit),
    )
    yield from check_whole_batch(workload, "a replica", lambda feed: executor.fetch(call(feed)))
