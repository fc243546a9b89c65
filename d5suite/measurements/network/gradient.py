"""Forward and backward in training mode, against float64 gradients proved by differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from d5suite.levels.network import Arrays
from d5suite.measurements.base import Step
from d5suite.measurements.network import checks
from d5suite.measurements.network.steps import TURNS, NetworkMeasurement, NetworkStep, training_feeds, whole_feeds
from d5suite.validate.check import Check
from d5suite.validate.network.gradient import ROUGH, check_dropout, check_gradient, check_gradient_float64
from d5suite.validate.network.gradient_references import OTHER_BATCHES, references
from d5suite.workloads.network import NetworkWorkload


class GradientStep(NetworkStep):
    """Forward and backward of training batches in turn.

    Attributes
    ----------
    last_whole : dict of int to mapping
        Loss and gradients of the last timed call, `sampled`, by the number of its whole batch.
    """

    computes = "forward and backward"

    def __init__(self, workload: NetworkWorkload) -> None:
        feeds, whole = training_feeds(workload, TURNS), whole_feeds(workload, TURNS)
        super().__init__(workload, workload.executor.forward_backward, feeds, whole=whole)
        self.last_whole: dict[int, Arrays] = {}

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition(gradients=True)


class Gradient(NetworkMeasurement):
    """Forward and backward in training mode, without an update."""

    name = "gradient"
    level = 1
    needs = ("gradient",)
    checks_after = (
        checks.finished_answers,
        checks.timed_losses,
        checks.last_gradient,
        checks.unseen_gradient,
        checks.dropped_gradient,
        checks.whole_batch_gradient,
    )

    def prepare(self, workload: NetworkWorkload) -> Step:
        return GradientStep(workload)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove all gradients with float64 gradients and central differences."""
        return prove_gradient(workload)


def prove_gradient(workload: NetworkWorkload) -> Iterable[Check]:
    """Check all gradients, once per case."""
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
        answer = checks.answer_from(workload, random, workload.executor.forward_backward, workload.fed(0))
        workload.drawn = random, answer
        workload.executor.load_parameters(start)
    recorded = Path(workload.reference) if workload.reference else None
    known: dict[str, np.ndarray] = {}
    statistics: dict[str, np.ndarray] = {}
    with workload.at_generic_point(exact, timed):
        found = check_gradient_float64(
            exact,
            images,
            labels,
            network=workload.generic_network,
            recorded=recorded,
            keep=known,
            statistics=statistics,
        )
        if all(check.passed for check in found):
            as_timed = check_gradient(
                timed,
                exact,
                *fed[0],
                workload.tolerance,
                reference=known,
                statistics=statistics,
                repeats=count,
                recorded=recorded and recorded.with_suffix(".json"),
            )
            found += as_timed
            close, limit = (check.tolerance for check in as_timed if check.name.startswith(("loss", "gradient")))
            if close > workload.tolerance.outputs:  # the network's sensitivity, which varies with the batch
                close = min(OTHER_BATCHES * close, ROUGH)
            kept = recorded and recorded.with_suffix(".timed.h5")
            workload.references = references(exact, known, others, workload.generic_network, limit, close, kept)
    yield from found
