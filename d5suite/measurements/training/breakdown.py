"""Where the time of a training step goes, from files to updated parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from d5suite.data.sources import Stream
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.network import Native
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.network.gradient import check_unseen
from d5suite.measurements.tables import WORST_ERROR, Column, Table
from d5suite.measurements.training.step import TrainingStep, prove_training
from d5suite.validate.check import Check
from d5suite.validate.network.timed import fetch_sampled
from d5suite.workloads.network import Batch, NetworkWorkload

SUM_TOLERANCE = 0.02
"""Accepted distance of the sum of the parts from the whole step."""


class BreakdownStep(TrainingStep):
    """A training step from files, in parts.

    Rounds wait for a batch, feed it and compute, each to its end; what is left is ``other``. They
    compute in turn a whole step, a forward pass in inference mode, and forward and backward, so
    that all three meet the same caches and the same loader. ``backward`` is what the third takes
    longer than the second, ``update`` what the step takes longer than the third: differences of
    nested measurements, which are not seen one by one and may come out slightly negative where a
    framework fuses them. The parts are medians; their sum is given as a part of the whole step's
    median.
    """

    _loader: Stream | None = None
    _batches: Iterator[Batch]

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__(workload)
        executor, inputs = workload.executor, workload.network.inputs
        self._compute: dict[str, Callable[[Native], Any]] = {
            "step": workload.trainer.step,
            "forward": lambda feed: executor.forward({name: feed[name] for name in inputs}),
            "both": executor.forward_backward,
        }
        self._laps: dict[str, list[list[float]]] = {kind: [] for kind in self._compute}

    def __enter__(self) -> Step:
        """Start the loader."""
        self._loader = self.workload.loader()
        self._batches = self._loader.__enter__().batches()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the loader."""
        assert self._loader is not None
        self._loader.__exit__(None, None, None)

    def time(self, settings: SamplingSettings) -> Samples:
        self.begin()
        for kind in (*self._compute, *self._compute):
            self._round(kind)
        end = now() + len(self._compute) * settings.max_time_s
        while len(self._laps["both"]) < settings.min_rounds or now() < end:
            for kind, rounds in self._laps.items():
                rounds.append(self._round(kind))
        whole = [sum(times) for times in self._laps["step"]]
        return Samples(self.first_call_s or 0.0, [], whole, True, "time")

    def _round(self, kind: str) -> list[float]:
        executor = self.workload.executor
        times = [now()]
        batch = next(self._batches)
        times.append(now())
        feed = executor.feed(self.workload.arrays(batch))
        executor.synchronize()
        times.append(now())
        answer = self._compute[kind](feed)
        executor.synchronize()
        times.append(now())
        kept = answer if kind == "step" else None
        del batch, feed, answer
        times.append(now())
        if kept is not None:
            self.calls += 1
            self._kept[0, self.calls.bit_length()] = kept
        return [after - before for before, after in itertools.pairwise(times)]

    def check(self) -> Iterable[Check]:
        """As the training step; and forward and backward of a batch never fed before."""
        yield from super().check()
        if not self.workload.executor.drops:
            workload, executor = self.workload, self.workload.executor
            workload.to_generic_point(executor)
            native = executor.forward_backward(executor.feed(workload.arrays(workload.unseen)))
            yield from check_unseen(workload, fetch_sampled(executor, native))

    def _check_first(self) -> Iterable[Check]:
        """Nothing: the timed steps take other batches than the proof."""
        return ()

    def _check_same_draws(self) -> Iterable[Check]:
        """Nothing, for the same reason."""
        return ()

    def record(self, samples: Samples) -> dict[str, Any]:
        laps = self._laps
        wait, host_to_device, _, other = (float(np.median(part)) for part in zip(*laps["step"], strict=True))
        step, forward, both = (float(np.median([times[2] for times in laps[kind]])) for kind in self._compute)
        breakdown = {
            "data_wait": wait,
            "host_to_device": host_to_device,
            "forward": forward,
            "backward": both - forward,
            "update": step - both,
            "other": other,
        }
        part = sum(breakdown.values()) / samples.median_s
        found: dict[str, Any] = {"breakdown_s": breakdown, "sum_over_step": part}
        if abs(part - 1) > SUM_TOLERANCE:
            found["warnings"] = [f"the parts of a step sum to {part:.1%} of it, more than {SUM_TOLERANCE:.0%} off"]
        return found

    def series(self) -> dict[str, list[float]]:
        return {f"{kind}_s": [times[2] for times in rounds] for kind, rounds in self._laps.items()}


class Breakdown(Measurement):
    """Where the time of a training step goes."""

    name = "step_breakdown"
    level = 2
    takes_turns = False
    needs = ("gradient", "level 2")
    table = Table(
        (
            Column("median ms", "median_s", scale=1e3),
            Column("interval", "median_ci95", "interval", scale=1e3, shown="wide"),
            Column("wait", "breakdown_s.data_wait", "tenths", scale=1e3),
            Column("feed", "breakdown_s.host_to_device", "tenths", scale=1e3),
            Column("forward", "breakdown_s.forward", "tenths", scale=1e3),
            Column("backward", "breakdown_s.backward", "tenths", scale=1e3),
            Column("update", "breakdown_s.update", "tenths", scale=1e3),
            Column("other", "breakdown_s.other", "tenths", scale=1e3, shown="one file"),
            Column("sum", "breakdown_s", "sum in tenths", scale=1e3, shown="one file"),
            Column(WORST_ERROR.heading, WORST_ERROR.value, WORST_ERROR.format, shown="wide"),
        ),
        "parts of a step in ms; feed: from host to device; !: they sum to more than 2% off the step",
        width=14,
    )
    schema: ClassVar[Mapping[str, Any]] = {
        "required": ["breakdown_s", "sum_over_step"],
        "properties": {
            "breakdown_s": {
                "type": "object",
                "required": ["data_wait", "host_to_device", "forward", "backward", "update", "other"],
                "additionalProperties": {"type": "number"},
                "description": "medians in seconds"
            },
            "sum_over_step": {
                "type": "number",
                "description": "the sum of breakdown_s over the median of whole steps; marked if more than 2% off"
            }
        }
    }  # fmt: skip

    def prepare(self, workload: NetworkWorkload) -> Step:
        return BreakdownStep(workload)

    def prove(self, workload: NetworkWorkload, step: BreakdownStep) -> Iterable[Check]:
        """As the training step."""
        return prove_training(workload, step)
