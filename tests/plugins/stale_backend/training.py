"""The right optimizer, for a while."""

from typing import Any

from d5suite.backends.torch import training as right

from .network import Executor


class Trainer(right.Trainer):
    executor: Executor
    updates = 0

    def step(self, feed: Any, *more: Any) -> Any:
        executor, mode = self.executor, self.executor.mode
        self.updates += 1
        executor.stale.forget()
        waited, executor.waited = executor.waited, False
        if (mode == "unwaited" and not waited) or (mode == "stops" and self.updates > 15):
            self._steps += 1
            return {self._loss: executor.loss(feed).detach()}
        return executor.stale.call(
            executor.key("step", feed), lambda given: super(Trainer, self).step(given, *more), feed
        )

    def load_state(self, values: Any) -> None:
        self.updates = 0
        super().load_state(values)
