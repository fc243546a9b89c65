"""ONNX operators as deep500's NumPy operators, and custom operators where deep500 has none or a wrong one.

A factory ``(node, context)`` resolves a node's attributes once and returns a deep500 operator, whose ``forward`` takes
the inputs that `operands` names and whose ``backward`` gives their gradients. deep500 0.2.0's own operator does the
work wherever its answer is ONNX's; each class or factory that steps in says what would be wrong. Imports deep500
(through `repairs`), NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.errors import NetworkError
from d5suite.levels.operator import NodeContext
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.windows import Window, window

Operator = Any
"""A `deep500.CustomPythonOp`."""

Factory = Callable[[Node, "Context"], Operator]

Backward = Callable[[np.ndarray, Sequence[np.ndarray], np.ndarray], Sequence[Any]]
"""Gradient of the output, inputs and output to the gradients of the inputs."""

_RESOLVED = {"Clip": (1, 2), "Dropout": (1, 2), "Pad": (1, 2, 3), "Reshape": (1,), "Squeeze": (1,), "Unsqueeze": (1,)}
"""Inputs that factories read through `Context.constant`, so that operators do not take them."""

_random = np.random.default_rng()


def seed(number: int) -> None:
    """Start anew the random numbers that Dropout draws."""
    global _random
    _random = np.random.default_rng(number)


def operands(node: Node) -> list[str]:
    """The tensors that a node's operator takes; an omitted one may only come last."""
    resolved = _RESOLVED.get(node.op_type, ())
    return [name for index, name in enumerate(node.inputs) if name and index not in resolved]


@dataclass(frozen=True)
class Context(NodeContext):
    """What a factory may know about the place of its node.

    Attributes
    ----------
    shapes : mapping
        ONNX shape of every tensor.
    constants : mapping
        Values of the inputs that are fixed (shapes, axes, bounds).
    training : bool
        Whether BatchNormalization and Dropout are in training mode.
    dtype : type
        NumPy's type of the activations and parameters.
    vectorised : bool
        Whether convolutions are matrix products instead of loops.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    training: bool = False
    dtype: type = np.float32
    vectorised: bool = False

    def describe(self, node: Node, *, outputs: int = 1) -> tuple[list[Any], list[Any]]:
        """deep500's descriptors of an operator's inputs and outputs; sizes that only the data tell are left out."""

        def one(name: str) -> Any:
            shape = self.shapes.get(name, (None,))
            known = [n for n in shape if n is not None]
            return deep500.TensorDescriptor(self.dtype, known if len(known) == len(shape) else [])

        return [one(name) for name in operands(node)], [one(node.outputs[0])] * outputs


class Formula(deep500.CustomPythonOp):
    """A custom operator with one output, made of two functions."""

    def __init__(
        self, descriptors: tuple[list[Any], list[Any]], forward: Callable[..., np.ndarray], backward: Backward
    ) -> None:
        super().__init__(*descriptors)
        self._forward, self._backward = forward, backward

    def forward(self, *inputs: np.ndarray) -> np.ndarray:
        """The formula."""
        return self._forward(*inputs)

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> Sequence[Any]:
        """Its derivative."""
        return self._backward(grads[0], fwd_inputs, fwd_outputs[0])


def _native(name: str) -> Factory:
    """A factory for an operator of deep500 without settings."""
    return lambda node, context: getattr(native, name)(*context.describe(node))


def _formula(forward: Callable[..., np.ndarray], backward: Backward) -> Factory:
    """A factory for a formula without settings."""
    return lambda node, context: Formula(context.describe(node), forward, backward)


# Element by element.


class _Relu(native.ReluOp):
    """deep500's, with 0 for the derivative at 0 as every framework has it; deep500 has 1.

    At the start of training whole branches of a ResNet are 0, so that it shows.
    """

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        return [np.where(fwd_inputs[0] > 0, grads[0], 0)]


def _collapsed(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of a tensor that was broadcast: summed over what broadcasting repeated."""
    added = gradient.ndim - len(shape)
    axes = (*range(added), *(added + i for i, n in enumerate(shape) if n == 1 and gradient.shape[added + i] != 1))
    return gradient.sum(axes).reshape(shape) if axes else gradient


