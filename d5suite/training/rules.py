"""Optimizers written by users in NumPy, run on any backend.

Imports NumPy and the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.levels.network import Executor, Native


class UpdateRule(ABC):
    """An optimizer in NumPy, in three steps; `RuleTrainer` runs it on any backend.

    The steps are those of Ben-Nun et al., "A modular benchmarking infrastructure for
    high-performance and reproducible deep learning" (IPDPS 2019): input, look-ahead, update.
    A subclass must define `update_rule`. Arrays are float64 in ``fp64``, and float32 in other
    precisions. A rule may keep the arrays.
    """

    def new_input(self) -> None:  # noqa: B027  (most rules have nothing to do here)
        """Prepare for a step."""

    def prepare_param(self, name: str, parameter: np.ndarray) -> np.ndarray | None:
        """Return the point at which to take the gradient (look-ahead); None for the parameter."""
        return None

    @abstractmethod
    def update_rule(self, gradient: np.ndarray, parameter: np.ndarray, name: str) -> np.ndarray:
        """Return the parameter's new value; ``parameter`` comes from `prepare_param`."""


class RuleTrainer:
    """Trains an executor of any backend with a user's `UpdateRule`.

    Every step copies gradients and parameters to the host, and parameters back to the device.

    Parameters
    ----------
    executor : Executor
    rule : UpdateRule
    """

    def __init__(self, executor: Executor, rule: UpdateRule) -> None:
        self.executor = executor
        self.rule = rule

    def step(self, feed: Native, *more: Native) -> dict[str, np.ndarray]:
        """Make one update, as `Trainer.step` does; the loss is a NumPy scalar.

        Raises
        ------
        ConfigurationError
            If the rule returns a value of another shape.
        """
        executor, rule = self.executor, self.rule
        _, loss = executor.network.require_loss()
        names = executor.network.parameters
        rule.new_input()
        held = executor.parameters()
        prepared = {name: rule.prepare_param(name, held[name]) for name in names}
        moved = {name: value for name, value in prepared.items() if value is not None}
        if moved:
            executor.load_parameters(moved)
            held.update(moved)
        total: dict[str, np.ndarray] = {}
        for each in (feed, *more):
            answer = executor.fetch(executor.forward_backward(each))
            for name in (loss, *names):
                total[name] = total[name] + answer[name] if name in total else answer[name]
        count = 1 + len(more)
        updated = {}
        for name in names:
            value = np.asarray(rule.update_rule(total[name] / count, held[name], name))
            if value.shape != held[name].shape:
                raise ConfigurationError(
                    f"the rule returns shape {value.shape} for parameter {name!r}, not {held[name].shape}",
                    where=type(rule).__name__,
                )
            updated[name] = value
        executor.load_parameters(updated)
        return {loss: np.asarray(total[loss] / count)}
