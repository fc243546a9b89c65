"""ONNX operators as layers of a functional Keras model.

A factory ``(node, context)`` calls the Keras layer with the node's meaning on the symbolic tensors of its inputs and
returns the symbolic output. Where Keras has no such layer, `Calculation` is one made of `keras.ops`.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are kept in the data format that
Keras's backend does best, and an operator says in which layout it leaves its output; data are moved only where a layer
needs another order. Imports Keras, NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.errors import NetworkError
from d5suite.levels.operator import NodeContext
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.windows import Window, window

Layout = tuple[int, ...]
"""The ONNX axes of a tensor in the order in which they are stored: (0, 2, 3, 1) is an image stored as N, H, W, C."""

Function = Callable[..., Any]
"""Computes on the backend's own tensors with `keras.ops`."""

Factory = Callable[[Node, "Context"], Any]


def channels_last(rank: int) -> Layout:
    """The layout N, spatial axes, C."""
    return (0, *range(2, rank), 1)


def identity(rank: int) -> Layout:
    """ONNX's own layout."""
    return tuple(range(rank))


def kernel_layout(rank: int) -> Layout:
    """Keras's layout of a convolution kernel: spatial axes, inputs, outputs."""
    return (*range(2, rank), 1, 0)


@keras.saving.register_keras_serializable("d5suite")
class Calculation(layers.Layer):
    """A node as a function of `keras.ops`.

    Parameters
    ----------
    function : callable
        Takes the node's inputs in their order, None for an omitted one.
    inputs : sequence
        What stands at each input: ``...`` for the next of the layer's own inputs, a `keras.Variable`, an array, or
        None.
    stored : tuple of int or None
        The output's shape as it is stored; None to let Keras infer it.
    """

    def __init__(self, function: Function, inputs: Sequence[Any], stored: Shape | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.function = function
        self.stored = stored
        self.weights_held = [x for x in inputs if isinstance(x, keras.Variable)]  # so that Keras knows of them
        self._sources = tuple(inputs)
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The function's value."""
        given = iter(inputs if isinstance(inputs, list | tuple) else [inputs])
        return self.function(*[self._value(source, given) for source in self._sources])

    def _value(self, source: Any, given: Any) -> Any:
        if source is ...:
            return next(given)
        if isinstance(source, np.ndarray):
            return ops.convert_to_tensor(source, dtype=self.compute_dtype if source.dtype.kind == "f" else None)
        return None if source is None else ops.convert_to_tensor(source)

    def compute_output_spec(self, inputs: Any) -> Any:
        """The symbolic output."""
        if self.stored is None:
            return super().compute_output_spec(inputs)
        return keras.KerasTensor(self.stored, dtype=self.compute_dtype)


@dataclass
class Context(NodeContext):
    """The model as far as it is built, and what a factory may know about the place of its node.

    Attributes
    ----------
    shapes : mapping
        ONNX shape of every tensor.
    initializers : mapping
        Every initializer's value.
    weights : set of str
        The initializers that are parameters or running statistics; the others are constants.
    uses : mapping of str to int
        How many inputs of nodes each tensor is.
    policy : str
        Keras's dtype policy of the layers.
    wide_policy : str
        The policy of layers that compute in float32 at least.
    backend : str
        Keras's backend.
    layouts : dict
        Storage layout by tensor or weight. Absent means ONNX's own.
    tensors : dict
        Symbolic tensors by name.
    variables : dict
        Weights by name, as far as a layer has them.
    """

    shapes: Mapping[str, Shape]
    initializers: Mapping[str, np.ndarray]
    weights: frozenset[str]
    uses: Mapping[str, int]
    policy: str
    wide_policy: str
    backend: str
    layouts: dict[str, Layout] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.constants = self.initializers

    @property
    def images_last(self) -> bool:
        """Whether images are stored with their channels last.

        Keras's layers move the data of channels-last images at every convolution and pooling on PyTorch, and that of
        channels-first images at every pooling on TensorFlow.
        """
        return self.backend != "torch"

    @property
    def data_format(self) -> str:
        """Keras's name for the images' layout."""
        return "channels_last" if self.images_last else "channels_first"

    def layout(self, name: str) -> Layout:
        """Storage layout of a tensor."""
        return self.layouts.get(name) or identity(self.rank(name))

    def image_layout(self, rank: int) -> Layout:
        """The layout that convolution and pooling work in."""
        return channels_last(rank) if self.images_last else identity(rank)

    def computed(self, *names: str) -> bool:
        """Whether all these tensors are computed, and none is a weight or constant."""
        return all(name in self.tensors for name in names)

    def owned(self, *names: str) -> bool:
        """Whether all these are weights that only one node reads, so that its layer can have them for its own."""
        return all(name in self.weights and self.uses[name] == 1 for name in names)

    def name(self, node: Node, suffix: str = "") -> str:
        """A layer name after the node's, unique in the model and fit for every backend."""
        base = _identifier(f"{node.name}{suffix}").lstrip("_") or "node"
        names = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(1)))
        chosen = next(name for name in names if name not in self._names)
        self._names.add(chosen)
        return chosen

    def settings(self, node: Node, suffix: str = "") -> dict[str, Any]:
        """The arguments that every layer gets."""
        return {"name": self.name(node, suffix), "dtype": self.policy}

    def own(self, variable: Any, name: str, layout: Layout | None = None) -> None:
        """Note that a layer's variable is this weight, stored in this layout."""
        self.variables[name] = variable
        if layout is not None:
            self.layouts[name] = layout

    def variable(self, name: str) -> Any:
        """A weight as a variable in ONNX's layout, which several layers may share."""
        if name not in self.variables:
            value = self.initializers[name]
            self.variables[name] = keras.Variable(
                value,
                dtype=keras.DTypePolicy(self.wide_policy).variable_dtype,
                name=re.sub(r"\W+", "_", name, flags=re.ASCII),
            )
        return self.variables[name]

    def calculate(self, node: Node, function: Function, *, policy: str | None = None) -> Any:
        """A `Calculation` over all inputs of a node."""
        inputs: list[Any] = []
        given = []
        for name in node.inputs:
            if name in self.tensors:
                given.append(self.tensors[name])
                inputs.append(...)
            elif name in self.weights:
                inputs.append(self.variable(name))
            elif name in self.initializers:
                inputs.append(self.initializers[name])
            else:
                inputs.append(None)
        if not given:
            raise NetworkError(f"{node.op_type} reads weights only", where=node.name)
        settings = {"name": self.name(node), "dtype": policy or self.policy}
        layer = Calculation(function, inputs, self.stored(node.outputs[0]), **settings)
        return layer(given if len(given) > 1 else given[0])

    def stored(self, name: str) -> Shape | None:
        """A tensor's shape as it is stored, if it is known but for the batch."""
        shape = self.shapes.get(name)
        if shape is None or None in shape[1:]:
            return None
        return tuple(shape[axis] for axis in self.layout(name))

    def enter(self, node: Node, index: int, wanted: Layout) -> Any:
        """An input of a node, brought into a layout."""
        name = node.inputs[index]
        if name not in self.tensors:
            raise NetworkError(f"input {index} of {node.op_type} must be computed", where=node.name)
        convert = self.convert(name, wanted)
        if convert is _same:
            return self.tensors[name]
        shape = self.shape(name)
        layer = Calculation(convert, [...], tuple(shape[a] for a in wanted), **self.settings(node, ".layout"))
        return layer(self.tensors[name])

    def image(self, node: Node) -> Any:
        """A node's first input as an image in the layout that convolution and pooling work in; so is its output."""
        layout = self.image_layout(self.rank(node.inputs[0]))
        self.layouts[node.outputs[0]] = layout
        return self.enter(node, 0, layout)

    def convert(self, name: str, wanted: Layout) -> Function:
        """A function that brings a tensor into a layout, with leading axes of size 1 if that has more axes."""
        shape, layout = self.shape(name), self.layout(name)
        added = len(wanted) - len(shape)
        if layout == wanted or not shape:
            return _same
        shape = (1,) * added + shape
        layout = (*range(added), *(axis + added for axis in layout))
        if [a for a in layout if shape[a] != 1] == [a for a in wanted if shape[a] != 1]:
            sizes = [shape[axis] for axis in wanted]
            if sizes.count(None) <= 1:
                sizes = [-1 if size is None else size for size in sizes]
                return lambda x: ops.reshape(x, sizes)
        order = [layout.index(axis) for axis in wanted]
        if not added:
            return lambda x: ops.transpose(x, order)
        return lambda x: ops.transpose(ops.expand_dims(x, tuple(range(added))), order)


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name, flags=re.ASCII)


