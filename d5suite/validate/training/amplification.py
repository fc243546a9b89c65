"""Training that amplifies rounding errors: how much, and a proof of its steps one by one.

Two float64 runs of a deep network on a small batch, whose weights differed by rounding, may diverge
completely after some steps. A whole float32 run proves nothing then, but a single step does if it
starts from the float64 run's state. Divergence and single steps are computed only if a run differs
by more than its plain tolerance.

Imports NumPy and the contract; no framework.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from d5suite.levels.description import Tolerance
from d5suite.levels.network import Arrays, Executor
from d5suite.levels.training import Trainer
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import SATURATION
from d5suite.validate.network.sensitivity import SENSITIVITY_NOISE, disturbed
from d5suite.validate.norms import FLOAT64, UNIT_ROUNDOFF, relative_l2
from d5suite.validate.training.trajectory import (
    BatchList,
    Trajectory,
    check_trajectory,
    loss_of,
    parameter_errors,
    repeat_until_updated,
    train,
    train_by_formula,
)
from d5suite.validate.training.updates import check_parameters

SHOWS_AN_UPDATE = 0.5
"""The largest tolerance on the distance moved that still shows a missing update: the last of two
updates makes half of the distance, with momentum two thirds."""

SLOWER = (1.0, 0.03, 0.001)
"""Factors on the learning rate, tried in turn: weights that hardly move amplify little. A
thousandth of the usual distance is still some hundred roundings in float32."""


@dataclass(frozen=True)
class FirstSteps:
    """The first few steps in float64.

    Attributes
    ----------
    run : Trajectory
    rates : sequence of float
        The run's learning rates, as `train` takes them.
    loss_limit : float
        Accepted error of each loss.
    parameter_limit : float
        Accepted error of the distance moved; 0 where roundings are not amplified.
    """

    run: Trajectory
    rates: Sequence[float]
    loss_limit: float
    parameter_limit: float


@dataclass(frozen=True)
class ProvedRun:
    """What timed steps from the initial state are compared with.

    Attributes
    ----------
    source : str
        Mode and precision of the float64 executor.
    losses, tolerances : numpy.ndarray
        Losses of the first timed steps and their accepted errors.
    first : FirstSteps
        The first few steps, with `sampled` parameters.
    """

    source: str
    losses: np.ndarray
    tolerances: np.ndarray
    first: FirstSteps


@dataclass(frozen=True)
class Divergence:
    """How far float64 runs diverge whose initial weights differ by noise.

    Attributes
    ----------
    noise : float
        Relative noise on the weights.
    losses : numpy.ndarray
        (steps,): the largest relative difference of a loss up to each step.
    parameters : mapping of int to float
        By number of steps: the difference of the parameters, as `check_trajectory` compares them.
    """

    noise: float
    losses: np.ndarray
    parameters: Mapping[int, float]

    @property
    def amplification(self) -> float:
        """Ratio of the losses' difference to the noise."""
        return float(self.losses[-1]) / self.noise


