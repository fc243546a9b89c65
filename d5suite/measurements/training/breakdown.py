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
from d5suite.measurements.training.step import TrainingStep, check_output_as_trained, prove_training
from d5suite.validate.check import Check
from d5suite.validate.network.inference import check_inference
from d5suite.validate.network.timed import fetch_sampled
from d5suite.validate.norms import relative_l2
from d5suite.workloads.network import Batch, NetworkWorkload

PARTS = {"both": "forward and backward", "forward": "forward"}
"""Parts beside the whole step, in words."""

KEPT = (1, 3)
"""The first steps whose losses are kept: of each doubling of their number the last."""

SUM_TOLERANCE = 0.02
"""Accepted distance of the sum of the parts from the whole step."""


class BreakdownStep(TrainingStep):
    """A training step from files, in parts.

    Rounds wait for a batch, feed it and compute, each to its end; what is left is ``other``. They
    compute in turn a whole step, forward and backward, and a forward pass in inference mode, so
    that all three meet the same caches and the same loader. ``backward`` is what the second takes
    longer than the third, ``update`` what the step takes longer than the second: differences of
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
            "both": executor.forward_backward,
            "forward": lambda feed: executor.forward({name: feed[name] for name in inputs}),
        }
        self._last: dict[str, tuple[Native, Native]] = {}
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
        kept = answer, None if kind == "step" else feed
        del batch, feed, answer
        times.append(now())
        self._keep(kind, *kept)
        return [after - before for before, after in itertools.pairwise(times)]

    def _keep(self, kind: str, answer: Native, feed: Native | None) -> None:
        """Keep losses of steps, and the last call of each other part."""
        if feed is None:
            self.calls += 1
            self._kept[0, self.calls.bit_length()] = answer
        else:
            names = self.kept if kind == "both" else self.workload.network.outputs
            self._last[kind] = feed, {name: answer[name] for name in names}

    def check(self) -> Iterable[Check]:
        """Check the training step, and forward and backward of a batch never fed before."""
        yield from super().check()
        if not self.workload.executor.drops:
            workload, executor = self.workload, self.workload.executor
            workload.to_generic_point(executor)
            native = executor.forward_backward(executor.feed(workload.arrays(workload.unseen)))
            yield from check_unseen(workload, fetch_sampled(executor, native))

    def _check_timed(self) -> Iterable[Check]:
        """Repeat the last timed call of each other part, untimed, at the same weights.

        And the output for images never fed before, against the evaluator.
        """
        executor = self.workload.executor
        for kind in reversed(self._last):  # forward and backward moves the running statistics that forward takes
            if kind == "both" and executor.drops:
                continue
            feed, answer = self._last[kind]
            timed, untimed = executor.fetch(answer), executor.fetch(self._compute[kind](feed))
            errors = {name: relative_l2(value, untimed[name]) for name, value in timed.items()}
            name = f"last timed {PARTS[kind]} ({executor.mode} {executor.precision}) vs the same call untimed"
            yield Check.worst(name, errors, self.workload.tolerance.outputs)
        self._last.clear()
        yield check_output_as_trained(self.workload, 1)

    def _check_untimed(self) -> Iterable[Check]:
        """Repeat the first steps untimed on the same batches."""
        workload, executor = self.workload, self.workload.executor
        loss = workload.network.require_loss()[1]
        timed = dict(zip(KEPT, self._losses[0], strict=False))
        if executor.drops or executor.precision == "fp16":
            return
        self.reset()
        found = {}
        with workload.loader() as stream:
            batches = itertools.islice(stream.batches(), 0, None, len(self._compute))
            for number in range(1, KEPT[-1] + 1):
                found[number] = executor.fetch(workload.trainer.step(executor.feed(workload.arrays(next(batches)))))
        errors = {
            f"step {number}": relative_l2(np.array(timed[number]), answer[loss])
            for number, answer in found.items()
            if number in timed
        }
        name = f"losses of the first timed steps ({executor.mode} {executor.precision}) vs the same steps untimed"
        yield Check.worst(name, errors, workload.tolerance.trajectory)

    def record(self, samples: Samples) -> dict[str, Any]:
        laps = self._laps
        wait, host_to_device, _, other = (float(np.median(part)) for part in zip(*laps["step"], strict=True))
        step, both, forward = (float(np.median([times[2] for times in laps[kind]])) for kind in self._compute)
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
    plot = "parts"
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
        """Prove the training step, and the output of the forward pass against an evaluator."""
        yield from prove_training(workload, step)
        yield from check_inference(
            workload.executor,
            workload.evaluation_batch(0),
            tolerance=workload.tolerance.outputs,
            threads=workload.job.threads,
            network=workload.plain_network,
        )
