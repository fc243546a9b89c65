"""An asynchronous parameter server: rank 0 applies each gradient as it comes, and answers.

Imports NumPy and `d5suite.levels` only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from d5suite.distributed.schemes.common import TRANSFERS, Common, Flat
from d5suite.errors import ConfigurationError
from d5suite.levels.distributed import ANY, SchemeSettings
from d5suite.levels.network import Native

_HEADER, _GRADIENT, _WEIGHTS = 1, 2, 3
HEADER_BYTES = 16
"""Bytes before a gradient: whether the worker continues, and its learning rate."""


@dataclass(frozen=True)
class AsynchronousSettings(SchemeSettings):
    """Downpour SGD: Dean et al., "Large scale distributed deep networks" (NIPS 2012), 4.1.

    Attributes
    ----------
    schedule : sequence of int
        Ranks of the workers whose gradients are applied next, repeated. It makes a run
        deterministic. By default the gradient that arrives first is applied.
    """

    schedule: Sequence[int] = ()

    name: ClassVar[str] = "asynchronous"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(all(rank >= 1 for rank in self.schedule), "schedule entries must be worker ranks, starting at 1")
        object.__setattr__(self, "schedule", tuple(self.schedule))

    def to_dict(self) -> dict[str, Any]:
        """See `NamedSettings.to_dict`."""
        return {**super().to_dict(), "schedule": list(self.schedule)}

    @property
    def allowed(self) -> float:
        """How many steps a worker may be ahead of the slowest one."""
        return math.inf

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`: each worker's gradient, and weights for it."""
        return (size - 1) * (2 * elements * itemsize + HEADER_BYTES) if size > 1 else 0


class Asynchronous(Common):
    """Rank 0 serves; the others compute gradients at the weights that its answers bring.

    The server applies each gradient separately, with its native optimizer and the worker's learning
    rate, and answers with the weights of that moment: others may have changed them since the worker
    took its own.
    """

    name = "asynchronous"
    settings_type = AsynchronousSettings
    settings: AsynchronousSettings
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        TRANSFERS, "a rank's gradients are one message, and the weights in the answer another"
    )

    _flat: Flat | None = None
    _has_server = True

    @property
    def serves(self) -> bool:
        """See `Scheme.serves`."""
        return self.communicator.size > 1 and self.communicator.rank == 0

    def _step(self, feed: Native) -> Native:
        loss, gradients = self.replica.gradients(feed)
        if self._flat is None:
            self._flat = Flat(gradients)
        with self.exposed():
            self.communicator.send(np.array([1, self.replica.trainer.learning_rate]), 0, _HEADER)
            self.communicator.send(self._flat.fill(gradients), 0, _GRADIENT)
            self.communicator.receive(self._flat.array, 0, _WEIGHTS)
        self.replica.load_weights(self._flat.views)
        return loss

    def serve(self) -> None:
        """See `Scheme.serve`."""
        communicator, replica = self.communicator, self.replica
        clocks = dict.fromkeys(range(1, communicator.size), 0)
        waiting: list[int] = []
        turns = itertools.cycle(self._schedule(clocks))
        gradient, weights, header = Flat(held := replica.weights()), Flat(held), np.empty(2)
        while clocks:
            expected = next(turn for turn in turns if turn == ANY or (turn in clocks and turn not in waiting))
            worker = communicator.receive(header, expected, _HEADER)
            if header[0]:
                communicator.receive(gradient.array, worker, _GRADIENT)
                replica.trainer.set_learning_rate(float(header[1]))
                replica.apply(gradient.views)
                clocks[worker] += 1
                waiting.append(worker)
            else:
                del clocks[worker]
            slowest = min(clocks.values(), default=0)
            released = [each for each in waiting if clocks[each] - slowest <= self.settings.allowed]
            if released:
                weights.fill(replica.weights())
            for each in released:
                communicator.send(weights.array, each, _WEIGHTS)
                waiting.remove(each)

    def _schedule(self, workers: dict[int, int]) -> Sequence[int]:
        schedule = self.settings.schedule
        if schedule and set(schedule) != set(workers):
            raise ConfigurationError(
                f"the schedule must name all workers, 1 to {len(workers)}, and no others: {list(schedule)}"
            )
        return schedule or (ANY,)

    def _finish(self) -> None:
        """Take the server's weights."""
        if not self.serves:
            self.communicator.send(np.zeros(2), 0, _HEADER)
        weights = Flat(held := self.replica.weights())
        self.communicator.broadcast(weights.fill(held))
        self.replica.load_weights(weights.views)
