"""Settings of optimizers: neutral data, defined by formulas.

An adapter makes the framework's own optimizer follow the formulas, where p is a parameter, r the
learning rate, and g the gradient of the mean loss over the batch, processed in this order:

1. gradient accumulation: the gradients of a step's batches are averaged;
2. ``clip_value`` c > 0: every element is clipped to [-c, c];
3. ``clip_norm`` c > 0: with n the L2 norm of all gradients together, ``g <- g c / n`` if n > c
   (Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013);
4. ``weight_decay`` d > 0: ``g <- g + d p`` for every parameter, including biases and the parameters
   of BatchNormalization, as in He et al. (CVPR 2016); `AdamW` decays differently.

Imports `d5suite.errors` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from d5suite.errors import ConfigurationError
from d5suite.optimizers.named import NamedSettings, from_dict


@dataclass(frozen=True)
class Optimizer(NamedSettings):
    """Settings that all optimizers share.

    Attributes
    ----------
    learning_rate : float
        r > 0; `Trainer.set_learning_rate` changes it during training.
    weight_decay : float
        d >= 0.
    clip_norm, clip_value : float
        c >= 0; 0 disables clipping.
    """

    learning_rate: float
    weight_decay: float = field(default=0.0, kw_only=True)
    clip_norm: float = field(default=0.0, kw_only=True)
    clip_value: float = field(default=0.0, kw_only=True)

    kind: ClassVar[str] = "optimizer"

    def __post_init__(self) -> None:
        rate = self.learning_rate
        self._require(0 < rate < math.inf, f"the learning rate must be positive and finite, not {rate}")
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "bool":
                self._require(isinstance(value, bool), f"{each.name} must be true or false, not {value}")
            else:
                finite = not isinstance(value, bool) and math.isfinite(value)
                self._require(finite, f"{each.name} must be a finite number, not {value}")
        self._require(self.weight_decay >= 0, f"weight decay must not be negative: {self.weight_decay}")
        self._require(self.clip_norm >= 0, f"clip_norm must not be negative: {self.clip_norm}")
        self._require(self.clip_value >= 0, f"clip_value must not be negative: {self.clip_value}")

    @property
    def slots(self) -> Sequence[str]:
        """Names of the optimizer's state arrays per parameter."""
        return ()

    @property
    def initial(self) -> float:
        """The initial value of the state arrays."""
        return 0.0


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling in ``fp16``.

    With scale s, and k updates since s last changed, a step differentiates s times the loss, and
    first divides the gradients by s, in float32. Then::

        a gradient is not finite:  no update;  s <- s / factor,  k <- 0
        otherwise:                 update;     k <- k + 1;  if k = interval:  s <- s factor,  k <- 0

    Micikevicius et al., "Mixed precision training" (ICLR 2018), section 3.2; the numbers are the
    defaults of ``keras.optimizers.LossScaleOptimizer``. A step without an update is not counted,
    but moves running statistics like any other step.

    Attributes
    ----------
    initial : float
        s at the start.
    factor : float
        A power of 2, so that scaling is exact.
    interval : int
        Updates after which s grows.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    interval: int = 2000


