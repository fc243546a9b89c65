"""Level 2 in TensorFlow: a training step with TensorFlow's native optimizer kernels.

Imports TensorFlow, NumPy, `d5suite.levels` and this adapter's `network` and `operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.network import Executor
from d5suite.backends.tensorflow.operators.context import native_device
from d5suite.levels import training as levels
from d5suite.levels.network import Arrays, Native
from d5suite.levels.profile import OPTIMIZER
from d5suite.optimizers.settings import LOSS_SCALING, SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp


class Trainer(levels.Trainer):
    """A trainer that runs gradients and optimizer kernels ``ResourceApply...`` in one function.

    Mode ``stock`` computes the neutral formulas in assignments instead, as ``tf.keras.optimizers``
    do: TensorFlow offers the kernels in ``tf.raw_ops`` only.

    Two of the kernels' formulas differ from the neutral ones and are corrected here. RMSProp's
    velocity contains the learning rate, so it is rescaled when the rate changes. Adam's epsilon is
    added to the root before the correction by b2^t ("epsilon hat" in section 2 of the paper), so
    the kernel is given an epsilon that changes with t. ``tf.keras.optimizers`` differ more: SGD's
    velocity contains the learning rate, too.
    """

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        _, self._loss = executor.network.require_loss()
        self._scales = executor.precision == "fp16"
        # RMSProp's kernel writes a velocity even if momentum is 0.
        plain = executor.mode == "stock"
        slots = ("square", "velocity") if isinstance(optimizer, RMSProp) and not plain else optimizer.slots
        stored = tf.float64 if executor.precision == "fp64" else tf.float32
        with tf.device(native_device(executor.device)):
            self._slots = {
                slot: [
                    tf.Variable(tf.fill(p.shape, tf.constant(optimizer.initial, p.dtype)), trainable=False)
                    for p in executor.trained
                ]
                for slot in slots
            }
            self._rate = tf.Variable(tf.constant(optimizer.learning_rate, stored), trainable=False)
            self._is_counted = self._scales or isinstance(optimizer, Adam)
            if self._is_counted:  # fp16 skips steps, and Adam's formula contains their number
                self._count = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            if self._scales:
                self._scale = tf.Variable(tf.constant(LOSS_SCALING.initial, stored), trainable=False)
                self._unscaled = tf.Variable(tf.constant(0, tf.int64), trainable=False)
        self._scaled = ["velocity"] if isinstance(optimizer, RMSProp) and optimizer.momentum and not plain else []
        self._step = executor.compiled(self._update)
        self._given = executor.compiled(self._update_given)

    def step(self, feed: Native, *more: Native) -> Native:
        loss = self._step(*(self.executor.training_inputs(each) for each in (feed, *more)))
        self._steps += 1
        return {self._loss: loss}

    def apply(self, gradients: Native) -> None:
        self._given([gradients[name] for name in self.executor.network.parameters])
        self._steps += 1

    def _update_given(self, gradients: list[Any]) -> None:
        with self._scope():
            self._apply(self._clipped(gradients))

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Return the context of the update."""
        with self.executor.scope(OPTIMIZER), tf.device(native_device(self.executor.device)):
            yield

    def stepping(self, change: Callable[[list[Any]], list[Any]]) -> Callable[[Native], Any]:
        """Return a compiled step on one batch that applies ``change`` to the gradients.

        The step updates with the changed gradients and returns the loss. ``change`` takes and
        returns gradients in the order of the network's parameters. Not for ``fp16``.
        """

        def update(inputs: list[Any]) -> Any:
            loss, gradients = self.executor.loss_and_gradients(inputs)
            self._update_given(change(gradients))
            return loss

        compiled = self.executor.compiled(update)

        def step(feed: Native) -> Any:
            loss = compiled(self.executor.training_inputs(feed))
            self._steps += 1
            return loss

        return step

    def _update(self, inputs: list[Any], *more: list[Any]) -> Any:
        scale = self._scale.read_value() if self._scales else None
        loss, gradients = self.executor.loss_and_gradients(inputs, scale)
        for batch in more:
            with tf.control_dependencies([loss, *gradients]):  # one batch at a time, within the memory of one
                further, added = self.executor.loss_and_gradients(batch, scale)
            loss = loss + further
            gradients = [total + gradient for total, gradient in zip(gradients, added, strict=True)]
        if more:
            loss = loss / (1 + len(more))
            gradients = [gradient / (1 + len(more)) for gradient in gradients]
        if not self._scales:
            self._update_given(gradients)
            return loss
        with self._scope():
            self._apply_if_finite([gradient / scale for gradient in gradients], scale)
        return loss

    def _apply_if_finite(self, gradients: list[Any], scale: Any) -> None:
        """Update unless a gradient is not finite, and set the next scale (`LossScaling`)."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        tf.cond(finite, lambda: self._apply(self._clipped(gradients)), lambda: None)
        steps = tf.where(finite, self._unscaled + 1, tf.zeros_like(self._unscaled))
        grows = steps == LOSS_SCALING.interval
        self._unscaled.assign(tf.where(grows, tf.zeros_like(steps), steps))
        larger = tf.where(grows, scale * LOSS_SCALING.factor, scale)
        self._scale.assign(tf.where(finite, larger, scale / LOSS_SCALING.factor))

    def _clipped(self, gradients: list[Any]) -> list[Any]:
        limit = self.optimizer.clip_value
        if limit:
            gradients = [tf.clip_by_value(gradient, -limit, limit) for gradient in gradients]
        limit = self.optimizer.clip_norm
        if limit:
            scale = tf.minimum(limit / tf.linalg.global_norm(gradients), 1)
            gradients = [gradient * scale for gradient in gradients]
        return gradients

    def _apply(self, gradients: list[Any]) -> None:
        settings = self.optimizer
        rate = self._rate.read_value()
        if self._is_counted:
            self._count.assign_add(1)
        plain = self.executor.mode == "stock"
        kernel = None if plain else self._kernel(rate)
        decoupled = rate * settings.weight_decay if isinstance(settings, AdamW) and settings.weight_decay else None
        for i, (parameter, gradient) in enumerate(zip(self.executor.trained, gradients, strict=True)):
            if decoupled is not None:
                parameter.assign_sub(decoupled * parameter)
            elif settings.weight_decay:
                gradient = gradient + settings.weight_decay * parameter
            held = [variables[i] for variables in self._slots.values()]
            if kernel is None:
                parameter.assign_sub(rate * self._direction(gradient, *held))
            else:
                kernel(parameter.handle, gradient, *[variable.handle for variable in held])

    def _direction(self, gradient: Any, *held: Any) -> Any:
        """Return the update before the learning rate is applied, and update the slots."""
        settings = self.optimizer
        if isinstance(settings, Adam):
            moment, square = held
            moment.assign(settings.beta1 * moment + (1 - settings.beta1) * gradient)
            square.assign(settings.beta2 * square + (1 - settings.beta2) * tf.square(gradient))
            step = tf.cast(self._count.read_value(), tf.float64)  # 1 - b2^t loses digits in float32
            first, second = (
                tf.cast(1 - tf.pow(tf.constant(beta, tf.float64), step), gradient.dtype)
                for beta in (settings.beta1, settings.beta2)
            )
            return moment / first / (tf.sqrt(square / second) + settings.epsilon)
        if isinstance(settings, Adagrad):
            (square,) = held
            square.assign_add(tf.square(gradient))
            return gradient / (tf.sqrt(square) + settings.epsilon)
        if isinstance(settings, RMSProp):
            square, held = held[0], held[1:]
            square.assign(settings.decay * square + (1 - settings.decay) * tf.square(gradient))
            gradient = gradient / tf.sqrt(square + settings.epsilon)
        assert isinstance(settings, (SGD, RMSProp))
        if not held:
            return gradient
        (velocity,) = held
        velocity.assign(settings.momentum * velocity + gradient)
        if isinstance(settings, SGD) and settings.nesterov:
            return gradient + settings.momentum * velocity
        return tf.convert_to_tensor(velocity)

    def _kernel(self, rate: Any) -> Callable[..., None]:
        """Return the update of one parameter, given its handle, gradient and slots' handles."""
        settings, kernels = self.optimizer, tf.raw_ops

        def scalar(value: float) -> Any:
            return tf.constant(value, rate.dtype)

        if isinstance(settings, SGD):
            if not settings.momentum:
                return lambda p, g: kernels.ResourceApplyGradientDescent(var=p, alpha=rate, delta=g)
            momentum, nesterov = scalar(settings.momentum), settings.nesterov
            return lambda p, g, v: kernels.ResourceApplyMomentum(
                var=p, accum=v, lr=rate, grad=g, momentum=momentum, use_nesterov=nesterov
            )
        if isinstance(settings, RMSProp):
            decay, momentum, epsilon = (scalar(x) for x in (settings.decay, settings.momentum, settings.epsilon))
            return lambda p, g, s, v: kernels.ResourceApplyRMSProp(
                var=p, ms=s, mom=v, lr=rate, rho=decay, momentum=momentum, epsilon=epsilon, grad=g
            )
        if isinstance(settings, Adagrad):
            epsilon = scalar(settings.epsilon)
            return lambda p, g, s: kernels.ResourceApplyAdagradV2(var=p, accum=s, lr=rate, epsilon=epsilon, grad=g)
        assert isinstance(settings, Adam)
        # Rate and epsilon hold the bias corrections, in float64: 1 - b2^t loses digits in float32.
        step = tf.cast(self._count.read_value(), tf.float64)
        root = tf.sqrt(1 - tf.pow(tf.constant(settings.beta2, tf.float64), step))
        corrected = rate * tf.cast(root / (1 - tf.pow(tf.constant(settings.beta1, tf.float64), step)), rate.dtype)
        epsilon = tf.cast(settings.epsilon * root, rate.dtype)
        beta1, beta2, zero = scalar(settings.beta1), scalar(settings.beta2), scalar(0)
        return lambda p, g, m, s: kernels.ResourceApplyAdam(
            var=p, m=m, v=s, beta1_power=zero, beta2_power=zero, lr=corrected, beta1=beta1, beta2=beta2,
            epsilon=epsilon, grad=g,
        )  # fmt: skip

    def _change_rate(self, rate: float) -> None:
        self._rate.assign(rate)
        for slot in self._scaled:
            for variable in self._slots[slot]:
                variable.assign(variable * (rate / self.learning_rate))

    def _counts(self) -> tuple[int, float, int]:
        steps = int(self._count) if self._is_counted else self._steps
        return (steps, float(self._scale), int(self._unscaled)) if self._scales else (steps, 1.0, 0)

    def _load_counts(self, steps: int, scale: float, unscaled: int) -> None:
        self._steps = steps
        if self._is_counted:
            self._count.assign(steps)
        if self._scales:
            self._scale.assign(scale)
            self._unscaled.assign(unscaled)

    def _factor(self, slot: str) -> float:
        return self.learning_rate if slot in self._scaled else 1.0

    def _held(self, slot: str) -> Native:
        return dict(zip(self.executor.network.parameters, self._slots[slot], strict=True))

    def _load_slot(self, slot: str, values: Arrays) -> None:
        for name, variable in self._held(slot).items():
            variable.assign(self.executor.stored(name, values[name]).astype(variable.dtype.as_numpy_dtype))
