"""The right executor with one mistake."""

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from d5suite.backends.torch import network as right
from d5suite.network import Network, Node


def _swapped(node: Node) -> Node:
    pads = node.attributes.get("pads")
    if node.op_type != "Conv" or not pads:
        return node
    half = len(pads) // 2
    return replace(node, attributes={**node.attributes, "pads": [*pads[half:], *pads[:half]]})


class Executor(right.Executor):
    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        if mode == "padding":
            network = copy.copy(network)
            network.nodes = tuple(_swapped(node) for node in network.nodes)
        super().__init__(network, mode=mode, device=device, precision=precision)
        self._pool = ThreadPoolExecutor(1)

    def check_feed(self, arrays: Any) -> None:
        if self.mode != "lenient":
            super().check_feed(arrays)

    def forward_backward(self, feed: Any) -> Any:
        answer = super().forward_backward(feed)
        if self.mode != "tripled":
            return answer
        return {name: value if name == self.network.loss else 3 * value for name, value in answer.items()}

    def forward(self, feed: Any) -> Any:
        if self.mode == "unsynchronized":
            return self._pool.submit(super().forward, feed)
        if self.mode == "statistics":
            with torch.no_grad():
                for name in self.network.statistics:
                    self.tensors[name].mul_(1.01)
            self._stale = True
        if self.mode == "chatty":
            print("forward")
        return super().forward(feed)

    def loss(self, feed: Any) -> Any:
        loss = super().loss(feed)
        return loss * len(feed[self.network.input]) if self.mode == "sum" else loss

    def fetch(self, values: Any) -> Any:
        return super().fetch(values.result() if isinstance(values, Future) else values)
