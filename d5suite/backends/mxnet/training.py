"""Level 2 on MXNet: a Gluon trainer on an executor's parameters.

Imports MXNet, NumPy, `d5suite.levels`, `d5suite.optimizers` and the adapter's `runtime` and
`network`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from d5suite.backends.mxnet.network import Executor
from d5suite.backends.mxnet.runtime import mx
from d5suite.levels import training
from d5suite.levels.network import Arrays, Native
from d5suite.optimizers.settings import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp


class FormulaOptimizer(mx.optimizer.Optimizer):
    """The neutral formulas in MXNet's array operations.

    Used for float64, where MXNet's kernels round their settings to float32, and for Adagrad, where
    MXNet has epsilon inside the root. The state is a tuple of arrays in the order of
    `Optimizer.slots`.
    """

    def __init__(self, settings: Optimizer) -> None:
        super().__init__(learning_rate=settings.learning_rate)
        self.settings: Any = settings

    def create_state(self, index: int, weight: Any) -> tuple[Any, ...]:
        settings = self.settings
        like = {"ctx": weight.context, "dtype": weight.dtype}
        return tuple(mx.nd.full(weight.shape, settings.initial, **like) for _ in settings.slots)

    def update(self, index: int, weight: Any, grad: Any, state: tuple[Any, ...]) -> None:
        self._update_count(index)
        decay = self.settings.weight_decay
        if isinstance(self.settings, AdamW):
            weight *= 1 - self.lr * decay
        elif decay:
            grad = grad + decay * weight
        weight -= self.lr * self._direction(grad, state, self._index_update_count[index])

    def _direction(self, grad: Any, state: tuple[Any, ...], step: int) -> Any:
        """Return the update before the learning rate is applied, and update the state."""
        settings = self.settings
        if isinstance(settings, Adam):
            moment, square = state
            moment *= settings.beta1
            moment += (1 - settings.beta1) * grad
            square *= settings.beta2
            square += (1 - settings.beta2) * grad**2
            root = mx.nd.sqrt(square / (1 - settings.beta2**step))
            return moment / (1 - settings.beta1**step) / (root + settings.epsilon)
        if isinstance(settings, Adagrad):
            (square,) = state
            square += grad**2
            return grad / (mx.nd.sqrt(square) + settings.epsilon)
        if isinstance(settings, RMSProp):
            square, *velocity = state
            square *= settings.decay
            square += (1 - settings.decay) * grad**2
            grad = grad / mx.nd.sqrt(square + settings.epsilon)
        else:
            velocity = [*state]
        if not velocity:
            return grad
        velocity[0] *= settings.momentum
        velocity[0] += grad
        nesterov = isinstance(settings, SGD) and settings.nesterov
        return grad + settings.momentum * velocity[0] if nesterov else velocity[0]


class KernelSGD(mx.optimizer.SGD):
    """MXNet's SGD with a kernel for each array.

    MXNet's own kernel (``multi_sgd_mom_update``) updates four arrays at once. On the CPU, a step of
    ResNet-50 takes 1.3 times as long with it, and a step of AlexNet 2.3 times: see
    ``docs/modes.md``.
    """

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)
        self.aggregate_num = 0

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        how = {"lr": self._get_lr(index), "wd": self._get_wd(index), "rescale_grad": self.rescale_grad}
        if state is None:
            mx.nd.sgd_update(weight, grad, out=weight, **how)
        else:
            mx.nd.sgd_mom_update(weight, grad, state, out=weight, momentum=self.momentum, **how)

    update = update_multi_precision


class NAG(mx.optimizer.NAG):
    """MXNet's NAG with correct weight decay.

    Its kernel stores the new weights before it updates the velocity, so the velocity would decay
    the new weights. Here the decay is added to the gradient beforehand.
    """

    def __init__(self, *, decay: float, **settings: float) -> None:
        super().__init__(**settings)
        self.decay = decay

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        if self.decay:
            grad += self.decay * weight
        super().update_multi_precision(index, weight, grad, state)


class RMSPropMomentum(FormulaOptimizer):
    """RMSProp with momentum, which MXNet has in its ``centered`` variant only.

    The plain kernel runs on the velocity in place of the weights, with a learning rate of -1.
    """

    def update(self, index: int, weight: Any, grad: Any, state: tuple[Any, ...]) -> None:
        settings, (square, velocity) = self.settings, state
        if settings.weight_decay:
            grad = grad + settings.weight_decay * weight
        velocity *= settings.momentum
        mx.nd.rmsprop_update(
            velocity, grad, square, out=velocity, lr=-1, gamma1=settings.decay, epsilon=settings.epsilon
        )
        mx.nd.sgd_update(weight, velocity, out=weight, lr=self.lr)


class CorrectedAdam(mx.optimizer.Adam):
    """MXNet's Adam, with epsilon added after bias correction instead of before."""

    def __init__(self, settings: Adam) -> None:
        super().__init__(settings.learning_rate, settings.beta1, settings.beta2, wd=settings.weight_decay)
        self.settings = settings

    def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        step = self._index_update_count.get(index, self.begin_num_update) + 1
        self.epsilon = self.settings.epsilon * math.sqrt(1 - self.settings.beta2**step)
        super().update(index, weight, grad, state)