LOSS_SCALING = LossScaling()
"""The loss scaling of every trainer."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    With velocity v (zero at the start) and momentum m::

        v <- m v + g
        p <- p - r v               (momentum; plain SGD when m = 0)
        p <- p - r (g + m v)       (Nesterov)

    Here the learning rate multiplies the velocity; in Sutskever et al., "On the importance of
    initialization and momentum in deep learning" (ICML 2013), it enters the velocity. The two forms
    differ only when the learning rate changes.

    Attributes
    ----------
    momentum : float
        0 <= m < 1.
    nesterov : bool
        Whether the update is Nesterov's, which requires a momentum above 0.
    """

    momentum: float = 0.0
    nesterov: bool = False

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.momentum < 1, f"momentum must lie in [0, 1), not {self.momentum}")
        self._require(bool(self.momentum) or not self.nesterov, "Nesterov momentum needs a momentum above 0")

    @property
    def slots(self) -> Sequence[str]:
        """See `Optimizer.slots`."""
        return ("velocity",) if self.momentum else ()


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """Gradients divided by the root of their running mean square.

    Tieleman and Hinton, Coursera lecture 6e, 2012, in the form in which Szegedy et al., "Rethinking
    the inception architecture" (CVPR 2016), trained Inception v3 (a = 0.9, e = 1). With mean square
    s and velocity v (zero at the start), decay a, momentum m and epsilon e::

        s <- a s + (1 - a) g^2
        v <- m v + g / sqrt(s + e)
        p <- p - r v

    Attributes
    ----------
    decay : float
        0 <= a < 1.
    momentum : float
        0 <= m < 1.
    epsilon : float
        e > 0, inside the root.
    """

    decay: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-8

    name: ClassVar[str] = "rmsprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.decay < 1, f"decay must lie in [0, 1), not {self.decay}")
        self._require(0 <= self.momentum < 1, f"momentum must lie in [0, 1), not {self.momentum}")
        self._require(self.epsilon > 0, f"epsilon must be positive, not {self.epsilon}")

    @property
    def slots(self) -> Sequence[str]:
        """See `Optimizer.slots`."""
        return ("square", "velocity") if self.momentum else ("square",)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Gradients divided by the root of the sum of their squares.

    Duchi et al., "Adaptive subgradient methods" (JMLR 12, 2011). With sum of squares s and epsilon
    e::

        s <- s + g^2
        p <- p - r g / (sqrt(s) + e)

    Attributes
    ----------
    epsilon : float
        e > 0, outside the root.
    initial_square : float
        Value of s at the start, at least 0.
    """

    epsilon: float = 1e-10
    initial_square: float = 0.0

    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.epsilon > 0, f"epsilon must be positive, not {self.epsilon}")
        self._require(self.initial_square >= 0, f"initial_square must not be negative: {self.initial_square}")

    @property
    def slots(self) -> Sequence[str]:
        """See `Optimizer.slots`."""
        return ("square",)

    @property
    def initial(self) -> float:
        """See `Optimizer.initial`."""
        return self.initial_square


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adaptive moments.

    Kingma and Ba, "Adam: a method for stochastic optimization" (ICLR 2015), algorithm 1. With
    moments m and s (zero at the start), decays b1 and b2, epsilon e, and t the step from 1::

        m <- b1 m + (1 - b1) g
        s <- b2 s + (1 - b2) g^2
        p <- p - r (m / (1 - b1^t)) / (sqrt(s / (1 - b2^t)) + e)

    Attributes
    ----------
    beta1, beta2 : float
        0 <= b < 1.
    epsilon : float
        e > 0, outside the root, after the bias correction.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            self._require(0 <= value < 1, f"{name} must lie in [0, 1), not {value}")
        self._require(self.epsilon > 0, f"epsilon must be positive, not {self.epsilon}")

    @property
    def slots(self) -> Sequence[str]:
        """See `Optimizer.slots`."""
        return ("moment", "square")


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay.

    Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019). The decay d does not
    enter g; ``p <- p - r d p`` precedes Adam's update. The paper's algorithm 2 multiplies d by the
    schedule's factor, without r; the frameworks multiply by r, and so does this optimizer.
    """

    weight_decay: float = field(default=0.01, kw_only=True)

    name: ClassVar[str] = "adamw"


OPTIMIZERS: Mapping[str, type[Optimizer]] = {each.name: each for each in (SGD, RMSProp, Adagrad, Adam, AdamW)}
"""Optimizers by name."""


def optimizer_from_dict(settings: Mapping[str, Any]) -> Optimizer:
    """Rebuild an optimizer from `Optimizer.to_dict`.

    Raises
    ------
    ConfigurationError
        For an unknown optimizer or setting.
    """
    if settings.get("name") in OPTIMIZERS and "learning_rate" not in settings:
        raise ConfigurationError(f"optimizer {settings['name']!r} needs a learning_rate")
    return from_dict(OPTIMIZERS, settings)
