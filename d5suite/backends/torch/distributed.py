"""Level 3 on PyTorch: gradients and weights as NumPy views of tensors.

Imports PyTorch, NumPy, `d5suite.distributed`, `d5suite.levels` and this adapter's `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from d5suite.backends.torch.training import Trainer
from d5suite.distributed.order import in_turn
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers, owned
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """A replica whose buffers are PyTorch's memory on the CPU, and copies on the host for ``cuda``.

    A buffer's axes are in memory order: N, H, W, C for ``channels_last``.
    """

    trainer: Trainer

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.shares_memory = trainer.executor.device == "cpu"
        tensors = trainer.executor.tensors
        self._tensors = {name: tensors[name] for name in self.names}
        self._axes = {name: _axes(tensor) for name, tensor in self._tensors.items()}
        self._ready: Callable[[str, np.ndarray], None] | None = None
        self._hooked = False

    def gradients_early(self, feed: Native, ready: Callable[[str, np.ndarray], None]) -> tuple[Native, Buffers]:
        """Call ``ready`` within the backward pass, which in mode ``compile`` is one operation."""
        if not self._hooked:
            for name, tensor in self._tensors.items():
                tensor.register_post_accumulate_grad_hook(self._hook(name))
            self._hooked = True
        found: Buffers = {}

        def given(name: str, array: np.ndarray) -> None:
            found[name] = array
            ready(name, array)

        self._ready = given
        try:
            answer = self.trainer.gradients(feed)
        finally:
            self._ready = None
        for name in self.names:
            if name not in found:  # the loss does not depend on it
                given(name, self.view(name, answer[name]))
        return self.parted(answer, found)

    def gradients_across(
        self, feed: Native, means: Callable[[Sequence[str]], Mapping[str, np.ndarray]]
    ) -> tuple[Native, Buffers]:
        """Update each node's parameters before the node runs, if the trainer can update parts."""
        trainer = self.trainer
        if not trainer.updates_parts:
            return super().gradients_across(feed, means)
        before = in_turn(self.names, lambda names, last: trainer.apply_part(self.native(means(names)), last))
        return self.parted(trainer.gradients(feed, before))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def run(tensor: torch.Tensor) -> None:
            if self._ready is not None:
                self._ready(name, self.view(name, tensor.grad))

        return run

    def view(self, name: str, tensor: Any) -> np.ndarray:
        """View a tensor of a parameter's shape and layout as an array; on ``cuda``, copy it."""
        return np.require(tensor.detach().permute(self._axes[name]).cpu().numpy(), requirements=["C", "W"])

    def buffers(self, values: Native) -> Buffers:
        return owned({name: self.view(name, value) for name, value in values.items()})

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        return {name: self._tensor(name, array) for name, array in buffers.items()}

    def _tensor(self, name: str, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array).to(self._tensors[name].device)
        return tensor.permute(tuple(np.argsort(self._axes[name]))) if tensor.ndim else tensor

    def weights(self) -> Buffers:
        return {name: np.array(self.view(name, tensor)) for name, tensor in self._tensors.items()}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(self._tensor(name, weights[name]))
        self.trainer.executor.changed()


def _axes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's axes in the order of its memory."""
    return tuple(sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis)))
