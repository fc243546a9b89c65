"""d5suite's own schemes on the backend: three ranks follow each scheme's published rule.

The ranks are started once and train through all schemes. Each case compares one scheme with its
rule in NumPy, whose gradients this process computes, and with training in this process alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from d5suite.distributed.communicators import problem
from d5suite.distributed.schemes import SCHEMES, settings_from_dict
from d5suite.levels.distributed import Replica
from d5suite.levels.network import Arrays
from d5suite.optimizers.settings import SGD
from d5suite.testing import scheme_rank
from d5suite.testing.networks import loss_of, steady
from d5suite.testing.ranks import run_ranks
from d5suite.testing.scheme_rank import RANKS, SCHEME_CASES, STEPS, RankRun, begin, cases, rank_feed
from d5suite.testing.subject import Subject, chosen, tensor_errors
from d5suite.validate.distributed.rules import check_weights, expected

AGREEMENT = {"fp64": 1e-10, "fp32": 1e-5}
"""Accepted relative errors of a tensor, by precision."""

pytestmark = pytest.mark.slow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each scheme in the precisions that the backend declares."""
    if "name" in metafunc.fixturenames:
        made = [(name, precision) for name, precision in cases(chosen().backend)]
        metafunc.parametrize(("name", "precision"), made, ids=["-".join(each) for each in made])


@dataclass
class RankRuns:
    """The ranks' results.

    Attributes
    ----------
    folder : Path
        Folder with the ranks' runs.
    failure : str
        Which rank failed, and the end of its log; empty if none.
    """

    folder: Path
    failure: str
    _replicas: dict[tuple[str, SGD], Replica] = field(default_factory=dict)
    _alone: dict[tuple[str, SGD], RankRun] = field(default_factory=dict)

    def runs(self, subject: Subject, name: str, precision: str) -> list[RankRun]:
        """Return all ranks' runs through a scheme."""
        files = [RankRun.file(self.folder, name, precision, rank) for rank in range(RANKS)]
        subject.hold("scheme.meaning", all(file.exists() for file in files), f"{name} in {precision}: {self.failure}")
        return [RankRun.read(file) for file in files]

    def replica(self, subject: Subject, precision: str, optimizer: SGD) -> Replica:
        """Return a replica in this process, at the start of training."""
        key = precision, optimizer
        if key not in self._replicas:
            executor = subject.executor(steady(precision), precision)
            self._replicas[key] = subject.replica(subject.trainer(executor, optimizer))
        begin(self._replicas[key].trainer)
        return self._replicas[key]

    def alone(self, subject: Subject, precision: str, optimizer: SGD) -> RankRun:
        """Train in this process on all ranks' batches, once for all schemes."""
        key = precision, optimizer
        if key not in self._alone:
            self._alone[key] = _alone(self.replica(subject, precision, optimizer))
        return self._alone[key]


@pytest.fixture(scope="module")
def ranks(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> RankRuns:
    """Run the ranks, once for all cases."""
    folder = tmp_path_factory.mktemp("schemes")
    return RankRuns(folder, run_ranks(scheme_rank.__name__, folder, RANKS, subject.selection, subject.device))


def test_ranks_follow_the_schemes_rule(
    subject: Subject, name: str, precision: str, request: pytest.FixtureRequest
) -> None:
    subject.require(steady(precision), gradient=True, level=3)
    lacking = problem("gloo")
    if lacking:
        pytest.skip(lacking)
    ranks: RankRuns = request.getfixturevalue("ranks")  # only now: a backend may lack level 3
    case, runs = SCHEME_CASES[name], ranks.runs(subject, name, precision)
    if SCHEMES[case.scheme].synchronous:
        alone = ranks.alone(subject, precision, case.optimizer)
        _held(subject, f"{name} vs one process", runs, [[each] * RANKS for each in alone.weights], precision)
        mean = np.mean([each.losses for each in runs], axis=0)
        subject.close(
            "scheme.meaning", f"losses, {name} vs one process", mean, np.array(alone.losses), AGREEMENT[precision]
        )
        for rank, each in enumerate(runs):
            what = f"the optimizer's state, {name} vs one process, rank {rank}"
            subject.prove("scheme.meaning", tensor_errors(what, each.state, alone.state, AGREEMENT[precision]))
    if precision == subject.exact:
        replica = ranks.replica(subject, precision, case.optimizer)
        _held(subject, f"{name} vs its rule", runs, _rule(replica, name), precision)
    first, *others = (each.weights[-1] for each in runs)
    for rank, other in enumerate(others, start=1):
        subject.repeated("scheme.finish", f"{name}, rank {rank} at the end", other, first, precision)


def _held(subject: Subject, what: str, runs: list[RankRun], right: list[list[Arrays]], precision: str) -> None:
    for rank, each in enumerate(runs):
        wanted = [weights[rank] for weights in right][-len(each.weights) :]
        subject.prove(
            "scheme.meaning", check_weights(f"{what}, rank {rank}", each.weights, wanted, AGREEMENT[precision])
        )


def _alone(replica: Replica) -> RankRun:
    """Train a replica, at its start, on all ranks' batches; return the run."""
    trainer, done = replica.trainer, RankRun()
    for step in range(STEPS):
        loss = trainer.step(*(rank_feed(trainer, step, rank) for rank in range(RANKS)))
        done.losses.append(loss_of(trainer.executor, loss))
        done.weights.append(replica.weights())
    done.weights.append(done.weights[-1])
    done.state = trainer.state()
    return done


def _rule(replica: Replica, name: str) -> list[list[Arrays]]:
    """Return the weights by the rule, with the trainer's gradients, which other cases prove."""
    trainer, case = replica.trainer, SCHEME_CASES[name]
    start = replica.weights()

    def gradient(weights: Arrays, batch: tuple[int, int]) -> Arrays:
        replica.load_weights({key: value.astype(start[key].dtype) for key, value in weights.items()})
        answer = trainer.gradients(rank_feed(trainer, *batch))
        found = replica.buffers({key: answer[key] for key in replica.names})
        return {key: np.array(value, np.float64) for key, value in found.items()}

    batches = [[(step, rank) for rank in range(RANKS)] for step in range(STEPS)]
    complete = settings_from_dict({"name": case.scheme, **case.settings}).to_dict()
    return [list(each) for each in expected(case.scheme, complete, gradient, start, batches, case.optimizer)]
