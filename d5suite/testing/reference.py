"""Recorded training runs: some steps in float64, on which independent backends agree to 1e-8.

A recorded run holds the loss of every step. For every final parameter and running statistic it
holds the norm, two projections on fixed noise (a wrong element changes both), and the norm of its
change. ``python -m d5suite.testing.reference BACKEND[:MODE]`` trains on a backend and overwrites
the recording that the kit ships.

Imports NumPy, the contract and `d5suite.validate`.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d5suite.backends import Backend, select
from d5suite.files import write_json
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import TASKS
from d5suite.validate.check import Check
from d5suite.validate.network.reference import NEGLIGIBLE
from d5suite.validate.norms import ROUNDING
from d5suite.validate.training import trajectory
from d5suite.validate.training.trajectory import Trajectory

RECORDS = Path(__file__).with_name("trajectories.json")
PROJECTIONS = 2


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run.

    Attributes
    ----------
    losses : list of float
        One per step, before the update.
    tensors : mapping of str to list of float
        For every parameter and statistic after the last update: norm, projections, and the norm
        of its change.
    """

    losses: list[float]
    tensors: Mapping[str, list[float]]

    def compare(self, found: Trajectory, tolerance: float, precision: str) -> list[Check]:
        """Compare a run with this one.

        Errors are relative to each loss and to each tensor's norm. Below float64 they are relative
        to the norm of the tensor's change, which is small beside the tensor.

        Parameters
        ----------
        found : Trajectory
            As many steps as the recorded run.
        tolerance : float
        precision : str
            Precision of ``found``.
        """
        scale, floor = (0, ROUNDING) if precision == "fp64" else (-1, NEGLIGIBLE)
        errors = [abs(a - b) / abs(b) for a, b in zip(found.losses, self.losses, strict=True)]
        worst = int(np.argmax(np.nan_to_num(errors, nan=math.inf)))
        made = [
            Check(
                f"losses of {len(errors)} steps vs the recorded run", errors[worst], tolerance, f"at step {worst + 1}"
            )
        ]
        whole = math.sqrt(sum(values[scale] ** 2 for values in self.tensors.values()))
        distances = {
            name: max(abs(a - b) for a, b in zip(_summary(name, found.parameters[name]), values, strict=False))
            / max(values[scale], floor * whole)
            for name, values in self.tensors.items()
        }
        name = max(distances, key=lambda key: distances[key])
        made.append(Check(f"{len(distances)} tensors vs the recorded run", distances[name], tolerance, name))
        return made


def _summary(name: str, value: np.ndarray) -> list[float]:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    noise = generator.standard_normal((PROJECTIONS, value.size))
    return [float(np.linalg.norm(value.ravel())), *(float(row @ value.ravel().astype(np.float64)) for row in noise)]


def load(task: str) -> RecordedRun:
    """Read the recorded run of one of `TASKS`."""
    recorded = json.loads(RECORDS.read_text(encoding="utf-8"))["tasks"][task]
    return RecordedRun(recorded["losses"], recorded["tensors"])


def train(backend: Backend, task: str, *, mode: str, device: str, precision: str) -> Trajectory:
    """Train one of `TASKS` with SGD, Nesterov momentum and weight decay."""
    chosen = TASKS[task]
    network = chosen.network()
    executor = backend.executor(network, mode=mode, device=device, precision=precision)
    optimizer = SGD(chosen.learning_rate, momentum=0.875, nesterov=True, weight_decay=2.0**-10)
    (found,) = trajectory.train(backend.trainer(executor, optimizer), chosen.batches(network, chosen.steps))
    return found


def record(text: str) -> None:
    """Train every task on a backend, and write the recording."""
    selection = select(text)
    backend, mode = selection.backend, selection.mode
    backend.load("runtime", mode).configure(threads=1, seed=0, device="cpu")
    tasks = {}
    for name, task in TASKS.items():
        run = train(backend, name, mode=mode, device="cpu", precision="fp64")
        initial = task.network().initializers
        tensors = {
            key: [*_summary(key, value), float(np.linalg.norm(value - initial[key]))]
            for key, value in run.parameters.items()
        }
        tasks[name] = {"losses": run.losses.tolist(), "tensors": tensors}
    write_json(RECORDS, {"recorded_with": f"{selection} {backend.version()}", "tasks": tasks})


if __name__ == "__main__":
    record(sys.argv[1])