def _same(x: Any) -> Any:
    return x


# Element-wise


def _layer(build: Callable[..., Any]) -> Factory:
    """A factory for a layer that takes one tensor in any layout."""

    def factory(node: Node, context: Context) -> Any:
        layout = context.layout(node.inputs[0])
        context.layouts[node.outputs[0]] = layout
        return build(node, **context.settings(node))(context.enter(node, 0, layout))

    return factory


def _relu(node: Node, **settings: Any) -> Any:
    return layers.ReLU(**settings)


def _leaky_relu(node: Node, **settings: Any) -> Any:
    return layers.LeakyReLU(negative_slope=node.attributes["alpha"], **settings)


def _activation(function: str) -> Callable[..., Any]:
    return lambda node, **settings: layers.Activation(function, **settings)


def _identity(node: Node, **settings: Any) -> Any:
    return layers.Identity(**settings)


def _aligned(node: Node, context: Context) -> list[Function]:
    """For each input, what brings it to one layout under which ONNX's broadcasting holds."""
    rank = max(context.rank(name) for name in node.inputs)
    full = [context.layout(name) for name in node.inputs if context.rank(name) == rank]
    layout = next((x for x in full if x != identity(rank)), identity(rank))
    context.layouts[node.outputs[0]] = layout
    plain = layout == identity(rank)
    return [context.convert(name, identity(context.rank(name)) if plain else layout) for name in node.inputs]


