"""One rank of a framework's own scheme, held to one process: ``python native_rank.py FILE RANK``.

The file says what to do (`Work`); rank 0 writes beside it what was found (`Found`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends import Backend, select
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.gathering import gather
from d5suite.distributed.meeting import meet
from d5suite.distributed.schemes import make_scheme
from d5suite.files import read_json, write_json
from d5suite.levels.distributed import Buffers, Communicator, Replica, Scheme
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.optimizers.settings import SGD, Optimizer
from d5suite.testing.networks import classifier, random_batch
from d5suite.validate.distributed.rules import IN_TURN, ROUNDING
from d5suite.validate.norms import relative_l2

STEPS, RATES = 4, (2.0**-4, 2.0**-4, 2.0**-6, 2.0**-6)
"""Steps of each run, and their learning rates: momentum shows from the second on, a changed rate
from the third."""

OPTIMIZERS: tuple[Optimizer, ...] = (
    SGD(RATES[0], momentum=0.875, nesterov=True, weight_decay=2.0**-10),
    SGD(RATES[0], momentum=0.875, weight_decay=2.0**-10),
    SGD(RATES[0], momentum=0.5, clip_norm=2.0**-2),
)
"""The first two show gradients of a wrong scale, which clipping hides. Of Adam roundings would
show: a bias before BatchNormalization has a gradient of nothing else."""


@dataclass(frozen=True)
class Work:
    """What the ranks do.

    Attributes
    ----------
    backend : str
        ``NAME:MODE``.
    device, precision, scheme : str
    ranks : int
    meeting : str
        A folder that is empty at first.
    """

    backend: str
    device: str
    precision: str
    scheme: str
    ranks: int
    meeting: str


@dataclass
class Found:
    """What they found.

    Attributes
    ----------
    errors : dict of str to float
        Relative errors of the worst tensor, and of losses, by what was compared.
    differ : list of str
        Runs after which ranks had different parameters.
    """

    errors: dict[str, float] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)


def run(work: Work, rank: int) -> Found:
    """Make this rank's part; all ranks return the same."""
    selection = select(work.backend)
    backend = selection.backend
    runtime = backend.load("runtime", selection.mode)
    runtime.configure(threads=1, seed=0, device=work.device)
    folder = Path(work.meeting)
    communicator = open_communicator("gloo", rank=rank, size=work.ranks, meeting=folder)
    leave = meet(
        backend, selection.mode, work.scheme, {}, communicator,
        device=work.device, precision=work.precision, threads=1, local_rank=rank, folder=folder,
    )  # fmt: skip
    found = Found()
    network = classifier()
    for optimizer in OPTIMIZERS:
        nesterov = isinstance(optimizer, SGD) and optimizer.nesterov
        executor = backend.executor(network, mode=selection.mode, device=work.device, precision=work.precision)
        trainer = backend.trainer(executor, optimizer)
        alone = backend.trainer(
            backend.executor(network, mode=selection.mode, device=work.device, precision=work.precision), optimizer
        )
        for turn in ("", ", made again"):
            _compare(
                work,
                f"{optimizer.name}{' nesterov' * nesterov}{' clipped' * bool(optimizer.clip_norm)}{turn}",
                backend,
                trainer,
                alone,
                communicator,
                found,
            )
    leave()
    communicator.close()
    return found


def _compare(
    work: Work, what: str, backend: Backend, trainer: Trainer, alone: Trainer, communicator: Communicator, found: Found
) -> None:
    """Train from the start, through the scheme and in one process on all ranks' batches.

    By an asynchronous scheme rank after rank; the process then updates with each rank's gradient by
    itself, at the weights that the rank has taken.
    """
    network = trainer.executor.network
    for each in (trainer, alone):
        each.executor.load_parameters(network.initializers)
        each.load_state(each.initial_state())
    replica, whole = backend.replica(trainer), backend.replica(alone)
    together = backend.schemes[work.scheme].synchronous
    scheme = make_scheme(work.scheme, replica, communicator, backend, **({} if together else {IN_TURN: True}))
    held = [whole.weights()] * work.ranks
    errors = []
    losses = []
    for step, rate in enumerate(RATES):
        for each in (trainer, alone):
            each.set_learning_rate(rate)
        loss = _step(scheme, network, step, communicator)
        feeds = [_fed(alone, network, step, rank, work.ranks) for rank in range(work.ranks)]
        if together:
            wanted = float(alone.executor.fetch(alone.step(*feeds))["loss"])
            held = [whole.weights()] * work.ranks
        else:
            wanted = _in_turn(whole, held, feeds)
        losses.append((np.mean(gather(communicator, loss)), wanted))
        errors.append(_error(scheme.weights(), held[communicator.rank]))
    scheme.finish()
    ended, right = trainer.executor.parameters(), alone.executor.parameters()
    names = network.parameters
    errors.append(_error({name: ended[name] for name in names}, {name: right[name] for name in names}))
    own, one = np.array(losses).T
    found.errors[f"parameters, {what}"] = max(max(each) for each in gather(communicator, errors))
    found.errors[f"losses, {what}"] = relative_l2(own, one)
    bits = gather(communicator, [ended[name].tobytes().hex() for name in names])
    if any(each != bits[0] for each in bits):
        found.differ.append(what)


def _in_turn(whole: Replica, held: list[Buffers], feeds: Sequence[Any]) -> float:
    """Update with each rank's gradient at the weights that it holds; return the mean loss."""
    losses = []
    for rank, feed in enumerate(feeds):
        served = whole.weights()
        whole.load_weights(held[rank])
        loss, gradients = whole.gradients(feed)
        losses.append(float(whole.trainer.executor.fetch(loss)["loss"]))
        whole.load_weights(served)
        whole.apply(gradients)
        held[rank] = whole.weights()
    return float(np.mean(losses))


def _step(scheme: Scheme, network: Network, step: int, communicator: Communicator) -> float:
    trainer = scheme.replica.trainer
    loss = scheme.step(_fed(trainer, network, step, communicator.rank, communicator.size))
    return float(trainer.executor.fetch(loss)["loss"])


def _fed(trainer: Trainer, network: Network, step: int, rank: int, ranks: int) -> Any:
    images, labels = random_batch(network, seed=ranks * step + rank)
    return trainer.executor.feed({network.input: images, "label": labels})


def _error(found: Buffers, right: Buffers) -> float:
    whole = float(np.sqrt(sum(float(np.vdot(value, value)) for value in right.values())))
    return max(relative_l2(found[name], value, floor=ROUNDING * whole) for name, value in right.items())


def main(file: Path, rank: int) -> None:
    """Do the work of a file."""
    found = run(Work(**read_json(file)), rank)
    if rank == 0:
        write_json(file.with_suffix(".found.json"), asdict(found))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a framework would wait for the other ranks
