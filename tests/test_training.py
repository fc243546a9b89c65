"""The neutral training loop: schedules, samplers, events, evaluation and checkpoints, also across backends."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d5suite.backends import discover
from d5suite.data.arrays import ArrayBatches
from d5suite.data.digits import Digits
from d5suite.data.samplers import ClassBalanced, Ordered, Sampler, Shuffled
from d5suite.errors import ConfigurationError, DataError
from d5suite.levels.network import Native
from d5suite.levels.schedule import SCHEDULES, Constant, Cosine, Polynomial, Schedule, Step, schedule_from_dict
from d5suite.levels.training import (
    LOSS_SCALE,
    LOSS_SCALING,
    OPTIMIZERS,
    SGD,
    AdamW,
    Optimizer,
    RuleTrainer,
    Trainer,
    UpdateRule,
    optimizer_from_dict,
)
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.training import checkpoint
from d5suite.training.checkpoint import Checkpoints
from d5suite.training.events import (
    CSVSeries,
    HDF5Series,
    ProgressBar,
    StopAtTime,
    StopEarly,
    StopOnDivergence,
    Target,
)
from d5suite.training.loop import Event, Progress, Run, evaluator
from d5suite.validate.metrics import METRICS
from tests.conftest import Run as RunPytest
from tests.conftest import plugin_environment

TOP1 = METRICS["top-1 accuracy"]
OPTIMIZER = SGD(0.0625, momentum=0.9, weight_decay=2.0**-12)

needs_torch = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="trains on PyTorch")


def lenet() -> Network:
    return build("lenet5", classes=10, image_size=32, seed=1)


def with_dropout() -> Network:
    b = Builder("with_dropout", seed=1, image_size=32, channels=1)
    x = b.relu(b.linear(b.flatten(b.dropout(b.image, "drop1", ratio=0.25), "flatten", size=32), "hidden", 24))
    return b.classifier(b.linear(b.dropout(x, "drop2"), "output", 10))


def trainer_on(
    backend: str, optimizer: Optimizer = OPTIMIZER, *, network: Network | None = None, precision: str = "fp32"
) -> Trainer:
    chosen = discover()[0][backend]
    if chosen.problem():
        pytest.skip(str(chosen.problem()))
    return chosen.trainer(chosen.executor(network or lenet(), precision=precision), optimizer)


def digits(split: str = "train", *, batch_size: int = 32, images: int | None = None) -> ArrayBatches:
    data = Digits("train" if split == "train" else "test")
    kept = len(data) if images is None else images
    sampler: Sampler = Shuffled(kept, seed=3) if split == "train" else Ordered(kept)
    return ArrayBatches(
        data.images[:kept], data.labels[:kept], sampler, batch_size=batch_size, drop_last=split == "train"
    )


# Settings


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_survives_being_written_down(name: str) -> None:
    optimizer = OPTIMIZERS[name](0.125, weight_decay=0.5, clip_norm=2.0)
    assert optimizer_from_dict(optimizer.to_dict()) == optimizer


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"name": "sdg", "learning_rate": 1.0}, "unknown optimizer 'sdg'"),
        ({"name": "adam", "learning_rate": 1.0, "momentum": 0.9}, "no setting 'momentum'"),
        ({"name": "adam"}, "needs a learning_rate"),
        ({"name": "adam", "learning_rate": 1.0, "beta2": 1.0}, "beta2"),
        ({"name": "rmsprop", "learning_rate": 1.0, "epsilon": 0.0}, "epsilon"),
        ({"name": "adagrad", "learning_rate": math.nan}, "learning rate"),
        ({"name": "sgd", "learning_rate": 1.0, "nesterov": True}, "Nesterov"),
        ({"name": "sgd", "learning_rate": 1.0, "clip_norm": -1.0}, "clip_norm"),
    ],
)
def test_bad_optimizer_settings_are_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        optimizer_from_dict(settings)


# Schedules


@given(
    st.sampled_from([Constant, Step, Cosine, Polynomial]),
    st.floats(0, 5),
    st.floats(0, 1),
    st.integers(1, 50),
)
def test_schedules_warm_up_in_equal_parts_and_never_leave_0_to_1(
    kind: type[Schedule], warmup: float, start: float, per_epoch: int
) -> None:
    schedule = kind(warmup_epochs=warmup, warmup_start=start)
    steps = round(warmup * per_epoch)
    factors = [schedule.factor(step, per_epoch) for step in range(90 * per_epoch)]
    assert all(0 < factor <= 1 for factor in factors), (min(factors), max(factors))
    if steps:
        assert factors[steps - 1] == pytest.approx(1)
        np.testing.assert_allclose(np.diff([start, *factors[:steps]]), (1 - start) / steps, atol=1e-12)
    after = factors[steps:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert schedule_from_dict(schedule.to_dict()) == schedule


def test_schedules_follow_their_formulas() -> None:
    step = Step(milestones=(2, 4), factor_each=0.1)
    assert [step.factor(i, 2) for i in (3, 4, 7, 8)] == pytest.approx([1, 0.1, 0.1, 0.01])
    cosine = Cosine(epochs=10, warmup_epochs=2, final=0.2)
    assert cosine.factor(6 * 4, 4) == pytest.approx(0.2 + 0.8 * 0.5)  # half of what is left after the warm-up
    assert cosine.factor(10 * 4, 4) == pytest.approx(0.2)
    assert Polynomial(epochs=10, power=2).factor(5, 1) == pytest.approx(0.25)
    assert set(SCHEDULES) == {"constant", "step", "cosine", "polynomial"}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"name": "cosin"}, "unknown schedule"),
        ({"name": "step", "gamma": 1}, "no setting 'gamma'"),
        ({"name": "step", "milestones": [3, 2]}, "milestones"),
        ({"name": "cosine", "epochs": 2, "warmup_epochs": 2}, "fall"),
        ({"name": "constant", "warmup_start": 2}, "warmup_start"),
    ],
)
def test_bad_schedules_are_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        schedule_from_dict(settings)


# Samplers


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 9), st.integers(0, 4))
def test_samplers_depend_on_seed_and_epoch_only(labels: list[int], seed: int, epoch: int) -> None:
    count = len(labels)
    for sampler in (Ordered(count), Shuffled(count, seed), ClassBalanced(np.array(labels), seed)):
        order = sampler.order(epoch)
        assert len(order) == len(sampler) == count
        assert order.min() >= 0 and order.max() < count
        np.testing.assert_array_equal(order, sampler.order(epoch))
    assert sorted(Shuffled(count, seed).order(epoch)) == list(range(count))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 9))
def test_a_balanced_epoch_holds_every_class_alike(labels: list[int], seed: int) -> None:
    known = np.array(labels)
    order = ClassBalanced(known, seed, length=100).order(0)
    counts = np.array([np.sum(known[order] == label) for label in np.unique(known)])
    assert counts.max() - counts.min() <= 1
    for label in np.unique(known):
        uses = np.array([np.sum(order == image) for image in np.flatnonzero(known == label)])
        assert uses.max() - uses.min() <= 1


def test_a_balanced_sampler_needs_one_class_per_image() -> None:
    with pytest.raises(ConfigurationError, match="one class per image"):
        ClassBalanced(np.zeros((4, 3), np.int64))


# The loop


class Watch(Event):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.rates: list[float] = []

    def on_start(self, run: Run) -> None:
        self.told.append("start")

    def on_batch(self, run: Run) -> None:
        self.told.append("batch")

    def on_step(self, run: Run) -> None:
        self.told.append("step")
        self.rates.append(run.trainer.learning_rate)

    def on_epoch(self, run: Run) -> None:
        self.told.append("epoch")

    def on_end(self, run: Run) -> None:
        self.told.append("end")


@needs_torch
def test_a_run_tells_its_events_and_follows_its_schedule() -> None:
    watch = Watch()
    schedule = Step(milestones=(1.0,), factor_each=0.5, warmup_epochs=1.0)
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
    with pytest.raises(ConfigurationError, match="no step"):
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
    assert run.train().epoch == 4 and "better than 0.6" in run.progress.stopped
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


# Checkpoints

LIVES = """
import os, signal, sys
from pathlib import Path
from tests.test_training import digits, lenet, trainer_on, with_dropout
from d5suite.backends import discover
from d5suite.training import checkpoint
from d5suite.training.checkpoint import Checkpoints
from d5suite.training.events import HDF5Series
from d5suite.training.loop import Event, Progress, Run

