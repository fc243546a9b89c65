"""Context of a node, and helpers that several families share, in Keras.

Imports Keras, NumPy, `d5suite.errors`, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.errors import BackendError
from d5suite.levels.layouts import ConvertingContext, converting, same
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.layouts import Conversion, Layout, channels_last, identity
from d5suite.network.nodes.windows import Window

Function = Callable[..., Any]
"""A function of the backend's own tensors, by `keras.ops`."""

Factory = Callable[[Node, "Context"], Any]


@keras.saving.register_keras_serializable("d5suite")
class Calculation(layers.Layer):
    """A layer that computes a node by a function of `keras.ops`.

    Parameters
    ----------
    function : callable
        Takes the node's inputs in order, None for an omitted one.
    inputs : sequence
        The source of each input: ``...`` for the next of the layer's own inputs, a
        `keras.Variable`, an array, or None.
    stored : tuple of int or None
        The output's shape as stored; None to let Keras infer it.
    result : str, optional
        The output's type; by default that of the layer's policy.
    more : sequence of (tuple of int, str or None)
        Shape and type of further outputs; the function returns a tuple, None for an omitted
        one.
    """

    def __init__(
        self,
        function: Function,
        inputs: Sequence[Any],
        stored: Shape | None,
        result: str | None = None,
        more: Sequence[tuple[Shape | None, str | None]] = (),
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.function = function
        self.stored = stored
        self.result = result
        self._more = tuple(more)
        self.weights_held = [x for x in inputs if isinstance(x, keras.Variable)]  # Keras tracks attributes
        self._sources = tuple(inputs)
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Return the function's value."""
        given = iter(inputs if isinstance(inputs, list | tuple) else [inputs])
        found = self.function(*[self._value(source, given) for source in self._sources])
        if not isinstance(found, tuple):
            return found
        kept = [value for value in found if value is not None]
        return kept if len(kept) > 1 else kept[0]

    def _value(self, source: Any, given: Any) -> Any:
        if source is ...:
            return next(given)
        if isinstance(source, np.ndarray):
            return ops.convert_to_tensor(source, dtype=self.compute_dtype if source.dtype.kind == "f" else None)
        return None if source is None else ops.convert_to_tensor(source)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return the symbolic output."""
        if self.stored is None:
            return super().compute_output_spec(inputs)
        outputs = [
            keras.KerasTensor(stored, dtype=result or self.compute_dtype)
            for stored, result in ((self.stored, self.result), *self._more)
        ]
        return outputs if self._more else outputs[0]


@dataclass(kw_only=True)
class Context(ConvertingContext):
    """The model built so far, and what a factory knows about its node and the network around it.

    ``training`` is for level 0 only; in a network, each call says whether the layers train.

    Attributes
    ----------
    weights : mapping of str to numpy.ndarray
        Values of parameters and running statistics.
    uses : mapping of str to int
        How many times nodes read each tensor.
    policy : str
        Keras's dtype policy of the layers.
    wide_policy : str
        The policy of layers that compute in float32 at least.
    backend : str
        Keras's backend.
    xla : bool
        Whether XLA compiles the network, and so may compute a value twice, with different
        roundings.
    anchor : keras.KerasTensor
        An input of the network. Layers that read only weights and constants take it as their input.
    tensors : dict
        Symbolic tensors by name.
    variables : dict
        Weights by name, as variables of layers.
    parts : dict
        Inputs that are split along their first stored axis into several variables or symbolic
        tensors; level 0 only.
    """

    weights: Mapping[str, np.ndarray]
    uses: Mapping[str, int]
    policy: str
    wide_policy: str
    backend: str
    xla: bool = False
    anchor: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[Any]] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    @property
    def images_last(self) -> bool:
        """Whether images are stored with channels last.

        Keras's layers transpose channels-last images at every convolution and pooling on PyTorch,
        and channels-first images at every pooling on TensorFlow.
        """
        return self.backend != "torch"

    @property
    def data_format(self) -> str:
        """Keras's name of the images' layout."""
        return "channels_last" if self.images_last else "channels_first"

    def image_layout(self, rank: int) -> Layout:
        """Return the layout of images in convolution and pooling."""
        return channels_last(rank) if self.images_last else identity(rank)

    def computed(self, *names: str) -> bool:
        """Return whether all these tensors are computed, not weights or constants."""
        return all(name in self.tensors for name in names)

    def owned(self, *names: str) -> bool:
        """Return whether all these are weights read by this node alone, which its layer may own."""
        return all(name in self.weights and self.uses[name] == 1 for name in names)

    def name(self, node: Node, suffix: str = "") -> str:
        """Return a layer name after the node's, unique in the model and valid in every backend."""
        base = _identifier(f"{node.name}{suffix}").lstrip("_") or "node"
        names = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(1)))
        chosen = next(name for name in names if name not in self._names)
        self._names.add(chosen)
        return chosen

    def settings(self, node: Node, suffix: str = "") -> dict[str, Any]:
        """Return the arguments that every layer gets."""
        return {"name": self.name(node, suffix), "dtype": self.policy_of(node)}

    def policy_of(self, node: Node) -> str:
        """Return the policy of a node's layer: the wide one where the loss is computed."""
        wide = not self.single and self.dtypes.get(node.outputs[0]) == np.float32
        return self.wide_policy if wide else self.policy

    def own(self, names: Sequence[str], *variables: Any, layout: Layout | None = None) -> None:
        """Record that a layer's variables are these weights, the first one stored in this layout.

        There may be fewer names than variables.
        """
        self.variables.update(zip(names, variables, strict=False))
        if layout is not None:
            self.layouts[names[0]] = layout

    def variable(self, name: str) -> Any:
        """Return a weight as a variable in ONNX's layout, which several layers may share."""
        if name not in self.variables:
            dtype = keras.DTypePolicy(self.wide_policy).variable_dtype
            self.variables[name] = keras.Variable(self.weights[name], dtype=dtype, name=_identifier(name))
        return self.variables[name]

    def prefer(self, name: str, layout: Layout) -> None:
        """At level 0, choose an input's layout; in a network, the node before has chosen it."""
        if self.single:
            self.layouts[name] = layout
            if name in self.tensors:
                self.tensors[name] = self.input(name)

    def input(self, name: str) -> Any:
        """Return a new symbolic input, as stored."""
        return keras.Input(batch_shape=self.stored(name), dtype=str(self.dtypes[name]))

    def calculate(self, node: Node, function: Function, *, policy: str | None = None, compiles: bool = True) -> Any:
        """Return a `Calculation` over a node's inputs; at level 0, the function itself.

        ``compiles`` is whether XLA can compile the function.
        """
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
            else:
                inputs.append(self.constants.get(name))
        settings = {"name": self.name(node), "dtype": policy or self.policy_of(node)}
        (stored, result), *more = [(self.stored(name), self._result(name)) for name in node.outputs if name]
        layer = Calculation(function, inputs, stored, result, more, **settings)
        layer.supports_jit = compiles
        given = given or [self.anchor]
        found = layer(given if len(given) > 1 else given[0])
        if node.outputs[0] and not more:
            return found
        several = iter(found if more else [found])
        return tuple(next(several) if name else None for name in node.outputs)

    def _result(self, name: str) -> str | None:
        """Return the type of an integer or Boolean tensor, which no policy covers; else None."""
        return str(self.dtypes[name]) if self.is_integer(name) else None

    def stored(self, name: str) -> Shape | None:
        """Return a tensor's shape as stored; None unless all sizes but the batch's are known."""
        shape = self.shapes.get(name)
        if shape is None:
            return None
        stored = tuple(shape[axis] for axis in self.layout(name))
        return None if None in stored[1:] else stored

    def enter(self, node: Node, index: int, wanted: Layout) -> Any:
        """Return an input of a node in a layout."""
        name = node.inputs[index]
        if name not in self.tensors:  # a weight or a constant
            source = self.variable(name) if name in self.weights else self.constants[name]
            settings = self.settings(node, ".constant")
            self.tensors[name] = Calculation(same, [source], self.stored(name), self._result(name), **settings)(
                self.anchor
            )
        convert = self.convert(name, wanted)
        if convert is same:
            return self.tensors[name]
        stored = tuple(self.shape(name)[a] for a in wanted)
        layer = Calculation(convert, [...], stored, self._result(name), **self.settings(node, ".layout"))
        return layer(self.tensors[name])

    def image(self, node: Node) -> Any:
        """Return a node's first input in the images' layout, and give its output that layout."""
        layout = self.image_layout(self.rank(node.inputs[0]))
        self.prefer(node.inputs[0], layout)
        self.layouts[node.outputs[0]] = layout
        return self.enter(node, 0, layout)

    def moved(self, how: Conversion) -> Function:
        if how.reshape is not None:
            return lambda x: ops.reshape(x, how.reshape)
        if not how.added:
            return lambda x: ops.transpose(x, how.order)
        return lambda x: ops.transpose(ops.expand_dims(x, tuple(range(how.added))), how.order)

    def spatial(self, values: Sequence[Any], rest: Any) -> list[Any]:
        """Return values for the spatial axes, and ``rest`` for batch and channels, as stored."""
        return [rest, *values, rest] if self.images_last else [rest, rest, *values]

    def padding(self, w: Window) -> Function:
        """Return a function of an image and a value that pads the image for a window."""
        if not w.padded:
            return same
        pads = self.spatial(w.pads, (0, 0))
        return lambda x, value: ops.pad(x, pads, constant_values=value)


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name, flags=re.ASCII)


