"""The independent reference of one operator: its ONNX node under ONNX's reference evaluator.

Imports ONNX and NumPy; no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.inliner

from d5suite.errors import NetworkError
from d5suite.network.graph_edits import copy_of
from d5suite.network.operation import PRECISIONS, Operation
from d5suite.validate.oracle import evaluator

DIFFERENCE_STEP = 2.0**-24
"""Step of central differences in float64 for inputs of magnitude 1; accurate to about 1e-8."""

KINKED_STEP = 2.0**-30
"""Step for operators with kinks, which longer steps cross: at 2**-24, max-pooling of 8 images of
112 px and 64 channels was off by 1.1e-4. Rounding costs 1e-7 here."""

KINKED = frozenset({
    "Clip", "GlobalMaxPool", "LeakyRelu", "Max", "MaxPool", "Min", "PRelu", "ReduceMax", "Relu", "ThresholdedRelu",
})  # fmt: skip
"""Operators whose derivative jumps."""


class OperatorOracle:
    """One operation in float64 under ONNX's reference evaluator.

    Raises
    ------
    NetworkError
        If the evaluator does not implement the operator.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._double = {
            name for name in operation.node.inputs if name and operation.dtypes[name] in PRECISIONS.values()
        }
        model = copy_of(operation.model)
        if operation.custom is not None:
            model = onnx.inliner.inline_local_functions(model)
        for info in model.graph.input:
            if info.name in self._double:
                info.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        self._evaluator = evaluator(model, operation.name)

    def run(self, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Return the wanted outputs.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray or None
            The inputs, from `Operation.draw`; floating-point ones are converted to float64.

        Raises
        ------
        NetworkError
            If the evaluator raises any exception.
        """
        feed = {
            name: array.astype(np.float64) if name in self._double else array
            for name, array in zip(self.operation.node.inputs, arrays, strict=True)
            if array is not None
        }
        try:
            with np.errstate(all="ignore"):
                found = self._evaluator.run(None, feed)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            raise NetworkError(
                f"ONNX's reference evaluator fails on {self.operation.describe()}: {type(error).__name__}: {lines[0]}",
                where=self.operation.name,
            ) from error
        named = dict(zip((o.name for o in self.operation.model.graph.output), found, strict=True))
        return [np.asarray(named[name]) for name in self.operation.outputs]

    def derivative(
        self,
        arrays: Sequence[np.ndarray | None],
        gradients: Sequence[np.ndarray],
        directions: Mapping[int, np.ndarray],
    ) -> float:
        """Return the central difference of the sum of outputs times gradients along a direction.

        Parameters
        ----------
        arrays : sequence
            The inputs.
        gradients : sequence of numpy.ndarray
            For the outputs in `Operation.differentiated`.
        directions : mapping of int to numpy.ndarray
            By number of an input: its direction, float64, in the input's shape.
        """
        operation = self.operation
        step = KINKED_STEP if operation.kinds & KINKED else DIFFERENCE_STEP
        ends = []
        for sign in (1.0, -1.0):
            point = list(arrays)
            for index, along in directions.items():
                moved = arrays[index]
                assert moved is not None  # an omitted input is not differentiable
                point[index] = moved.astype(np.float64) + sign * step * along
            ends.append(self.run(point))
        wanted = list(operation.outputs)
        chosen = [wanted.index(operation.node.outputs[i]) for i in operation.differentiated]
        changes = (ends[0][i] - ends[1][i] for i in chosen)
        total = sum(float((c * g.astype(np.float64)).sum()) for c, g in zip(changes, gradients, strict=True))
        return total / (2 * step)


def direction(operation: Operation, index: int, draw: int) -> np.ndarray:
    """Return a standard normal direction for one input, float64; the same in every process."""
    shape = operation.shapes[operation.node.inputs[index]]
    return np.random.default_rng([0xD5, index, draw]).standard_normal(shape)
