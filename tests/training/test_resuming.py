"""Runs that break off, and runs that go on."""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import os
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from d5suite.data.arrays import ArrayBatches
from d5suite.data.samplers import Ordered, Sampler, Shuffled
from d5suite.errors import ConfigurationError, DataError
from d5suite.levels.network import Native
from d5suite.levels.training import Trainer
from d5suite.optimizers.schedules import StepDecay
from d5suite.training import checkpoint
from d5suite.training.checkpoint import Checkpoints
from d5suite.training.events import (
    CSVSeries,
    HDF5Series,
    StopEarly,
    StopOnDivergence,
    Target,
)
from d5suite.training.loop import Event, Progress, Run, evaluator
from tests.training.small import TOP1, Watch, digits, needs_torch, trainer_on


def poisoned(image: int) -> ArrayBatches:
    """Digits of which one has no colour."""
    batches = digits(images=320)
    batches.images = batches.images.copy()
    batches.images[image] = math.nan
    return batches


@needs_torch
@pytest.mark.parametrize(
    ("watchers", "every_steps", "why"),
    [
        (
            [StopOnDivergence(every_steps=5)],
            15,
            r"the loss of step 13 is nan, that of the previous step is [\d.]+ \(learning rate 0\.0625",
        ),
        ([], 14, r"'[\w.]+' is not finite after step 14"),
        ([], None, r"'[\w.]+' is not finite after step 20"),
    ],
)
def test_a_diverged_run_leaves_the_good_checkpoint(
    tmp_path: Path, watchers: list[Event], every_steps: int | None, why: str
) -> None:
    path = tmp_path / "c.h5"
    trainer = trainer_on("torch")
    Run(trainer, digits(images=320), epochs=1, events=[Checkpoints(path)]).train()
    content = path.read_bytes()
    image = int(Shuffled(320, seed=3).order(1)[64])  # of the third batch of the second epoch
    run = Run(
        trainer,
        poisoned(image),
        epochs=2,
        events=[*watchers, Checkpoints(path, every_steps=every_steps)],
        progress=checkpoint.load(path, trainer),
    )
    stopped = run.train().stopped
    assert re.search(why, stopped), stopped
    assert not run.resumable
    assert path.read_bytes() == content


@needs_torch
def test_an_epoch_shorter_than_the_looks_at_losses_ends_before_it_is_evaluated(tmp_path: Path) -> None:
    run = Run(
        trainer_on("torch"),
        poisoned(5),
        epochs=2,
        events=[StopOnDivergence(), CSVSeries(tmp_path / "run.csv")],
        evaluate=evaluator(digits("test"), [TOP1]),
    )
    assert "diverged: the loss of step" in run.train().stopped
    (row,) = table(tmp_path / "run.csv")
    assert (row["epoch"], row["step"], row["loss"]) == ("1", "10", "nan")


class Broken(Event):
    """Raises at a step, or at the end."""

    def __init__(self, step: int, error: BaseException, late: BaseException | None = None) -> None:
        self.step, self.error, self.late = step, error, late

    def on_step(self, run: Run) -> None:
        if run.progress.step == self.step:
            raise self.error

    def on_end(self, run: Run) -> None:
        if self.late is not None:
            raise self.late


@needs_torch
def test_an_error_leaves_the_good_checkpoint_and_every_event_ends(tmp_path: Path) -> None:
    path, watch = tmp_path / "c.h5", Watch()
    events = [Broken(7, RuntimeError("first"), ValueError("later")), Checkpoints(path, every_steps=5), watch]
    run = Run(trainer_on("torch"), digits(images=320), epochs=1, events=events)
    with pytest.raises(RuntimeError, match="first"):
        run.train()
    assert watch.told[-1] == "end" and not run.resumable
    assert checkpoint.load(path, trainer_on("torch")).step == 5
    late = Broken(-1, RuntimeError(), ValueError("late"))
    with pytest.raises(ValueError, match="late"):
        Run(trainer_on("torch"), digits(images=64), epochs=1, events=[late]).train()


