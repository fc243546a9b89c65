"""ONNX operators as tinygrad calls, and level 0.

A factory ``(node, context)`` reads a node's attributes once and returns a function of the node's
inputs, None for an omitted one, to its first output or to a tuple of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from d5suite.errors import NetworkError
from d5suite.levels import operator as level
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext, select
from d5suite.network.nodes.elementwise import read_clip, read_dropout
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss
from d5suite.network.nodes.matrix import read_gemm
from d5suite.network.nodes.normalization import read_lrn
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import (
    read_axis,
    read_flatten,
    read_pad,
    read_reshape,
    read_squeeze,
    read_transpose,
    read_unsqueeze,
)
from d5suite.network.nodes.sliding import read_conv, read_global_pool, read_pool
from d5suite.network.operation import Operation

Function = Callable[..., Any]
Factory = Callable[[Node, "Context"], Function]

TYPES: dict[str, DType] = {"fp32": dtypes.float32, "fp64": dtypes.float64}


@dataclass(kw_only=True)
class Context(NodeContext):
    """A factory's view of a node's surroundings; ``dtype`` is that of activations."""

    dtype: DType = dtypes.float32


def native(array: np.ndarray, dtype: DType | None = None) -> Tensor:
    """Copy an array to the device. The copy is made before this returns."""
    array = np.array(array, order="C")
    if array.ndim == 0:  # a plain number would be compiled into the kernels
        return native(array.reshape(1), dtype).reshape(()).contiguous().realize()
    return Tensor(array, device="CPU", dtype=dtype).contiguous().realize()


def neutral(tensor: Tensor, dtype: Any) -> np.ndarray:
    """Copy a tensor to NumPy."""
    return np.array(tensor.numpy(), dtype, order="C")


def same(x: Tensor, *_: Tensor) -> Tensor:
    return x


def plain(function: Function) -> Factory:
    """Return a factory for a function that takes the node's inputs as they are."""
    return lambda node, context: function


def sum_(*terms: Tensor) -> Tensor:
    return reduce(Tensor.add, terms)


def leaky_relu(node: Node, context: Context) -> Function:
    alpha = node.attributes["alpha"]
    return lambda x: (x < 0).where(alpha * x, x)


def clip(node: Node, context: Context) -> Function:
    low, high = read_clip(node, context)

    def run(x: Tensor, *_: Tensor) -> Tensor:
        x = x if low is None else (x < low).where(low, x)
        return x if high is None else (x > high).where(high, x)

    return run


def dropout(node: Node, context: Context) -> Function:
    probability, wanted = read_dropout(node, context), context.wanted(node)

    def run(x: Tensor, *_: Tensor) -> Any:
        if not context.training or probability == 0:
            return select((x, Tensor.ones(*x.shape, dtype=dtypes.bool)), wanted)
        kept = Tensor.rand(*x.shape, dtype=dtypes.float32) >= probability
        return select((kept.where(x / (1 - probability), 0), kept), wanted)

    return run


def concat(node: Node, context: Context) -> Function:
    axis = read_axis(node, context)
    return lambda *parts: parts[0].cat(*parts[1:], dim=axis)


def flatten(node: Node, context: Context) -> Function:
    sizes = read_flatten(node, context)
    return lambda x: x.reshape(sizes)


def reshape(node: Node, context: Context) -> Function:
    sizes = read_reshape(node, context).sizes
    return lambda x, _: x.reshape(sizes)


def transpose(node: Node, context: Context) -> Function:
    order = read_transpose(node, context)
    return lambda x: x.permute(order)


def squeeze(node: Node, context: Context) -> Function:
    axes = read_squeeze(node, context)
    return lambda x, *_: x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes])


def unsqueeze(node: Node, context: Context) -> Function:
    axes = read_unsqueeze(node, context)
    return lambda x, _: reduce(Tensor.unsqueeze, axes, x)


