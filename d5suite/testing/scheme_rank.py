"""One rank of d5suite's own schemes, which trains through all of them in one process.

``python -m d5suite.testing.scheme_rank FOLDER RANK NAME:MODE DEVICE``

Each rank writes its training through each scheme to the folder (`RankRun`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends import Backend
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.schemes import SCHEMES, make_scheme
from d5suite.levels.distributed import Buffers, Scheme
from d5suite.levels.network import Arrays, Native
from d5suite.levels.training import Trainer
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import fed, loss_of, random_batch, steady
from d5suite.testing.ranks import TIMEOUT_S, configured, rank_main

STEPS = 10
PLAIN = SGD(2.0**-6, momentum=0.875, weight_decay=2.0**-10)
CLIPPED = replace(PLAIN, clip_norm=2.0)
"""Clipping hides gradients of a wrong scale; `PLAIN` shows them."""

RANKS = 3
"""Number of ranks: a server has two workers, and a rank two neighbours."""


@dataclass(frozen=True)
class SchemeCase:
    """A scheme, with settings that make training deterministic and use every part of its rule.

    Attributes
    ----------
    scheme : str
    settings : mapping of str to object
    optimizer : SGD
    """

    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: SGD = PLAIN


SCHEME_CASES: Mapping[str, SchemeCase] = {
    "all_reduce": SchemeCase("all_reduce", {"bucket_bytes": 1000, "first_bucket_bytes": 250}),  # several buckets
    "parameter_server": SchemeCase("parameter_server", optimizer=CLIPPED),
    "parameter_server_2": SchemeCase("parameter_server", {"servers": 2}),
    "asynchronous": SchemeCase("asynchronous", {"schedule": [1, 2, 2]}),
    "stale_synchronous": SchemeCase(
        "stale_synchronous", {"schedule": [1, 1, 2], "bound": 1}, CLIPPED
    ),  # worker 1 waits
    "model_averaging": SchemeCase("model_averaging", {"every": 3}),
    "gossip": SchemeCase("gossip"),
    "top_k": SchemeCase("top_k", {"density": 0.05}),
    "quantised": SchemeCase("quantised", {"levels": 7}),
}


def cases(backend: Backend) -> list[tuple[str, str]]:
    """Return the cases to run on a backend: keys of `SCHEME_CASES`, each with a precision.

    In float32, every synchronous scheme runs once and is compared with one process, which rounds
    alike. A backend without float64 runs all schemes in which no rounding decides what is sent.
    """
    chosen = []
    exact = "fp64" in backend.precisions
    for name, case in SCHEME_CASES.items():
        scheme = SCHEMES[case.scheme]
        if exact:
            chosen.append((name, "fp64"))
        wanted = scheme.synchronous and name == case.scheme if exact else not scheme.compresses
        if "fp32" in backend.precisions and wanted:
            chosen.append((name, "fp32"))
    return chosen


def rank_feed(trainer: Trainer, step: int, rank: int, ranks: int = RANKS) -> Native:
    """Feed a rank's batch of a step."""
    return fed(trainer.executor, random_batch(trainer.executor.network, seed=ranks * step + rank))


def begin(trainer: Trainer) -> None:
    """Return to the start of a run."""
    trainer.executor.load_parameters(trainer.executor.network.initializers)
    trainer.load_state(trainer.initial_state())


@dataclass
class RankRun:
    """One rank's training through a scheme.

    Attributes
    ----------
    weights : list of Buffers
        Weights after each step, and at the end. A rank that serves has only the last.
    losses : list of float
        Losses by step.
    state : dict of str to numpy.ndarray
        The optimizer's state at the end; empty for a framework's own scheme.
    """

    weights: list[Buffers] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    state: Arrays = field(default_factory=dict)

    @staticmethod
    def file(folder: Path, case: str, precision: str, rank: int) -> Path:
        """Return a run's file."""
        return folder / f"{case}-{precision}-{rank}.npz"

    def write(self, file: Path) -> None:
        """Write the run to a file, atomically."""
        arrays = {f"{step}/{name}": value for step, held in enumerate(self.weights) for name, value in held.items()}
        arrays |= {f"state/{name}": value for name, value in self.state.items()}
        part = file.with_suffix(".part.npz")
        np.savez(part, losses=np.array(self.losses), **arrays)  # type: ignore[arg-type]
        part.rename(file)

    @classmethod
    def read(cls, file: Path) -> RankRun:
        """Read what `write` wrote."""
        parts: dict[str, Buffers] = {}
        with np.load(file) as arrays:
            for key in arrays.files:
                part, _, name = key.partition("/")
                parts.setdefault(part, {})[name] = arrays[key]
        losses, state = parts.pop("losses")[""], parts.pop("state", {})
        return cls(list(parts.values()), losses.tolist(), state)


def train(scheme: Scheme) -> RankRun:
    """Train through a scheme to its end."""
    trainer, done = scheme.replica.trainer, RankRun()
    if scheme.serves:
        scheme.serve()
    else:
        for step in range(STEPS):
            loss = scheme.step(rank_feed(trainer, step, scheme.communicator.rank))
            done.losses.append(loss_of(trainer.executor, loss))
            done.weights.append(scheme.replica.weights())
    scheme.finish()
    done.weights.append(scheme.replica.weights())
    done.state = trainer.state()
    return done


def run(folder: Path, rank: int, backend: str, device: str) -> None:
    """Do one rank's part of every case; write each run once it has ended."""
    selection = configured(backend, device)
    chosen, mode = selection.backend, selection.mode
    meeting = folder / "meeting"
    communicator = open_communicator("gloo", rank=rank, size=RANKS, meeting=meeting, timeout_s=TIMEOUT_S)
    trainers: dict[tuple[str, SGD], Trainer] = {}
    for name, precision in cases(chosen):
        case = SCHEME_CASES[name]
        key = precision, case.optimizer
        if key not in trainers:
            executor = chosen.executor(steady(precision), mode=mode, device=device, precision=precision)
            trainers[key] = chosen.trainer(executor, case.optimizer)
        begin(trainers[key])
        scheme = make_scheme(case.scheme, chosen.replica(trainers[key]), communicator, chosen, **case.settings)
        train(scheme).write(RankRun.file(folder, name, precision, rank))
    communicator.close()


if __name__ == "__main__":
    rank_main(run)
