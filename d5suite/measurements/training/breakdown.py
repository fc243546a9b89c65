"""Where the time of a training step goes, from files to updated parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from d5suite.data.sources import Stream
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples, last_start
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.network import Native
from d5suite.measurements.base import STEP, Measurement, Phase, Step
from d5suite.measurements.network.checks import check_unseen, finished_answers
from d5suite.measurements.schemas import by_name, number, record
from d5suite.measurements.tables import WORST_ERROR, Column, Table
from d5suite.measurements.training import checks
from d5suite.measurements.training.steps import WHOLE, TrainerStep
from d5suite.measurements.training.training_step import prove_training
from d5suite.validate.check import Check
from d5suite.validate.network.gradient_references import fetch_sampled
from d5suite.validate.network.inference import check_inference
from d5suite.validate.norms import relative_l2
from d5suite.workloads.network import Batch, NetworkWorkload

PARTS = {"both": "forward and backward", "forward": "forward"}
"""Parts other than the whole step, in words."""

KEPT = (1, 3)
"""Numbers of the first steps whose losses `KeptAnswers` keeps: the last of each doubling."""

SUM_TOLERANCE = 0.02
"""Accepted difference between the sum of the parts and the whole step."""


class BreakdownStep(TrainerStep):
    """A training step from files, in parts.

    Each round waits for a batch, feeds it and computes; each part ends with the device's work. The
    rest of a round is ``other``. Rounds compute in turn a whole step, forward and backward, and a
    forward pass in inference mode, so that all three see the same caches and the same loader.
    ``backward`` is the second's time minus the third's, ``update`` the first's minus the second's.
    These differences are not measured directly and may be slightly negative where a framework fuses
    parts. The parts are medians; their sum is recorded as a fraction of the whole step's median.

    Attributes
    ----------
    last : dict of str to tuple
        By part other than the whole step: feed and answer of the last call.
    compute : dict of str to callable
        By part: what its rounds compute from a feed.
    median_s : float
        The median of a step's computing; set by `time`.
    """

    _loader: Stream
    _batches: Iterator[Batch]

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__(workload)
        executor, network = workload.executor, workload.network
        self.compute: dict[str, Callable[[Native], Any]] = {
            "step": workload.trainer.step,
            "both": executor.forward_backward,
            "forward": lambda feed: executor.forward({name: feed[name] for name in network.inputs}),
        }
        self.last: dict[str, tuple[Native, Native]] = {}
        self.median_s = 0.0
        self._kept = {"both": self.answers.names, "forward": network.outputs}
        self._laps: dict[str, list[list[float]]] = {kind: [] for kind in self.compute}

    def __enter__(self) -> Step:
        """Start the loader."""
        self._loader = self.workload.loader()
        self._batches = self._loader.__enter__().batches()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the loader."""
        self._loader.__exit__(None, None, None)

    def make_one(self) -> None:
        self._round("step")

    def phases(self) -> Iterable[Phase]:
        executor = self.workload.executor
        yield Phase(self, "make_one", STEP)
        yield Phase(self, "_batches", "wait for data", "iterator", "file_io")
        yield Phase(executor, "feed", "feed", role="data_transfer")
        yield Phase(self.compute, "step", WHOLE)
        yield Phase(executor, "synchronize", "wait for the device")
        yield Phase(self._loader, "watch", "load images", "loader")

    def begin(self) -> None:
        self.reset()

    def time(self, settings: SamplingSettings) -> Samples:
        for kind in (*self.compute, *self.compute):
            self._round(kind)
        end = now() + len(self.compute) * settings.max_time_s
        last = last_start(now)
        while not self._laps["both"] or (
            now() < last and (len(self._laps["both"]) < settings.min_rounds or now() < end)
        ):
            for kind, rounds in self._laps.items():
                rounds.append(self._round(kind))
        whole = [sum(times) for times in self._laps["step"]]
        self.median_s = float(np.median([times[2] for times in self._laps["step"]]))
        return Samples(self.first_call_s or 0.0, [], whole, True, "time")

    def _round(self, kind: str) -> list[float]:
        executor = self.workload.executor
        times = [now()]
        batch = next(self._batches)
        times.append(now())
        feed = executor.feed(self.workload.arrays(batch))
        executor.synchronize()
        times.append(now())
        answer = self.compute[kind](feed)
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
            self.answers.add(0, answer)
            self.updates = self.answers.calls
        else:
            self.last[kind] = feed, {name: answer[name] for name in self._kept[kind]}

    def record(self, samples: Samples) -> dict[str, Any]:
        laps = self._laps
        wait, host_to_device, _, other = (float(np.median(part)) for part in zip(*laps["step"], strict=True))
        step, both, forward = (float(np.median([times[2] for times in laps[kind]])) for kind in self.compute)
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


