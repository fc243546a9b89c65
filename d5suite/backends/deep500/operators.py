"""ONNX operators as deep500's NumPy operators, custom ones where deep500 has none or a wrong one, and Level 0 on them.

A factory ``(node, context)`` resolves a node's attributes once and returns a deep500 operator, whose ``forward`` takes
the inputs that `operands` names and whose ``backward`` gives their gradients. An operator with several outputs returns
them as a list: ONNX's first and then, as deep500's BatchNormalization does, values that its ``backward`` needs again.
deep500 0.2.0's own operator does the work wherever its answer is ONNX's; each class or factory that steps in says what
would be wrong. Imports deep500 (through `repairs`), NumPy, SciPy, `d5suite.errors`, `d5suite.levels` and
`d5suite.network`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import iadd
from typing import Any, NamedTuple

import numpy as np
from scipy.special import erf

from d5suite.backends.deep500 import custom as custom_operators
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.backends.deep500.repairs import deep500
from d5suite.errors import NetworkError
from d5suite.levels import attention as attention_nodes
from d5suite.levels import operator as level
from d5suite.levels.operator import NodeContext
from d5suite.levels.recurrent import recurrent
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.operation import PRECISIONS, STATIC_INPUTS, Operation
from d5suite.network.windows import Window, transposed_window, window

CustomOperator = Any
"""A `deep500.CustomPythonOp`."""

Factory = Callable[[Node, "Context"], CustomOperator]

Backward = Callable[[np.ndarray, Sequence[np.ndarray], np.ndarray], Sequence[Any]]
"""Gradient of the output, inputs and output to the gradients of the inputs."""

_random = np.random.default_rng()


def seed(number: int) -> None:
    """Start anew the random numbers that Dropout draws."""
    global _random
    _random = np.random.default_rng(number)


_LOW = 2**64 - 1


def random_state() -> np.ndarray:
    """What Dropout draws its next numbers from: the generator's state and increment, 128 bits each, as uint64 (4,)."""
    held = _random.bit_generator.state["state"]
    return np.array([part for n in (held["state"], held["inc"]) for part in (n >> 64, n & _LOW)], np.uint64)


def load_random_state(parts: np.ndarray) -> None:
    """Go on drawing from what `random_state` gave."""
    high, low, more_high, more_low = (int(part) for part in parts)
    generator = _random.bit_generator
    generator.state = {**generator.state, "state": {"state": high << 64 | low, "inc": more_high << 64 | more_low}}


def positions(node: Node) -> list[int]:
    """Numbers of the inputs that a node's operator takes: neither omitted nor read when it was built."""
    resolved = STATIC_INPUTS.get(node.op_type, ())
    return [index for index, name in enumerate(node.inputs) if name and index not in resolved]


def operands(node: Node) -> list[str]:
    """The tensors that a node's operator takes."""
    return [node.inputs[index] for index in positions(node)]


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
        Whether convolutions and pooling are array operations instead of loops over their outputs.
    dtypes : mapping
        ONNX type of every tensor; only at level 0.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    training: bool = False
    dtype: type = np.float32
    vectorised: bool = False
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)

    def describe(self, node: Node, *, outputs: int = 1) -> tuple[list[Any], list[Any]]:
        """deep500's descriptors of an operator's inputs and outputs; sizes that only the data tell are left out."""

        def one(name: str) -> Any:
            shape = self.shapes.get(name, (None,))
            known = [n for n in shape if n is not None]
            dtype = self.dtypes[name].type if name in self.dtypes else self.dtype
            return deep500.TensorDescriptor(dtype, known if len(known) == len(shape) else [])

        named = [*node.outputs[:outputs], *[""] * outputs][:outputs]
        return [one(name) for name in operands(node)], [one(name or node.outputs[0]) for name in named]

    def wants(self, node: Node, index: int) -> bool:
        """Whether an output after the first is wanted; networks compute first outputs only."""
        return bool(self.dtypes) and index < len(node.outputs) and bool(node.outputs[index])

    def is_integer(self, name: str) -> bool:
        """Whether a tensor holds whole numbers; those of networks that flow do not."""
        return name in self.dtypes and self.dtypes[name].kind in "iu"


class Formula(deep500.CustomPythonOp):
    """A custom operator made of two functions, differentiated by its first output only."""

    def __init__(
        self, descriptors: tuple[list[Any], list[Any]], forward: Callable[..., Any], backward: Backward
    ) -> None:
        super().__init__(*descriptors)
        self._forward, self._backward = forward, backward

    def forward(self, *inputs: np.ndarray) -> Any:
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


def _leaky_relu(node: Node, context: Context) -> CustomOperator:
    alpha = node.attributes["alpha"]
    return _unary(lambda x: np.where(x > 0, x, alpha * x), lambda x, _: np.where(x > 0, 1.0, alpha))(node, context)


def _elu(node: Node, context: Context) -> CustomOperator:
    alpha = node.attributes["alpha"]
    return _unary(
        lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
        lambda x, _: np.where(x > 0, 1, alpha * np.exp(np.minimum(x, 0))),
    )(node, context)


