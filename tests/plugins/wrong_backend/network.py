"""The right executor with one mistake."""

import copy
import os
import signal
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from d5suite.backends.torch import network as right
from d5suite.backends.torch.operators import OPERATORS
from d5suite.network import Network, Node

DROPOUTS = ("rare_dropout", "one_mask", "channel_masks", "few_masks", "unscaled", "undropped", "two_masks")
"""Modes whose own Dropout is wrong."""


def _dropout(mode: str, ratio: float, context: Any) -> Any:
    """Return a Dropout with the mistake of a mode."""
    masks: list[torch.Tensor] = []

    def drop(x: torch.Tensor, *_: Any) -> torch.Tensor:
        if not context.training or mode == "undropped":
            return x
        shape = list(x.shape)
        if mode == "one_mask":
            shape[0] = 1
        if mode == "channel_masks":
            shape[1] = 1
        mask = (torch.rand(shape) >= (0.9 * ratio if mode == "rare_dropout" else ratio)).to(x.dtype)
        if mode == "few_masks":
            masks.append(mask if len(masks) < 64 else masks[len(masks) % 64])
            mask = masks[-1]
        factor = 1.0 if mode == "unscaled" else 1 / (1 - ratio)
        if mode == "two_masks":
            other = x * (torch.rand(shape) >= ratio).to(x.dtype) * factor
            return other + (x * mask * factor - other).detach()
        return x * mask * factor

    return drop


def _swapped(node: Node) -> Node:
    pads = node.attributes.get("pads")
    if node.op_type != "Conv" or not pads:
        return node
    half = len(pads) // 2
    return replace(node, attributes={**node.attributes, "pads": [*pads[half:], *pads[:half]]})


def _slow(factory: Any, node: Node, context: Any) -> Any:
    call = factory(node, context)

    def sleeps(*inputs: Any) -> Any:
        time.sleep(0.02)
        return call(*inputs)

    return sleeps if node.name == "c3" else call


