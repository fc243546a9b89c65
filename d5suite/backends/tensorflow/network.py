"""Level 1 in TensorFlow: a network as variables and traced functions.

Imports TensorFlow, NumPy, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.backends.tensorflow.operators import (
    IMAGES_LAST,
    OPERATORS,
    Context,
    Layout,
    compiled,
    identity,
    is_asynchronous,
    native_device,
    weight_layout,
)
from d5suite.errors import NetworkError
from d5suite.levels import network as levels
from d5suite.levels.network import GRADIENT_SCALE, Arrays, Native
from d5suite.network import Network

ACTIVATIONS = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16, "fp64": tf.float64}
"""Dtype of the activations by precision."""

_NORMALISATION = "BatchNormalization"


class _Program:
    """The nodes that one output needs, each as a native callable, in order."""

    def __init__(self, network: Network, wanted: str, context: Context, keep_float32: frozenset[str]) -> None:
        self.wanted = wanted
        nodes = network.nodes_for([wanted])
        read = {name for node in nodes for name in node.inputs}
        self.weights = [name for name in (*network.parameters, *network.statistics) if name in read]
        self.cast = [name for name in self.weights if name not in keep_float32]
        self.constants = [name for name in network.constants if name in read]
        known = {"", network.input, network.label, *self.weights, *self.constants}
        last_use = {name: i for i, node in enumerate(nodes) for name in node.inputs}
        self.steps: list[tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = []
        self.moving: dict[int, tuple[str, str]] = {}
        for i, node in enumerate(nodes):
            absent = [name for name in node.inputs if name not in known]
            if absent:
                raise NetworkError(
                    f"{node.op_type} needs {absent[0]!r}, an optional output that this backend does not give",
                    where=node.name,
                )
            outputs = asked = node.outputs if node.op_type == "SoftmaxCrossEntropyLoss" else node.outputs[:1]
            if node.op_type == _NORMALISATION and context.training:
                self.moving[i] = (node.inputs[3], node.inputs[4])
                asked = (*outputs, *self.moving[i])
            call = OPERATORS[node.op_type](replace(node, outputs=asked), context)
            known.update(outputs)
            inputs = tuple(node.inputs)
            dead = tuple(
                name
                for name in dict.fromkeys(inputs)
                if last_use[name] == i and name not in (wanted, "", *self.weights)
            )
            self.steps.append((call, inputs, outputs, dead))
        if wanted not in known:
            raise NetworkError(f"no node of the network gives its output {wanted!r}", where=network.name)

    def __call__(self, executor: Executor, inputs: dict[str, Any]) -> Any:
        """Run the nodes on native inputs, moving the running statistics if the context is a training one."""
        values: dict[str, Any] = {"": None, **inputs}
        for name in self.weights:
            values[name] = executor.variables[name]
        if executor.activation in (tf.bfloat16, tf.float16):
            for name in self.cast:
                values[name] = tf.cast(executor.variables[name], executor.activation)
        for name in self.constants:
            values[name] = executor.constants[name]
        for i, (call, names, outputs, dead) in enumerate(self.steps):
            result = call(*[values[name] for name in names])
            if i in self.moving:
                result, mean, variance = result
                executor.variables[self.moving[i][0]].assign(mean)
                executor.variables[self.moving[i][1]].assign(variance)
            if len(outputs) == 1:
                values[outputs[0]] = result
            else:
                values.update(zip(outputs, result, strict=True))
            for name in dead:
                del values[name]
        return values[self.wanted]


class Executor(levels.Executor):
    """A network in TensorFlow; see `d5suite.levels.network.Executor`.

    Attributes
    ----------
    variables : dict of str to tf.Variable
        Parameters and running statistics in their storage layouts.
    activation : tf.DType
        Dtype of the activations.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        self.activation = ACTIVATIONS[precision]
        self._tf_device = native_device(device)
        self._array = np.float64 if precision == "fp64" else np.float32
        stored = tf.float64 if precision == "fp64" else tf.float32
        self._layouts: dict[str, Layout] = _weight_layouts(network)
        normalisation = frozenset(
            name for node in network.nodes if node.op_type == _NORMALISATION for name in node.inputs[1:]
        )
        self._generator: Any = None
        self._images_last = IMAGES_LAST.get((device, precision), True)
        if self._images_last:
            self._layouts[network.input] = _image_layout(network)
        inference, training = self._context(training=False), self._context(training=True)
        if self.drops:
            training.generator = self._generator = self._new_generator()
        self._inference = _Program(network, network.output, inference, normalisation)
        self._training = {
            name: _Program(network, name, training, normalisation) for name in [network.loss] if name is not None
        }
        self._layouts.update({name: inference.layouts[name] for name in [network.output] if name in inference.layouts})
        with tf.device(self._tf_device):
            self.variables = {
                name: tf.Variable(
                    self.stored(name, network.initializers[name]),
                    dtype=stored,
                    trainable=name not in network.statistics,
                    name=name,
                )
                for name in (*network.parameters, *network.statistics)
            }
            self.constants = {
                name: tf.constant(network.initializers[name], self._constant_dtype(name)) for name in network.constants
            }
        self.trained = [self.variables[name] for name in network.parameters]
        self._forward = self.compiled(self._run_forward)
        self._gradient = self.compiled(self._run_backward)
        self._asynchronous = is_asynchronous(device)

    def _new_generator(self) -> Any:
        """One that follows TensorFlow's global seed."""
        with tf.device(self._tf_device):
            seed = tf.random.uniform((), maxval=2**31 - 1, dtype=tf.int32)
            return tf.random.Generator.from_seed(int(seed), alg="philox")

    def _context(self, *, training: bool) -> Context:
        network = self.network
        return Context(
            shapes=network.shapes,
            constants={name: network.initializers[name] for name in network.constants},
            layouts=dict(self._layouts),
            training=training,
            gradients=training,
            native_gradients=self.mode == "xla" or self.device == "cuda",
            xla=self.mode == "xla",
            images_last=self._images_last,
        )

    def _constant_dtype(self, name: str) -> Any:
        kind = self.network.initializers[name].dtype
        return self.activation if kind.kind == "f" else tf.as_dtype(kind)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as this mode runs it."""
        return compiled(function, self.mode)

    def _run_forward(self, image: Any) -> Any:
        with tf.device(self._tf_device):
            return self._inference(self, {self.network.input: image})

    def _run_backward(self, image: Any, label: Any) -> tuple[Any, list[Any]]:
        if self.precision != "fp16":
            return self.loss_and_gradients(image, label)
        loss, gradients = self.loss_and_gradients(image, label, GRADIENT_SCALE)
        return loss, [gradient / GRADIENT_SCALE for gradient in gradients]

    def loss_and_gradients(self, image: Any, label: Any, scale: Any = None) -> tuple[Any, list[Any]]:
        """The loss and its gradient, times a scale if there is one, by each of `trained`, for tracing.

        Moves the running statistics.
        """
        network = self.network
        label_name, loss_name = network.require_loss()
        with tf.device(self._tf_device):
            with tf.GradientTape() as tape:
                loss = self._training[loss_name](self, {network.input: image, label_name: label})
                scaled = loss if scale is None else loss * scale
            gradients = tape.gradient(scaled, self.trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]  # tf.gather's come as slices

    def stored(self, name: str, array: np.ndarray) -> np.ndarray:
        layout = self._layouts.get(name)
        return np.ascontiguousarray(array.transpose(layout)) if layout else array

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        with tf.device(self._tf_device):
            return {
                name: tf.constant(
                    self.stored(name, np.asarray(array)), self.activation if name == self.network.input else tf.int64
                )
                for name, array in arrays.items()
            }

    def forward(self, feed: Native) -> Native:
        return {self.network.output: self._forward(feed[self.network.input])}

    def forward_backward(self, feed: Native) -> Native:
        label, loss_name = self.network.require_loss()
        loss, gradients = self._gradient(feed[self.network.input], feed[label])
        return {loss_name: loss, **dict(zip(self.network.parameters, gradients, strict=True))}

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {name: self._neutral(name, value) for name, value in values.items()}

    def _neutral(self, name: str, value: Any) -> np.ndarray:
        array = np.asarray(tf.cast(value, self._array))
        layout = self._layouts.get(name)
        return np.array(array.transpose(np.argsort(layout)) if layout else array, order="C")

    def parameters(self) -> dict[str, np.ndarray]:
        return self.fetch(self.variables)

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        for name, value in values.items():
            self.variables[name].assign(self.stored(name, np.asarray(value, self._array)))

    def random_state(self) -> dict[str, np.ndarray]:
        return {} if self._generator is None else {"generator": self._generator.state.numpy()}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        for state in values.values():
            self._generator.reset(state)

    def synchronize(self) -> None:
        if self._asynchronous:
            tf.test.experimental.sync_devices()


def _weight_layouts(network: Network) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    for node in network.nodes:
        for i, name in enumerate(node.inputs):
            if name in network.parameters and name not in layouts:
                rank = len(network.shapes[name])
                layout = weight_layout(node, i, rank)
                if layout != identity(rank):
                    layouts[name] = layout
    return layouts


def _image_layout(network: Network) -> Layout:
    """Channels last, if the image is an image."""
    rank = len(network.shapes[network.input])
    return (0, *range(2, rank), 1) if rank > 2 else identity(rank)
