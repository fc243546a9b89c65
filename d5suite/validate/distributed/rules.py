"""The schemes' update rules in NumPy: the reference of every scheme.

A rule computes the weights of all ranks after each step from gradients and the optimizers'
formulas, without messages. The rules follow the papers that `d5suite.distributed.schemes` names and
import nothing from it. Imports NumPy, the contract, `d5suite.optimizers` and the formulas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.levels.network import Arrays
from d5suite.optimizers.settings import Optimizer
from d5suite.validate.check import Check
from d5suite.validate.norms import ROUNDING, relative_errors
from d5suite.validate.training.formulas import OptimizerState, update

GradientFunction = Callable[[Arrays, Any], Arrays]
"""Maps weights and one rank's batch to the gradients of the batch's mean loss, in float64. The
caller does not keep the gradients."""

IN_TURN = "in_turn"
"""The rule of frameworks' own asynchronous schemes, and the setting that makes them follow it."""


@dataclass
class _Rank:
    """Weights and optimizer of a rank or a server."""

    optimizer: Optimizer
    weights: dict[str, np.ndarray]
    state: OptimizerState

    def apply(self, gradients: Arrays) -> None:
        update(self.optimizer, self.weights, gradients, self.state)


@dataclass(frozen=True)
class _Training:
    """The input of a rule; see `expected`."""

    settings: Mapping[str, Any]
    gradient: GradientFunction
    start: Arrays
    batches: Sequence[Sequence[Any]]
    optimizer: Optimizer

    @property
    def size(self) -> int:
        return len(self.batches[0])

    def rank(self) -> _Rank:
        return _Rank(self.optimizer, {name: np.array(v, np.float64) for name, v in self.start.items()}, {})


Weights = list[dict[str, np.ndarray]]
"""Weights by rank."""


def expected(
    scheme: str,
    settings: Mapping[str, Any],
    gradient: GradientFunction,
    start: Arrays,
    batches: Sequence[Sequence[Any]],
    optimizer: Optimizer,
) -> list[Weights]:
    """Return the weights of all ranks after each step, and after the end of the run.

    Parameters
    ----------
    scheme : str
        A scheme's name, or `IN_TURN`.
    settings : mapping
        All settings, from `SchemeSettings.to_dict`. Schemes with a server need a schedule.
    gradient : GradientFunction
    start : mapping of str to numpy.ndarray
        All ranks' initial weights. Top-k and quantisation depend on their order.
    batches : sequence
        Batches by step and rank. A server's are not used.
    optimizer : Optimizer

    Returns
    -------
    list
        One entry per step and one for the end. A server's weights are its weights when the last
        worker has made the step.
    """
    run = _Training(settings, gradient, start, batches, optimizer)
    return list((_RULES[scheme] if run.size > 1 else _synchronous)(run))


def check_weights(name: str, found: Sequence[Arrays], reference: Sequence[Arrays], tolerance: float) -> list[Check]:
    """Compare one rank's weights after each step and at the end with those from `expected`."""
    checks = []
    for step, (own, right) in enumerate(zip(found, reference, strict=True), start=1):
        errors = relative_errors(own, right, ROUNDING)
        when = f"after step {step}" if step < len(reference) else "at the end"
        checks.append(Check.worst(f"weights {when}, {name}", errors, tolerance))
    return checks


def _mean(values: Sequence[Arrays]) -> dict[str, np.ndarray]:
    return {name: np.mean([each[name] for each in values], axis=0) for name in values[0]}


def _copies(weights: Sequence[Arrays]) -> Weights:
    return [{name: value.copy() for name, value in each.items()} for each in weights]


def _synchronous(run: _Training, sent: Callable[[Arrays, int, int], Arrays] = lambda g, *_: g) -> Iterator[Weights]:
    """``w <- update(w, mean of what the ranks send of their gradients at w)``."""
    one = run.rank()
    for step, batches in enumerate(run.batches):
        one.apply(_mean([sent(run.gradient(one.weights, each), rank, step) for rank, each in enumerate(batches)]))
        yield _copies([one.weights] * run.size)
    yield _copies([one.weights] * run.size)


def _model_averaging(run: _Training) -> Iterator[Weights]:
    """``w_i <- update(w_i, g_i(w_i))``; after every k-th step ``w_i <- mean of all w_j``."""
    ranks = [run.rank() for _ in range(run.size)]

    def average() -> None:
        mean = _mean([each.weights for each in ranks])
        for each in ranks:
            each.weights = dict(mean)

    for step, batches in enumerate(run.batches, start=1):
        for each, batch in zip(ranks, batches, strict=True):
            each.apply(run.gradient(each.weights, batch))
        if step % run.settings["every"] == 0:
            average()
        yield _copies([each.weights for each in ranks])
    average()
    yield _copies([each.weights for each in ranks])


