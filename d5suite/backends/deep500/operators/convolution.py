"""ONNX on deep500: convolution and transposed convolution.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce as fold
from operator import iadd
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, Formula, cropped, taps, widths
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes.sliding import read_columns, read_conv, read_conv_transpose
from d5suite.network.nodes.windows import Window


def conv(node: Node, context: Context) -> CustomOperator:
    w = read_conv(node, context)
    if context.vectorised:
        return _VectorisedConv(*context.describe(node), w, node.attributes["group"])
    return native.ConvOp(
        *context.describe(node),
        dilations=list(w.dilations),
        group=node.attributes["group"],
        kernel_shape=list(w.kernel),
        pads=[*w.pads_begin, *w.pads_end],
        strides=list(w.strides),
    )


class _VectorisedConv(deep500.CustomPythonOp):
    """Convolution as a sum of matrix products of weights and pixels, one per kernel cell.

    The pixels of all images are columns of one contiguous matrix per group: NumPy multiplies other
    layouts without BLAS, and small images give small products.
    """

    def __init__(self, inputs: list[Any], outputs: list[Any], w: Window, groups: int) -> None:
        super().__init__(inputs, outputs)
        self._window, self._groups = w, groups
        self._widths, self._taps = widths(w), taps(w)

    def _cells(self, weight: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield each kernel cell's pixel index and its weights, (groups, outputs, inputs)."""
        by_group = weight.reshape(self._groups, -1, weight.shape[1], math.prod(self._window.kernel))
        return zip(self._taps, np.ascontiguousarray(np.moveaxis(by_group, -1, 0)), strict=True)

    def _matrices(self, images: np.ndarray) -> np.ndarray:
        """Reshape images to (groups, channels, pixels of all images)."""
        channels = images.shape[1] // self._groups
        return np.ascontiguousarray(images.swapaxes(0, 1)).reshape(self._groups, channels, -1)

    def _images(self, matrices: np.ndarray, count: int, sizes: Sequence[int]) -> np.ndarray:
        """Reshape matrices to a number of images of these spatial sizes."""
        return matrices.reshape(-1, count, *sizes).swapaxes(0, 1)

    def forward(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Convolve."""
        padded = np.pad(x, self._widths)
        y = fold(iadd, (weights @ self._matrices(padded[tap]) for tap, weights in self._cells(weight)))
        y = np.ascontiguousarray(self._images(y, len(x), self._window.outputs))
        return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))

    def by_image(self, above: np.ndarray, weight: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Return the gradient of an image of these spatial sizes."""
        padded = [n + before + after for n, (before, after) in zip(sizes, self._widths[2:], strict=True)]
        found = np.zeros((len(above), weight.shape[1] * self._groups, *padded), np.result_type(above, weight))
        matrices = self._matrices(above)
        for tap, weights in self._cells(weight):
            found[tap] += self._images(weights.swapaxes(1, 2) @ matrices, len(above), above.shape[2:])
        return cropped(found, self._widths)

    def by_weight(self, above: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return the gradient of the weight."""
        padded, matrices = np.pad(x, self._widths), self._matrices(above)
        cells = [matrices @ self._matrices(padded[tap]).swapaxes(1, 2) for tap in self._taps]
        return np.stack(cells, -1).reshape(weight.shape)

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Return the gradients of image, weight and, if there is one, bias."""
        above = grads[0]
        x, weight, *bias = fwd_inputs
        found = [self.by_image(above, weight, x.shape[2:]), self.by_weight(above, x, weight)]
        return [*found, above.sum((0, *range(2, x.ndim)))] if bias else found


class _TransposedConv(deep500.CustomPythonOp):
    """Transposed convolution, which is a convolution's image gradient; deep500 has none."""

    def __init__(
        self, inputs: list[Any], outputs: list[Any], convolution: _VectorisedConv, sizes: Sequence[int]
    ) -> None:
        super().__init__(inputs, outputs)
        self._convolution, self._sizes = convolution, sizes

    def forward(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Return the transposed convolution."""
        y = self._convolution.by_image(x, weight, self._sizes)
        return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Return the gradients of image, weight and, if there is one, bias."""
        above = grads[0]
        x, weight, *bias = fwd_inputs
        found = [self._convolution.forward(above, weight), self._convolution.by_weight(x, above, weight)]
        return [*found, above.sum((0, *range(2, x.ndim)))] if bias else found


def conv_transpose(node: Node, context: Context) -> CustomOperator:
    w = read_conv_transpose(node, context)
    convolution = _VectorisedConv([], [], w.convolution, node.attributes["group"])
    return _TransposedConv(*context.describe(node), convolution, w.outputs)


def col2_im(node: Node, context: Context) -> CustomOperator:
    """Col2Im."""
    plan = read_columns(node, context)
    image, channels = plan.window.image, plan.channels
    size = math.prod(image)
    cells: Any = (..., plan.cells)

    def forward(x: np.ndarray) -> np.ndarray:
        found = np.zeros((x.shape[0], channels, size + 1), x.dtype)
        np.add.at(found, cells, x.reshape(x.shape[0], channels, -1))
        return found[..., :size].reshape(x.shape[0], channels, *image)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        padded = np.pad(gradient.reshape(*gradient.shape[:2], -1), ((0, 0), (0, 0), (0, 1)))
        return [padded[cells].reshape(inputs[0].shape)]

    return Formula(context.describe(node), forward, backward)
