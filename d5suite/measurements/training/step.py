"""The training step: forward, backward and update, through a float64 run proved by the formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from d5suite.errors import ValidationError
from d5suite.levels.network import Arrays, Native
from d5suite.levels.training import STEPS
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.network.gradient import UNSEEN, check_drawn, check_whole_batch, prove_gradient
from d5suite.measurements.network.steps import ExecutorStep, training_feeds
from d5suite.measurements.tables import TIMES
from d5suite.validate.check import Check
from d5suite.validate.network.inference import check_output, expected_outputs
from d5suite.validate.network.timed import check_finite, check_moved, check_update, displacement, sampled, widened
from d5suite.validate.norms import FLOAT64, relative_l2
from d5suite.validate.training.amplification import First, Runs
from d5suite.validate.training.trajectory import (
    Trajectory,
    check_trajectory,
    repeat_until_updated,
    train,
    train_by_formula,
)
from d5suite.workloads.network import FEEDS, NetworkWorkload

FORMULA_STEPS = 3
"""Steps over which the native optimizer must follow its formula: momentum shows from the second on,
its decay from the third."""

FIRST_STEPS = 2
"""Steps after which parameters are compared once more: the first ones that are timed, or the same
made again after timing, the second issued before the first has ended."""


@dataclass(frozen=True)
class Proved:
    """A short run from the initial state.

    Attributes
    ----------
    source : str
        Mode and precision of the float64 executor.
    losses, tolerances : numpy.ndarray
        Of the first timed steps.
    first : First
        The float64 run of the first few steps, its parameters `sampled`.
    """

    source: str
    losses: np.ndarray
    tolerances: np.ndarray
    first: First


class TrainerStep(ExecutorStep):
    """A step of the trainer, whose further steps are known after it was timed."""

    proved: Proved
    """A short run from the initial state, in float64."""

    def reset(self) -> None:
        super().reset()
        self.workload.trainer.load_state(self.workload.trainer.initial_state())

    @property
    def against(self) -> str:
        """The timed run and its reference, in words."""
        executor = self.workload.executor
        return f"({executor.mode} {executor.precision}) vs {self.proved.source}"

    def check_further(self, made: int) -> Iterable[Check]:
        """Check one step more, and the way of the first ones.

        The step more starts from the optimizer's state after the timed ones, at the generic point
        and on a batch never fed before: its loss and its update are known from the float64
        gradient there and the formula. A network with Dropout must draw anew and move: no float64
        run drops the same values.

        Parameters
        ----------
        made : int
            Steps since the optimizer's initial state.

        Raises
        ------
        ValidationError
            If the optimizer's state after the timed steps is not finite.
        """
        workload = self.workload
        workload.trainer.set_learning_rate(workload.optimizer.learning_rate)  # a schedule may end at 0
        if workload.executor.drops:
            yield from check_drawn(workload, "a step", workload.trainer.step)
        else:
            yield from self._check_one_more(made)
            yield from check_whole_batch(workload, "a step", self._step_at_generic_point)
        yield from self._check_way()

    def _check_one_more(self, timed: int) -> Iterable[Check]:
        """Check one step from the state after the timed ones, on a batch never fed before."""
        workload, executor, trainer = self.workload, self.workload.executor, self.workload.trainer
        known = workload.references
        assert known is not None  # the proof made them
        reached = trainer.state()
        infinite = next((key for key, value in reached.items() if not np.isfinite(value).all()), None)
        if infinite is not None:  # of parameters that the loss does not show; nothing follows from such a state
            raise ValidationError(
                f"training diverged while it was timed: the optimizer's {infinite} is not finite",
                hint="Lower the learning rate (--optimizer).",
            )
        state = {key: value if "/" not in key else sampled({key: value})[key] for key, value in reached.items()}
        if executor.precision != "fp16":  # where steps are skipped until the loss scale fits
            made = int(state[STEPS])
            yield Check("updates left out", float(abs(timed - made)), 0.0, f"{made} in {timed} timed steps")
        workload.to_generic_point(executor)
        feed = executor.feed(workload.arrays(workload.unseen))
        answer = executor.fetch(trainer.step(feed))
        if executor.precision == "fp16":
            repeat_until_updated(trainer, [feed], int(state[STEPS]) + 1)
        loss, answers = executor.network.require_loss()[1], known.answers[-1]
        error = relative_l2(answer[loss], np.array(answers.loss))
        yield Check(f"loss of a step on {UNSEEN} {self.against}", error, known.loss_limit)
        start, names = workload.generic_network.initializers, workload.network.parameters
        after = executor.parameters()
        yield from check_update(
            f"update by {UNSEEN} {self.against}",
            trainer,
            sampled({name: start[name] for name in names}),
            state,
            sampled({name: after[name] for name in names}),
            answers,
            widened(known.limit),
        )

    def _step_at_generic_point(self, feed: Native) -> Arrays:
        trainer = self.workload.trainer
        self.workload.to_generic_point(trainer.executor)
        return trainer.executor.fetch(trainer.step(feed))

    def _check_way(self) -> Iterable[Check]:
        """Make the proof's first steps again, none waiting for the one before."""
        workload, executor, first = self.workload, self.workload.executor, self.proved.first
        self.reset()
        batches = [workload.fed(index) for index in range(len(first.run.losses))]
        (found,) = train(workload.trainer, batches, rates=first.rates, hurried=True, restore=False)
        if not executor.drops:
            yield from check_trajectory(
                f"hurried, {self.against}", found, first.run, tolerance=first.losses, parameters=False
            )
        yield self.check_moved("hurried", sampled({name: found.parameters[name] for name in self._trained}))

    @property
    def _trained(self) -> Sequence[str]:
        return self.workload.network.parameters

    def check_moved(self, which: str, found: Arrays) -> Check:
        """Check the parameters, `sampled`, after the first steps from the initial state."""
        executor, first = self.workload.executor, self.proved.first
        steps = len(first.run.losses)
        start = sampled({name: self.workload.network.initializers[name] for name in self._trained})
        way = {name: first.run.parameters[name] - value for name, value in start.items()}
        if executor.drops:
            return check_moved(f"way of {steps} {which} steps {self.against}", executor, found, start, way)
        assert self.workload.references is not None
        limit = max(widened(self.workload.references.limit), first.way)
        name = f"parameters after {steps} {which} steps {self.against}"
        return displacement(name, executor, found, first.run.parameters, way, start, limit)