class Kill(Event):
    def on_step(self, run):
        if run.progress.step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

path, backend, network = Path(sys.argv[1]), sys.argv[2], {"lenet": lenet, "with_dropout": with_dropout}[sys.argv[4]]
discover()[0][backend].load("runtime").configure(threads=1, seed=0, device="cpu")
trainer = trainer_on(backend, network=network())
progress = checkpoint.load(path, trainer) if path.exists() else Progress()
events = [HDF5Series(path.with_suffix(".series")), Checkpoints(path, every_steps=5), Kill()]
Run(trainer, digits(images=320), epochs=3, progress=progress, events=events).train()
"""


@pytest.mark.parametrize(
    ("backend", "network"),
    [
        *((backend, "lenet") for backend in ("deep500", "jax", "keras", "mxnet", "tensorflow", "torch")),
        ("torch", "with_dropout"),
    ],
)
def test_a_killed_run_goes_on_to_the_last_bit(backend: str, network: str, tmp_path: Path) -> None:
    problem = discover()[0][backend].problem()
    if problem:
        pytest.skip(problem)

    def live(name: str, die_at: int) -> int:
        command = [sys.executable, "-c", LIVES, str(tmp_path / name), backend, str(die_at), network]
        done = subprocess.run(command, env=plugin_environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
        return done.returncode

    assert live("killed.h5", 18) == -signal.SIGKILL  # in the second epoch, three steps after a checkpoint
    assert live("killed.h5", -1) == 0
    assert live("whole.h5", -1) == 0
    with h5py.File(tmp_path / "killed.h5") as killed, h5py.File(tmp_path / "whole.h5") as whole:
        for group in ("parameters", "state", "random"):
            assert list(killed[group]) == list(whole[group])
            for name in whole[group]:
                np.testing.assert_array_equal(killed[group][name][()], whole[group][name][()], err_msg=name)
    with h5py.File(tmp_path / "killed.series") as killed, h5py.File(tmp_path / "whole.series") as whole:
        for name in ("epochs/epoch", "epochs/loss", "steps/step", "steps/loss"):
            np.testing.assert_array_equal(killed[name], whole[name])
        assert len(killed["steps/loss"]) == 30


@pytest.mark.parametrize("backend", ["jax", "keras", "mxnet", "tensorflow", "deep500"])
def test_a_checkpoint_of_one_framework_goes_on_in_another(backend: str, tmp_path: Path) -> None:
    first = trainer_on("torch", AdamW(2.0**-8))
    Run(first, digits(images=320), epochs=1, events=[Checkpoints(tmp_path / "c.h5")]).train()
    second = trainer_on(backend, AdamW(2.0**-8))
    progress = checkpoint.load(tmp_path / "c.h5", second)
    assert (progress.epoch, progress.step, progress.samples) == (1, 10, 320)
    Run(first, digits(images=320), epochs=2, progress=replace(progress)).train()
    Run(second, digits(images=320), epochs=2, progress=progress).train()
    expected, found = first.executor.parameters(), second.executor.parameters()
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-3 * np.linalg.norm(value), name


@needs_torch
def test_a_random_state_is_loaded_where_it_means_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.h5"
    first = trainer_on("torch", network=with_dropout())
    checkpoint.save(path, first, Progress())

    def loss(trainer: Trainer) -> float:
        images, labels = next(digits(images=32).epoch(0))
        executor = trainer.executor
        return float(executor.fetch(trainer.step(executor.feed({"image": images, "label": labels})))["loss"])

    expected = loss(first)
    again = trainer_on("torch", network=with_dropout())
    checkpoint.load(path, again)
    assert loss(again) == expected
    elsewhere = trainer_on("torch", network=with_dropout())
    monkeypatch.setattr(elsewhere.executor, "backend", "another")
    checkpoint.load(path, elsewhere)
    assert loss(elsewhere) != expected


@needs_torch
def test_a_checkpoint_goes_on_in_another_precision(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    single, half = trainer_on("torch"), trainer_on("torch", precision="fp16")
    checkpoint.save(path, single, Progress())
    half.load_state({**half.state(), LOSS_SCALE: np.array(4.0)})
    checkpoint.load(path, half)
    assert half.state()[LOSS_SCALE] == LOSS_SCALING.initial
    half.load_state({**half.state(), LOSS_SCALE: np.array(4.0)})
    checkpoint.save(path, half, Progress(step=3))
    assert checkpoint.load(path, single).step == 3
    other = trainer_on("torch", precision="fp16")
    checkpoint.load(path, other)
    assert other.state()[LOSS_SCALE] == 4.0


@needs_torch
def test_a_checkpoint_of_another_network_or_optimizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    checkpoint.save(path, trainer_on("torch"), Progress())
    torch = discover()[0]["torch"]
    other = torch.trainer(torch.executor(build("lenet5", classes=7, image_size=32)), OPTIMIZER)
    with pytest.raises(ConfigurationError, match=r"another network: .*output.weight.*\(10, 84\).*\(7, 84\)"):
        checkpoint.load(path, other)
    with pytest.raises(ConfigurationError, match=r"learning_rate 0\.0625, not 0\.5"):
        checkpoint.load(path, trainer_on("torch", SGD(0.5, momentum=0.9, weight_decay=2.0**-12)))


@needs_torch
@pytest.mark.parametrize(
    ("activation", "smoothing", "what"),
    [(False, 0.1, "1 and 0 nodes Relu"), (True, 0.2, "other attributes, other constants or other connections")],
)
def test_a_checkpoint_of_other_nodes_between_equal_weights_is_refused(
    tmp_path: Path, activation: bool, smoothing: float, what: str
) -> None:
    def trainer(activation: bool, smoothing: float) -> Trainer:
        b = Builder("first" if activation else "second", seed=1, image_size=32, channels=1)
        x = b.linear(b.flatten(b.image, "flatten", size=32), "hidden", 24)
        network = b.classifier(b.linear(b.relu(x) if activation else x, "output", 10))
        return trainer_on("torch", network=network.with_label_smoothing(smoothing))

    checkpoint.save(tmp_path / "c.h5", trainer(True, 0.1), Progress())
    with pytest.raises(ConfigurationError, match=f"of another network: .*have the same shapes, but .*{what}"):
        checkpoint.load(tmp_path / "c.h5", trainer(activation, smoothing))
    checkpoint.load(tmp_path / "c.h5", trainer(True, 0.1))


@needs_torch
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "flipped", "swapped", "foreign"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c.h5"
    trainer = trainer_on("torch")
    checkpoint.save(path, trainer, Progress())
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        values = trainer.executor.parameters()["f6.weight"][0, :16].tobytes()
        content[content.index(values) + 10] ^= 1
        path.write_bytes(content)
    elif damage == "swapped":
        with h5py.File(path, "a") as file:
            file["about/0"][()] = np.frombuffer(
                file["about/0"][()].tobytes().replace(b'"step": 0', b'"step": 9'), np.uint8
            )
    else:
        with h5py.File(path, "w") as file:
            file["x"] = 1
    before = trainer.executor.parameters()
    with pytest.raises(DataError, match=r"damaged|no such|not a checkpoint"):
        checkpoint.load(path, trainer)
    for name, value in trainer.executor.parameters().items():
        np.testing.assert_array_equal(value, before[name])


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: to a program, a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class RoomAfter(Event):
    """The disk is full from an epoch on."""

    def __init__(self, epoch: int, size: int) -> None:
        self.epoch, self.size = epoch, size

    def on_epoch(self, run: Run) -> None:
        if run.progress.epoch == self.epoch:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@needs_torch
def test_a_full_disk_ends_the_run_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    trainer = trainer_on("torch")
    checkpoint.save(path, trainer, Progress(step=1))
    content = path.read_bytes()
    run = Run(trainer, digits(images=320), epochs=2, events=[Checkpoints(path, every_steps=5)])
    with room_for(100_000), pytest.raises(DataError, match=r"too large; [\d,]{7} bytes are needed") as caught:
        run.train()
    assert caught.value.where == str(path) and "Make room" in str(caught.value.hint)
    assert run.progress.step == 5
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["c.h5"]


@needs_torch
@pytest.mark.parametrize("kind", [CSVSeries, HDF5Series])
def test_a_full_disk_ends_the_run_and_leaves_the_old_series(tmp_path: Path, kind: type[CSVSeries | HDF5Series]) -> None:
    path = tmp_path / "series"
    run = Run(trainer_on("torch"), digits(images=64), epochs=3, events=[kind(path), RoomAfter(epoch=1, size=50)])
    with room_for(10**9), pytest.raises(DataError, match=r"the series cannot be written: .*bytes are needed"):
        run.train()
    assert run.progress.epoch == 2 and path.stat().st_size > 50
    assert [p.name for p in tmp_path.iterdir()] == ["series"]


@needs_torch
@pytest.mark.parametrize("kind", [CSVSeries, HDF5Series, Checkpoints])
def test_a_place_that_takes_no_file_is_told_before_the_first_step(
    tmp_path: Path, kind: type[CSVSeries | HDF5Series | Checkpoints]
) -> None:
    for path, why in ((tmp_path / "nowhere" / "c.h5", "No such file"), (tmp_path, "Is a directory")):
        watch = Watch()
        with pytest.raises(DataError, match=f"cannot be written: {why}") as caught:
            Run(trainer_on("torch"), digits(images=64), epochs=1, events=[watch, kind(path)]).train()
        assert caught.value.where == str(path)
        assert watch.told == ["start", "end"]


# Runs that break off


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
            r"the loss of step 13 is nan, that of the step before is [\d.]+ \(learning rate 0\.0625",
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


# Runs that go on


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
    with pytest.raises(DataError, match="no series of a run"):
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
    assert run.progress.epoch == 5 and "better than 0.9 for 3 epochs" in run.progress.stopped
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
    progress = Run(trainer, batches, epochs=2, schedule=Step(milestones=(1.0,))).snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(trainer, batches, epochs=2, schedule=Step(milestones=(1.0,)), progress=progress)
        with pytest.raises(UserWarning, match=r"'name': 'step'.*'name': 'constant'"):
            Run(trainer, batches, epochs=2, progress=progress)


# Rules written by users


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


# Recipes

RECIPE = """
from d5suite.levels.schedule import Cosine
from d5suite.levels.training import SGD
from d5suite.recipe import Acceptance, Preset, Recipe, Training

