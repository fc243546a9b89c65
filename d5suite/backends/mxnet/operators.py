"""ONNX operators as native MXNet calls, and Level 0 on MXNet.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable ``(F, *inputs)`` that calls the
operators of ``F``, either ``mx.nd`` (arrays, at once) or ``mx.sym`` (symbols, for a graph), and returns the node's
first output or, if `Context.wanted` names others, a tuple with None for those it does not. An input is an array or
symbol, a number for a fixed scalar, or None for an omitted one and for whatever a factory reads through
`Context.constant`; what a factory has laid down with `Context.keep` follows. Imports MXNet, NumPy, `d5suite.errors`,
`d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from d5suite.backends.mxnet import custom as custom_operators
from d5suite.backends.mxnet.runtime import CONTEXTS, mx
from d5suite.errors import NetworkError
from d5suite.levels import attention as attention_nodes
from d5suite.levels import operator as level
from d5suite.levels.operator import NodeContext
from d5suite.levels.recurrent import Functions, Recurrent, recurrent, unrolled
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.operation import STATIC_INPUTS, Operation, is_floating
from d5suite.network.windows import TransposedWindow, Window, transposed_window, window

Call = Callable[..., Any]
Factory = Callable[[Node, "Context"], Call]


class Packed(NamedTuple):
    """Inputs that a kernel wants as one vector: NumPy functions there and back.

    Attributes
    ----------
    names : sequence of str
        The inputs. The operator gets the vector in place of the first and None for the others.
    pack, unpack : callable
    """

    names: Sequence[str]
    pack: Callable[[Sequence[np.ndarray]], np.ndarray]
    unpack: Callable[[np.ndarray], Sequence[np.ndarray]]


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
    dtype : str
        Type of parameters and activations.
    kept : dict of str to numpy.ndarray
        By node: the array that its operator gets after its inputs.
    dtypes : mapping
        ONNX type of every tensor; only at level 0.
    non_negative : set
        Inputs whose values are known to be 0 or more; only at level 0.
    packed : list of Packed
        Only at level 0.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    training: bool = False
    dtype: str = "float32"
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    non_negative: frozenset[str] = frozenset()
    packed: list[Packed] = field(default_factory=list)

    def keep(self, node: Node, array: np.ndarray) -> None:
        """Have the node's operator get this array after the node's inputs."""
        self.kept[node.name] = array

    def wanted(self, node: Node) -> list[bool]:
        """Whether each output of a node is wanted; in a network it is the first."""
        return [bool(name) for name in node.outputs] if self.dtypes else [True]

    def is_integer(self, name: str) -> bool:
        """Whether a tensor holds integers; those of a network do not."""
        return name in self.dtypes and not is_floating(self.dtypes[name])


def _identity(node: Node, context: Context) -> Call:
    return lambda F, x, *_: F.identity(x)


def _activation(kind: str) -> Factory:
    return lambda node, context: lambda F, x: F.Activation(x, act_type=kind)


def _broadcasting(name: str, scalar: Callable[[Any, Any], Any]) -> Factory:
    """A factory for arithmetic: MXNet has one function for equal shapes, one for others, one for numbers."""
    equal, unequal = f"elemwise_{name}", f"broadcast_{name}"

    def factory(node: Node, context: Context) -> Call:
        if any(_is_scalar(context, operand) for operand in node.inputs):
            return lambda F, a, b: scalar(a, b)
        a, b = (context.shapes.get(operand) for operand in node.inputs)
        function = equal if a is not None and a == b else unequal
        return lambda F, a, b: getattr(F, function)(a, b)

    return factory


def _is_scalar(context: Context, name: str) -> bool:
    return name in context.constants and context.constants[name].ndim == 0


def _plus(a: Any, b: Any) -> Any:
    return a + b


_add = _broadcasting("add", _plus)


def _sum(node: Node, context: Context) -> Call:
    if len(node.inputs) == 1:
        return _identity(node, context)
    if len(node.inputs) == 2:
        return _add(node, context)
    shapes = {context.shapes.get(name) for name in node.inputs}
    if len(shapes) == 1 and None not in shapes:
        return lambda F, *terms: F.add_n(*terms)
    if any(_is_scalar(context, name) for name in node.inputs):
        numbers = [_is_scalar(context, name) for name in node.inputs]

        def mixed(F: Any, *terms: Any) -> Any:
            arrays = [term for term, number in zip(terms, numbers, strict=True) if not number]
            total = reduce(F.broadcast_add, arrays)
            return total + sum(term for term, number in zip(terms, numbers, strict=True) if number)

        return mixed
    return lambda F, *terms: reduce(F.broadcast_add, terms)


def _leaky_relu(node: Node, context: Context) -> Call:
    slope = node.attributes["alpha"]
    if context.dtype == "float64":  # the kernel rounds the slope
        return lambda F, x: F.relu(x) - F.relu(-x) * slope
    return lambda F, x: F.LeakyReLU(x, act_type="leaky", slope=slope)


def _elu(node: Node, context: Context) -> Call:
    alpha = node.attributes["alpha"]
    return lambda F, x: F.LeakyReLU(x, act_type="elu", slope=alpha)


def _gelu(node: Node, context: Context) -> Call:
    if node.attributes["approximate"] == "tanh":
        root = math.sqrt(2 / math.pi)
        return lambda F, x: 0.5 * x * (1 + F.tanh(root * (x + 0.044715 * F.square(x) * x)))
    if context.dtype == "float64":  # the kernel computes in float32
        return lambda F, x: 0.5 * x * (1 + _exact_erf(F, x * math.sqrt(0.5)))
    return lambda F, x: F.LeakyReLU(x, act_type="gelu")


def _exact_erf(F: Any, x: Any) -> Any:
    """The error function in float64 with the gradient of float64: MXNet divides it by the root of pi as a float32."""
    excess = float(np.float32(math.sqrt(math.pi))) / math.sqrt(math.pi)
    y = F.erf(x)
    return y * excess + F.BlockGrad(y * (1 - excess))


def _hard_swish(node: Node, context: Context) -> Call:
    if context.dtype == "float64":  # the kernel rounds its settings
        return lambda F, x: x * F.clip(x / 6 + 0.5, a_min=0, a_max=1)
    return lambda F, x: x * F.hard_sigmoid(x, alpha=1 / 6, beta=0.5)


def _unary(name: str) -> Factory:
    return lambda node, context: lambda F, x: getattr(F, name)(x)


def _clip(node: Node, context: Context) -> Call:
    low, high = (None if c is None else c.item() for c in (context.constant(node, 1), context.constant(node, 2)))
    if low is high is None:
        return _identity(node, context)
    if context.is_integer(node.inputs[0]):  # whose bounds would pass through floating point
        bounds = [(low, "maximum"), (high, "minimum")]
        return lambda F, x, *_: reduce(lambda y, b: y if b[0] is None else getattr(F, b[1])(y, b[0]), bounds, x)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    low = min(low, high)  # where they cross, the upper one wins
    return lambda F, x, *_: F.clip(x, a_min=low, a_max=high)


def _dropout(node: Node, context: Context) -> Call:
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else ratio.item()
    drops = context.training and probability != 0
    if len(context.wanted(node)) > 1:  # MXNet keeps the mask to itself: what it does to ones shows it
        dropout: Call = (lambda F, x: F.Dropout(x, p=probability)) if drops else (lambda F, x: x)

        def masked(F: Any, x: Any, *_: Any) -> Any:
            factors = dropout(F, F.ones_like(x))
            return x * factors, factors != 0

        return masked
    return (lambda F, x, *_: F.Dropout(x, p=probability)) if drops else _identity(node, context)


def _along_axis(function: str) -> Factory:
    def factory(node: Node, context: Context) -> Call:
        axis = node.attributes["axis"]
        return lambda F, x: getattr(F, function)(x, axis=axis)

    return factory


def _reduce(function: str) -> Factory:
    """A factory for a reduction over the axes that the second input, or without it all, names."""

    def factory(node: Node, context: Context) -> Call:
        axes, keep = context.constant(node, 1), bool(node.attributes["keepdims"])
        if axes is None or not axes.size:
            if node.attributes["noop_with_empty_axes"]:
                return _identity(node, context)
            axes = np.arange(context.rank(node.inputs[0]))
        chosen = tuple(int(a) for a in axes)
        return lambda F, x, *_: getattr(F, function)(x, axis=chosen, keepdims=keep)

    return factory


def _gather(node: Node, context: Context) -> Call:
    data, indices = node.inputs
    axis = node.attributes["axis"] % context.rank(data)
    if indices not in context.non_negative:  # those that count from the end wrap
        return lambda F, x, i: F.take(x, i, axis=axis, mode="wrap")
    if axis == 0 and context.rank(data) == 2:
        rows, columns = context.shape(data)
        dtype = context.dtypes[data].name
        return lambda F, x, i: F.Embedding(i, x, input_dim=rows, output_dim=columns, dtype=dtype)
    return lambda F, x, i: F.take(x, i, axis=axis)


def _concat(node: Node, context: Context) -> Call:
    axis = node.attributes["axis"] % context.rank(node.inputs[0])
    return lambda F, *parts: F.concat(*parts, dim=axis)


def _flatten(node: Node, context: Context) -> Call:
    shape = context.shape(node.inputs[0])
    axis = node.attributes["axis"]
    axis = axis + len(shape) if axis < 0 else axis
    if axis == 1:
        return lambda F, x: F.flatten(x)
    for sizes, place in ((shape[axis:], 1), (shape[:axis], 0)):
        known = [n for n in sizes if n is not None]
        if len(known) == len(sizes):
            target = [-1, -1]
            target[place] = math.prod(known)
            return lambda F, x: F.reshape(x, shape=tuple(target))
    raise NetworkError(f"Flatten of shape {list(shape)} at axis {axis} is not implemented", where=node.name)


def _reshape(node: Node, context: Context) -> Call:
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default shape
    sizes = tuple(int(n) for n in wanted)  # MXNet has ONNX's meaning of 0 and -1
    if not sizes or (node.attributes["allowzero"] and 0 in sizes):
        raise NetworkError(f"Reshape to {list(sizes)} is not implemented: MXNet has no such arrays", where=node.name)
    return lambda F, x, _: F.reshape(x, shape=sizes)


def _transpose(node: Node, context: Context) -> Call:
    order = tuple(node.attributes.get("perm") or reversed(range(context.rank(node.inputs[0]))))
    return lambda F, x: F.transpose(x, axes=order)


def _squeeze(node: Node, context: Context) -> Call:
    axes = context.constant(node, 1)
    if axes is None:
        return lambda F, x, *_: F.squeeze(x)
    dimensions = tuple(int(a) for a in axes)
    return lambda F, x, _: F.squeeze(x, axis=dimensions)


def _unsqueeze(node: Node, context: Context) -> Call:
    axes = context.constant(node, 1)
    assert axes is not None  # required since opset 13
    rank = context.rank(node.inputs[0]) + len(axes)
    dimensions = sorted(int(a) % rank for a in axes)
    return lambda F, x, _: reduce(lambda y, axis: F.expand_dims(y, axis=axis), dimensions, x)


def _pad(node: Node, context: Context) -> Call:
    mode = node.attributes["mode"]
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    rank = context.rank(node.inputs[0])
    chosen = range(rank) if axes is None else [int(a) % rank for a in axes]
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(chosen):
        begin[axis], end[axis] = int(amounts[i]), int(amounts[i + len(chosen)])
    if mode != "constant":
        return _pad_by_itself(node, context, begin, end, mode)
    fill = 0.0 if value is None else float(value.item())
    return lambda F, x, *_: _padded(F, x, begin, end, fill)


def _pad_by_itself(node: Node, context: Context, begin: Sequence[int], end: Sequence[int], mode: str) -> Call:
    """Padding that repeats the tensor itself: by MXNet's operator, or slice by slice where that has no such variant."""
    shape = context.shape(node.inputs[0])
    if len(shape) in (4, 5) and not any((*begin[:2], *end[:2])) and not context.is_integer(node.inputs[0]):
        widths = tuple(n for pair in zip(begin, end, strict=True) for n in pair)
        fits = all(n is not None and max(b, e) < n for n, b, e in list(zip(shape, begin, end, strict=True))[2:])
        if mode == "edge" or (mode == "reflect" and fits):
            return lambda F, x, *_: F.pad(x, mode=mode, pad_width=widths)
    if any((b or e) and n is None for n, b, e in zip(shape, begin, end, strict=True)):
        raise NetworkError(f"Pad with mode {mode!r} of an unknown size is not implemented", where=node.name)
    moved = {
        axis: _runs(np.pad(np.arange(shape[axis] or 0), (before, after), mode))  # type: ignore[call-overload]
        for axis, (before, after) in enumerate(zip(begin, end, strict=True))
        if before or after
    }
    return lambda F, x, *_: reduce(lambda y, axis: _rearranged(F, y, axis, moved[axis]), moved, x)


