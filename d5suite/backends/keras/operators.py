"""ONNX operators as layers of a functional Keras model, and Level 0 in Keras.

A factory ``(node, context)`` calls the Keras layer with the node's meaning on the symbolic tensors of its inputs and
returns the symbolic output, or a tuple where several are wanted. Where Keras has no such layer, `Calculation` is one
made of `keras.ops`; at level 0 the factory returns the function itself.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are kept in the data format that
Keras's backend does best, and an operator says in which layout it leaves its output; data are moved only where a layer
needs another order. Imports Keras, NumPy, `d5suite.errors`, `d5suite.levels`, `d5suite.network` and this adapter's
`engine`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.backends.keras.engine import ENGINES, scope
from d5suite.errors import BackendError, NetworkError
from d5suite.levels import attention as attention_nodes
from d5suite.levels import operator as level
from d5suite.levels.operator import NodeContext
from d5suite.levels.recurrent import Functions, Packing, Recurrent, recurrent, unrolled
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.operation import Operation, is_floating
from d5suite.network.windows import TransposedWindow, Window, transposed_window, window

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
    training : bool
        Whether BatchNormalization and Dropout are in training mode; only at level 0, where layers are not told so when
        they are called.
    dtypes : mapping
        ONNX type of every tensor; only at level 0.
    non_negative : set
        Inputs whose values are known to be 0 or more; only at level 0.
    packing : dict
        Weights that a factory wants in a form of its own; only at level 0.
    parts : dict
        Inputs that are not one tensor but several, one for each index of the first axis in their storage layout:
        variables or symbolic tensors; only at level 0.
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
    training: bool = False
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    non_negative: frozenset[str] = frozenset()
    packing: dict[str, Packing] = field(default_factory=dict)
    parts: dict[str, list[Any]] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.constants = self.initializers

    @property
    def single(self) -> bool:
        """Whether this is level 0: one node, which says how its inputs are stored."""
        return bool(self.dtypes)

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

    def prefer(self, name: str, layout: Layout) -> None:
        """At level 0, choose how an input is stored; elsewhere that is settled where it is made."""
        if self.single:
            self.layouts[name] = layout
            if name in self.tensors:
                self.tensors[name] = self.input(name)

    def input(self, name: str) -> Any:
        """A new symbolic input, as it is stored."""
        return keras.Input(batch_shape=self.stored(name), dtype=str(self.dtypes[name]))

    def calculate(self, node: Node, function: Function, *, policy: str | None = None) -> Any:
        """A `Calculation` over all inputs of a node; at level 0 the function, which no layer need wrap."""
        if self.single:
            return function
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
        self.prefer(node.inputs[0], layout)
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


def _elementwise(function: Callable[[Node, Context], Function]) -> Factory:
    """A factory for a function of one tensor in any layout."""

    def factory(node: Node, context: Context) -> Any:
        context.layouts[node.outputs[0]] = context.layout(node.inputs[0])
        return context.calculate(node, function(node, context))

    return factory


def _elu(node: Node, context: Context) -> Function:
    alpha = node.attributes["alpha"]
    return lambda x: ops.elu(x, alpha)


def _gelu(node: Node, context: Context) -> Function:
    approximate = node.attributes["approximate"] == "tanh"
    if context.backend == "tensorflow" and context.policy == "float64":
        return _gelu_tanh if approximate else _gelu_erf  # TensorFlow's own has its constants in float32
    return lambda x: ops.gelu(x, approximate)


def _gelu_tanh(x: Any) -> Any:
    root = np.float64(math.sqrt(2 / math.pi))
    return 0.5 * x * (1 + ops.tanh(root * (x + np.float64(0.044715) * x * x * x)))


def _gelu_erf(x: Any) -> Any:
    return 0.5 * x * (1 + ops.erf(x * np.float64(math.sqrt(0.5))))


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
        shapes = {context.shape(name) for name in node.inputs}
        alike = len(shapes) == 1 and shapes != {()} and not context.single  # Keras's layers do not merge scalars
        if alike and len(node.inputs) > 1 and layer and context.computed(*node.inputs) and set(converters) == {_same}:
            return layer(**context.settings(node))([context.tensors[name] for name in node.inputs])

        def merge(*xs: Any) -> Any:
            return reduce(function, [convert(x) for convert, x in zip(converters, xs, strict=True)])

        return context.calculate(node, merge)

    return factory


def _div(node: Node, context: Context) -> Any:
    dtype = context.dtypes.get(node.outputs[0])
    return _merge(None, ops.divide if dtype is None or is_floating(dtype) else _truncated)(node, context)


def _truncated(a: Any, b: Any) -> Any:
    """Division of integers, towards 0."""
    whole = ops.cast(ops.floor_divide(a, b), a.dtype)  # Keras gives uint32 of uint64
    up = ops.logical_and(ops.not_equal(whole * b, a), ops.not_equal(a < 0, b < 0))
    return whole + ops.cast(up, whole.dtype)


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
    if context.single and len(node.outputs) > 1:
        return _dropout_with_mask(node, context, ratio)
    build = _layer(lambda node, **settings: layers.Dropout(ratio, **settings) if ratio else layers.Identity(**settings))
    return build(node, context)


def _dropout_with_mask(node: Node, context: Context, ratio: float) -> Any:
    """The mask is what the layer makes of ones."""
    if not context.training or not ratio:
        return lambda x, *_: (x, ops.ones_like(x, dtype="bool"))
    x = context.tensors[node.inputs[0]]
    ones = Calculation(ops.ones_like, [...], x.shape, **context.settings(node, ".ones"))(x)
    factors = layers.Dropout(ratio, **context.settings(node))(ones)
    apply = Calculation(lambda y, f: (y * f, f != 0), [..., ...], None, **context.settings(node, ".apply"))
    return tuple(apply([x, factors]))


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
    alone = len(node.inputs) == 1 or context.single
    if not alone and context.computed(*node.inputs) and set(converters) == {_same}:
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
    mode = node.attributes["mode"]
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
    if mode != "constant":
        return context.calculate(node, _pad_by_index(mode, stored, [context.shape(node.inputs[0])[a] for a in layout]))
    return context.calculate(node, lambda x, *_: ops.pad(x, stored, constant_values=fill))


def _pad_by_index(mode: str, pads: Sequence[tuple[int, int]], sizes: Sequence[int | None]) -> Function:
    """Padding that repeats the tensor itself, on any axes and any number of times."""
    rows = {
        axis: ops.convert_to_tensor(np.pad(np.arange(sizes[axis] or 0, dtype=np.int32), pair, mode))  # type: ignore[call-overload]
        for axis, pair in enumerate(pads)
        if any(pair)
    }
    return lambda x, *_: reduce(lambda y, axis: ops.take(y, rows[axis], axis), rows, x)


def _gather(node: Node, context: Context) -> Any:
    axis = node.attributes["axis"] % context.rank(node.inputs[0])
    return context.calculate(node, lambda data, indices: ops.take(data, indices, axis))


def _reduce(function: Function, empty: float | None = None) -> Factory:
    """A factory for a reduction over the axes that the second input, or without it all, names."""

    def factory(node: Node, context: Context) -> Any:
        name, result = node.inputs[0], node.outputs[0]
        layout, keep = context.layout(name), bool(node.attributes["keepdims"])
        axes = _axes(node, context, len(layout))
        if not axes:
            if node.attributes["noop_with_empty_axes"]:
                context.layouts[result] = layout
                return context.calculate(node, lambda x, *_: x)
            axes = list(range(len(layout)))
        gone = [] if keep else axes
        context.layouts[result] = tuple(axis - sum(g < axis for g in gone) for axis in layout if axis not in gone)
        positions = tuple(layout.index(axis) for axis in axes)
        if empty is not None and any(context.shape(name)[axis] == 0 for axis in axes):
            shape = context.stored(result)
            return context.calculate(
                node, lambda x, *_: ops.full(shape, False if _is_bool(x) else empty, dtype=x.dtype)
            )
        return context.calculate(node, lambda x, *_: function(x, positions, keepdims=keep))

    return factory


def _is_bool(x: Any) -> bool:
    return bool(keras.backend.standardize_dtype(x.dtype) == "bool")


def _maximum(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return (ops.any if _is_bool(x) else ops.max)(x, axes, keepdims=keepdims)


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
    context.prefer(node.inputs[0], context.image_layout(rank))
    context.prefer(node.inputs[1], kernel_layout(rank))
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


_TRANSPOSED_CONVOLUTIONS = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
_CROPPINGS = (layers.Cropping1D, layers.Cropping2D, layers.Cropping3D)


def _conv_transpose(node: Node, context: Context) -> Any:
    image, weight, *rest = node.inputs
    biases = [name for name in rest if name]
    sizes, kernel = context.shape(image)[2:], context.shape(weight)[2:]
    rank = len(sizes) + 2
    if len(sizes) not in (1, 2, 3):
        raise NetworkError(f"{len(sizes)} spatial dimensions are not implemented", where=node.name)
    w = transposed_window(node, sizes, kernel)
    spans = [(k - 1) * d + 1 for k, d in zip(w.kernel, w.dilations, strict=True)]
    # What Keras's `valid` gives, and what of it is cut off behind.
    whole = [(n or 0) * s + max(span - s, 0) for n, s, span in zip(sizes, w.strides, spans, strict=True)]
    behind = [n - begin - wanted for n, begin, wanted in zip(whole, w.pads_begin, w.outputs, strict=True)]
    # Keras knows no groups, no dilation together with strides, and TensorFlow none of its gradients on the CPU.
    native = node.attributes["group"] == 1 and max(w.dilations) == 1 and min(behind) >= 0
    if not native or not context.owned(weight, *biases):
        return _general_conv_transpose(node, context, w)
    same = all(
        size is not None and outputs == size * stride and begin == max(span - stride, 0) // 2
        for size, outputs, stride, begin, span in zip(sizes, w.outputs, w.strides, w.pads_begin, spans, strict=True)
    )
    layer = _TRANSPOSED_CONVOLUTIONS[rank - 3](
        context.shape(weight)[1], w.kernel, w.strides, "same" if same else "valid", data_format=context.data_format,
        use_bias=bool(biases), kernel_initializer="zeros", **context.settings(node),
    )  # fmt: skip
    y = layer(context.image(node))
    context.own(layer.kernel, weight, (*range(2, rank), 1, 0))
    for name in biases:
        context.own(layer.bias, name)
    if same or not (any(w.pads_begin) or any(behind)):
        return y
    pairs = tuple(zip(w.pads_begin, behind, strict=True))
    cut = _CROPPINGS[rank - 3]
    return cut(pairs[0] if rank == 3 else pairs, data_format=context.data_format, **context.settings(node, ".crop"))(y)


def _general_conv_transpose(node: Node, context: Context, w: TransposedWindow) -> Any:
    """A convolution of the image with zeros between its pixels, by the mirrored kernel."""
    image, weight = node.inputs[:2]
    rank, groups = context.rank(image), node.attributes["group"]
    layout = context.image_layout(rank)
    context.prefer(image, layout)
    context.layouts[node.outputs[0]] = layout
    to_image, to_kernel = context.convert(image, layout), context.convert(weight, identity(rank))
    inputs, per_group = context.shape(weight)[:2]
    assert inputs is not None and per_group is not None
    first = 1 if context.images_last else 2
    # A negative number of zeros is a cut.
    pads = []
    for k, d, begin, end, extra in zip(w.kernel, w.dilations, w.pads_begin, w.pads_end, w.output_padding, strict=True):
        pads.append(((k - 1) * d - begin, (k - 1) * d - end + extra))
    around, cuts = [(0, 0)] * rank, [slice(None)] * rank
    for axis, (before, after) in enumerate(pads, first):
        around[axis] = (max(before, 0), max(after, 0))
        cuts[axis] = slice(max(-before, 0), None if after >= 0 else after)

    def spread(x: Any) -> Any:
        for axis, stride in enumerate(w.strides, first):
            if stride > 1:
                shape = list(x.shape)
                x = ops.pad(
                    ops.expand_dims(x, axis + 1),
                    [(0, stride - 1) if a == axis + 1 else (0, 0) for a in range(rank + 1)],
                )
                shape[axis] *= stride
                x = ops.reshape(x, [-1, *shape[1:]])
                x = x[(*[slice(None)] * axis, slice(0, shape[axis] - stride + 1))]
        return x

    def convolve(x: Any, kernel: Any, bias: Any = None) -> Any:
        x = ops.pad(spread(to_image(x)), around)[tuple(cuts)]
        kernel = ops.flip(to_kernel(kernel), tuple(range(2, rank)))
        kernel = ops.reshape(kernel, (groups, inputs // groups, per_group, *w.kernel))
        kernel = ops.transpose(kernel, (*range(3, rank + 1), 1, 0, 2))
        kernel = ops.reshape(kernel, (*w.kernel, inputs // groups, groups * per_group))
        y = ops.conv(x, kernel, 1, "valid", context.data_format, w.dilations)
        if bias is None:
            return y
        return y + (bias if context.images_last else ops.reshape(bias, (-1, *(1 for _ in w.kernel))))

    return context.calculate(node, convolve)


def _by_taps(s: _Sliding, context: Context) -> bool:
    """Whether a pooling has no kernel: Keras's know no dilation, and TensorFlow's 3-D ones no float64."""
    return s.dilated or (len(s.window.kernel) == 3 and context.backend == "tensorflow" and context.policy != "float32")


def _max_pool(node: Node, context: Context) -> Any:
    s = _Sliding.of(node, context)
    x = context.image(node)
    dtype = context.dtypes.get(node.inputs[0])
    whole = dtype is not None and not is_floating(dtype)  # integers, for which there is no kernel
    if s.dilated or whole or not s.same or len(node.outputs) > 1:
        x = _padded(node, context, s, x, np.iinfo(dtype).min if dtype is not None and whole else -math.inf)
    if context.single and len(node.outputs) > 1:
        context.layouts[node.outputs[1]] = context.layout(node.outputs[0])
        return _with_indices(node, context, s, x)
    if whole or _by_taps(s, context):
        return _combined(node, context, s, x, lambda taps: reduce(ops.maximum, taps))
    settings = {"data_format": context.data_format, **context.settings(node)}
    padding = "same" if s.padded and s.same else "valid"
    return _MAX_POOLINGS[len(s.window.kernel) - 1](s.window.kernel, s.window.strides, padding, **settings)(x)


def _with_indices(node: Node, context: Context, s: _Sliding, x: Any) -> Any:
    """Maxima, and where they lie in the whole tensor in ONNX's layout."""
    w, shape = s.window, [size or 0 for size in context.shape(node.inputs[0])]
    spatial = range(2, len(shape))
    sizes = shape[2:]
    steps = [
        math.prod(sizes[:i]) if node.attributes["storage_order"] else math.prod(sizes[i + 1 :])
        for i in range(len(sizes))
    ]
    cells = np.array(list(itertools.product(*map(range, w.kernel))))
    offsets = sum(cells[:, i] * w.dilations[i] * steps[i] for i in range(len(sizes)))
    corner = np.zeros((1,) * len(shape), np.int64)
    for i, axis in enumerate(spatial):
        place = (np.arange(w.outputs[i]) * w.strides[i] - w.pads_begin[i]) * steps[i]
        corner = corner + place.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    planes = np.arange(shape[0] * shape[1]).reshape(*shape[:2], *(1 for _ in sizes)) * math.prod(sizes)
    corner = (corner + planes).transpose(context.layout(node.outputs[0]))
    from_corner, corners = (ops.convert_to_tensor(np.asarray(n), dtype="int32") for n in (offsets, corner))

    def pool(y: Any) -> Any:
        taps = ops.stack(s.taps(y))
        return ops.max(taps, 0), ops.take(from_corner, ops.argmax(taps, 0)) + corners

    return tuple(Calculation(pool, [...], None, **context.settings(node))(x))


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
    if context.training:
        return _batch_normalization_by_batch(node, context)
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


