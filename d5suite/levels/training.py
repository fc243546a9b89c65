"""Level 2: a training step with the framework's native optimizer.

The optimizer settings are neutral; their formulas are the definition, and an adapter makes its framework's own
optimizer follow them. In all of them p is a parameter, r the learning rate, and g the gradient of the mean loss over
the batch, with respect to which these happen first, in this order:

1. the gradients of several batches of one step are averaged (gradient accumulation);
2. ``clip_value`` c > 0: every element is cut to [-c, c];
3. ``clip_norm`` c > 0: with n the L2 norm of all gradients together, ``g <- g c / n`` where n > c (Pascanu et al., "On
   the difficulty of training recurrent neural networks", ICML 2013);
4. ``weight_decay`` d > 0: ``g <- g + d p``, for every parameter, BatchNormalization's and biases included, as in He et
   al. (CVPR 2016); `AdamW` decays in another way.

Imports NumPy, `d5suite.errors` and `d5suite.levels.network` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.levels.network import Arrays, Executor, Native

STEPS = "steps"
"""The name of the number of updates made, in `Trainer.state`."""

LEARNING_RATE = "learning_rate"
"""The name of the learning rate in force, in `Trainer.state`."""

LOSS_SCALE = "loss_scale"
"""The name of the scale in force, in `Trainer.state` of a trainer in ``fp16``."""

UNSCALED_STEPS = "steps_at_this_scale"
"""The name of the number of updates since the scale last changed, in `Trainer.state` of a trainer in ``fp16``."""


@dataclass(frozen=True)
class Optimizer:
    """What all optimizers have.

    Attributes
    ----------
    learning_rate : float
        r > 0; `Trainer.set_learning_rate` changes it during training.
    weight_decay : float
        d >= 0.
    clip_norm, clip_value : float
        c >= 0; 0 does not clip.
    """

    learning_rate: float
    weight_decay: float = field(default=0.0, kw_only=True)
    clip_norm: float = field(default=0.0, kw_only=True)
    clip_value: float = field(default=0.0, kw_only=True)

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._require(self.learning_rate > 0, f"the learning rate must be positive, not {self.learning_rate}")
        self._require(self.weight_decay >= 0, f"weight decay must not be negative: {self.weight_decay}")
        self._require(self.clip_norm >= 0, f"clip_norm must not be negative: {self.clip_norm}")
        self._require(self.clip_value >= 0, f"clip_value must not be negative: {self.clip_value}")

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:  # also where a comparison with NaN is false
            raise ConfigurationError(otherwise, where=f"optimizer {self.name}")

    @property
    def slots(self) -> Sequence[str]:
        """Names of the arrays that the optimizer keeps for each parameter."""
        return ()

    @property
    def initial(self) -> float:
        """The value that these arrays start with."""
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-able names and numbers, with the optimizer's name under ``name``."""
        return {"name": self.name, **{each.name: getattr(self, each.name) for each in fields(self)}}


@dataclass(frozen=True)
class LossScaling:
    """The scale of the loss in ``fp16``, which follows the gradients.

    With scale s and k updates since it last changed, a step differentiates s times the loss, and divides the gradients,
    in float32, by s; all else comes afterwards. Then::

        a gradient is not finite:    nothing is updated;  s <- s / factor,  k <- 0
        otherwise:                   the update;          k <- k + 1;  and where k = interval:  s <- s factor,  k <- 0

    Micikevicius et al., "Mixed precision training" (ICLR 2018), section 3.2; the numbers are those of
    ``keras.optimizers.LossScaleOptimizer``. A step without an update does not count as one, and moves running
    statistics like any other.

    Attributes
    ----------
    initial : float
        s at the start.
    factor : float
        A power of 2, so that scaling rounds nothing.
    interval : int
    """

    initial: float = 2.0**15
    factor: float = 2.0
    interval: int = 2000


