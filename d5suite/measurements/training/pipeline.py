"""The neutral input pipeline: files to batches on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.tables import LOADING
from d5suite.measurements.training import loaders
from d5suite.validate.check import Check
from d5suite.workloads.network import NetworkWorkload


class PipelineStep(loaders.LoadingStep):
    """Read, decode, augment, normalise, feed."""

    def use(self, batch: Any) -> None:
        """Put the batch on the device."""
        self.workload.executor.feed(self.workload.arrays(batch))

    def synchronize(self) -> None:
        self.workload.executor.synchronize()


def last_batch(workload: NetworkWorkload, step: PipelineStep) -> Iterable[Check]:
    """Check pixels of the last timed batch: the loader may repeat or reorder batches."""
    return loaders.check_neutral_batch(workload, step.last, step.taken - 1, " of the last timed batch")


class InputPipeline(Measurement):
    """Files to batches on the device, by d5suite's own loader."""

    name = "input_pipeline"
    level = 2
    takes_turns = False
    loads = True
    takes_memory = True
    runs_network = False
    table = LOADING
    schema = loaders.SCHEMA
    checks_after = (last_batch,)

    def prepare(self, workload: NetworkWorkload) -> Step:
        return PipelineStep(workload, "d5suite.data.Loader", loaders.neutral_batches)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Compare pixels from the worker processes with the same images decoded in this process."""
        return loaders.prove_neutral_loader(workload)
