"""What is checked after several ranks were timed. Each check names the fault it exists for.

A scheme that was right in its first steps may go wrong in a later one, on all ranks alike.
Gradients have the precision that was timed; `replica_update` compares them with float64. A
framework's own scheme is checked by its results only: what it does between ranks cannot be counted
or replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from d5suite.distributed.gathering import gather
from d5suite.levels.network import Arrays, Native
from d5suite.measurements.distributed.ordering import kept_order
from d5suite.measurements.distributed.proof import (
    by_rank,
    compare_losses,
    expected_weights,
    initial_replica,
    losses_tolerance,
    rule_name,
    scheduled,
    train,
)
from d5suite.measurements.distributed.steps import DistributedStep
from d5suite.measurements.network.checks import UNSEEN, check_same_draws, check_whole_batch
from d5suite.validate.check import Check
from d5suite.validate.network.gradient_references import widened
from d5suite.validate.norms import relative_l2
from d5suite.validate.training.updates import check_distances, check_update, sampled_parameters, sampled_state
from d5suite.workloads.network import FEEDS, NetworkWorkload, turned

MORE, CONTROL = 2.0, 2**16
"""Accepted bytes sent, in multiples of those that a scheme declares, and accepted further bytes per
rank and step: names, lengths and acknowledgements. Collectives are declared as a ring's, but Gloo's
reduce-scatter sends as much as its all-reduce: FSDP sends 1.5 times as much."""

STEPS = 2
"""Steps of `scheme_rule`. The second starts from what the first left: weights that differ, and
gradients not sent."""


def equal_parameters(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Compare parameters of all ranks bit by bit: a rank may have stopped communicating.

    Weights of a framework's own synchronous scheme are compared before it finishes, too, because
    finishing may make them equal.
    """
    names = workload.network.parameters
    if step.is_opaque and step.scheme.synchronous and not step.serving:
        yield _equal(step, "weights after the timed steps, before the scheme finishes,", step.scheme.weights(), names)
    if not step.serving:
        step.scheme.finish()
    yield _equal(step, "parameters after the timed steps,", workload.executor.parameters(), names)


def _equal(step: DistributedStep, what: str, held: Arrays, names: Iterable[str]) -> Check:
    digest = hashlib.sha256()
    for name in names:
        digest.update(np.ascontiguousarray(held[name]).tobytes())
    found = gather(step.communicator, digest.hexdigest())
    differ = [rank for rank, each in enumerate(found) if each != found[0]]
    which = f"ranks {', '.join(map(str, differ))} differ from rank 0" if differ else "all ranks"
    return Check(f"{what} bit by bit", float(len(differ)), 0.0, which)