def _runs(rows: np.ndarray) -> list[tuple[int, int, int]]:
    """Indices as runs that count up, down or not at all: first index, step and length of each."""
    runs: list[tuple[int, int, int]] = []
    for row in rows.tolist():
        if runs:
            first, step, length = runs[-1]
            if length == 1 and abs(row - first) <= 1:
                runs[-1] = first, row - first, 2
                continue
            if length > 1 and row == first + step * length:
                runs[-1] = first, step, length + 1
                continue
        runs.append((row, 1, 1))
    return runs


def _rearranged(F: Any, x: Any, axis: int, runs: Sequence[tuple[int, int, int]]) -> Any:
    """The tensor's cells along an axis in the order of some `_runs`."""
    parts = []
    for first, step, length in runs:
        last = first + step * (length - 1)
        part = F.slice_axis(x, axis=axis, begin=min(first, last), end=max(first, last) + 1)
        if step == 0:
            part = F.broadcast_axis(part, axis=axis, size=length)
        parts.append(F.reverse(part, axis=axis) if step < 0 else part)
    return parts[0] if len(parts) == 1 else F.concat(*parts, dim=axis)


def _slices(F: Any, x: Any, count: int, *, keep: bool = False) -> list[Any]:
    """The slices of a tensor along its first axis, which they lose unless they shall keep it."""
    if count == 1:
        return [x if keep else F.squeeze(x, axis=0)]
    return list(F.split(x, num_outputs=count, axis=0, squeeze_axis=not keep))


