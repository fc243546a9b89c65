"""What is checked after training was timed. Each check names the fault it exists for.

The checks of a gradient after timing are in `d5suite.measurements.network.checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from d5suite.errors import ValidationError
from d5suite.levels.network import Arrays, Native
from d5suite.levels.training import STEPS
from d5suite.measurements.network.checks import UNSEEN, check_same_draws, check_whole_batch, work_outside
from d5suite.measurements.training.kept_steps import KeptStep
from d5suite.measurements.training.steps import TrainerStep, TrainingStep
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import SATURATION
from d5suite.validate.network.gradient_references import (
    GradientReference,
    check_finite,
    fetch_sampled,
    sampled,
    scaled,
    widened,
)
from d5suite.validate.network.inference import check_inference
from d5suite.validate.network.sensitivity import SENSITIVITY_NOISE, disturbed, gradient_errors
from d5suite.validate.norms import UNIT_ROUNDOFF, relative_l2
from d5suite.validate.training.trajectory import check_trajectory, repeat_until_updated, train
from d5suite.validate.training.updates import (
    check_decay,
    check_moved,
    check_parameters,
    check_update,
    check_width,
    sampled_parameters,
    sampled_state,
)
from d5suite.workloads.network import FEEDS, NetworkWorkload

OTHER_RATE = 0.5
"""Learning rate of the step after the timed ones, relative to theirs: one that no schedule uses."""


def finite_losses(workload: NetworkWorkload, step: TrainerStep | TrainingStep) -> Iterable[Check]:
    """Raise if training diverged: the backend is not at fault, and no later check would say so.

    Raises
    ------
    ValidationError
        If a loss is not finite.
    """
    losses = step.answers.losses(workload.executor)
    if not check_finite(losses).passed:
        raise ValidationError(
            f"training diverged while it was timed: the loss is {losses[max(losses)][-1]}",
            hint="Lower the learning rate (--optimizer).",
        )
    return ()


def first_losses(workload: NetworkWorkload, step: TrainingStep) -> Iterator[Check]:
    """Check losses of the first timed steps: a graph captured with another batch is off."""
    executor, proved = workload.executor, workload.proved_run
    amplified = bool(proved.first.parameter_limit)
    if executor.drops or executor.precision == "fp16":
        return
    if amplified and workload.oracle_batch != workload.case.batch_size:  # other batches than the proof's
        return
    losses = step.answers.losses(executor)
    errors = [
        (relative_l2(np.array(losses[turn][0]), proved.losses[turn]), float(proved.tolerances[turn]))
        for turn in range(min(FEEDS, len(proved.losses)))
        if turn in losses
    ]
    against = "vs the same steps untimed" if amplified else _against(workload)
    yield Check(f"losses of the first timed steps {against}", *max(errors, key=lambda each: each[0] / each[1]))


def counted_updates(workload: NetworkWorkload, step: TrainerStep | TrainingStep) -> Iterator[Check]:
    """Count updates: a step that returns a remembered loss makes none. State may overflow, too.

    Raises
    ------
    ValidationError
        If the optimizer's state is not finite, which the loss may not show.
    """
    state = workload.trainer.state()
    infinite = next((key for key, value in state.items() if not np.isfinite(value).all()), None)
    if infinite is not None:
        raise ValidationError(
            f"training diverged while it was timed: the optimizer's {infinite} is not finite",
            hint="Lower the learning rate (--optimizer).",
        )
    if workload.executor.precision == "fp32" and int(state[STEPS]) > 1:
        yield check_width("the optimizer's state is held in 16 bits", state)
    if workload.executor.precision != "fp16":  # where steps are skipped until the loss scale fits
        made = int(state[STEPS])
        text = f"{made} in {step.updates} timed steps"
        yield Check("updates left out", float(abs(step.updates - made)), 0.0, text)


def next_update(workload: NetworkWorkload, step: object) -> Iterator[Check]:
    """Check one more step on a batch never fed before: the optimizer or its input may be stale.

    It starts from the optimizer's state after the timed steps, at the generic point, where float64
    gradient and formula give loss and update. A new learning rate must take effect at once. With
    Dropout, which no float64 run reproduces, the step must answer as before timing.
    """
    executor, trainer, known = workload.executor, workload.trainer, workload.references
    trainer.set_learning_rate(workload.optimizer.learning_rate)  # a schedule may end at 0
    if executor.drops:
        yield from check_same_draws(workload, "a step", trainer.step)
        return
    state = sampled_state(trainer)
    workload.to_generic_point(executor)
    feed = executor.feed(workload.arrays(workload.unseen))
    trainer.set_learning_rate(OTHER_RATE * workload.optimizer.learning_rate)
    answer = executor.fetch(trainer.step(feed))
    if executor.precision == "fp16":
        repeat_until_updated(trainer, [feed], int(state[STEPS]) + 1)
    loss, reference = workload.network.require_loss()[1], known.answers[-1]
    error = relative_l2(answer[loss], np.array(reference.loss))
    yield Check(f"loss of a step on {UNSEEN} {_against(workload)}", error, known.loss_limit)
    yield from check_update(
        f"update by {UNSEEN} {_against(workload)}",
        trainer,
        sampled({name: workload.generic_network.initializers[name] for name in workload.network.parameters}),
        state,
        sampled_parameters(executor),
        reference,
        widened(known.limit),
    )


def whole_batch_step(workload: NetworkWorkload, step: object) -> Iterator[Check]:
    """Check a whole batch: code may take only the few images that the reference covers."""
    executor = workload.executor

    def loss_at_generic_point(feed: Native) -> Arrays:
        workload.to_generic_point(executor)
        return executor.fetch(workload.trainer.step(feed))

    if not executor.drops:
        yield from check_whole_batch(workload, "a step", loss_at_generic_point)


def middle_steps(workload: NetworkWorkload, step: TrainingStep) -> Iterator[Check]:
    """Repeat timed steps from the middle of the run: only its ends are proved elsewhere.

    Each is made from the parameters and the optimizer's state that it began with: gradients come
    from forward and backward, which the proof has covered, and the update from the formula. With
    Dropout the step itself is repeated, with the same values dropped.
    """
    executor, trainer = workload.executor, workload.trainer
    precision = executor.precision
    for kept in step.kept.complete:
        if precision == "fp16" and _skipped(kept):
            continue
        executor.load_parameters(kept.start)
        feed = step.feed_again(kept.turn)
        what = f"timed step {kept.number} ({executor.mode} {precision})"
        loss = workload.network.require_loss()[1]
        timed = executor.fetch(kept.loss)[loss]
        if executor.drops:
            executor.load_random_state(kept.random)
            trainer.load_state(kept.state)
            again = executor.fetch(trainer.step(feed))[loss]
            limit = workload.tolerance.trajectory
            yield Check(f"loss of {what} vs the same step untimed", relative_l2(timed, again), limit)
            after = sampled_parameters(executor)
            start = sampled({name: kept.start[name] for name in after})
            moved = {name: value - start[name] for name, value in after.items()}
            name = f"parameters after {what} vs the same step untimed"
            yield check_parameters(name, executor, kept.end, after, moved, start, widened(workload.references.limit))
            continue
        yield from _made_again(workload, kept, feed, what, timed)


def _made_again(
    workload: NetworkWorkload, kept: KeptStep, feed: Native, what: str, timed: np.ndarray
) -> Iterator[Check]:
    """Compare loss and update of a kept step with its gradient, taken again, and the formula.

    Where a network has nearly learned its batch, loss and gradients are differences of nearly equal
    numbers, about the loss apart. Where the tolerance of the proof's weights does not suffice, the
    sensitivity at these weights is measured.
    """
    executor, known, loss = workload.executor, workload.references, workload.network.require_loss()[1]
    noise, rate = SENSITIVITY_NOISE * UNIT_ROUNDOFF[executor.precision], workload.optimizer.learning_rate

    def gradient() -> GradientReference:
        native = executor.forward_backward(feed)
        clips = workload.optimizer.clip_norm  # by the norm of all elements
        return GradientReference.of(executor.fetch(native) if clips else fetch_sampled(executor, native), loss)

    def compare(sensitivity: float) -> Iterator[Check]:
        limit = max(known.loss_limit, sensitivity)
        yield Check(f"loss of {what} vs the same pass untimed", relative_l2(timed, np.array(again.loss)), limit)
        name, limit = f"update by {what} vs the formula", min(max(widened(known.limit), sensitivity), SATURATION)
        yield from check_update(name, workload.trainer, start, kept.state, kept.end, again, limit, rate=rate)

    again = gradient()
    start = sampled({name: kept.start[name] for name in again.gradients})
    doubt = noise / max(abs(again.loss), np.finfo(float).tiny)
    checks = list(compare(doubt))
    if not all(check.passed for check in checks):
        for _ in disturbed(executor, noise):
            other = gradient()
            errors = gradient_errors(
                scaled(executor, other.gradients), scaled(executor, again.gradients), UNIT_ROUNDOFF[executor.precision]
            )
            apart = max(*errors.values(), relative_l2(np.array(other.loss), np.array(again.loss)))
            doubt = max(doubt, workload.tolerance.gradients * apart)
        checks = list(compare(doubt))
    yield from checks
    if executor.precision in ("fp32", "fp64"):
        yield from check_decay(what, workload.trainer, start, kept.state, kept.end, again, rate)


def _skipped(kept: KeptStep) -> bool:
    """Return whether the step has updated nothing, as in fp16 until the loss scale fits."""
    return all(np.array_equal(value, sampled({key: kept.start[key]})[key]) for key, value in kept.end.items())


def step_outside(workload: NetworkWorkload, step: TrainingStep) -> Iterator[Check]:
    """Time feeding and fetching around a step, to which the step may leave its work."""
    yield work_outside(step, workload.arrays(workload.unseen))


def first_parameters(workload: NetworkWorkload, step: TrainingStep) -> Iterable[Check]:
    """Check parameters after the first timed steps: updates may differ where losses do not."""
    if step.early is None:
        return back_to_back(workload, step)
    return [_parameters(workload, "timed", step.early)]


def back_to_back(workload: NetworkWorkload, step: object) -> Iterator[Check]:
    """Repeat the proof's first steps without synchronizing in between: updates may be lost."""
    executor, proved = workload.executor, workload.proved_run
    first = proved.first
    workload.restart()
    batches = [workload.fed(index) for index in range(len(first.run.losses))]
    (found,) = train(workload.trainer, batches, rates=first.rates, back_to_back=True, restore=False)
    if not executor.drops:
        name = f"back to back, {_against(workload)}"
        yield from check_trajectory(name, found, first.run, tolerance=first.loss_limit, parameters=False)
    after = sampled({name: found.parameters[name] for name in workload.network.parameters})
    yield _parameters(workload, "back-to-back", after)


