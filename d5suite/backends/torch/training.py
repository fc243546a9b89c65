"""Level 2 on PyTorch: `torch.optim.SGD` on an executor's parameters. Imports PyTorch and `d5suite.levels`."""

from __future__ import annotations

import torch

from d5suite.backends.torch.network import Executor
from d5suite.levels import training
from d5suite.levels.network import Native
from d5suite.levels.training import Optimizer


class Trainer(training.Trainer):
    """The native optimizer, whose formulas are the neutral ones (dampening 0)."""

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        _, self._loss = executor.network.require_loss()
        self._optimizer = torch.optim.SGD(
            [executor.tensors[name] for name in executor.network.parameters],
            lr=optimizer.learning_rate,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            nesterov=optimizer.nesterov,
        )
        # The optimizer passes over parameters without a gradient, but weight decay applies to every one.
        self._unused = [(tensor, torch.zeros_like(tensor)) for tensor in executor.unused_parameters]

    def step(self, feed: Native) -> Native:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.executor.loss(feed)
        loss.backward()
        for tensor, gradient in self._unused:
            tensor.grad = gradient
        self._optimizer.step()
        return {self._loss: loss.detach()}
