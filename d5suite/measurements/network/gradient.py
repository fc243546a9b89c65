"""Forward and backward in training mode, proved through float64 and central differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from d5suite.levels.network import Arrays, Executor, Native
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.network.steps import ExecutorStep, training_feeds
from d5suite.measurements.tables import TIMES
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import (
    ROUGH,
    check_dropout,
    check_gradient,
    check_gradient_float64,
    gradient_errors,
)
from d5suite.validate.network.timed import (
    OTHER_BATCHES,
    check_answer,
    check_finite,
    check_losses,
    fetch_sampled,
    references,
    sampled,
    scaled,
    widened,
)
from d5suite.validate.norms import UNIT_ROUNDOFF, relative_l2
from d5suite.workloads.network import Batch, NetworkWorkload

TURNS = 2
"""Batches in turn: each costs a float64 pass for its reference."""

UNSEEN = "a batch never fed before"


class GradientStep(ExecutorStep):
    """Forward and backward of one training batch, at the generic point."""

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__(workload, workload.executor.forward_backward, training_feeds(workload, TURNS))

    def begin(self) -> None:
        self.forget()
        self.workload.to_generic_point(self.workload.executor)

    def check(self) -> Iterable[Check]:
        """Check losses of timed calls, the last one's gradients, and a batch never fed before."""
        workload, executor = self.workload, self.workload.executor
        losses, last = self.losses(), self.answer
        self.answer = None
        if executor.drops:  # no reference drops the same values
            yield check_finite(losses)
            yield self.call_fresh(workload.arrays(workload.unseen))[1]
            yield check_dropout(executor, executor.feed(workload.arrays(workload.unseen)))
            yield from check_drawn(workload, "forward and backward", executor.forward_backward)
            return
        known = workload.references
        assert known is not None and last is not None  # the proof made them
        name = f"({executor.mode} {executor.precision})"
        yield check_losses(name, losses, known)
        values = self.fetch(last)
        yield from check_answer("the last timed call", executor, values, known, self.turn)
        answer, computes = self.call_fresh(workload.arrays(workload.unseen))
        yield computes
        yield from check_unseen(workload, answer)
        yield from check_whole_batch(
            workload, "forward and backward", lambda feed: executor.fetch(executor.forward_backward(feed))
        )

    def fetch(self, native: Native) -> dict[str, np.ndarray]:
        return fetch_sampled(self.workload.executor, native)

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition(gradients=True)