RECIPE = Recipe(
    name="few_digits", network="lenet5", dataset="digits", optimizer=SGD(2.0**-4, momentum=0.9), label_smoothing=0.1,
    measurements=("step_breakdown", "time_to_accuracy"), acceptance=Acceptance(trajectory_steps=3),
    presets={
        "smoke": Preset(
            32, 32, 10, max_time_s=0.1, training=Training(target=0.9, epochs=9, runs=2, schedule=Cosine(epochs=9))
        ),
        "hopeless": Preset(32, 32, 10, max_time_s=0.1, training=Training(target=1.1, epochs=1, accumulate=4)),
        "none": Preset(32, 32, 10, leaves_out={"step_breakdown": "it is short"}),
    },
)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "test_few_digits.py").write_text(RECIPE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "test_few_digits.py"


@needs_torch
def test_a_recipe_is_trained_to_accuracy_and_its_curves_are_drawn(
    run_pytest: RunPytest, recipe: Path, tmp_path: Path
) -> None:
    done = run_pytest(str(recipe), "--backend", "torch", "--threads", "1", "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, json.loads((Path(__file__).parents[1] / "results" / "schema.json").read_text()))
    broken, trained = (bench["extra_info"]["d5suite"] for bench in result["benchmarks"])
    assert all(value >= 0 for key, value in broken["breakdown_s"].items() if key in ("data_wait", "forward", "other"))
    assert sum(broken["breakdown_s"].values()) == pytest.approx(broken["sum_over_step"] * broken["median_s"])
    assert [run["seed"] for run in trained["runs"]] == [0, 1]
    assert all(run["top-1 accuracy"] >= 0.9 == trained["target"]["value"] for run in trained["runs"])
    assert trained["runs"][0]["seconds"] in result["benchmarks"][1]["stats"]["data"]
    assert result["d5suite"]["pictures"] == ["out.few_digits.png"]
    assert (tmp_path / "out.few_digits.png").read_bytes().startswith(b"\x89PNG")


@needs_torch
def test_a_run_that_misses_its_target_is_no_number(run_pytest: RunPytest, recipe: Path) -> None:
    options = ("--backend", "torch", "--threads", "1", "-rs")
    done = run_pytest(str(recipe), *options, "--preset", "hopeless", "-k", "time_to_accuracy")
    assert done.returncode == 1
    assert "1 of 1 runs did not reach top-1 accuracy 1.1: that of seed 0 ended after 1 epochs at 0." in done.stdout
    done = run_pytest(str(recipe), *options, "--preset", "none")
    assert done.returncode == 0 and "2 skipped" in done.stdout
    assert "trained to accuracy at other presets only: smoke, hopeless" in done.stdout
    assert "'none' does without step_breakdown: it is short" in done.stdout