LOSS_SCALING = LossScaling()
"""That of every trainer."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    With velocity v (zero at the start) and momentum m::

        v <- m v + g
        p <- p - r v               (momentum; plain SGD when m = 0)
        p <- p - r (g + m v)       (Nesterov)

    The learning rate multiplies the velocity instead of entering it, unlike in Sutskever et al., "On the importance of
    initialization and momentum in deep learning" (ICML 2013); the forms differ only when the learning rate changes.

    Attributes
    ----------
    momentum : float
        0 <= m < 1.
    nesterov : bool
        Needs momentum.
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
    """Gradients divided by the root of their running mean square (Tieleman and Hinton, Coursera lecture 6e, 2012).

    With mean square s and velocity v (zero at the start), decay a, momentum m and epsilon e, as Szegedy et al.,
    "Rethinking the inception architecture" (CVPR 2016), trained Inception v3 (a = 0.9, e = 1)::

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

    Duchi et al., "Adaptive subgradient methods" (JMLR 12, 2011). With sum of squares s and epsilon e::

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
    """Adaptive moments (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1).

    With moments m and s (zero at the start), decays b1 and b2, epsilon e, and t the number of the step from 1::

        m <- b1 m + (1 - b1) g
        s <- b2 s + (1 - b2) g^2
        p <- p - r (m / (1 - b1^t)) / (sqrt(s / (1 - b2^t)) + e)

    Attributes
    ----------
    beta1, beta2 : float
        0 <= b < 1.
    epsilon : float
        e > 0, outside the root and after the correction by b2^t.
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
    """Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019).

    The decay d does not enter g; instead, before Adam's update, ``p <- p - r d p``. In the paper's algorithm 2 this is
    the schedule multiplier times d; here the learning rate multiplies it, as in every framework's own.
    """

    weight_decay: float = field(default=0.01, kw_only=True)

    name: ClassVar[str] = "adamw"


OPTIMIZERS: Mapping[str, type[Optimizer]] = {each.name: each for each in (SGD, RMSProp, Adagrad, Adam, AdamW)}
"""Every neutral optimizer by name."""


def optimizer_from_dict(settings: Mapping[str, Any]) -> Optimizer:
    """Rebuild an optimizer from `Optimizer.to_dict`.

    Raises
    ------
    ConfigurationError
        For an unknown optimizer or setting.
    """
    given = dict(settings)
    name = given.pop("name", None)
    if name not in OPTIMIZERS:
        raise ConfigurationError(f"unknown optimizer {name!r}", hint=f"Known optimizers: {', '.join(OPTIMIZERS)}.")
    known = [each.name for each in fields(OPTIMIZERS[name])]
    unknown = [key for key in given if key not in known]
    if unknown or "learning_rate" not in given:
        what = f"has no setting {unknown[0]!r}" if unknown else "needs a learning_rate"
        raise ConfigurationError(f"optimizer {name!r} {what}", hint=f"Its settings: {', '.join(known)}.")
    return OPTIMIZERS[name](**given)


class Trainer(ABC):
    """A training step on an executor's parameters with the framework's native optimizer.

    A constructor takes ``(executor, optimizer)``; the executor belongs to the same adapter. Optimizer state starts at
    `Optimizer.initial`. A step may run forward, backward and update as one compiled unit.

    Attributes
    ----------
    executor : Executor
    optimizer : Optimizer
    learning_rate : float
        The one that the next step uses; changed by `set_learning_rate` only.
    """

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        self.executor = executor
        self.optimizer = optimizer
        self.learning_rate = optimizer.learning_rate

    @abstractmethod
    def step(self, feed: Native, *more: Native) -> Native:
        """One update from one batch in training mode, or from several, whose gradients are averaged.

        Parameters
        ----------
        feed, *more : mapping
            Image and label batches from ``executor.feed``, all of one size. Running statistics move with each.

        Returns
        -------
        mapping
            The loss before the update under `Network.loss`, a scalar, possibly still pending on the device; the mean
            over the batches.
        """

    def set_learning_rate(self, rate: float) -> None:
        """Change the learning rate from the next step on, without compiling anything anew.

        Raises
        ------
        ConfigurationError
            If it is not a positive number.
        """
        if not 0 < rate < float("inf"):
            raise ConfigurationError(f"the learning rate must be a positive number, not {rate}")
        if rate != self.learning_rate:
            self._change_rate(rate)
            self.learning_rate = rate

    @abstractmethod
    def _change_rate(self, rate: float) -> None:
        """Give the native optimizer another rate; `learning_rate` still holds the old one."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Copy out what the optimizer remembers, in neutral form, so that another framework can go on from it.

        Returns
        -------
        dict
            `STEPS`: int64 scalar, the updates made. `LEARNING_RATE`: float64 scalar. In ``fp16`` also `LOSS_SCALE`,
            float64, and `UNSCALED_STEPS`, int64, scalars. And ``SLOT/PARAMETER`` for each of `Optimizer.slots` and each
            of `Network.parameters`: an array of the parameter's neutral shape and layout.
            Where the framework's own form differs (a velocity that contains the learning rate), it is converted, to
            float64 where only that brings the very same bits back on loading.
        """

    @property
    def scaling_at_start(self) -> dict[str, np.ndarray]:
        """The part of `initial_state` that `LossScaling` remembers, scalars by name: empty but in ``fp16``."""
        if self.executor.precision != "fp16":
            return {}
        return {LOSS_SCALE: np.array(LOSS_SCALING.initial), UNSCALED_STEPS: np.array(0)}

    def initial_state(self) -> dict[str, np.ndarray]:
        """What `state` gives before the first step."""
        parameters = {name: self.executor.network.initializers[name] for name in self.executor.network.parameters}
        start = self.optimizer.initial
        held = {
            f"{slot}/{name}": np.full(value.shape, start)
            for slot in self.optimizer.slots
            for name, value in parameters.items()
        }
        return {
            STEPS: np.array(0),
            LEARNING_RATE: np.array(self.optimizer.learning_rate),
            **self.scaling_at_start,
            **held,
        }

    @abstractmethod
    def load_state(self, values: Arrays) -> None:
        """Overwrite what the optimizer remembers, the learning rate included, with another trainer's `state`.

        Raises
        ------
        ConfigurationError
            If it is not a whole state of this optimizer and network; see `check_state`.
        """

    def check_state(self, values: Arrays) -> None:
        """Raise `ConfigurationError` unless the values are a whole state of this optimizer and network."""
        expected: dict[str, tuple[int, ...]] = dict.fromkeys((STEPS, LEARNING_RATE, *self.scaling_at_start), ())
        for slot in self.optimizer.slots:
            for name in self.executor.network.parameters:
                expected[f"{slot}/{name}"] = self.executor.network.initializers[name].shape
        missing = [name for name in expected if name not in values]
        unknown = [name for name in values if name not in expected]
        if missing or unknown:
            what = f"it has no {missing[0]!r}" if missing else f"it has {unknown[0]!r}, which this one has not"
            raise ConfigurationError(f"the state is of another optimizer or network: {what}")
        for name, shape in expected.items():
            if np.shape(values[name]) != shape:
                raise ConfigurationError(f"the state's {name!r} has shape {np.shape(values[name])}, not {shape}")


class UpdateRule(ABC):
    """An optimizer written by a user: deep500's three steps on NumPy arrays, run on any backend by `RuleTrainer`.

    A subclass must define `update_rule`. Arrays are float64 for ``fp64`` and float32 otherwise; they may be kept.
    """

    def new_input(self) -> None:  # noqa: B027  (most rules have nothing to do here)
        """Called before each step."""

    def prepare_param(self, name: str, parameter: np.ndarray) -> np.ndarray | None:
        """The value at which the gradient is taken, or None for the parameter as it is (look-ahead methods)."""
        return None

    @abstractmethod
    def update_rule(self, gradient: np.ndarray, parameter: np.ndarray, name: str) -> np.ndarray:
        """The parameter's new value; ``parameter`` is what `prepare_param` gave, as in deep500."""


