"""Checkpoints: everything a run needs to resume, in neutral form, in one HDF5 file.

A run resumed with the same backend, mode and device makes bit-identical steps: the order of the
data depends only on (seed, epoch), and the state of Dropout's generator is saved. Any other backend
can load a checkpoint, too, because parameters and optimizer state are neutral; Dropout then draws
from the run's seed. Imports h5py, NumPy, the contract, `d5suite.validate.arrays` and `loop`.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from d5suite.errors import ConfigurationError, DataError
from d5suite.files import atomic_hdf5, check_writable, declared
from d5suite.levels.network import Executor
from d5suite.levels.training import LOSS_SCALE, UNSCALED_STEPS, Trainer
from d5suite.training.loop import Event, Progress, Run
from d5suite.validate.arrays import read_arrays, write_arrays

_Arrays = Mapping[str, np.ndarray]

FORMAT = "d5suite-checkpoint-2"

INTERVAL_S = 600.0
"""Seconds of training between checkpoints: a crash loses at most ten minutes, and 1 s of writing
costs 0.2%."""


def save(path: Path, trainer: Trainer, progress: Progress) -> None:
    """Write a checkpoint atomically.

    Parameters
    ----------
    path : Path
    trainer : Trainer
    progress : Progress
        From `Run.snapshot`.

    Raises
    ------
    DataError
        If the file cannot be written; an existing checkpoint at the path is kept.
    """
    _save(path, trainer, progress, trainer.executor.parameters(), trainer.state())


def _save(path: Path, trainer: Trainer, progress: Progress, parameters: _Arrays, state: _Arrays) -> None:
    executor = trainer.executor
    about = {
        "network": executor.network.name,
        "operators": _operators(executor),
        "graph": _graph(executor),
        "optimizer": trainer.optimizer.to_dict(),
        "progress": asdict(progress),
        "random_of": _drawn_by(executor),
        "written_by": f"{executor.backend}:{executor.mode} {executor.precision} on {executor.device}",
    }
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    groups = {"parameters": parameters, "state": state, "random": executor.random_state(), "about": {"json": text}}
    with declared(path, "the checkpoint"), atomic_hdf5(path) as file:
        file.attrs["format"], file.attrs["checksum"] = FORMAT, _checksum(groups)
        for name, values in groups.items():
            write_arrays(file.create_group(name), values)


def _checksum(groups: Mapping[str, _Arrays]) -> int:
    """Return a checksum of all arrays, so that corrupt files do not load: HDF5 has no checksum."""
    total = 0
    for group, values in groups.items():
        for name, value in values.items():
            total = zlib.crc32(repr((group, name, value.dtype.str, value.shape)).encode(), total)
            total = zlib.crc32(np.ascontiguousarray(value).data, total)
    return total


def _operators(executor: Executor) -> dict[str, int]:
    return dict(Counter(node.op_type for node in executor.network.nodes))


def _graph(executor: Executor) -> str:
    """Return a digest of a network's graph, independent of framework and batch size.

    The digest covers nodes, attributes, constants, and the names and shapes of weights, not their
    values.
    """
    network = executor.network
    weights = {*network.parameters, *network.statistics}
    digest = hashlib.sha256(repr((network.inputs, network.label, network.outputs, network.loss)).encode())
    for node in network.nodes:
        attributes = [(name, _plain(value)) for name, value in sorted(node.attributes.items())]
        digest.update(repr((node.op_type, node.inputs, node.outputs, attributes)).encode())
    for name, value in sorted(network.initializers.items()):
        digest.update(repr((name, value.shape) if name in weights else (name, _plain(value))).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return tuple(value) if isinstance(value, list) else value


def _drawn_by(executor: Executor) -> dict[str, str]:
    """Return backend, mode and device of a random state; no other can load the state."""
    return {"backend": executor.backend, "mode": executor.mode, "device": executor.device}


def load(path: Path, trainer: Trainer) -> Progress:
    """Load a checkpoint's parameters and optimizer state into a trainer of any backend.

    The random state is loaded if backend, mode and device are the same. A run in ``fp16`` that
    resumes from another precision starts with the initial loss scale; other precisions ignore the
    loss scale.

    Returns
    -------
    Progress
        The argument ``progress`` of `Run`.

    Raises
    ------
    DataError
        If the file is missing, damaged, truncated or not a checkpoint.
    ConfigurationError
        If the checkpoint belongs to another network or optimizer; the trainer is unchanged.
    """
    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") != FORMAT:
                raise DataError(
                    f"not a checkpoint of this version of d5suite: {file.attrs.get('format')!r}",
                    where=str(path),
                )
            groups = {name: read_arrays(file[name]) for name in ("parameters", "state", "random", "about")}
            if file.attrs["checksum"] != _checksum(groups):
                raise ValueError("its checksum is wrong")
        about = json.loads(groups["about"]["json"].tobytes())
        progress = Progress(**{**about["progress"], "stopped": ""})
        progress.losses = [(step, loss) for step, loss in progress.losses]
    except FileNotFoundError as error:
        raise DataError("there is no such checkpoint", where=str(path)) from error
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the checkpoint is damaged or truncated: {str(error).splitlines()[0]}",
            where=str(path),
            hint="Resume from an older one, or start again.",
        ) from error
    executor, network, settings = trainer.executor, about["network"], about["optimizer"]
    parameters, state = groups["parameters"], groups["state"]
    random = groups["random"] if about["random_of"] == _drawn_by(executor) else None
    expected = {name: executor.network.initializers[name].shape for name in executor.parameters()}
    found = {name: value.shape for name, value in parameters.items()}
    if found != expected:
        differing = next(name for name in (*expected, *found) if expected.get(name) != found.get(name))
        raise ConfigurationError(
            f"the checkpoint is of another network: {network!r} has {differing!r} of shape {found.get(differing)}, "
            f"{executor.network.name!r} of shape {expected.get(differing)}",
            where=str(path),
        )
    if about["graph"] != _graph(executor):
        operators, own = about["operators"], _operators(executor)
        kind = next((kind for kind in {**operators, **own} if operators.get(kind) != own.get(kind)), None)
        raise ConfigurationError(
            f"the checkpoint is of another network: the weights of {network!r} and {executor.network.name!r} have the "
            "same shapes, but "
            + (
                f"they have {operators.get(kind, 0)} and {own.get(kind, 0)} nodes {kind}"
                if kind
                else "their nodes differ in attributes, constants or connections"
            ),
            where=str(path),
            hint="Build the network as before, including label smoothing and the loss.",
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
    """Writes checkpoints at regular training times and at the end of the run, off the clock.

    After an error or a divergence nothing is written, so that the last good checkpoint is kept.
    Non-finite parameters or optimizer state end the run.

    Parameters
    ----------
    path : Path
        The checkpoint file; a new checkpoint replaces the previous checkpoint.
    every_s : float
        Seconds of training between checkpoints.
    every_steps : int, optional
        Updates between checkpoints, instead of seconds.

    Raises
    ------
    DataError
        During a run, if a checkpoint cannot be written; most causes show before the first step.
    """

    def __init__(self, path: Path, *, every_s: float = INTERVAL_S, every_steps: int | None = None) -> None:
        self.path = path
        self._every_s, self._every_steps = every_s, every_steps
        self._last_s = 0.0

    def on_start(self, run: Run) -> None:
        with declared(self.path, "the checkpoint"):
            check_writable(self.path)
        self._last_s = run.seconds

    def on_step(self, run: Run) -> None:
        due = run.seconds - self._last_s >= self._every_s
        if self._every_steps is not None:
            due = run.progress.step % self._every_steps == 0
        if due:
            run.off_the_clock(lambda: self._save(run))
            self._last_s = run.seconds

    def on_end(self, run: Run) -> None:
        self._save(run)

    def _save(self, run: Run) -> None:
        if not run.resumable:
            return
        progress = run.snapshot()
        parameters, state = run.trainer.executor.parameters(), run.trainer.state()
        for name, value in (*parameters.items(), *state.items()):
            if not np.isfinite(value).all():
                what = f"training diverged: {name!r} is not finite after step {progress.step}"
                run.stop(f"{what} (learning rate {run.trainer.learning_rate:g})", diverged=True)
                return
        if progress.losses and not math.isfinite(progress.losses[-1][1]):
            return  # an overflow in fp16 or the start of a divergence: wait for the next checkpoint
        _save(self.path, run.trainer, progress, parameters, state)
