"""Level 2: a training step with the framework's native optimizer.

It follows the formulas in `d5suite.optimizers.settings`. Imports NumPy, `d5suite.errors`,
`d5suite.optimizers` and `d5suite.levels.network` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from d5suite.errors import BackendError, ConfigurationError
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.optimizers.settings import LOSS_SCALING, Optimizer

STEPS = "steps"
"""Key in `Trainer.state`: the number of updates made."""

LEARNING_RATE = "learning_rate"
"""Key in `Trainer.state`: the current learning rate."""

LOSS_SCALE = "loss_scale"
"""Key in `Trainer.state`, in ``fp16``: the current loss scale."""

UNSCALED_STEPS = "steps_at_this_scale"
"""Key in `Trainer.state`, in ``fp16``: updates since the loss scale last changed."""


class Trainer(ABC):
    """A training step on an executor's parameters with the framework's native optimizer.

    The constructor takes ``(executor, optimizer)``, the executor of the same adapter. Optimizer
    state starts at `Optimizer.initial`. Forward, backward and update may be one compiled unit.

    Attributes
    ----------
    executor : Executor
    optimizer : Optimizer
    learning_rate : float
        The rate of the next step; only `set_learning_rate` changes it.
    """

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        self.executor = executor
        self.optimizer = optimizer
        self.learning_rate = optimizer.learning_rate
        self._steps = 0

    @abstractmethod
    def step(self, feed: Native, *more: Native) -> Native:
        """Make one update from the mean gradient over one or more batches, in training mode.

        Parameters
        ----------
        feed, *more : mapping
            Image and label batches from ``executor.feed``, of equal size. Each updates the running
            statistics.

        Returns
        -------
        mapping
            Under `Network.loss`: the mean loss over the batches before the update, a scalar,
            possibly still pending on the device. It keeps its value for as long as the caller holds
            it.
        """

    def gradients(self, feed: Native) -> Native:
        """Return the loss and the gradient of every parameter; nothing is updated (level 3).

        By default `Executor.forward_backward`.
        """
        return self.executor.forward_backward(feed)

    def apply(self, gradients: Native) -> None:
        """Make one update with gradients that other ranks may have changed (level 3).

        ``apply(gradients(feed))`` makes the same update as ``step(feed)``, which is clipped and
        counted alike.

        Parameters
        ----------
        gradients : mapping
            Native tensors for every parameter, as `gradients` returns them. They may be
            overwritten. Not supported in ``fp16``.
        """
        raise BackendError(f"backend {self.executor.backend!r} has no level 3")

    def set_learning_rate(self, rate: float) -> None:
        """Change the learning rate from the next step on, without recompiling.

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
        """Set the native optimizer's rate; `learning_rate` still holds the old one."""

    def state(self) -> dict[str, np.ndarray]:
        """Copy the optimizer's state in neutral form, from which any framework can continue.

        Returns
        -------
        dict
            Scalars `STEPS` (int64), `LEARNING_RATE` (float64) and, in ``fp16``, `LOSS_SCALE`
            (float64) and `UNSCALED_STEPS` (int64). Arrays ``SLOT/PARAMETER`` for each of
            `Optimizer.slots` and `Network.parameters`, in the parameter's neutral shape and layout.
            An optimizer that stores something else than the formula (such as a velocity that
            contains the learning rate) is converted, in float64 if float32 would not restore the
            same bits.
        """
        steps, scale, unscaled = self._counts()
        found = {STEPS: np.array(steps), LEARNING_RATE: np.array(self.learning_rate)}
        if self.scaling_at_start:
            found |= {LOSS_SCALE: np.array(scale), UNSCALED_STEPS: np.array(unscaled)}
        for slot in self.optimizer.slots:
            factor = self._factor(slot)
            for name, value in self.executor.fetch(self._held(slot)).items():
                # In float64: loading multiplies by the factor again.
                found[f"{slot}/{name}"] = value if factor == 1 else value.astype(np.float64) / factor
        return found

    @property
    def scaling_at_start(self) -> dict[str, np.ndarray]:
        """Initial state of the loss scaling, by name; empty except in ``fp16``."""
        if self.executor.precision != "fp16":
            return {}
        return {LOSS_SCALE: np.array(LOSS_SCALING.initial), UNSCALED_STEPS: np.array(0)}

    def initial_state(self) -> dict[str, np.ndarray]:
        """Return the `state` before the first step; its arrays, float64, are read-only."""
        parameters = {name: self.executor.network.initializers[name] for name in self.executor.network.parameters}
        start = np.array(self.optimizer.initial, np.float64)
        held = {  # views of one number: whole arrays of it would be twice as large as the network
            f"{slot}/{name}": np.broadcast_to(start, value.shape)
            for slot in self.optimizer.slots
            for name, value in parameters.items()
        }
        return {
            STEPS: np.array(0),
            LEARNING_RATE: np.array(self.optimizer.learning_rate),
            **self.scaling_at_start,
            **held,
        }

    def load_state(self, values: Arrays) -> None:
        """Overwrite the optimizer's state and learning rate with another trainer's `state`.

        Raises
        ------
        ConfigurationError
            If the state does not fit; see `check_state`.
        """
        self.check_state(values)
        self.set_learning_rate(float(values[LEARNING_RATE]))
        scale, unscaled = values.get(LOSS_SCALE, 1.0), values.get(UNSCALED_STEPS, 0)
        self._load_counts(int(values[STEPS]), float(scale), int(unscaled))
        for slot in self.optimizer.slots:
            factor = self._factor(slot)
            given = {name: np.asarray(values[f"{slot}/{name}"]) for name in self.executor.network.parameters}
            if factor != 1:
                given = {name: value.astype(np.float64) * factor for name, value in given.items()}
            self._load_slot(slot, given)

    # What an adapter provides for `state` and `load_state`

    def _counts(self) -> tuple[int, float, int]:
        """Return the number of updates and, for ``fp16``, `LOSS_SCALE` and `UNSCALED_STEPS`."""
        return self._steps, 1.0, 0

    def _load_counts(self, steps: int, scale: float, unscaled: int) -> None:
        """Overwrite what `_counts` returns; the last two have a meaning in ``fp16`` only."""
        self._steps = steps

    def _factor(self, slot: str) -> float:
        """Return the factor that the native arrays of a slot contain, such as the learning rate."""
        return 1.0

    def _held(self, slot: str) -> Native:
        """Return the native arrays of one of `Optimizer.slots`, by parameter."""
        raise NotImplementedError

    def _load_slot(self, slot: str, values: Arrays) -> None:
        """Overwrite the native arrays of a slot with neutral ones that contain `_factor`."""
        raise NotImplementedError

    def check_state(self, values: Arrays) -> None:
        """Raise `ConfigurationError` unless the values are a complete `state` of this trainer."""
        expected: dict[str, tuple[int, ...]] = dict.fromkeys((STEPS, LEARNING_RATE, *self.scaling_at_start), ())
        for slot in self.optimizer.slots:
            for name in self.executor.network.parameters:
                expected[f"{slot}/{name}"] = self.executor.network.initializers[name].shape
        missing = [name for name in expected if name not in values]
        unknown = [name for name in values if name not in expected]
        if missing or unknown:
            what = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is unknown"
            raise ConfigurationError(f"the state is of another optimizer or network: {what}")
        for name, shape in expected.items():
            if np.shape(values[name]) != shape:
                raise ConfigurationError(f"the state's {name!r} has shape {np.shape(values[name])}, not {shape}")
