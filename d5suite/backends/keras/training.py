"""Level 2 in Keras: Keras's own compiled training step, with Keras's optimizers.

Imports Keras, the chosen backend late, NumPy, `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from d5suite.backends.keras.network import Executor
from d5suite.levels import training as levels
from d5suite.levels.network import Arrays, Native
from d5suite.optimizers.settings import LOSS_SCALING, SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

_SLOTS: Mapping[str, Mapping[str, str]] = {
    "sgd": {"velocity": "momentums"},
    "rmsprop": {"square": "_velocities", "velocity": "_momentums"},
    "adagrad": {"square": "_accumulators"},
    "adam": {"moment": "_momentums", "square": "_velocities"},
    "adamw": {"moment": "_momentums", "square": "_velocities"},
}
"""Keras's names of an optimizer's state variables, by optimizer and neutral slot."""

_VELOCITY_SIGN = {"sgd": -1.0, "rmsprop": 1.0}
"""Keras's velocity is the neutral one times the learning rate and this sign, by optimizer."""


def _optimizer(settings: Optimizer, variables: Sequence[Any]) -> Any:
    """Return Keras's optimizer, with gradients clipped and decayed by the neutral formulas.

    Keras's own ``weight_decay`` is decoupled, as in AdamW; its clipping is by value or by norm, but
    not both.
    """
    kind, arguments = _native(settings)
    rate = settings.learning_rate
    native = type(kind(rate))  # on PyTorch, a subclass that updates all variables at once
    prepare = _clipped_and_decayed if keras.backend.backend() != "torch" else _clipped_and_decayed_on_torch

    class Conforming(native):  # type: ignore[misc, valid-type]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            used = list(variables if trainable_variables is None else trainable_variables)
            return super().apply(prepare(list(grads), used, settings), trainable_variables)

        if isinstance(settings, Adam):

            def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
                """Correct epsilon by b2^t: Keras's is the paper's "epsilon hat"."""
                dtype = variables[0].dtype
                power = ops.power(ops.cast(self.beta_2, dtype), ops.cast(self.iterations + 1, dtype))
                self.epsilon = ops.multiply(settings.epsilon, ops.sqrt(1 - power))
                super()._backend_update_step(grads, trainable_variables, learning_rate)
                self.epsilon = settings.epsilon

        if isinstance(settings, Adagrad):  # Keras has its epsilon inside the root

            def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
                square = self._accumulators[self._get_variable_index(variable)]
                self.assign_add(square, ops.square(gradient))
                step = ops.multiply(ops.cast(learning_rate, variable.dtype), gradient)
                self.assign_sub(variable, ops.divide(step, ops.add(ops.sqrt(square), settings.epsilon)))

            def _parallel_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
                """Do the same on PyTorch, for all variables at once."""
                import torch

                squares = [self._accumulators[self._get_variable_index(variable)].value for variable in variables]
                torch._foreach_addcmul_(squares, grads, grads)
                roots = torch._foreach_sqrt(squares)
                torch._foreach_add_(roots, settings.epsilon)
                steps = torch._foreach_div(grads, roots)
                torch._foreach_mul_(steps, learning_rate.value)
                torch._foreach_sub_([variable.value for variable in variables], steps)

    coupled = settings.weight_decay and not isinstance(settings, AdamW)
    conforms = isinstance(settings, SGD) and not (coupled or settings.clip_value or settings.clip_norm)
    return (native if conforms else Conforming)(rate, **arguments)


def _native(settings: Optimizer) -> tuple[Any, dict[str, Any]]:
    """Return Keras's class and its arguments except the learning rate."""
    if isinstance(settings, SGD):
        return keras.optimizers.SGD, {"momentum": settings.momentum, "nesterov": settings.nesterov}
    if isinstance(settings, RMSProp):
        return keras.optimizers.RMSprop, {
            "rho": settings.decay, "momentum": settings.momentum, "epsilon": settings.epsilon
        }  # fmt: skip
    if isinstance(settings, Adagrad):
        return keras.optimizers.Adagrad, {"initial_accumulator_value": settings.initial_square}
    assert isinstance(settings, Adam)
    arguments = {"beta_1": settings.beta1, "beta_2": settings.beta2, "epsilon": settings.epsilon}
    if isinstance(settings, AdamW) and settings.weight_decay:
        return keras.optimizers.AdamW, {**arguments, "weight_decay": settings.weight_decay}
    return keras.optimizers.Adam, arguments