def _batch_normalization_by_batch(node: Node, context: Context) -> Any:
    """What the layer computes when it trains, without moving its running statistics, which are results here."""
    rank, momentum, epsilon = context.rank(node.inputs[0]), node.attributes["momentum"], node.attributes["epsilon"]
    layout = context.image_layout(rank)
    context.prefer(node.inputs[0], layout)
    context.layouts[node.outputs[0]] = layout
    axis = layout.index(1)
    others = [a for a in range(rank) if a != axis]
    wanted = [bool(name) for name in node.outputs]

    def normalize(x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any) -> Any:
        wide = _in_float32(x)
        mean, variance = ops.moments(wide, others)
        y = ops.batch_normalization(wide, mean, variance, axis, _in_float32(bias), _in_float32(scale), epsilon)
        y = ops.cast(y, x.dtype)
        if not any(wanted[1:]):
            return y
        old = _in_float32(running_mean), _in_float32(running_variance)
        moved = [before * momentum + now * (1 - momentum) for before, now in zip(old, (mean, variance), strict=True)]
        return _wanted((y, *(ops.cast(statistic, running_mean.dtype) for statistic in moved)), wanted)

    return context.calculate(node, normalize)


def _in_float32(x: Any) -> Any:
    """A tensor as float32 where it has fewer bits; float64 stays."""
    return ops.cast(x, "float32") if keras.backend.standardize_dtype(x.dtype) in ("bfloat16", "float16") else x


