"""The framework's own input pipeline on the same files and transform."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.tables import LOADING
from d5suite.measurements.training.loaders import (
    SCHEMA,
    LoadingStep,
    check_native_batch,
    copied,
    native_loader,
    native_loader_name,
    prove_native_loader,
)
from d5suite.validate.check import Check
from d5suite.workloads.network import NetworkWorkload


class NativePipelineStep(LoadingStep):
    """Batches in the framework's own hands."""

    first: tuple[np.ndarray, np.ndarray] | None = None

    def __enter__(self) -> Step:
        """Start the loader."""
        self._batches = native_loader(self.workload)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it."""
        self.last = copied(self.last) if self.last is not None else None
        self._batches.close()  # type: ignore[attr-defined]

    def next_input(self) -> None:
        if self.first is None and self.last is not None:
            self.first = copied(self.last)
        super().next_input()


def last_native_batch(workload: NetworkWorkload, step: NativePipelineStep) -> Iterable[Check]:
    """Shape, range and labels of the last timed batch: the loader may repeat its first one."""
    return check_native_batch(workload, step.last, "the last timed batch of ", step.first)


class NativeInputPipeline(Measurement):
    """Files to batches by the framework's own loader."""

    name = "native_input_pipeline"
    level = 2
    takes_turns = False
    needs = ("loader", "loader:{format}")
    runs_network = False
    table = LOADING
    schema = SCHEMA
    checks_after = (last_native_batch,)

    def prepare(self, workload: NetworkWorkload) -> Step:
        return NativePipelineStep(workload, native_loader_name(workload))

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove that batches have the neutral shape and range, and known labels."""
        return prove_native_loader(workload)
