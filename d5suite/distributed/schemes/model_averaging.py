"""Local updates and, every k steps, the mean of all ranks' weights.

Imports `d5suite.levels` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from d5suite.distributed.schemes.common import TRANSFERS, Common
from d5suite.levels.distributed import SchemeSettings
from d5suite.levels.network import Native


@dataclass(frozen=True)
class ModelAveragingSettings(SchemeSettings):
    """Local SGD: Stich, "Local SGD converges fast and communicates little" (ICLR 2019).

    Attributes
    ----------
    every : int
        k: weights are averaged after every k-th step. With k = 1 and plain SGD, this equals
        averaging gradients.
    """

    every: int = 1

    name: ClassVar[str] = "model_averaging"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.every >= 1, f"weights are averaged every 1 or more steps, not {self.every}")

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float:
        """See `SchemeSettings.bytes_per_step`."""
        return 2 * elements * itemsize * (size - 1) / self.every


class ModelAveraging(Common):
    """Each rank trains alone; weights are averaged now and then, optimizers' states never."""

    name = "model_averaging"
    collective = "all_reduce"
    settings_type = ModelAveragingSettings
    settings: ModelAveragingSettings
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(TRANSFERS, "the weights are averaged as one array")

    _steps = 0

    def _step(self, feed: Native) -> Native:
        loss = self.replica.trainer.step(feed)
        self._steps += 1
        if self._steps % self.settings.every == 0:
            with self.exposed():
                self._average_weights()
        return loss

    def restart(self) -> None:
        """See `Scheme.restart`."""
        self._steps = 0

    def _finish(self) -> None:
        if self._steps % self.settings.every:
            self._average_weights()