class Gradient(Measurement):
    """Forward and backward in training mode, without an update."""

    name = "gradient"
    level = 1
    needs = ("gradient",)
    of_any_network = True
    takes_memory = True
    takes_energy = True
    takes_cold = True
    table = TIMES

    def prepare(self, workload: NetworkWorkload) -> Step:
        return GradientStep(workload)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove every gradient, through float64 gradients and central differences."""
        return prove_gradient(workload)


def check_unseen(workload: NetworkWorkload, answer: Arrays) -> Iterable[Check]:
    """Check `fetch_sampled` of `NetworkWorkload.unseen` at the generic point."""
    assert workload.references is not None
    return check_answer(UNSEEN, workload.executor, answer, workload.references, TURNS)


def check_drawn(workload: NetworkWorkload, name: str, call: Callable[[Native], Native]) -> Iterable[Check]:
    """Check a network with Dropout with what it drops given, at the generic point.

    The loss depends on the input, and forward and backward answer as before timing.

    Parameters
    ----------
    workload : NetworkWorkload
    name : str
        What the call does.
    call : callable
        Takes a native feed, and gives the loss, and gradients if any.
    """
    executor = workload.executor
    assert workload.drawn is not None and workload.references is not None  # the proof made them
    random, before = workload.drawn
    if not random:
        return
    loss = workload.network.require_loss()[1]
    first, other, again = (
        _drawn(workload, random, call, batch) for batch in (workload.fed(0), workload.unseen, workload.unseen)
    )
    text = f"({executor.mode} {executor.precision}), the same values dropped"
    yield Check(
        f"loss of {name} once more {text}", relative_l2(again[loss], other[loss]), workload.references.loss_limit
    )
    ignores = float(first[loss].item() == other[loss].item())
    yield Check(f"{name} ignores its input {text}", ignores, 0.0, f"loss {first[loss].item():.6g}" if ignores else "")
    if len(first) > 1:
        text += ", vs before timing"
        yield Check(f"loss of {name} {text}", relative_l2(first[loss], before[loss]), workload.references.loss_limit)
        errors = _sampled_errors(executor, first, before)
        yield Check.worst(f"gradient of {name} {text}", errors, widened(workload.references.limit))


def _drawn(
    workload: NetworkWorkload, random: Arrays, call: Callable[[Native], Native], batch: Batch
) -> dict[str, np.ndarray]:
    """Return an answer at the generic point from a random state, `sampled`."""
    executor = workload.executor
    workload.to_generic_point(executor)
    executor.load_random_state(random)
    return sampled(executor.fetch(call(executor.feed(workload.arrays(batch)))))


def _sampled_errors(executor: Executor, found: Arrays, expected: Arrays) -> dict[str, float]:
    names = executor.network.parameters
    one, other = (scaled(executor, {name: each[name] for name in names}) for each in (found, expected))
    return gradient_errors(one, other, 2 * UNIT_ROUNDOFF[executor.precision])


def check_whole_batch(workload: NetworkWorkload, name: str, call: Callable[[Native], Arrays]) -> Iterable[Check]:
    """Compare loss, and gradients if any, of a whole batch of different images in both orders.

    Float64 knows batches that repeat a few images only: code that takes no more than these would
    be right about them, and fast.

    Parameters
    ----------
    workload : NetworkWorkload
    name : str
        What the call does.
    call : callable
        Takes a native feed at the generic point, and gives loss and gradients.
    """
    executor, known = workload.executor, workload.references
    if workload.oracle_batch == workload.case.batch_size:
        return
    assert known is not None
    images, labels = workload.batches[0]
    forward, backward = (
        sampled(call(executor.feed(workload.arrays(each))))
        for each in ((images, labels), (np.ascontiguousarray(images[::-1]), labels[::-1].copy()))
    )
    loss = workload.network.require_loss()[1]
    text = f"of {name} on a batch in reverse ({executor.mode} {executor.precision}) vs in order"
    yield Check(f"loss {text}", relative_l2(backward[loss], forward[loss]), 2 * known.loss_limit)
    if len(forward) > 1:
        yield Check.worst(f"gradient {text}", _sampled_errors(executor, backward, forward), widened(known.limit))


def prove_gradient(workload: NetworkWorkload) -> Iterable[Check]:
    """Make the checks of every gradient, once per case."""
    return workload.once("gradient", lambda: _checks(workload))


def _checks(workload: NetworkWorkload) -> Iterator[Check]:
    count = workload.oracle_batch
    fed = [workload.fed(0), workload.fed(1), workload.unseen]
    (images, labels), *others = [(images[:count], labels[:count]) for images, labels in fed]
    exact, timed = workload.exact, workload.comparable
    if timed is not workload.executor:
        start = workload.executor.parameters()
        yield check_dropout(workload.executor, workload.feed())
        random = workload.executor.random_state()
        answer = _drawn(workload, random, workload.executor.forward_backward, workload.fed(0))
        workload.drawn = random, answer
        workload.executor.load_parameters(start)
    recorded = Path(workload.reference) if workload.reference else None
    known: dict[str, np.ndarray] = {}
    with workload.at_generic_point(exact, timed):
        found = check_gradient_float64(
            exact, images, labels, network=workload.generic_network, recorded=recorded, keep=known
        )
        if all(check.passed for check in found):
            found += check_gradient(
                timed,
                exact,
                *fed[0],
                workload.tolerance,
                reference=known,
                repeats=count,
                recorded=recorded and recorded.with_suffix(".json"),
            )
            close, limit = (check.tolerance for check in found[-2:])
            if close > workload.tolerance.outputs:  # the network's sensitivity, which varies with the batch
                close = min(OTHER_BATCHES * close, ROUGH)
            kept = recorded and recorded.with_suffix(".timed.h5")
            workload.references = references(exact, known, others, workload.generic_network, limit, close, kept)
    yield from found
