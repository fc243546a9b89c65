"""Learning-rate schedules, the same for every backend: the rate of a step is the optimizer's own times a factor.

Lengths are in epochs, so that one schedule serves any batch size. All begin with an optional linear warm-up. Imports
`d5suite.errors`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from d5suite.errors import ConfigurationError


@dataclass(frozen=True)
class Schedule(ABC):
    """What all schedules have.

    Attributes
    ----------
    warmup_epochs : float
        Over so many epochs the factor climbs in equal parts from ``warmup_start`` to 1, which the warm-up's last step
        has (Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2).
    warmup_start : float
        In [0, 1].
    """

    warmup_epochs: float = field(default=0.0, kw_only=True)
    warmup_start: float = field(default=0.0, kw_only=True)

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._require(0 <= self.warmup_epochs < math.inf, f"a warm-up cannot take {self.warmup_epochs} epochs")
        self._require(0 <= self.warmup_start <= 1, f"warmup_start must lie in [0, 1], not {self.warmup_start}")

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise ConfigurationError(otherwise, where=f"schedule {self.name}")

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """What the optimizer's learning rate is multiplied with in a step.

        Parameters
        ----------
        step : int
            From 0.
        steps_per_epoch : int
            Updates per epoch.
        """
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup:
            return 1 - (1 - self.warmup_start) * (warmup - step - 1) / warmup
        return self._after_warmup(step / steps_per_epoch)

    @abstractmethod
    def _after_warmup(self, epoch: float) -> float:
        """The factor at a time in epochs since the start of training, warm-up included."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able settings, with the schedule's name under ``name``."""
        return {"name": self.name, **{each.name: getattr(self, each.name) for each in fields(self)}}


@dataclass(frozen=True)
class Constant(Schedule):
    """The optimizer's own rate throughout, after the warm-up."""

    name: ClassVar[str] = "constant"

    def _after_warmup(self, epoch: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Step(Schedule):
    """The rate times ``factor_each`` from each milestone on (He et al., CVPR 2016: a tenth on plateaus).

    Attributes
    ----------
    milestones : sequence of float
        Epochs since the start, rising.
    factor_each : float
        > 0.
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
    """A factor that falls from 1 after the warm-up to ``final`` at the end of training, and stays there.

    Attributes
    ----------
    epochs : float
        Length of the training, warm-up included.
    final : float
        In [0, 1]; 0 only if training ends there, because no step is made with a rate of 0.
    """

    epochs: float = 90.0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.warmup_epochs < self.epochs < math.inf, f"it cannot fall over {self.epochs} epochs")
        self._require(0 <= self.final <= 1, f"final must lie in [0, 1], not {self.final}")

    def _done(self, epoch: float) -> float:
        return min(1.0, max(0.0, (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs)))


@dataclass(frozen=True)
class Cosine(_Falling):
    """Half a cosine wave, from 1 to ``final`` (Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, no restarts)."""

    name: ClassVar[str] = "cosine"

    def _after_warmup(self, epoch: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * self._done(epoch))) / 2


@dataclass(frozen=True)
class Polynomial(_Falling):
    """``(1 - t)^power``, from 1 to ``final``, t in [0, 1] (You et al., "Large batch training", 2017, power 2).

    Attributes
    ----------
    power : float
        > 0; 1 is a straight line.
    """

    power: float = 2.0

    name: ClassVar[str] = "polynomial"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.power > 0, f"power must be positive, not {self.power}")

    def _after_warmup(self, epoch: float) -> float:
        return float(self.final + (1 - self.final) * (1 - self._done(epoch)) ** self.power)


SCHEDULES: Mapping[str, type[Schedule]] = {each.name: each for each in (Constant, Step, Cosine, Polynomial)}
"""Every schedule by name."""


def schedule_from_dict(settings: Mapping[str, Any]) -> Schedule:
    """Rebuild a schedule from `Schedule.to_dict`.

    Raises
    ------
    ConfigurationError
        For an unknown schedule or setting.
    """
    given = dict(settings)
    name = given.pop("name", None)
    if name not in SCHEDULES:
        raise ConfigurationError(f"unknown schedule {name!r}", hint=f"Known schedules: {', '.join(SCHEDULES)}.")
    known = [each.name for each in fields(SCHEDULES[name])]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ConfigurationError(
            f"schedule {name!r} has no setting {unknown[0]!r}", hint=f"Its settings: {', '.join(known)}."
        )
    return SCHEDULES[name](**given)
