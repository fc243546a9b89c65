"""Decentralized SGD: each rank mixes its weights with those of its neighbours on a ring.

Imports NumPy and `d5suite.levels` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d5suite.distributed.schemes.common import TRANSFERS, Common, Flat
from d5suite.levels.distributed import SchemeSettings
from d5suite.levels.network import Native


@dataclass(frozen=True)
class GossipSettings(SchemeSettings):
    """D-PSGD: Lian et al., "Can decentralized algorithms outperform centralized ones?" (NIPS 2017).

    Attributes
    ----------
    own : float
        Between 0 and 1: the share of a rank's own weights in the mix. Two neighbours share the rest
        equally, and a single neighbour has all of it: the mixing matrix is doubly stochastic.
    """

    own: float = 1 / 3

    name: ClassVar[str] = "gossip"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.own < 1, f"the share of a rank's own weights lies between 0 and 1, not at {self.own}")

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: each rank sends its weights to its neighbours."""
        return size * min(2, size - 1) * elements * itemsize


class Gossip(Common):
    """Lian et al., algorithm 1: the gradient at a rank's weights updates the mixed weights.

    Weights travel while the gradient is computed. In the end they are averaged over all ranks.
    """

    name = "gossip"
    settings_type = GossipSettings
    settings: GossipSettings
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(TRANSFERS, "a rank sends all its weights in one message")

    _weights: Flat | None = None
    _taken: Sequence[np.ndarray] = ()  # kept: allocating memory costs as much as messages

    def _step(self, feed: Native) -> Native:
        held = self.replica.weights()
        communicator = self.communicator
        neighbours = sorted({(communicator.rank + by) % communicator.size for by in (-1, 1)})
        if self._weights is None:
            self._weights = Flat(held)
            self._taken = [np.empty_like(self._weights.array) for _ in neighbours]
        own, taken = self._weights.fill(held), self._taken
        # Receives first: over slow links, Gloo takes up to twice as long for messages that arrive
        # before their receive is posted.
        pending = [communicator.ireceive(into, source) for into, source in zip(taken, neighbours, strict=True)]
        pending += [communicator.isend(own, to) for to in neighbours]
        loss, gradients = self.replica.gradients(feed)
        with self.exposed():
            for each in pending:
                each.wait()
        own *= self.settings.own
        for other in taken:
            other *= (1 - self.settings.own) / len(taken)
            own += other
        self.replica.load_weights(self._weights.views)
        self.replica.apply(gradients)
        return loss

    def _finish(self) -> None:
        self._average_weights()
