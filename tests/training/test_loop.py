"""The neutral training loop: events, schedules, evaluation off the clock, and update rules."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from d5suite.backends import discover
from d5suite.errors import ConfigurationError
from d5suite.levels.network import Native
from d5suite.network.zoo import build
from d5suite.optimizers.schedules import StepDecay
from d5suite.optimizers.settings import SGD
from d5suite.training.events import (
    CSVSeries,
    HDF5Series,
    ProgressBar,
    Series,
    StopAtTime,
    StopEarly,
    StopOnDivergence,
    Target,
)
from d5suite.training.loop import Run, evaluator
from d5suite.training.rules import RuleTrainer, UpdateRule
from tests.training.small import OPTIMIZER, TOP1, Watch, digits, needs_torch, trainer_on


@needs_torch
def test_a_run_tells_its_events_and_follows_its_schedule() -> None:
    watch = Watch()
    schedule = StepDecay(milestones=(1.0,), factor_each=0.5, warmup_epochs=1.0)
    run = Run(
        trainer_on("torch"),
        digits(batch_size=32, images=150),
        epochs=2,
        schedule=schedule,
        accumulate=2,
        events=[watch],
    )
    progress = run.train()
    assert (progress.epoch, progress.batch, progress.step, progress.samples) == (2, 0, 4, 256)
    epoch = ["batch", "batch", "step"] * 2 + ["epoch"]
    assert watch.told == ["start", *epoch, *epoch, "end"]
    assert watch.rates == [OPTIMIZER.learning_rate * factor for factor in (0.5, 1.0, 0.5, 0.5)]
    assert not progress.stopped and progress.seconds > 0


@needs_torch
def test_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fewer than the 3 per update"):
        Run(trainer_on("torch"), digits(images=64), epochs=1, accumulate=3)
    with pytest.raises(ConfigurationError, match="do not fill one batch"):
        digits(images=8)


@needs_torch
def test_evaluation_and_events_are_off_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr("d5suite.training.loop.now", lambda: float(next(ticks)))

    def evaluate(executor: object) -> dict[str, float]:
        for _ in range(100):
            next(ticks)
        return {}

    run = Run(trainer_on("torch"), digits(images=64), epochs=3, evaluate=evaluate)
    assert run.train().seconds < 100


@needs_torch
def test_a_rate_that_diverges_stops_the_run() -> None:
    run = Run(trainer_on("torch", SGD(1e38)), digits(images=320), epochs=5, events=[StopOnDivergence(every_steps=4)])
    progress = run.train()
    assert progress.step <= 8
    assert "diverged: the loss of step" in progress.stopped and "1e+38" in progress.stopped


@needs_torch
def test_reasons_to_stop(tmp_path: Path) -> None:
    progress = Run(trainer_on("torch"), digits(images=64), epochs=9**9, events=[StopAtTime(0.05)]).train()
    assert "time limit of 0.05 s" in progress.stopped
    falling = iter([0.5, 0.6, 0.55, 0.6, 0.58])
    run = Run(
        trainer_on("torch"),
        digits(images=64),
        epochs=9,
        events=[StopEarly(TOP1, patience=2)],
        evaluate=lambda executor: {TOP1.name: next(falling)},
    )
    assert run.train().epoch == 4 and "improved on 0.6" in run.progress.stopped
    with pytest.raises(ConfigurationError, match="not evaluated"):
        Run(trainer_on("torch"), digits(images=64), epochs=1, events=[StopEarly(TOP1, patience=1)]).train()
    with pytest.raises(ConfigurationError, match="no bound"):
        Target(TOP1)


@needs_torch
def test_series_and_target_of_a_run_to_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(replace(TOP1, bound=0.97))
    rows, series = CSVSeries(tmp_path / "run.csv"), HDF5Series(tmp_path / "run.h5")
    run = Run(
        trainer_on("torch"),
        digits(),
        epochs=30,
        events=[ProgressBar(), StopOnDivergence(), rows, series, target],
        evaluate=evaluator(digits("test", batch_size=100), [TOP1]),
    )
    progress = run.train()
    assert target.reached is not None
    seconds, steps, samples = target.reached
    assert (steps, samples) == (progress.step, progress.samples) and 0 < seconds <= progress.seconds
    with (tmp_path / "run.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == progress.epoch
    assert float(table[-1][TOP1.name]) == progress.metrics[TOP1.name] >= 0.97
    assert float(table[-1]["loss"]) < float(table[0]["loss"])
    with h5py.File(tmp_path / "run.h5") as file:
        assert file[f"epochs/{TOP1.name}"].shape == (progress.epoch,)
        np.testing.assert_array_equal(file["steps/step"], np.arange(1, progress.step + 1))
        assert np.isfinite(file["steps/loss"]).all()
    assert capsys.readouterr() == ("", ""), "a run in a pipe is quiet"


class LookAhead(UpdateRule):
    """Nesterov's method as it was first written: the gradient is taken ahead of the parameter."""

    def __init__(self) -> None:
        self.velocity: dict[str, np.ndarray] = {}
        self.batches = 0

    def new_input(self) -> None:
        self.batches += 1

    def prepare_param(self, name: str, parameter: np.ndarray) -> np.ndarray:
        return parameter + 0.5 * self.velocity.get(name, np.zeros_like(parameter))

    def update_rule(self, gradient: np.ndarray, parameter: np.ndarray, name: str) -> np.ndarray:
        velocity = self.velocity.get(name, np.zeros_like(parameter))
        self.velocity[name] = 0.5 * velocity - 0.0625 * gradient
        return parameter - 0.5 * velocity + self.velocity[name]


