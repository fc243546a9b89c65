"""A program: what every rank of a component runs, and where it runs.

A program says which arrays it gives and takes (`gives`, `takes`), and makes one step after the
other (`step`). It never knows which coupling moves its data, nor which framework trains. Imports
NumPy, `d5suite.levels`, `d5suite.validate` and its neighbours.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.files import atomic_path
from d5suite.levels.description import Tolerance
from d5suite.levels.network import Executor
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.optimizers.settings import Optimizer
from d5suite.validate.check import Check
from d5suite.workflows.couplings.base import Fields
from d5suite.workflows.group import Subcommunicator
from d5suite.workflows.ports import In, Out

ROLES = ("simulation", "training", "inference", "program")


@dataclass(frozen=True)
class NativeBuilder:
    """Makes native code of the backend that is measured.

    Attributes
    ----------
    executor : callable
        ``executor(network, precision=None)``; by default in the precision that is measured. With
        ``fp64``, in the mode in which the backend proves.
    trainer : callable
        ``trainer(executor, optimizer)``.
    tolerance : Tolerance
    threads : int
    """

    executor: Callable[..., Executor]
    trainer: Callable[[Executor, Optimizer], Trainer]
    tolerance: Tolerance
    threads: int = 1


@dataclass
class WorkflowCheckpoints:
    """States of all ranks, every few steps.

    Attributes
    ----------
    folder : Path
    every : int
        Steps between two; 0 for none.
    rank : int
        In the job.
    """

    folder: Path
    every: int
    rank: int

    def path(self, step: int, rank: int | None = None) -> Path:
        """Return the file of a rank's state before a step."""
        return self.folder / f"rank{self.rank if rank is None else rank}-step{step}.npz"

    def save(self, step: int, state: Mapping[str, np.ndarray]) -> None:
        """Keep the state before a step.

        Raises
        ------
        ConfigurationError
            If it cannot be written, as on a full disk.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.path(step)) as path, path.open("wb") as file:
                np.savez(file, **dict(state))  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigurationError(
                f"a checkpoint cannot be written: {error.strerror or error}", where=str(self.path(step)),
                hint="Free some space, or declare the workflow without checkpoint_every.",
            ) from error  # fmt: skip

    def load(self, step: int) -> dict[str, np.ndarray]:
        """Return the state before a step.

        Raises
        ------
        ConfigurationError
            If there is none.
        """
        if not self.path(step).exists():
            raise ConfigurationError(f"there is no state before step {step}", where=str(self.path(step)))
        with np.load(self.path(step), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    def steps(self, ranks: int) -> list[int]:
        """Return the steps before which all ranks have kept their states, ascending."""
        found: dict[int, int] = {}
        for path in self.folder.glob("rank*-step*.npz"):
            if match := re.fullmatch(r"rank(\d+)-step(\d+)", path.stem):
                found[int(match[2])] = found.get(int(match[2]), 0) + (int(match[1]) < ranks)
        return sorted(step for step, count in found.items() if count == ranks)


@dataclass
class Place:
    """Where a program runs.

    Attributes
    ----------
    component : str
    rank, ranks : int
        In the component.
    steps : int
        That a run makes.
    seed : int
    options : mapping
        What the component's declaration gives it.
    group : Subcommunicator
        The component's ranks.
    builder : NativeBuilder
    out, into : dict
        The ports by coupling; new ones for every run.
    sizes : mapping of str to int
        By coupling: how many ranks are at its other side.
    first_step : int
        0, or where a run continues.
    checkpoints : WorkflowCheckpoints or None
    tell : callable
        Called after every step, with its number.
    """

    component: str
    rank: int
    ranks: int
    steps: int
    seed: int
    options: Mapping[str, Any]
    group: Subcommunicator
    builder: NativeBuilder
    sizes: Mapping[str, int] = field(default_factory=dict)
    out: dict[str, Out] = field(default_factory=dict)
    into: dict[str, In] = field(default_factory=dict)
    first_step: int = 0
    checkpoints: WorkflowCheckpoints | None = None
    tell: Callable[[int], None] = lambda step: None

    def option(self, name: str, default: Any) -> Any:
        """Return an option of the component."""
        return self.options.get(name, default)


class Program(ABC):
    """What every rank of a component runs.

    The constructor prepares what is needed for many runs, such as native code.

    Attributes
    ----------
    name : str
        In declarations and jobs.
    role : str
        One of `ROLES`.
    needs : sequence of str
        As `d5suite.measurements.base.Measurement.needs`: what the backend must have.
    parts : sequence of str
        Methods that a trace shows as regions.
    options : mapping
        Options and their defaults; a declaration gives no others.
    """

    name: ClassVar[str]
    role: ClassVar[str] = "program"
    needs: ClassVar[Sequence[str]] = ()
    parts: ClassVar[Sequence[str]] = ()
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, place: Place) -> None:
        self.place = place

    def option(self, name: str) -> Any:
        """Return an option: the declaration's, or the default."""
        return self.place.options.get(name, self.options[name])

    def gives(self) -> Mapping[str, Fields]:
        """Return the arrays that it puts into each coupling."""
        return {}

    def takes(self) -> Mapping[str, Fields]:
        """Return the arrays that it expects of each coupling."""
        return {}

    @abstractmethod
    def start(self) -> None:
        """Go to the state before the first step."""

    @abstractmethod
    def step(self, step: int) -> bool:
        """Make a step; False if there is nothing more to do."""

    def finish(self) -> None:  # noqa: B027
        """Do what follows the last step."""

    def run(self) -> None:
        """Make all steps."""
        place = self.place
        for step in range(place.first_step, place.steps):
            if not self.step(step):
                break
            if place.checkpoints is not None and place.checkpoints.every and not (step + 1) % place.checkpoints.every:
                place.checkpoints.save(step + 1, self.state())
            place.tell(step)
        self.finish()

    def state(self) -> dict[str, np.ndarray]:
        """Return all from which `load` continues."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:  # noqa: B027
        """Go to a state that `state` has returned."""

    def result(self) -> dict[str, np.ndarray]:
        """Return what every run must find alike, if nothing is discarded."""
        return {}

    def figures(self) -> dict[str, float]:
        """Return numbers for the record, by name; rank 0 of the component is asked."""
        return {}

    def checks(self) -> Iterable[Check]:
        """Yield checks of what it computed, against an independent reference; after a run."""
        return ()


def proved_training(
    builder: NativeBuilder, network: Network, optimizer: Optimizer, images: np.ndarray, labels: np.ndarray
) -> Iterator[Check]:
    """Prove a backend's training of a small network before it is timed.

    The gradient in float64 against ONNX's evaluator, three native steps in float64 against the
    optimizer's formula in NumPy, and ten as they are timed against ten in float64.
    """
    from d5suite.validate.network.gradient import check_gradient_float64
    from d5suite.validate.training.trajectory import check_trajectory, train, train_by_formula

    exact = builder.executor(network, "fp64")
    yield from check_gradient_float64(exact, images, labels)
    batches = [(np.roll(images, shift, -1), np.roll(labels, shift, -1)) for shift in range(10)]
    formula = train_by_formula(exact, optimizer, batches[:3])
    (native,) = train(builder.trainer(exact, optimizer), batches[:3])
    yield from check_trajectory("native vs formula (fp64)", native, formula, tolerance=1e-8, parameters=True)
    (expected,) = train(builder.trainer(exact, optimizer), batches)
    timed = builder.executor(network)
    (found,) = train(builder.trainer(timed, optimizer), batches)
    yield from check_trajectory(
        "as timed vs fp64", found, expected, tolerance=builder.tolerance.trajectory, parameters=False
    )
