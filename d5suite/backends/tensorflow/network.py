"""Level 1 in TensorFlow: a network as variables and traced functions.

Imports TensorFlow, NumPy, `d5suite.levels`, `d5suite.network` and this adapter's `operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.backends.tensorflow.operators import OPERATORS, Context
from d5suite.backends.tensorflow.operators.context import (
    IMAGES_LAST,
    KERNELS,
    compiled,
    is_asynchronous,
    native_device,
)
from d5suite.levels.attribution import labels, no_scope
from d5suite.levels.layouts import LayoutExecutor
from d5suite.levels.network import GRADIENT_SCALE, Arrays, Native
from d5suite.network import Network
from d5suite.network.nodes.layouts import Layout, channels_last, identity, weight_layouts
from d5suite.network.nodes.schedule import by_name, check_statistics, schedule
from d5suite.network.operation import is_floating

ACTIVATIONS = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16, "fp64": tf.float64}
"""Dtype of the activations by precision."""

_NORMALISATION = "BatchNormalization"


class _Program:
    """Native callables of the nodes that some outputs need, in order."""

    def __init__(self, network: Network, wanted: Sequence[str], context: Context, keep_float32: frozenset[str]) -> None:
        self.wanted = wanted
        steps = schedule(network, wanted, training=context.training)
        read = {name for step in steps for name in step.node.inputs}
        self.weights = [name for name in (*network.parameters, *network.statistics) if name in read]
        self.cast = [name for name in self.weights if name not in keep_float32]
        self.constants = [name for name in network.constants if name in read]
        self.steps = []
        scopes = labels(network)
        for step in steps:
            node = step.node
            moving = node.inputs[3:5] if node.op_type == _NORMALISATION and context.training else ()
            call = OPERATORS[node.op_type](replace(node, outputs=(*node.outputs, *moving)), context)
            self.steps.append((call, node, moving, step.dead, scopes[node.name]))

    def __call__(self, executor: Executor, inputs: dict[str, Any]) -> Any:
        """Run the nodes on native inputs; in training, update the running statistics."""
        values: dict[str, Any] = {"": None, **inputs}
        for name in self.weights:
            values[name] = executor.variables[name]
        if executor.activation in (tf.bfloat16, tf.float16):
            for name in self.cast:
                values[name] = tf.cast(executor.variables[name], executor.activation)
        for name in self.constants:
            values[name] = executor.constants[name]
        for call, node, moving, dead, scope in self.steps:
            with executor.scope(scope):
                result = call(*[values[name] for name in node.inputs])
                if moving:
                    result, mean, variance = result
                    executor.variables[moving[0]].assign(mean)
                    executor.variables[moving[1]].assign(variance)
            values.update(by_name(node, result))
            for name in dead:
                del values[name]
        return [values[name] for name in self.wanted]


class Executor(LayoutExecutor):
    """A network in TensorFlow; see `d5suite.levels.network.Executor`.

    Attributes
    ----------
    variables : dict of str to tf.Variable
        Parameters and running statistics in their storage layouts.
    activation : tf.DType
        Dtype of the activations.
    scope : callable
        Returns the scope in which a node or the update is traced, from its name. In mode ``eager``
        it does nothing, because it would cost time in every step.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        check_statistics(network)
        self.activation = ACTIVATIONS[precision]
        self._tf_device = native_device(device)
        stored = tf.float64 if precision == "fp64" else tf.float32
        self._layouts = weight_layouts(network, kernels=KERNELS)
        normalisation = frozenset(
            name for node in network.nodes if node.op_type == _NORMALISATION for name in node.inputs[1:]
        )
        self._generator: Any = None
        self._images_last = IMAGES_LAST.get((device, precision), True)
        if self._images_last:
            self._layouts.update({name: _layout(len(network.shapes[name])) for name in network.inputs})
        inference, training = self._context(training=False), self._context(training=True)
        if self.drops:
            training.generator = self._generator = self._new_generator()
        self._inference = _Program(network, network.outputs, inference, normalisation)
        self._training = {
            name: _Program(network, [name], training, normalisation) for name in [network.loss] if name is not None
        }
        self._layouts.update({name: inference.layouts[name] for name in network.outputs if name in inference.layouts})
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
                name: tf.constant(network.initializers[name], self._activation_dtype(name))
                for name in network.constants
            }
        self.trained = [self.variables[name] for name in network.parameters]
        self._forward = self.compiled(self._run_forward)
        self._gradient = self.compiled(self._run_backward)
        self._asynchronous = is_asynchronous(device)
        self.scope: Callable[[str], AbstractContextManager[Any]] = no_scope if mode == "eager" else _traced_scope

    def _new_generator(self) -> Any:
        """Return a generator that follows TensorFlow's global seed."""
        with tf.device(self._tf_device):
            seed = tf.random.uniform((), maxval=2**31 - 1, dtype=tf.int32)
            return tf.random.Generator.from_seed(int(seed), alg="philox")

    def _context(self, *, training: bool) -> Context:
        return Context.of_network(
            self.network,
            training=training,
            activations=self.precision,
            layouts=dict(self._layouts),
            gradients=training,
            native_gradients=self.mode == "xla" or self.device == "cuda",
            xla=self.mode == "xla",
            images_last=self._images_last,
        )

    def _activation_dtype(self, name: str) -> Any:
        """Return the type of an input or constant."""
        dtype = self.network.dtypes[name]
        return self.activation if is_floating(dtype) else tf.as_dtype(dtype)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as this mode runs it."""
        return compiled(function, self.mode)

    def _run_forward(self, *inputs: Any) -> Any:
        with tf.device(self._tf_device):
            return self._inference(self, dict(zip(self.network.inputs, inputs, strict=True)))

    def _run_backward(self, *inputs: Any) -> tuple[Any, list[Any]]:
        if self.precision != "fp16":
            return self.loss_and_gradients(inputs)
        loss, gradients = self.loss_and_gradients(inputs, GRADIENT_SCALE)
        return loss, [gradient / GRADIENT_SCALE for gradient in gradients]

    def loss_and_gradients(self, inputs: Sequence[Any], scale: Any = None) -> tuple[Any, list[Any]]:
        """Return the loss and its gradient for each of `trained`, times ``scale`` if given.

        Takes `training_inputs`. Updates the running statistics. Callers trace this function.
        """
        network = self.network
        label_name, loss_name = network.require_loss()
        with tf.device(self._tf_device):
            with tf.GradientTape() as tape:
                fed = dict(zip((*network.inputs, label_name), inputs, strict=True))
                (loss,) = self._training[loss_name](self, fed)
                scaled = loss if scale is None else loss * scale
            gradients = tape.gradient(scaled, self.trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]  # tf.gather's are slices

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        with tf.device(self._tf_device):
            return {
                name: tf.constant(self.stored(name, np.asarray(array)), self._activation_dtype(name))
                for name, array in arrays.items()
            }

    def forward(self, feed: Native) -> Native:
        found = self._forward(*(feed[name] for name in self.network.inputs))
        return dict(zip(self.network.outputs, found, strict=True))

    def training_inputs(self, feed: Native) -> list[Any]:
        """Return the inputs of a feed, in order, and the label."""
        return [feed[name] for name in (*self.network.inputs, self.network.require_loss()[0])]

    def forward_backward(self, feed: Native) -> Native:
        _, loss_name = self.network.require_loss()
        loss, gradients = self._gradient(*self.training_inputs(feed))
        return {loss_name: loss, **dict(zip(self.network.parameters, gradients, strict=True))}

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        copies = {name: np.asarray(tf.cast(value, self.array_type).numpy()) for name, value in values.items()}
        return {name: self.restored(name, array) for name, array in copies.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        return self.fetch(self.variables)

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        for name, value in values.items():
            self.variables[name].assign(self.stored(name, np.asarray(value, self.array_type)))

    def random_state(self) -> dict[str, np.ndarray]:
        return {} if self._generator is None else {"generator": self._generator.state.numpy()}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        for state in values.values():
            self._generator.reset(state)

    def synchronize(self) -> None:
        if self._asynchronous:
            tf.test.experimental.sync_devices()


def _traced_scope(name: str) -> Any:
    return tf.name_scope(f"{name}/")  # the slash: a node that is traced again has the same scope


def _layout(rank: int) -> Layout:
    """Return channels last for inputs that have spatial axes."""
    return channels_last(rank) if rank > 2 else identity(rank)
