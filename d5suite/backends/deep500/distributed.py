"""Level 3 on deep500, whose gradients and weights are NumPy arrays.

Imports NumPy, `d5suite.distributed`, `d5suite.levels` and this adapter's `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from d5suite.backends.deep500.training import Trainer
from d5suite.distributed.order import in_turn
from d5suite.levels import distributed
from d5suite.levels.distributed import Buffers, owned
from d5suite.levels.network import Native


class Replica(distributed.Replica):
    """A replica whose buffers are deep500's own arrays; gradients that share memory are copied."""

    trainer: Trainer
    shares_memory = True

    def gradients_across(
        self, feed: Native, means: Callable[[Sequence[str]], Mapping[str, np.ndarray]]
    ) -> tuple[Native, Buffers]:
        """Update each node's parameters before the node runs, if the trainer can update parts."""
        trainer = self.trainer
        if not trainer.updates_parts:
            return super().gradients_across(feed, means)
        network = trainer.executor.trained().network
        before = in_turn(self.names, lambda names, last: trainer.apply_part(self.native(means(names)), last))
        network.before_node = before
        try:
            answer = trainer.gradients(feed)
        finally:
            network.before_node = None
        before(self.names)
        return self.parted(answer)

    def buffers(self, values: Native) -> Buffers:
        return owned(values)

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        return dict(buffers)

    def weights(self) -> Buffers:
        held = self.trainer.executor.trained().network.fetch_tensors(self.names)
        return {name: np.array(value, order="C") for name, value in zip(self.names, held, strict=True)}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        network = self.trainer.executor.trained().network
        for name in self.names:
            network.feed_tensor(name, np.array(weights[name], order="C"))