def _wanted(results: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """The first result if nothing else is wanted, else a tuple with None for what is not."""
    if not any(wanted[1:]):
        return results[0]
    return tuple(result if asked else None for result, asked in zip(results, wanted, strict=False))


def _layer_normalization(node: Node, context: Context) -> Any:
    image, *weights = node.inputs
    weights = [name for name in weights if name]
    rank, epsilon = context.rank(image), node.attributes["epsilon"]
    axes = list(range(node.attributes["axis"] % rank, rank))
    full = all(context.shape(name) == context.shape(image)[axes[0] :] for name in weights)
    statistics = context.single and any(node.outputs[1:])
    if full and not statistics and context.owned(*weights) and context.computed(image):
        layer = layers.LayerNormalization(axes, epsilon, center=len(weights) > 1, **context.settings(node))
        y = layer(context.enter(node, 0, identity(rank)))
        for name, variable in zip(weights, (layer.gamma, layer.beta), strict=False):
            context.own(variable, name)
        return y
    convert = context.convert(image, identity(rank))
    wanted = [bool(name) for name in node.outputs] if statistics else []

    def normalize(x: Any, scale: Any, bias: Any = None) -> Any:
        x = convert(x)
        wide = _in_float32(x)
        mean, variance = ops.moments(wide, axes, keepdims=True)
        spread = ops.rsqrt(variance + epsilon)
        y = (wide - mean) * spread * _in_float32(scale)
        y = ops.cast(y if bias is None else y + _in_float32(bias), x.dtype)
        return _wanted((y, mean, spread), wanted)

    return context.calculate(node, normalize)


def _lrn(node: Node, context: Context) -> Any:
    rank, size = context.rank(node.inputs[0]), node.attributes["size"]
    context.prefer(node.inputs[0], context.image_layout(rank))
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
    context.prefer(scores, channels_last(rank))
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

    if not context.single:
        return context.calculate(node, loss, policy=context.wide_policy)
    logged = len(node.outputs) > 1
    if logged:
        context.layouts[node.outputs[1]] = channels_last(rank)

    def single(x: Any, labels: Any, class_weights: Any = None) -> Any:
        wide = _in_float32(x)
        value = loss(wide, labels, None if class_weights is None else _in_float32(class_weights))
        value = ops.cast(value, x.dtype)
        return (value, ops.cast(ops.log_softmax(to_last(wide), -1), x.dtype)) if logged else value

    return single


# Recurrences and attention, at level 0


_RECURRENT_GATES = {"LSTM": "ifco", "GRU": "zrh"}
"""The order in which Keras stacks the gates."""


def _recurrent(node: Node, context: Context) -> Any:
    """An LSTM or GRU layer, or step by step where that has no such variant."""
    plan = recurrent(node, context.shapes, context.constants)
    x, w, r, b, _, *states = [*node.inputs, *[""] * 8][:7]
    states = [name for name in states if name]
    if plan.peepholes or (plan.kind == "LSTM" and len(states) == 1):
        return _step_by_step(node, context, plan)
    batch = context.shape(x)[0 if plan.batch_first else 1]
    context.prefer(x, (0, 1, 2) if plan.batch_first else (1, 0, 2))
    across = (1, 0, 2) if plan.batch_first else (0, 1, 2)  # states with the directions ahead
    for name in states:
        context.layouts[name] = across
        context.parts[name] = [
            keras.Input((plan.hidden,), batch_size=batch, dtype=str(context.dtypes[name]))
            for _ in range(plan.directions)
        ]
    kinds: dict[str, Any] = {"LSTM": layers.LSTM, "GRU": layers.GRU}
    settings = {
        "use_bias": bool(b),
        "return_sequences": plan.wanted[0],
        "return_state": any(plan.wanted[1:]),
        "recurrent_initializer": "zeros",  # the default one has no kernel in bfloat16
    }
    if plan.kind == "GRU":
        settings["reset_after"] = plan.linear_before_reset
    layer = kinds[plan.kind](plan.hidden, go_backwards=plan.reverse, **settings, **context.settings(node))
    cells = [layer.cell]
    if plan.directions == 2:
        layer = layers.Bidirectional(layer, **context.settings(node, ".both"))
        cells = [layer.forward_layer.cell, layer.backward_layer.cell]
    given = [context.parts[name][d] for d in range(plan.directions) for name in states]
    results = layer(context.tensors[x], initial_state=given or None)
    y, *last = results if settings["return_state"] else [results]
    order = _RECURRENT_GATES[plan.kind]
    for name, weights in ((w, [c.kernel for c in cells]), (r, [c.recurrent_kernel for c in cells])):
        context.parts[name], context.packing[name] = weights, _transposed(plan.gates(order))
    if b:
        context.parts[b], context.packing[b] = [c.bias for c in cells], _biases(plan, order)
    if plan.wanted[0]:
        context.layouts[node.outputs[0]] = (0, 1, 2, 3) if plan.batch_first else (2, 0, 1, 3)
        if plan.reverse:
            flip = Calculation(lambda t: ops.flip(t, 1), [...], y.shape, **context.settings(node, ".flip"))
            y = flip(y)
    kept = []
    for i, name in enumerate(node.outputs[1:]):
        each = last[i :: len(plan.wanted) - 1]
        context.layouts[name] = across
        if len(each) > 1 and name:
            stack = Calculation(lambda *t: ops.stack(t), [..., ...], None, **context.settings(node, f".stack{i}"))
            each = [stack(each)]
        kept.append(each[0] if name else None)
    return _wanted((y, *kept), plan.wanted)


def _transposed(packing: Packing) -> Packing:
    """Weights with their last two axes exchanged."""
    return Packing(lambda w: packing.pack(w).swapaxes(1, 2), lambda w: packing.unpack(w.swapaxes(1, 2)))


def _biases(plan: Recurrent, order: str) -> Packing:
    """ONNX's two biases as Keras's two, or as its one, which is their sum and has the gradient of each."""
    both = plan.bias_gates(order)
    if plan.linear_before_reset and plan.kind == "GRU":
        return Packing(
            lambda b: both.pack(b).reshape(plan.directions, 2, -1),
            lambda b: both.unpack(b.reshape(plan.directions, -1)),
        )

    def pack(b: np.ndarray) -> np.ndarray:
        halves = np.split(both.pack(b), 2, axis=1)
        total: np.ndarray = halves[0] + halves[1]
        return total

    return Packing(pack, lambda b: both.unpack(np.concatenate([b, b], axis=1)))


def _step_by_step(node: Node, context: Context, plan: Recurrent) -> Function:
    sizes = context.shape(node.inputs[0])
    batch, steps = (sizes[0], sizes[1]) if plan.batch_first else (sizes[1], sizes[0])
    assert batch is not None and steps is not None  # an operation's shapes are all known

    def run(x: Any, *rest: Any) -> Any:
        functions = Functions(
            ops.matmul, ops.transpose, ops.sigmoid, ops.tanh, lambda t, n: ops.split(t, n, -1), ops.stack,
            lambda rows, columns: ops.zeros((rows, columns), x.dtype),
        )  # fmt: skip
        return _wanted(unrolled(plan, functions, batch, steps, x, *rest), plan.wanted)

    return run


def _attention(node: Node, context: Context) -> Any:
    plan = attention_nodes.attention(node, context.shapes, context.constants, context.dtypes)
    plain = plan.plain
    if context.backend == "jax":
        # JAX's own takes the softmax in float32, has no kernel of float16 on the CPU, and wants values like the keys.
        same = context.shape(node.inputs[1])[-1] == context.shape(node.inputs[2])[-1]
        plain = plain and same and context.policy not in ("float64", "float16")
    return (_plain_attention if plain else _general_attention)(node, context, plan)


def _plain_attention(node: Node, context: Context, plan: attention_nodes.Attention) -> Any:
    """Keras's own attention, which has the heads behind the steps."""
    bias = None
    if plan.bias is not None and not plan.causal:
        bias = ops.convert_to_tensor(plan.bias.reshape((1,) * (4 - plan.bias.ndim) + plan.bias.shape), context.policy)
    if not plan.split_heads:
        context.layouts[node.outputs[0]] = (0, 2, 1, 3)
        for name in node.inputs[:3]:
            context.prefer(name, (0, 2, 1, 3))
    scale = np.float64(plan.scale)  # Python's own float TensorFlow would take by way of float32
    repeats = plan.heads // plan.kv_heads if plan.kv_heads == 1 else 1  # Keras repeats several heads, but not one

    def heads(x: Any, count: int) -> Any:
        return ops.reshape(x, (*x.shape[:2], count, -1)) if plan.split_heads else x

    def attend(q: Any, k: Any, v: Any, *_: Any) -> Any:
        q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
        if repeats > 1:
            k, v = ops.repeat(k, repeats, 2), ops.repeat(v, repeats, 2)
        y = ops.dot_product_attention(q, k, v, bias, scale=scale, is_causal=plan.causal)
        return ops.reshape(y, (*y.shape[:2], -1)) if plan.split_heads else y

    return context.calculate(node, attend)


def _general_attention(node: Node, context: Context, plan: attention_nodes.Attention) -> Any:
    def heads(x: Any, count: int) -> Any:
        return ops.transpose(ops.reshape(x, (*x.shape[:2], count, -1)), (0, 2, 1, 3)) if plan.split_heads else x

    root = math.sqrt(plan.scale)
    bias = ops.convert_to_tensor(np.zeros((1, 1)) if plan.bias is None else plan.bias, context.policy)

    def attend(
        q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None, *_: Any
    ) -> Any:  # fmt: skip
        q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
        if plan.past:
            k, v = ops.concatenate([past_k, k], 2), ops.concatenate([past_v, v], 2)
        present = k, v
        if plan.heads != plan.kv_heads:
            k, v = (ops.repeat(t, plan.heads // plan.kv_heads, 1) for t in present)
        scores = ops.matmul(q * root, ops.transpose(k * root, (0, 1, 3, 2)))
        shown = {attention_nodes.SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * ops.tanh(scores / plan.softcap)
        shown[attention_nodes.CAPPED] = scores
        added = bias
        if mask is not None:
            if plan.mask == "bool":
                mask = ops.where(mask, ops.zeros((), scores.dtype), ops.full((), -math.inf, scores.dtype))
            if plan.mask_padding:
                pads = [*[(0, 0)] * (len(mask.shape) - 1), (0, plan.mask_padding)]
                mask = ops.pad(mask, pads, constant_values=-math.inf)
            added = added + mask
        scores = scores + added
        shown[attention_nodes.BIASED] = scores
        # A row that attends to nothing would be not a number, and its gradient too.
        blind = ops.max(added, -1, keepdims=True) == -math.inf if plan.may_be_blind else None
        weights = ops.softmax(
            _in_float32(scores if blind is None else ops.where(blind, ops.zeros_like(scores), scores))
        )
        weights = ops.cast(weights, q.dtype)
        if blind is not None:
            weights = ops.where(blind, ops.zeros_like(weights), weights)
        shown[attention_nodes.WEIGHTS] = weights
        y = ops.matmul(weights, v)
        if plan.split_heads:
            y = ops.transpose(y, (0, 2, 1, 3))
            y = ops.reshape(y, (*y.shape[:2], -1))
        return _wanted((y, *present, shown.get(plan.shows)), plan.wanted)

    return context.calculate(node, attend)


OPERATORS: dict[str, Factory] = {
    "Add": _merge(layers.Add, ops.add),
    "Attention": _attention,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _div,
    "Dropout": _dropout,
    "Elu": _elementwise(_elu),
    "Exp": _elementwise(lambda *_: ops.exp),
    "Flatten": _flatten,
    "GRU": _recurrent,
    "Gather": _gather,
    "Gelu": _elementwise(_gelu),
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool(_GLOBAL_AVERAGES),
    "GlobalMaxPool": _global_pool(_GLOBAL_MAXIMA),
    "HardSwish": _elementwise(lambda *_: ops.hard_silu),
    "Identity": _layer(_identity),
    "LRN": _lrn,
    "LSTM": _recurrent,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _layer(_leaky_relu),
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mul": _merge(layers.Multiply, ops.multiply),
    "Pad": _pad,
    "ReduceMax": _reduce(_maximum, -math.inf),
    "ReduceMean": _reduce(ops.mean),
    "ReduceSum": _reduce(ops.sum),
    "Relu": _layer(_relu),
    "Reshape": _reshape,
    "Sigmoid": _layer(_activation("sigmoid")),
    "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy_loss,
    "Sqrt": _elementwise(lambda *_: ops.sqrt),
    "Squeeze": _squeeze,
    "Sub": _merge(layers.Subtract, ops.subtract),
    "Sum": _merge(layers.Add, ops.add),
    "Tanh": _layer(_activation("tanh")),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""


_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4), "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2),
    "LayerNormalization": (1, 2),
}  # fmt: skip
"""Inputs that Keras keeps as variables of a layer."""


class Operator(level.Operator):
    """One ONNX node in Keras: a layer, or a function of `keras.ops`.

    On PyTorch, where Keras compiles nothing, a layer computes with variables, which have the weights fed last.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        require_backend(mode)
        self._exact = any(dtype == np.float64 for dtype in operation.dtypes.values())
        # What stands at each native input: the node's input, the number of its part, and what in a model gets it.
        self._places: list[tuple[str, int | None, Any]] = []
        self._others: list[Any] = []  # a model's variables that are no weights: the state of random generators
        self._result_shapes: list[Any] = []
        with self._scope():
            context = self._context()
            made = OPERATORS[operation.node.op_type](operation.node, context)
            self._layouts, self._packing = context.layouts, context.packing
            results = made if isinstance(made, tuple) else (made,)
            if any(isinstance(result, keras.KerasTensor) for result in results):
                self._result_shapes = [None if result is None else tuple(result.shape) for result in results]
                model, call, eager = self._model(context, made)
            else:
                self._places = [(name, None, None) for name in operation.node.inputs]
                model, call, eager = keras.Model(), made, made
        self._engine = ENGINES[mode](
            call, eager, mode=mode, device=device, exact=self._exact, compiled=model.jit_compile
        )
        self.forward = self._engine.forward

    def _scope(self) -> Any:
        return scope(self.mode, self.device, exact=self._exact)

    def _context(self) -> Context:
        operation, node = self.operation, self.operation.node
        fixed = operation.constants
        weights = [node.inputs[i] for i in _WEIGHTS.get(node.op_type, ()) if i < len(node.inputs) and node.inputs[i]]
        weights = [name for name in weights if name not in fixed]
        floating = [operation.dtypes[name] for name in operation.dtypes if is_floating(operation.dtypes[name])]
        policy = str(floating[0]) if floating else "float32"
        context = Context(
            shapes=operation.shapes,
            initializers={**fixed, **{name: np.zeros(operation.shapes[name]) for name in weights}},
            weights=frozenset(weights),
            uses=Counter(node.inputs),
            policy=policy,
            wide_policy="float64" if policy == "float64" else "float32",
            backend=self.mode,
            training=operation.training,
            dtypes=operation.dtypes,
            non_negative=operation.non_negative,
        )
        for name in node.inputs:
            if name and name not in context.initializers:
                context.tensors[name] = context.input(name)
        return context

    def _model(self, context: Context, made: Any) -> tuple[Any, Function, Function]:
        """A functional model, and its call: with all that it computes with as arguments, and with its own variables."""
        for name in dict.fromkeys(self.operation.node.inputs):
            if name in context.parts:
                self._places += [(name, part, target) for part, target in enumerate(context.parts[name])]
            elif name in context.variables:
                self._places.append((name, None, context.variables[name]))
            elif name in context.tensors:
                self._places.append((name, None, context.tensors[name]))
        targets = [target for _, _, target in self._places]
        data = [i for i, target in enumerate(targets) if isinstance(target, keras.KerasTensor)]
        several = isinstance(made, tuple)
        wanted = [result is not None for result in made] if several else []
        outputs = [result for result in made if result is not None] if several else made
        model = keras.Model([targets[i] for i in data], outputs)
        model.trainable = False  # so that PyTorch records nothing, unless it is asked to
        self._others = [v for v in model.variables if all(v is not target for target in targets)]
        held = [(i, target) for i, target in enumerate([*targets, *self._others]) if i not in data]
        training = self.operation.training

        def eager(*inputs: Any) -> Any:
            results = model([inputs[i] for i in data], training=training)
            if not several:
                return results
            found = iter([results] if sum(wanted) == 1 else results)  # a model gives a single output as it is
            return tuple(next(found) if asked else None for asked in wanted)

        def call(*inputs: Any) -> Any:
            with keras.StatelessScope([(variable, inputs[i]) for i, variable in held]):
                return eager(*inputs)

        computing = [layer for layer in model.layers if not isinstance(layer, layers.InputLayer)]
        if several or len(computing) > 1 or data != [0]:
            return model, call, eager
        layer = computing[0]
        if len(targets) == 1 and not self._others and not training:
            return model, call, layer
        return model, call, (lambda x, *_: layer(x, training=True)) if training else lambda x, *_: layer(x)

    # Data, in and out.

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        self.check_feed(arrays)
        given = {
            name: self._stored(name, array)
            for name, array in zip(self.operation.node.inputs, arrays, strict=True)
            if array is not None
        }
        fed: list[Any] = []
        with self._scope():
            for name, part, target in self._places:
                fed.append(self._native(given[name] if part is None else given[name][part]) if name else None)
                if self.mode == "torch" and isinstance(target, keras.Variable):
                    target.assign(fed[-1])
            return [*fed, *(variable.value for variable in self._others)]

    def _stored(self, name: str, array: np.ndarray) -> np.ndarray:
        if name in self._packing:
            array = self._packing[name].pack(array)
        layout = self._layouts.get(name)
        return np.array(array.transpose(layout) if layout else array, order="C")

    def _native(self, array: np.ndarray) -> Any:
        dtype = str(array.dtype)
        if self.mode == "jax" and not self._exact:
            dtype = {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)  # JAX has no others
        if self.mode == "torch" and dtype == "uint64":
            dtype = "int64"  # as Keras itself does with uint32
        return ops.convert_to_tensor(array, dtype=dtype)

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        fed = []
        with self._scope():
            for index, array in zip(self.operation.differentiated, arrays, strict=True):
                stored = self._stored(self.operation.node.outputs[index], array)
                shape = self._result_shapes[index] if self._result_shapes else None
                fed.append(self._native(stored if shape is None else stored.reshape(shape)))
        return fed

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        with self._scope():
            return [
                self._neutral(name, value)
                for name, value in zip(self.operation.node.outputs, given, strict=False)
                if name
            ]

    def _neutral(self, name: str, value: Any) -> np.ndarray:
        operation = self.operation
        array = _array(value)
        layout = self._layouts.get(name)
        if layout:
            array = array.reshape([operation.shapes[name][axis] for axis in layout]).transpose(np.argsort(layout))
        return np.array(array, operation.dtypes[name], order="C")

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        found: dict[str, Any] = {}
        with self._scope():
            for index, gradient in zip(self._sources(), gradients, strict=True):
                name, part, _ = self._places[index]
                if part is None:
                    found[name] = _array(gradient)
                else:
                    found.setdefault(name, []).append(_array(gradient))
        fetched = []
        for index in self.operation.differentiable:
            name = self.operation.node.inputs[index]
            whole = np.asarray(found[name])
            fetched.append(self._neutral(name, self._packing[name].unpack(whole) if name in self._packing else whole))
        return fetched

    def _sources(self) -> list[int]:
        """Which of the native inputs have a gradient."""
        names = [self.operation.node.inputs[index] for index in self.operation.differentiable]
        return [i for i, (name, _, _) in enumerate(self._places) if name in names]

    # The measured paths.

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._engine.backward(inputs, self._sources(), self.operation.differentiated)

    def extent(self, value: Any) -> tuple[int, int] | None:
        return self._engine.extent(value)

    def synchronize(self, *results: Any) -> None:
        self._engine.synchronize(results)


def _array(value: Any) -> np.ndarray:
    """A tensor as a NumPy array."""
    if isinstance(value, np.ndarray) or len(value.shape):
        return np.asarray(ops.convert_to_numpy(value))
    # TensorFlow gives bfloat16 scalars as Python numbers.
    return np.asarray(ops.convert_to_numpy(ops.reshape(value, (1,)))).reshape(())


def require_backend(mode: str) -> None:
    """Raise `BackendError` unless Keras runs on this backend."""
    if keras.backend.backend() != mode:
        raise BackendError(
            f"this process runs Keras on {keras.backend.backend()}, not on {mode}",
            hint=f"Set KERAS_BACKEND={mode} before Keras is imported.",
        )