def _padded(F: Any, x: Any, begin: Sequence[int], end: Sequence[int], value: float = 0.0) -> Any:
    """Pad, or where negative crop, every axis by its number of cells before and after.

    MXNet's operator pads the spatial axes of 4-D and 5-D arrays; other axes get blocks concatenated.
    """
    for axis, (before, after) in enumerate(zip(begin, end, strict=True)):
        if before < 0 or after < 0:
            x = F.slice_axis(x, axis=axis, begin=max(-before, 0), end=min(after, 0) or None)
    begin, end = [max(n, 0) for n in begin], [max(n, 0) for n in end]
    for axis in range(len(begin)):
        if axis < 2 or len(begin) not in (3, 4, 5):
            blocks = [
                F.broadcast_axis(F.zeros_like(F.slice_axis(x, axis=axis, begin=0, end=1)) + value, axis=axis, size=n)
                if n
                else None
                for n in (begin[axis], end[axis])
            ]
            if any(block is not None for block in blocks):
                x = F.concat(*[part for part in (blocks[0], x, blocks[1]) if part is not None], dim=axis)
            begin[axis] = end[axis] = 0
    if not any((*begin, *end)):
        return x
    widths = tuple(n for pair in zip(begin, end, strict=True) for n in pair)
    if len(begin) == 3:
        x = F.pad(
            F.expand_dims(x, axis=2), mode="constant", pad_width=(*widths[:4], 0, 0, *widths[4:]), constant_value=value
        )
        return F.squeeze(x, axis=2)
    return F.pad(x, mode="constant", pad_width=widths, constant_value=value)


def _gemm(node: Node, context: Context) -> Call:
    a = node.attributes
    alpha, beta, trans_a, trans_b = a["alpha"], a["beta"], bool(a["transA"]), bool(a["transB"])
    biased = len(node.inputs) > 2 and bool(node.inputs[2])
    features = context.shape(node.inputs[1])[0 if trans_b else 1]
    plain = alpha == 1 and (not biased or (beta == 1 and context.shape(node.inputs[2]) == (features,)))
    if plain and trans_b and not trans_a and features is not None:
        return lambda F, x, weight, *bias: F.FullyConnected(
            x, weight, *(bias[:1] if biased else ()), num_hidden=features, no_bias=not biased, flatten=False
        )

    def gemm(F: Any, x: Any, y: Any, z: Any = None) -> Any:
        product = F.dot(x, y, transpose_a=trans_a, transpose_b=trans_b)
        product = product if alpha == 1 else product * alpha
        if z is None:
            return product
        z = z if beta == 1 else z * beta
        return product + z if isinstance(z, float | int) else F.broadcast_add(product, z)

    return gemm


