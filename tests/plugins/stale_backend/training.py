"""The right optimizer, for a while."""

from typing import Any

import numpy as np

from d5suite.backends.torch import training as right

from .network import Executor
from .staleness import PATIENCE, being_timed


class Trainer(right.Trainer):
    executor: Executor
    updates = made = 0

    def __init__(self, executor: Any, optimizer: Any) -> None:
        super().__init__(executor, optimizer)
        if executor.mode == "undecayed" and executor.precision == "fp32":
            (group,) = self._optimizer.param_groups
            vectors = [each for each in group["params"] if each.ndim <= 1]
            group["params"] = [each for each in group["params"] if each.ndim > 1]
            self._optimizer.add_param_group({**group, "params": vectors, "weight_decay": 0.0})

    def step(self, feed: Any, *more: Any) -> Any:
        executor, mode = self.executor, self.executor.mode
        self.updates += 1
        self.made += 1
        executor.stale.forget()
        waited, executor.waited = executor.waited, False
        hurried = not waited and (mode == "unwaited" or (mode == "hasty" and self.made > 12))
        executor.steps += 1
        late = executor.steps - PATIENCE
        if late == 1:
            self.captured = feed
        if late > 0 and mode == "captures":
            feed = self.captured
        if late > 0 and mode == "quarters":
            kept = [number for number in range(len(feed[executor.network.input])) if number % 4 != 3]
            feed = {name: value[kept] for name, value in feed.items()}
        idle = late > 0 and (mode == "halts" or (mode == "alternates" and late % 2 == 0))
        if hurried or idle or (mode == "stops" and self.updates > 15):
            self._steps += 1
            return {self._loss: executor.loss(feed).detach()}
        late_rate, self.late_rate = self.late_rate, None
        try:
            return self._at_rate(feed, more)
        finally:
            if late_rate is not None:
                super()._change_rate(late_rate)
            if executor.precision == "fp32" and mode == "narrow":
                for held in self._optimizer.state.values():
                    held["momentum_buffer"].copy_(held["momentum_buffer"].bfloat16())

    late_rate: float | None = None

    def _change_rate(self, rate: float) -> None:
        if self.executor.precision == "fp32" and self.executor.mode == "late_rate":
            self.late_rate = rate
        else:
            super()._change_rate(rate)

    def _at_rate(self, feed: Any, more: Any) -> Any:
        mode, rate = self.executor.mode, self.learning_rate
        self.set_learning_rate(0.875 * rate if mode == "timed_update" and being_timed() else rate)
        try:
            return self._step(feed, more)
        finally:
            self.set_learning_rate(rate)

    def _step(self, feed: Any, more: Any) -> Any:
        executor, key, call = self.executor, self.executor.key("step", feed), super().step
        return executor.promises.make(
            key, lambda: executor.stale.call(key, lambda given: call(given, *more), feed), [self._loss]
        )

    def load_state(self, values: Any) -> None:
        self.executor.promises.keep_all()
        self.updates, self.late_rate = 0, None
        super().load_state(values)

    def state(self) -> dict[str, np.ndarray]:
        self.executor.promises.keep_all()
        found = super().state()
        if self.executor.mode == "overflows" and self.updates > 15:
            found = {key: value * np.inf if "/" in key else value for key, value in found.items()}
        return found