def pad(node: Node, context: Context) -> Function:
    plan = read_pad(node, context)
    if plan.mode == "wrap":
        raise NetworkError("Pad with mode 'wrap' is not implemented", where=node.name)
    mode = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}[plan.mode]
    return lambda x, *_: x.pad(plan.widths, mode=mode, value=plan.value)


def gemm(node: Node, context: Context) -> Function:
    plan = read_gemm(node, context)

    def run(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        y = (a.transpose() if plan.trans_a else a).matmul(b.transpose() if plan.trans_b else b)
        y = y if plan.alpha == 1 else plan.alpha * y
        return y if c is None else y + (c if plan.beta == 1 else plan.beta * c)

    return run


def conv(node: Node, context: Context) -> Function:
    w, groups = read_conv(node, context), node.attributes["group"]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.pad((None, None, *w.pads)).conv2d(weight, bias, groups, w.strides, w.dilations)

    return run


def max_pool(node: Node, context: Context) -> Function:
    w = read_pool(node, context)
    if any(context.wanted(node)[1:]):
        raise NetworkError("MaxPool with indices is not implemented", where=node.name)

    def run(x: Tensor) -> Tensor:
        return stored(x).pad((None, None, *w.pads), value=-math.inf).max_pool2d(w.kernel, w.strides, w.dilations)

    return run


def stored(x: Tensor) -> Tensor:
    """Return the input of a maximum as computed once.

    tinygrad would compute it again in the gradient, with other roundings, and no element would
    equal the maximum.
    """
    return x.contiguous()


def average_pool(node: Node, context: Context) -> Function:
    w, include = read_pool(node, context), bool(node.attributes["count_include_pad"])
    correction = native(w.divisor_correction(include_pad=include), context.dtype)
    return lambda x: x.pad((None, None, *w.pads)).avg_pool2d(w.kernel, w.strides, w.dilations) * correction


def global_pool(function: Function) -> Factory:
    def factory(node: Node, context: Context) -> Function:
        axes = tuple(range(2, 2 + read_global_pool(node, context)))
        return lambda x: function(x, axes, keepdim=True)

    return factory


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of each channel."""
    axes = (0, *range(2, x.ndim))
    mean = x.mean(axes)
    return mean, (x - _by_channel(mean, x)).square().mean(axes)


def _by_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(1, -1, *[1] * (x.ndim - 2))


def batch_normalization(node: Node, context: Context) -> Function:
    """In training mode return the new running statistics too, as ONNX's node does."""
    epsilon, momentum = node.attributes["epsilon"], node.attributes["momentum"]

    def run(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Any:
        centre, spread = moments(x) if context.training else (mean, variance)
        y = (x - _by_channel(centre, x)) * _by_channel((spread + epsilon).rsqrt(), x)
        y = y * _by_channel(scale, x) + _by_channel(bias, x)
        if not context.training:
            return y
        return y, mean * momentum + centre * (1 - momentum), variance * momentum + spread * (1 - momentum)

    return run


def lrn(node: Node, context: Context) -> Function:
    plan = read_lrn(node)

    def run(x: Tensor) -> Tensor:
        squares = x.square().pad((None, (plan.before, plan.after), *[None] * (x.ndim - 2)))
        windows = (squares[:, offset : offset + x.shape[1]] for offset in range(plan.size))
        return x / (plan.bias + plan.alpha / plan.size * reduce(Tensor.add, windows)).pow(plan.beta)

    return run


def softmax(function: Function) -> Factory:
    def factory(node: Node, context: Context) -> Function:
        axis = read_axis(node, context)
        return lambda x: function(x, axis)

    return factory


def reduction(function: Function) -> Factory:
    def factory(node: Node, context: Context) -> Function:
        plan = read_reduce(node, context)
        return same if plan is None else lambda x, *_: function(x, plan.axes, keepdim=plan.keep)

    return factory


def softmax_cross_entropy_loss(node: Node, context: Context) -> Function:
    plan = read_softmax_cross_entropy_loss(node, context)

    def run(x: Tensor, labels: Tensor, weight: Tensor | None = None) -> Any:
        logs = x.log_softmax(1)
        classes = Tensor.arange(x.shape[1]).reshape(1, -1, *[1] * (x.ndim - 2))
        chosen = labels.unsqueeze(1) == classes
        if plan.ignored is not None:
            chosen = chosen & (labels != plan.ignored).unsqueeze(1)
        factors = chosen.where(1.0 if weight is None else _by_channel(weight, x), 0.0).cast(x.dtype)
        losses = -(logs * factors).sum(1)
        if plan.reduction == "mean":
            losses = losses.sum() / factors.sum()
        elif plan.reduction == "sum":
            losses = losses.sum()
        return (losses, logs) if plan.logged else losses

    return run


OPERATORS: dict[str, Factory] = {
    "Add": plain(Tensor.add),
    "AveragePool": average_pool,
    "BatchNormalization": batch_normalization,
    "Clip": clip,
    "Concat": concat,
    "Conv": conv,
    "Div": plain(Tensor.div),
    "Dropout": dropout,
    "Exp": plain(Tensor.exp),
    "Flatten": flatten,
    "Gemm": gemm,
    "GlobalAveragePool": global_pool(Tensor.mean),
    "GlobalMaxPool": global_pool(lambda x, axes, keepdim: stored(x).max(axes, keepdim)),
    "Identity": plain(same),
    "LRN": lrn,
    "LeakyRelu": leaky_relu,
    "LogSoftmax": softmax(Tensor.log_softmax),
    "MatMul": plain(Tensor.matmul),
    "MaxPool": max_pool,
    "Mul": plain(Tensor.mul),
    "Pad": pad,
    "ReduceMean": reduction(Tensor.mean),
    "ReduceSum": reduction(Tensor.sum),
    "Relu": plain(Tensor.relu),
    "Reshape": reshape,
    "Sigmoid": plain(Tensor.sigmoid),
    "Softmax": softmax(Tensor.softmax),
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy_loss,
    "Sqrt": plain(Tensor.sqrt),
    "Squeeze": squeeze,
    "Sub": plain(Tensor.sub),
    "Sum": plain(sum_),
    "Tanh": plain(Tensor.tanh),
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""


class Operator(level.Operator):
    """One ONNX node on tinygrad, scheduled anew at each call in both modes."""

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        node, dtype = operation.node, TYPES[operation.precision]
        self._context = Context.of_operation(operation, dtype=dtype)
        self._call = OPERATORS[node.op_type](node, self._context)
        self.forward = self._forward

    def _outputs(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return every output, lazily, None where it is not wanted."""
        found = self._call(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        return tuple(
            y if asked else None for y, asked in zip(outputs, self._context.wanted(self.operation.node), strict=False)
        )

    def _forward(self, *inputs: Tensor | None) -> Any:
        outputs = [y if y is None else y.clone() for y in self._outputs(inputs)]
        Tensor.realize(*(y for y in outputs if y is not None))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def to_native(self, name: str, array: np.ndarray) -> Tensor:
        return native(array)

    def to_neutral(self, name: str, value: Tensor) -> np.ndarray:
        return neutral(value, self.operation.dtypes[name])

    def backward(self, inputs: Sequence[Tensor | None]) -> Callable[..., list[Tensor]]:
        operation = self.operation
        outputs = self._outputs(inputs)
        heads = [outputs[index] for index in operation.differentiated]
        sources = [inputs[index] for index in operation.differentiable]

        def run(*gradients: Tensor) -> list[Tensor]:
            total = reduce(Tensor.add, ((y * dy).sum() for y, dy in zip(heads, gradients, strict=True)))
            found = [g.clone() for g in total.gradient(*sources)]
            Tensor.realize(*found)
            return found

        return run

    def synchronize(self, *results: Any) -> None:
        Device[Device.DEFAULT].synchronize()
