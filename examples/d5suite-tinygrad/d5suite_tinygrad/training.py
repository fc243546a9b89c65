"""Level 2 on tinygrad: the optimizers' formulas on tensors, captured together with the pass.

tinygrad's own optimizers keep their state in float32 and lack RMSProp and Adagrad, so the formulas
of `d5suite.optimizers.settings` are written out here.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
from tinygrad import Tensor

from d5suite.levels import training
from d5suite.levels.network import Arrays, Native
from d5suite.levels.training import LEARNING_RATE, STEPS
from d5suite.optimizers.settings import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from d5suite_tinygrad.network import Executor, Replayed
from d5suite_tinygrad.operators import native


class Trainer(training.Trainer):
    """One update from one or more batches; a captured step reads the rate from memory."""

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self._label, self._loss = executor.network.require_loss()
        self._steps = 0
        for slot in optimizer.slots:
            for name in executor.network.parameters:
                start = np.full(executor.network.initializers[name].shape, optimizer.initial)
                executor.tensors[f"{slot}/{name}"] = native(start, executor.dtype)
        self._rate = native(np.array([optimizer.learning_rate]), executor.dtype)
        self._update = Replayed(self._step, executor.mode)

    def step(self, feed: Native, *more: Native) -> Native:
        feeds = [feed, *more]
        self._steps += 1
        corrections = [np.array([1.0]), np.array([1.0])]
        if isinstance(self.optimizer, Adam):
            corrections = [np.array([1 - b**self._steps]) for b in (self.optimizer.beta1, self.optimizer.beta2)]
        numbers = [native(value, self.executor.dtype) for value in corrections]
        batches = [each[name] for each in feeds for name in (self.executor.network.input, self._label)]
        # One batch given twice is one input, and TinyJit wants each only once.
        run = self._update if len(set(map(id, batches))) == len(batches) else self._step
        (loss,) = run(self._rate, *numbers, *batches)
        return {self._loss: loss}

    def _step(self, rate: Tensor, one: Tensor, two: Tensor, *batches: Tensor) -> list[Tensor]:
        """Return the mean loss; overwrite parameters, statistics and the optimizer's state."""
        executor, names = self.executor, self.executor.network.parameters
        losses, sums, count = [], [], len(batches) // 2
        for images, labels in zip(batches[::2], batches[1::2], strict=True):
            loss, gradients, moved = executor.differentiate(images, labels)
            losses.append(loss.clone())
            sums.append([gradient.clone() for gradient in gradients])
            executor.overwrite([losses[-1], *sums[-1]], moved)
        gradients = [reduce(Tensor.add, each) / count for each in zip(*sums, strict=True)]
        loss = (reduce(Tensor.add, losses) / count).clone()
        new = {}
        for name, gradient in zip(names, self._clipped(gradients), strict=True):
            new.update(self._formula(name, gradient, rate, one, two))
        executor.overwrite([loss], new)
        return [loss]

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        limit, largest = self.optimizer.clip_value, self.optimizer.clip_norm
        if limit:
            gradients = [g.clip(-limit, limit) for g in gradients]
        if largest:
            norm = reduce(Tensor.add, (g.square().sum() for g in gradients)).sqrt()
            gradients = [g * (norm > largest).where(largest / norm, 1.0) for g in gradients]
        return gradients

    def _formula(self, name: str, g: Tensor, rate: Tensor, one: Tensor, two: Tensor) -> dict[str, Tensor]:
        """Return the new parameter and state by name; the corrections are Adam's 1 - b^t."""
        o, p = self.optimizer, self.executor.tensors[name]
        held = {slot: self.executor.tensors[f"{slot}/{name}"] for slot in o.slots}
        rate, one, two = (number.reshape(*[1] * p.ndim) for number in (rate, one, two))
        if isinstance(o, AdamW):
            p = p - rate * o.weight_decay * p
        elif o.weight_decay:
            g = g + o.weight_decay * p
        new = {}
        if isinstance(o, SGD):
            if o.momentum:
                new["velocity"] = o.momentum * held["velocity"] + g
                g = g + o.momentum * new["velocity"] if o.nesterov else new["velocity"]
            p = p - rate * g
        elif isinstance(o, RMSProp):
            new["square"] = o.decay * held["square"] + (1 - o.decay) * g.square()
            change = g / (new["square"] + o.epsilon).sqrt()
            if o.momentum:
                change = new["velocity"] = o.momentum * held["velocity"] + change
            p = p - rate * change
        elif isinstance(o, Adagrad):
            new["square"] = held["square"] + g.square()
            p = p - rate * g / (new["square"].sqrt() + o.epsilon)
        elif isinstance(o, Adam):
            new["moment"] = o.beta1 * held["moment"] + (1 - o.beta1) * g
            new["square"] = o.beta2 * held["square"] + (1 - o.beta2) * g.square()
            p = p - rate * (new["moment"] / one) / ((new["square"] / two).sqrt() + o.epsilon)
        return {name: p, **{f"{slot}/{name}": value for slot, value in new.items()}}

    def _change_rate(self, rate: float) -> None:
        self._rate = native(np.array([rate]), self.executor.dtype)

    def state(self) -> dict[str, np.ndarray]:
        held = {f"{slot}/{name}": None for slot in self.optimizer.slots for name in self.executor.network.parameters}
        return {
            STEPS: np.array(self._steps),
            LEARNING_RATE: np.array(self.learning_rate),
            **self.executor.fetch({key: self.executor.tensors[key] for key in held}),
        }

    def load_state(self, values: Arrays) -> None:
        self.check_state(values)
        self.set_learning_rate(float(values[LEARNING_RATE]))
        self._steps = int(values[STEPS])
        for key, value in values.items():
            if "/" in key:
                self.executor.tensors[key].assign(native(value, self.executor.dtype)).realize()