def _binary(forward: Callable[..., np.ndarray], slopes: Callable[..., tuple[Any, Any]]) -> Factory:
    """A factory for a function of two tensors, given its partial derivatives as factors."""

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        return [_collapsed(gradient * s, x.shape) for s, x in zip(slopes(*inputs), inputs, strict=True)]

    return _formula(forward, backward)


def _unary(forward: Callable[..., np.ndarray], slope: Callable[[np.ndarray, np.ndarray], Any]) -> Factory:
    """A factory for a function of one tensor, given its derivative by its input and output."""
    return _formula(forward, lambda gradient, inputs, output: [gradient * slope(inputs[0], output)])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), which overflows nowhere in this form."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def _leaky_relu(node: Node, context: Context) -> Operator:
    alpha = node.attributes["alpha"]
    return _unary(lambda x: np.where(x > 0, x, alpha * x), lambda x, _: np.where(x > 0, 1.0, alpha))(node, context)


def _clip(node: Node, context: Context) -> Operator:
    bounds = (context.constant(node, 1), context.constant(node, 2))
    low, high = (edge if c is None else c.item() for c, edge in zip(bounds, (-math.inf, math.inf), strict=True))
    return _unary(lambda x: np.clip(x, low, high), lambda x, _: (x >= low) & (x <= high))(node, context)


def _dropout(node: Node, context: Context) -> Operator:
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else ratio.item()
    if not context.training or probability == 0:
        return OPERATORS["Identity"](node, context)
    kept = np.zeros(0)

    def forward(x: np.ndarray) -> np.ndarray:
        nonlocal kept
        kept = (_random.random(x.shape) >= probability) / (1 - probability)
        return (x * kept).astype(x.dtype)

    return Formula(context.describe(node), forward, lambda gradient, *_: [gradient * kept])


# Shapes.


