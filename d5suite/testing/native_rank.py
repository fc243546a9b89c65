"""One rank of a framework's own scheme, compared with training in one process.

``python -m d5suite.testing.native_rank FOLDER RANK NAME:MODE DEVICE PRECISION SCHEME``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from d5suite.backends import Backend
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.gathering import gather
from d5suite.distributed.meeting import meet
from d5suite.distributed.schemes import make_scheme
from d5suite.files import write_json
from d5suite.levels.distributed import Buffers, Communicator, Replica
from d5suite.levels.network import Native
from d5suite.levels.training import Trainer
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import classifier, fed, loss_of, random_batch
from d5suite.testing.ranks import configured, rank_main
from d5suite.validate.distributed.rules import IN_TURN, ROUNDING
from d5suite.validate.norms import relative_l2

RANKS = 2

FINDINGS = "findings.json"

RATES = (2.0**-4, 2.0**-4, 2.0**-6, 2.0**-6)
"""The learning rate of each step. Momentum shows from the second step, a changed rate from the
third."""

OPTIMIZERS = (
    SGD(RATES[0], momentum=0.875, nesterov=True, weight_decay=2.0**-10),
    SGD(RATES[0], momentum=0.875, weight_decay=2.0**-10),
    SGD(RATES[0], momentum=0.5, clip_norm=2.0**-2),
)
"""The first two show gradients of a wrong scale, which clipping hides. Adam would amplify
roundings: the gradient of a bias before BatchNormalization is nothing else."""


@dataclass
class SchemeErrors:
    """What the ranks found, all of them the same.

    Attributes
    ----------
    errors : dict of str to float
        By comparison: the relative error of the worst tensor, or of the losses.
    differ : list of str
        Runs after which the ranks' parameters differed.
    """

    errors: dict[str, float] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)


def run(folder: Path, rank: int, backend: str, device: str, precision: str, scheme: str) -> None:
    """Do one rank's part; rank 0 writes the findings."""
    selection = configured(backend, device)
    chosen, mode, meeting = selection.backend, selection.mode, folder / "meeting"
    communicator = open_communicator("gloo", rank=rank, size=RANKS, meeting=meeting)
    leave = meet(
        chosen, mode, scheme, {}, communicator,
        device=device, precision=precision, threads=1, local_rank=rank, folder=meeting,
    )  # fmt: skip
    findings = SchemeErrors()
    network = classifier()
    for optimizer in OPTIMIZERS:
        trainer, alone = (
            chosen.trainer(chosen.executor(network, mode=mode, device=device, precision=precision), optimizer)
            for _ in range(2)
        )
        title = f"{optimizer.name}{' nesterov' * optimizer.nesterov}{' clipped' * bool(optimizer.clip_norm)}"
        for what in (title, f"{title}, repeated"):
            _compare(scheme, what, chosen, trainer, alone, communicator, findings)
    leave()
    communicator.close()
    if rank == 0:
        write_json(folder / FINDINGS, asdict(findings))


def _compare(
    name: str,
    what: str,
    backend: Backend,
    trainer: Trainer,
    alone: Trainer,
    communicator: Communicator,
    findings: SchemeErrors,
) -> None:
    """Train from the start, through the scheme and in one process on all ranks' batches.

    An asynchronous scheme takes one rank after the other. The one process then updates once per
    rank, with the gradient at the weights that the rank holds.
    """
    network = trainer.executor.network
    for each in (trainer, alone):
        each.executor.load_parameters(network.initializers)
        each.load_state(each.initial_state())
    replica, whole = backend.replica(trainer), backend.replica(alone)
    together = backend.schemes[name].synchronous
    scheme = make_scheme(name, replica, communicator, backend, **({} if together else {IN_TURN: True}))
    held = [whole.weights()] * RANKS
    errors = []
    losses = []
    for step, rate in enumerate(RATES):
        for each in (trainer, alone):
            each.set_learning_rate(rate)
        loss = loss_of(trainer.executor, scheme.step(_rank_feed(trainer, step, communicator.rank)))
        feeds = [_rank_feed(alone, step, rank) for rank in range(RANKS)]
        if together:
            wanted = loss_of(alone.executor, alone.step(*feeds))
            held = [whole.weights()] * RANKS
        else:
            wanted = _in_turn(whole, held, feeds)
        losses.append((np.mean(gather(communicator, loss)), wanted))
        errors.append(_error(scheme.weights(), held[communicator.rank]))
    scheme.finish()
    ended, right = trainer.executor.parameters(), alone.executor.parameters()
    names = network.parameters
    errors.append(_error({name: ended[name] for name in names}, {name: right[name] for name in names}))
    own, one = np.array(losses).T
    findings.errors[f"parameters, {what}"] = max(max(each) for each in gather(communicator, errors))
    findings.errors[f"losses, {what}"] = relative_l2(own, one)
    bits = gather(communicator, [ended[name].tobytes().hex() for name in names])
    if any(each != bits[0] for each in bits):
        findings.differ.append(what)


def _in_turn(whole: Replica, held: list[Buffers], feeds: Sequence[Native]) -> float:
    """Update with each rank's gradient at the weights that it holds; return the mean loss."""
    losses = []
    for rank, feed in enumerate(feeds):
        served = whole.weights()
        whole.load_weights(held[rank])
        loss, gradients = whole.gradients(feed)
        losses.append(loss_of(whole.trainer.executor, loss))
        whole.load_weights(served)
        whole.apply(gradients)
        held[rank] = whole.weights()
    return float(np.mean(losses))


def _rank_feed(trainer: Trainer, step: int, rank: int) -> Native:
    return fed(trainer.executor, random_batch(trainer.executor.network, seed=RANKS * step + rank))


def _error(found: Buffers, right: Buffers) -> float:
    whole = float(np.sqrt(sum(float(np.vdot(value, value)) for value in right.values())))
    return max(relative_l2(found[name], value, floor=ROUNDING * whole) for name, value in right.items())


if __name__ == "__main__":
    rank_main(run)
