"""Level 0 on MXNet: one ONNX node and its gradient.

Imports MXNet, NumPy, `d5suite.errors`, `d5suite.levels`, `d5suite.network` and the rest of the
adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from d5suite.backends.mxnet import custom as custom_operators
from d5suite.backends.mxnet.operators.context import ARRAY_TYPES, Call, Context
from d5suite.backends.mxnet.operators.table import OPERATORS
from d5suite.backends.mxnet.runtime import CONTEXTS, address, mx
from d5suite.errors import NetworkError
from d5suite.levels import operator as level
from d5suite.network.operation import STATIC_INPUTS, Operation, is_floating


class Operator(level.Operator):
    """One ONNX node on MXNet; its backward pass is autograd's.

    In modes ``hybrid`` and ``stock`` it is a cached graph, as Gluon builds for a hybridized block:
    it takes the graph's arrays and returns the wanted outputs. In mode ``imperative`` it is the
    factory's call on arrays. Every backward pass writes its gradients into the same arrays.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        self._device = CONTEXTS[device]()
        node = operation.node
        context = Context.of_operation(operation, dtype=_floating(operation).name)
        custom = operation.custom
        factory = OPERATORS[node.op_type] if custom is None else custom_operators.factory(custom)
        call = factory(node, context)
        self._packed = {packed.names[0]: packed for packed in context.packed}
        self._kept = {f"{key}/kept": array.astype(_floating(operation)) for key, array in context.kept.items()}
        self._arguments = [*self._inputs(), *self._kept]
        for name in (name for name in self._arguments if name in operation.dtypes):
            if operation.dtypes[name].name not in ARRAY_TYPES:
                raise NetworkError(
                    f"MXNet's operators do not support arrays of {operation.dtypes[name]}", where=operation.name
                )
            if 0 in operation.shapes[name]:
                raise NetworkError("MXNet's classic arrays cannot have axes of length zero", where=operation.name)
        self._vectors = itertools.count()
        if mode != "imperative" and any(isinstance(a, str) for a in self._arguments):  # a graph needs an array
            call, self._arguments = _cached_graph(call, self._arguments, static=mode in ("hybrid", "fused"))
        else:
            call = partial(call, mx.nd)
        self.forward = _in_training(call) if operation.training else call

    def _inputs(self) -> list[Any]:
        """Return what the factory's call takes per input: an array's name, a number or None."""
        operation = self.operation
        static = STATIC_INPUTS.get(operation.node.op_type, ())
        joined = {name for packed in self._packed.values() for name in packed.names[1:]}
        found: list[Any] = []
        for index, name in enumerate(operation.node.inputs):
            constant = operation.constants.get(name) if operation.custom is None else None
            if not name or index in static or name in joined:
                found.append(None)
            else:
                found.append(constant.item() if constant is not None and constant.ndim == 0 else name)
        return found

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        self.check_feed(arrays)
        named = {n: a for n, a in zip(self.operation.node.inputs, arrays, strict=True) if a is not None} | self._kept
        fed = {n: self.to_native(n, named[n]) for n in self._arguments if n in named and n not in self._packed}
        for key, packed in self._packed.items():
            fed[key] = self._vector(key, packed.pack([named[name] for name in packed.names]))
        return [fed[a] if isinstance(a, str) else a for a in self._arguments]

    def _vector(self, name: str, array: np.ndarray) -> Any:
        """Copy packed weights to the device, with a write count that no earlier weights had.

        A oneDNN kernel caches its rearranged weights, and mistakes others for them if they have
        been written as many times.
        """
        vector = self.to_native(name, array)
        for _ in range(next(self._vectors)):
            vector *= 1
        return vector

    def to_native(self, name: str, array: np.ndarray) -> Any:
        # `mx.nd.array` would use names that SciPy deprecates. MXNet has no arrays without axes.
        return mx.nd.ndarray.array(np.atleast_1d(array), ctx=self._device, dtype=array.dtype)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        operation = self.operation
        leaves = [a.detach() if isinstance(a, mx.nd.NDArray) else a for a in inputs]
        sources = [leaves[self._arguments.index(name)] for name in self._sources()]
        for source in sources:
            source.attach_grad()
        with mx.autograd.record():
            outputs = _as_list(self.forward(*leaves))
        wanted = [index for index, name in enumerate(operation.node.outputs) if name]
        heads = [outputs[wanted.index(index)] for index in operation.differentiated]
        run = mx.autograd.backward

        def call(*gradients: Any) -> Any:
            run(heads, gradients, True)
            # Read only now: a gradient equal to another may have become the same array.
            return [source.grad for source in sources]

        return call

    def _sources(self) -> list[str]:
        """Return the arguments that have a gradient: inputs, single or packed."""
        operation = self.operation
        first = {name: key for key, packed in self._packed.items() for name in packed.names}
        names = (operation.node.inputs[index] for index in operation.differentiable)
        return list(dict.fromkeys(first.get(name, name) for name in names))

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        names = self.operation.outputs
        return [self.to_neutral(name, value) for name, value in zip(names, _as_list(outputs), strict=True)]

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        values: dict[str, Any] = dict(zip(self._sources(), gradients, strict=True))
        for key, packed in self._packed.items():
            values.update(zip(packed.names, packed.unpack(values[key].asnumpy()), strict=True))
        names = [self.operation.node.inputs[index] for index in self.operation.differentiable]
        return [self.to_neutral(name, values[name]) for name in names]

    def to_neutral(self, name: str, value: Any) -> np.ndarray:
        """Return a tensor with its ONNX type and shape, which may have no axes."""
        array = value if isinstance(value, np.ndarray) else value.asnumpy()
        return np.array(array, self.operation.dtypes[name], order="C").reshape(self.operation.shapes[name])

    def extent(self, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, mx.nd.NDArray):
            return None
        return address(value), value.size * np.dtype(value.dtype).itemsize

    def synchronize(self, *results: Any) -> None:
        mx.nd.waitall()


def _floating(operation: Operation) -> np.dtype:
    """Return the type of the operation's floating-point inputs; float32 if it has none."""
    types = [operation.dtypes[name] for name in operation.node.inputs if name]
    return next((dtype for dtype in types if is_floating(dtype)), np.dtype(np.float32))


def _cached_graph(call: Call, arguments: Sequence[Any], *, static: bool) -> tuple[Call, list[str]]:
    """Return a native graph of a factory's call, and the names of its arrays."""
    outputs = call(mx.sym, *(mx.sym.var(a) if isinstance(a, str) else a for a in arguments))
    if isinstance(outputs, tuple):
        outputs = mx.sym.Group([output for output in outputs if output is not None])
    flags = (("static_alloc", True), ("static_shape", True)) if static else ()
    return mx.nd.CachedOp(outputs, flags), outputs.list_inputs()


def _in_training(call: Call) -> Call:
    """Run the call in MXNet's training mode: Dropout drops, BatchNorm uses the batch's moments."""

    def run(*inputs: Any) -> Any:
        with mx.autograd.train_mode():
            return call(*inputs)

    return run


def _as_list(outputs: Any) -> list[Any]:
    """Return the wanted outputs as a list."""
    return [output for output in outputs if output is not None] if isinstance(outputs, list | tuple) else [outputs]
