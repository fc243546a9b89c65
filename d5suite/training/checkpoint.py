"""Checkpoints: everything a run needs to go on, in neutral form, in one HDF5 file.

A run that goes on from a checkpoint in the same backend, mode and device makes the same steps to the last bit, because
the data's order depends on (seed, epoch) only and what Dropout draws from is kept. Another backend can load it too:
parameters and optimizer state are neutral; there, Dropout draws anew from the run's seed. Imports h5py, NumPy and its
neighbours.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from d5suite.errors import ConfigurationError, DataError
from d5suite.files import atomic_path
from d5suite.levels.network import Executor
from d5suite.levels.training import LOSS_SCALE, UNSCALED_STEPS, Trainer
from d5suite.training.loop import Event, Progress, Run

FORMAT = "d5suite-checkpoint-1"

INTERVAL_S = 600.0
"""Training time between checkpoints: at most ten minutes are lost, and a second of writing costs 0.2%."""


def save(path: Path, trainer: Trainer, progress: Progress) -> None:
    """Write a checkpoint; the file appears whole or not at all.

    Raises
    ------
    OSError
        If it cannot be written; an older checkpoint of that name is then as it was.
    """
    executor = trainer.executor
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        file.attrs.update(
            format=FORMAT,
            network=executor.network.name,
            optimizer=json.dumps(trainer.optimizer.to_dict()),
            progress=json.dumps(asdict(progress)),
            written_by=f"{executor.backend}:{executor.mode} {executor.precision} on {executor.device}",
        )
        for group, values in (("parameters", executor.parameters()), ("state", trainer.state())):
            _write(file.create_group(group), values)
        random = file.create_group("random")
        random.attrs.update(_drawn_by(executor))
        _write(random, executor.random_state())


def _drawn_by(executor: Executor) -> dict[str, str]:
    """To whom alone a random state has a meaning."""
    return {"backend": executor.backend, "mode": executor.mode, "device": executor.device}


def _write(group: h5py.Group, values: dict[str, np.ndarray]) -> None:
    group["names"] = np.array(list(values), dtype=h5py.string_dtype())
    for index, value in enumerate(values.values()):
        # HDF5 keeps checksums for arrays in chunks only; a file that rots on disk must not train on.
        options: dict[str, Any] = {"chunks": True, "fletcher32": True} if value.size else {}
        group.create_dataset(str(index), data=value if value.ndim else value.reshape(1), **options)
        group[str(index)].attrs["scalar"] = value.ndim == 0


def _read(group: h5py.Group) -> dict[str, np.ndarray]:
    values = {}
    for index, name in enumerate(group["names"][()]):
        held = group[str(index)]
        values[name.decode()] = held[()].reshape(()) if held.attrs["scalar"] else held[()]
    return values


def load(path: Path, trainer: Trainer) -> Progress:
    """Put a checkpoint's parameters and optimizer state into a trainer of any backend.

    The random state is loaded where backend, mode and device are those that wrote it. In ``fp16``, what was trained in
    another precision starts with the initial scale of the loss; another precision ignores the scale.

    Returns
    -------
    Progress
        For `Run`.

    Raises
    ------
    DataError
        If the file is missing, damaged, cut short or no checkpoint.
    ConfigurationError
        If it is of another network or optimizer; the trainer is then as it was.
    """
    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") != FORMAT:
                raise DataError("this is not a checkpoint of d5suite", where=str(path))
            settings = json.loads(file.attrs["optimizer"])
            network = str(file.attrs["network"])
            progress = Progress(**{**json.loads(file.attrs["progress"]), "stopped": ""})
            parameters, state = _read(file["parameters"]), _read(file["state"])
            known = "random" in file and dict(file["random"].attrs) == _drawn_by(trainer.executor)
            random = _read(file["random"]) if known else None
    except FileNotFoundError as error:
        raise DataError("there is no such checkpoint", where=str(path)) from error
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the checkpoint is damaged or cut short: {str(error).splitlines()[0]}",
            where=str(path),
            hint="Go on from an older one, or start anew.",
        ) from error
    executor = trainer.executor
    expected = {name: executor.network.initializers[name].shape for name in executor.parameters()}
    found = {name: value.shape for name, value in parameters.items()}
    if found != expected:
        differing = next(name for name in (*expected, *found) if expected.get(name) != found.get(name))
        raise ConfigurationError(
            f"the checkpoint is of another network: {network!r} has {differing!r} of shape {found.get(differing)}, "
            f"{executor.network.name!r} of shape {expected.get(differing)}",
            where=str(path),
        )
    ours = trainer.optimizer.to_dict()
    if settings != ours:
        differing = next(key for key in {**settings, **ours} if settings.get(key) != ours.get(key))
        raise ConfigurationError(
            f"the checkpoint was trained with {differing} {settings.get(differing)!r}, not {ours.get(differing)!r}",
            where=str(path),
            hint="Use the same optimizer, or load the parameters alone.",
        )
    scaling = trainer.scaling_at_start
    unused = () if scaling else (LOSS_SCALE, UNSCALED_STEPS)
    state = {**scaling, **{name: value for name, value in state.items() if name not in unused}}
    trainer.check_state(state)
    if random is not None:
        executor.check_random_state(random)
    executor.load_parameters(parameters)
    trainer.load_state(state)
    if random is not None:
        executor.load_random_state(random)
    return progress


class Checkpoints(Event):
    """Writes a checkpoint at regular training times and at the end of the run, off the clock.

    Parameters
    ----------
    path : Path
        Each checkpoint replaces the one before.
    every_s : float
        Seconds of training time.
    every_steps : int, optional
        Updates, in place of seconds.
    """

    def __init__(self, path: Path, *, every_s: float = INTERVAL_S, every_steps: int | None = None) -> None:
        self.path = path
        self._every_s, self._every_steps = every_s, every_steps
        self._last_s = 0.0

    def on_start(self, run: Run) -> None:
        self._last_s = run.seconds

    def on_step(self, run: Run) -> None:
        due = run.seconds - self._last_s >= self._every_s
        if self._every_steps is not None:
            due = run.progress.step % self._every_steps == 0
        if due:
            run.off_the_clock(lambda: save(self.path, run.trainer, run.progress))
            self._last_s = run.seconds

    def on_end(self, run: Run) -> None:
        save(self.path, run.trainer, run.progress)