def check_output_as_trained(workload: NetworkWorkload, number: int) -> Check:
    """Compare the output at the weights that the executor has with the evaluator's.

    Parameters
    ----------
    workload : NetworkWorkload
    number : int
        Of the `NetworkWorkload.evaluation_batch`.
    """
    executor, images = workload.executor, workload.evaluation_batch(number)
    initial = workload.network.initializers
    weights = {name: value.astype(initial[name].dtype) for name, value in executor.parameters().items()}
    executor.load_parameters(weights)  # of float64 what the evaluator can have
    answer = executor.fetch(executor.forward(executor.feed(workload.network.arrays(images))))
    trained = workload.plain_network.with_weights(weights)
    (expected,), evaluator = expected_outputs(executor, trained, [images], threads=workload.job.threads)
    name = f"output at the trained weights ({executor.mode} {executor.precision}) vs {evaluator}"
    return check_output(name, executor, answer, expected, len(images), workload.tolerance.outputs)


class TrainingStep(TrainerStep):
    """One update of the parameters from one training batch."""

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__(workload, workload.trainer.step, training_feeds(workload))
        self._losses: dict[int, list[float]] = {}
        self._random: Arrays = {}
        self._first = 0
        self._early: Arrays | None = None

    def begin(self) -> None:
        super().begin()
        first, self._early = self.proved.first, None
        # In fp16 steps are repeated; other rates are those of a run that amplifies less.
        self._first = 0 if first.rates or self.workload.executor.precision == "fp16" else len(first.run.losses)
        if self.workload.executor.drops:
            self._random = self.workload.executor.random_state()

    def note(self) -> None:
        """Keep, beside losses, the parameters after the steps of the proof's first run."""
        super().note()
        if self._early is None and 0 < self.calls == self._first:
            values = self.workload.executor.parameters()
            self._early = sampled({name: values[name] for name in self._trained})

    def _check_way(self) -> Iterable[Check]:
        """Check the parameters after the first timed steps, if they were kept."""
        if self._early is None:
            return super()._check_way()
        return [self.check_moved("timed", self._early)]

    def check(self) -> Iterable[Check]:
        """Check the losses of timed steps, and `check_further`."""
        self._losses, made = self.losses(), self.calls
        self.answer = None
        if not check_finite(self._losses).passed:
            raise ValidationError(
                f"training diverged while it was timed: the loss is {self._losses[max(self._losses)][-1]}",
                hint="Lower the learning rate (--optimizer).",
            )
        yield from self._check_timed()
        yield from self.check_further(made)
        yield from self._check_untimed()

    def _check_timed(self) -> Iterable[Check]:
        """Check the first timed steps, where their batches are those of the proof."""
        if self.workload.executor.drops:
            return
        workload, known = self.workload, self.proved.losses
        amplified = bool(self.proved.first.way)
        same = workload.oracle_batch == workload.case.batch_size or not amplified
        errors = [
            (relative_l2(np.array(self._losses[turn][0]), known[turn]), float(self.proved.tolerances[turn]))
            for turn in range(min(FEEDS, len(known)))
            if same and workload.executor.precision != "fp16" and turn in self._losses
        ]
        against = "vs the same steps untimed" if amplified else self.against
        if errors:
            yield Check(f"losses of the first timed steps {against}", *max(errors, key=lambda each: each[0] / each[1]))

    def _check_untimed(self) -> Iterable[Check]:
        """Repeat the first timed steps of a network with Dropout, dropping the same values."""
        workload, executor, trainer = self.workload, self.workload.executor, self.workload.trainer
        loss = workload.network.require_loss()[1]
        if not (executor.drops and self._random):
            return
        self.reset()
        executor.load_random_state(self._random)
        errors = []
        for turn in range(FEEDS):
            if turn in self._losses:
                answer = executor.fetch(trainer.step(workload.feed(turn)))
                errors.append(relative_l2(np.array(self._losses[turn][0]), answer[loss]))
        name = f"losses of the first timed steps ({executor.mode} {executor.precision}) vs the same draws untimed"
        yield Check(name, max(errors), workload.tolerance.trajectory)

    def series(self) -> dict[str, list[float]]:
        return {"final_losses": [found[-1] for _, found in sorted(self._losses.items())]}

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition(gradients=True, optimizer=True)


