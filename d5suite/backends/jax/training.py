"""Level 2 on JAX: an Optax optimizer on an executor's parameters.

Imports JAX, Optax, NumPy, `d5suite.levels`, `d5suite.optimizers` and the adapter's `network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from d5suite.backends.jax.network import Executor
from d5suite.levels import training
from d5suite.levels.network import Arrays, Native
from d5suite.levels.profile import OPTIMIZER
from d5suite.optimizers.settings import LOSS_SCALING, SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

_SLOTS: Mapping[str, Mapping[str, str]] = {
    "sgd": {"velocity": "trace"},
    "rmsprop": {"square": "nu", "velocity": "trace"},
    "adagrad": {"square": "sum_of_squares"},
    "adam": {"moment": "mu", "square": "nu"},
    "adamw": {"moment": "mu", "square": "nu"},
}
"""Optax's names of an optimizer's state arrays, by optimizer and neutral slot."""


def scale_by_root_of_sum(settings: Adagrad) -> optax.GradientTransformation:
    """Return Adagrad with epsilon outside the root; ``optax.scale_by_rss`` has it inside."""

    def initial(trained: Any) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(jax.tree.map(lambda p: jnp.full_like(p, settings.initial_square), trained))

    def update(gradients: Any, state: optax.ScaleByRssState, trained: Any = None) -> Any:
        squares = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, gradients)
        directions = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + settings.epsilon), gradients, squares)
        return directions, optax.ScaleByRssState(squares)

    return optax.GradientTransformation(initial, update)


def direction(settings: Optimizer) -> optax.GradientTransformation:
    """Return the transformation of gradients to directions, which the learning rate multiplies."""
    chain = [optax.identity()]
    if settings.clip_value:
        chain.append(optax.clip(settings.clip_value))
    if settings.clip_norm:
        chain.append(optax.clip_by_global_norm(settings.clip_norm))
    decay = [optax.add_decayed_weights(settings.weight_decay)] if settings.weight_decay else []
    if not isinstance(settings, AdamW):
        chain += decay
    if isinstance(settings, RMSProp):
        chain.append(optax.scale_by_rms(settings.decay, settings.epsilon, eps_in_sqrt=True))
    elif isinstance(settings, Adagrad):
        chain.append(scale_by_root_of_sum(settings))
    elif isinstance(settings, Adam):
        chain.append(optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon))
    if isinstance(settings, AdamW):
        chain += decay
    if isinstance(settings, (SGD, RMSProp)) and settings.momentum:
        chain.append(optax.trace(settings.momentum, isinstance(settings, SGD) and settings.nesterov))
    return optax.chain(*chain)


class Scaling(NamedTuple):
    """State of `d5suite.optimizers.settings.LossScaling` as scalars on the device.

    Attributes
    ----------
    scale : jax.Array
        float32.
    kept : jax.Array
        int32, updates since the scale last changed.
    updates : jax.Array
        int32, all updates.
    """

    scale: jax.Array
    kept: jax.Array
    updates: jax.Array

    def after(self, finite: jax.Array) -> Scaling:
        """Return the next state, given whether all gradients are finite."""
        kept = jnp.where(finite, self.kept + 1, 0)
        grows = kept == LOSS_SCALING.interval
        factor = jnp.where(finite, jnp.where(grows, LOSS_SCALING.factor, 1.0), 1 / LOSS_SCALING.factor)
        return Scaling(self.scale * factor, jnp.where(grows, 0, kept), self.updates + finite)


class Trainer(training.Trainer):
    """A trainer with Optax; one program runs the forward and backward passes and the update.

    The program donates the memory of parameters, running statistics and the optimizer's arrays,
    except in mode ``stock``. The learning rate is an argument that stays on the device. In a step
    of several batches, a second program adds up the gradients of all but the last. In ``fp16`` the
    program also updates the loss scale.

    Attributes
    ----------
    slots : tuple
        The optimizer's arrays.
    rate : jax.Array
        The learning rate.
    """

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        _, self._loss = executor.network.require_loss()
        self._direction = direction(optimizer)
        self._scaling = self._placed(LOSS_SCALING.initial, 0, 0) if executor.precision == "fp16" else None
        with executor.scope():
            slots = executor.compiled(self._direction.init)(executor.trained)
            # Committed to the device like the parameters: otherwise the second step recompiles.
            self.slots = jax.device_put(slots, executor.native_device)
        self._change_rate(optimizer.learning_rate)
        self._step = executor.compiled(self._update, donate=(0, 1, 2))
        self._given = executor.compiled(self.move, donate=(0, 1))
        self._add = executor.compiled(self._gather, donate=(1, 3))

    def _placed(self, scale: float, kept: int, updates: int) -> Scaling:
        scaling = Scaling(np.float32(scale), np.int32(kept), np.int32(updates))
        placed: Scaling = jax.device_put(scaling, self.executor.native_device)
        return placed

    def _gather(self, trained: Any, state: Any, inputs: Any, gathered: Any, scaling: Scaling | None) -> Any:
        """Return the next state, and loss and gradients added to those gathered so far."""
        scale = None if scaling is None else scaling.scale
        (loss, state), gradients = self.executor.gradient(trained, state, inputs, scale)
        found = (loss, gradients)
        return state, found if gathered is None else jax.tree.map(jnp.add, gathered, found)

    def _update(
        self,
        trained: Any,
        state: Any,
        slots: Any,
        rate: jax.Array,
        inputs: Any,
        gathered: Any,
        count: float | None,
        scaling: Scaling | None,
    ) -> Any:
        state, found = self._gather(trained, state, inputs, gathered, scaling)
        if gathered is not None:
            found = jax.tree.map(lambda total: total / count, found)
        loss, gradients = found
        updated, moved, _ = self.move(trained, slots, rate, gradients)
        if scaling is not None:
            finite = jnp.all(jnp.array([jnp.isfinite(gradient).all() for gradient in jax.tree.leaves(gradients)]))
            updated, moved = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (updated, moved), (trained, slots)
            )
            scaling = scaling.after(finite)
        return loss, updated, state, moved, scaling

    def move(self, trained: Any, slots: Any, rate: jax.Array, gradients: Any) -> Any:
        """Return the updated parameters and optimizer's arrays, and a number to wait for."""
        with self.executor.scope_of(OPTIMIZER):
            directions, moved = self._direction.update(gradients, slots, trained)
            return jax.tree.map(lambda p, v: p - rate * v, trained, directions), moved, rate * 1

    def step(self, feed: Native, *more: Native) -> Native:
        executor = self.executor
        *earlier, last = (executor.training_inputs(each) for each in (feed, *more))
        gathered = None
        with executor.scope():
            for each in earlier:
                executor.state, gathered = self._add(executor.trained, executor.state, each, gathered, self._scaling)
            count = 1.0 + len(more) if more else None
            loss, executor.trained, executor.state, self.slots, self._scaling = self._step(
                executor.trained, executor.state, self.slots, self.rate, last, gathered, count, self._scaling,
            )  # fmt: skip
        self._steps += 1
        executor.issued(loss)
        return {self._loss: loss}

    def apply(self, gradients: Native) -> None:
        executor = self.executor
        given = {name: gradients[name] for name in executor.trained}
        with executor.scope():
            executor.trained, self.slots, done = self._given(executor.trained, self.slots, self.rate, given)
        self._steps += 1
        executor.issued(done)

    def _change_rate(self, rate: float) -> None:
        executor = self.executor
        with executor.scope():
            self.rate = jax.device_put(np.array(rate, executor.array_type), executor.native_device)

    def _counts(self) -> tuple[int, float, int]:
        if self._scaling is None:
            return self._steps, 1.0, 0
        return int(self._scaling.updates), float(self._scaling.scale), int(self._scaling.kept)

    def _load_counts(self, steps: int, scale: float, unscaled: int) -> None:
        self._steps = steps
        if self._scaling is not None:
            self._scaling = self._placed(scale, unscaled, steps)
        self._replace("count", jax.device_put(np.array(steps, np.int32), self.executor.native_device))

    def _held(self, slot: str) -> Native:
        native = _SLOTS[self.optimizer.name][slot]
        (arrays,) = (getattr(each, native) for each in self.slots if native in each._fields)
        found: Native = arrays
        return found

    def _load_slot(self, slot: str, values: Arrays) -> None:
        executor = self.executor
        with executor.scope():
            arrays = {name: executor.native(name, values[name]) for name in executor.trained}
        self._replace(_SLOTS[self.optimizer.name][slot], arrays)

    def _replace(self, native: str, value: Any) -> None:
        """Replace the field of this name in each of Optax's states that has it."""
        self.slots = tuple(each._replace(**{native: value}) if native in each._fields else each for each in self.slots)