class TrainingComparison:
    """Compares short training runs; compares single steps where rounding errors are amplified.

    Parameters
    ----------
    exact : Trainer
        In float64.
    batches : sequence
        The batches of all steps.
    runs : sequence of Trajectory
        Runs of ``exact`` over the first few and over all batches, from the initial state.
    tolerances : mapping of str to Tolerance
        The backend's tolerances, by precision.
    """

    def __init__(
        self,
        exact: Trainer,
        batches: BatchList,
        runs: Sequence[Trajectory],
        tolerances: Mapping[str, Tolerance],
    ) -> None:
        self.exact, self.batches, self.tolerances = exact, batches, tolerances
        self.runs = {len(each.losses): each for each in runs}
        self.fewest = min(self.runs)
        self.drifts: dict[str, Divergence] = {}

    def compare(
        self,
        name: str,
        trainer: Trainer,
        found: Trajectory,
        expected: Trajectory,
        tolerance: float,
        *,
        parameters: bool,
    ) -> Iterator[Check]:
        """Compare two runs; if the plain tolerance fails, allow for amplified rounding errors.

        Parameters
        ----------
        name : str
            What is compared with what.
        trainer : Trainer
            The trainer that made ``found``, in the precision under test.
        found, expected : Trajectory
            Runs from the initial state.
        tolerance : float
            The plain tolerance.
        parameters : bool
            Whether to compare the final parameters and statistics too.
        """
        for check in self._checks(name, trainer, found, expected, tolerance, parameters):
            yield replace(check, proof=self.method)

    def _checks(
        self, name: str, trainer: Trainer, found: Trajectory, expected: Trajectory, tolerance: float, parameters: bool
    ) -> Iterator[Check]:
        plain = check_trajectory(name, found, expected, tolerance=tolerance, parameters=parameters)
        if all(check.passed for check in plain):
            yield from plain
            return
        precision, steps = trainer.executor.precision, len(found.losses)
        new = precision not in self.drifts
        drift = self.drift(precision)
        apart = f"float64 runs whose weights differ by {drift.noise:.1g} drift apart by {drift.losses[steps - 1]:.1g}"
        yield from check_trajectory(
            f"{name} ({apart})",
            found,
            expected,
            tolerance=self.limits(precision, tolerance)[:steps],
            parameters=parameters and self._limit(precision, drift.parameters[steps], tolerance),
        )
        if new:
            yield from check_steps(name, trainer, self.exact.executor, self.batches, self.tolerances[precision])

    def is_plain(self, found: Trajectory, tolerance: float) -> bool:
        """Return whether a run is within its plain tolerance."""
        known = self.runs[len(found.losses)]
        return all(check.passed for check in check_trajectory("", found, known, tolerance=tolerance, parameters=False))

    def drift(self, precision: str) -> Divergence:
        """Return the divergence under noise of this precision; computed once."""
        if precision not in self.drifts:
            self.drifts[precision] = self._measured(SENSITIVITY_NOISE * UNIT_ROUNDOFF[precision])
        return self.drifts[precision]

    def _measured(self, noise: float) -> Divergence:
        losses = np.zeros(len(self.batches))
        parameters = dict.fromkeys(self.runs, noise)
        for _ in disturbed(self.exact.executor, noise):
            for run in self._train(self.batches, early=self.runs):
                steps = len(run.losses)
                known = self.runs[steps]
                parameters[steps] = max(parameters[steps], *parameter_errors(run, known).values())
                if steps == len(losses):
                    found = [relative_l2(a, b) for a, b in zip(run.losses, known.losses, strict=True)]
                    losses = np.maximum(losses, found)
        return Divergence(noise, np.maximum.accumulate(losses), parameters)

    def _train(
        self, batches: BatchList, *, early: Collection[int] = (), rates: Sequence[float] = ()
    ) -> list[Trajectory]:
        self.exact.load_state(self.exact.initial_state())
        return train(self.exact, batches, early=early, rates=rates)

    def limits(self, precision: str, least: float) -> np.ndarray:
        """Return each loss's tolerance: ``least``, or more where runs diverge."""
        drift = self.drifts.get(precision)
        losses = np.zeros(len(self.batches)) if drift is None else drift.losses
        return np.array([self._limit(precision, float(each), least) for each in losses])

    def again(self, trainer: Trainer, found: Trajectory, least: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the references and tolerances of the first timed steps' losses.

        The reference is the float64 run. If runs diverge, it is the trainer's own run, whose single
        steps were proved; a framework that is not deterministic may then differ by a multiple of
        the difference between two of its own runs.

        Parameters
        ----------
        trainer : Trainer
            Its state changes.
        found : Trajectory
            The trainer's run over all batches.
        least : float
            The smallest tolerance.
        steps : int
            Number of first steps to return.
        """
        if (precision := trainer.executor.precision) not in self.drifts:
            return self.runs[len(self.batches)].losses[:steps], self.limits(precision, least)[:steps]
        trainer.load_state(trainer.initial_state())
        (second,) = train(trainer, self.batches[:steps])
        own = found.losses[: len(second.losses)]
        differences = [relative_l2(a, b) for a, b in zip(second.losses, own, strict=True)]
        return own, np.array([self._limit(precision, each, least) for each in differences])

    def first(self, precision: str, least: float) -> FirstSteps:
        """Return the first few steps, with a lower learning rate if runs diverge too much."""
        executor, steps = self.exact.executor, self.batches[: self.fewest]
        if precision not in self.drifts:
            return FirstSteps(self.runs[self.fewest], (), least, 0.0)
        start = executor.parameters()
        for part in SLOWER:
            rates = (part * self.exact.optimizer.learning_rate,)
            (run,) = self._train(steps, rates=rates)
            losses, apart = [0.0], [0.0]
            for moved in disturbed(executor, self.drifts[precision].noise):
                (other,) = self._train(steps, rates=rates)
                losses.append(max(relative_l2(a, b) for a, b in zip(other.losses, run.losses, strict=True)))
                apart.append(_apart(executor, start, run.parameters, moved, other.parameters))
            if (limit := self._limit(precision, max(apart), 0.0)) <= SHOWS_AN_UPDATE:
                break
        return FirstSteps(run, rates, self._limit(precision, max(losses), least), limit)

    def _limit(self, precision: str, drift: float, least: float) -> float:
        return _limit(self.tolerances[precision], drift, least)

    @property
    def method(self) -> dict[str, object]:
        """How runs were proved, for the record."""
        by = {precision: drift.amplification for precision, drift in self.drifts.items()}
        how = {"proof": "one step at a time", "amplification": by} if by else {"proof": "whole run"}
        return {"training": how}


def _limit(tolerance: Tolerance, drift: float, least: float = 0.0) -> float:
    return max(least, min(tolerance.gradients * drift, SATURATION))


def _apart(executor: Executor, start: Arrays, end: Arrays, other_start: Arrays, other_end: Arrays) -> float:
    """Return how much the movements of two runs' parameters differ, relative to the first."""
    moved = {name: end[name] - start[name] for name in other_start}
    found = {name: start[name] + (other_end[name] - other_start[name]) for name in moved}
    wanted = {name: end[name] for name in moved}
    return check_parameters("", executor, found, wanted, moved, start, 0.0).error


def check_steps(
    name: str, trainer: Trainer, exact: Executor, batches: BatchList, tolerance: Tolerance
) -> Iterator[Check]:
    """Compare each of several native steps with the formula's float64 step from the same state.

    The states are those of a float64 run by the formula, rounded to the precision of the trainer's
    parameters. A step may differ by a multiple of its own sensitivity: how much roundoff noise on
    the weights changes the formula's step.

    Parameters
    ----------
    name : str
        What is compared with what.
    trainer : Trainer
        In any state, which changes. Its executor keeps its parameters.
    exact : Executor
        In float64, with the initial weights, which it keeps; its gradients are proved already.
    batches : sequence
        One per step.
    tolerance : Tolerance
        The backend's tolerance for the trainer's precision.
    """
    executor = trainer.executor
    network, precision, optimizer = executor.network, executor.precision, trainer.optimizer
    label, loss = network.require_loss()
    noise = SENSITIVITY_NOISE * UNIT_ROUNDOFF[precision]
    least = FLOAT64 if precision == "fp64" else 0.0
    kept, initial = executor.parameters(), exact.parameters()
    state, parameters = trainer.initial_state(), dict(initial)
    found: dict[str, list[Check]] = {}
    tensors = {"parameters": network.parameters, "running statistics": network.statistics}
    tensors = {kind: names for kind, names in tensors.items() if names}
    for step, (images, labels) in enumerate(batches, 1):
        parameters = {key: _held(value, precision) for key, value in parameters.items()}
        state = {key: _held(value, precision) if "/" in key else value for key, value in state.items()}
        exact.load_parameters(parameters)
        before, batch = dict(state), [(images, labels)]
        wanted = train_by_formula(exact, optimizer, batch, state=state)
        loss_drift, drift = [0.0], {kind: [noise] for kind in tensors}
        for moved in disturbed(exact, noise):
            other = train_by_formula(exact, optimizer, batch, state=dict(before))
            loss_drift.append(relative_l2(other.losses, wanted.losses))
            for kind, names in tensors.items():
                start = {key: moved.get(key, parameters[key]) for key in names}
                drift[kind].append(_apart(executor, parameters, wanted.parameters, start, other.parameters))
        executor.load_parameters(parameters)
        trainer.load_state(before)
        feed = executor.feed({**network.arrays(images), label: labels})
        native = trainer.step(feed)
        executor.synchronize()
        if precision == "fp16":
            repeat_until_updated(trainer, [feed], step)
            state.update({key: trainer.state()[key] for key in trainer.scaling_at_start})
        error = relative_l2(np.array([loss_of(executor, native, loss)]), wanted.losses)
        limit = _limit(tolerance, max(loss_drift), max(least, tolerance.outputs))
        found.setdefault("loss", []).append(Check("", error, limit, f"step {step}"))
        after = executor.parameters()
        for kind, names in tensors.items():
            if kind == "running statistics" and precision == "fp16":  # repeated steps move them, too
                continue
            there = {key: wanted.parameters[key] for key in names}
            moved = {key: value - parameters[key] for key, value in there.items()}
            limit = _limit(tolerance, max(drift[kind]), least)
            check = check_parameters("", executor, after, there, moved, parameters, limit)
            found.setdefault(kind, []).append(replace(check, detail=f"step {step}, {check.detail}"))
        parameters = dict(wanted.parameters)
    executor.load_parameters(kept)
    exact.load_parameters(initial)
    for kind, checks in found.items():
        worst = max(checks, key=lambda check: check.error / check.tolerance)
        yield replace(worst, name=f"{kind} of each of {len(checks)} steps from the float64 state, {name}")


def _held(value: np.ndarray, precision: str) -> np.ndarray:
    """Round values to the type of a precision's parameters: float64 for fp64, else float32."""
    return value.astype(np.float64 if precision == "fp64" else np.float32).astype(np.float64)