class Training(Measurement):
    """Forward, backward and update."""

    name = "training_step"
    level = 2
    needs = ("gradient", "level 2")
    of_any_network = True
    takes_memory = True
    takes_energy = True
    takes_cold = True
    table = TIMES

    def prepare(self, workload: NetworkWorkload) -> Step:
        return TrainingStep(workload)

    def prove(self, workload: NetworkWorkload, step: TrainerStep) -> Iterable[Check]:
        """Prove a short run through a float64 run, which the formula and other backends prove."""
        return prove_training(workload, step)


def prove_training(workload: NetworkWorkload, step: TrainerStep | None = None) -> Iterator[Check]:
    """Make the checks of every gradient and of a short training run, each once per case.

    A step keeps the run, for the proof of what was timed.
    """
    yield from prove_gradient(workload)
    yield from workload.once("training", lambda: _checks(workload))
    if step is not None:
        step.proved = workload.proved_run


def _checks(workload: NetworkWorkload) -> Iterator[Check]:
    case, count = workload.case, workload.oracle_batch
    steps = [(images[:count], labels[:count]) for images, labels in workload.batches[: case.validation_steps]]
    exact = workload.exact
    workload.restore(exact)
    label = f"{exact.mode} fp64"
    early = min(FORMULA_STEPS, len(steps))
    native = workload.backend.trainer(exact, workload.optimizer)
    recorded = train(native, steps, early=(min(FIRST_STEPS, early), early))
    runs = Runs(native, steps, recorded, workload.backend.tolerances)
    short, found = runs.runs[early], recorded[-1]
    peers = {f"{label} vs {name} fp64": peer for peer, name in (Trajectory.load(Path(path)) for path in case.peers)}
    agreements = [
        check
        for name, peer in peers.items()
        for check in check_trajectory(name, found, peer, tolerance=FLOAT64, parameters=True)
    ]
    if not agreements or not all(check.passed for check in agreements):  # a peer's run is proved by the formula
        expected = train_by_formula(exact, workload.optimizer, steps[:early])
        yield from runs.compare(f"{label} vs the update formula", native, short, expected, FLOAT64, parameters=True)
    for name, peer in peers.items():
        yield from runs.compare(name, native, found, peer, FLOAT64, parameters=True)
    if case.trajectory:
        found.save(Path(case.trajectory), str(workload.selection))
    executor, tolerance = workload.comparable, workload.tolerance.trajectory
    same = executor is workload.executor
    trainer = workload.trainer if same else workload.backend.trainer(executor, workload.optimizer)
    (timed,) = train(trainer, steps, hurried=True)  # timed steps, which are checked too, are waited for
    yield from runs.compare(
        f"{executor.mode} {executor.precision} vs {label}", trainer, timed, found, tolerance, parameters=False
    )
    first = runs.first(executor.precision, tolerance)
    end = sampled({name: first.run.parameters[name] for name in workload.network.parameters})
    first = replace(first, run=replace(first.run, parameters=end))
    workload.proved_run = Proved(label, *runs.again(trainer, timed, tolerance, FEEDS), first)