class RuleTrainer:
    """Trains an executor of any backend by a user's `UpdateRule`.

    The rule runs in NumPy, so gradients and parameters travel to the host and back in every step.

    Parameters
    ----------
    executor : Executor
    rule : UpdateRule
    """

    def __init__(self, executor: Executor, rule: UpdateRule) -> None:
        self.executor = executor
        self.rule = rule

    def step(self, feed: Native, *more: Native) -> dict[str, np.ndarray]:
        """As `Trainer.step`; the loss is a NumPy scalar.

        Raises
        ------
        ConfigurationError
            If the rule gives a value of another shape.
        """
        executor, rule = self.executor, self.rule
        _, loss = executor.network.require_loss()
        names = executor.network.parameters
        rule.new_input()
        held = executor.parameters()
        prepared = {name: rule.prepare_param(name, held[name]) for name in names}
        looked_at = {name: value for name, value in prepared.items() if value is not None}
        if looked_at:
            executor.load_parameters(looked_at)
            held.update(looked_at)
        total: dict[str, np.ndarray] = {}
        for each in (feed, *more):
            answer = executor.fetch(executor.forward_backward(each))
            for name in (loss, *names):
                total[name] = total[name] + answer[name] if name in total else answer[name]
        count = 1 + len(more)
        updated = {}
        for name in names:
            value = np.asarray(rule.update_rule(total[name] / count, held[name], name))
            if value.shape != held[name].shape:
                raise ConfigurationError(
                    f"the rule gives parameter {name!r} the shape {value.shape}, not {held[name].shape}",
                    where=type(rule).__name__,
                )
            updated[name] = value
        executor.load_parameters(updated)
        return {loss: np.asarray(total[loss] / count)}
