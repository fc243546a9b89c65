"""The right optimizer with one mistake."""

from typing import Any

import torch

from d5suite.backends.torch import training as right
from d5suite.backends.torch.network import Executor
from d5suite.optimizers.settings import Optimizer

LATE = 32
"""Steps after which some mistakes begin."""


class Trainer(right.Trainer):
    executor: Any

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        if executor.mode == "dampening":
            for group in self._optimizer.param_groups:
                group["dampening"], group["nesterov"] = 0.5, False
        if executor.mode == "uphill" and executor.precision == "fp32":
            for group in self._optimizer.param_groups:
                group["maximize"] = True

        self._second: Any = None
        self._calls = 0

    def step(self, feed: Any, *more: Any) -> Any:
        self._calls += 1
        if self._calls < 3:
            self._second = feed
        mode = self.executor.mode
        if mode == "stale_step" or (mode == "captures" and self._calls > LATE):
            feed = self._second
        if mode == "captures" and self._calls == LATE:
            self._second = feed
        if self._calls > LATE and (mode == "halts" or (mode == "alternates" and self._calls % 2)):
            self._steps += 1
            return {self._loss: self.executor.loss(feed).detach()}
        if self._calls > LATE and mode == "quarters":
            kept = [number for number in range(len(feed[self.executor.network.input])) if number % 4 != 3]
            feed = {name: value[kept] for name, value in feed.items()}
        answer = self.executor.answered("steps", super().step(feed, *more))
        for held in self._optimizer.state.values():
            if mode == "restless" and self._calls % 24 == 0:
                held["momentum_buffer"].zero_()
            if mode == "narrow" and self.executor.precision == "fp32":
                held["momentum_buffer"].copy_(held["momentum_buffer"].bfloat16())
        return answer

    def _change_rate(self, rate: float) -> None:
        if self.executor.mode == "inside":
            for held in self._optimizer.state.values():
                held["momentum_buffer"] *= self.learning_rate / rate
        super()._change_rate(rate)

    def load_state(self, values: Any) -> None:
        if self.executor.mode == "forgetful":
            values = {name: value * ("/" not in name) for name, value in values.items()}
        super().load_state(values)
        if self.executor.mode == "loaded_view":
            for slot in self.optimizer.slots:
                native = right._SLOTS[self.optimizer.name][slot]
                for name, tensor in zip(self.executor.network.parameters, self._tensors, strict=True):
                    view = torch.from_numpy(values[f"{slot}/{name}"])
                    if view.dtype == tensor.dtype:
                        self._optimizer.state[tensor][native] = view