def _merge(layer: Any, function: Function) -> Factory:
    """A factory for a Keras layer that merges equal shapes, and for its function where they are not."""

    def factory(node: Node, context: Context) -> Any:
        converters = _aligned(node, context)
        alike = len({context.shape(name) for name in node.inputs}) == 1
        if alike and len(node.inputs) > 1 and layer and context.computed(*node.inputs) and set(converters) == {_same}:
            return layer(**context.settings(node))([context.tensors[name] for name in node.inputs])

        def merge(*xs: Any) -> Any:
            return reduce(function, [convert(x) for convert, x in zip(converters, xs, strict=True)])

        return context.calculate(node, merge)

    return factory


def _clip(node: Node, context: Context) -> Any:
    context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
    if all(name in context.initializers and name not in context.weights for name in node.inputs[1:] if name):
        low, high = (None if c is None else c.item() for c in (context.constant(node, 1), context.constant(node, 2)))
        if low is not None and high is not None and low <= high:  # TensorFlow's clip is undefined elsewhere
            return context.calculate(node, lambda x, *_: ops.clip(x, low, high))

    def clip(x: Any, low: Any = None, high: Any = None) -> Any:
        x = x if low is None else ops.maximum(x, low)
        return x if high is None else ops.minimum(x, high)

    return context.calculate(node, clip)


def _dropout(node: Node, context: Context) -> Any:
    given = context.constant(node, 1)
    ratio = 0.5 if given is None else given.item()
    build = _layer(lambda node, **settings: layers.Dropout(ratio, **settings) if ratio else layers.Identity(**settings))
    return build(node, context)


def _axis(node: Node, context: Context) -> int:
    """Where the node's axis is stored."""
    layout = context.layout(node.inputs[0])
    context.layouts[node.outputs[0]] = layout
    return layout.index(node.attributes["axis"] % len(layout))


def _softmax(node: Node, context: Context) -> Any:
    axis = _axis(node, context)
    x = context.enter(node, 0, context.layout(node.inputs[0]))
    if context.backend == "jax":
        # XLA computes what it fuses more than once, not always with the same rounding: of logits around 1e10 (ONNX's
        # SqueezeNet) one may then exceed the maximum that softmax subtracts, by hundreds. So it is subtracted twice.
        shift = Calculation(
            lambda x: x - ops.max(x, axis, keepdims=True), [...], x.shape, **context.settings(node, ".shift")
        )
        x = shift(x)
    return layers.Softmax(axis, **context.settings(node))(x)


def _log_softmax(node: Node, context: Context) -> Any:
    axis = _axis(node, context)
    return context.calculate(node, lambda x: ops.log_softmax(x, axis))


# Shape