def _mat_mul(node: Node, context: Context) -> Call:
    left, right = (context.shape(name) for name in node.inputs)
    if len(right) == 2 and len(left) >= 2:  # F.dot contracts the last axis with the first
        return lambda F, x, y: F.dot(x, y)
    batches_agree = all(a == b or None in (a, b) for a, b in zip(left[:-2], right[:-2], strict=False))
    if len(left) == len(right) >= 3 and batches_agree:
        return lambda F, x, y: F.linalg_gemm2(x, y)
    if min(len(left), len(right)) >= 2:  # np.matmul's gradient is wrong where a batch axis of one operand is repeated
        known = [tuple(size for size in shape if size is not None) for shape in (left, right)]
        if known != [tuple(left), tuple(right)]:
            raise NetworkError("a matrix product that repeats a batch axis needs known sizes", where=node.name)
        batch = np.broadcast_shapes(*(shape[:-2] for shape in known))
        wide = [(*batch, *shape[-2:]) for shape in known]
        padded = [(1,) * (len(batch) + 2 - len(shape)) + shape for shape in known]
        return lambda F, x, y: F.linalg_gemm2(
            F.broadcast_to(F.reshape(x, padded[0]), wide[0]), F.broadcast_to(F.reshape(y, padded[1]), wide[1])
        )
    return lambda F, x, y: F.np.matmul(x.as_np_ndarray(), y.as_np_ndarray()).as_nd_ndarray()


def _window(node: Node, context: Context, kernel: Sequence[int | None] | None = None) -> tuple[Window, Shape]:
    """The node's window and its image's spatial sizes: one to three."""
    sizes = context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    return window(node, sizes, kernel), sizes


def _conv(node: Node, context: Context) -> Call:
    shape = context.shape(node.inputs[1])
    w, _ = _window(node, context, shape[2:])
    settings = {
        "kernel": w.kernel,
        "stride": w.strides,
        "dilate": w.dilations,
        "pad": w.pads_begin if w.symmetric else (0,) * len(w.kernel),
        "num_filter": shape[0],
        "num_group": node.attributes["group"],
        "no_bias": len(node.inputs) < 3 or not node.inputs[2],
    }
    begin, end, symmetric = (0, 0, *w.pads_begin), (0, 0, *w.pads_end), w.symmetric

    def convolve(F: Any, x: Any, *weights: Any) -> Any:
        given = [weight for weight in weights if weight is not None]
        return F.Convolution(x if symmetric else _padded(F, x, begin, end), *given, **settings)

    return convolve


