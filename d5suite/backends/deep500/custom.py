"""Custom operators as custom Python operators of deep500.

deep500's own C++ operators corrupt memory, so ctypes calls a C++ source without glue. Imports
deep500 (through `repairs`), NumPy, `d5suite.custom` and `d5suite.errors`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends.deep500.repairs import deep500
from d5suite.custom import CustomOperator, compile_operator
from d5suite.custom.interface import CCall, CTensor, require_all_outputs, require_output_shapes
from d5suite.errors import NetworkError

_CODES = {
    "float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11,
}  # fmt: skip
"""The number of each type in ``enum d5_dtype``."""


def factory(custom: CustomOperator) -> Callable[[Any, Any], Any]:
    """Return a factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If the operator's source does not compile.
    ConfigurationError
        If the source and the operator's description disagree on the outputs' shapes.
    NetworkError
        If not all outputs of the operator are wanted.
    """

    def build(node: Any, context: Any) -> Any:
        descriptors = context.describe(node, outputs=len(custom.outputs))
        require_all_outputs(custom, node)
        shapes, types = ([known[name] for name in node.outputs] for known in (context.shapes, context.dtypes))
        if custom.source is None:
            return _PythonOperator(*descriptors, custom=custom, shapes=shapes, types=types)
        path = compile_operator(custom)
        require_output_shapes(path, custom, node, context.shapes, context.dtypes)
        return _SourceOperator(*descriptors, custom=custom, shapes=shapes, types=types, library=path)

    return build


class _Operator(deep500.CustomPythonOp):
    """Base of both kinds of custom operators; prepares the arguments of the backward pass."""

    def __init__(
        self,
        *descriptors: list[Any],
        custom: CustomOperator,
        shapes: Sequence[tuple[int, ...]],
        types: Sequence[np.dtype],
    ) -> None:
        super().__init__(*descriptors)
        self._custom, self._shapes, self._types = custom, shapes, types

    def backward(
        self, grads: Sequence[Any], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the inputs' gradients, zeros for an input without one.

        An unused output's gradient may be 0.

        Raises
        ------
        NetworkError
            If the operator has no backward pass.
        """
        if not self._custom.differentiable:
            raise NetworkError("the custom operator has no backward pass", where=self._custom.name)
        heads = [
            np.asarray(np.broadcast_to(np.asarray(g, y.dtype), y.shape), order="C")
            for g, y in zip(grads, fwd_outputs, strict=True)
        ]
        return self._differentiate([np.asarray(x, order="C") for x in fwd_inputs], list(fwd_outputs), heads)

    def _differentiate(
        self, inputs: list[np.ndarray], outputs: list[np.ndarray], heads: list[np.ndarray]
    ) -> list[np.ndarray]:
        raise NotImplementedError


class _PythonOperator(_Operator):
    """A custom operator whose passes are Python functions of NumPy arrays."""

    def forward(self, *inputs: np.ndarray) -> Any:
        """Return the output, or a list of several."""
        found = self._custom.call_forward(inputs, self._shapes, self._types)
        return found if self.num_outputs > 1 else found[0]

    def _differentiate(
        self, inputs: list[np.ndarray], outputs: list[np.ndarray], heads: list[np.ndarray]
    ) -> list[np.ndarray]:
        return self._custom.call_backward(inputs, outputs, heads)


class _SourceOperator(_Operator):
    """A custom operator whose passes are the C functions of a compiled source."""

    def __init__(self, *descriptors: list[Any], library: Path, **settings: Any) -> None:
        super().__init__(*descriptors, **settings)
        self._library = ctypes.CDLL(str(library))
        count = ctypes.c_int32.in_dll(self._library, "d5_attribute_count").value
        attributes = ctypes.addressof(ctypes.c_char.in_dll(self._library, "d5_attributes"))
        self._fixed = {
            "attributes": attributes,
            "attribute_count": count,
            "input_count": self.num_inputs,
            "output_count": self.num_outputs,
        }

    def forward(self, *inputs: np.ndarray) -> Any:
        """Return the output, or a list of several."""
        given = [np.asarray(x, order="C") for x in inputs]
        call = CCall(inputs=self._tensors(given), **self._fixed)
        outputs = [np.empty(s, t) for s, t in zip(self._shapes, self._types, strict=True)]
        call.outputs = self._tensors(outputs)
        self._check(self._library.d5_forward(ctypes.byref(call)))
        return outputs if self.num_outputs > 1 else outputs[0]

    def _differentiate(
        self, inputs: list[np.ndarray], outputs: list[np.ndarray], heads: list[np.ndarray]
    ) -> list[np.ndarray]:
        answers = [np.empty_like(x) if x.dtype.kind == "f" else np.zeros_like(x) for x in inputs]
        gradients = self._tensors(answers)
        for gradient, x in zip(gradients, inputs, strict=True):
            if x.dtype.kind != "f":
                gradient.data = None
        call = CCall(
            inputs=self._tensors(inputs),
            outputs=self._tensors(outputs),
            output_gradients=self._tensors(heads),
            input_gradients=gradients,
            **self._fixed,
        )
        self._check(self._library.d5_backward(ctypes.byref(call)))
        return answers

    def _tensors(self, arrays: Sequence[np.ndarray]) -> Any:
        """Return C descriptions of arrays; the arrays must outlive them."""
        described = (CTensor * len(arrays))()
        for one, array in zip(described, arrays, strict=True):
            code = _CODES.get(array.dtype.name)
            if code is None:
                raise NetworkError(f"custom operators take no arrays of {array.dtype}", where=self._custom.name)
            one.data, one.shape = array.ctypes.data, (ctypes.c_int64 * array.ndim)(*array.shape)
            one.rank, one.dtype = array.ndim, code
        return described

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"custom operator {self._custom.name} failed with code {code}")
