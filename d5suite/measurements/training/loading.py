"""The cost of loading: the neutral input pipeline over the framework's own, in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from d5suite.instruments.sampling import Samples, sample_alternating
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.schemas import record, text
from d5suite.measurements.tables import RATIOS
from d5suite.measurements.training import loaders, ratios
from d5suite.validate.check import Check
from d5suite.workloads.network import NetworkWorkload


class CostOfLoadingStep(ratios.RatioStep):
    """Batches from the neutral loader and from the framework's own."""

    other = "native"
    _running: contextlib.ExitStack

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__()
        self.workload = workload
        self.count = loaders.batches_per_sample(workload)
        self.items = self.count * workload.case.batch_size
        self._streams: dict[str, Iterator[Any]] = {}
        self.taken = {"d5suite": 0, "native": 0}
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    def __enter__(self) -> Step:
        """Start both loaders."""
        with contextlib.ExitStack() as started:  # if one fails to start, the other stops
            self._streams = {
                "native": started.enter_context(loaders.native_batches(self.workload)),
                "d5suite": started.enter_context(loaders.neutral_batches(self.workload)),
            }
            self._running = started.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop both loaders."""
        self.last = {name: loaders.copied(batch) for name, batch in self.last.items()}
        self._running.close()

    def _consume(self, name: str, batches: int) -> Callable[[], None]:
        def run() -> None:
            self.last.pop(name, None)  # freed here, as if it had not been kept
            for _ in range(batches):
                self.last[name] = next(self._streams[name])
            self.taken[name] += batches
            if name not in self.first:
                self.first[name] = loaders.copied(self.last[name])

        return run

    def call_first(self) -> None:
        """Do nothing: the loaders have not started yet, and the sampler makes the first calls."""

    def sample_both(self, settings: SamplingSettings) -> dict[str, Samples]:
        names = ("d5suite", "native")
        return sample_alternating(
            {name: self._consume(name, self.count) for name in names},
            dict.fromkeys(names, lambda: None),
            settings,
            # Untimed batches let this loader reach its pace, while the other fills its buffers, of
            # up to ten batches, and comes to rest.
            before_sample={name: self._consume(name, 2 + self.count // 2) for name in names},
        )

    def record(self, samples: Samples) -> dict[str, Any]:
        loader = {"loader": loaders.native_loader_name(self.workload), "format": self.workload.stored_as}
        return {**super().record(samples), **loader}


def last_batches(workload: NetworkWorkload, step: CostOfLoadingStep) -> Iterator[Check]:
    """Check the last timed batch of both loaders: a loader may repeat a batch."""
    number = step.taken["d5suite"] - 1
    yield from loaders.check_neutral_batch(workload, step.last["d5suite"], number, " of the last timed batch")
    yield from loaders.check_native_batch(
        workload, step.last["native"], "the last timed batch of ", step.first["native"]
    )


class CostOfLoading(Measurement):
    """The neutral input pipeline over the framework's own."""

    name = "cost_of_loading"
    level = 2
    takes_turns = False
    loads = True
    needs = ("loader", "loader:{format}")
    runs_network = False
    table = RATIOS
    checks_after = (last_batches,)
    schema = record(
        {**ratios.SCHEMA["properties"], "loader": text("what it is compared with"), "format": loaders.FORMAT}
    )

    def prepare(self, workload: NetworkWorkload) -> Step:
        return CostOfLoadingStep(workload)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove the neutral pixels, and the framework's own batches."""
        yield from loaders.prove_neutral_loader(workload)
        yield from loaders.prove_native_loader(workload)
