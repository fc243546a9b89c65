"""Level 2 on PyTorch: `torch.optim` on an executor's parameters.

Imports PyTorch, NumPy, `d5suite.levels`, `d5suite.optimizers` and this adapter's `network`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from d5suite.backends.torch.network import Executor
from d5suite.levels import training
from d5suite.levels.network import Arrays, Native
from d5suite.optimizers.settings import LOSS_SCALING, SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

_SLOTS: Mapping[str, Mapping[str, str]] = {
    "sgd": {"velocity": "momentum_buffer"},
    "rmsprop": {"square": "square", "velocity": "velocity"},
    "adagrad": {"square": "sum"},
    "adam": {"moment": "exp_avg", "square": "exp_avg_sq"},
    "adamw": {"moment": "exp_avg", "square": "exp_avg_sq"},
}
"""PyTorch's names of an optimizer's state arrays, by optimizer and neutral slot."""


class RootedRMSProp(torch.optim.Optimizer):
    """RMSProp with epsilon inside the root; PyTorch's own has it outside.

    Like PyTorch's own it updates all parameters at once (``foreach``) or one after another.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], settings: RMSProp, *, foreach: bool) -> None:
        super().__init__(tensors, {"lr": settings.learning_rate})
        self._settings, self._foreach = settings, foreach
        for tensor in tensors:
            self.state[tensor] = {slot: torch.zeros_like(tensor) for slot in settings.slots}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters."""
        tensors = [tensor for tensor in self.param_groups[0]["params"] if tensor.grad is not None]
        for together in [tensors] if self._foreach else [[tensor] for tensor in tensors]:
            self._update(together, self.param_groups[0]["lr"])

    def _update(self, tensors: Sequence[torch.Tensor], rate: float) -> None:
        settings = self._settings
        squares = [self.state[tensor]["square"] for tensor in tensors]
        gradients = [tensor.grad for tensor in tensors]
        if settings.weight_decay:
            gradients = list(torch._foreach_add(gradients, tensors, alpha=settings.weight_decay))
        torch._foreach_mul_(squares, settings.decay)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - settings.decay)
        roots = torch._foreach_add(squares, settings.epsilon)
        torch._foreach_sqrt_(roots)
        if settings.momentum:
            velocities = [self.state[tensor]["velocity"] for tensor in tensors]
            torch._foreach_mul_(velocities, settings.momentum)
            torch._foreach_addcdiv_(velocities, gradients, roots)
            torch._foreach_add_(tensors, velocities, alpha=-rate)
        else:
            torch._foreach_addcdiv_(tensors, gradients, roots, -rate)


def native_optimizer(settings: Optimizer, tensors: Sequence[torch.Tensor], *, fused: bool) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer with the neutral formula.

    Parameters
    ----------
    settings : Optimizer
    tensors : sequence of torch.Tensor
    fused : bool
        Whether one fused kernel updates all parameters; each gradient must have its parameter's
        layout. RMSProp, which PyTorch does not fuse, takes all parameters at once (``foreach``). If
        false, no option is set: PyTorch chooses, on the CPU one parameter after another.
    """
    common: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if isinstance(settings, RMSProp):
        return RootedRMSProp(tensors, settings, foreach=fused)
    if fused:
        common["fused"] = True
    if isinstance(settings, SGD):
        return torch.optim.SGD(tensors, momentum=settings.momentum, nesterov=settings.nesterov, **common)
    if isinstance(settings, Adagrad):
        return torch.optim.Adagrad(
            tensors, eps=settings.epsilon, initial_accumulator_value=settings.initial_square, **common
        )
    assert isinstance(settings, Adam)
    kind = torch.optim.AdamW if isinstance(settings, AdamW) else torch.optim.Adam
    return kind(tensors, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, **common)