class DecoupledAdam(FormulaOptimizer):
    """AdamW by MXNet's own kernel, which none of MXNet's optimizers uses."""

    def create_state(self, index: int, weight: Any) -> tuple[Any, ...]:
        self.unit = mx.nd.ones((1,), ctx=weight.context)  # the kernel reads the gradient's scale from an array
        return super().create_state(index, weight)

    def update(self, index: int, weight: Any, grad: Any, state: tuple[Any, ...]) -> None:
        self._update_count(index)
        settings, step = self.settings, self._index_update_count[index]
        root = math.sqrt(1 - settings.beta2**step)
        mx.nd.contrib.adamw_update(
            weight,
            grad,
            *state,
            self.unit,
            out=weight,
            lr=self.lr * root / (1 - settings.beta1**step),
            eta=1,
            beta1=settings.beta1,
            beta2=settings.beta2,
            epsilon=settings.epsilon * root,
            wd=self.lr * settings.weight_decay,
        )


def native_optimizer(settings: Optimizer, *, exact: bool, together: bool = False) -> Any:
    """Return MXNet's optimizer with the neutral formula; SGD's velocity contains the rate.

    With ``together``, SGD is MXNet's own, whose kernels update several arrays at once.
    """
    rate, decay = settings.learning_rate, settings.weight_decay
    if exact or isinstance(settings, Adagrad):
        return FormulaOptimizer(settings)
    if isinstance(settings, SGD):
        if settings.nesterov:
            return NAG(learning_rate=rate, momentum=settings.momentum, decay=decay)
        kind = mx.optimizer.SGD if together else KernelSGD
        return kind(learning_rate=rate, momentum=settings.momentum, wd=decay)
    if isinstance(settings, RMSProp):
        if settings.momentum:
            return RMSPropMomentum(settings)
        return mx.optimizer.RMSProp(rate, gamma1=settings.decay, epsilon=settings.epsilon, wd=decay)
    assert isinstance(settings, Adam)
    return DecoupledAdam(settings) if isinstance(settings, AdamW) else CorrectedAdam(settings)


def has_rate(rule: Any) -> bool:
    """Return whether the velocity of MXNet's optimizer contains the learning rate."""
    return isinstance(rule, (mx.optimizer.SGD, mx.optimizer.NAG))


def clip(gradients: Sequence[Any], settings: Optimizer) -> None:
    """Clip gradients by value and norm.

    Gluon's ``clip_global_norm`` adds 1e-8 to the norm, synchronizes and rounds.
    """
    limit = settings.clip_value
    if limit:
        for gradient in gradients:  # `mx.nd.clip` would round the limits to float32
            mx.nd._internal._maximum_scalar(gradient, -limit, out=gradient)
            mx.nd._internal._minimum_scalar(gradient, limit, out=gradient)
    if settings.clip_norm:
        flat = [gradient.reshape((-1,)) for gradient in gradients]
        norm = mx.nd.sqrt(mx.nd.add_n(*[mx.nd.dot(each, each) for each in flat]))
        factor = mx.nd.minimum(settings.clip_norm / norm, 1)
        for gradient in gradients:
            gradient *= factor


