"""Horovod on PyTorch: its all-reduce of gradients during the backward pass.

Imports Horovod, PyTorch, `d5suite.distributed.horovod`, `d5suite.levels` and the adapter's
`distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from d5suite.backends.torch.distributed import Replica
from d5suite.distributed.horovod import HorovodScheme
from d5suite.levels.native import FrameworkScheme, NativeSettings
from d5suite.levels.network import Native


class Horovod(HorovodScheme):
    """As ``hvd.DistributedOptimizer``, a scheme whose hook on each parameter begins its all-reduce.

    That class would replace the optimizer by a new one, without the settings and the state of
    `Trainer`, so the scheme makes its calls itself.
    """

    hvd = hvd
    replica: Replica

    def __init__(self, replica: Replica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        executor = replica.trainer.executor
        self._tensors = {name: executor.tensors[name] for name in replica.names}

    def step(self, feed: Native) -> Native:
        begun: dict[str, tuple[int, Any]] = {}
        hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._begin, begun, name))
            for name, tensor in self._tensors.items()
        ]
        try:
            answer = dict(self.replica.trainer.gradients(feed))
        finally:
            for hook in hooks:
                hook.remove()
        for name, (handle, context) in begun.items():
            averaged, own = self.compression.decompress(hvd.synchronize(handle), context), answer[name]
            answer[name] = averaged if averaged.stride() == own.stride() else own.copy_(averaged)
        self.replica.trainer.apply(answer)
        _, loss = self.replica.trainer.executor.network.require_loss()
        return {loss: answer[loss]}

    def _begin(self, begun: dict[str, tuple[int, Any]], name: str, tensor: torch.Tensor) -> None:
        small, context = self.compression.compress(tensor.grad.contiguous())  # Horovod takes no others
        begun[name] = hvd.allreduce_async_(small, name=name, op=hvd.Average), context


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"horovod": Horovod}