class Trainer(training.Trainer):
    """A trainer with the native optimizer, in ``fp16`` with `torch.amp.GradScaler`."""

    executor: Executor

    def __init__(self, executor: Executor, optimizer: Optimizer) -> None:
        super().__init__(executor, optimizer)
        _, self._loss = executor.network.require_loss()
        self._tensors = [executor.tensors[name] for name in executor.network.parameters]
        # In fp16 the fused kernel itself would skip the updates that `_count` must not count.
        self._fused = executor.mode != "stock" and executor.precision != "fp16"
        self._optimizer = native_optimizer(optimizer, self._tensors, fused=self._fused)
        self._clips = bool(optimizer.clip_value or optimizer.clip_norm)
        self._scaler = torch.amp.GradScaler(
            executor.device,
            LOSS_SCALING.initial,
            growth_factor=LOSS_SCALING.factor,
            backoff_factor=1 / LOSS_SCALING.factor,
            growth_interval=LOSS_SCALING.interval,
            enabled=executor.precision == "fp16",
        )
        self._optimizer.register_step_post_hook(self._count)
        # The optimizer skips parameters without a gradient, but weight decay applies to them too.
        self._unused = [(tensor, torch.zeros_like(tensor)) for tensor in executor.unused_parameters]

    def step(self, feed: Native, *more: Native) -> Native:
        if self.executor.graphed:
            return self._replayed_step(feed, *more)
        return self.step_of(self.executor.loss, feed, *more)

    def _replayed_step(self, feed: Native, *more: Native) -> Native:
        """Make a step from the gradients that a CUDA graph writes to its own memory."""
        names = self.executor.network.parameters
        answer = self.executor.forward_backward(feed)
        loss, gradients = answer[self._loss], [answer[name] for name in names]
        if more:
            gradients = [each.clone() for each in gradients]
            for each in more:
                answer = self.executor.forward_backward(each)
                loss = loss + answer[self._loss]
                torch._foreach_add_(gradients, [answer[name] for name in names])
            loss = loss / (1 + len(more))
            torch._foreach_div_(gradients, 1 + len(more))
        for tensor, gradient in zip(self._tensors, gradients, strict=True):
            tensor.grad = self._laid_out(gradient, tensor)
        self._update()
        return {self._loss: loss}

    def step_of(self, loss_of: Callable[[Native], torch.Tensor], feed: Native, *more: Native) -> Native:
        """Make a step whose loss ``loss_of`` computes, such as a parallel module."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = loss_of(feed)
        self._scaler.scale(loss).backward()
        loss = loss.detach()
        if more:
            for each in more:
                further = loss_of(each)
                self._scaler.scale(further).backward()
                loss = loss + further.detach()
            loss = loss / (1 + len(more))
        for tensor, gradient in self._unused:
            tensor.grad = gradient
        self._scaler.unscale_(self._optimizer)
        if more:
            torch._foreach_div_([tensor.grad for tensor in self._tensors], 1 + len(more))
        self._update()
        return {self._loss: loss}

    def gradients(self, feed: Native, before: Callable[[Iterable[str]], None] | None = None) -> Native:
        """Return the loss and, from `torch.Tensor.backward`, gradients that share no memory.

        ``before`` is passed to `Executor.loss_in_turn`, and may call `apply_part`.
        """
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.executor.loss(feed) if before is None else self.executor.loss_in_turn(feed, before)
        if before is not None:
            self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for tensor, _ in self._unused:
            tensor.grad = torch.zeros_like(tensor)
        found = zip(self.executor.network.parameters, (tensor.grad for tensor in self._tensors), strict=True)
        return {self._loss: loss.detach(), **dict(found)}

    def apply(self, gradients: Native) -> None:
        for name, tensor in zip(self.executor.network.parameters, self._tensors, strict=True):
            tensor.grad = self._laid_out(gradients[name], tensor)
        self._update()

    @property
    def updates_parts(self) -> bool:
        """Whether parameters can be updated in parts, while a forward pass runs.

        Clipping takes all gradients. A forward pass in 16 bits first rounds all weights. A compiled
        or recorded graph runs as a whole.
        """
        executor = self.executor
        whole = executor.mode in ("compile", "cuda_graphs") or executor.precision not in ("fp32", "fp64")
        return not whole and not self._clips

    def apply_part(self, gradients: Native, last: bool) -> None:
        """Update some parameters; count the update if they are its ``last`` ones."""
        steps = self._steps
        for name, tensor in zip(self.executor.network.parameters, self._tensors, strict=True):
            tensor.grad = self._laid_out(gradients[name], tensor) if name in gradients else None
        self._update()
        self._steps = steps + last

    def _laid_out(self, gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return the gradient in its parameter's layout.

        On the CPU PyTorch's fused kernels (2.13) pair elements by their position in memory.
        """
        if not self._fused or gradient.stride() == tensor.stride():
            return gradient
        return torch.empty_like(tensor).copy_(gradient)

    def _update(self) -> None:
        if self._clips:
            self._clip()
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _count(self, *_: Any) -> None:
        """Count an update; a skipped one does not call this hook."""
        self._steps += 1

    def _clip(self) -> None:
        """Clip gradients by value and norm; PyTorch's ``clip_grad_norm_`` adds 1e-6 to the norm."""
        gradients = [tensor.grad for tensor in self._tensors]
        limit = self.optimizer.clip_value
        if limit:
            torch.nn.utils.clip_grad_value_(self._tensors, limit)
        if self.optimizer.clip_norm:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, (self.optimizer.clip_norm / norm).clamp(max=1.0))

    def _change_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _counts(self) -> tuple[int, float, int]:
        scaling = self._scaler.state_dict()  # empty except in fp16
        return self._steps, scaling.get("scale", 1.0), scaling.get("_growth_tracker", 0)

    def _load_counts(self, steps: int, scale: float, unscaled: int) -> None:
        self._steps = steps
        if self._scaler.is_enabled():
            held = {"scale": scale, "_growth_tracker": unscaled}
            self._scaler.load_state_dict({**self._scaler.state_dict(), **held})
        if self.optimizer.name in ("adam", "adamw", "adagrad"):
            for tensor in self._tensors:
                where = tensor.device if self._fused else None  # unfused, PyTorch wants the count on the CPU
                self._optimizer.state[tensor]["step"] = torch.tensor(float(steps), device=where)

    def _held(self, slot: str) -> Native:
        names, native = self.executor.network.parameters, _SLOTS[self.optimizer.name][slot]
        start = torch.tensor(self.optimizer.initial, dtype=self.executor.dtype)  # before the first step there is none
        states = (self._optimizer.state[tensor].get(native, start.expand_as(tensor)) for tensor in self._tensors)
        return dict(zip(names, states, strict=True))

    def _load_slot(self, slot: str, values: Arrays) -> None:
        native = _SLOTS[self.optimizer.name][slot]
        for name, tensor in zip(self.executor.network.parameters, self._tensors, strict=True):
            self._optimizer.state[tensor][native] = torch.empty_like(tensor.detach()).copy_(torch.tensor(values[name]))
