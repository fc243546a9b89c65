"""The cost of neutrality: d5suite's training step over a hand-written one, timed in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.instruments.sampling import Samples, sample_alternating
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.tables import RATIOS
from d5suite.measurements.training.ratios import SCHEMA, RatioStep
from d5suite.optimizers.settings import SGD
from d5suite.validate.check import Check
from d5suite.validate.norms import relative_l2
from d5suite.workloads.network import NetworkWorkload

BASELINE_STEPS = 3
"""Steps over which both training steps must agree before they are timed."""

SLOWER = 0.3
"""Largest accepted excess of the hand-written step's time over d5suite's, as a fraction of the
former. It is expert code in the same mode; if it did its work twice, the excess would be a half."""


class NeutralityStep(RatioStep):
    """A training step of d5suite, and one written by hand in the framework's own style."""

    other = "hand_written"

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__()
        if not isinstance(workload.optimizer, SGD):
            raise ConfigurationError(
                f"the hand-written step trains with SGD, not with {workload.optimizer.name}", where=workload.case.name
            )
        self.workload = workload
        self.items = workload.case.batch_size
        images, labels = workload.fed(0)
        self.baseline: Any = workload.backend.load("baseline").resnet50_training_step(
            workload.network,
            workload.optimizer,
            images,
            labels,
            mode=workload.selection.mode,
            device=workload.job.device,
            precision=workload.job.precision,
        )
        self.trainer = workload.backend.trainer(workload.executor, workload.optimizer)  # its velocity is zero
        self.feed = workload.feed()
        self.losses: list[float] = []

    def call_first(self) -> None:
        """Do nothing: the proof makes the first calls, equally many of both steps."""

    def sample_both(self, settings: SamplingSettings) -> dict[str, Samples]:
        return sample_alternating(
            {"d5suite": lambda: self.trainer.step(self.feed), "hand_written": self.baseline.step},
            {"d5suite": self.trainer.executor.synchronize, "hand_written": self.baseline.synchronize},
            settings,
        )


def finite_baseline(workload: NetworkWorkload, step: NeutralityStep) -> Iterator[Check]:
    """Check the hand-written step's last loss; the step may have diverged, and cannot restart."""
    last = float(step.baseline.loss())
    yield Check("loss of the hand-written step after timing is finite", 0.0 if np.isfinite(last) else np.inf, 0.0)


def plausible_yardstick(workload: NetworkWorkload, step: NeutralityStep) -> Iterator[Check]:
    """Check the hand-written step's time: if it does more than it must, neutrality looks free."""
    ratio = step.ratio.value
    text = f"d5suite's step takes {ratio:.2f} of its time: it may work twice"
    yield Check("hand-written step slower than d5suite's", float(1 - ratio > SLOWER), 0.0, text)


def first_losses(workload: NetworkWorkload, step: NeutralityStep) -> Iterator[Check]:
    """Repeat the first steps, against the hand-written losses: the step may no longer train."""
    executor = workload.executor
    workload.restore(executor)
    step.trainer.load_state(step.trainer.initial_state())
    _, loss = workload.network.require_loss()
    for number, known in enumerate(step.losses, 1):
        ours = executor.fetch(step.trainer.step(step.feed))[loss]
        name = f"loss of step {number} after timing ({executor.mode} {executor.precision}) vs hand-written"
        yield Check(name, relative_l2(ours, np.array(known)), workload.tolerance.trajectory)


class CostOfNeutrality(Measurement):
    """d5suite's training step over a hand-written one."""

    name = "cost_of_neutrality"
    level = 2
    takes_turns = False
    needs = ("gradient", "level 2", "baseline")
    table = RATIOS
    schema = SCHEMA
    checks_after = (finite_baseline, plausible_yardstick, first_losses)

    def prepare(self, workload: NetworkWorkload) -> Step:
        return NeutralityStep(workload)

    def prove(self, workload: NetworkWorkload, step: NeutralityStep) -> Iterable[Check]:
        """Compare the losses of both steps from the same weights, on the same batch."""
        executor = workload.executor
        _, loss = workload.network.require_loss()
        for number in range(1, BASELINE_STEPS + 1):
            ours = float(executor.fetch(step.trainer.step(step.feed))[loss])
            step.baseline.step()
            step.baseline.synchronize()
            step.losses.append(float(step.baseline.loss()))
            error = relative_l2(np.array(ours), np.array(step.losses[-1]))
            name = f"loss of step {number} ({executor.mode} {executor.precision}) vs hand-written"
            yield Check(name, error, workload.tolerance.trajectory)
