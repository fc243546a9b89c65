"""ONNX operators as NumPy calls, and level 0.

A factory ``(node, context)`` reads a node's attributes once, and returns a function of the node's
inputs, None for an omitted one. The function returns the node's first output or, if others are
wanted, a tuple of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from d5suite.errors import BackendError
from d5suite.levels import operator as level
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.matrix import read_gemm
from d5suite.network.nodes.shape import read_axis, read_flatten
from d5suite.network.operation import Operation

Function = Callable[..., Any]
Factory = Callable[[Node, NodeContext], Function]


def plain(function: Function) -> Factory:
    """Return a factory for a function that takes the node's inputs as they are."""
    return lambda node, context: function


def flatten(node: Node, context: NodeContext) -> Function:
    sizes = read_flatten(node, context)
    return lambda x: x.reshape(sizes)


def gemm(node: Node, context: NodeContext) -> Function:
    plan = read_gemm(node, context)

    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        y = plan.alpha * ((a.T if plan.trans_a else a) @ (b.T if plan.trans_b else b))
        return y if c is None else y + plan.beta * c

    return run


def log_softmax(node: Node, context: NodeContext) -> Function:
    axis = read_axis(node, context)

    def run(x: np.ndarray) -> np.ndarray:
        shifted = x - x.max(axis, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))

    return run


def softmax(node: Node, context: NodeContext) -> Function:
    axis = read_axis(node, context)

    def run(x: np.ndarray) -> np.ndarray:
        powers = np.exp(x - x.max(axis, keepdims=True))
        return powers / powers.sum(axis, keepdims=True)

    return run


OPERATORS: dict[str, Factory] = {
    "Add": plain(np.add),
    "Flatten": flatten,
    "Gemm": gemm,
    "Identity": plain(lambda x: x),
    "LogSoftmax": log_softmax,
    "MatMul": plain(np.matmul),
    "Mul": plain(np.multiply),
    "Relu": plain(lambda x: np.maximum(x, 0)),
    "Softmax": softmax,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""


class Operator(level.Operator):
    """One ONNX node on NumPy."""

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        self.forward = OPERATORS[operation.node.op_type](operation.node, NodeContext.of_operation(operation))

    def to_native(self, name: str, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def to_neutral(self, name: str, value: Any) -> np.ndarray:
        return np.array(value, self.operation.dtypes[name])

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise BackendError("NumPy does not differentiate", where=self.operation.name)

    def synchronize(self, *results: Any) -> None:
        """Nothing to wait for: NumPy has computed a result when its call returns."""
