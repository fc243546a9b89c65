"""Short training runs, by a native optimizer and by the update formula, and their comparison.

Imports h5py, NumPy and the contract; no framework.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from d5suite.errors import JobError, ValidationError
from d5suite.files import atomic_hdf5
from d5suite.levels.contract import require_answer
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.levels.training import LOSS_SCALE, STEPS, Trainer
from d5suite.optimizers.settings import Optimizer
from d5suite.validate.arrays import read_arrays, write_arrays
from d5suite.validate.check import Check
from d5suite.validate.norms import ROUNDING, relative_errors, relative_l2
from d5suite.validate.training.formulas import update


@dataclass(frozen=True)
class Trajectory:
    """A short training run.

    Attributes
    ----------
    losses : numpy.ndarray
        float64 (steps,): the loss before each update.
    parameters : mapping of str to numpy.ndarray
        All parameters and running statistics after the last update.
    """

    losses: np.ndarray
    parameters: Arrays


def save_runs(path: Path, backend: str, runs: Sequence[Trajectory]) -> None:
    """Write runs of different lengths atomically, with the name of the backend that made them."""
    with atomic_hdf5(path, durable=False) as file:  # hundreds of megabytes, for this run only
        file.attrs["backend"] = backend
        for run in {len(each.losses): each for each in runs}.values():
            group = file.create_group(str(len(run.losses)))
            group["losses"] = run.losses
            write_arrays(group.create_group("parameters"), run.parameters)


class SavedParameters(Mapping[str, np.ndarray]):
    """The parameters of a saved run, which are read when they are first needed.

    A file may hold gigabytes: two runs of a large network in float64. A comparison needs one.
    """

    def __init__(self, path: Path, steps: str) -> None:
        self._path, self._steps = path, steps

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        try:
            with h5py.File(self._path, "r") as file:
                return read_arrays(file[self._steps]["parameters"])
        except (OSError, KeyError, ValueError) as error:
            raise _unreadable(self._path, error) from error

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def load_runs(path: Path) -> tuple[dict[int, Trajectory], str]:
    """Read runs by their number of steps, and the name of the backend that made them.

    Raises
    ------
    JobError
        If the file is missing or holds no such runs; for parameters, when they are first needed.
    """
    try:
        with h5py.File(path, "r") as file:
            runs = {
                int(steps): Trajectory(group["losses"][()], SavedParameters(path, steps))
                for steps, group in file.items()
            }
            return runs, str(file.attrs["backend"])
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> JobError:
    return JobError(f"cannot read the training run: {error}", where=str(path))


BatchList = Sequence[tuple[np.ndarray, np.ndarray]]
"""Pairs of images and labels, one per batch."""


def train(
    trainer: Trainer,
    batches: BatchList,
    *,
    early: Collection[int] = (),
    rates: Sequence[float] = (),
    accumulate: int = 1,
    back_to_back: bool = False,
    restore: bool = True,
) -> list[Trajectory]:
    """Run the native optimizer over the batches, and restore the initial weights.

    In ``fp16``, a step that makes no update because the loss scale is too large is repeated.

    Parameters
    ----------
    trainer : Trainer
        In its initial state.
    batches : sequence
        See `BatchList`.
    early : collection of int
        Numbers of steps after which the run is recorded, too.
    rates : sequence of float
        Learning rates of the first steps; the last one applies to all later steps. By default the
        optimizer's own.
    accumulate : int
        Batches per step.
    back_to_back : bool
        Whether to issue steps without synchronizing and fetch losses at the end; not in ``fp16``.
    restore : bool
        Whether to restore the initial weights, which copies all of them twice.

    Returns
    -------
    list of Trajectory
        The run after each number of steps in ``early``, the smallest first, and the whole run.
    """
    executor = trainer.executor
    network = executor.network
    label, loss = network.require_loss()
    start = executor.parameters() if restore else {}
    losses: list[float] = []
    found = []
    pending: list[Native] = []
    scaled = executor.precision == "fp16"
    updates = int(trainer.state()[STEPS]) if scaled else 0
    steps = _steps(batches, accumulate)
    for index, group in enumerate(steps):
        feeds = [executor.feed({**network.arrays(images), label: labels}) for images, labels in group]
        if index < len(rates):
            trainer.set_learning_rate(rates[index])
        native = trainer.step(*feeds)
        if back_to_back and not scaled:
            pending.append(native)
            continue
        executor.synchronize()
        if scaled:
            repeat_until_updated(trainer, feeds, updates := updates + 1)
        losses.append(loss_of(executor, native, loss))
        ended = (len(losses) in early) + (len(losses) == len(steps))
        if ended:
            found += [Trajectory(np.array(losses), executor.parameters())] * ended
    if pending:
        losses = [loss_of(executor, native, loss) for native in pending]
        found.append(Trajectory(np.array(losses), executor.parameters()))
    if restore:
        executor.load_parameters(start)
    return found


def loss_of(executor: Executor, native: Native, loss: str) -> float:
    """Fetch a step's loss; ``loss`` is its name."""
    answer = executor.fetch(native)
    require_answer(executor, "trainer.loss", answer, {loss: ()})
    return float(answer[loss])


