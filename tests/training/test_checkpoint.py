"""Checkpoints: to the last bit, across frameworks and precisions, damaged and refused."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from d5suite.backends import discover
from d5suite.errors import ConfigurationError, DataError
from d5suite.levels.training import LOSS_SCALE, Trainer
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.optimizers.settings import LOSS_SCALING, SGD, AdamW
from d5suite.training import checkpoint
from d5suite.training.checkpoint import Checkpoints
from d5suite.training.events import (
    CSVSeries,
    HDF5Series,
)
from d5suite.training.loop import Event, Progress, Run
from tests.conftest import plugin_environment
from tests.training.small import OPTIMIZER, Watch, digits, needs_torch, trainer_on, with_dropout

LIVES = """
import os, signal, sys
from pathlib import Path
from tests.training.small import digits, lenet, trainer_on, with_dropout
from d5suite.backends import discover
from d5suite.training import checkpoint
from d5suite.training.checkpoint import Checkpoints
from d5suite.training.events import HDF5Series
from d5suite.training.loop import Event, Progress, Run

class Kill(Event):
    def on_step(self, run):
        if run.progress.step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

backend, network = sys.argv[1], {"lenet": lenet, "with_dropout": with_dropout}[sys.argv[3]]
discover()[0][backend].load("runtime").configure(threads=1, seed=0, device="cpu")
for path in map(Path, sys.argv[4:]):
    trainer = trainer_on(backend, network=network())
    progress = checkpoint.load(path, trainer) if path.exists() else Progress()
    events = [HDF5Series(path.with_suffix(".series")), Checkpoints(path, every_steps=3), Kill()]
    Run(trainer, digits(images=80, batch_size=16), epochs=2, progress=progress, events=events).train()
"""


@pytest.mark.parametrize(
    ("backend", "network"),
    [
        ("torch", "with_dropout"),
        *(pytest.param(backend, "lenet", marks=pytest.mark.slow) for backend in ("deep500", "keras")),
    ],
)
def test_a_killed_run_goes_on_to_the_last_bit(backend: str, network: str, tmp_path: Path) -> None:
    """The kit proves for each adapter that training goes on from a saved state to the last bit."""
    problem = discover()[0][backend].problem()
    if problem:
        pytest.skip(problem)

    def live(die_at: int, *names: str) -> int:
        command = [
            sys.executable,
            "-c",
            LIVES,
            backend,
            str(die_at),
            network,
            *(str(tmp_path / name) for name in names),
        ]
        done = subprocess.run(command, env=plugin_environment(), capture_output=True, text=True, timeout=600)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
        return done.returncode

    assert live(8, "killed.h5") == -signal.SIGKILL  # in the second epoch, two steps after a checkpoint
    assert live(-1, "whole.h5", "killed.h5") == 0
    with h5py.File(tmp_path / "killed.h5") as killed, h5py.File(tmp_path / "whole.h5") as whole:
        for group in ("parameters", "state", "random"):
            assert list(killed[group]) == list(whole[group])
            for name in whole[group]:
                np.testing.assert_array_equal(killed[group][name][()], whole[group][name][()], err_msg=name)
    with h5py.File(tmp_path / "killed.series") as killed, h5py.File(tmp_path / "whole.series") as whole:
        for name in ("epochs/epoch", "epochs/loss", "steps/step", "steps/loss"):
            np.testing.assert_array_equal(killed[name], whole[name])
        assert len(killed["steps/loss"]) == 10


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
    [(False, 0.1, "1 and 0 nodes Relu"), (True, 0.2, "differ in attributes, constants or connections")],
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
    before, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # else Python's own files are cut
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


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
    assert caught.value.where == str(path) and "Free some space" in str(caught.value.hint)
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