def _gossip(run: _Training) -> Iterator[Weights]:
    """``w_i <- update(sum over j of W_ij w_j, g_i(w_i))``; at the end the mean of all."""
    ranks, size, own = [run.rank() for _ in range(run.size)], run.size, run.settings["own"]
    mixing = own * np.eye(size)
    for rank in range(size):
        mixing[rank, (rank - 1) % size] += (1 - own) / 2
        mixing[rank, (rank + 1) % size] += (1 - own) / 2
    for batches in run.batches:
        held = [each.weights for each in ranks]
        gradients = [run.gradient(weights, batch) for weights, batch in zip(held, batches, strict=True)]
        for row, each, gradient in zip(mixing, ranks, gradients, strict=True):
            mixed = {name: sum(w * h[name] for w, h in zip(row, held, strict=True)) for name in run.start}
            each.weights = {name: np.asarray(value) for name, value in mixed.items()}
            each.apply(gradient)
        yield _copies([each.weights for each in ranks])
    yield _copies([_mean([each.weights for each in ranks])] * size)


def _flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([np.asarray(value, np.float64).reshape(-1) for value in arrays.values()])


def _shaped(flat: np.ndarray, like: Arrays) -> dict[str, np.ndarray]:
    parts = np.split(flat, np.cumsum([value.size for value in like.values()])[:-1])
    return {name: part.reshape(value.shape) for part, (name, value) in zip(parts, like.items(), strict=True)}


def _top_k(run: _Training) -> Iterator[Weights]:
    """``u = g_i + m_i``; rank i sends the k largest elements of u; ``m_i <- u`` without these."""
    memory = [np.zeros_like(_flat(run.start)) for _ in range(run.size)]
    count = math.ceil(run.settings["density"] * memory[0].size)

    def sent(gradient: Arrays, rank: int, step: int) -> Arrays:
        wanted = _flat({name: gradient[name] for name in run.start}) + memory[rank]
        kept = np.argsort(-np.abs(wanted), kind="stable")[:count]
        sparse = np.zeros_like(wanted)
        sparse[kept] = wanted[kept]
        memory[rank] = wanted - sparse
        return _shaped(sparse, run.start)

    return _synchronous(run, sent)


def _quantised(run: _Training) -> Iterator[Weights]:
    """``Q(v) = |v|_2 sign(v) l / s`` of each bucket v; the mean of l is ``s |v_i| / |v|_2``."""
    levels, bucket, seed = (run.settings[key] for key in ("levels", "bucket", "seed"))
    dtype = next(iter(run.start.values())).dtype.type  # ranks draw numbers in their gradients' type

    def sent(gradient: Arrays, rank: int, step: int) -> Arrays:
        flat = _flat({name: gradient[name] for name in run.start})
        random = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, rank, step])))
        rounded = []
        for start in range(0, flat.size, bucket):
            v, draws = flat[start : start + bucket], random.random(bucket, dtype)
            norm = np.linalg.norm(v) or 1.0
            exact = levels * np.abs(v) / norm
            level = np.floor(exact) + (draws[: v.size] >= 1 - (exact - np.floor(exact)))
            rounded.append(norm * np.sign(v) * np.minimum(level, levels) / levels)
        return _shaped(np.concatenate(rounded), run.start)

    return _synchronous(run, sent)


def _served(run: _Training) -> Iterator[Weights]:
    """``w <- update(w, g_i(x_i))`` for worker i in the schedule's order, then ``x_i <- w``.

    A worker more than ``bound`` steps ahead of the slowest gets its ``x_i`` when it no longer is.
    """
    schedule, bound = run.settings["schedule"], run.settings.get("bound", math.inf)
    if not schedule:
        raise ConfigurationError(
            "the order of the workers' steps is unknown without a schedule",
            hint=f"Schedule the workers: {run.size - 1} ranks.",
        )
    server, turns = run.rank(), itertools.cycle(schedule)
    held = {worker: _copies([server.weights])[0] for worker in range(1, run.size)}
    clocks, waiting = dict.fromkeys(held, 0), set[int]()
    after: list[dict[int, dict[str, np.ndarray]]] = [{} for _ in run.batches]
    running = set(held)
    while running:
        worker = next(turn for turn in turns if turn in running and turn not in waiting)
        if clocks[worker] < len(run.batches):
            server.apply(run.gradient(held[worker], run.batches[clocks[worker]][worker]))
            clocks[worker] += 1
            waiting.add(worker)
        else:
            running.remove(worker)
        slowest = min((clocks[each] for each in running), default=0)
        for each in [each for each in waiting if clocks[each] - slowest <= bound]:
            waiting.remove(each)
            held[each] = after[clocks[each] - 1][each] = _copies([server.weights])[0]
            after[clocks[each] - 1][0] = held[each]
    for answers in after:
        yield [answers[rank] for rank in range(run.size)]
    yield _copies([server.weights] * run.size)


def _in_turn(run: _Training) -> Iterator[Weights]:
    """``w <- update(w, g_i(x_i))`` for each rank i in order, then ``x_i <- w``; no server."""
    server = run.rank()
    ranks = _copies([server.weights] * run.size)
    for batches in run.batches:
        for rank, batch in enumerate(batches):
            server.apply(run.gradient(ranks[rank], batch))
            ranks[rank] = _copies([server.weights])[0]
        yield _copies(ranks)
    yield _copies([server.weights] * run.size)


_RULES: Mapping[str, Callable[[_Training], Iterator[Weights]]] = {
    "all_reduce": _synchronous,
    "parameter_server": _synchronous,
    "asynchronous": _served,
    "stale_synchronous": _served,
    "model_averaging": _model_averaging,
    "gossip": _gossip,
    "top_k": _top_k,
    "quantised": _quantised,
    IN_TURN: _in_turn,
}
"""Rules by name of the scheme."""