def _concat(node: Node, context: Context) -> Any:
    converters = _aligned(node, context)
    layout = context.layout(node.outputs[0])
    axis = layout.index(node.attributes["axis"] % len(layout))
    if len(node.inputs) > 1 and context.computed(*node.inputs) and set(converters) == {_same}:
        return layers.Concatenate(axis, **context.settings(node))([context.tensors[name] for name in node.inputs])
    return context.calculate(
        node, lambda *xs: ops.concatenate([convert(x) for convert, x in zip(converters, xs, strict=True)], axis)
    )


def _flatten(node: Node, context: Context) -> Any:
    shape = context.shape(node.inputs[0])
    axis = node.attributes["axis"]
    axis += len(shape) if axis < 0 else 0
    if axis == 1 and None not in shape[1:]:
        x = context.enter(node, 0, identity(len(shape)))
        return layers.Flatten("channels_last", **context.settings(node))(x)
    convert = context.convert(node.inputs[0], identity(len(shape)))

    def flatten(x: Any) -> Any:
        x = convert(x)
        if axis == 0:
            return ops.reshape(x, (1, -1))
        return ops.reshape(x, (-1, math.prod(x.shape[axis:])))

    return context.calculate(node, flatten)


def _reshape(node: Node, context: Context) -> Any:
    name = node.inputs[0]
    wanted = context.constant(node, 1)
    assert wanted is not None
    sizes = [int(size) for size in wanted]
    shape, layout = context.shape(name), context.layout(name)
    for axis, size in enumerate(sizes):
        if size == 0 and not node.attributes["allowzero"]:
            sizes[axis] = -2 if shape[axis] is None else shape[axis] or 0
    if -2 in sizes:  # the batch, which keeps its place; what is to be inferred follows from the rest
        if -1 in sizes:
            known = math.prod(size for size in shape if size is not None)
            sizes[sizes.index(-1)] = known // math.prod(size for size in sizes if size > 0)
        sizes[sizes.index(-2)] = -1
    split = _channel_split(shape, sizes)
    if split and layout == channels_last(len(shape)):
        # Dividing the channels into groups leaves the stored order as it is.
        context.layouts[node.outputs[0]] = (0, *range(3, len(sizes)), 1, 2)
        stored = [sizes[axis] for axis in context.layouts[node.outputs[0]]]
        return context.calculate(node, lambda x, _: ops.reshape(x, stored))
    convert = context.convert(name, identity(len(shape)))
    if _channel_split(sizes, shape) and layout != identity(len(shape)):
        convert = context.convert(name, (0, *range(3, len(shape)), 1, 2))
        context.layouts[node.outputs[0]] = channels_last(len(sizes))
        sizes = [sizes[axis] for axis in channels_last(len(sizes))]
    return context.calculate(node, lambda x, _: ops.reshape(convert(x), sizes))


def _channel_split(shape: Sequence[int | None], sizes: Sequence[int | None]) -> bool:
    """Whether (N, C, spatial...) becomes (N, a, b, spatial...) with a b = C and at least two spatial axes."""
    if len(shape) < 4 or len(sizes) != len(shape) + 1:
        return False
    if shape[0] != sizes[0] and {shape[0], sizes[0]} != {None, -1}:
        return False
    channels, first, second = shape[1], *sizes[1:3]
    if channels is None or first is None or second is None or min(first, second) < 1 or first * second != channels:
        return False
    return None not in shape[2:] and list(sizes[3:]) == list(shape[2:])


def _transpose(node: Node, context: Context) -> Any:
    layout = context.layout(node.inputs[0])
    order = list(node.attributes.get("perm") or reversed(range(len(layout))))
    if layout != identity(len(layout)):
        # An image that is not stored in ONNX's order: the axes get new names, and the next operator moves what it must.
        context.layouts[node.outputs[0]] = tuple(order.index(axis) for axis in layout)
        return layers.Identity(**context.settings(node))(context.tensors[node.inputs[0]])
    return context.calculate(node, lambda x: ops.transpose(x, order))


def _axes(node: Node, context: Context, rank: int) -> list[int] | None:
    axes = context.constant(node, 1)
    return None if axes is None else sorted(int(axis) % rank for axis in axes)


def _squeeze(node: Node, context: Context) -> Any:
    shape, layout = context.shape(node.inputs[0]), context.layout(node.inputs[0])
    axes = _axes(node, context, len(shape))
    if axes is None:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    context.layouts[node.outputs[0]] = tuple(
        axis - sum(gone < axis for gone in axes) for axis in layout if axis not in axes
    )
    positions = tuple(layout.index(axis) for axis in axes)
    return context.calculate(node, lambda x, *_: ops.squeeze(x, positions) if positions else x)


