"""ONNX on deep500: operators that move data.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, Formula, collapsed, cropped
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes import shape as nodes
from d5suite.network.nodes.resize import read_resize


class _Reshape(native.ReshapeOp):
    """deep500's Reshape with a resolved shape: deep500 does not support 0, ONNX's copied size."""

    def __init__(self, *descriptors: list[Any], sizes: Sequence[int]) -> None:
        super().__init__(*descriptors)
        self._sizes = sizes

    def forward(self, data: np.ndarray) -> np.ndarray:
        reshaped: np.ndarray = super().forward(data, self._sizes)
        return reshaped

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        shape = np.array(fwd_outputs[0].shape)
        return list(super().backward(grads, [*fwd_inputs, shape], fwd_outputs)[:1])


def reshape(node: Node, context: Context) -> CustomOperator:
    return _Reshape(*context.describe(node), sizes=nodes.read_reshape(node, context).sizes)


def flatten(node: Node, context: Context) -> CustomOperator:
    return _Reshape(*context.describe(node), sizes=nodes.read_flatten(node, context))


def squeeze(node: Node, context: Context) -> CustomOperator:
    return native.SqueezeOp(*context.describe(node), list(nodes.read_squeeze(node, context)))


def unsqueeze(node: Node, context: Context) -> CustomOperator:
    return native.UnsqueezeOp(*context.describe(node), list(nodes.read_unsqueeze(node, context)))


def transpose(node: Node, context: Context) -> CustomOperator:
    order = nodes.read_transpose(node, context)
    back = np.argsort(order)
    return Formula(
        context.describe(node), lambda x: x.transpose(order), lambda gradient, *_: [gradient.transpose(back)]
    )


def concat(node: Node, context: Context) -> CustomOperator:
    axis = nodes.read_axis(node, context)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        return np.split(gradient, np.cumsum([x.shape[axis] for x in inputs])[:-1], axis)

    return Formula(context.describe(node), lambda *parts: np.concatenate(parts, axis), backward)


def pad(node: Node, context: Context) -> CustomOperator:
    plan = nodes.read_pad(node, context)
    widths, mode, fill = plan.widths, plan.mode, plan.value
    if mode != "constant":
        return Formula(
            context.describe(node),
            lambda x: np.pad(x, widths, mode),  # type: ignore[call-overload]
            lambda gradient, inputs, _: [_gathered(gradient, plan.rows(inputs[0].shape), inputs[0].shape)],
        )
    added, kept = plan.added, plan.kept

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        found = np.zeros_like(inputs[0])
        found[kept] = cropped(gradient, added)
        return [found]

    return Formula(context.describe(node), lambda x: np.pad(x[kept], added, constant_values=fill), backward)


def _gathered(gradient: np.ndarray, rows: Mapping[int, np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """Return the gradient of copying cells, as a padding does: each sums its copies' gradients."""
    for axis, indices in rows.items():
        gradient = _scattered(gradient, indices, axis, shape[axis])
    return gradient


def slice_(node: Node, context: Context) -> CustomOperator:
    plan = nodes.read_slice(node, context)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        found = np.zeros(inputs[0].shape, gradient.dtype)
        np.flip(found, plan.reversed)[plan.cuts] = gradient
        return [found]

    return Formula(context.describe(node), lambda x: np.flip(x, plan.reversed)[plan.cuts], backward)


def gather(node: Node, context: Context) -> CustomOperator:
    axis = nodes.read_axis(node, context)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        data, indices = inputs
        rows = gradient.reshape(*data.shape[:axis], indices.size, *data.shape[axis + 1 :])
        return [_scattered(rows, indices.ravel(), axis, data.shape[axis]), np.zeros_like(indices)]

    return Formula(context.describe(node), lambda data, indices: np.take(data, indices, axis), backward)


def _scattered(gradient: np.ndarray, indices: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Return the gradient of ``numpy.take(x, indices, axis)``; ``size`` is x's on that axis."""
    found = np.zeros((*gradient.shape[:axis], size, *gradient.shape[axis + 1 :]), gradient.dtype)
    where: Any = (*[slice(None)] * axis, indices)
    np.add.at(found, where, gradient)
    return found


def expand(node: Node, context: Context) -> CustomOperator:
    sizes = nodes.read_expand(node, context)
    return Formula(
        context.describe(node),
        lambda x: np.broadcast_to(x, np.broadcast_shapes(x.shape, sizes)),
        lambda gradient, inputs, _: [collapsed(gradient, inputs[0].shape)],
    )


def tile(node: Node, context: Context) -> CustomOperator:
    repeats = nodes.read_tile(node, context)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        shape = [n for pair in zip(repeats, inputs[0].shape, strict=True) for n in pair]
        return [gradient.reshape(shape).sum(tuple(range(0, len(shape), 2)))]

    return Formula(context.describe(node), lambda x: np.tile(x, repeats), backward)


class _Split(deep500.CustomPythonOp):
    """A custom operator whose outputs are parts of its input."""

    def __init__(self, *descriptors: list[Any], axis: int, places: Sequence[int]) -> None:
        super().__init__(*descriptors)
        self._axis, self._places = axis, places

    def forward(self, x: np.ndarray) -> Any:
        """Return the parts."""
        parts = np.split(x, self._places, self._axis)
        return parts if len(parts) > 1 else parts[0]

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Concatenate the parts' gradients."""
        parts = [gradient + np.zeros_like(y) for gradient, y in zip(grads, fwd_outputs, strict=True)]
        return [np.concatenate(parts, self._axis)]


def split(node: Node, context: Context) -> CustomOperator:
    axis, sizes = nodes.read_split(node, context)
    places = np.cumsum(sizes[:-1]).tolist()
    return _Split(*context.describe(node, outputs=len(node.outputs)), axis=axis, places=places)


def trilu(node: Node, context: Context) -> CustomOperator:
    upper, diagonal = nodes.read_trilu(node, context)
    part = np.triu if upper else np.tril
    return Formula(context.describe(node), lambda x: part(x, diagonal), lambda gradient, *_: [part(gradient, diagonal)])


def blocks(node: Node, context: Context) -> CustomOperator:
    """DepthToSpace and SpaceToDepth."""
    plan = nodes.read_blocks(node, context)
    middle = [plan.split[axis] for axis in plan.order]
    back = np.argsort(plan.order)
    return Formula(
        context.describe(node),
        lambda x: x.reshape(plan.split).transpose(plan.order).reshape(plan.merged),
        lambda gradient, inputs, _: [gradient.reshape(middle).transpose(back).reshape(inputs[0].shape)],
    )


def resize(node: Node, context: Context) -> CustomOperator:
    plan = read_resize(node, context)

    def forward(x: np.ndarray) -> np.ndarray:
        for axis, rows in plan.rows.items():
            x = np.take(x, rows, axis)
        return _interpolated(x, plan.weights)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        gradient = _interpolated(gradient, {axis: matrix.T for axis, matrix in plan.weights.items()})
        return [_gathered(gradient, plan.rows, inputs[0].shape)]

    return Formula(context.describe(node), forward, backward)


def _interpolated(x: np.ndarray, weights: Mapping[int, np.ndarray]) -> np.ndarray:
    """Multiply by a matrix along each axis."""
    for axis, matrix in weights.items():
        x = np.moveaxis(np.tensordot(x, matrix.astype(x.dtype), ([axis], [1])), -1, axis)
    return x


depth_to_space = space_to_depth = blocks