def _gelu(node: Node, context: Context) -> CustomOperator:
    """Input times the normal distribution's Φ of it, or with ``tanh`` an approximation of that."""
    if node.attributes["approximate"] == "none":
        return _unary(
            lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5))),
            lambda x, _: 0.5 * (1 + erf(x * math.sqrt(0.5))) + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi),
        )(node, context)
    factor = math.sqrt(2 / math.pi)

    def slope(x: np.ndarray, output: np.ndarray) -> np.ndarray:
        t = np.tanh(factor * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * factor * (1 + 3 * 0.044715 * x**2)

    return _unary(lambda x: 0.5 * x * (1 + np.tanh(factor * (x + 0.044715 * x**3))), slope)(node, context)


def _hard_swish_slope(x: np.ndarray, output: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, x / 3 + 0.5, x > 0)


def _div(node: Node, context: Context) -> CustomOperator:
    """Of integers the quotient without its fraction."""
    whole = context.is_integer(node.inputs[0])
    divide = (lambda a, b: (a - np.fmod(a, b)) // b) if whole else np.divide
    return _binary(divide, lambda a, b: (1 / b, -a / b**2))(node, context)


def _clip(node: Node, context: Context) -> CustomOperator:
    low, high = (None if c is None else c.item() for c in (context.constant(node, 1), context.constant(node, 2)))

    def slope(x: np.ndarray, output: np.ndarray) -> np.ndarray:
        inside = np.ones(x.shape, bool) if low is None else x >= low
        return inside if high is None else inside & (x <= high)

    return _unary(lambda x: np.clip(x, low, high), slope)(node, context)


class _Dropout(deep500.CustomPythonOp):
    """A custom operator whose second output says what was kept, as ONNX's does."""

    def __init__(self, *descriptors: list[Any], probability: float) -> None:
        super().__init__(*descriptors)
        self._probability = probability

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """The input with its values dropped at random, and which are kept."""
        kept = _random.random(x.shape) >= self._probability
        return [(x * (kept / (1 - self._probability))).astype(x.dtype), kept]

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """The gradient where the input was kept."""
        return [grads[0] * (fwd_outputs[1] / (1 - self._probability))]


def _dropout(node: Node, context: Context) -> CustomOperator:
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else ratio.item()
    if context.training and probability:
        return _Dropout(*context.describe(node, outputs=2), probability=probability)
    if not context.wants(node, 1):
        return OPERATORS["Identity"](node, context)
    return Formula(
        context.describe(node, outputs=2),
        lambda x: [x, np.ones(x.shape, bool)],
        lambda gradient, *_: [gradient],
    )


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


def _reshape(node: Node, context: Context) -> CustomOperator:
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default shape
    copies = not node.attributes["allowzero"]

    def sizes(shape: tuple[int, ...]) -> list[int]:
        return [shape[i] if n == 0 and copies else int(n) for i, n in enumerate(wanted)]

    return _Reshape(*context.describe(node), sizes=sizes)


def _flatten(node: Node, context: Context) -> CustomOperator:
    axis = node.attributes["axis"]
    return _Reshape(*context.describe(node), sizes=lambda shape: (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _squeeze(node: Node, context: Context) -> CustomOperator:
    shape, axes = context.shape(node.inputs[0]), context.constant(node, 1)
    chosen = [i for i, n in enumerate(shape) if n == 1] if axes is None else [int(a) % len(shape) for a in axes]
    return native.SqueezeOp(*context.describe(node), sorted(chosen))


def _unsqueeze(node: Node, context: Context) -> CustomOperator:
    axes = context.constant(node, 1)
    assert axes is not None  # required since opset 13
    rank = context.rank(node.inputs[0]) + len(axes)
    return native.UnsqueezeOp(*context.describe(node), sorted(int(a) % rank for a in axes))


def _transpose(node: Node, context: Context) -> CustomOperator:
    order = list(node.attributes.get("perm") or reversed(range(context.rank(node.inputs[0]))))
    back = np.argsort(order)
    return Formula(
        context.describe(node), lambda x: x.transpose(order), lambda gradient, *_: [gradient.transpose(back)]
    )


def _concat(node: Node, context: Context) -> CustomOperator:
    axis = node.attributes["axis"]

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        return np.split(gradient, np.cumsum([x.shape[axis] for x in inputs])[:-1], axis)

    return Formula(context.describe(node), lambda *parts: np.concatenate(parts, axis), backward)


def _pad(node: Node, context: Context) -> CustomOperator:
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    if min(amounts, default=0) < 0:
        raise NetworkError(f"negative padding: {amounts.tolist()}", where=node.name)
    rank = context.rank(node.inputs[0])
    widths = [(0, 0)] * rank
    chosen = range(rank) if axes is None else [int(a) % rank for a in axes]
    for i, axis in enumerate(chosen):
        widths[axis] = (int(amounts[i]), int(amounts[i + len(chosen)]))
    mode: Any = node.attributes["mode"]
    if mode != "constant":
        return Formula(
            context.describe(node),
            lambda x: np.pad(x, widths, mode),
            lambda gradient, inputs, _: [_gathered_padding(gradient, widths, mode)],
        )
    fill = 0.0 if value is None else value.item()
    return Formula(
        context.describe(node),
        lambda x: np.pad(x, widths, constant_values=fill),
        lambda gradient, *_: [_cropped(gradient, widths)],
    )


def _gathered_padding(gradient: np.ndarray, widths: Sequence[tuple[int, int]], mode: Any) -> np.ndarray:
    """Each cell's gradient and those of its copies in a padding that repeats the tensor, axis by axis."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            size = gradient.shape[axis] - before - after
            sources = np.pad(np.arange(size), (before, after), mode)
            gradient = _scattered(gradient, sources, axis, size)
    return gradient


def _scattered(gradient: np.ndarray, indices: np.ndarray, axis: int, size: int) -> np.ndarray:
    """The gradient of ``numpy.take(x, indices, axis)`` for x of a size on that axis and a vector of indices."""
    found = np.zeros((*gradient.shape[:axis], size, *gradient.shape[axis + 1 :]), gradient.dtype)
    where: Any = (*[slice(None)] * axis, indices)
    np.add.at(found, where, gradient)
    return found


def _gather(node: Node, context: Context) -> CustomOperator:
    axis = node.attributes["axis"] % context.rank(node.inputs[0])

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        data, indices = inputs
        rows = gradient.reshape(*data.shape[:axis], indices.size, *data.shape[axis + 1 :])
        return [_scattered(rows, indices.ravel(), axis, data.shape[axis]), np.zeros_like(indices)]

    return Formula(context.describe(node), lambda data, indices: np.take(data, indices, axis), backward)


def _cropped(padded: np.ndarray, widths: Sequence[tuple[int, int]]) -> np.ndarray:
    return padded[tuple(slice(a, n - b) for n, (a, b) in zip(padded.shape, widths, strict=True))]


# Sums along axes.


def _reduction(
    forward: Callable[..., np.ndarray], backward: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
) -> Factory:
    """A factory for a reduction, over all axes unless the second input names some.

    Parameters
    ----------
    forward : callable
        (x, axes, keepdims=True) to the reduced tensor.
    backward : callable
        Gradient of the output, input, output to the gradient of the input; the first and last with all axes kept.
    """

    def factory(node: Node, context: Context) -> CustomOperator:
        axes, keep = context.constant(node, 1), bool(node.attributes["keepdims"])
        if axes is None or not axes.size:
            if node.attributes["noop_with_empty_axes"]:
                return OPERATORS["Identity"](node, context)
            axes = np.arange(context.rank(node.inputs[0]))
        rank = context.rank(node.inputs[0])
        chosen = tuple(int(a) % rank for a in axes)

        def gradient_of(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
            (x,) = inputs
            shape = [1 if axis in chosen else n for axis, n in enumerate(x.shape)]
            return [backward(np.reshape(gradient, shape), x, np.reshape(output, shape))]

        return Formula(context.describe(node), lambda x: forward(x, chosen, keepdims=keep), gradient_of)

    return factory


def _lowest(dtype: np.dtype) -> Any:
    """What every number of a type is at least."""
    return -np.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def _maximum(x: np.ndarray, axes: tuple[int, ...], *, keepdims: bool) -> np.ndarray:
    return np.max(x, axes, keepdims=keepdims, initial=_lowest(x.dtype))


def _maximum_gradient(gradient: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Shared by all cells that hold the maximum."""
    hits = x == y
    axes = tuple(axis for axis, (n, m) in enumerate(zip(x.shape, y.shape, strict=True)) if n != m)
    return gradient * hits / hits.sum(axes, keepdims=True, dtype=x.dtype)


# Matrix products.


class _Gemm(native.GemmOp):
    """deep500's, with the third input optional and its gradient, which fails for a batch of one, by deep500's sum."""

    def forward(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        product: np.ndarray = super().forward(a, b, a.dtype.type(0) if c is None else c)
        return product

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        above = grads[0]
        gradients = super().backward(grads, [*fwd_inputs[:2], above], fwd_outputs)[:2]
        added = [native.AddOp([], []).backward([self.beta * above], [above, c], fwd_outputs)[1] for c in fwd_inputs[2:]]
        return [*gradients, *added]


def _gemm(node: Node, context: Context) -> CustomOperator:
    a = node.attributes
    return _Gemm(*context.describe(node), a["alpha"], a["beta"], a["transA"], a["transB"])


def _matmul(node: Node, context: Context) -> CustomOperator:
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


def _conv(node: Node, context: Context) -> CustomOperator:
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

    def _cells(self, weight: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
        """For each cell the index of its pixels and its weights, (groups, outputs, inputs)."""
        by_group = weight.reshape(self._groups, -1, weight.shape[1], math.prod(self._window.kernel))
        return ((tap, by_group[..., index]) for index, tap in enumerate(_taps(self._window)))

    def _matrices(self, images: np.ndarray) -> np.ndarray:
        """(images, groups, channels, pixels)."""
        return images.reshape(len(images), self._groups, images.shape[1] // self._groups, -1)

    def forward(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """The convolution."""
        padded = np.pad(x, _widths(self._window))
        y = reduce(iadd, (weights @ self._matrices(padded[tap]) for tap, weights in self._cells(weight)))
        y = y.reshape(len(x), len(weight), *self._window.outputs)
        return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))

    def by_image(self, above: np.ndarray, weight: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """The gradient of an image of these spatial sizes."""
        widths = _widths(self._window)
        padded = [n + before + after for n, (before, after) in zip(sizes, widths[2:], strict=True)]
        found = np.zeros((len(above), weight.shape[1] * self._groups, *padded), np.result_type(above, weight))
        matrices = self._matrices(above)
        for tap, weights in self._cells(weight):
            found[tap] += (weights.swapaxes(1, 2) @ matrices).reshape(found[tap].shape)
        return _cropped(found, widths)

    def by_weight(self, above: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """The gradient of the weight."""
        padded, matrices = np.pad(x, _widths(self._window)), self._matrices(above)
        cells = [(matrices @ self._matrices(padded[tap]).swapaxes(2, 3)).sum(0) for tap in _taps(self._window)]
        return np.stack(cells, -1).reshape(weight.shape)

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """By the image, the weight and, where there is one, the bias."""
        above = grads[0]
        x, weight, *bias = fwd_inputs
        found = [self.by_image(above, weight, x.shape[2:]), self.by_weight(above, x, weight)]
        return [*found, above.sum((0, *range(2, x.ndim)))] if bias else found


class _TransposedConv(deep500.CustomPythonOp):
    """The gradient of a convolution by its image, taken for a function of its own; deep500 has none."""

    def __init__(
        self, inputs: list[Any], outputs: list[Any], convolution: _VectorisedConv, sizes: Sequence[int]
    ) -> None:
        super().__init__(inputs, outputs)
        self._convolution, self._sizes = convolution, sizes

    def forward(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """The transposed convolution."""
        y = self._convolution.by_image(x, weight, self._sizes)
        return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """By the image, the weight and, where there is one, the bias."""
        above = grads[0]
        x, weight, *bias = fwd_inputs
        found = [self._convolution.forward(above, weight), self._convolution.by_weight(x, above, weight)]
        return [*found, above.sum((0, *range(2, x.ndim)))] if bias else found


def _conv_transpose(node: Node, context: Context) -> CustomOperator:
    sizes = _spatial(node, context)
    w = transposed_window(node, sizes, context.shape(node.inputs[1])[2:])
    image = tuple(n for n in sizes if n is not None)
    same = Window(w.kernel, w.strides, w.dilations, w.pads_begin, w.pads_end, image, (0,) * len(image))
    convolution = _VectorisedConv([], [], same, node.attributes["group"])
    return _TransposedConv(*context.describe(node), convolution, w.outputs)


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


def _max_pool(node: Node, context: Context) -> CustomOperator:
    sizes = _spatial(node, context)
    w = window(node, sizes)
    if context.wants(node, 1):
        return _max_pool_with_indices(node, context, w, [n or 0 for n in sizes])
    if not context.vectorised and _is_native_pooling(w) and not context.is_integer(node.inputs[0]):
        settings = {"kernel_shape": list(w.kernel), "pads": [*w.pads_begin, *w.pads_end], "strides": list(w.strides)}
        if all(s >= k for s, k in zip(w.strides, w.kernel, strict=True)):
            return native.MaxPoolOp(*context.describe(node), **settings)
        return _MaxPool(*context.describe(node), full=w, **settings)

    def forward(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, _widths(w), constant_values=_lowest(x.dtype))
        return reduce(np.maximum, (padded[tap] for tap in _taps(w)))

    return Formula(
        context.describe(node),
        forward,
        lambda gradient, inputs, output: [_max_pool_gradient(w, gradient, inputs[0], output)],
    )


def _max_pool_with_indices(node: Node, context: Context, w: Window, sizes: Sequence[int]) -> CustomOperator:
    """Also where in the input each maximum stands, counted by rows or, with ``storage_order``, by columns."""
    planes = [n or 0 for n in context.shape(node.inputs[0])[:2]]
    order: Any = "F" if node.attributes["storage_order"] else "C"
    cells = np.arange(math.prod(sizes)).reshape(sizes, order=order)
    cells = np.pad(cells, _widths(w)[2:], constant_values=-1)
    first = np.arange(math.prod(planes)).reshape(*planes, *[1] * len(sizes)) * math.prod(sizes)

    def forward(x: np.ndarray) -> list[np.ndarray]:
        padded = np.pad(x, _widths(w), constant_values=_lowest(x.dtype))
        start, *others = _taps(w)
        values, found = padded[start], cells[start]
        for tap in others:
            better = (padded[tap] > values) | (found < 0)
            values, found = np.where(better, padded[tap], values), np.where(better, cells[tap], found)
        return [values, found + first]

    return Formula(
        context.describe(node, outputs=2),
        forward,
        lambda gradient, inputs, output: [_max_pool_gradient(w, gradient, inputs[0], output)],
    )


def _average_pool(node: Node, context: Context) -> CustomOperator:
    sizes = _spatial(node, context)
    w = window(node, sizes)
    include = node.attributes["count_include_pad"]
    if not context.vectorised and _is_native_pooling(w):
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


def _global_average_pool(node: Node, context: Context) -> CustomOperator:
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


class _BatchNormalizationInference(native.BatchNormalizationInferenceOp):
    """deep500's, differentiated as what it is, a fixed scaling; deep500 takes the statistics for the batch's own."""

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        above = grads[0]
        x, scale, _, mean, variance = fwd_inputs
        axes, column = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        spread = np.sqrt(variance + self.epsilon).reshape(column)
        normal = (x - mean.reshape(column)) / spread
        by_weights = [(above * normal).sum(axes), above.sum(axes)]
        return [above * scale.reshape(column) / spread, *by_weights, np.zeros_like(mean), np.zeros_like(variance)]


def _batch_normalization(node: Node, context: Context) -> CustomOperator:
    """deep500's two operators, whose momentum and biased variance are ONNX's.

    The training one has five outputs: the result, the moved running statistics, and the batch's own.
    """
    settings = {"epsilon": node.attributes["epsilon"], "momentum": node.attributes["momentum"]}
    if context.training:
        return native.BatchNormalizationTrainingOp(*context.describe(node, outputs=5), **settings)
    return _BatchNormalizationInference(*context.describe(node), **settings)


class _LayerNormalization(deep500.CustomPythonOp):
    """A custom operator; deep500 has none. Its three outputs are ONNX's: result, mean and inverse deviation."""

    def __init__(self, *descriptors: list[Any], axes: tuple[int, ...], epsilon: float) -> None:
        super().__init__(*descriptors)
        self._axes, self._epsilon = axes, epsilon

    def forward(self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> list[np.ndarray]:
        """The normalised input, scaled, and its statistics."""
        mean = x.mean(self._axes, keepdims=True)
        centred = x - mean
        inverse = 1 / np.sqrt((centred**2).mean(self._axes, keepdims=True) + self._epsilon)
        y = centred * inverse * scale
        return [y if bias is None else y + bias, mean, inverse]

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """By the input, the scale and, where there is one, the bias."""
        above = grads[0]
        x, scale, *bias = fwd_inputs
        _, mean, inverse = fwd_outputs
        normal, scaled = (x - mean) * inverse, above * scale
        inner = scaled.mean(self._axes, keepdims=True) + normal * (scaled * normal).mean(self._axes, keepdims=True)
        by_bias = [_collapsed(above, b.shape) for b in bias]
        return [inverse * (scaled - inner), _collapsed(above * normal, scale.shape), *by_bias]


def _layer_normalization(node: Node, context: Context) -> CustomOperator:
    rank = context.rank(node.inputs[0])
    axes = tuple(range(node.attributes["axis"] % rank, rank))
    return _LayerNormalization(*context.describe(node, outputs=3), axes=axes, epsilon=node.attributes["epsilon"])


def _lrn(node: Node, context: Context) -> CustomOperator:
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


def _softmax(node: Node, context: Context) -> CustomOperator:
    return _Softmax(*context.describe(node), along=node.attributes["axis"], rank=context.rank(node.inputs[0]))


def _logarithmic_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    shifted = x - x.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def _log_softmax(node: Node, context: Context) -> CustomOperator:
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
    shows : bool
        Whether the logarithms of the probabilities are a second output.
    """

    def __init__(
        self,
        inputs: list[Any],
        outputs: list[Any],
        *,
        reduction: str = "mean",
        ignored: int | None = None,
        shows: bool = False,
    ) -> None:
        super().__init__(inputs, outputs)
        self._reduction, self._ignored, self._shows = reduction, ignored, shows

    def _parts(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Logarithms of the probabilities, valid labels, what each sample counts, and its loss before that."""
        logarithms = _logarithmic_softmax(x, 1)
        kept = labels != self._ignored if self._ignored is not None else np.ones(labels.shape, bool)
        valid = np.where(kept, labels, 0)
        factors = kept.astype(x.dtype) if weight is None else weight[valid] * kept
        return logarithms, valid, factors, -np.take_along_axis(logarithms, valid[:, None], 1)[:, 0]

    def _share(self, factors: np.ndarray) -> Any:
        return 1 / factors.sum() if self._reduction == "mean" else 1

    def forward(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> Any:
        """The loss and, if it is to be shown, what it was taken of."""
        logarithms, _, factors, losses = self._parts(x, labels, weight)
        weighted = factors * losses
        loss = weighted if self._reduction == "none" else np.asarray(weighted.sum() * self._share(factors))
        return [loss, logarithms] if self._shows else loss

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


def _softmax_cross_entropy_loss(node: Node, context: Context) -> CustomOperator:
    a, shows = node.attributes, context.wants(node, 1)
    return SoftmaxCrossEntropy(
        *context.describe(node, outputs=1 + shows),
        reduction=a["reduction"],
        ignored=a.get("ignore_index"),
        shows=shows,
    )


# Sequences.


class _Steps(NamedTuple):
    """One direction of a recurrence, in the order of its steps, for the way back.

    Attributes
    ----------
    gates : numpy.ndarray
        (steps, batch, gates x hidden), after their functions, in ONNX's order.
    hidden : numpy.ndarray
        (steps + 1, batch, hidden), the initial state first.
    inner : numpy.ndarray
        LSTM: the cells, like ``hidden``. GRU: what the recurrent weight of the new state gave, (steps, batch, hidden).
    """

    gates: np.ndarray
    hidden: np.ndarray
    inner: np.ndarray


class _Recurrent(deep500.CustomPythonOp):
    """A custom operator for ONNX's LSTM or GRU, step by step; deep500 has none.

    Its outputs are ONNX's and a `_Steps` for each direction. Inside, steps come before the batch.
    """

    def __init__(self, node: Node, context: Context) -> None:
        self._plan = plan = recurrent(node, context.shapes, context.constants)
        super().__init__(*context.describe(node, outputs=len(plan.wanted) + 1))
        self._positions = positions(node)
        backwards = [plan.reverse, True][: plan.directions]
        self._orders = [slice(None, None, -1 if turned else 1) for turned in backwards]

    def forward(self, *inputs: np.ndarray) -> list[Any]:
        """The hidden states at every step and the last states."""
        x, w, r, b, h, c, p = self._named(inputs)
        passes = []
        for d, order in enumerate(self._orders):
            zeros = np.zeros((x.shape[1], self._plan.hidden), x.dtype)
            bias = np.zeros(2 * w.shape[1], x.dtype) if b is None else b[d]
            start_h, start_c = (zeros if state is None else state[d] for state in (h, c))
            passes.append(self._run(x[order], w[d], r[d], bias, start_h, start_c, None if p is None else p[d]))
        y = np.stack([one.hidden[1:][order] for one, order in zip(passes, self._orders, strict=True)], 1)
        results = [np.stack([one.hidden[-1] for one in passes])]
        if self._plan.kind == "LSTM":
            results.append(np.stack([one.inner[-1] for one in passes]))
        if self._plan.batch_first:
            return [y.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in results), passes]
        return [y, *results, passes]

    def backward(self, grads: Sequence[Any], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[Any]) -> list[Any]:
        """By every input; a gradient of 0 will do for an output that does not matter."""
        x, w, r, _, _, _, p = self._named(fwd_inputs)
        *results, passes = fwd_outputs
        above = [np.broadcast_to(np.asarray(g, x.dtype), y.shape) for g, y in zip(grads, results, strict=False)]
        if self._plan.batch_first:
            above = [above[0].transpose(1, 2, 0, 3), *(g.swapaxes(0, 1) for g in above[1:])]
        by_x, by_others = np.zeros_like(x), []
        for d, (order, one) in enumerate(zip(self._orders, passes, strict=True)):
            by_y, *by_states = above[0][:, d][order], *(g[d] for g in above[1:])
            found, *others = self._back(one, x[order], w[d], r[d], None if p is None else p[d], by_y, *by_states)
            by_x[order] += found
            by_others.append(others)
        stacked = [np.stack(those) for those in zip(*by_others, strict=True)]
        if self._plan.batch_first:
            by_x, stacked[3:5] = by_x.swapaxes(0, 1), [state.swapaxes(0, 1) for state in stacked[3:5]]
        by_place = dict(zip((1, 2, 3, 5, 6, 7), stacked, strict=False))
        return [by_x, *(by_place[place] for place in self._positions[1:])]

    def _named(self, inputs: Sequence[np.ndarray]) -> list[Any]:
        """X, W, R, B, the initial states h and c and the peepholes P, None for those that are not there."""
        given: dict[int, Any] = dict(zip(self._positions, inputs, strict=True))
        if self._plan.batch_first:
            given |= {place: given[place].swapaxes(0, 1) for place in (0, 5, 6) if place in given}
        return [given.get(place) for place in (0, 1, 2, 3, 5, 6, 7)]

    def _run(self, x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, p: Any) -> _Steps:
        """All steps of one direction."""
        raise NotImplementedError

    def _back(self, one: _Steps, x: Any, w: Any, r: Any, p: Any, by_y: Any, *by_states: Any) -> list[Any]:
        """Gradients of X, W, R, B, h and, of LSTM, c and P."""
        raise NotImplementedError


def _over_steps(above: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The gradient of a weight that multiplies these values at every step."""
    return above.reshape(-1, above.shape[-1]).T @ values.reshape(-1, values.shape[-1])


class _Lstm(_Recurrent):
    """c' = f c + i g and h' = o tanh(c'), whose gates may peep at c, and o at c'."""

    def _run(self, x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, p: Any) -> _Steps:
        p_i, p_o, p_f = (0, 0, 0) if p is None else np.split(p, 3)
        gates, hidden, cells = [], [h], [c]
        for total in x @ w.T + np.add(*np.split(b, 2)):
            i, o, f, g = np.split(total + h @ r.T, 4, -1)
            i, f, g = _sigmoid(i + p_i * c), _sigmoid(f + p_f * c), np.tanh(g)
            c = f * c + i * g
            o = _sigmoid(o + p_o * c)
            h = o * np.tanh(c)
            gates.append(np.concatenate([i, o, f, g], -1))
            hidden.append(h)
            cells.append(c)
        return _Steps(np.stack(gates), np.stack(hidden), np.stack(cells))

    def _back(self, one: _Steps, x: Any, w: Any, r: Any, p: Any, by_y: Any, *by_states: Any) -> list[Any]:
        p_i, p_o, p_f = (0, 0, 0) if p is None else np.split(p, 3)
        by_h, by_c = by_states
        by_total = np.empty_like(one.gates)
        for t in reversed(range(len(x))):
            i, o, f, g = np.split(one.gates[t], 4, -1)
            bent = np.tanh(one.inner[t + 1])
            by_h = by_h + by_y[t]
            by_o = by_h * bent * o * (1 - o)
            by_c = by_c + by_h * o * (1 - bent**2) + by_o * p_o
            by_i, by_f, by_g = by_c * g * i * (1 - i), by_c * one.inner[t] * f * (1 - f), by_c * i * (1 - g**2)
            by_total[t] = np.concatenate([by_i, by_o, by_f, by_g], -1)
            by_h, by_c = by_total[t] @ r, by_c * f + by_i * p_i + by_f * p_f
        by_bias = by_total.sum((0, 1))
        by_i, by_o, by_f, _ = np.split(by_total, 4, -1)
        peeped = (by_i * one.inner[:-1], by_o * one.inner[1:], by_f * one.inner[:-1])
        by_peepholes = np.concatenate([product.sum((0, 1)) for product in peeped])
        by_weights = [_over_steps(by_total, x), _over_steps(by_total, one.hidden[:-1])]
        return [by_total @ w, *by_weights, np.tile(by_bias, 2), by_h, by_c, by_peepholes]


class _Gru(_Recurrent):
    """h' = (1 - z) n + z h; the new state n sees h after its reset or, with ``linear_before_reset``, before it."""

    def _run(self, x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, p: Any) -> _Steps:
        size, linear = self._plan.hidden, self._plan.linear_before_reset
        b_w, b_r = np.split(b, 2)
        gates, hidden, products = [], [h], []
        for total in x @ w.T + b_w:
            z, reset = np.split(_sigmoid(total[:, : 2 * size] + h @ r[: 2 * size].T + b_r[: 2 * size]), 2, -1)
            product = (h if linear else reset * h) @ r[2 * size :].T + b_r[2 * size :]
            new = np.tanh(total[:, 2 * size :] + (reset * product if linear else product))
            h = (1 - z) * new + z * h
            gates.append(np.concatenate([z, reset, new], -1))
            hidden.append(h)
            products.append(product)
        return _Steps(np.stack(gates), np.stack(hidden), np.stack(products))

    def _back(self, one: _Steps, x: Any, w: Any, r: Any, p: Any, by_y: Any, *by_states: Any) -> list[Any]:
        size, linear = self._plan.hidden, self._plan.linear_before_reset
        r_gates, r_new = r[: 2 * size], r[2 * size :]
        (by_h,) = by_states
        by_total, by_product = np.empty_like(one.gates), np.empty_like(one.inner)
        for t in reversed(range(len(x))):
            h, (z, reset, new) = one.hidden[t], np.split(one.gates[t], 3, -1)
            by_h = by_h + by_y[t]
            by_new = by_h * (1 - z) * (1 - new**2)
            by_product[t] = by_new * reset if linear else by_new
            through = by_product[t] @ r_new
            by_reset = (by_new * one.inner[t] if linear else through * h) * reset * (1 - reset)
            by_gates = np.concatenate([by_h * (h - new) * z * (1 - z), by_reset], -1)
            by_total[t] = np.concatenate([by_gates, by_new], -1)
            by_h = by_h * z + (through if linear else through * reset) + by_gates @ r_gates
        before, by_gates = one.hidden[:-1], by_total[..., : 2 * size]
        multiplied = before if linear else one.gates[..., size : 2 * size] * before
        by_r = np.concatenate([_over_steps(by_gates, before), _over_steps(by_product, multiplied)])
        by_bias = np.concatenate([by_total.sum((0, 1)), by_gates.sum((0, 1)), by_product.sum((0, 1))])
        return [by_total @ w, _over_steps(by_total, x), by_r, by_bias, by_h]


class _Attention(deep500.CustomPythonOp):
    """A custom operator; deep500 has none.

    Its outputs are ONNX's four, the softmax's weights, and the scores behind the soft cap, of which the way back makes
    use. Query heads that share a key head are further rows of its matrices.
    """

    def __init__(self, node: Node, context: Context) -> None:
        super().__init__(*context.describe(node, outputs=6))
        self._plan = plan = attention_nodes.attention(node, context.shapes, context.constants, context.dtypes)
        self._positions = positions(node)
        self._bias = None if plan.bias is None else plan.bias.astype(context.dtypes[node.inputs[0]])

    def forward(self, *inputs: np.ndarray) -> list[Any]:
        """Softmax of the scaled, capped and masked products of queries and keys, times the values."""
        plan = self._plan
        given: dict[int, Any] = dict(zip(self._positions, inputs, strict=True))
        q, k, v = self._heads(inputs)
        if plan.past:
            k, v = np.concatenate([given[4], k], 2), np.concatenate([given[5], v], 2)
        root = math.sqrt(plan.scale)  # as ONNX has it, which shows in float16
        scores = ((root * self._rows(q)) @ (root * k).swapaxes(2, 3)).reshape(*q.shape[:3], k.shape[2])
        capped = plan.softcap * np.tanh(scores / plan.softcap) if plan.softcap else scores
        biased = capped if self._bias is None else capped + self._bias
        if plan.mask:
            biased = biased + self._mask(given[3], biased.dtype)
        top = biased.max(-1, keepdims=True)
        shares = np.exp(biased - np.where(np.isneginf(top), 0, top))
        total = shares.sum(-1, keepdims=True)
        weights = shares / np.where(total == 0, 1, total)  # a query that attends to nothing
        y = self._rows(weights) @ v
        shown = {
            attention_nodes.SCORES: scores,
            attention_nodes.CAPPED: capped,
            attention_nodes.BIASED: biased,
            attention_nodes.WEIGHTS: weights,
        }
        return [self._joined(y.reshape(*q.shape[:3], v.shape[3])), k, v, shown.get(plan.shows), weights, capped]

    def backward(self, grads: Sequence[Any], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[Any]) -> list[Any]:
        """By query, key and value; masks and caches are taken for fixed."""
        plan = self._plan
        (q, new_k, _), (_, k, v, _, weights, capped) = self._heads(fwd_inputs), fwd_outputs
        above = self._rows(self._split(grads[0], plan.heads))
        by_v = self._rows(weights).swapaxes(2, 3) @ above
        by_weights = (above @ v.swapaxes(2, 3)).reshape(weights.shape)
        by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdims=True))
        if plan.softcap:
            by_scores = by_scores * (1 - (capped / plan.softcap) ** 2)
        rows = plan.scale * self._rows(by_scores)
        by_q, by_k = (rows @ k).reshape(q.shape), rows.swapaxes(2, 3) @ self._rows(q)
        earlier = k.shape[2] - new_k.shape[2]
        found = [self._joined(g) for g in (by_q, by_k[:, :, earlier:], by_v[:, :, earlier:])]
        return [*found, *(np.zeros_like(x) for x in fwd_inputs[3:])]

    def _heads(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        heads = (self._plan.heads, self._plan.kv_heads, self._plan.kv_heads)
        return [self._split(x, count) for x, count in zip(inputs[:3], heads, strict=True)]

    def _split(self, x: np.ndarray, heads: int) -> np.ndarray:
        """(batch, heads, steps, size) of a tensor that may be (batch, steps, heads x size)."""
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) if self._plan.split_heads else x

    def _joined(self, x: np.ndarray) -> np.ndarray:
        """The way back from `_split`."""
        return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1) if self._plan.split_heads else x

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """(batch, key heads, rows, ...) of (batch, query heads, queries, ...)."""
        return x.reshape(len(x), self._plan.kv_heads, -1, x.shape[3])

    def _mask(self, mask: np.ndarray, dtype: np.dtype) -> np.ndarray:
        added = np.where(mask, 0, -np.inf).astype(dtype) if self._plan.mask == "bool" else mask
        return np.pad(added, [*[(0, 0)] * (mask.ndim - 1), (0, self._plan.mask_padding)], constant_values=-np.inf)


OPERATORS: dict[str, Factory] = {
    "Add": _native("AddOp"),
    "Attention": _Attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _div,
    "Dropout": _dropout,
    "Elu": _elu,
    "Exp": _unary(np.exp, lambda _, y: y),
    "Flatten": _flatten,
    "GRU": _Gru,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "GlobalMaxPool": _formula(lambda x: x.max(tuple(range(2, x.ndim)), keepdims=True), _global_max_pool_gradient),
    "HardSwish": _unary(lambda x: x * np.clip(x / 6 + 0.5, 0, 1), _hard_swish_slope),
    "Identity": _formula(lambda x: x, lambda gradient, *_: [gradient]),
    "LRN": _lrn,
    "LSTM": _Lstm,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _binary(np.multiply, lambda a, b: (b, a)),
    "Pad": _pad,
    "ReduceMax": _reduction(_maximum, _maximum_gradient),
    "ReduceMean": _reduction(np.mean, lambda gradient, x, y: np.broadcast_to(gradient * (y.size / x.size), x.shape)),
    "ReduceSum": _reduction(np.sum, lambda gradient, x, y: np.broadcast_to(gradient, x.shape)),
    "Relu": lambda node, context: _Relu(*context.describe(node)),
    "Reshape": _reshape,
    "Sigmoid": _unary(_sigmoid, lambda _, y: y * (1 - y)),
    "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Sqrt": _unary(np.sqrt, lambda _, y: 0.5 / y),
    "Squeeze": _squeeze,
    "Sub": _binary(np.subtract, lambda a, b: (1, -1)),
    "Sum": _native("SumOp"),
    "Tanh": _unary(np.tanh, lambda _, y: 1 - y**2),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""


class Operator(level.Operator):
    """One ONNX node as a deep500 operator, whose own ``forward`` and ``backward`` are called.

    Attributes
    ----------
    native : deep500.CustomPythonOp
        Its ``forward`` may return a list of more outputs than ONNX's: what its ``backward`` needs again.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        context = Context(
            shapes=operation.shapes,
            constants=operation.constants,
            training=operation.training,
            dtype=PRECISIONS[operation.precision].type,
            vectorised=mode == "vectorised",
            dtypes=operation.dtypes,
        )
        custom = operation.custom
        factory = OPERATORS[operation.node.op_type] if custom is None else custom_operators.factory(custom)
        self.native = factory(operation.node, context)
        self.forward = self.native.forward
        self._positions = positions(operation.node)

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        """The inputs that the operator takes, without copies: they must stay unchanged while the feed is used."""
        self.check_feed(arrays)
        return [np.asarray(arrays[index], order="C") for index in self._positions]

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """A gradient for every output of the operator, 0 for those that do not matter."""
        above: list[Any] = [0] * self.native.num_outputs
        for index, array in zip(self.operation.differentiated, arrays, strict=True):
            above[index] = np.asarray(array, order="C")
        return above

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        found = self.forward(*inputs)
        outputs = [found] if self.native.num_outputs == 1 else found
        backward = self.native.backward
        return lambda *gradients: backward(gradients, inputs, outputs)

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        found = [outputs] if self.native.num_outputs == 1 else outputs
        names, dtypes = self.operation.node.outputs, self.operation.dtypes
        return [np.array(value, dtypes[name], order="C") for name, value in zip(names, found, strict=False) if name]

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        by_input = dict(zip(self._positions, gradients, strict=True))
        names, dtypes = self.operation.node.inputs, self.operation.dtypes
        return [np.array(by_input[i], dtypes[names[i]], order="C") for i in self.operation.differentiable]

    def extent(self, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, np.ndarray):
            return None
        while isinstance(value.base, np.ndarray):
            value = value.base
        return value.ctypes.data, value.nbytes

    def synchronize(self, *results: Any) -> None:
        """Nothing is ever pending."""
