"""Level 0: one ONNX node, in TensorFlow.

Imports TensorFlow, NumPy, `d5suite.levels`, `d5suite.network`, this package and `custom`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.backends.tensorflow import custom as custom_operators
from d5suite.backends.tensorflow.operators.context import (
    IMAGES_LAST,
    KERNELS,
    Call,
    Context,
    compiled,
    is_asynchronous,
    native_device,
)
from d5suite.backends.tensorflow.operators.table import OPERATORS
from d5suite.levels import operator as level
from d5suite.levels.layouts import restored
from d5suite.network.nodes.layouts import Layout, channels_last, identity, weight_layout
from d5suite.network.operation import Operation

_IMAGE_OPERATORS = frozenset(
    {"AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"}
)
"""Operators whose first input is an image, for which one of the layouts is faster."""


_CHANNELS_LAST_OPERATORS = frozenset({"LRN", "SoftmaxCrossEntropyLoss"})
"""Operators that TensorFlow computes along the last axis only."""


class Operator(level.Operator):
    """One ONNX node in TensorFlow.

    The backward pass is a tape's gradient or, in a traced mode, the second half of a graph of both
    passes.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        self._device = native_device(device)
        self._asynchronous = is_asynchronous(device)
        self._context = self._make_context(gradients=False)
        call = self._call(self._context)
        self.packing = self._context.packing
        # Calls of a traced function cost less without argument names and defaults.
        self.forward = call if mode == "eager" else compiled(lambda *inputs: call(*inputs), mode)
        self._traced: dict[tuple[Any, ...], Callable[[list[Any]], Callable[..., Any]]] = {}

    def _make_context(self, *, gradients: bool) -> Context:
        operation = self.operation
        native = self.mode == "xla" or self.device == "cuda"
        images_last = IMAGES_LAST.get((self.device, operation.precision), True)
        return Context.of_operation(
            operation,
            layouts=_layouts(operation, images_last=images_last),
            gradients=gradients,
            native_gradients=native,
            xla=self.mode == "xla",
            images_last=images_last,
            device=self.device,
        )

    def _call(self, context: Context) -> Call:
        operation, custom = self.operation, self.operation.custom
        factory = OPERATORS[operation.node.op_type] if custom is None else custom_operators.factory(custom)
        with tf.device(self._device):
            return factory(operation.node, context)

    def to_native(self, name: str, array: np.ndarray) -> Any:
        layout = self._context.layouts.get(name)
        with tf.device(self._device):
            return tf.constant(np.ascontiguousarray(array.transpose(layout)) if layout else array)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.mode != "eager":
            kinds = tuple(None if value is None else (value.dtype, *value.shape) for value in inputs)
            if kinds not in self._traced:  # tracing takes a second
                self._traced[kinds] = self._traced_backward(inputs)
            return self._traced[kinds]([value for value in inputs if value is not None])
        call = self._call(self._make_context(gradients=True))
        operation = self.operation
        sources = [inputs[index] for index in operation.differentiable]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outputs = call(*inputs)
        heads = self._heads(outputs)
        return lambda *gradients: _gradients(tape.gradient, heads, sources, gradients)

    def _heads(self, outputs: Any) -> list[Any]:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [outputs[index] for index in self.operation.differentiated]

    def _traced_backward(self, inputs: Sequence[Any]) -> Callable[[list[Any]], Callable[..., Any]]:
        """Trace both passes as one graph and cut it where the second reads the first's results.

        A persistent tape would make `tf.function` also compute what second derivatives need. The
        returned function runs the first pass on inputs like these, and returns the second pass.
        """
        operation, mode, call = self.operation, self.mode, self._call(self._make_context(gradients=True))
        given = [value for value in inputs if value is not None]
        forward: set[str] = set()

        def both(*values: Any) -> Any:
            rest = iter(values)
            arguments = [None if value is None else next(rest) for value in inputs]
            heads = self._heads(call(*arguments))
            forward.update(node.name for node in heads[0].graph.get_operations())
            starts = [tf.compat.v1.placeholder(head.dtype, head.shape) for head in heads]
            return starts, _gradients(tf.gradients, heads, [arguments[i] for i in operation.differentiable], starts)

        whole = tf.compat.v1.wrap_function(both, [tf.TensorSpec(value.shape, value.dtype) for value in given])
        starts, gradients = whole.structured_outputs
        fixed = {tensor.name for tensor in whole.graph.internal_captures}
        shared: dict[str, Any] = {}
        seen: set[str] = set()
        pending = list(gradients)
        while pending:
            tensor = pending.pop()
            if tensor.op.name not in forward:
                pending.extend(() if tensor.op.name in seen else tensor.op.inputs)
                seen.add(tensor.op.name)
            # Constants stay in both halves: kernels read shapes and axes when they are built.
            elif tensor.op.type != "Const" and tensor.name not in fixed:
                shared[tensor.name] = tensor
        fed = [tensor.name for tensor in whole.inputs][: len(given)]
        computed = [name for name in shared if name not in fed]
        ahead = compiled(whole.prune(whole.inputs, [shared[name] for name in computed]), mode) if computed else None
        behind = compiled(whole.prune([*shared.values(), *starts], gradients), mode)

        def begin(given: list[Any]) -> Callable[..., Any]:
            values = dict(zip(fed, given, strict=True))
            if ahead is not None:
                values.update(zip(computed, ahead(*given), strict=True))
            kept = [values[name] for name in shared]
            return lambda *heads: behind(*kept, *heads)

        return begin

    def to_neutral(self, name: str, value: Any) -> np.ndarray:
        array = restored(value.numpy(), self._context.layouts.get(name))
        return np.array(array, self.operation.dtypes[name], order="C")

    def extent(self, value: Any) -> tuple[int, int] | None:
        if self.device != "cpu" or not isinstance(value, tf.Tensor):
            return None
        if value.dtype == tf.bfloat16:  # not a type of Python's buffers
            value = tf.bitcast(value, tf.uint16)
        array = np.asarray(memoryview(value))  # the tensor's own memory
        return array.ctypes.data, array.nbytes

    def synchronize(self, *results: Any) -> None:
        if self._asynchronous:
            tf.test.experimental.sync_devices()


def _gradients(function: Call, heads: Sequence[Any], sources: Sequence[Any], starts: Sequence[Any]) -> list[Any]:
    """Return gradients of a tape or a graph as tensors; the gradients of `tf.gather` are slices."""
    found = function(heads, sources, list(starts), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(gradient) for gradient in found]


def _layouts(operation: Operation, *, images_last: bool) -> dict[str, Layout]:
    """Return the layouts of inputs that TensorFlow stores in another order than ONNX."""
    node, layouts = operation.node, {}
    for index, name in enumerate(node.inputs):
        if not name:
            continue
        rank = len(operation.shapes[name])
        layout = weight_layout(node, index, rank, kernels=KERNELS)
        last = node.op_type in _CHANNELS_LAST_OPERATORS or (images_last and node.op_type in _IMAGE_OPERATORS)
        if index == 0 and last and rank > 2:
            layout = channels_last(rank)
        if layout != identity(rank):
            layouts[name] = layout
    return layouts