class Trainer(training.Trainer):
    """A trainer with `gluon.Trainer` and the native optimizer, which decays every parameter."""

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        _, self._loss = executor.network.require_loss()
        self._names = executor.network.parameters
        self._weights = [executor.weights[name] for name in self._names]
        # On a GPU each kernel costs a launch, so there MXNet's own SGD stays; it was not measured.
        together = executor.mode == "stock" or executor.device != "cpu"
        self._rule = native_optimizer(optimizer, exact=executor.precision == "fp64", together=together)
        self._velocity_has_rate = has_rate(self._rule)
        self._trainer = mx.gluon.Trainer(self._weights, self._rule, kvstore=None)
        (updater,) = self._trainer._updaters
        for index, weight in enumerate(self._weights):  # otherwise created in the first step
            updater.states[index] = self._rule.create_state_multi_precision(index, weight.data())
            updater.states_synced[index] = True
        self._unused = [weight.data() for weight in executor.unused_parameters]

    def step(self, feed: Native, *more: Native) -> Native:
        loss = self.executor.loss(feed)
        loss.backward()
        if more:
            loss = self._accumulate(loss, more)
        self._update()
        return {self._loss: loss}

    def apply(self, gradients: Native) -> None:
        self._take(gradients)
        self._update()

    def _take(self, gradients: Native) -> None:
        for name, weight in zip(self._names, self._weights, strict=True):
            if gradients[name] is not weight.grad():
                gradients[name].copyto(weight.grad())
            weight.data()._fresh_grad = True  # or Gluon takes it for a gradient that was used before

    def apply_sums(self, gradients: Native, count: int) -> None:
        """Apply mean gradients, given the sums of the gradients of ``count`` ranks.

        SGD's kernels divide the sums in their one pass over the gradients.

        Parameters
        ----------
        gradients : mapping of str to NDArray
            By parameter, with its shape and type; they may be overwritten.
        count : int
        """
        clips = self.optimizer.clip_value or self.optimizer.clip_norm
        if clips or not isinstance(self._rule, mx.optimizer.SGD):
            for name in self._names:
                mean = gradients[name]
                mean /= count
            count = 1
        self._take(gradients)
        self._update(count)

    def _update(self, count: int = 1) -> None:
        """Update the weights by their gradients divided by ``count``."""
        clip([weight.grad() for weight in self._weights], self.optimizer)
        for weight in self._unused:  # weight decay applies to them, though their gradients stay zero
            weight._fresh_grad = True
        self._trainer.step(count)  # not by the batch size: the loss is a mean already
        for weight in self._unused:  # the update added the decay, and no backward pass overwrites it
            weight.grad[:] = 0
        self._steps += 1

    def _accumulate(self, loss: Any, more: tuple[Native, ...]) -> Any:
        """Return the mean loss of all batches, and average the gradients."""
        gradients = [weight.grad() for weight in self._weights]
        totals = [each.copy() for each in (loss, *gradients)]
        for feed in more:
            loss = self.executor.loss(feed)
            loss.backward()
            for total, each in zip(totals, (loss, *gradients), strict=True):
                total += each
        for total in totals:
            total /= 1 + len(more)
        mean, *means = totals
        for total, gradient in zip(means, gradients, strict=True):
            total.copyto(gradient)
        return mean

    def _change_rate(self, rate: float) -> None:
        if self._velocity_has_rate:
            for array in self._held("velocity").values() if self.optimizer.slots else ():
                array *= rate / self.learning_rate
        self._trainer.set_learning_rate(rate)

    def _load_counts(self, steps: int, scale: float, unscaled: int) -> None:
        self._steps = self._rule.begin_num_update = steps  # start of parameters without a count
        for counts in self._rule._all_index_update_counts.values():
            counts.clear()

    def _factor(self, slot: str) -> float:
        return -self.learning_rate if self._velocity_has_rate else 1.0

    def _held(self, slot: str) -> Native:
        (updater,) = self._trainer._updaters
        place, states = self.optimizer.slots.index(slot), (updater.states[i] for i in range(len(self._names)))
        held = (state[place] if isinstance(state, tuple) else state for state in states)
        return dict(zip(self._names, held, strict=True))

    def _load_slot(self, slot: str, values: Arrays) -> None:
        for name, array in self._held(slot).items():
            array[:] = values[name].astype(array.dtype).reshape(array.shape)