def repeat_until_updated(trainer: Trainer, feeds: Sequence[Native], updates: int) -> None:
    """Repeat a step until the trainer has made this many updates; the loss stays the same."""
    while int((state := trainer.state())[STEPS]) < updates:
        if state[LOSS_SCALE] < 1:
            raise ValidationError("the gradients are not finite in fp16, even with a loss scale below 1")
        trainer.step(*feeds)


def _steps(batches: BatchList, accumulate: int) -> list[BatchList]:
    return [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]


def train_by_formula(
    executor: Executor,
    optimizer: Optimizer,
    batches: BatchList,
    *,
    rates: Sequence[float] = (),
    accumulate: int = 1,
    state: dict[str, np.ndarray] | None = None,
) -> Trajectory:
    """Make the same run as `train` with the executor's gradients and the update formula in NumPy.

    ``state`` receives the optimizer's final state; the other arguments are as in `train`.
    """
    network = executor.network
    label, loss = network.require_loss()
    start = executor.parameters()
    parameters = {name: start[name].astype(np.float64) for name in network.parameters}
    state = {} if state is None else state
    losses = []
    for index, group in enumerate(_steps(batches, accumulate)):
        feeds = (executor.feed({**network.arrays(images), label: labels}) for images, labels in group)
        answers = [executor.fetch(executor.forward_backward(feed)) for feed in feeds]
        losses.append(float(np.mean([answer[loss] for answer in answers])))
        gradients = {
            name: functools.reduce(np.add, (answer[name] for answer in answers)) / len(answers) for name in parameters
        }
        rate = rates[min(index, len(rates) - 1)] if rates else None
        update(optimizer, parameters, gradients, state, learning_rate=rate)
        executor.load_parameters(parameters)
    end = executor.parameters()
    executor.load_parameters(start)
    return Trajectory(np.array(losses), end)


def check_trajectory(
    name: str,
    found: Trajectory,
    expected: Trajectory,
    *,
    tolerance: float | np.ndarray,
    parameters: bool | float,
) -> list[Check]:
    """Compare two runs step by step.

    Parameters
    ----------
    name : str
        What is compared with what.
    found, expected : Trajectory
    tolerance : float or numpy.ndarray
        Relative tolerance of the losses: one for all steps, or (steps,).
    parameters : bool or float
        Whether to compare the final parameters and statistics too; a number is their tolerance.
    """
    if len(found.losses) != len(expected.losses):
        raise ValidationError(f"{name}: {len(found.losses)} steps against {len(expected.losses)}")
    errors = [relative_l2(a, b) for a, b in zip(found.losses, expected.losses, strict=True)]
    limits = np.broadcast_to(tolerance, len(errors)).tolist()
    late = next((i for i, error in enumerate(errors) if not error <= limits[i]), None)
    worst = int(np.argmax(np.divide(errors, limits)))
    detail = f"worst at step {worst + 1}" if late is None else f"first disagrees at step {late + 1}"
    checks = [Check(f"losses of {len(errors)} steps, {name}", errors[worst], limits[worst], detail)]
    if parameters:
        limit = max(limits) if parameters is True else parameters
        text = f"parameters after {len(errors)} steps, {name}"
        checks.append(Check.worst(text, parameter_errors(found, expected), limit))
    return checks


def parameter_errors(found: Trajectory, expected: Trajectory) -> dict[str, float]:
    """Return each tensor's error after two runs, relative to its norm or to `ROUNDING`."""
    return relative_errors(found.parameters, expected.parameters, ROUNDING)
