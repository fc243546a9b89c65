"""The framework's own input pipeline on the same files and transform."""

from __future__ import annotations

from collections.abc import Iterable

from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.tables import LOADING
from d5suite.measurements.training import loaders
from d5suite.validate.check import Check
from d5suite.workloads.network import NetworkWorkload


def last_native_batch(workload: NetworkWorkload, step: loaders.LoadingStep) -> Iterable[Check]:
    """Check shape, labels and spread of the last timed batch: the loader may repeat its first."""
    return loaders.check_native_batch(workload, step.last, "the last timed batch of ", step.first)


class NativeInputPipeline(Measurement):
    """Files to batches by the framework's own loader."""

    name = "native_input_pipeline"
    level = 2
    takes_turns = False
    loads = True
    needs = ("loader", "loader:{format}")
    runs_network = False
    table = LOADING
    schema = loaders.SCHEMA
    checks_after = (last_native_batch,)

    def prepare(self, workload: NetworkWorkload) -> Step:
        return loaders.LoadingStep(workload, loaders.native_loader_name(workload), loaders.native_batches)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove that batches have the neutral shape and range, and known labels."""
        return loaders.prove_native_loader(workload)