def _unsqueeze(node: Node, context: Context) -> Any:
    rank = context.rank(node.inputs[0])
    added = context.constant(node, 1)
    assert added is not None  # required since opset 13
    axes = _axes(node, context, rank + len(added)) or []
    convert = context.convert(node.inputs[0], identity(rank))
    return context.calculate(node, lambda x, _: ops.expand_dims(convert(x), tuple(axes)))


def _pad(node: Node, context: Context) -> Any:
    if node.attributes["mode"] != "constant":
        raise NetworkError(f"padding mode {node.attributes['mode']!r} is not implemented", where=node.name)
    layout = context.layout(node.inputs[0])
    given, value, axes = (context.constant(node, i) for i in (1, 2, 3))
    assert given is not None  # ONNX has no default
    padded = range(len(layout)) if axes is None else [int(axis) % len(layout) for axis in axes]
    pads = [(0, 0)] * len(layout)
    for axis, before, after in zip(padded, given[: len(padded)], given[len(padded) :], strict=True):
        pads[axis] = (int(before), int(after))
    if min(min(pair) for pair in pads) < 0:
        raise NetworkError("negative padding is not implemented", where=node.name)
    context.layouts[node.outputs[0]] = layout
    stored, fill = [pads[axis] for axis in layout], 0.0 if value is None else value.item()
    return context.calculate(node, lambda x, *_: ops.pad(x, stored, constant_values=fill))


# Matrices


def _gemm(node: Node, context: Context) -> Any:
    a, b, *rest = node.inputs
    alpha, beta, trans_a, trans_b = (node.attributes[key] for key in ("alpha", "beta", "transA", "transB"))
    biases = [name for name in rest if name and beta != 0]
    units = context.shape(b)[0 if trans_b else 1]
    plain = alpha == 1 and not trans_a and context.owned(b, *biases)
    if plain and all(beta == 1 and context.shape(name) == (units,) for name in biases) and context.computed(a):
        layer = layers.Dense(units, use_bias=bool(biases), kernel_initializer="zeros", **context.settings(node))
        y = layer(context.enter(node, 0, identity(2)))
        context.own(layer.kernel, b, (1, 0) if trans_b else None)
        for name in biases:
            context.own(layer.bias, name)
        return y
    to_a, to_b = (context.convert(name, identity(2)) for name in (a, b))
    # TensorFlow 2.21 fuses this addition into the product, and then fails on a bias of two axes.
    row = bool(biases) and context.shape(biases[0]) == (1, units)

    def gemm(x: Any, y: Any, z: Any = None) -> Any:
        x, y = to_a(x), to_b(y)
        product = ops.matmul(ops.transpose(x) if trans_a else x, ops.transpose(y) if trans_b else y)
        if alpha != 1:
            product = product * alpha
        if z is None or beta == 0:
            return product
        if row:
            z = ops.reshape(z, (-1,))
        return product + (z if beta == 1 else z * beta)

    return context.calculate(node, gemm)


def _matmul(node: Node, context: Context) -> Any:
    first, second = (context.convert(name, identity(context.rank(name))) for name in node.inputs)
    return context.calculate(node, lambda x, y: ops.matmul(first(x), second(y)))


# Convolution and pooling