@needs_torch
def test_images_count_when_their_step_is_made() -> None:
    class Short:
        def __len__(self) -> int:
            return 10

        def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            yield from itertools.islice(digits(images=320).epoch(number), 5)
            raise DataError("a broken image")

    run = Run(trainer_on("torch"), Short(), epochs=1, accumulate=2)
    with pytest.raises(DataError, match="a broken image"):
        run.train()
    assert (run.progress.step, run.progress.batch, run.progress.samples) == (2, 4, 128)


def interrupted_in_step(trainer: Trainer, step: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, so many times, comes while a step is half done."""
    native, count = trainer.step, itertools.count(1)

    def stepping(*feeds: Native) -> Native:
        if next(count) == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return native(*feeds)

    monkeypatch.setattr(trainer, "step", stepping)


@needs_torch
def test_control_c_waits_for_the_step_and_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole, cut = tmp_path / "c.h5", trainer_on("torch"), trainer_on("torch")
    Run(whole, digits(images=320), epochs=2).train()
    interrupted_in_step(cut, 4, 1, monkeypatch)
    run = Run(cut, digits(images=320), epochs=2, events=[Checkpoints(path)])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.resumable and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = trainer_on("torch")
    progress = checkpoint.load(path, again)
    assert (progress.step, progress.batch, progress.samples) == (4, 4, 128)
    Run(again, digits(images=320), epochs=2, progress=progress).train()
    expected, found = whole.executor.parameters(), again.executor.parameters()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@needs_torch
def test_a_second_control_c_does_not_wait_and_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_on("torch")
    interrupted_in_step(trainer, 4, 2, monkeypatch)
    run = Run(trainer, digits(images=320), epochs=2, events=[Checkpoints(tmp_path / "c.h5")])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.progress.step == 3 and not run.resumable
    assert list(tmp_path.iterdir()) == []


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@needs_torch
def test_a_run_that_goes_on_keeps_its_series(tmp_path: Path) -> None:
    def live(name: str, until: int) -> None:
        trainer, path = trainer_on("torch"), tmp_path / f"{name}.h5"
        rows, steps = CSVSeries(tmp_path / f"{name}.csv"), HDF5Series(tmp_path / f"{name}-series.h5")
        run = Run(
            trainer,
            digits(images=320),
            epochs=3,
            events=[rows, steps, Broken(until, KeyboardInterrupt()), Checkpoints(path)],
            evaluate=evaluator(digits("test", images=100), [TOP1]),
            progress=checkpoint.load(path, trainer) if path.exists() else None,
        )
        with contextlib.suppress(KeyboardInterrupt):
            run.train()

    live("whole", -1)
    live("cut", 14)
    unfinished = table(tmp_path / "cut.csv")
    assert [row["epoch"] for row in unfinished] == ["1", "2"]
    assert unfinished[1]["step"] == "14" and unfinished[1][TOP1.name] == ""
    live("cut", 20)  # an epoch is over, and not yet evaluated
    live("cut", -1)
    for found, expected in zip(table(tmp_path / "cut.csv"), table(tmp_path / "whole.csv"), strict=True):
        assert found.pop("seconds") != expected.pop("seconds")
        assert found == expected
    with h5py.File(tmp_path / "cut-series.h5") as cut, h5py.File(tmp_path / "whole-series.h5") as whole:
        for name in ("epochs/loss", "epochs/samples", f"epochs/{TOP1.name}", "steps/step", "steps/loss"):
            np.testing.assert_array_equal(cut[name], whole[name])
        assert len(cut["steps/loss"]) == 30


@needs_torch
@pytest.mark.parametrize("kind", [CSVSeries, HDF5Series])
def test_a_file_that_is_no_series_stays_as_it_is(tmp_path: Path, kind: type[CSVSeries | HDF5Series]) -> None:
    path = tmp_path / "notes"
    path.write_text("a,b\n1,2\n")
    progress = Progress(epoch=1, batch=1, step=3, losses=[(3, 2.5)])
    run = Run(trainer_on("torch"), digits(images=64), epochs=2, events=[kind(path)], progress=progress)
    with pytest.raises(DataError, match="not a series of a run"):
        run.train()
    assert path.read_text() == "a,b\n1,2\n"


@needs_torch
def test_a_run_that_goes_on_keeps_its_patience_and_its_target(tmp_path: Path) -> None:
    path, values = tmp_path / "c.h5", [0.5, 0.9, 0.6, 0.7, 0.8, 0.96]

    def live(patience: int, epochs: int) -> tuple[Run, Target]:
        trainer, target = trainer_on("torch"), Target(replace(TOP1, bound=0.95))
        progress = checkpoint.load(path, trainer) if path.exists() else Progress()
        left = iter(values[progress.epoch :])
        run = Run(
            trainer,
            digits(images=64),
            epochs=epochs,
            events=[StopEarly(TOP1, patience), target, Checkpoints(path)],
            evaluate=lambda executor: {TOP1.name: next(left)},
            progress=progress,
        )
        run.train()
        return run, target

    assert live(3, 3)[0].progress.stopped == ""
    run, target = live(3, 9)
    assert run.progress.epoch == 5 and "improved on 0.9 for 3 epochs" in run.progress.stopped
    assert target.reached is None
    reached = live(9, 9)[1].reached
    assert reached is not None and reached[1:] == (12, 384)
    assert live(9, 6)[1].reached == reached, "from the checkpoint: nothing is left to train"


@needs_torch
@pytest.mark.parametrize(
    ("sampler", "batch_size", "accumulate", "what"),
    [
        (Shuffled(320, seed=4), 32, 1, "the sampler's seed 3, and this one has 4"),
        (Shuffled(300, seed=3), 32, 1, "the sampler's images 320, and this one has 300"),
        (Ordered(320), 32, 1, "the sampler's name 'shuffled', and this one has 'ordered'"),
        (Shuffled(320, seed=3), 64, 1, "batch_size 32, and this one has 64"),
        (Shuffled(320, seed=3), 32, 2, "accumulate 1, and this one has 2"),
    ],
)
def test_a_run_goes_on_with_its_own_data_only(
    tmp_path: Path, sampler: Sampler, batch_size: int, accumulate: int, what: str
) -> None:
    trainer, batches = trainer_on("torch"), digits(images=320)
    Run(trainer, batches, epochs=1, events=[Checkpoints(tmp_path / "c.h5")]).train()
    progress = checkpoint.load(tmp_path / "c.h5", trainer)
    other = ArrayBatches(batches.images, batches.labels, sampler, batch_size=batch_size)
    with pytest.raises(ConfigurationError, match=what):
        Run(trainer, other, epochs=2, accumulate=accumulate, progress=progress)


@needs_torch
@pytest.mark.parametrize(("batch", "accumulate"), [(11, 1), (3, 2)])
def test_a_place_that_an_epoch_does_not_have_is_refused(batch: int, accumulate: int) -> None:
    trainer, progress = trainer_on("torch"), Progress(batch=batch)
    with pytest.raises(ConfigurationError, match=f"at batch {batch} of its epoch, and an epoch has 10"):
        Run(trainer, digits(images=320), epochs=1, accumulate=accumulate, progress=progress)


@needs_torch
def test_a_schedule_may_change_and_is_not_forgotten() -> None:
    trainer, batches = trainer_on("torch"), digits(images=320)
    progress = Run(trainer, batches, epochs=2, schedule=StepDecay(milestones=(1.0,))).snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(trainer, batches, epochs=2, schedule=StepDecay(milestones=(1.0,)), progress=progress)
        with pytest.raises(UserWarning, match=r"'name': 'step'.*'name': 'constant'"):
            Run(trainer, batches, epochs=2, progress=progress)