class Executor(right.Executor):
    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        if mode == "padding":
            network = copy.copy(network)
            network.nodes = tuple(_swapped(node) for node in network.nodes)
        replaced: dict[str, Any] = {"Add": lambda *_: _add} if mode == "detached" else {}
        if mode in DROPOUTS:
            replaced = {"Dropout": lambda node, context: _dropout(mode, context.constant(node, 1).item(), context)}
        with patch.dict(OPERATORS, replaced):
            super().__init__(network, mode=mode, device=device, precision=precision)
        self._pool = ThreadPoolExecutor(1)
        self._calls: Counter[Any] = Counter()
        self._kept: dict[Any, Any] = {}
        self._loaded: Any = {}
        if mode == "unbiased":
            self._statistics.settle = self._statistics.restart  # type: ignore[method-assign]

    def _plan(self, *arguments: Any, **options: Any) -> Any:
        conv = OPERATORS["Conv"]
        with patch.dict(OPERATORS, {"Conv": lambda *given: _slow(conv, *given)} if self.mode == "slow" else {}):
            return super()._plan(*arguments, **options)

    def check_feed(self, arrays: Any) -> None:
        if self.mode != "lenient":
            super().check_feed(arrays)

    def feed(self, arrays: Any) -> Any:
        fed = super().feed(arrays)
        if self.mode == "clipped":
            image = arrays[self.network.input]
            np.clip(image, -2, 2, out=image)
        if self.mode == "tail" and len(arrays[self.network.input]) > 16:
            for tensor in fed.values():
                tensor[-1] = tensor[0]
        if self.mode == "view":
            views = {name: torch.from_numpy(array) for name, array in arrays.items()}
            fed = {name: view if view.dtype == fed[name].dtype else fed[name] for name, view in views.items()}
        return fed

    def load_parameters(self, values: Any) -> None:
        super().load_parameters(values)
        if self.mode == "loaded_view":
            for name, value in values.items():
                view = torch.from_numpy(value)
                if view.dtype == self.tensors[name].dtype:
                    self.tensors[name].data = view

    def load_random_state(self, values: Any) -> None:
        super().load_random_state(values)
        if self.mode == "loaded_view":
            self._loaded = values  # taken up by the next pass

    def answered(self, kind: str, answer: Any) -> Any:
        """Return an answer with what is wrong with all answers."""
        if self.mode == "noisy" and self.precision == "fp32":
            return {name: value * (1 + 1e-6 * torch.randn_like(value)) for name, value in answer.items()}
        if self.mode != "reused":
            return answer
        for name, value in answer.items():
            memory = self._kept.setdefault((kind, name, value.shape), torch.empty(value.shape, dtype=value.dtype))
            memory.copy_(value)
        return {name: self._kept[kind, name, value.shape] for name, value in answer.items()}

    def _again(self, shape: Any, call: Any, count: Any) -> Any:
        """Return the answer to the second call of those counted, from the third on."""
        self._calls[count] += 1
        if self._calls[count] < 3 or shape not in self._kept:
            self._kept[shape] = call()
        return self._kept[shape]

    def forward_backward(self, feed: Any) -> Any:
        if self.mode == "gradient_threads":
            torch.set_num_threads(2)
            try:
                return super().forward_backward(feed)
            finally:
                torch.set_num_threads(1)
        if self.mode == "stale_gradient":
            shape = feed[self.network.input].shape
            return dict(self._again(shape, lambda: super(Executor, self).forward_backward(feed), "all"))
        if self.mode == "half_backward" and self.precision == "fp32":
            kept = super().parameters()
            with torch.autocast("cpu", torch.bfloat16):
                narrow = {name: value.float().clone() for name, value in super().forward_backward(feed).items()}
            super().load_parameters(kept)
            loss = self.network.require_loss()[1]
            return {**narrow, loss: super().forward_backward(feed)[loss]}
        answer = self.answered("gradients", super().forward_backward(feed))
        if self.precision == "fp32" and self.mode in ("rounded", "first_scale", "last_scale"):
            return self._slightly_wrong(answer)
        if self.mode != "tripled":
            return answer
        return {name: value if name == self.network.loss else 3 * value for name, value in answer.items()}

    def _slightly_wrong(self, answer: Any) -> Any:
        if self.mode == "rounded":
            return {
                name: value if name == self.network.loss else value.bfloat16().float() for name, value in answer.items()
            }
        scales = [node.inputs[1] for node in self.network.nodes if node.op_type == "BatchNormalization"]
        name = scales[0 if self.mode == "first_scale" else -1]
        return {**answer, name: 1.01 * answer[name]}

    def forward(self, feed: Any) -> Any:
        if self.mode in ("stale", "stale_shape"):
            shape = feed[self.network.input].shape
            return self._again(
                shape, lambda: super(Executor, self).forward(feed), "all" if self.mode == "stale" else shape
            )
        if self.mode == "hoarding":
            self._calls["forward"] += 1
            if self._calls["forward"] == 3:
                self._kept["hoard"] = torch.ones(128 << 20)
        if self.mode == "children":
            return _beside_a_child(lambda: super(Executor, self).forward(feed))
        if self.mode == "unsynchronized":
            return self._pool.submit(super().forward, feed)
        if self.mode == "statistics":
            with torch.no_grad():
                for name in self.network.statistics:
                    self.tensors[name].mul_(1.01)
            self._stale = True
        if self.mode == "chatty":
            print("forward")
        if self.mode == "single_output":
            return {self.network.output: super().forward(feed)[self.network.output]}
        return self.answered("forward", super().forward(feed))

    def loss(self, feed: Any, weights: Any = None) -> Any:
        if self._loaded:
            super().load_random_state(self._loaded)
        self._loaded = {}
        loss = super().loss(feed)
        if self.mode == "thousandth":
            loss = loss.detach() + 0.999 * (loss - loss.detach())
        return loss * len(feed[self.network.input]) if self.mode == "sum" else loss

    def fetch(self, values: Any) -> Any:
        found = super().fetch(values.result() if isinstance(values, Future) else values)
        wide = self.mode == "wide" and self.precision == "fp32"
        return {name: value.astype(np.float64) for name, value in found.items()} if wide else found


def _add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one + other.detach()


def _beside_a_child(work: Any) -> Any:
    child = os.fork()
    if not child:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pass
        os._exit(0)
    try:
        return work()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
