"""ONNX on deep500: what several families share.

Imports deep500 (through `repairs`), NumPy and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.windows import Window
from d5suite.network.operation import STATIC_INPUTS

CustomOperator = Any
"""A `deep500.CustomPythonOp`."""

Factory = Callable[[Node, "Context"], CustomOperator]

Backward = Callable[[np.ndarray, Sequence[np.ndarray], np.ndarray], Sequence[Any]]
"""Maps the output's gradient, the inputs and the output to the inputs' gradients."""


def positions(node: Node) -> list[int]:
    """Return the indices of the inputs that a node's operator takes: neither omitted nor static."""
    resolved = STATIC_INPUTS.get(node.op_type, ())
    return [index for index, name in enumerate(node.inputs) if name and index not in resolved]


def operands(node: Node) -> list[str]:
    """Return the tensors that a node's operator takes."""
    return [node.inputs[index] for index in positions(node)]


@dataclass(kw_only=True)
class Context(NodeContext):
    """What a factory knows about its node and the network around it.

    Attributes
    ----------
    dtype : type
        NumPy's type of activations and parameters.
    vectorised : bool
        Whether convolution and pooling are array operations, not loops over their outputs.
    """

    dtype: type = np.float32
    vectorised: bool = False

    def describe(self, node: Node, *, outputs: int = 1) -> tuple[list[Any], list[Any]]:
        """Return deep500's descriptors of inputs and outputs, without shapes that are unknown."""

        def one(name: str) -> Any:
            shape = self.shapes.get(name, (None,))
            known = [n for n in shape if n is not None]
            dtype = self.dtypes[name].type if name in self.dtypes else self.dtype
            return deep500.TensorDescriptor(dtype, known if len(known) == len(shape) else [])

        named = [*node.outputs[:outputs], *[""] * outputs][:outputs]
        return [one(name) for name in operands(node)], [one(name or node.outputs[0]) for name in named]


class Formula(deep500.CustomPythonOp):
    """A custom operator made of two functions; only its first output is differentiated."""

    def __init__(
        self, descriptors: tuple[list[Any], list[Any]], forward: Callable[..., Any], backward: Backward
    ) -> None:
        super().__init__(*descriptors)
        self._forward, self._backward = forward, backward

    def forward(self, *inputs: np.ndarray) -> Any:
        """Return the formula's value."""
        return self._forward(*inputs)

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> Sequence[Any]:
        """Return the inputs' gradients."""
        return self._backward(grads[0], fwd_inputs, fwd_outputs[0])


def native_operator(name: str) -> Factory:
    """Return a factory for a deep500 operator without settings."""
    return lambda node, context: getattr(native, name)(*context.describe(node))


def formula(forward: Callable[..., np.ndarray], backward: Backward) -> Factory:
    """Return a factory for a formula without settings."""
    return lambda node, context: Formula(context.describe(node), forward, backward)


def collapsed(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the gradient of a broadcast tensor: summed over the repeated axes."""
    added = gradient.ndim - len(shape)
    axes = (*range(added), *(added + i for i, n in enumerate(shape) if n == 1 and gradient.shape[added + i] != 1))
    return gradient.sum(axes).reshape(shape) if axes else gradient


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), exact to roundings for any x: nothing overflows or cancels."""
    small = np.exp(-np.abs(x))
    result: np.ndarray = np.where(x >= 0, 1, small) / (1 + small)
    return result


def lowest(dtype: np.dtype) -> Any:
    """Return the least value of a type."""
    return -np.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def highest(dtype: np.dtype) -> Any:
    """Return the greatest value of a type."""
    return np.inf if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


def log_softmax_of(x: np.ndarray, axis: int) -> np.ndarray:
    """Return the logarithm of the softmax along an axis."""
    shifted = x - x.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def cropped(padded: np.ndarray, widths: Sequence[tuple[int, int]]) -> np.ndarray:
    """Undo `numpy.pad`."""
    return padded[tuple(slice(a, n - b) for n, (a, b) in zip(padded.shape, widths, strict=True))]


def widths(w: Window) -> list[tuple[int, int]]:
    """Return the argument of `numpy.pad` that pads images so that every window fits."""
    return [(0, 0), (0, 0), *w.pads]


def taps(w: Window) -> list[Any]:
    """Return, for each cell of the window, an index of the pixels it covers in the padded image."""
    return [(..., *tap) for tap in w.taps()]


identity = formula(lambda x: x, lambda gradient, *_: [gradient])
