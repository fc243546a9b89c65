"""The right optimizer, with dampening on request."""

from d5suite.backends.torch import training as right
from d5suite.backends.torch.network import Executor
from d5suite.levels.training import Optimizer


class Trainer(right.Trainer):
    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        if executor.mode == "dampening":
            for group in self._optimizer.param_groups:
                group["dampening"], group["nesterov"] = 0.5, False