def first_extreme(native: Function, best: Function) -> Function:
    """Return the reduction ``native`` with its gradient at the index that ``best`` returns.

    JAX's own gradient, and TensorFlow's, compare the elements with the maximum, and XLA may compute
    either again with other roundings: then no element equals the maximum (docs/findings.md). Here
    the gradient goes to the first of equal elements.
    """

    def extreme(x: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
        order = [*(axis for axis in range(len(x.shape)) if axis not in axes), *axes]
        kept = len(order) - len(axes)

        def differentiable(x: Any) -> Any:
            moved = ops.transpose(x, order)
            shape = ops.shape(moved)
            flat = ops.reshape(moved, (*shape[:kept], -1))
            chosen = ops.expand_dims(best(flat, -1), -1) == ops.arange(ops.shape(flat)[-1], dtype="int32")

            def gradient(*above: Any, upstream: Any = None) -> Any:
                given = ops.reshape(above[0] if upstream is None else upstream, (*shape[:kept], 1))
                found = ops.where(chosen, given, ops.zeros((), given.dtype))
                return ops.transpose(ops.reshape(found, shape), np.argsort(order).tolist())

            return native(x, axes, keepdims=keepdims), gradient

        return ops.custom_gradient(differentiable)(x)

    return extreme


def in_onnx(factory: Callable[[Node, Context], Function]) -> Factory:
    """Return a factory of calculations whose function gets its inputs in ONNX's layout."""
    return lambda node, context: context.calculate(
        node, converting(factory(node, context), context.inputs_to_onnx(node))
    )


def is_bool(x: Any) -> bool:
    """Return whether a tensor is of Booleans."""
    return bool(keras.backend.standardize_dtype(x.dtype) == "bool")


def in_float32(x: Any) -> Any:
    """Widen bfloat16 and float16 to float32."""
    return ops.cast(x, "float32") if keras.backend.standardize_dtype(x.dtype) in ("bfloat16", "float16") else x


def require_backend(mode: str) -> None:
    """Raise `BackendError` unless Keras runs on this backend."""
    if keras.backend.backend() != mode:
        raise BackendError(
            f"this process runs Keras on {keras.backend.backend()}, not on {mode}",
            hint=f"Set KERAS_BACKEND={mode} before Keras is imported.",
        )