def _conv_transpose(node: Node, context: Context) -> Call:
    shape, sizes = context.shape(node.inputs[1]), context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    w = transposed_window(node, sizes, shape[2:])
    groups, biased = node.attributes["group"], len(node.inputs) > 2 and bool(node.inputs[2])
    if shape[1] is None:
        raise NetworkError(f"{node.op_type} with an unknown number of channels is not implemented", where=node.name)
    settings = {"kernel": w.kernel, "dilate": w.dilations, "num_filter": shape[1] * groups, "num_group": groups}
    # MXNet has three dimensions by oneDNN only, in float32 and without dilation.
    exotic = len(sizes) == 3 and (context.dtype == "float64" or max(w.dilations) > 1)
    if not exotic and w.symmetric and all(e < s for e, s in zip(w.output_padding, w.strides, strict=True)):
        settings.update(stride=w.strides, pad=w.pads_begin, adj=w.output_padding, no_bias=not biased)
        return lambda F, *inputs: F.Deconvolution(*(t for t in inputs if t is not None), **settings)
    begin = [0, 0, *(-n for n in w.pads_begin)]
    end = [0, 0, *(e - n for e, n in zip(w.output_padding, w.pads_end, strict=True))]

    def whole(F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        if exotic:
            y = _by_convolution(F, x, weight, w, settings, context.shape(node.inputs[0]), shape)
        else:
            y = F.Deconvolution(x, weight, stride=w.strides, no_bias=True, **settings)
        y = _padded(F, y, begin, end)
        return y if bias is None else F.broadcast_add(y, F.reshape(bias, shape=(1, -1, *[1] * len(sizes))))

    return whole


def _by_convolution(
    F: Any, x: Any, weight: Any, w: TransposedWindow, settings: Mapping[str, Any], image: Shape, shape: Shape
) -> Any:
    """A transposed convolution as a convolution: zeros between the image's pixels, the kernel turned round."""
    for axis, (size, stride) in enumerate(zip(image[2:], w.strides, strict=True), start=2):
        if stride > 1:
            x = F.expand_dims(x, axis=axis + 1)
            x = F.concat(x, *[F.zeros_like(x)] * (stride - 1), dim=axis + 1)
            x = F.reshape(x, shape=(*[0] * axis, -3, *[0] * (len(image) - axis - 1)))
            x = F.slice_axis(x, axis=axis, begin=0, end=((size or 0) - 1) * stride + 1)
    reach = tuple((k - 1) * d for k, d in zip(w.kernel, w.dilations, strict=True))
    groups = settings["num_group"]
    turned = F.reverse(weight, axis=tuple(range(2, len(shape))))
    turned = F.reshape(turned, shape=(groups, -1, *shape[1:]))
    turned = F.reshape(F.swapaxes(turned, 1, 2), shape=(-3, -2))
    return F.Convolution(x, turned, pad=reach, no_bias=True, **settings)


def _is_native_pooling(w: Window) -> bool:
    """Whether the framework's own padding can express the window's: equal sides, less than the kernel, no dilation."""
    inside = all(p < k for p, k in zip(w.pads_begin, w.kernel, strict=True))
    return w.symmetric and inside and max(w.dilations) == 1


def _reach(w: Window) -> tuple[list[int], list[int]]:
    """All that the windows reach beyond the image before and after, for every axis of the array."""
    return [0, 0, *w.pads_begin], [0, 0, *(end + more for end, more in zip(w.pads_end, w.overhang, strict=True))]


def _cells(F: Any, x: Any, w: Window) -> list[Any]:
    """For each cell of a dilated window, that cell of all windows, as arrays of the output's shape."""
    found = []
    for offsets in itertools.product(*(range(k) for k in w.kernel)):
        firsts = [o * d for o, d in zip(offsets, w.dilations, strict=True)]
        lasts = [f + (n - 1) * s + 1 for f, n, s in zip(firsts, w.outputs, w.strides, strict=True)]
        found.append(F.slice(x, begin=(None, None, *firsts), end=(None, None, *lasts), step=(None, None, *w.strides)))
    return found


def _max_pool(node: Node, context: Context) -> Call:
    if any(context.wanted(node)[1:]):
        raise NetworkError("MaxPool with indices is not implemented: MXNet's pooling has none", where=node.name)
    w, sizes = _window(node, context)
    settings = {"kernel": w.kernel, "stride": w.strides, "pool_type": "max"}
    if _is_native_pooling(w):
        rooms = [(n or 0) + 2 * p - k for n, p, k in zip(sizes, w.pads_begin, w.kernel, strict=True)]
        for convention, counts in (
            ("valid", tuple(room // s + 1 for room, s in zip(rooms, w.strides, strict=True))),
            ("full", tuple(-(-room // s) + 1 for room, s in zip(rooms, w.strides, strict=True))),
        ):
            if counts == w.outputs:
                settings.update(pad=w.pads_begin, pooling_convention=convention)
                return lambda F, x: F.Pooling(x, **settings)
    begin, end = _reach(w)
    if max(w.dilations) == 1:
        return lambda F, x: F.Pooling(_padded(F, x, begin, end, -math.inf), **settings)
    return lambda F, x: reduce(F.broadcast_maximum, _cells(F, _padded(F, x, begin, end, -math.inf), w))


def _average_pool(node: Node, context: Context) -> Call:
    """MXNet counts what it pads itself, and a correction follows: oneDNN's other way logs a line for each new shape."""
    w, sizes = _window(node, context)
    native = _is_native_pooling(w) and not any(w.overhang)
    settings = {"kernel": w.kernel, "stride": w.strides, "pool_type": "avg", "count_include_pad": True}
    if native:
        settings["pad"] = w.pads_begin
    begin, end = _reach(w)
    correction = _divisor_correction(w, sizes, include=bool(node.attributes["count_include_pad"]))
    corrected = bool((correction != 1).any())
    if corrected:
        context.keep(node, correction[None, None])

    def pool(F: Any, x: Any, factor: Any = None) -> Any:
        x = x if native else _padded(F, x, begin, end)
        y = F.Pooling(x, **settings) if max(w.dilations) == 1 else F.add_n(*_cells(F, x, w)) / math.prod(w.kernel)
        return F.broadcast_mul(y, factor) if corrected else y

    return pool


def _divisor_correction(w: Window, sizes: Sequence[int | None], *, include: bool) -> np.ndarray:
    """Kernel size over the number of cells that count, for each output: float64.

    Cells of the padding count if ``include``; what a ceil-mode window reaches beyond the padding never does.
    """
    counts = np.ones(())
    for axis, size in enumerate(sizes):
        assert size is not None  # window() has seen to it
        starts = np.arange(w.outputs[axis]) * w.strides[axis] - w.pads_begin[axis]
        cells = starts[:, None] + np.arange(w.kernel[axis]) * w.dilations[axis]
        low, high = (-w.pads_begin[axis], size + w.pads_end[axis]) if include else (0, size)
        counts = np.multiply.outer(counts, np.maximum(((cells >= low) & (cells < high)).sum(axis=1), 1))
    return math.prod(w.kernel) / counts


def _global_pool(kind: str) -> Factory:
    def factory(node: Node, context: Context) -> Call:
        rank = context.rank(node.inputs[0]) - 2
        if rank not in (1, 2, 3):
            raise NetworkError(f"{node.op_type} with {rank} spatial dimensions is not implemented", where=node.name)
        return lambda F, x: F.Pooling(x, kernel=(1,) * rank, global_pool=True, pool_type=kind)

    return factory


def _batch_normalization(node: Node, context: Context) -> Call:
    """Running statistics are moved in place, and by the backward pass; MXNet's variance is the biased one."""
    momentum = node.attributes["momentum"]
    settings = {
        "eps": node.attributes["epsilon"],
        "momentum": 1 if context.dtypes else momentum,  # at level 0 inputs stay as they are
        "fix_gamma": False,
        "use_global_stats": not context.training,
    }
    wanted = context.wanted(node)
    if not any(wanted[1:]):
        return lambda F, x, scale, bias, mean, variance: F.BatchNorm(x, scale, bias, mean, variance, **settings)
    axes = (0, *range(2, context.rank(node.inputs[0])))

    def with_statistics(F: Any, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        y = F.BatchNorm(x, scale, bias, mean, variance, **settings)
        batch = F.moments(x, axes=axes)
        moved = [a * momentum + b * (1 - momentum) for a, b in zip((mean, variance), batch, strict=True)]
        return _choose((y, *moved), wanted)

    return with_statistics


def _choose(results: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """The first result if nothing else is wanted, else a tuple with None for what is not."""
    if not any(wanted[1:]):
        return results[0]
    return tuple(result if asked else None for result, asked in zip(results, wanted, strict=False))


def _layer_normalization(node: Node, context: Context) -> Call:
    """MXNet normalises one axis, into which several are merged."""
    shape, epsilon = context.shape(node.inputs[0]), node.attributes["epsilon"]
    rank, first, wanted = len(shape), node.attributes["axis"] % len(shape), context.wanted(node)
    sizes = shape[first:]
    full = all(context.shape(name) == sizes for name in node.inputs[1:] if name)
    merged, shown = len(sizes) > 1, any(wanted[1:])
    if not full and None in sizes:
        raise NetworkError("LayerNormalization of unknown sizes is not implemented", where=node.name)
    count = math.prod(n or 0 for n in sizes)

    def normalize(F: Any, x: Any, scale: Any, bias: Any = None) -> Any:
        flat = F.reshape(x, shape=(*[0] * first, -1)) if merged else x
        if full:
            gamma = F.reshape(scale, shape=(-1,)) if merged else scale
            beta = F.reshape(bias, shape=(-1,)) if merged and bias is not None else bias
        else:
            gamma, beta = F.ones(shape=(count,), dtype=context.dtype), None
        beta = F.zeros_like(gamma) if beta is None else beta
        found = F.LayerNorm(flat, gamma, beta, axis=first, eps=epsilon, output_mean_var=shown)
        y, *statistics = found if shown else (found,)
        y = F.reshape_like(y, x) if merged else y
        if not full:
            y = F.broadcast_mul(y, scale)
            y = y if bias is None else F.broadcast_add(y, bias)
        if not shown:
            return y
        mean, deviation = (F.reshape(s, shape=(*[0] * first, *[1] * (rank - first))) for s in statistics)
        return _choose((y, mean, 1 / deviation), wanted)

    return normalize


def _lrn(node: Node, context: Context) -> Call:
    a = node.attributes
    size, alpha, beta, bias = a["size"], a["alpha"], a["beta"], a["bias"]
    if size % 2 and context.dtype == "float32":
        return lambda F, x: F.LRN(x, nsize=size, alpha=alpha, beta=beta, knorm=bias)
    # MXNet takes no even windows, and its settings are float32. Of an even window ONNX has the longer half behind.
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    rest = [0] * (context.rank(node.inputs[0]) - 2)

    def lrn(F: Any, x: Any) -> Any:
        squares = _padded(F, F.square(x), [0, before, *rest], [0, after, *rest])
        # From either end, as many channels are left out as a window is short of them all.
        parts = [F.slice_axis(squares, axis=1, begin=i, end=i - size + 1 or None) for i in range(size)]
        return x / (F.add_n(*parts) * (alpha / size) + bias) ** beta

    return lrn


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    ignored, reduction = node.attributes.get("ignore_index"), node.attributes["reduction"]
    weighted, dtype = len(node.inputs) > 2 and bool(node.inputs[2]), context.dtype
    wanted = context.wanted(node)

    def loss(F: Any, x: Any, labels: Any, weight: Any = None) -> Any:
        scores = F.log_softmax(x, axis=1)
        return _choose((reduced(F, -F.pick(scores, labels, axis=1), labels, weight), scores), wanted)

    def reduced(F: Any, losses: Any, labels: Any, weight: Any) -> Any:
        if ignored is None and not weighted:
            return {"none": F.identity, "sum": F.sum, "mean": F.mean}[reduction](losses)
        factors = F.take(weight, labels) if weighted else F.ones_like(losses)
        if ignored is not None:
            factors = F.broadcast_mul(factors, F.cast(labels != ignored, dtype=dtype))
        losses = losses * factors
        if reduction == "none":
            return losses
        return F.sum(losses) if reduction == "sum" else F.sum(losses) / F.sum(factors)

    return loss


def _recurrent(node: Node, context: Context) -> Call:
    """An LSTM or GRU by MXNet's kernel, or step by step where that has no such variant."""
    plan = recurrent(node, context.shapes, context.constants)
    if plan.peepholes or (plan.kind == "GRU" and not plan.linear_before_reset):
        return _step_by_step(node, context, plan)
    names = [*node.inputs, *[""] * 7]
    context.packed.append(_packed_weights(plan, [n for n in names[1:4] if n], [context.shape(n) for n in names[1:3]]))
    batch = context.shape(names[0])[0 if plan.batch_first else 1]
    count, directions, hidden = len(node.inputs), plan.directions, plan.hidden
    cells = plan.kind == "LSTM"
    omitted = not names[5] or (cells and not names[6])
    if omitted:
        context.keep(node, np.zeros((directions, batch or 0, hidden)))
    settings = {
        "state_size": hidden,
        "num_layers": 1,
        "mode": plan.kind.lower(),
        "bidirectional": directions == 2,
        "state_outputs": any(plan.wanted[1:]),
    }

    def run(F: Any, x: Any, weights: Any, *rest: Any) -> Any:
        given = [*rest[: count - 2], *[None] * 5]  # from R on
        states = [
            rest[-1] if state is None else F.swapaxes(state, 0, 1) if plan.batch_first else state
            for state in (given[3:5] if cells else given[3:4])
        ]
        x = F.swapaxes(x, 0, 1) if plan.batch_first else x
        found = F.RNN(F.reverse(x, axis=0) if plan.reverse else x, weights, *states, **settings)
        y, *last = found if settings["state_outputs"] else (found,)
        y = F.reverse(y, axis=0) if plan.reverse else y
        y = F.reshape(y, shape=(0, 0, directions, hidden))
        if plan.batch_first:
            y, last = F.swapaxes(y, 0, 1), [F.swapaxes(state, 0, 1) for state in last]
        else:
            y = F.swapaxes(y, 1, 2)
        return _choose((y, *last), plan.wanted)

    return run


def _packed_weights(plan: Recurrent, names: Sequence[str], shapes: Sequence[Shape]) -> Packed:
    """W, R and B as the kernel's vector: of each direction W and R, then of each direction both halves of B."""
    order = "ifco" if plan.kind == "LSTM" else "rzh"
    gates, biases = plan.gates(order), plan.bias_gates(order)
    w_size, r_size = (math.prod(n or 0 for n in shape[1:]) for shape in shapes)
    b_size, split = 2 * (shapes[0][1] or 0), plan.directions * (w_size + r_size)

    def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
        w, r = (gates.pack(array) for array in arrays[:2])
        b = biases.pack(arrays[2]) if len(arrays) > 2 else np.zeros(plan.directions * b_size, w.dtype)
        return np.concatenate([*(part[d].ravel() for d in range(plan.directions) for part in (w, r)), b.ravel()])

    def unpack(vector: np.ndarray) -> list[np.ndarray]:
        w, r = np.split(vector[:split].reshape(plan.directions, -1), [w_size], axis=1)
        unpacked = [gates.unpack(part.reshape([n or 0 for n in s])) for part, s in zip((w, r), shapes, strict=True)]
        return [*unpacked, biases.unpack(vector[split:].reshape(plan.directions, -1))][: len(names)]

    return Packed(names, pack, unpack)


def _step_by_step(node: Node, context: Context, plan: Recurrent) -> Call:
    """The recurrence in MXNet's own operators; tensors are taken apart beforehand, for symbols have no indices."""
    sizes = context.shape(node.inputs[0])
    batch, steps = (sizes[0], sizes[1]) if plan.batch_first else (sizes[1], sizes[0])
    assert batch is not None and steps is not None  # an operation's shapes are all known
    time_first = replace(plan, batch_first=False)

    def run(F: Any, x: Any, w: Any, r: Any, *rest: Any) -> Any:
        b, lengths, h, c, p = [*rest, *[None] * 5][:5]

        def rows(vectors: Any) -> Any:
            """By direction a matrix whose rows are all the vector: sums of symbols want equal shapes."""
            if vectors is None:
                return None
            return [F.broadcast_axis(v, axis=0, size=batch) for v in _slices(F, vectors, plan.directions, keep=True)]

        def states(value: Any) -> Any:
            if value is None:
                return None
            return _slices(F, F.swapaxes(value, 0, 1) if plan.batch_first else value, plan.directions)

        functions = Functions(
            F.dot, F.transpose, F.sigmoid, F.tanh, lambda t, n: F.split(t, num_outputs=n, axis=1),
            lambda tensors, axis: F.stack(*tensors, axis=axis),
            lambda height, width: F.zeros(shape=(height, width), dtype=context.dtype),
        )  # fmt: skip
        x = F.swapaxes(x, 0, 1) if plan.batch_first else x
        w, r = _slices(F, w, plan.directions), _slices(F, r, plan.directions)
        y, *last = unrolled(
            time_first, functions, batch, steps, _slices(F, x, steps), w, r, rows(b), lengths, states(h),
            states(c), rows(p),
        )  # fmt: skip
        if plan.batch_first:  # (steps, directions, batch, hidden)
            y, last = F.transpose(y, axes=(2, 0, 1, 3)), [F.swapaxes(state, 0, 1) for state in last]
        return _choose((y, *last), plan.wanted)

    return run


def _attention(node: Node, context: Context) -> Call:
    plan = attention_nodes.attention(node, context.shapes, context.constants, context.dtypes)
    biased, dtype = plan.bias is not None, context.dtype
    if plan.bias is not None:
        context.keep(node, plan.bias)
    counts = plan.heads, plan.kv_heads, plan.kv_heads
    q_shape, k_shape, v_shape = (
        _by_head(context.shape(name), heads, plan) for name, heads in zip(node.inputs[:3], counts, strict=True)
    )
    batch, heads, queries, _ = q_shape
    groups, rows = batch * plan.kv_heads, heads // plan.kv_heads * queries
    count = len(node.inputs)

    def attend(F: Any, *inputs: Any) -> Any:
        q, k, v, mask, past_k, past_v = [*inputs[:count], *[None] * 3][:6]
        if plan.split_heads:
            q, k, v = (
                F.transpose(F.reshape(t, shape=(s[0], s[2], s[1], s[3])), axes=(0, 2, 1, 3))
                for t, s in ((q, q_shape), (k, k_shape), (v, v_shape))
            )
        if past_k is not None:
            k, v = F.concat(past_k, k, dim=2), F.concat(past_v, v, dim=2)
        present = k, v
        # The query heads that share a key head lie in a row: they are rows of one product.
        q = F.reshape(q * plan.scale, shape=(groups, rows, -1))
        k, v = (F.reshape(t, shape=(-3, -2)) for t in present)
        scores = F.reshape(F.batch_dot(q, k, transpose_b=True), shape=(batch, heads, queries, -1))
        shown = {attention_nodes.SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * F.tanh(scores / plan.softcap)
        shown[attention_nodes.CAPPED] = scores
        added = [inputs[-1]] if biased else []
        if mask is not None:
            # The logarithm of True is 0, and of False -inf.
            bias = F.log(F.cast(mask, dtype=dtype)) if plan.mask == "bool" else mask
            rank = context.rank(node.inputs[3])
            added.append(_padded(F, bias, [0] * rank, [*[0] * (rank - 1), plan.mask_padding], -math.inf))
        total = reduce(F.broadcast_add, added) if added else None
        scores = scores if total is None else F.broadcast_add(scores, total)
        shown[attention_nodes.BIASED] = scores
        if plan.may_be_blind:  # a row of -inf alone would give NaN, and its gradient too
            seen = F.max(total, axis=-1, keepdims=True) > -math.inf
            weights = F.broadcast_mul(F.softmax(F.clip(scores, a_min=-1e30, a_max=1e30), axis=-1), seen)
        else:
            weights = F.softmax(scores, axis=-1)
        shown[attention_nodes.WEIGHTS] = weights
        y = F.batch_dot(F.reshape(weights, shape=(groups, rows, -1)), v)
        y = F.reshape(y, shape=(batch, heads, queries, -1))
        if plan.split_heads:
            y = F.reshape(F.transpose(y, axes=(0, 2, 1, 3)), shape=(0, 0, -3))
        return _choose((y, *present, shown.get(plan.shows)), plan.wanted)

    return attend


def _by_head(shape: Shape, heads: int, plan: attention_nodes.Attention) -> tuple[int, int, int, int]:
    """(batch, heads, steps, size) of a tensor that may come as (batch, steps, heads x size)."""
    sizes = [n or 0 for n in shape]  # an operation's are all known
    if plan.split_heads:
        return sizes[0], heads, sizes[1], sizes[2] // heads
    return sizes[0], sizes[1], sizes[2], sizes[3]


OPERATORS: dict[str, Factory] = {
    "Add": _add,
    "Attention": _attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _broadcasting("div", lambda a, b: a / b),
    "Dropout": _dropout,
    "Elu": _elu,
    "Exp": _unary("exp"),
    "Flatten": _flatten,
    "GRU": _recurrent,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool("avg"),
    "GlobalMaxPool": _global_pool("max"),
    "HardSwish": _hard_swish,
    "Identity": _identity,
    "LRN": _lrn,
    "LSTM": _recurrent,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis("log_softmax"),
    "MatMul": _mat_mul,
    "MaxPool": _max_pool,
    "Mul": _broadcasting("mul", lambda a, b: a * b),
    "Pad": _pad,
    "ReduceMax": _reduce("max"),
    "ReduceMean": _reduce("mean"),
    "ReduceSum": _reduce("sum"),
    "Relu": _activation("relu"),
    "Reshape": _reshape,
    "Sigmoid": _activation("sigmoid"),
    "Softmax": _along_axis("softmax"),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Sqrt": _unary("sqrt"),
    "Squeeze": _squeeze,
    "Sub": _broadcasting("sub", lambda a, b: a - b),
    "Sum": _sum,
    "Tanh": _activation("tanh"),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""


_ARRAY_TYPES = frozenset({"float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool"})
"""The types that MXNet's arrays on the CPU have in all that an operator needs."""


class Operator(level.Operator):
    """One ONNX node on MXNet; its backward pass is autograd's.

    In mode ``hybrid`` it is a cached graph, as Gluon makes of a hybridized block, which takes the arrays that the graph
    has and gives the wanted outputs alone; in mode ``imperative`` it is the factory's call on arrays. Gradients are
    written into the same arrays again and again.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        self._device = CONTEXTS[device]()
        node = operation.node
        context = Context(
            shapes=operation.shapes,
            constants=operation.constants,
            training=operation.training,
            dtype=_floating(operation).name,
            dtypes=operation.dtypes,
            non_negative=operation.non_negative,
        )
        custom = operation.custom
        factory = OPERATORS[node.op_type] if custom is None else custom_operators.factory(custom)
        call = factory(node, context)
        self._packed = {packed.names[0]: packed for packed in context.packed}
        self._kept = {f"{key}/kept": array.astype(_floating(operation)) for key, array in context.kept.items()}
        self._arguments = [*self._inputs(), *self._kept]
        for name in (name for name in self._arguments if name in operation.dtypes):
            if operation.dtypes[name].name not in _ARRAY_TYPES:
                raise NetworkError(
                    f"MXNet's operators take no arrays of {operation.dtypes[name]}", where=operation.name
                )
            if 0 in operation.shapes[name]:
                raise NetworkError("MXNet's classic arrays have no axes of length zero", where=operation.name)
        self._vectors = itertools.count()
        if mode == "hybrid":
            call, self._arguments = _cached_graph(call, self._arguments)
        else:
            call = partial(call, mx.nd)
        self.forward = _in_training(call) if operation.training else call

    def _inputs(self) -> list[Any]:
        """What the factory's call takes for each input: the name of an array, or a number or None."""
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
        fed = {n: self._native(named[n]) for n in self._arguments if n in named and n not in self._packed}
        for key, packed in self._packed.items():
            fed[key] = self._vector(packed.pack([named[name] for name in packed.names]))
        return [fed[a] if isinstance(a, str) else a for a in self._arguments]

    def _vector(self, array: np.ndarray) -> Any:
        """Weights as a kernel wants them, and as no others were fed.

        A kernel of oneDNN's that has arranged its weights for itself takes others for the same ones if they have been
        written to as many times.
        """
        vector = self._native(array)
        for _ in range(next(self._vectors)):
            vector *= 1
        return vector

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        return [self._native(array) for array in arrays]

    def _native(self, array: np.ndarray) -> Any:
        # Not `mx.nd.array`, which asks SciPy for names that it deprecates. Arrays without axes have one here.
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
            # Asked for only now: a gradient that equals another may have become that array itself.
            return [source.grad for source in sources]

        return call

    def _sources(self) -> list[str]:
        """The arguments that have a gradient: inputs, one by one or packed."""
        operation = self.operation
        first = {name: key for key, packed in self._packed.items() for name in packed.names}
        names = (operation.node.inputs[index] for index in operation.differentiable)
        return list(dict.fromkeys(first.get(name, name) for name in names))

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        names = self.operation.outputs
        return [self._neutral(value, name) for name, value in zip(names, _as_list(outputs), strict=True)]

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        values: dict[str, Any] = dict(zip(self._sources(), gradients, strict=True))
        for key, packed in self._packed.items():
            values.update(zip(packed.names, packed.unpack(values[key].asnumpy()), strict=True))
        names = [self.operation.node.inputs[index] for index in self.operation.differentiable]
        return [self._neutral(values[name], name) for name in names]

    def _neutral(self, value: Any, name: str) -> np.ndarray:
        """A tensor as ONNX has it: with no axes where MXNet must have one, and truths as such."""
        array = value if isinstance(value, np.ndarray) else value.asnumpy()
        return np.array(array, self.operation.dtypes[name], order="C").reshape(self.operation.shapes[name])

    def extent(self, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, mx.nd.NDArray):
            return None
        address = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.MXNDArrayGetData(value.handle, ctypes.byref(address)))
        return address.value or 0, value.size * np.dtype(value.dtype).itemsize

    def synchronize(self, *results: Any) -> None:
        mx.nd.waitall()


def _floating(operation: Operation) -> np.dtype:
    """The type of the operation's floating-point inputs; float32 if it has none."""
    types = [operation.dtypes[name] for name in operation.node.inputs if name]
    return next((dtype for dtype in types if is_floating(dtype)), np.dtype(np.float32))


def _cached_graph(call: Call, arguments: Sequence[Any]) -> tuple[Call, list[str]]:
    """A native graph of a factory's call, and the names of the arrays that it takes."""
    outputs = call(mx.sym, *(mx.sym.var(a) if isinstance(a, str) else a for a in arguments))
    if isinstance(outputs, tuple):
        outputs = mx.sym.Group([output for output in outputs if output is not None])
    return mx.nd.CachedOp(outputs, (("static_alloc", True), ("static_shape", True))), outputs.list_inputs()


def _in_training(call: Call) -> Call:
    """The same call in MXNet's training mode: Dropout drops, and BatchNorm takes the batch's moments."""

    def run(*inputs: Any) -> Any:
        with mx.autograd.train_mode():
            return call(*inputs)

    return run


def _as_list(outputs: Any) -> list[Any]:
    """The wanted outputs."""
    return [output for output in outputs if output is not None] if isinstance(outputs, list | tuple) else [outputs]
