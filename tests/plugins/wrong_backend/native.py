"""PyTorch's DistributedDataParallel, and an asynchronous scheme, with one mistake."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed

from d5suite.backends.torch import native as right
from d5suite.levels.native import FrameworkScheme


def _added(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum over ranks."""
    reduced: Any = distributed.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[torch.Tensor] = reduced.get_future().then(lambda done: done.value()[0])
    return future


def _lost(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean without the last rank's gradient."""
    buffer = bucket.buffer()
    if distributed.get_rank() == distributed.get_world_size() - 1:
        buffer.zero_()
    buffer /= distributed.get_world_size()
    return _added(state, bucket)


class DistributedDataParallel(right.DistributedDataParallel):
    def _module(self, trainer: Any, settings: Any) -> torch.nn.Module:
        made: Any = super()._module(trainer, settings)
        hook = {"added": _added, "lost": _lost}.get(trainer.executor.mode)
        if hook is not None:
            made.register_comm_hook(None, hook)
        return made

    def __init__(self, replica: Any, settings: Any) -> None:
        trainer = replica.trainer
        if trainer.executor.mode == "remembering" and hasattr(trainer, "ended"):
            trainer.load_state(trainer.ended)
        super().__init__(replica, settings)

    def step(self, feed: Any) -> Any:
        trainer: Any = self._trainer
        mode = trainer.executor.mode
        if mode == "lonely":
            return trainer.step(feed)
        if mode == "constant":
            for group in trainer._optimizer.param_groups:
                group["lr"] = trainer.optimizer.learning_rate
        answer = super().step(feed)
        trainer.ended = trainer.state()
        return answer


class Served(FrameworkScheme):
    """Each rank applies all gradients, rank after rank, and takes the weights after its own."""

    def __init__(self, replica: Any, settings: Any) -> None:
        super().__init__(replica, settings)
        self._served = replica.weights()

    @classmethod
    def meet(cls, meeting: Any, settings: Any) -> Callable[[], None]:
        return right.ProcessGroup.meet(meeting, settings)

    def step(self, feed: Any) -> Any:
        replica: Any = self.replica
        hurried = replica.trainer.executor.mode == "hurried"
        loss, gradients = replica.gradients(feed)
        own, taken = {name: np.array(value) for name, value in gradients.items()}, None
        for rank in range(distributed.get_world_size()):
            sent = {name: torch.from_numpy(value.copy()) for name, value in own.items()}
            for tensor in sent.values():
                distributed.broadcast(tensor, rank)
            replica.load_weights(self._served)
            replica.apply({name: tensor.numpy() for name, tensor in sent.items()})
            self._served = replica.weights()
            if rank == distributed.get_rank() or hurried:
                taken = self._served
        replica.load_weights(taken)
        return loss

    def finish(self) -> None:
        self.replica.load_weights(self._served)


SCHEMES = {**right.SCHEMES, "ddp": DistributedDataParallel, "served": Served}
