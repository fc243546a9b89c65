"""Level 0 on deep500: one ONNX node and its gradient.

Imports NumPy, `d5suite.levels`, `d5suite.network` and the rest of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500 import custom as custom_operators
from d5suite.backends.deep500.operators.context import Context, positions
from d5suite.backends.deep500.operators.table import OPERATORS
from d5suite.levels import operator as level
from d5suite.network.operation import PRECISIONS, Operation


class Operator(level.Operator):
    """One ONNX node, run by the ``forward`` and ``backward`` of a deep500 operator.

    Attributes
    ----------
    native : deep500.CustomPythonOp
        The deep500 operator. ``forward`` may return more outputs than ONNX defines, for
        ``backward`` to use.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        context = Context.of_operation(
            operation,
            dtype=PRECISIONS[operation.precision].type,
            vectorised=mode == "vectorised",
        )
        custom = operation.custom
        factory = OPERATORS[operation.node.op_type] if custom is None else custom_operators.factory(custom)
        self.native = factory(operation.node, context)
        self.forward = self.native.forward
        self._positions = positions(operation.node)

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        fed = super().feed(arrays)
        return [fed[index] for index in self._positions]

    def to_native(self, name: str, array: np.ndarray) -> np.ndarray:
        return np.array(array, order="C")

    def to_neutral(self, name: str, value: Any) -> np.ndarray:
        return np.array(value, self.operation.dtypes[name], order="C")

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Return a gradient for every output of the operator, 0 for unused ones."""
        above: list[Any] = [0] * self.native.num_outputs
        for index, array in zip(self.operation.differentiated, super().feed_gradients(arrays), strict=True):
            above[index] = array
        return above

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        found = self.forward(*inputs)
        outputs = [found] if self.native.num_outputs == 1 else found
        backward = self.native.backward
        return lambda *gradients: backward(gradients, inputs, outputs)

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        by_input = dict(zip(self._positions, gradients, strict=True))
        return super().fetch_gradients([by_input[index] for index in self.operation.differentiable])

    def extent(self, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, np.ndarray):
            return None
        while isinstance(value.base, np.ndarray):
            value = value.base
        return value.ctypes.data, value.nbytes

    def synchronize(self, *results: Any) -> None:
        """Return at once: NumPy is synchronous."""