def same_draws(workload: NetworkWorkload, step: TrainingStep) -> Iterator[Check]:
    """With Dropout, repeat the first timed steps with the same draws: they may have been stale."""
    executor = workload.executor
    if not step.random:
        return
    losses, loss = step.answers.losses(executor), workload.network.require_loss()[1]
    workload.restart()
    executor.load_random_state(step.random)
    errors = []
    for turn in range(FEEDS):
        if turn in losses:
            answer = executor.fetch(workload.trainer.step(workload.feed(turn)))
            errors.append(relative_l2(np.array(losses[turn][0]), answer[loss]))
    name = f"losses of the first timed steps ({executor.mode} {executor.precision}) vs the same draws untimed"
    yield Check(name, max(errors), workload.tolerance.trajectory)


def trained_output(workload: NetworkWorkload, step: object) -> Iterator[Check]:
    """Check the output at the trained weights: an evaluation may have repeated earlier answers.

    The images were never fed before. The reference is an evaluator with the executor's weights.
    """
    executor = workload.executor
    initial = workload.network.initializers
    weights = {name: value.astype(initial[name].dtype) for name, value in executor.parameters().items()}
    executor.load_parameters(weights)  # float64 is rounded to what the evaluator has
    yield from check_inference(
        executor,
        workload.evaluation_batch(1),
        tolerance=workload.tolerance.outputs,
        threads=workload.job.threads,
        network=workload.plain_network.with_weights(weights),
        what="output at the trained weights",
    )


def _against(workload: NetworkWorkload) -> str:
    """Return what was timed and its reference, in words."""
    return f"({workload.executor.mode} {workload.executor.precision}) vs {workload.proved_run.source}"


def _parameters(workload: NetworkWorkload, which: str, found: Arrays) -> Check:
    """Check `sampled` parameters after the first steps from the initial state."""
    executor, network = workload.executor, workload.network
    first = workload.proved_run.first
    steps, expected = len(first.run.losses), first.run.parameters
    start = sampled({name: network.initializers[name] for name in network.parameters})
    moved = {name: expected[name] - value for name, value in start.items()}
    if executor.drops:
        name = f"distance moved in {steps} {which} steps {_against(workload)}"
        return check_moved(name, executor, found, start, moved)
    limit = max(widened(workload.references.limit), first.parameter_limit)
    name = f"parameters after {steps} {which} steps {_against(workload)}"
    return check_parameters(name, executor, found, expected, moved, start, limit)
