"""What the steps of several ranks are compared with: one process, or the scheme's published rule.

The same comparison serves before timing, in float64, and after it, in the precision that was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from d5suite.levels.distributed import Replica, Scheme
from d5suite.levels.network import Arrays, Executor
from d5suite.measurements.distributed.steps import DistributedStep
from d5suite.validate.check import Check
from d5suite.validate.distributed.rules import IN_TURN, check_weights, expected
from d5suite.validate.norms import FLOAT64, relative_l2
from d5suite.workloads.network import FEEDS, NetworkWorkload

PROOF_STEPS = 3
"""Steps in float64 that a scheme must make as one process, or its rule, does: momentum shows from
the second step on, its decay from the third."""

RankBatches = Sequence[Sequence[Arrays | None]]
"""Batches by step and rank; None on a server rank."""


def prove_scheme(workload: NetworkWorkload, step: DistributedStep) -> Iterator[Check]:
    """Check the first steps in float64, and their losses as timed.

    In float64, a synchronous scheme must make the steps of one process on all ranks' batches; any
    other scheme must follow its published rule. As timed, the losses must match the float64 losses.
    """
    executor = workload.exact
    name = f"{step.how.scheme}, {step.communicator.size} ranks, {executor.mode} fp64"

    def few(rank: int, number: int) -> Arrays:
        images, labels = step.batches(rank)[number % FEEDS]
        count = workload.oracle_batch
        return workload.arrays((images[:count], labels[:count]))

    batches = by_rank(step, few, PROOF_STEPS)
    losses, found = train(step, scheduled(step, initial_replica(step, executor)), batches)
    right = expected_weights(step, initial_replica(step, executor), batches)
    rounding = getattr(step.scheme.settings, "rounding", 0.0)
    if rounding:  # later steps amplify it
        found, right = found[:1], right[:1]
    checks = check_weights(f"{name} vs {rule_name(step)}", found, right, max(FLOAT64, rounding))
    yield max(checks, key=lambda check: check.error)
    workload.proved_losses = losses, name
    yield from compare_losses(step, "")


def compare_losses(step: DistributedStep, when: str) -> Iterator[Check]:
    """Compare the first steps' losses, as timed, with the proved float64 run."""
    workload, executor = step.workload, step.workload.executor
    losses, name = workload.proved_losses
    if executor.drops:  # no float64 run drops the same values
        return

    def full(rank: int, number: int) -> Arrays:
        return workload.arrays(workload.repeated(*step.batches(rank)[number % FEEDS]))

    scheme = scheduled(step, initial_replica(step, executor))
    own, _ = train(step, scheme, by_rank(step, full, PROOF_STEPS))
    if own:
        what = f"losses of {PROOF_STEPS} steps{when}, {executor.mode} {executor.precision} vs {name}"
        yield Check(what, relative_l2(np.array(own), np.array(losses)), losses_tolerance(workload))


def losses_tolerance(workload: NetworkWorkload) -> float:
    """Return the accepted error of the losses of a few steps."""
    return max(workload.tolerance.trajectory, float(np.max(workload.proved_run.tolerances)))


def rule_name(step: DistributedStep) -> str:
    """Name the definition that `expected_weights` follows."""
    return "one process" if step.scheme.synchronous else "its rule"


def by_rank(step: DistributedStep, make: Callable[[int, int], Arrays], steps: int) -> list[list[Arrays | None]]:
    """Make batches by step and rank with a function of rank and step; None on a server rank."""
    ranks = range(step.communicator.size)
    return [[make(rank, number) if rank in step.trainers else None for rank in ranks] for number in range(steps)]


def scheduled(step: DistributedStep, replica: Replica) -> Scheme:
    """Make a scheme whose updates come in a fixed order."""
    if step.is_opaque and not step.scheme.synchronous:
        return step.make_scheme(replica, **{IN_TURN: True})
    return step.make_scheme(replica, **({"schedule": step.trainers} if step.serving else {}))


def initial_replica(step: DistributedStep, executor: Executor) -> Replica:
    """Return a replica of this executor in its initial state."""
    workload = step.workload
    if executor is workload.executor:
        workload.restart()
        return step.replica
    workload.restore(executor)
    return workload.backend.replica(workload.backend.trainer(executor, workload.optimizer))


def train(step: DistributedStep, scheme: Scheme, batches: RankBatches) -> tuple[list[float], list[Arrays]]:
    """Train through a scheme; return this rank's losses, and its weights by step and at the end."""
    replica = scheme.replica
    executor = replica.trainer.executor
    _, name = executor.network.require_loss()
    losses, weights = [], []
    if scheme.serves:
        scheme.serve()
    else:
        for each in batches:
            arrays = each[step.communicator.rank]
            assert arrays is not None
            losses.append(float(executor.fetch(scheme.step(executor.feed(arrays)))[name]))
            weights.append(scheme.weights())
    scheme.finish()
    return losses, [*weights, replica.weights()]


def expected_weights(step: DistributedStep, replica: Replica, batches: RankBatches) -> list[Arrays]:
    """Return the weights that `train` must reach: of one process, or by the scheme's rule."""
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

    rank, settings = step.communicator.rank, scheduled(step, replica).settings.to_dict()
    rule = IN_TURN if step.how.native else step.how.scheme
    right = expected(rule, settings, gradient, start, batches, step.workload.optimizer)
    return [each[rank] for each in (right if rank in step.trainers else right[-1:])]
