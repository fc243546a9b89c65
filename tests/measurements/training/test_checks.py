"""Batches that loaders gave while timed are proved: one that repeats itself is no result."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from d5suite.data.arrays import ArrayBatches, Batch
from d5suite.data.samplers import Shuffled
from d5suite.errors import ValidationError
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.levels.description import Tolerance
from d5suite.measurements.training.loading import CostOfLoading
from d5suite.measurements.training.native_pipeline import NativeInputPipeline
from d5suite.measurements.training.neutrality import CostOfNeutrality, NeutralityStep, plausible_yardstick
from d5suite.measurements.training.pipeline import InputPipeline
from d5suite.validate.check import Validation

IMAGES, LABELS = np.random.default_rng(0).standard_normal((24, 3, 4, 4), np.float32), np.arange(24) % 4
SETTINGS = SamplingSettings(max_time_s=0.01, min_rounds=3)


class Native:
    """A framework's own loader; a stale one gives its second batch for ever."""

    def __init__(self, stale: bool) -> None:
        self.stale, self.batches = stale, stream(stale)

    def __next__(self) -> Batch:
        return next(self.batches)

    def close(self) -> None:
        pass


def stream(stale: bool) -> Iterator[Batch]:
    batches = ArrayBatches(IMAGES, LABELS, Shuffled(24, 0), batch_size=4).batches()
    yield next(batches)
    second = next(batches)
    yield second
    while True:
        yield second if stale else next(batches)


class Loader(ArrayBatches):
    """The neutral loader, which may be stale, too."""

    def __init__(self, stale: bool) -> None:
        super().__init__(IMAGES, LABELS, Shuffled(24, 0), batch_size=4)
        self.stale = stale

    def batches(self, first_epoch: int = 0) -> Iterator[Batch]:
        return stream(self.stale)


def workload(stale: str) -> Any:
    return SimpleNamespace(
        case=SimpleNamespace(batch_size=4, network={"classes": 4}),
        batches=[(IMAGES[:4], LABELS[:4])],
        loader=lambda workers=None: Loader(stale == "neutral" and workers is None),
        executor=SimpleNamespace(feed=lambda arrays: None, synchronize=lambda: None),
        arrays=lambda batch: {},
        backend=SimpleNamespace(load=lambda module: SimpleNamespace(NAMES={"folder": "native"})),
        stored_as="folder",
    )


@pytest.mark.parametrize("stale", ["", "neutral", "native"])
@pytest.mark.parametrize("measurement", [InputPipeline, NativeInputPipeline, CostOfLoading])
def test_a_loader_that_repeats_a_batch_is_no_result(
    measurement: Any, stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "d5suite.measurements.training.loaders.native_loader", lambda workload: Native(stale == "native")
    )
    data = workload(stale)
    step = measurement().prepare(data)
    with step:
        step.begin()
        step.time(SETTINGS)
    caught = (InputPipeline, CostOfLoading) if stale == "neutral" else (NativeInputPipeline, CostOfLoading)
    if stale and measurement in caught:
        with pytest.raises(ValidationError, match="last timed batch"):
            Validation().require(measurement().check_timed(data, step))
    else:
        Validation().require(measurement().check_timed(data, step))


@pytest.mark.parametrize("works", [1, 2])
def test_a_hand_written_step_that_works_twice_is_no_yardstick(works: int) -> None:
    step = object.__new__(NeutralityStep)
    step._both = {
        name: Samples(0.0, [], [seconds] * 9, True, "time")
        for name, seconds in (("d5suite", 1.02), ("hand_written", works))
    }
    if works == 2:
        with pytest.raises(ValidationError, match=r"hand-written step slower than d5suite's.*it may work twice"):
            Validation().require(plausible_yardstick(None, step))  # type: ignore[arg-type]
    else:
        Validation().require(plausible_yardstick(None, step))  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [False, True])
def test_a_step_that_stops_training_costs_its_neutrality(stops: bool) -> None:
    step = object.__new__(NeutralityStep)
    same = Samples(0.0, [], [1.0] * 9, True, "time")
    step._both = {"d5suite": same, "hand_written": same}
    losses = iter([1.0, 1.0, 1.0] if stops else [1.0, 0.5, 0.25])
    step.losses = [1.0, 0.5, 0.25]
    step.feed = {}
    step.baseline = SimpleNamespace(loss=lambda: 0.1)
    step.trainer = SimpleNamespace(  # type: ignore[assignment]
        load_state=lambda state: None, initial_state=dict, step=lambda feed: {"loss": np.array(next(losses))}
    )
    step.workload = SimpleNamespace(  # type: ignore[assignment]
        executor=SimpleNamespace(fetch=dict, mode="eager", precision="fp32"),
        restore=lambda executor: None,
        network=SimpleNamespace(require_loss=lambda: ("label", "loss")),
        tolerance=Tolerance(1e-4, 4, 1e-2, "float32"),
    )
    if stops:
        with pytest.raises(ValidationError, match="loss of step 2 after timing"):
            Validation().require(CostOfNeutrality().check_timed(step.workload, step))
    else:
        Validation().require(CostOfNeutrality().check_timed(step.workload, step))
