"""The forward pass in inference mode, against an independent evaluator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from d5suite.levels.network import Native
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.network.steps import ExecutorStep
from d5suite.measurements.tables import TIMES
from d5suite.validate.check import Check
from d5suite.validate.network.inference import check_output, expected_outputs
from d5suite.workloads.network import NetworkWorkload

TURNS = 2
"""Batches in turn; the next one is fed after timing."""


class InferenceStep(ExecutorStep):
    """The forward pass of evaluation batches in turn, at the generic point."""

    expected: list[dict[str, np.ndarray]]
    """An evaluator's outputs for the batches in turn, and for one that is fed after timing."""

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__(workload, workload.executor.forward, [lambda i=i: self.fed(i) for i in range(TURNS)])  # type: ignore[misc]

    def fed(self, number: int) -> Native:
        """Return a batch of `NetworkWorkload.evaluation_batch` on the device."""
        return self.workload.executor.feed(self._arrays(number))

    def _arrays(self, number: int) -> dict[str, np.ndarray]:
        return self.workload.network.arrays(self.workload.evaluation_batch(number))

    @property
    def kept(self) -> Sequence[str]:
        return self.workload.network.outputs

    def begin(self) -> None:
        self.forget()
        self.workload.to_generic_point(self.workload.executor)

    def check(self) -> Iterable[Check]:
        """Check outputs of timed calls, and of one with other images, against the evaluator."""
        workload, executor = self.workload, self.workload.executor
        found = self.answers()
        answer, computes = self.call_fresh(self._arrays(TURNS))
        yield computes
        found[TURNS] = [answer]
        for turn, outputs in found.items():
            of = "a batch never fed before" if turn == TURNS else f"batch {turn + 1}, timed,"
            name = f"output of {of} ({executor.mode} {executor.precision})"
            yield max(
                (
                    check_output(
                        name,
                        executor,
                        output,
                        self.expected[turn],
                        workload.case.batch_size,
                        workload.tolerance.outputs,
                    )
                    for output in outputs
                ),
                key=lambda check: check.error,
            )

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition()


class Inference(Measurement):
    """The forward pass in inference mode."""

    name = "inference"
    level = 1
    of_any_network = True
    takes_memory = True
    takes_energy = True
    takes_cold = True
    table = TIMES

    def prepare(self, workload: NetworkWorkload) -> Step:
        return InferenceStep(workload)

    def prove(self, workload: NetworkWorkload, step: InferenceStep) -> Iterable[Check]:
        """Prove the output against an independent evaluator."""
        executor, batches = workload.executor, [workload.evaluation_batch(number) for number in range(TURNS + 1)]
        with workload.at_generic_point(executor):
            answer = executor.fetch(executor.forward(step.fed(0)))
        step.expected, evaluator = expected_outputs(
            executor, workload.generic_network, batches, threads=workload.job.threads
        )
        name = f"output ({executor.mode} {executor.precision}) vs {evaluator}"
        yield check_output(name, executor, answer, step.expected[0], len(batches[0]), workload.tolerance.outputs)
