"""The right optimizer with one mistake."""

from typing import Any

from d5suite.backends.torch import training as right
from d5suite.backends.torch.network import Executor
from d5suite.levels.training import Optimizer


class Trainer(right.Trainer):
    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        if executor.mode == "dampening":
            for group in self._optimizer.param_groups:
                group["dampening"], group["nesterov"] = 0.5, False
        if executor.mode == "uphill" and executor.precision == "fp32":
            for group in self._optimizer.param_groups:
                group["maximize"] = True

    def load_state(self, values: Any) -> None:
        if self.executor.mode == "forgetful":
            values = {name: value * ("/" not in name) for name, value in values.items()}
        super().load_state(values)