@needs_torch
def test_a_rule_may_look_ahead_and_take_several_batches() -> None:
    torch = discover()[0]["torch"]
    executor = torch.executor(build("lenet5", classes=10, image_size=32), precision="fp64")
    data = [executor.feed({"image": images, "label": labels}) for images, labels in digits(images=128).epoch(0)]
    rule = LookAhead()
    trainer = RuleTrainer(executor, rule)
    losses = [float(trainer.step(*data)["loss"]) for _ in range(12)]
    assert rule.batches == 12 and losses[-1] < 0.7 * losses[0]


@needs_torch
def test_a_rule_that_changes_a_shape_is_refused() -> None:
    class Wrong(UpdateRule):
        def update_rule(self, gradient: np.ndarray, parameter: np.ndarray, name: str) -> np.ndarray:
            return parameter.ravel()

    torch = discover()[0]["torch"]
    executor = torch.executor(build("lenet5", classes=10, image_size=32))
    images, labels = next(digits(images=32).epoch(0))
    with pytest.raises(ConfigurationError, match="shape"):
        RuleTrainer(executor, Wrong()).step(executor.feed({"image": images, "label": labels}))


@needs_torch
def test_losses_kept_until_the_end_of_an_epoch_are_those_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that reuses output memory would give a curve of one value; the kit catches it."""
    trainer = trainer_on("torch")
    step, start, fresh = trainer.step, trainer.executor.parameters(), trainer.state()
    at_once: list[float] = []

    def watched(*feeds: Native) -> Native:
        answer = step(*feeds)
        at_once.append(float(trainer.executor.fetch(answer)["loss"]))
        return answer

    def curve(step: Callable[..., Native]) -> list[float]:
        monkeypatch.setattr(trainer, "step", step)
        trainer.executor.load_parameters(start)
        trainer.load_state(fresh)
        series = Series()
        Run(trainer, digits(images=320), epochs=1, events=[series]).train()
        return [loss for _, loss in series.losses]

    memory: dict[str, Any] = {}

    def reusing(*feeds: Native) -> Native:
        answer = step(*feeds)
        return {name: memory.setdefault(name, value.clone()).copy_(value) for name, value in answer.items()}

    kept = curve(watched)
    assert kept == at_once and len(set(kept)) == 10
    assert curve(reusing) == [kept[-1]] * 10
