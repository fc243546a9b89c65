"""One rank of d5suite's own schemes, all on one start: ``python scheme_rank.py FILE RANK``.

The file says what to do (`Work`). Each rank writes its course through each scheme beside it as soon
as the course has ended (`Course`); who reads them holds them to the rules.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends import Backend, select
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.schemes import SCHEMES, make_scheme
from d5suite.files import read_json
from d5suite.levels.distributed import Buffers, Scheme
from d5suite.levels.network import Native
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import classifier, layers, random_batch
from d5suite.testing.ranks import TIMEOUT_S

STEPS = 10
PLAIN = SGD(2.0**-6, momentum=0.875, weight_decay=2.0**-10)
CLIPPED = replace(PLAIN, clip_norm=2.0)
"""It hides gradients of a wrong scale, which the other shows."""

RANKS = 3
"""Two workers beside a server, and two neighbours of a rank."""


@dataclass(frozen=True)
class Case:
    """A scheme with settings that make a run deterministic, and show all of its rule.

    Attributes
    ----------
    scheme : str
    settings : mapping of str to object
    optimizer : SGD
    """

    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: SGD = PLAIN


CASES: Mapping[str, Case] = {
    "all_reduce": Case("all_reduce", {"bucket_bytes": 1000, "first_bucket_bytes": 250}),  # several buckets
    "parameter_server": Case("parameter_server", optimizer=CLIPPED),
    "parameter_server_2": Case("parameter_server", {"servers": 2}),
    "asynchronous": Case("asynchronous", {"schedule": [1, 2, 2]}),
    "stale_synchronous": Case("stale_synchronous", {"schedule": [1, 1, 2], "bound": 1}, CLIPPED),  # worker 1 waits
    "model_averaging": Case("model_averaging", {"every": 3}),
    "gossip": Case("gossip"),
    "top_k": Case("top_k", {"density": 0.05}),
    "quantised": Case("quantised", {"levels": 7}),
}


def cases(backend: Backend) -> list[tuple[str, str]]:
    """Return what is run on a backend: keys of `CASES`, each with a precision.

    In float32 each synchronous scheme once, which is held to one process that rounds alike. Of a
    backend without float64 all those for which no rounding decides what is sent.
    """
    chosen = []
    exact = "fp64" in backend.precisions
    for name, case in CASES.items():
        scheme = SCHEMES[case.scheme]
        if exact:
            chosen.append((name, "fp64"))
        wanted = scheme.synchronous and name == case.scheme if exact else not scheme.compresses
        if "fp32" in backend.precisions and wanted:
            chosen.append((name, "fp32"))
    return chosen


def network_of(precision: str) -> Network:
    """Leave out BatchNormalization below float64, where it amplifies roundings."""
    return classifier() if precision == "fp64" else layers()


def fed(trainer: Trainer, step: int, rank: int) -> Native:
    """Feed a rank's batch of a step."""
    network = trainer.executor.network
    images, labels = random_batch(network, seed=RANKS * step + rank)
    return trainer.executor.feed({network.input: images, "label": labels})


def begin(trainer: Trainer) -> None:
    """Return to the start of a run."""
    trainer.executor.load_parameters(trainer.executor.network.initializers)
    trainer.load_state(trainer.initial_state())


@dataclass(frozen=True)
class Work:
    """What the ranks do.

    Attributes
    ----------
    backend : str
        ``NAME:MODE``.
    device : str
    meeting : str
        A folder that is empty at first.
    """

    backend: str
    device: str
    meeting: str


@dataclass
class Course:
    """One rank's run through a scheme.

    Attributes
    ----------
    weights : list of Buffers
        After each step, and at the end; of a rank that serves at the end only.
    losses : list of float
        By step.
    state : dict of str to numpy.ndarray
        The optimizer's, at the end.
    """

    weights: list[Buffers]
    losses: list[float]
    state: dict[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def file(work: Path, case: str, precision: str, rank: int) -> Path:
        """Return where a rank's course is kept."""
        return work.with_name(f"{case}-{precision}-{rank}.npz")

    def write(self, file: Path) -> None:
        """Keep it in a file, which is whole if it is there."""
        arrays = {f"{step}/{name}": value for step, held in enumerate(self.weights) for name, value in held.items()}
        arrays |= {f"state/{name}": value for name, value in self.state.items()}
        part = file.with_suffix(".part.npz")
        np.savez(part, losses=np.array(self.losses), **arrays)  # type: ignore[arg-type]
        part.rename(file)

    @classmethod
    def read(cls, file: Path) -> Course:
        """Return what `write` kept."""
        with np.load(file) as arrays:
            parts: dict[str, Buffers] = {}
            for key in arrays.files:
                part, _, name = key.partition("/")
                parts.setdefault(part, {})[name] = arrays[key]
        losses, state = parts.pop("losses")[""], parts.pop("state")
        return cls(list(parts.values()), losses.tolist(), state)


def course(scheme: Scheme) -> Course:
    """Train through a scheme to its end."""
    replica = scheme.replica
    executor = replica.trainer.executor
    done = Course([], [])
    if scheme.serves:
        scheme.serve()
    else:
        for step in range(STEPS):
            loss = scheme.step(fed(replica.trainer, step, scheme.communicator.rank))
            done.losses.append(float(executor.fetch(loss)["loss"]))
            done.weights.append(replica.weights())
    scheme.finish()
    done.weights.append(replica.weights())
    done.state = replica.trainer.state()
    return done


def main(file: Path, rank: int) -> None:
    """Do this rank's part of a file's work."""
    work = Work(**read_json(file))
    selection = select(work.backend)
    backend = selection.backend
    backend.load("runtime", selection.mode).configure(threads=1, seed=0, device=work.device)
    communicator = open_communicator("gloo", rank=rank, size=RANKS, meeting=Path(work.meeting), timeout_s=TIMEOUT_S)
    trainers: dict[tuple[str, SGD], Trainer] = {}
    for name, precision in cases(backend):
        case = CASES[name]
        key = precision, case.optimizer
        if key not in trainers:
            executor = backend.executor(
                network_of(precision), mode=selection.mode, device=work.device, precision=precision
            )
            trainers[key] = backend.trainer(executor, case.optimizer)
        begin(trainers[key])
        replica = backend.replica(trainers[key])
        done = course(make_scheme(case.scheme, replica, communicator, backend, **case.settings))
        done.write(Course.file(file, name, precision, rank))
    communicator.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a framework would wait for the other ranks
