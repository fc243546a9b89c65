"""One rank of a framework's own scheme.

``python -m d5suite.testing.native_rank FOLDER RANK NAME:MODE DEVICE PRECISION[,PRECISION] SCHEME``

In each precision it trains with each optimizer twice, and writes each run to the folder. Rank 0
trains in one process, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from d5suite.backends import Backend
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.gathering import gather
from d5suite.distributed.meeting import meet
from d5suite.distributed.schemes import make_scheme
from d5suite.levels.distributed import Buffers, Communicator, Replica
from d5suite.levels.network import Native
from d5suite.levels.training import Trainer
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import classifier, loss_of
from d5suite.testing.ranks import TIMEOUT_S, configured, rank_main
from d5suite.testing.scheme_rank import RankRun, begin, rank_feed
from d5suite.validate.distributed.rules import IN_TURN

RANKS = 2

RATES = (2.0**-4, 2.0**-4, 2.0**-6, 2.0**-6)
"""The learning rate of each step. Momentum shows from the second step, a changed rate from the
third."""

OPTIMIZERS = (
    SGD(RATES[0], momentum=0.875, nesterov=True, weight_decay=2.0**-10),
    SGD(RATES[0], momentum=0.875, weight_decay=2.0**-10),
    SGD(RATES[0], momentum=0.5, clip_norm=2.0**-2),
)
"""The first two show gradients of a wrong scale, which clipping hides. Adam would amplify
roundings: the gradient of a bias before BatchNormalization is pure rounding."""


RUNS = {
    f"{optimizer.name}{' nesterov' * optimizer.nesterov}{' clipped' * bool(optimizer.clip_norm)}": optimizer
    for optimizer in OPTIMIZERS
}
"""The optimizer of each run."""

AGAIN = ("", ", repeated")
"""Each run is made twice, with a new scheme on the same replica."""

ALONE = ", alone"
"""Training in one process, which has as many threads as a rank and so rounds like one."""


def run(folder: Path, rank: int, backend: str, device: str, precisions: str, scheme: str) -> None:
    """Do one rank's part; write each run once it has ended."""
    selection = configured(backend, device)
    chosen, mode, meeting = selection.backend, selection.mode, folder / "meeting"
    communicator = open_communicator("gloo", rank=rank, size=RANKS, meeting=meeting, timeout_s=TIMEOUT_S)
    first, *_ = kinds = precisions.split(",")
    leave = meet(
        chosen, mode, scheme, {}, communicator,
        device=device, precision=first, threads=1, local_rank=rank, folder=meeting,
    )  # fmt: skip
    for precision in kinds:

        def trainer(optimizer: SGD, precision: str = precision) -> Trainer:
            executor = chosen.executor(classifier(), mode=mode, device=device, precision=precision)
            return chosen.trainer(executor, optimizer)

        for what, optimizer in RUNS.items():
            replica = chosen.replica(trainer(optimizer))
            for again in AGAIN:
                done = _train(scheme, chosen, replica, communicator)
                done.write(RankRun.file(folder, what + again, precision, rank))
        for what, optimizer in RUNS.items() if rank == 0 else ():
            runs = _alone(chosen.replica(trainer(optimizer)), chosen.schemes[scheme].synchronous)
            for other, each in enumerate(runs):
                each.write(RankRun.file(folder, what + ALONE, precision, other))
        gather(communicator, None)  # no rank enters the framework's own collectives before rank 0
    leave()
    communicator.close()


def _train(name: str, backend: Backend, replica: Replica, communicator: Communicator) -> RankRun:
    """Train from the start through the scheme; an asynchronous scheme serves rank after rank."""
    trainer = replica.trainer
    begin(trainer)
    settings = {} if backend.schemes[name].synchronous else {IN_TURN: True}
    scheme = make_scheme(name, replica, communicator, backend, **settings)
    done = RankRun()
    for step, rate in enumerate(RATES):
        trainer.set_learning_rate(rate)
        loss = scheme.step(rank_feed(trainer, step, communicator.rank, RANKS))
        done.losses.append(loss_of(trainer.executor, loss))
        done.weights.append(scheme.weights())
    scheme.finish()
    done.weights.append(_parameters(trainer))
    return done


def _alone(replica: Replica, together: bool) -> list[RankRun]:
    """Train from the start in this process, and return the run that each rank must reproduce.

    If not ``together``, each rank's gradient, at the weights that the rank holds, makes an update
    by itself.
    """
    trainer = replica.trainer
    begin(trainer)
    runs = [RankRun() for _ in range(RANKS)]
    held = [replica.weights()] * RANKS
    for step, rate in enumerate(RATES):
        trainer.set_learning_rate(rate)
        feeds = [rank_feed(trainer, step, rank, RANKS) for rank in range(RANKS)]
        if together:
            loss = loss_of(trainer.executor, trainer.step(*feeds))
            held = [replica.weights()] * RANKS
        else:
            loss = _in_turn(replica, held, feeds)
        for each, weights in zip(runs, held, strict=True):
            each.losses.append(loss)
            each.weights.append(weights)
    for each in runs:
        each.weights.append(_parameters(trainer))
    return runs


def _in_turn(whole: Replica, held: list[Buffers], feeds: Sequence[Native]) -> float:
    """Update with each rank's gradient at that rank's weights; return the mean loss."""
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


def _parameters(trainer: Trainer) -> dict[str, np.ndarray]:
    ended = trainer.executor.parameters()
    return {name: ended[name] for name in trainer.executor.network.parameters}


if __name__ == "__main__":
    rank_main(run)