def _clipped_and_decayed(gradients: list[Any], variables: list[Any], settings: Optimizer) -> list[Any]:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]  # slices may repeat rows
    limit = settings.clip_value
    if limit:
        gradients = [ops.clip(gradient, -limit, limit) for gradient in gradients]
    limit = settings.clip_norm
    if limit:
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))
        scale = ops.minimum(ops.divide(limit, norm), 1)
        gradients = [ops.multiply(gradient, scale) for gradient in gradients]
    decay = settings.weight_decay
    if decay and not isinstance(settings, AdamW):
        gradients = [ops.add(g, ops.multiply(v, decay)) for g, v in zip(gradients, variables, strict=True)]
    return gradients


def _clipped_and_decayed_on_torch(gradients: list[Any], variables: list[Any], settings: Optimizer) -> list[Any]:
    import torch

    limit = settings.clip_value
    if limit:
        gradients = list(torch._foreach_clamp_max(torch._foreach_clamp_min(gradients, -limit), limit))
    limit = settings.clip_norm
    if limit:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        gradients = list(torch._foreach_mul(gradients, (limit / norm).clamp(max=1.0)))
    decay = settings.weight_decay
    if decay and not isinstance(settings, AdamW):
        gradients = list(torch._foreach_add(gradients, [variable.value for variable in variables], alpha=decay))
    return gradients