def equal_traffic(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Compare sent and received messages of the timed steps: a communicator may count wrongly."""
    if step.is_opaque:
        return
    found = gather(step.communicator, step.traffic)
    lost = {
        kind: sum(each[f"{kind}_sent"] - each[f"{kind}_received"] for each in found) for kind in ("messages", "bytes")
    }
    what = ", ".join(f"{count:g} {kind}" for kind, count in lost.items())
    yield Check("messages counted as sent and not as received", max(abs(each) for each in lost.values()), 0.0, what)


def declared_bytes(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Compare the bytes that a framework's own scheme declares with those of its TCP sockets.

    The sockets may carry fewer bytes where part of them goes another way, such as shared memory.
    """
    declared = step.facts()["bytes_per_step"]
    if not step.is_opaque or declared is None:
        return
    found = gather(step.communicator, step.tcp_bytes)
    sent = sum(found) / max(step.counted, 1)
    more = sent > MORE * declared + CONTROL * step.communicator.size
    text = f"{sent:.3g} bytes a step went through TCP, {declared:.3g} are declared"
    yield Check("bytes sent and not declared", float(more), 0.0, text)


def order_of_transfers(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Check the order in which transfers arrived: a scheme may ignore the requested order."""
    yield from kept_order(step.scheme, workload.executor)


def scheme_rule(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Check two more steps of the timed scheme on batches never fed before: it may forget a rank.

    They start at the generic point and must reach the weights of one process, or of the scheme's
    rule. Yields nothing with Dropout, where no two passes are alike.
    """
    executor, trainer, replica = workload.executor, workload.trainer, step.replica
    if step.is_opaque or executor.drops:
        return

    def begin() -> Arrays:
        workload.to_generic_point(executor)
        trainer.load_state(trainer.initial_state())
        return replica.weights()

    def unseen(rank: int, number: int) -> Arrays:
        """Return a rank's batch with images turned, or drawn inputs reversed."""
        images, labels = step.batches(rank)[number % FEEDS]
        other = images[::-1].copy() if workload.is_drawn else turned(images, 1)
        return workload.arrays((other, labels[::-1].copy()))

    batches = by_rank(step, unseen, STEPS)
    start = begin()
    scheme = scheduled(step, replica) if step.serving else step.scheme
    scheme.restart()
    _, found = train(step, scheme, batches)
    begin()
    right = expected_weights(step, replica, batches)
    against = f"{executor.mode} {executor.precision} vs {rule_name(step)}"
    limit, joined = widened(workload.references.limit), scheme.compresses
    checks = [
        check_distances(
            f"weights {'at the end' if number == len(right) else f'after step {number}'} of {step.how.scheme} on "
            f"batches never fed before, {against}",
            executor.precision,
            _joined(_difference(own, wanted), joined),
            _joined(_difference(wanted, start), joined),
            _joined(start, joined),
            limit,
        )
        for number, (own, wanted) in enumerate(zip(found, right, strict=True), start=1)
    ]
    yield max(checks, key=lambda check: check.error)


def _difference(one: Arrays, other: Arrays) -> Arrays:
    return {name: np.asarray(one[name], np.float64) - value for name, value in other.items()}


def _joined(values: Arrays, joined: bool) -> Arrays:
    return {"all weights": np.concatenate([each.reshape(-1) for each in values.values()])} if joined else values


def first_losses(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Repeat the first timed steps untimed, with the same draws of Dropout: they may be wrong.

    Yields nothing for a framework's own scheme, or with a server, where chance decides the order of
    updates.
    """
    if step.is_opaque or step.serving:
        return
    executor = workload.executor
    initial_replica(step, executor)
    if step.random:
        executor.load_random_state(step.random)
    step.scheme.restart()
    _, name = workload.network.require_loss()
    again = [
        float(executor.fetch(step.scheme.step(feed))[name])
        for _, feed in zip(step.first_losses, step.feeds, strict=False)
    ]
    step.scheme.settle()
    error = relative_l2(np.array(step.first_losses[: len(again)]), np.array(again))
    what = f"losses of the first timed steps, {executor.mode} {executor.precision} vs the same steps untimed"
    yield Check(what, error, losses_tolerance(workload))


def replica_update(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Compare one rank's own loss, gradients and update with float64 and the formula.

    The other checks take a replica's gradients for granted, which may be stale on all ranks alike.
    """
    executor, trainer, known, replica = workload.executor, workload.trainer, workload.references, step.replica
    _, loss = workload.network.require_loss()
    if step.is_opaque:
        return

    def call(feed: Native) -> Native:
        workload.to_generic_point(executor)
        return replica.gradients(feed)[0]

    if executor.drops:
        yield from check_same_draws(workload, "a replica", call)
        return
    text = f"{UNSEEN} ({executor.mode} {executor.precision}) vs {known.source} fp64"
    trainer.load_state(trainer.initial_state())
    workload.to_generic_point(executor)
    found, gradients = replica.gradients(executor.feed(workload.arrays(workload.unseen)))
    reference = known.answers[-1]
    error = relative_l2(executor.fetch(found)[loss], np.array(reference.loss))
    yield Check(f"loss of a replica on {text}", error, known.loss_limit)
    before, state = sampled_parameters(executor), sampled_state(trainer)
    replica.apply(gradients)
    yield from check_update(
        f"update of a replica by {text}",
        trainer,
        before,
        state,
        sampled_parameters(executor),
        reference,
        widened(known.limit),
    )
    yield from check_whole_batch(workload, "a replica", lambda feed: executor.fetch(call(feed)))


def float64_losses(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Repeat the proof's first steps from the initial state: code may have changed since."""
    yield from compare_losses(step, " after the timed ones")