@dataclass(frozen=True)
class _Sliding:
    """A window as Keras's layers take it, which know no padding but their own ``same``."""

    window: Window
    pads: tuple[tuple[int, int], ...]
    same: bool
    images_last: bool

    @classmethod
    def of(cls, node: Node, context: Context, kernel: Sequence[int | None] | None = None) -> _Sliding:
        sizes = context.shape(node.inputs[0])[2:]
        if len(sizes) not in (1, 2, 3):
            raise NetworkError(f"{len(sizes)} spatial dimensions are not implemented", where=node.name)
        w = window(node, sizes, kernel)
        pads = tuple(
            (before, after + beyond) for before, after, beyond in zip(w.pads_begin, w.pads_end, w.overhang, strict=True)
        )
        return cls(w, pads, _is_same_padding(w, pads, sizes), context.images_last)

    @property
    def dilated(self) -> bool:
        return max(self.window.dilations) > 1

    @property
    def padded(self) -> bool:
        return any(map(any, self.pads))

    def spatial(self, values: Sequence[Any], rest: Any) -> list[Any]:
        """Values for the spatial axes, ``rest`` for batch and channels."""
        return [rest, *values, rest] if self.images_last else [rest, rest, *values]

    def pad(self, x: Any, value: float) -> Any:
        """The image with its padding."""
        return ops.pad(x, self.spatial(self.pads, (0, 0)), constant_values=value) if self.padded else x

    def taps(self, x: Any) -> list[Any]:
        """What each cell of the window sees of a padded image, at all of its places."""
        w = self.window
        found = []
        for cell in itertools.product(*map(range, w.kernel)):
            starts = [place * dilation for place, dilation in zip(cell, w.dilations, strict=True)]
            spans = [(count - 1) * stride + 1 for count, stride in zip(w.outputs, w.strides, strict=True)]
            cuts = [slice(a, a + n, s) for a, n, s in zip(starts, spans, w.strides, strict=True)]
            found.append(x[tuple(self.spatial(cuts, slice(None)))])
        return found


