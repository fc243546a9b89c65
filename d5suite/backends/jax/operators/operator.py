"""Level 0 on JAX: one ONNX node and its gradient.

Imports JAX, NumPy, `d5suite.levels`, `d5suite.network` and the rest of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from d5suite.backends.jax import custom as custom_operators
from d5suite.backends.jax import runtime
from d5suite.backends.jax.operators.context import HEADS_INSIDE, Call, Context
from d5suite.backends.jax.operators.table import OPERATORS
from d5suite.levels import operator as level
from d5suite.levels.layouts import arranged, restored
from d5suite.network import Node
from d5suite.network.nodes.layouts import Layout, channels_last, weight_layout
from d5suite.network.operation import STATIC_INPUTS, Operation


def _input_layout(node: Node, index: int, rank: int) -> Layout:
    """Return the fastest layout for an input of a single node."""
    if node.op_type in _OF_IMAGES and index == 0:
        return channels_last(rank)
    if node.op_type == "Attention" and index in (0, 1, 2, 4, 5) and rank == 4:
        return HEADS_INSIDE
    return weight_layout(node, index, rank)


_OF_IMAGES = frozenset(
    {
        "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "GlobalAveragePool", "GlobalMaxPool", "LRN",
        "MaxPool", "SoftmaxCrossEntropyLoss",
    }
)  # fmt: skip
"""Operators whose first input has channels, or classes, as its second axis."""

_INDICES = {
    "Gather": (1,),
    "GatherElements": (1,),
    "OneHot": (0,),
    "ScatterElements": (1,),
    "SoftmaxCrossEntropyLoss": (1,),
}
"""Inputs that are indices, by operator: they become int32, as JAX's own indices are."""


class Operator(level.Operator):
    """One ONNX node on JAX.

    The backward pass is the node's `jax.vjp` in two programs: the first returns the residuals that
    the second needs.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        node = operation.node
        self._device = runtime.native_device(device)
        # On the CPU float32 is always float32; on GPUs XLA's default is TF32.
        exact = device == "cuda" and operation.precision not in ("bf16", "fp16")
        context = Context.of_operation(
            operation,
            layouts={
                name: _input_layout(node, index, len(operation.shapes[name]))
                for index, name in enumerate(node.inputs)
                if name
            },
            precision=lax.Precision.HIGHEST if exact else None,
            device=device,
        )
        self._random = node.op_type == "Dropout" and operation.training
        custom = operation.custom
        factory = OPERATORS[node.op_type] if custom is None else custom_operators.factory(custom)
        call = factory(node, context)
        self._call = _with_key(call) if self._random else call
        self._layouts, self.packing = context.layouts, context.packing
        special = {*_INDICES.get(node.op_type, ()), *STATIC_INPUTS.get(node.op_type, ())}
        self._double = any(
            operation.dtypes[name].itemsize == 8
            for index, name in enumerate(node.inputs)
            if name and index not in special
        )
        if custom is not None or node.op_type == "Cast":  # which write outputs of exactly these types
            self._double |= any(operation.dtypes[name].itemsize == 8 for name in operation.outputs)
        self.forward = self._native(self._call)
        self._record = self._native(self._recorded)
        self._pull: Call | None = None

    def _scope(self) -> AbstractContextManager[None]:
        return runtime.double_precision() if self._double else nullcontext()

    def _native(self, function: Call) -> Call:
        """Return the function as this mode runs it; the result can be called outside `_scope`."""
        if self.mode == "eager":

            def scoped(*arguments: Any) -> Any:
                with self._scope():
                    return function(*arguments)

            return scoped if self._double else function
        jitted: Call = jax.jit(function)
        if not self._double:
            return jitted
        program: Call | None = None

        def compiled(*arguments: Any) -> Any:
            # A compiled program needs no scope, and entering one takes longer than this call.
            nonlocal program
            if program is None:
                with self._scope():
                    program = jitted.lower(*arguments).compile()  # type: ignore[attr-defined]
            return program(*arguments)

        return compiled

    def _recorded(self, *inputs: Any) -> Any:
        """Return the gradient function, a pytree of its residuals."""
        operation = self.operation

        def run(*sources: Any) -> Any:
            leaves = list(inputs)
            for index, source in zip(operation.differentiable, sources, strict=True):
                leaves[index] = source
            outputs = self._call(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return tuple(outputs[index] for index in operation.differentiated)

        _, pull = jax.vjp(run, *(inputs[index] for index in operation.differentiable))
        return pull

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        self.check_feed(arrays)
        node = self.operation.node
        fed: list[Any] = []
        for index, (name, array) in enumerate(zip(node.inputs, arrays, strict=True)):
            if array is None or index in STATIC_INPUTS.get(node.op_type, ()):
                fed.append(None)
                continue
            if index in _INDICES.get(node.op_type, ()):
                array = array.astype(np.int32)
            fed.append(self.to_native(name, self.packing[name].pack(array) if name in self.packing else array))
        if self._random:
            fed.append(jax.device_put(jax.random.key_data(runtime.initial_key()), self._device))
        return jax.block_until_ready(fed)

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        return jax.block_until_ready(super().feed_gradients(arrays))

    def to_native(self, name: str, array: np.ndarray) -> jax.Array:
        """Copy an array to the device in its storage layout."""
        stored = np.array(arranged(array, self._layout(name)), order="C")
        with self._scope():
            return jax.device_put(stored, self._device)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Flattened only once, because JAX is slow to flatten a gradient function.
        residuals, structure = jax.tree_util.tree_flatten(self._record(*inputs))
        if self._pull is None or self.mode == "eager":
            self._pull = self._native(
                lambda leaves, *gradients: jax.tree_util.tree_unflatten(structure, leaves)(gradients)
            )
        jax.block_until_ready(residuals)
        return partial(self._pull, residuals)

    def to_neutral(self, name: str, value: jax.Array) -> np.ndarray:
        return np.array(restored(np.asarray(value), self._layout(name)), self.operation.dtypes[name], order="C")

    def _layout(self, name: str) -> Layout | None:
        return None if name in self.packing else self._layouts.get(name)

    def extent(self, value: Any) -> tuple[int, int] | None:
        return (value.unsafe_buffer_pointer(), value.nbytes) if isinstance(value, jax.Array) else None

    def synchronize(self, *results: Any) -> None:
        jax.block_until_ready(results)  # JAX can wait for arrays only


def _with_key(call: Call) -> Call:
    """Return a function that takes its random key, as numbers, after its inputs."""
    return lambda *inputs: call(*inputs[:-1], key=jax.random.wrap_key_data(inputs[-1]))