class _Reshape(native.ReshapeOp):
    """deep500's, with the new shape worked out from the old; it knows no 0, ONNX's "as it was"."""

    def __init__(self, *descriptors: list[Any], sizes: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
        super().__init__(*descriptors)
        self._sizes = sizes

    def forward(self, data: np.ndarray) -> np.ndarray:
        reshaped: np.ndarray = super().forward(data, self._sizes(data.shape))
        return reshaped

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        shape = np.array(fwd_outputs[0].shape)
        return list(super().backward(grads, [*fwd_inputs, shape], fwd_outputs)[:1])


def _reshape(node: Node, context: Context) -> Operator:
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default shape
    copies = not node.attributes["allowzero"]

    def sizes(shape: tuple[int, ...]) -> list[int]:
        return [shape[i] if n == 0 and copies else int(n) for i, n in enumerate(wanted)]

    return _Reshape(*context.describe(node), sizes=sizes)


def _flatten(node: Node, context: Context) -> Operator:
    axis = node.attributes["axis"]
    return _Reshape(*context.describe(node), sizes=lambda shape: (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _squeeze(node: Node, context: Context) -> Operator:
    shape, axes = context.shape(node.inputs[0]), context.constant(node, 1)
    chosen = [i for i, n in enumerate(shape) if n == 1] if axes is None else [int(a) % len(shape) for a in axes]
    return native.SqueezeOp(*context.describe(node), sorted(chosen))


def _unsqueeze(node: Node, context: Context) -> Operator:
    axes = context.constant(node, 1)
    assert axes is not None  # required since opset 13
    rank = context.rank(node.inputs[0]) + len(axes)
    return native.UnsqueezeOp(*context.describe(node), sorted(int(a) % rank for a in axes))


def _transpose(node: Node, context: Context) -> Operator:
    order = list(node.attributes.get("perm") or reversed(range(context.rank(node.inputs[0]))))
    back = np.argsort(order)
    return Formula(
        context.describe(node), lambda x: x.transpose(order), lambda gradient, *_: [gradient.transpose(back)]
    )


def _concat(node: Node, context: Context) -> Operator:
    axis = node.attributes["axis"]

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        return np.split(gradient, np.cumsum([x.shape[axis] for x in inputs])[:-1], axis)

    return Formula(context.describe(node), lambda *parts: np.concatenate(parts, axis), backward)


def _pad(node: Node, context: Context) -> Operator:
    if node.attributes["mode"] != "constant":
        raise NetworkError(f"Pad with mode {node.attributes['mode']!r} is not implemented", where=node.name)
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    if min(amounts, default=0) < 0:
        raise NetworkError(f"negative padding: {amounts.tolist()}", where=node.name)
    rank = context.rank(node.inputs[0])
    widths = [(0, 0)] * rank
    chosen = range(rank) if axes is None else [int(a) % rank for a in axes]
    for i, axis in enumerate(chosen):
        widths[axis] = (int(amounts[i]), int(amounts[i + len(chosen)]))
    fill = 0.0 if value is None else value.item()
    return Formula(
        context.describe(node),
        lambda x: np.pad(x, widths, constant_values=fill),
        lambda gradient, *_: [_cropped(gradient, widths)],
    )


def _cropped(padded: np.ndarray, widths: Sequence[tuple[int, int]]) -> np.ndarray:
    return padded[tuple(slice(a, n - b) for n, (a, b) in zip(padded.shape, widths, strict=True))]


# Matrix products.


class _Gemm(native.GemmOp):
    """deep500's, with the third input optional and its gradient put right: for a batch of one it fails."""

    def forward(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        product: np.ndarray = super().forward(a, b, a.dtype.type(0) if c is None else c)
        return product

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        above = grads[0]
        gradients = super().backward(grads, [*fwd_inputs[:2], above], fwd_outputs)[:2]
        return [*gradients, *(_collapsed(self.beta * above, c.shape) for c in fwd_inputs[2:])]


def _gemm(node: Node, context: Context) -> Operator:
    a = node.attributes
    return _Gemm(*context.describe(node), a["alpha"], a["beta"], a["transA"], a["transB"])


def _matmul(node: Node, context: Context) -> Operator:
    """deep500's gradient is right for two matrices, and reverses all axes of stacks of them."""
    if [context.rank(name) for name in node.inputs] == [2, 2]:
        return native.MatMulOp(*context.describe(node))

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        a, b = inputs
        left, right = a.ndim == 1, b.ndim == 1  # a vector counts as a row on the left, as a column on the right
        gradient = gradient[..., None] if right else gradient
        gradient = gradient[..., None, :] if left else gradient
        rows, columns = (a[None, :] if left else a), (b[:, None] if right else b)
        by_rows, by_columns = gradient @ columns.swapaxes(-1, -2), rows.swapaxes(-1, -2) @ gradient
        return [
            _collapsed(by_rows, rows.shape).reshape(a.shape),
            _collapsed(by_columns, columns.shape).reshape(b.shape),
        ]

    return Formula(context.describe(node), np.matmul, backward)


# Windows.


def _spatial(node: Node, context: Context) -> Shape:
    """The image's spatial sizes, of which there may be one, two or three."""
    sizes = context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    return sizes


def _conv(node: Node, context: Context) -> Operator:
    w = window(node, _spatial(node, context), context.shape(node.inputs[1])[2:])
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
    """Convolution as a sum over the kernel's cells, each a matrix product of its weights with the pixels it meets."""

    def __init__(self, inputs: list[Any], outputs: list[Any], w: Window, groups: int) -> None:
        super().__init__(inputs, outputs)
        self._window, self._groups = w, groups

    def _cells(self, padded: np.ndarray, weight: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Index of a cell's pixels, its weights (groups, outputs, inputs), and the pixels as matrices."""
        for index, tap in enumerate(_taps(self._window)):
            weights = weight.reshape(self._groups, -1, weight.shape[1], math.prod(self._window.kernel))[..., index]
            yield tap, weights, padded[tap].reshape(len(padded), self._groups, weight.shape[1], -1)

    def forward(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """The convolution."""
        cells = self._cells(np.pad(x, _widths(self._window)), weight)
        y = reduce(np.add, (weights @ pixels for _, weights, pixels in cells))
        y = y.reshape(len(x), len(weight), *self._window.outputs)
        return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """By the image, the weight and, where there is one, the bias."""
        x, weight, *bias = fwd_inputs
        padded = np.pad(x, _widths(self._window))
        above = grads[0].reshape(len(x), self._groups, len(weight) // self._groups, -1)
        by_image, by_weight = np.zeros_like(padded), []
        for tap, weights, pixels in self._cells(padded, weight):
            by_image[tap] += (weights.swapaxes(1, 2) @ above).reshape(by_image[tap].shape)
            by_weight.append((above @ pixels.swapaxes(2, 3)).sum(0))
        found = [_cropped(by_image, _widths(self._window)), np.stack(by_weight, -1).reshape(weight.shape)]
        return [*found, grads[0].sum((0, *range(2, x.ndim)))] if bias else found


def _is_native_pooling(w: Window) -> bool:
    """Whether deep500's pooling gives ONNX's output.

    It has neither dilations nor ceil_mode, and of two or more dimensions' pads it takes the wrong ones unless all are
    the same.
    """
    same = len(w.kernel) == 1 or len({*w.pads_begin, *w.pads_end}) == 1
    inside = all(max(b, e) < k for b, e, k in zip(w.pads_begin, w.pads_end, w.kernel, strict=True))
    return same and inside and max(w.dilations) == 1 and not any(w.overhang)


def _widths(w: Window) -> list[tuple[int, int]]:
    """What pads an image so that every window fits into it, for `numpy.pad`."""
    ends = (end + more for end, more in zip(w.pads_end, w.overhang, strict=True))
    return [(0, 0), (0, 0), *zip(w.pads_begin, ends, strict=True)]


def _taps(w: Window) -> Iterator[tuple[Any, ...]]:
    """For each cell of the window, the index of the padded image's cells that it meets."""
    for offsets in itertools.product(*map(range, w.kernel)):
        yield (
            ...,
            *(
                slice(o * d, o * d + (n - 1) * s + 1, s)
                for o, d, n, s in zip(offsets, w.dilations, w.outputs, w.strides, strict=True)
            ),
        )


def _max_pool_gradient(w: Window, above: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Each output's gradient to the first cell of its window that holds the maximum."""
    padded = np.pad(x, _widths(w), constant_values=-np.inf)
    gradient = np.zeros_like(padded)
    waiting = np.ones(y.shape, bool)
    for tap in _taps(w):
        hit = waiting & (padded[tap] == y)
        gradient[tap] += np.where(hit, above, 0)
        waiting &= ~hit
    return _cropped(gradient, _widths(w))


class _MaxPool(native.MaxPoolOp):
    """deep500's, with the gradients of overlapping windows added up; deep500 keeps one of them."""

    def __init__(self, *arguments: Any, full: Window, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._window = full

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        return [_max_pool_gradient(self._window, grads[0], fwd_inputs[0], fwd_outputs[0])]


def _max_pool(node: Node, context: Context) -> Operator:
    w = window(node, _spatial(node, context))
    if _is_native_pooling(w):
        settings = {"kernel_shape": list(w.kernel), "pads": [*w.pads_begin, *w.pads_end], "strides": list(w.strides)}
        if all(s >= k for s, k in zip(w.strides, w.kernel, strict=True)):
            return native.MaxPoolOp(*context.describe(node), **settings)
        return _MaxPool(*context.describe(node), full=w, **settings)

    def forward(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, _widths(w), constant_values=-np.inf)
        return reduce(np.maximum, (padded[tap] for tap in _taps(w)))

    return Formula(
        context.describe(node),
        forward,
        lambda gradient, inputs, output: [_max_pool_gradient(w, gradient, inputs[0], output)],
    )


def _average_pool(node: Node, context: Context) -> Operator:
    sizes = _spatial(node, context)
    w = window(node, sizes)
    include = node.attributes["count_include_pad"]
    if _is_native_pooling(w):
        return native.AveragePoolOp(
            *context.describe(node),
            count_include_pad=include,
            kernel_shape=list(w.kernel),
            pads=[*w.pads_begin, *w.pads_end],
            strides=list(w.strides),
        )
    # The cells that count: the image, and with count_include_pad its padding, but never what ceil_mode adds beyond.
    counted = np.ones([int(n or 0) for n in sizes])
    if include:
        counted = np.pad(counted, list(zip(w.pads_begin, w.pads_end, strict=True)), constant_values=1)
    outside = [(0, more) for more in w.overhang] if include else _widths(w)[2:]
    counted = np.pad(counted, outside)
    counts = np.maximum(sum(counted[tap] for tap in _taps(w)), 1).astype(context.dtype)

    def forward(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, _widths(w))
        return reduce(np.add, (padded[tap] for tap in _taps(w))) / counts

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        padded = np.pad(np.zeros_like(inputs[0]), _widths(w))
        for tap in _taps(w):
            padded[tap] += gradient / counts
        return [_cropped(padded, _widths(w))]

    return Formula(context.describe(node), forward, backward)


class _GlobalAveragePool(native.GlobalAveragePoolOp):
    """deep500's, which averages over the wrong axes unless there are two spatial ones."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        return x.mean(tuple(range(2, x.ndim)), keepdims=True)


def _global_average_pool(node: Node, context: Context) -> Operator:
    planar = context.rank(node.inputs[0]) == 4
    return (native.GlobalAveragePoolOp if planar else _GlobalAveragePool)(*context.describe(node))


def _global_max_pool_gradient(
    gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray
) -> list[np.ndarray]:
    x = inputs[0]
    flat = x.reshape(*x.shape[:2], -1)
    found = np.zeros_like(flat)
    np.put_along_axis(found, flat.argmax(2)[..., None], gradient.reshape(*x.shape[:2], 1), 2)
    return [found.reshape(x.shape)]


# Normalisation and probabilities.


def _batch_normalization(node: Node, context: Context) -> Operator:
    """deep500's two operators, whose momentum and biased variance are ONNX's.

    The training one has five outputs: the result, the moved running statistics, and the batch's own.
    """
    settings = {"epsilon": node.attributes["epsilon"], "momentum": node.attributes["momentum"]}
    if context.training:
        return native.BatchNormalizationTrainingOp(*context.describe(node, outputs=5), **settings)
    return native.BatchNormalizationInferenceOp(*context.describe(node), **settings)


def _lrn(node: Node, context: Context) -> Operator:
    a = node.attributes
    size, alpha, beta, bias = a["size"], a["alpha"] / a["size"], a["beta"], a["bias"]
    before, after = (size - 1) // 2, size // 2

    def neighbours(x: np.ndarray, before: int, after: int) -> np.ndarray:
        """Sum over the channels from so many before to so many after."""
        padded = np.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        return reduce(np.add, (padded[:, i : i + x.shape[1]] for i in range(size)))

    def forward(x: np.ndarray) -> np.ndarray:
        return x * (bias + alpha * neighbours(x**2, before, after)) ** -beta

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        x = inputs[0]
        total = bias + alpha * neighbours(x**2, before, after)
        through = neighbours(gradient * x * total ** (-beta - 1), after, before)
        return [gradient * total**-beta - 2 * alpha * beta * x * through]

    return Formula(context.describe(node), forward, backward)


class _Softmax(native.SoftmaxOp):
    """deep500's along one axis: as before ONNX 13, it takes all axes from the given one on for one."""

    def __init__(self, *descriptors: list[Any], along: int, rank: int) -> None:
        super().__init__(*descriptors, axis=rank - 1)
        self._along = along

    def forward(self, x: np.ndarray) -> np.ndarray:
        return np.moveaxis(super().forward(np.moveaxis(x, self._along, -1)), -1, self._along)

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        moved = ([np.moveaxis(values[0], self._along, -1)] for values in (grads, fwd_inputs, fwd_outputs))
        return [np.moveaxis(super().backward(*moved)[0], -1, self._along)]


def _softmax(node: Node, context: Context) -> Operator:
    return _Softmax(*context.describe(node), along=node.attributes["axis"], rank=context.rank(node.inputs[0]))


def _logarithmic_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    shifted = x - x.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def _log_softmax(node: Node, context: Context) -> Operator:
    axis = node.attributes["axis"]
    return Formula(
        context.describe(node),
        lambda x: _logarithmic_softmax(x, axis),
        lambda gradient, _, output: [gradient - np.exp(output) * gradient.sum(axis, keepdims=True)],
    )


class SoftmaxCrossEntropy(deep500.CustomPythonOp):
    """ONNX's SoftmaxCrossEntropyLoss; deep500's cross-entropies want probabilities, and clip them.

    Parameters
    ----------
    inputs, outputs : list of deep500.TensorDescriptor
    reduction : str
        ``mean``, ``sum`` or ``none``.
    ignored : int or None
        A label that does not count.
    """

    def __init__(
        self, inputs: list[Any], outputs: list[Any], *, reduction: str = "mean", ignored: int | None = None
    ) -> None:
        super().__init__(inputs, outputs)
        self._reduction, self._ignored = reduction, ignored

    def _parts(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Logarithms of the probabilities, valid labels, what each sample counts, and its loss before that."""
        logarithms = _logarithmic_softmax(x, 1)
        kept = labels != self._ignored if self._ignored is not None else np.ones(labels.shape, bool)
        valid = np.where(kept, labels, 0)
        factors = kept.astype(x.dtype) if weight is None else weight[valid] * kept
        return logarithms, valid, factors, -np.take_along_axis(logarithms, valid[:, None], 1)[:, 0]

    def _share(self, factors: np.ndarray) -> Any:
        return 1 / factors.sum() if self._reduction == "mean" else 1

    def forward(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
        """The loss."""
        _, _, factors, losses = self._parts(x, labels, weight)
        weighted = factors * losses
        return weighted if self._reduction == "none" else np.asarray(weighted.sum() * self._share(factors))

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """By the logits, by the labels (nothing), and by the weights where there are any."""
        x, labels, *weight = fwd_inputs
        logarithms, valid, factors, losses = self._parts(x, labels, weight[0] if weight else None)
        above = grads[0] * self._share(factors)
        difference = np.exp(logarithms)
        np.put_along_axis(difference, valid[:, None], np.take_along_axis(difference, valid[:, None], 1) - 1, 1)
        found = [difference * (above * factors)[:, None], np.zeros_like(labels)]
        if weight:
            excess = losses - (fwd_outputs[0] if self._reduction == "mean" else 0)
            by_weight = np.zeros_like(weight[0])
            np.add.at(by_weight, valid, above * excess * (factors != 0))
            found.append(by_weight)
        return found


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Operator:
    a = node.attributes
    return SoftmaxCrossEntropy(*context.describe(node), reduction=a["reduction"], ignored=a.get("ignore_index"))


OPERATORS: dict[str, Factory] = {
    "Add": _native("AddOp"),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _binary(np.divide, lambda a, b: (1 / b, -a / b**2)),
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _formula(lambda x: x.max(tuple(range(2, x.ndim)), keepdims=True), _global_max_pool_gradient),
    "Identity": _formula(lambda x: x, lambda gradient, *_: [gradient]),
    "LRN": _lrn,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _binary(np.multiply, lambda a, b: (b, a)),
    "Pad": _pad,
    "Relu": lambda node, context: _Relu(*context.describe(node)),
    "Reshape": _reshape,
    "Sigmoid": _unary(_sigmoid, lambda _, y: y * (1 - y)),
    "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Squeeze": _squeeze,
    "Sub": _binary(np.subtract, lambda a, b: (1, -1)),
    "Sum": _native("SumOp"),
    "Tanh": _unary(np.tanh, lambda _, y: 1 - y**2),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""