def _is_same_padding(w: Window, pads: Sequence[tuple[int, int]], sizes: Sequence[int | None]) -> bool:
    """Whether the padding is Keras's ``same``: as little as gives ⌈size / stride⌉ outputs, the odd one at the end."""
    for size, kernel, stride, dilation, pair in zip(sizes, w.kernel, w.strides, w.dilations, pads, strict=True):
        assert size is not None  # window() has seen to it
        total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
        if pair != (total // 2, total - total // 2):
            return False
    return True


_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_ZERO_PADDINGS = (layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D)
_MAX_POOLINGS = (layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D)
_AVERAGE_POOLINGS = (layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D)
"""By number of spatial dimensions, less one."""


def _conv(node: Node, context: Context) -> Any:
    image, weight, *rest = node.inputs
    biases = [name for name in rest if name]
    rank = context.rank(image)
    s = _Sliding.of(node, context, context.shape(weight)[2:])
    w = s.window
    outputs, channels, groups = context.shape(weight)[0], context.shape(image)[1], node.attributes["group"]
    # TensorFlow has no kernel for a window that is both dilated and strided, and Keras refuses it everywhere.
    if (s.dilated and max(w.strides) > 1) or not context.owned(weight, *biases):
        return _general_conv(node, context, s)
    x = context.image(node)
    if s.padded and not s.same:
        pads = s.pads[0] if rank == 3 else s.pads
        padding = _ZERO_PADDINGS[rank - 3](pads, data_format=context.data_format, **context.settings(node, ".pad"))
        x = padding(x)
    settings = {
        "strides": w.strides,
        "padding": "same" if s.padded and s.same else "valid",
        "data_format": context.data_format,
        "dilation_rate": w.dilations,
        "use_bias": bool(biases),
        **context.settings(node),
    }
    if rank == 4 and groups > 1 and groups == channels == outputs and len(set(w.strides)) == 1:
        layer = layers.DepthwiseConv2D(w.kernel, depthwise_initializer="zeros", **settings)
        layout: Layout = (2, 3, 0, 1)
    else:
        layer = _CONVOLUTIONS[rank - 3](outputs, w.kernel, groups=groups, kernel_initializer="zeros", **settings)
        layout = kernel_layout(rank)
    y = layer(x)
    context.own(layer.kernel, weight, layout)
    for name in biases:
        context.own(layer.bias, name)
    return y


def _general_conv(node: Node, context: Context, s: _Sliding) -> Any:
    rank = context.rank(node.inputs[0])
    to_image = context.convert(node.inputs[0], context.image_layout(rank))
    to_kernel = context.convert(node.inputs[1], kernel_layout(rank))
    context.layouts[node.outputs[0]] = context.image_layout(rank)
    w, data_format = s.window, context.data_format
    skip = context.backend == "tensorflow" and s.dilated and max(w.strides) > 1
    strides = (1,) * len(w.strides) if skip else w.strides

    def convolve(x: Any, kernel: Any, bias: Any = None) -> Any:
        x = s.pad(to_image(x), 0.0)
        y = ops.conv(x, to_kernel(kernel), strides, "valid", data_format, w.dilations)
        if skip:
            y = y[tuple(s.spatial([slice(None, None, stride) for stride in w.strides], slice(None)))]
        if bias is None:
            return y
        return y + (bias if s.images_last else ops.reshape(bias, (-1, *(1 for _ in w.kernel))))

    return context.calculate(node, convolve)


def _by_taps(s: _Sliding, context: Context) -> bool:
    """Whether a pooling has no kernel: Keras's know no dilation, and TensorFlow's 3-D ones no float64."""
    return s.dilated or (len(s.window.kernel) == 3 and context.backend == "tensorflow" and context.policy != "float32")


def _max_pool(node: Node, context: Context) -> Any:
    s = _Sliding.of(node, context)
    x = context.image(node)
    if s.dilated or not s.same:
        x = _padded(node, context, s, x, -math.inf)
    if _by_taps(s, context):
        return _combined(node, context, s, x, lambda taps: reduce(ops.maximum, taps))
    settings = {"data_format": context.data_format, **context.settings(node)}
    padding = "same" if s.padded and s.same else "valid"
    return _MAX_POOLINGS[len(s.window.kernel) - 1](s.window.kernel, s.window.strides, padding, **settings)(x)


def _padded(node: Node, context: Context, s: _Sliding, x: Any, value: float) -> Any:
    if not s.padded:
        return x
    before = x.shape[1:-1] if s.images_last else x.shape[2:]
    spatial = [size + sum(pair) for size, pair in zip(before, s.pads, strict=True)]
    shape = (x.shape[0], *spatial, x.shape[-1]) if s.images_last else (*x.shape[:2], *spatial)
    return Calculation(lambda y: s.pad(y, value), [...], shape, **context.settings(node, ".pad"))(x)


def _combined(node: Node, context: Context, s: _Sliding, x: Any, combine: Function) -> Any:
    """A pooling of a padded image cell by cell of the window."""
    layer = Calculation(lambda y: combine(s.taps(y)), [...], context.stored(node.outputs[0]), **context.settings(node))
    return layer(x)


def _average_pool(node: Node, context: Context) -> Any:
    s = _Sliding.of(node, context)
    w, include = s.window, bool(node.attributes["count_include_pad"])
    sizes = [size or 0 for size in context.shape(node.inputs[0])[2:]]
    x = context.image(node)
    settings = {"data_format": context.data_format}
    # Keras on PyTorch repeats the border where `same` pads one side more, and counts it.
    symmetric = all(before == after for before, after in s.pads)
    native = s.same and not include and not s.dilated and (symmetric or context.backend != "torch")
    if not _by_taps(s, context) and (native or not s.padded):
        pool = _AVERAGE_POOLINGS[len(w.kernel) - 1]
        padding = "same" if s.padded else "valid"
        return pool(w.kernel, w.strides, padding, **settings, **context.settings(node))(x)
    x = _padded(node, context, s, x, 0.0)
    correction = _divisor_correction(w, sizes, include=include)
    scale = correction[..., None] if s.images_last else correction
    if _by_taps(s, context):
        scale = scale / math.prod(w.kernel)
        return _combined(
            node, context, s, x, lambda taps: reduce(ops.add, taps) * ops.convert_to_tensor(scale, dtype=taps[0].dtype)
        )

    def average(y: Any) -> Any:
        y = ops.average_pool(y, w.kernel, w.strides, "valid", context.data_format)
        return y if np.all(scale == 1) else y * ops.convert_to_tensor(scale, dtype=y.dtype)

    return Calculation(average, [...], context.stored(node.outputs[0]), **context.settings(node))(x)


def _divisor_correction(w: Window, sizes: Sequence[int], *, include: bool) -> np.ndarray:
    """Window size ÷ number of cells that count, for every output position.

    Cells of the padding count if ``include``; what a ceil-mode window reaches beyond the padding never does.
    """
    counts = []
    for axis, size in enumerate(sizes):
        starts = np.arange(w.outputs[axis]) * w.strides[axis] - w.pads_begin[axis]
        at = starts[:, None] + np.arange(w.kernel[axis]) * w.dilations[axis]
        low, high = (-w.pads_begin[axis], size + w.pads_end[axis]) if include else (0, size)
        counts.append(np.maximum(((at >= low) & (at < high)).sum(1), 1))
    correction: np.ndarray = math.prod(w.kernel) / reduce(np.multiply.outer, counts)
    return correction


_GLOBAL_AVERAGES = (layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D)
_GLOBAL_MAXIMA = (layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D)


def _global_pool(kinds: Sequence[Any]) -> Factory:
    def factory(node: Node, context: Context) -> Any:
        dimensions = context.rank(node.inputs[0]) - 2
        if dimensions not in (1, 2, 3):
            raise NetworkError(f"{dimensions} spatial dimensions are not implemented", where=node.name)
        pool = kinds[dimensions - 1](context.data_format, keepdims=True, **context.settings(node))
        return pool(context.image(node))

    return factory


# Normalisation and loss


def _batch_normalization(node: Node, context: Context) -> Any:
    """Keras's running variance is the biased one, as ONNX's."""
    image, *weights = node.inputs
    if not context.owned(*weights):
        raise NetworkError("the weights of a BatchNormalization must be initializers of its own", where=node.name)
    rank = context.rank(image)
    if rank > 2:
        x, axis = context.image(node), -1 if context.images_last else 1
    else:
        x, axis = context.enter(node, 0, identity(rank)), 1
    layer = layers.BatchNormalization(
        axis, momentum=node.attributes["momentum"], epsilon=node.attributes["epsilon"], **context.settings(node)
    )
    y = layer(x)
    for name, variable in zip(
        weights, (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance), strict=True
    ):
        context.own(variable, name)
    return y


def _lrn(node: Node, context: Context) -> Any:
    rank, size = context.rank(node.inputs[0]), node.attributes["size"]
    alpha, beta, bias = (node.attributes[key] for key in ("alpha", "beta", "bias"))
    layout = context.layout(node.inputs[0])
    context.layouts[node.outputs[0]] = layout
    axis = layout.index(1)
    channels = context.shape(node.inputs[0])[1]
    pads = [((size - 1) // 2, size // 2) if a == axis else (0, 0) for a in range(rank)]
    assert channels is not None

    def lrn(x: Any) -> Any:
        squares = ops.pad(x * x, pads)
        rest = (slice(None),) * axis
        total = reduce(ops.add, [squares[(*rest, slice(first, first + channels))] for first in range(size)])
        return x / (bias + (alpha / size) * total) ** beta

    return context.calculate(node, lrn)


def _softmax_cross_entropy_loss(node: Node, context: Context) -> Any:
    scores = node.inputs[0]
    rank = context.rank(scores)
    to_last = context.convert(scores, channels_last(rank))
    reduction, ignored = node.attributes["reduction"], node.attributes.get("ignore_index")
    context.layouts[node.outputs[0]] = identity(rank - 1 if reduction == "none" else 0)

    def loss(logits: Any, labels: Any, class_weights: Any = None) -> Any:
        logits = to_last(logits)
        counted = None if ignored is None else ops.not_equal(labels, ignored)
        used = labels if counted is None else ops.where(counted, labels, ops.zeros_like(labels))
        each = ops.sparse_categorical_crossentropy(used, logits, from_logits=True)
        weights = None
        if class_weights is not None:
            weights = ops.take(class_weights, used)
        if counted is not None:
            kept = ops.cast(counted, each.dtype)
            weights = kept if weights is None else weights * kept
        if weights is not None:
            each = each * weights
        if reduction == "none":
            return each
        if reduction == "sum":
            return ops.sum(each)
        return ops.mean(each) if weights is None else ops.sum(each) / ops.sum(weights)

    return context.calculate(node, loss, policy=context.wide_policy)


OPERATORS: dict[str, Factory] = {
    "Add": _merge(layers.Add, ops.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Div": _merge(None, ops.divide),
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool(_GLOBAL_AVERAGES),
    "GlobalMaxPool": _global_pool(_GLOBAL_MAXIMA),
    "Identity": _layer(_identity),
    "LRN": _lrn,
    "LeakyRelu": _layer(_leaky_relu),
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _merge(layers.Multiply, ops.multiply),
    "Pad": _pad,
    "Relu": _layer(_relu),
    "Reshape": _reshape,
    "Sigmoid": _layer(_activation("sigmoid")),
    "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Squeeze": _squeeze,
    "Sub": _merge(layers.Subtract, ops.subtract),
    "Sum": _merge(layers.Add, ops.add),
    "Tanh": _layer(_activation("tanh")),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""
