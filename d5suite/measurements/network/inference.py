"""The forward pass in inference mode, against an independent evaluator."""

from __future__ import annotations

from collections.abc import Iterable

from d5suite.measurements.base import Step
from d5suite.measurements.network import checks
from d5suite.measurements.network.steps import TURNS, NetworkMeasurement, NetworkStep
from d5suite.validate.check import Check
from d5suite.validate.network.inference import ExpectedOutputs, outputs_tolerance
from d5suite.workloads.network import NetworkWorkload


class InferenceStep(NetworkStep):
    """The forward pass of evaluation batches in turn."""

    def __init__(self, workload: NetworkWorkload) -> None:
        feeds = [lambda number=number: workload.feed_evaluation(number) for number in range(TURNS)]
        super().__init__(workload, workload.executor.forward, feeds, kept=workload.network.outputs)

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition()


class Inference(NetworkMeasurement):
    """The forward pass in inference mode."""

    name = "inference"
    level = 1
    checks_after = (checks.finished_answers, checks.timed_outputs, checks.unseen_output)

    def prepare(self, workload: NetworkWorkload) -> Step:
        return InferenceStep(workload)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove the output against an independent evaluator."""
        executor, network, threads = workload.executor, workload.generic_network, workload.job.threads
        with workload.at_generic_point(executor):
            answer = executor.fetch(executor.forward(workload.feed_evaluation(0)))
        expected = ExpectedOutputs(executor, network, workload.evaluation_batch, TURNS + 1, threads=threads)
        tolerance = outputs_tolerance(
            network,
            workload.evaluation_batch(0),
            expected.outputs[0],
            executor.precision,
            workload.tolerance.outputs,
            threads=threads,
        )
        workload.expected_outputs, workload.outputs_tolerance = expected, tolerance
        yield expected.check(f"output ({executor.mode} {executor.precision})", answer, 0, tolerance)