def last_parts(workload: NetworkWorkload, step: BreakdownStep) -> Iterator[Check]:
    """Repeat the last timed call of parts of the step, untimed: timed answers may be stale."""
    executor = workload.executor
    for kind in reversed(step.last):  # forward and backward moves the running statistics that forward uses
        if kind == "both" and executor.drops:
            continue
        feed, answer = step.last[kind]
        timed, untimed = executor.fetch(answer), executor.fetch(step.compute[kind](feed))
        errors = {name: relative_l2(value, untimed[name]) for name, value in timed.items()}
        name = f"last timed {PARTS[kind]} ({executor.mode} {executor.precision}) vs the same call untimed"
        yield Check.worst(name, errors, workload.tolerance.outputs)
    step.last.clear()


def first_rounds(workload: NetworkWorkload, step: BreakdownStep) -> Iterator[Check]:
    """Repeat the first timed steps, untimed, on the same batches: they may have been stale."""
    executor, loss = workload.executor, workload.network.require_loss()[1]
    if executor.drops or executor.precision == "fp16":
        return
    timed = dict(zip(KEPT, step.answers.losses(executor)[0], strict=False))
    workload.restart()
    errors = {}
    with workload.loader() as stream:
        batches = itertools.islice(stream.batches(), 0, None, len(step.compute))
        for number in range(1, KEPT[-1] + 1):
            answer = executor.fetch(workload.trainer.step(executor.feed(workload.arrays(next(batches)))))
            if number in timed:
                errors[f"step {number}"] = relative_l2(np.array(timed[number]), answer[loss])
    name = f"losses of the first timed steps ({executor.mode} {executor.precision}) vs the same steps untimed"
    yield Check.worst(name, errors, workload.tolerance.trajectory)


def unseen_gradient(workload: NetworkWorkload, step: BreakdownStep) -> Iterator[Check]:
    """Check the gradient of a batch never fed before: code may repeat earlier answers."""
    executor = workload.executor
    if not executor.drops:
        workload.to_generic_point(executor)
        native = executor.forward_backward(executor.feed(workload.arrays(workload.unseen)))
        yield from check_unseen(workload, fetch_sampled(executor, native))


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
            replace(WORST_ERROR, shown="wide"),
        ),
        "parts of a step in ms; feed: from host to device; !: they sum to more than 2% off the step",
        width=14,
    )
    plot = "parts"
    checks_after = (
        finished_answers,
        checks.finite_losses,
        last_parts,
        checks.trained_output,
        checks.counted_updates,
        checks.next_update,
        checks.whole_batch_step,
        checks.back_to_back,
        first_rounds,
        unseen_gradient,
    )
    schema = record(
        {
            "breakdown_s": by_name(
                number(),
                "medians in seconds",
                required=["data_wait", "host_to_device", "forward", "backward", "update", "other"],
            ),
            "sum_over_step": number("sum of the parts over the median of whole steps; marked if more than 2% off"),
        }
    )

    def prepare(self, workload: NetworkWorkload) -> Step:
        return BreakdownStep(workload)

    def prove(self, workload: NetworkWorkload, step: BreakdownStep) -> Iterable[Check]:
        """Prove the training step, and the forward pass's output against an evaluator."""
        yield from prove_training(workload)
        yield from check_inference(
            workload.executor,
            workload.evaluation_batch(0),
            tolerance=workload.tolerance.outputs,
            threads=workload.job.threads,
            network=workload.plain_network,
        )