class Trainer(levels.Trainer):
    """A trainer with the step that ``Model.fit`` repeats, without progress bar and callbacks.

    ``fit`` would accumulate gradients over steps of one batch that the optimizer counts. Here, a
    step of several batches sums the executor's gradients, and the optimizer is compiled separately.
    """

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        self._label, self._loss = executor.network.require_loss()
        self._scales = executor.precision == "fp16"
        # Keras on TensorFlow rounds Python floats to float32.
        self._number: Callable[[float], float] = np.float64 if executor.precision == "fp64" else float
        numbers = {each.name: getattr(optimizer, each.name) for each in fields(optimizer)}
        settings = replace(optimizer, **{k: self._number(v) for k, v in numbers.items() if not isinstance(v, bool)})
        with executor.scope():
            self._model = executor.loss_model()
            # `_inner` holds the slots. In fp16, an optimizer that scales the loss by the rule of
            # `LossScaling` wraps it.
            self._inner = self._optimizer = _optimizer(settings, self._model.trainable_variables)
            if self._scales:
                self._optimizer = keras.optimizers.LossScaleOptimizer(
                    self._inner, initial_scale=LOSS_SCALING.initial, dynamic_growth_steps=LOSS_SCALING.interval
                )
            self._optimizer.build(self._model.trainable_variables)
            self._model.compile(optimizer=self._optimizer, jit_compile="auto")
            self._model.make_train_function()
            self._variables = [
                self._model.trainable_variables,
                self._model.non_trainable_variables,
                self._optimizer.variables,
                self._model.metrics_variables,
            ]
        names = {id(variable): name for name, variable in executor.variables.items()}
        self._trained = [names[id(variable)] for variable in self._model.trainable_variables]
        self._state: Any = None
        self._run, prepare = {
            "tensorflow": (self._run_in_place, self._prepare_tensorflow),
            "torch": (self._run_in_place, self._prepare_torch),
            "jax": (self._run_stateless, self._prepare_jax),
        }[executor.mode]
        self._add, self._apply = prepare()
        self._taken_back = self._take_back

    @property
    def native(self) -> Any:
        """Keras's optimizer; its name is the scope of the update."""
        return self._optimizer

    def step(self, feed: Native, *more: Native) -> Native:
        if more:
            return {self._loss: self._run_several((feed, *more))}
        batch = ([feed[name] for name in (*self.executor.network.inputs, self._label)],)
        with self.executor.scope():
            return {self._loss: self._run(batch)["loss"]}

    def stepping(self, change: Callable[[list[Any]], list[Any]]) -> Callable[[Native], Any]:
        """Return a compiled step on one batch that applies ``change`` to the gradients.

        The step updates with the changed gradients and returns the loss. ``change`` takes and
        returns gradients in the order of the network's parameters. For TensorFlow only, without
        XLA, which cannot compile collectives; not for ``fp16``.
        """
        import tensorflow as tf

        names = self.executor.network.parameters

        def update(inputs: list[Any]) -> Any:
            loss, gradients = self.executor.traced(inputs)
            changed = dict(zip(names, change(gradients), strict=True))
            self._optimizer.apply([changed[name] for name in self._trained], self._model.trainable_variables)
            return loss

        compiled = tf.function(update, autograph=False)

        def step(feed: Native) -> Any:
            with self.executor.scope():
                return compiled([feed[name] for name in (*self.executor.network.inputs, self._label)])

        return step

    def apply(self, gradients: Native) -> None:
        self.executor.hold(None)
        with self.executor.scope():
            self._apply([None, *(gradients[name] for name in self._trained)], 1)

    def _run_in_place(self, batch: Any) -> Any:
        return self._model.train_function([batch])

    def _run_stateless(self, batch: Any) -> Any:
        """Step as ``fit`` on JAX: state passes between steps; variables get it on a read."""
        self.executor.hold(self._taken_back)
        if self._state is None:
            self._state = tuple([variable.value for variable in group] for group in self._variables)
        logs, self._state = self._model.train_function(self._state, iter([batch]))
        self.executor.pending((logs, self._state))
        return logs

    def _take_back(self) -> None:
        _assign(self._variables, self._state)
        self._state = None

    def _run_several(self, feeds: Sequence[Native]) -> Any:
        """Sum the loss and the gradients of several batches, and update with their means."""
        self.executor.hold(None)
        scale = self._optimizer.dynamic_scale.value if self._scales else None
        sums: list[Any] = []
        for feed in feeds:
            answer = self.executor.loss_and_gradients(feed, scale)
            terms = [answer[name] for name in (self._loss, *self._trained)]
            with self.executor.scope():
                sums = self._add(sums, terms) if sums else terms
        with self.executor.scope():
            return self._apply(sums, len(feeds))

    def _prepare_tensorflow(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        import tensorflow as tf

        compiled = self._model.jit_compile
        return (
            tf.function(_sums, autograph=False, jit_compile=compiled),
            tf.function(self._apply_in_place, autograph=False, jit_compile=compiled),
        )

    def _prepare_torch(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        import torch

        return torch._foreach_add, torch.no_grad()(self._apply_in_place)

    def _apply_in_place(self, sums: list[Any], count: int) -> Any:
        loss, *gradients = _means(sums, count)
        self._optimizer.apply(gradients, self._model.trainable_variables)
        return loss

    def _prepare_jax(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        import jax

        def update(held: tuple[list[Any], list[Any]], sums: list[Any], count: int) -> tuple[Any, Any]:
            loss, *gradients = _means(sums, count)
            trained, kept = held
            return loss, self._optimizer.stateless_apply(kept, gradients, trained)

        compiled = jax.jit(update, donate_argnums=0, static_argnums=2)
        groups = self._model.trainable_variables, self._optimizer.variables

        def apply(sums: list[Any], count: int) -> Any:
            held = tuple([variable.value for variable in group] for group in groups)
            loss, updated = compiled(held, sums, count)
            _assign(groups, updated)
            self.executor.pending((loss, updated))
            return loss

        return jax.jit(_sums), apply

    def _change_rate(self, rate: float) -> None:
        self.executor.hold(None)
        with self.executor.scope():
            self._optimizer.learning_rate = self._number(rate)
            for variable in self._slot("velocity").values() if "velocity" in self.optimizer.slots else ():
                variable.assign(variable.value * (rate / self.learning_rate))

    def _counts(self) -> tuple[int, float, int]:
        self.executor.hold(None)
        optimizer, steps = self._optimizer, int(self._optimizer.iterations)
        if not self._scales:
            return steps, 1.0, 0
        return steps, float(optimizer.dynamic_scale.value), int(optimizer.step_counter.value)

    def _load_counts(self, steps: int, scale: float, unscaled: int) -> None:
        self.executor.hold(None)
        with self.executor.scope():
            self._optimizer.iterations.assign(steps)
            if self._scales:
                self._optimizer.dynamic_scale.assign(scale)
                self._optimizer.step_counter.assign(unscaled)

    def _factor(self, slot: str) -> float:
        return _VELOCITY_SIGN[self.optimizer.name] * self.learning_rate if slot == "velocity" else 1.0

    def _held(self, slot: str) -> Native:
        return {name: variable.value for name, variable in self._slot(slot).items()}

    def _load_slot(self, slot: str, values: Arrays) -> None:
        with self.executor.scope():
            for name, variable in self._slot(slot).items():
                variable.assign(np.array(self.executor.stored(name, values[name]), variable.dtype, order="C"))

    def _slot(self, slot: str) -> dict[str, Any]:
        """Return Keras's variables of a neutral slot."""
        return dict(zip(self._trained, getattr(self._inner, _SLOTS[self.optimizer.name][slot]), strict=True))


def _assign(groups: Sequence[Sequence[Any]], values: Sequence[Sequence[Any]]) -> None:
    """Give groups of variables new values."""
    for variables, those in zip(groups, values, strict=True):
        for variable, value in zip(variables, those, strict=True):
            variable.assign(value)


def _means(sums: list[Any], count: int) -> list[Any]:
    return sums if count == 1 else [ops.divide(each, count) for each in sums]


def _sums(sums: list[Any], terms: list[Any]) -> list[Any]:
    return [ops.add(a, b) for a, b in zip(sums, terms, strict=True)]
