"""Level 2 on deep500: its reference optimizers on an executor's training graph.

Imports deep500 (through `repairs`), NumPy, `d5suite.levels`, `d5suite.optimizers` and this
adapter's `network`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500.network import Executor
from d5suite.backends.deep500.repairs import deep500, optimizers
from d5suite.levels import training
from d5suite.levels.network import Arrays, Native
from d5suite.optimizers.settings import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

_SLOTS: Mapping[str, Mapping[str, str]] = {
    "sgd": {"velocity": "accumulation"},
    "rmsprop": {"square": "squares", "velocity": "accumulation"},
    "adagrad": {"square": "squares"},
    "adam": {"moment": "first_momentum", "square": "second_momentum"},
    "adamw": {"moment": "first_momentum", "square": "second_momentum"},
}
"""deep500's names of an optimizer's state arrays, by optimizer and neutral slot."""


class PreparedGradients(deep500.GraphExecutor):
    """A training graph's executor that accumulates, clips and decays for deep500's optimizers.

    It takes a sequence of batches, and stores the averaged, clipped and decayed gradients where
    deep500's optimizers read them.

    Parameters
    ----------
    executor : deep500.GraphExecutor
    settings : Optimizer
    """

    def __init__(self, executor: Any, settings: Optimizer) -> None:
        super().__init__(executor.network)
        self._executor = executor
        self._settings = settings
        self._decay = 0.0 if isinstance(settings, AdamW) else settings.weight_decay

    def inference(self, input: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the network's output."""
        answer: dict[str, np.ndarray] = self._executor.inference(input)
        return answer

    def inference_and_backprop(self, input: Sequence[Mapping[str, np.ndarray]], y: str = "loss") -> Any:
        """Return the mean loss. Without a batch, only prepare the stored gradients."""
        network, settings = self.network, self._settings
        answer: Any = self._executor.inference_and_backprop(input[0], y) if input else {y: None}
        if len(input) <= 1 and not (settings.clip_value or settings.clip_norm or self._decay):
            return answer
        names, sources = zip(*network.gradient(y), strict=True)
        loss, gradients = answer[y], network.fetch_tensors(sources)
        for each in input[1:]:
            loss = loss + self._executor.inference_and_backprop(each, y)[y]
            gradients = [total + g for total, g in zip(gradients, network.fetch_tensors(sources), strict=True)]
        if len(input) > 1:
            loss = np.asarray(loss / len(input), answer[y].dtype)
            gradients = [total / len(input) for total in gradients]
        if settings.clip_value:
            gradients = [np.clip(g, -settings.clip_value, settings.clip_value) for g in gradients]
        if settings.clip_norm:
            norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients))
            if norm > settings.clip_norm:
                gradients = [g * (settings.clip_norm / norm) for g in gradients]
        if self._decay:
            gradients = [g + self._decay * p for g, p in zip(gradients, network.fetch_tensors(names), strict=True)]
        for source, gradient in zip(sources, gradients, strict=True):
            network.feed_tensor(source, gradient)
        return {y: loss}


class NesterovOptimizer(optimizers.MomentumOptimizer):
    """deep500's momentum optimizer with a Nesterov step; deep500 has no Nesterov optimizer."""

    def update_rule(self, grad: np.ndarray, old_param: np.ndarray, param_name: str) -> np.ndarray:
        """Return a parameter's new value."""
        super().update_rule(grad, old_param, param_name)  # updates the velocity
        moved: np.ndarray = old_param - self.lr * (grad + self.momentum * self.accumulation[param_name])
        return moved


class RMSPropOptimizer(deep500.UpdateRuleOptimizer):
    """RMSProp, which deep500 lacks."""

    def __init__(self, executor: Any, loss: str, settings: RMSProp) -> None:
        super().__init__(executor, loss)
        self.lr = settings.learning_rate
        self.squares: dict[str, np.ndarray] = {}
        self.accumulation: dict[str, np.ndarray] = {}
        self._settings = settings

    def update_rule(self, grad: np.ndarray, old_param: np.ndarray, param_name: str) -> np.ndarray:
        """Return a parameter's new value."""
        settings = self._settings
        square = settings.decay * self.squares[param_name] + (1 - settings.decay) * grad**2
        step: np.ndarray = grad / np.sqrt(square + settings.epsilon)
        if settings.momentum:
            step = self.accumulation[param_name] = settings.momentum * self.accumulation[param_name] + step
        self.squares[param_name] = square
        return old_param - self.lr * step


