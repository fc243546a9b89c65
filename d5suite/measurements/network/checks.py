"""What is checked after a network was timed. Each check names the fault it exists for.

A check takes workload and step, and runs when all timing is over. Checks run in the order of a
measurement's `checks_after`: the first ones use the weights of the timed calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from d5suite.instruments.freshness import MOST, Durations, compare_durations, timed
from d5suite.instruments.outside import measure_outside, time_fetches, time_work
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.measurements.base import check_computes, check_fetches, check_inside
from d5suite.measurements.network.steps import TURNS, NetworkStep
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import check_dropout
from d5suite.validate.network.gradient_references import (
    check_answer,
    check_finite,
    check_losses,
    fetch_sampled,
    sampled,
    scaled,
    widened,
)
from d5suite.validate.network.sensitivity import gradient_errors
from d5suite.validate.norms import UNIT_ROUNDOFF, relative_l2
from d5suite.workloads.network import Batch, NetworkWorkload

if TYPE_CHECKING:
    from d5suite.measurements.network.gradient import GradientStep

LATEST = 2
"""Number of timed answers that are fetched again."""

FIRST_PLACE = 100
"""Places by which `work_outside` first rotates input to make it new; `call_fresh` uses fewer."""

UNSEEN = "a batch never fed before"


def finished_answers(workload: NetworkWorkload, step: NetworkStep) -> Iterator[Check]:
    """Time fetching of timed answers: a call may return a promise, and fetching it computes.

    This check comes first: whatever fetches an answer completes it.
    """
    executor = workload.executor
    pending = [lambda native=native: executor.fetch(native).values() for native in step.answers.latest(LATEST)]
    yield check_fetches(time_fetches(pending, workload.job.device), step.median_s)


# Inference.


def timed_outputs(workload: NetworkWorkload, step: NetworkStep) -> Iterator[Check]:
    """Check outputs of timed calls: a replayed graph or stale buffer answers for another batch."""
    for turn, outputs in step.answers.fetch(workload.executor).items():
        checks = [_output(workload, f"batch {turn + 1}, timed,", output, turn) for output in outputs]
        yield max(checks, key=lambda check: check.error)


def unseen_output(workload: NetworkWorkload, step: NetworkStep) -> Iterator[Check]:
    """Check the output for images never fed before: code may remember the timed answers."""
    arrays = workload.network.arrays(workload.evaluation_batch(TURNS))
    answer, computes = call_fresh(step, arrays, workload.executor.fetch)
    yield computes
    yield _output(workload, UNSEEN, answer, TURNS)
    yield work_outside(step, arrays)


def _output(workload: NetworkWorkload, batch: str, output: Arrays, turn: int) -> Check:
    executor = workload.executor
    name = f"output of {batch} ({executor.mode} {executor.precision})"
    return workload.expected_outputs.check(name, output, turn, workload.outputs_tolerance)


# Gradients.


def timed_losses(workload: NetworkWorkload, step: NetworkStep) -> Iterator[Check]:
    """Check losses of timed calls: a replayed graph or a stale buffer answers for another batch."""
    executor, losses = workload.executor, step.answers.losses(workload.executor)
    if executor.drops:  # no reference drops the same values
        yield check_finite(losses)
    else:
        proved = {turn: found for turn, found in losses.items() if turn < step.proved}
        yield check_losses(f"({executor.mode} {executor.precision})", proved, workload.references)


def last_gradient(workload: NetworkWorkload, step: GradientStep) -> Iterator[Check]:
    """Check every gradient of the last timed call: the loss may be right and gradients stale."""
    executor, answer, step.answer = workload.executor, step.answer, None
    if not executor.drops:
        values = fetch_sampled(executor, answer or {})
        if step.turn < step.proved:
            yield from check_answer("the last timed call", executor, values, workload.references, step.turn)
        else:
            step.last_whole = {step.turn - step.proved: values}  # for `whole_batch_gradient`


def unseen_gradient(workload: NetworkWorkload, step: NetworkStep) -> Iterator[Check]:
    """Check loss and gradients of a batch never fed before: code may remember timed answers."""
    executor = workload.executor
    answer, computes = call_fresh(
        step, workload.arrays(workload.unseen), lambda native: fetch_sampled(executor, native)
    )
    yield computes
    if not executor.drops:
        yield from check_unseen(workload, answer)
    yield work_outside(step, workload.arrays(workload.unseen))


def dropped_gradient(workload: NetworkWorkload, step: NetworkStep) -> Iterator[Check]:
    """Check a network with Dropout, which may have stopped drawing, or may ignore its input."""
    executor = workload.executor
    if executor.drops:
        yield check_dropout(executor, executor.feed(workload.arrays(workload.unseen)))
        yield from check_same_draws(workload, "forward and backward", executor.forward_backward)


def whole_batch_gradient(workload: NetworkWorkload, step: GradientStep) -> Iterator[Check]:
    """Check whole batches: code may take only the few images that the reference covers."""
    executor, name = workload.executor, "forward and backward"
    if executor.drops:
        return

    def call(feed: Native) -> dict[str, np.ndarray]:
        return executor.fetch(executor.forward_backward(feed))

    yield from check_whole_batch(workload, name, call)
    losses, loss = step.answers.losses(executor), workload.network.require_loss()[1]
    timed: dict[int, list[Arrays]] = {
        turn - step.proved: [{loss: np.array(each)} for each in found]
        for turn, found in losses.items()
        if turn >= step.proved
    }
    for number, values in step.last_whole.items():
        timed[number].append(values)
    for number, answers in timed.items():
        other = sampled(call(executor.feed(workload.arrays(_reversed(workload, number)))))
        for answer in answers:
            yield from _compare_whole(workload, f"of timed {name} on whole batch {number + 1}", answer, other)


# What several checks share.


def call_fresh(
    step: NetworkStep, arrays: Mapping[str, np.ndarray], fetch: Callable[[Native], dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], Check]:
    """Call with a batch never fed before; return the answer, and whether it was computed.

    Call it while the weights are those of the timed calls: loading others may make an adapter drop
    its cache. The answer is fetched at once, because further calls may overwrite it.

    Parameters
    ----------
    step : NetworkStep
    arrays : mapping of str to numpy.ndarray
        The batch.
    fetch : callable
        Fetches what the caller needs of the native answer.
    """
    executor = step.workload.executor

    def duration(feed: Native) -> float:
        return timed(lambda: step.call(feed), executor.synchronize)[1]

    def other(number: int) -> Callable[[], float]:
        feed = executor.feed(rolled(arrays, number + 1))
        return lambda: duration(feed)

    feed = executor.feed(arrays)
    native, took = timed(lambda: step.call(feed), executor.synchronize)
    answer = fetch(native)
    places = max(array.size for array in arrays.values())  # more would feed an input again
    first = Durations(step.median_s, took)
    found = compare_durations(lambda: duration(step.feed), other, first, most=min(places - 1, MOST))
    return answer, check_computes(found)


def rolled(arrays: Arrays, places: int) -> dict[str, np.ndarray]:
    """Return the same values in other places: input never fed before."""
    return {name: np.roll(value.reshape(-1), places).reshape(value.shape) for name, value in arrays.items()}


def work_outside(step: NetworkStep, arrays: Arrays) -> Check:
    """Time feeding and fetching around a call, to which the call may leave its work.

    Parameters
    ----------
    step : NetworkStep
        Only what the step keeps of an answer, such as the loss, is fetched.
    arrays : mapping of str to numpy.ndarray
        A batch.
    """
    executor, device = step.workload.executor, step.workload.job.device

    def surround(number: int) -> float:
        batch = rolled(arrays, FIRST_PLACE + number)
        executor.synchronize()

        def feed() -> Native:
            made = executor.feed(batch)
            executor.synchronize()
            return made

        made, fed_s = time_work(feed, device)
        native = step.call(made)
        executor.synchronize()
        kept = {name: native[name] for name in step.answers.names}
        answer, fetched_s = time_work(lambda: executor.fetch(kept), device)
        fetched.update(answer)
        return fed_s + fetched_s

    fetched: dict[str, np.ndarray] = {}
    surround(-1)
    nbytes = sum(each.nbytes for each in (*arrays.values(), *fetched.values()))
    return check_inside(measure_outside(step.median_s, nbytes, surround))


def check_unseen(workload: NetworkWorkload, answer: Arrays) -> list[Check]:
    """Compare the answer to `NetworkWorkload.unseen` at the generic point, from `fetch_sampled`."""
    return check_answer(UNSEEN, workload.executor, answer, workload.references, TURNS)


def check_same_draws(workload: NetworkWorkload, name: str, call: Callable[[Native], Native]) -> Iterator[Check]:
    """Check a network with Dropout when it drops the same values as before timing.

    At the generic point, the loss must depend on the input, and loss and gradients must be those
    before timing.

    Parameters
    ----------
    workload : NetworkWorkload
    name : str
        What the call does.
    call : callable
        Takes a native feed; returns the loss, and gradients if any.
    """
    executor = workload.executor
    random, before = workload.drawn
    if not random:
        return
    loss, limit = workload.network.require_loss()[1], workload.references.loss_limit
    first, other, again = (
        answer_from(workload, random, call, batch) for batch in (workload.fed(0), workload.unseen, workload.unseen)
    )
    text = f"({executor.mode} {executor.precision}), the same values dropped"
    yield Check(f"loss of {name} once more {text}", relative_l2(again[loss], other[loss]), limit)
    ignores = float(first[loss].item() == other[loss].item())
    yield Check(f"{name} ignores its input {text}", ignores, 0.0, f"loss {first[loss].item():.6g}" if ignores else "")
    if len(first) > 1:
        text += ", vs before timing"
        yield Check(f"loss of {name} {text}", relative_l2(first[loss], before[loss]), limit)
        yield _sampled_gradients(f"gradient of {name} {text}", workload, first, before)


def answer_from(
    workload: NetworkWorkload, random: Arrays, call: Callable[[Native], Native], batch: Batch
) -> dict[str, np.ndarray]:
    """Return the `sampled` answer at the generic point, with Dropout in this random state."""
    executor = workload.executor
    workload.to_generic_point(executor)
    executor.load_random_state(random)
    return sampled(executor.fetch(call(executor.feed(workload.arrays(batch)))))


def check_whole_batch(workload: NetworkWorkload, name: str, call: Callable[[Native], Arrays]) -> Iterator[Check]:
    """Compare loss, and gradients if any, of a batch of different images with its reverse.

    The float64 references only cover batches that repeat a few images: code that takes only these
    few would be right about such batches, and fast.

    Parameters
    ----------
    workload : NetworkWorkload
    name : str
        What the call does.
    call : callable
        Takes a native feed at the generic point; returns loss and gradients.
    """
    executor = workload.executor
    if workload.oracle_batch == workload.case.batch_size:
        return
    forward, backward = (
        sampled(call(executor.feed(workload.arrays(each)))) for each in (workload.batches[0], _reversed(workload, 0))
    )
    yield from _compare_whole(workload, f"of {name} on a batch", forward, backward)


def _reversed(workload: NetworkWorkload, number: int) -> Batch:
    """Return a whole batch with its images in reverse."""
    images, labels = workload.batches[number]
    return np.ascontiguousarray(images[::-1]), labels[::-1].copy()


def _compare_whole(workload: NetworkWorkload, what: str, answer: Arrays, other: Arrays) -> Iterator[Check]:
    """Compare the `sampled` answer to a whole batch with the answer to its reverse."""
    executor, loss = workload.executor, workload.network.require_loss()[1]
    text = f"{what} ({executor.mode} {executor.precision}) vs the batch in reverse"
    error = relative_l2(np.ravel(answer[loss]), np.ravel(other[loss]))
    yield Check(f"loss {text}", error, 2 * workload.references.loss_limit)
    if len(answer) > 1:
        yield _sampled_gradients(f"gradient {text}", workload, answer, other)


def _sampled_gradients(name: str, workload: NetworkWorkload, found: Arrays, expected: Arrays) -> Check:
    """Compare two `sampled` answers, both in the timed precision."""
    executor: Executor = workload.executor
    names = workload.network.parameters
    one, other = (scaled(executor, {name: each[name] for name in names}) for each in (found, expected))
    errors = gradient_errors(one, other, 2 * UNIT_ROUNDOFF[executor.precision])
    return Check.worst(name, errors, widened(workload.references.limit))
