"""Learning-rate schedules, which multiply the optimizer's learning rate by a factor per step.

Lengths are in epochs, so that a schedule serves any batch size. All schedules begin with an
optional linear warm-up. Imports `d5suite.optimizers.named` only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from d5suite.optimizers.named import NamedSettings, from_dict


@dataclass(frozen=True)
class Schedule(NamedSettings, ABC):
    """Settings that all schedules share.

    Attributes
    ----------
    warmup_epochs : float
        Epochs over which the factor rises linearly from ``warmup_start`` to 1, which it reaches at
        the warm-up's last step (Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2).
    warmup_start : float
        Factor at the start of the warm-up, in [0, 1].
    """

    warmup_epochs: float = field(default=0.0, kw_only=True)
    warmup_start: float = field(default=0.0, kw_only=True)

    kind: ClassVar[str] = "schedule"

    def __post_init__(self) -> None:
        self._require(0 <= self.warmup_epochs < math.inf, f"a warm-up cannot take {self.warmup_epochs} epochs")
        self._require(0 <= self.warmup_start <= 1, f"warmup_start must lie in [0, 1], not {self.warmup_start}")

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """Return the factor of the learning rate in a step.

        Parameters
        ----------
        step : int
            Number of the step, from 0.
        steps_per_epoch : int
            Updates per epoch.
        """
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup:
            return 1 - (1 - self.warmup_start) * (warmup - step - 1) / warmup
        return self._after_warmup(step / steps_per_epoch)

    @abstractmethod
    def _after_warmup(self, epoch: float) -> float:
        """Return the factor at a time in epochs since the start of training, warm-up included."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The optimizer's learning rate, unchanged after the warm-up."""

    name: ClassVar[str] = "constant"

    def _after_warmup(self, epoch: float) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay(Schedule):
    """A factor that is multiplied by ``factor_each`` at each milestone (He et al., CVPR 2016).

    Attributes
    ----------
    milestones : sequence of float
        Epochs since the start, rising.
    factor_each : float
        Multiplier per milestone, > 0.
    """

    milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    factor_each: float = 0.1

    name: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "milestones", tuple(self.milestones))
        rising = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        self._require(rising and all(m > 0 for m in self.milestones), f"milestones must rise from 0: {self.milestones}")
        self._require(self.factor_each > 0, f"factor_each must be positive, not {self.factor_each}")

    def _after_warmup(self, epoch: float) -> float:
        return float(self.factor_each ** sum(epoch >= milestone for milestone in self.milestones))


@dataclass(frozen=True)
class _Falling(Schedule):
    """A factor that falls from 1 after the warm-up to ``final`` at the end of training.

    Attributes
    ----------
    epochs : float
        Length of the training, warm-up included.
    final : float
        Factor at the end, in [0, 1]. A step with a learning rate of 0 is rejected, so training must
        end when the factor reaches 0.
    """

    epochs: float = 90.0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.warmup_epochs < self.epochs < math.inf, f"the factor cannot fall over {self.epochs} epochs")
        self._require(0 <= self.final <= 1, f"final must lie in [0, 1], not {self.final}")

    def _done(self, epoch: float) -> float:
        return min(1.0, max(0.0, (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs)))


@dataclass(frozen=True)
class Cosine(_Falling):
    """Half a cosine from 1 to ``final`` (Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5)."""

    name: ClassVar[str] = "cosine"

    def _after_warmup(self, epoch: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * self._done(epoch))) / 2


@dataclass(frozen=True)
class Polynomial(_Falling):
    """``(1 - t)^power`` from 1 to ``final`` (You et al., "Large batch training", 2017: power 2).

    Attributes
    ----------
    power : float
        Exponent, > 0; 1 gives a straight line.
    """

    power: float = 2.0

    name: ClassVar[str] = "polynomial"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.power > 0, f"power must be positive, not {self.power}")

    def _after_warmup(self, epoch: float) -> float:
        return float(self.final + (1 - self.final) * (1 - self._done(epoch)) ** self.power)


SCHEDULES: Mapping[str, type[Schedule]] = {each.name: each for each in (Constant, StepDecay, Cosine, Polynomial)}
"""Schedules by name."""


def schedule_from_dict(settings: Mapping[str, Any]) -> Schedule:
    """Rebuild a schedule from `Schedule.to_dict`.

    Raises
    ------
    ConfigurationError
        For an unknown schedule or setting.
    """
    return from_dict(SCHEDULES, settings)
