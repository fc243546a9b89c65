"""ONNX operators as native MXNet calls.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable ``(F, *inputs)`` that calls the
operators of ``F``, either ``mx.nd`` (arrays, at once) or ``mx.sym`` (symbols, for a graph), and returns the node's
first output. An input is an array or symbol, a number for a fixed scalar, or None for an omitted one and for whatever a
factory reads through `Context.constant`; what a factory has laid down with `Context.keep` follows. Imports NumPy,
`d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.levels.operator import NodeContext
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.windows import Window, window

Operator = Callable[..., Any]
Factory = Callable[[Node, "Context"], Operator]


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
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    training: bool = False
    dtype: str = "float32"
    kept: dict[str, np.ndarray] = field(default_factory=dict)

    def keep(self, node: Node, array: np.ndarray) -> None:
        """Have the node's operator get this array after the node's inputs."""
        self.kept[node.name] = array


def _identity(node: Node, context: Context) -> Operator:
    return lambda F, x, *_: F.identity(x)


def _activation(kind: str) -> Factory:
    return lambda node, context: lambda F, x: F.Activation(x, act_type=kind)


def _broadcasting(name: str, scalar: Callable[[Any, Any], Any]) -> Factory:
    """A factory for arithmetic: MXNet has one function for equal shapes, one for others, one for numbers."""
    equal, unequal = f"elemwise_{name}", f"broadcast_{name}"

    def factory(node: Node, context: Context) -> Operator:
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


def _sum(node: Node, context: Context) -> Operator:
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


def _leaky_relu(node: Node, context: Context) -> Operator:
    slope = node.attributes["alpha"]
    if context.dtype == "float64":  # the kernel rounds the slope
        return lambda F, x: F.relu(x) - F.relu(-x) * slope
    return lambda F, x: F.LeakyReLU(x, act_type="leaky", slope=slope)


def _clip(node: Node, context: Context) -> Operator:
    low, high = (None if c is None else c.item() for c in (context.constant(node, 1), context.constant(node, 2)))
    if low is high is None:
        return _identity(node, context)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    low = min(low, high)  # where they cross, the upper one wins
    return lambda F, x, *_: F.clip(x, a_min=low, a_max=high)


def _dropout(node: Node, context: Context) -> Operator:
    ratio = context.constant(node, 1)
    probability = 0.5 if ratio is None else ratio.item()
    if not context.training or probability == 0:
        return _identity(node, context)
    return lambda F, x, *_: F.Dropout(x, p=probability)


def _along_axis(function: str) -> Factory:
    def factory(node: Node, context: Context) -> Operator:
        axis = node.attributes["axis"]
        return lambda F, x: getattr(F, function)(x, axis=axis)

    return factory


def _concat(node: Node, context: Context) -> Operator:
    axis = node.attributes["axis"] % context.rank(node.inputs[0])
    return lambda F, *parts: F.concat(*parts, dim=axis)


def _flatten(node: Node, context: Context) -> Operator:
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


def _reshape(node: Node, context: Context) -> Operator:
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default shape
    sizes = tuple(int(n) for n in wanted)  # MXNet has ONNX's meaning of 0 and -1
    if not sizes or (node.attributes["allowzero"] and 0 in sizes):
        raise NetworkError(f"Reshape to {list(sizes)} is not implemented: MXNet has no such arrays", where=node.name)
    return lambda F, x, _: F.reshape(x, shape=sizes)


def _transpose(node: Node, context: Context) -> Operator:
    order = tuple(node.attributes.get("perm") or reversed(range(context.rank(node.inputs[0]))))
    return lambda F, x: F.transpose(x, axes=order)


def _squeeze(node: Node, context: Context) -> Operator:
    axes = context.constant(node, 1)
    if axes is None:
        return lambda F, x, *_: F.squeeze(x)
    dimensions = tuple(int(a) for a in axes)
    return lambda F, x, _: F.squeeze(x, axis=dimensions)


def _unsqueeze(node: Node, context: Context) -> Operator:
    axes = context.constant(node, 1)
    assert axes is not None  # required since opset 13
    rank = context.rank(node.inputs[0]) + len(axes)
    dimensions = sorted(int(a) % rank for a in axes)
    return lambda F, x, _: reduce(lambda y, axis: F.expand_dims(y, axis=axis), dimensions, x)


def _pad(node: Node, context: Context) -> Operator:
    if node.attributes["mode"] != "constant":
        raise NetworkError(f"Pad with mode {node.attributes['mode']!r} is not implemented", where=node.name)
    amounts, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    rank = context.rank(node.inputs[0])
    chosen = range(rank) if axes is None else [int(a) % rank for a in axes]
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(chosen):
        begin[axis], end[axis] = int(amounts[i]), int(amounts[i + len(chosen)])
    fill = 0.0 if value is None else float(value.item())
    return lambda F, x, *_: _padded(F, x, begin, end, fill)


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


def _gemm(node: Node, context: Context) -> Operator:
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


def _mat_mul(node: Node, context: Context) -> Operator:
    left, right = (context.shape(name) for name in node.inputs)
    if len(right) == 2 and len(left) >= 2:  # F.dot contracts the last axis with the first
        return lambda F, x, y: F.dot(x, y)
    batches_agree = all(a == b or None in (a, b) for a, b in zip(left[:-2], right[:-2], strict=False))
    if len(left) == len(right) >= 3 and batches_agree:
        return lambda F, x, y: F.linalg_gemm2(x, y)
    return lambda F, x, y: F.np.matmul(x.as_np_ndarray(), y.as_np_ndarray()).as_nd_ndarray()


def _window(node: Node, context: Context, kernel: Sequence[int | None] | None = None) -> tuple[Window, Shape]:
    """The node's window and its image's spatial sizes: one to three."""
    sizes = context.shape(node.inputs[0])[2:]
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{node.op_type} with {len(sizes)} spatial dimensions is not implemented", where=node.name)
    return window(node, sizes, kernel), sizes


def _conv(node: Node, context: Context) -> Operator:
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


def _max_pool(node: Node, context: Context) -> Operator:
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


def _average_pool(node: Node, context: Context) -> Operator:
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
    def factory(node: Node, context: Context) -> Operator:
        rank = context.rank(node.inputs[0]) - 2
        if rank not in (1, 2, 3):
            raise NetworkError(f"{node.op_type} with {rank} spatial dimensions is not implemented", where=node.name)
        return lambda F, x: F.Pooling(x, kernel=(1,) * rank, global_pool=True, pool_type=kind)

    return factory


def _batch_normalization(node: Node, context: Context) -> Operator:
    """Running statistics are moved in place, and by the backward pass; MXNet's variance is the biased one."""
    settings = {
        "eps": node.attributes["epsilon"],
        "momentum": node.attributes["momentum"],
        "fix_gamma": False,
        "use_global_stats": not context.training,
    }
    return lambda F, x, scale, bias, mean, variance: F.BatchNorm(x, scale, bias, mean, variance, **settings)


def _lrn(node: Node, context: Context) -> Operator:
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


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Operator:
    ignored, reduction = node.attributes.get("ignore_index"), node.attributes["reduction"]
    weighted, dtype = len(node.inputs) > 2 and bool(node.inputs[2]), context.dtype

    def loss(F: Any, x: Any, labels: Any, weight: Any = None) -> Any:
        losses = -F.pick(F.log_softmax(x, axis=1), labels, axis=1)
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


OPERATORS: dict[str, Factory] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _broadcasting("div", lambda a, b: a / b),
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool("avg"),
    "GlobalMaxPool": _global_pool("max"),
    "Identity": _identity,
    "LRN": _lrn,
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _along_axis("log_softmax"),
    "MatMul": _mat_mul,
    "MaxPool": _max_pool,
    "Mul": _broadcasting("mul", lambda a, b: a * b),
    "Pad": _pad,
    "Relu": _activation("relu"),
    "Reshape": _reshape,
    "Sigmoid": _activation("sigmoid"),
    "Softmax": _along_axis("softmax"),
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Squeeze": _squeeze,
    "Sub": _broadcasting("sub", lambda a, b: a - b),
    "Sum": _sum,
    "Tanh": _activation("tanh"),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""
