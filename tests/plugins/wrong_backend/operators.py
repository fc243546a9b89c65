"""The right operators with one mistake."""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from d5suite.backends.torch import operators as right
from d5suite.backends.torch.operators import OPERATORS
from d5suite.network.operation import Operation

__all__ = ["OPERATORS", "Operator"]


class Operator(right.Operator):
    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        node, kind = operation.node, operation.node.op_type
        self._mistake = mistake = operation.name.rpartition(".")[2] if mode == "named" else mode
        if mistake == "off_by_one" and kind == "Conv":
            top, left, bottom, end = node.attributes["pads"]
            operation.node = replace(
                node, attributes={**node.attributes, "pads": [top + 1, left + 1, bottom - 1, end - 1]}
            )
        if mistake == "axis" and kind == "Softmax":
            operation.node = replace(node, attributes={**node.attributes, "axis": node.attributes["axis"] - 1})
        super().__init__(operation, mode=mode, device=device)
        self._first: list[Any] = []
        if mistake == "half" and kind == "Gemm" and operation.precision == "fp32":
            self.forward = _half
        if mode == "unsynchronized" and kind == "MatMul":
            pool, inner = ThreadPoolExecutor(1), self.forward
            self.forward = lambda *inputs: pool.submit(inner, *inputs)
        native, held = self.forward, self._first
        if mode == "stale":
            self.forward = lambda *inputs: held[1] if len(held) > 1 else _keep(held, native(*inputs))
        if mode == "reused":
            self.forward = lambda *inputs: _overwrite(held, native(*inputs))
        if mode == "noisy" and operation.precision == "fp32":
            self.forward = lambda *inputs: native(*inputs) * (1 + 1e-6 * torch.randn(()))
        if mistake == "crash" and kind == "Softmax":
            self.forward = lambda *inputs: os.kill(os.getpid(), signal.SIGSEGV)

    def feed(self, arrays: Any) -> Any:
        fed = super().feed(arrays)
        if self.mode == "clipped":
            for array in arrays:
                if array is not None and array.dtype == "float32":
                    array.clip(-1, 1, out=array)
        if self.mode == "view" and self.operation.precision != "bf16":
            return [
                value if array is None else torch.from_numpy(array) for value, array in zip(fed, arrays, strict=True)
            ]
        return fed

    def fetch(self, outputs: Any) -> Any:
        answer = super().fetch(outputs.result() if isinstance(outputs, Future) else outputs)
        wide = self.mode == "wide" and self.operation.precision == "fp32"
        return [value.astype("float64") for value in answer] if wide else answer

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self._mistake == "dropped" and self.operation.node.op_type == "Softmax":
            y = self.forward(*inputs)
            return lambda dy: (y * dy,)
        call = super().backward(inputs)
        if self.mode == "stale_gradient":
            return lambda *dy: self._first[0] if self._first else _keep(self._first, call(*dy))
        return (lambda *dy: [3 * dx for dx in call(*dy)]) if self.mode == "tripled" else call


def _keep(held: list[Any], answer: Any) -> Any:
    held.append(answer)
    return answer


def _overwrite(held: list[Any], answer: Any) -> Any:
    return held[0].copy_(answer) if held else _keep(held, answer)


def _half(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float16)
    for columns, rows in zip(a.split(8, 1), b.split(8, 0), strict=True):
        total += (columns @ rows).half()
    return total.float()