class AdamOptimizer(optimizers.AdamOptimizer):
    """deep500's Adam with epsilon outside the root, not inside, and decoupled weight decay."""

    def __init__(self, executor: Any, loss: str, settings: Adam) -> None:
        super().__init__(executor, loss, settings.learning_rate, settings.beta1, settings.beta2, settings.epsilon)
        self._decay = settings.weight_decay if isinstance(settings, AdamW) else 0.0

    def update_rule(self, grad: np.ndarray, old_param: np.ndarray, param_name: str) -> np.ndarray:
        """Return a parameter's new value."""
        first = self.beta1 * self.first_momentum[param_name] + (1 - self.beta1) * grad
        second = self.beta2 * self.second_momentum[param_name] + (1 - self.beta2) * grad**2
        self.first_momentum[param_name], self.second_momentum[param_name] = first, second
        root = np.sqrt(second / (1 - self.beta2**self.t))
        step: np.ndarray = first / (1 - self.beta1**self.t) / (root + self.epsilon)
        if self._decay:
            step = step + self._decay * old_param
        return old_param - self.lr * step


def _native(executor: Any, loss: str, settings: Optimizer) -> Any:
    """Return an optimizer of deep500's kind with the neutral formula, for prepared gradients."""
    rate = settings.learning_rate
    if isinstance(settings, SGD):
        if not settings.momentum:
            return optimizers.GradientDescent(executor, loss, lr=rate)
        kind = NesterovOptimizer if settings.nesterov else optimizers.MomentumOptimizer
        return kind(executor, loss, lr=rate, momentum=settings.momentum)
    if isinstance(settings, RMSProp):
        return RMSPropOptimizer(executor, loss, settings)
    if isinstance(settings, Adagrad):
        return optimizers.AdaGradOptimizer(executor, loss, lr=rate, eps=settings.epsilon)
    assert isinstance(settings, Adam)
    return AdamOptimizer(executor, loss, settings)


class Trainer(training.Trainer):
    """A trainer with deep500's optimizers or, where these differ, classes derived from them."""

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self._label, self._loss = executor.network.require_loss()
        self._optimizer = _native(PreparedGradients(executor.training, optimizer), self._loss, optimizer)
        for slot in optimizer.slots:
            for name, parameter in executor.parameters().items():
                if name in executor.network.parameters:
                    self._held(slot)[name] = np.full_like(parameter, optimizer.initial)

    @np.errstate(all="ignore")
    def step(self, feed: Native, *more: Native) -> Native:
        self.executor.trained()
        names = (*self.executor.network.inputs, self._label)
        loss: Native = self._optimizer.step([{name: each[name] for name in names} for each in (feed, *more)])
        self._steps += 1
        return loss

    def apply(self, gradients: Native) -> None:
        self.apply_part({name: gradients[name] for name in self.executor.network.parameters}, last=True)

    @property
    def updates_parts(self) -> bool:
        """Whether parameters can be updated in parts: clipping by norm needs all gradients."""
        return not self.optimizer.clip_norm

    @np.errstate(all="ignore")
    def apply_part(self, gradients: Native, last: bool) -> None:
        """Update some parameters; count the update if they are its ``last`` ones."""
        network = self.executor.trained().network
        pairs = [(name, f"{name}_grad") for name in gradients]
        network.grad_names = {self._loss: pairs, "loss": pairs}
        for name, source in pairs:
            network.feed_tensor(source, gradients[name])
        made = getattr(self._optimizer, "t", 0)  # Adam's count
        self._optimizer.step([])
        if not last:
            self._optimizer.t = made
        self._steps += last

    def _change_rate(self, rate: float) -> None:
        self._optimizer.lr = rate

    def _load_counts(self, steps: int, scale: float, unscaled: int) -> None:
        self._steps = self._optimizer.t = steps  # t: Adam's count

    def _held(self, slot: str) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = getattr(self._optimizer, _SLOTS[self.optimizer.name][slot])
        return found

    def _load_slot(self, slot: str, values: Arrays) -> None:
        held = self._held(slot)
        held.update({name: np.array(values[name], value.dtype) for name, value in held.items()})
