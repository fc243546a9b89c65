"""A small model in NumPy, as a trainer and a replica, and the run of a scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from d5suite.levels.distributed import Buffers, Communicator, Replica, Scheme
from d5suite.levels.network import Native
from d5suite.levels.training import LEARNING_RATE, STEPS
from d5suite.optimizers.settings import Optimizer
from d5suite.validate.training.formulas import OptimizerState, update


def start(seed: int = 0, inputs: int = 5, classes: int = 3) -> Buffers:
    draw = np.random.default_rng(seed)
    return {"weight": draw.normal(size=(inputs, classes)), "bias": draw.normal(size=classes), "scale": np.ones(1)}


def batches(steps: int, ranks: int, seed: int = 1, inputs: int = 5, classes: int = 3) -> list[list[Native]]:
    """By step, by rank."""
    draw = np.random.default_rng(seed)
    return [
        [{"x": draw.normal(size=(4, inputs)), "y": draw.integers(classes, size=4)} for _ in range(ranks)]
        for _ in range(steps)
    ]


def gradient(weights: Mapping[str, np.ndarray], batch: Native) -> dict[str, np.ndarray]:
    return loss_and_gradients(weights, batch)[1]


def loss_and_gradients(weights: Mapping[str, np.ndarray], batch: Native) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Softmax cross-entropy of ``scale * (x weight + bias)``."""
    linear = batch["x"].astype(weights["weight"].dtype) @ weights["weight"] + weights["bias"]
    logits = weights["scale"] * linear
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = shifted / shifted.sum(axis=1, keepdims=True)
    rows = np.arange(len(logits))
    loss = -np.log(probabilities[rows, batch["y"]]).mean()
    probabilities[rows, batch["y"]] -= 1
    slope = probabilities / len(logits)
    inner = weights["scale"] * slope
    found = {
        "weight": batch["x"].astype(linear.dtype).T @ inner,
        "bias": inner.sum(axis=0),
        "scale": np.array([(slope * linear).sum()]),
    }
    return loss, {name: value.astype(linear.dtype) for name, value in found.items()}


class ToyTrainer:
    """`d5suite.levels.training.Trainer` with the formula; counts steps as running statistics."""

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, np.ndarray]) -> None:
        self.optimizer, self.learning_rate = optimizer, optimizer.learning_rate
        self.weights = {name: value.copy() for name, value in weights.items()}
        self.statistics = {"seen": np.zeros(1)}
        self.held: OptimizerState = {}
        network = SimpleNamespace(
            parameters=tuple(weights), statistics=("seen",), require_loss=lambda: ("y", "loss"), initializers=weights
        )
        self.executor = SimpleNamespace(
            network=network,
            precision="fp64",
            parameters=lambda: {name: v.copy() for name, v in {**self.weights, **self.statistics}.items()},
            load_parameters=self._load,
        )

    def _load(self, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            (self.statistics if name in self.statistics else self.weights)[name] = value.copy()

    def set_learning_rate(self, rate: float) -> None:
        self.learning_rate = rate

    def gradients(self, feed: Native) -> dict[str, Any]:
        self.statistics["seen"] = self.statistics["seen"] + 1
        loss, gradients = loss_and_gradients(self.weights, feed)
        return {"loss": loss, **gradients}

    def apply(self, gradients: Mapping[str, np.ndarray]) -> None:
        dtypes = {name: value.dtype for name, value in self.weights.items()}
        update(self.optimizer, self.weights, gradients, self.held, learning_rate=self.learning_rate)
        self.weights = {name: value.astype(dtypes[name]) for name, value in self.weights.items()}

    def state(self) -> OptimizerState:
        start = {f"{slot}/{name}": v * 0 for slot in self.optimizer.slots for name, v in self.weights.items()}
        empty = {**start, STEPS: np.array(0), LEARNING_RATE: np.array(self.learning_rate)}
        return {name: value.copy() for name, value in (self.held or empty).items()}

    def load_state(self, values: OptimizerState) -> None:
        self.held = {name: value.copy() for name, value in values.items()}

    def step(self, feed: Native, *more: Native) -> Native:
        answers = [self.gradients(each) for each in (feed, *more)]
        self.apply({name: sum(answer[name] for answer in answers) / len(answers) for name in self.weights})
        return {"loss": np.mean([answer["loss"] for answer in answers])}


class ToyReplica(Replica):
    """Its gradients are overwritten by `apply`, as a framework's may be."""

    trainer: Any

    def buffers(self, values: Native) -> Buffers:
        return dict(values)

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        return buffers

    def apply(self, gradients: Mapping[str, np.ndarray]) -> None:
        self.trainer.apply({name: value.copy() for name, value in gradients.items()})
        for value in gradients.values():
            value[...] = np.nan

    def weights(self) -> Buffers:
        return {name: value.copy() for name, value in self.trainer.weights.items()}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.trainer.weights = {name: np.array(weights[name]) for name in self.names}


def replica(optimizer: Optimizer, weights: Mapping[str, np.ndarray]) -> ToyReplica:
    trainer: Any = ToyTrainer(optimizer, weights)
    return ToyReplica(trainer)


def scheduled(name: str, given: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Settings with which the run is deterministic: each worker in turn."""
    serves = name in ("asynchronous", "stale_synchronous") and ranks > 1
    return {**given, "schedule": list(range(1, ranks))} if serves and "schedule" not in given else dict(given)


def course(make: Callable[[Replica, Communicator], Scheme], work: Sequence[Sequence[Any]], replica: Replica) -> Any:
    """One rank's scheme, and its weights after each step and at the end."""

    def one(communicator: Communicator) -> tuple[Scheme, list[Buffers]]:
        scheme = make(replica, communicator)
        found = []
        if scheme.serves:
            scheme.serve()
        else:
            for step in work:
                scheme.step(step[communicator.rank])
                found.append(replica.weights())
        scheme.finish()
        return scheme, [*found, replica.weights()]

    return one
