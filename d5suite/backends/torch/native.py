"""PyTorch's own schemes: DistributedDataParallel and FSDP over Gloo or NCCL.

Imports PyTorch, NumPy, `d5suite.levels`, `d5suite.optimizers` and this adapter's `distributed` and
`training`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from d5suite.backends.torch.distributed import Replica
from d5suite.backends.torch.training import Trainer, native_optimizer
from d5suite.levels.distributed import Buffers
from d5suite.levels.distributed import Replica as AnyReplica
from d5suite.levels.native import FrameworkScheme, Meeting, NativeSettings
from d5suite.levels.network import Native
from d5suite.optimizers.settings import Adam

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for another; d5suite ends the job much earlier if a rank fails."""

_TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}


class ProcessGroup(FrameworkScheme):
    """Base of PyTorch's schemes, which join the ranks in a process group."""

    replica: Replica

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self._trainer = self.replica.trainer

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """Create the process group: ranks meet at a file if they share a folder, else at rank 0."""
        shared = meeting.folder is not None
        where = f"file://{meeting.folder}/torch" if shared else f"tcp://{meeting.addresses()[0]}"
        if meeting.device == "cuda":
            torch.cuda.set_device(meeting.local_rank % torch.cuda.device_count())
        dist.init_process_group(
            _TRANSPORTS[meeting.device], init_method=where, rank=meeting.rank, world_size=meeting.size, timeout=TIMEOUT
        )
        return dist.destroy_process_group


class _Loss(torch.nn.Module):
    """An executor's loss as a module whose parameters are the executor's."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._executor = trainer.executor
        unused = {id(tensor) for tensor in trainer.executor.unused_parameters}
        for index, name in enumerate(trainer.executor.network.parameters):
            if id(trainer.executor.tensors[name]) not in unused:
                self._parameters[str(index)] = trainer.executor.tensors[name]

    def forward(self, feed: Native) -> torch.Tensor:
        """Return the loss of a batch."""
        return self._executor.loss(feed)


_parallel: weakref.WeakKeyDictionary[Trainer, tuple[NativeSettings, Any]] = weakref.WeakKeyDictionary()
"""By trainer: settings and DistributedDataParallel module, whose hooks stay on the parameters."""


class DistributedDataParallel(ProcessGroup):
    """`torch.nn.parallel.DistributedDataParallel` around the loss, with the trainer's own update.

    It averages the gradients during the backward pass.
    """

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        trainer = self._trainer
        if trainer not in _parallel:
            _parallel[trainer] = settings, self._module(trainer, settings)
        made, self._loss = _parallel[trainer]
        assert made.to_dict() == settings.to_dict(), "a replica keeps its settings"

    def _module(self, trainer: Trainer, settings: Any) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(
            _Loss(trainer),
            broadcast_buffers=False,
            bucket_cap_mb=settings.bucket_mib,
            static_graph=settings.static_graph,
            gradient_as_bucket_view=settings.gradients_as_views,
        )

    def step(self, feed: Native) -> Native:
        """See `FrameworkScheme.step`."""
        return self._trainer.step_of(self._loss, feed)


class _ShardedLoss(torch.nn.Module):
    """An executor's loss as a module with parameters of its own, copies of the executor's."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._executor, self._names = trainer.executor, trainer.executor.network.parameters
        for index, name in enumerate(self._names):
            self._parameters[str(index)] = torch.nn.Parameter(trainer.executor.tensors[name].detach().clone())

    def forward(self, feed: Native) -> torch.Tensor:
        """Return the loss of a batch."""
        held = (self._parameters[str(index)] for index in range(len(self._names)))
        return self._executor.loss(feed, dict(zip(self._names, held, strict=True)))


class FullySharded(ProcessGroup):
    """`torch.distributed.fsdp.fully_shard`: each rank updates its shard of every parameter.

    The network is one unit, whose parameters are gathered before the forward pass. The scheme has
    its own shards of the parameters and of the optimizer's state; `finish` gives the executor the
    parameters.
    """

    def __init__(self, replica: AnyReplica, settings: NativeSettings) -> None:
        from torch.distributed.fsdp import fully_shard  # takes a second

        super().__init__(replica, settings)
        executor = self._trainer.executor
        _, self._name = executor.network.require_loss()
        self._again: bool = settings.gather_again  # type: ignore[attr-defined]
        self._loss = _ShardedLoss(self._trainer)
        fully_shard(self._loss, reshard_after_forward=self._again)
        self._shards: list[Any] = list(self._loss.parameters())
        unused = {id(tensor) for tensor in executor.unused_parameters}
        pairs = zip(replica.names, self._shards, strict=True)
        self._unused = [shard for name, shard in pairs if id(executor.tensors[name]) in unused]
        # Of PyTorch's fused optimizer kernels, DTensor (2.13) supports only Adam's.
        fused = executor.mode != "stock" and isinstance(self._trainer.optimizer, Adam)
        self._optimizer = native_optimizer(self._trainer.optimizer, self._shards, fused=fused)

    def step(self, feed: Native) -> Native:
        """See `FrameworkScheme.step`."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(feed)
        loss.backward()
        for shard in self._unused:
            shard.grad = torch.zeros_like(shard)
        self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = self._trainer.learning_rate
        self._optimizer.step()
        return {self._name: loss.detach()}

    def _clip(self) -> None:
        """Clip gradients by value, and by their global norm over the shards of all ranks."""
        optimizer = self._trainer.optimizer
        if not (optimizer.clip_value or optimizer.clip_norm):
            return
        own = [shard.grad.to_local() for shard in self._shards]
        if optimizer.clip_value:
            torch._foreach_clamp_min_(own, -optimizer.clip_value)
            torch._foreach_clamp_max_(own, optimizer.clip_value)
        if optimizer.clip_norm:
            square = torch.stack(torch._foreach_norm(own)).square().sum()
            dist.all_reduce(square)
            torch._foreach_mul_(own, (optimizer.clip_norm / square.sqrt()).clamp(max=1.0))

    def _whole(self) -> dict[str, torch.Tensor]:
        return {
            name: shard.detach().full_tensor() for name, shard in zip(self.replica.names, self._shards, strict=True)
        }

    def weights(self) -> Buffers:
        """See `FrameworkScheme.weights`."""
        return {name: np.array(self.replica.view(name, tensor)) for name, tensor in self._whole().items()}

    def finish(self) -> None:
        """See `FrameworkScheme.finish`."""
        executor = self._trainer.executor
        with torch.no_grad():
            for name, tensor in self._whole().items():
                executor.tensors[name].copy_(tensor)
        executor.changed()

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float | None:
        """See `FrameworkScheme.bytes_per_step`: parameters are gathered, gradients scattered."""
        return (2 + self._again) * elements * itemsize * (size - 1)


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"ddp": DistributedDataParallel, "fsdp": FullySharded}
