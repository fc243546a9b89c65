"""Level 1 on JAX: a network as pure functions of its parameters, compiled by XLA, and their gradients.

Parameters are a dict of arrays under their neutral names; running statistics and the random key are a second pytree,
which a training pass returns anew. Imports JAX, NumPy, `d5suite.errors`, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from d5suite.backends.jax import runtime
from d5suite.backends.jax.operators import OPERATORS, Context, Layout, channels_last, identity, weight_layout
from d5suite.errors import NetworkError
from d5suite.levels import network as level
from d5suite.levels.network import GRADIENT_SCALE, Arrays, Native
from d5suite.network import Network, Node

_FLOAT32_INPUTS = {"BatchNormalization": (1, 2, 3, 4), "SoftmaxCrossEntropyLoss": (2,)}
"""Weights that stay in float32 where the others are rounded to 16 bits."""

_NARROW = {"bf16": np.dtype(jnp.bfloat16), "fp16": np.dtype(np.float16)}
"""By precision: the type of activations and of weights where they are used, in place of the parameters' own."""

ArrayTree = dict[str, jax.Array]


class Executor(level.Executor):
    """A network on JAX.

    Attributes
    ----------
    trained : dict of str to jax.Array
        The parameters in their storage layouts.
    state : tuple
        Running statistics by name, and the random key of the next training pass or None without Dropout.
    native_device : jax.Device
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        computed = [name for name in network.statistics if name not in network.initializers]
        if computed:
            raise NetworkError(f"running statistics must be initializers: {', '.join(computed)}", where=network.name)
        self._array = np.float64 if precision == "fp64" else np.float32
        self._activations = _NARROW.get(precision, np.dtype(self._array))
        self.native_device = runtime.native_device(device)
        self._layouts = _weight_layouts(network)
        self._layouts[network.input] = channels_last(len(network.shapes[network.input]))
        inference = self._context(training=False)
        self._infer = _Program(network, network.output, inference, self._activations)
        self._layouts[network.output] = inference.layout(network.output)
        if network.loss is not None:
            self._train = _Program(network, network.loss, self._context(training=True), self._activations)
        random = network.loss is not None and self._train.random
        with self.scope():
            self.trained = {name: self.native(name, network.initializers[name]) for name in network.parameters}
            statistics = {name: self.native(name, network.initializers[name]) for name in network.statistics}
            key = jax.device_put(runtime.initial_key(), self.native_device) if random else None
        self.state: tuple[ArrayTree, jax.Array | None] = (statistics, key)
        self._forward = self.compiled(self._run)
        self._gradient = self.compiled(self.gradient)
        self._scale = np.float32(GRADIENT_SCALE) if precision == "fp16" else None
        self._pending: deque[Any] = deque()

    def _context(self, *, training: bool) -> Context:
        network = self.network
        # On the CPU float32 is always float32; on GPUs XLA's default is TF32.
        exact = self.device == "cuda" and self.precision not in _NARROW
        return Context(
            shapes=network.shapes,
            constants={name: network.initializers[name] for name in network.constants},
            layouts=dict(self._layouts),
            training=training,
            precision=lax.Precision.HIGHEST if exact else None,
        )

    def scope(self) -> AbstractContextManager[None]:
        """Where this executor's arrays can be made and its functions called: float64 needs JAX's 64-bit types."""
        return runtime.double_precision() if self.precision == "fp64" else nullcontext()

    def compiled(self, function: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The function as this mode runs it; ``donate`` numbers the arguments whose memory the results may take."""
        if self.mode == "eager":
            return function
        jitted: Callable[..., Any] = jax.jit(function, donate_argnums=donate)
        return jitted

    def _run(self, trained: ArrayTree, statistics: ArrayTree, images: jax.Array) -> jax.Array:
        output, _ = self._infer({**trained, **statistics, self.network.input: images}, None)
        return output

    def loss(self, trained: ArrayTree, state: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        """The loss in training mode and the next state; a pure function, for differentiation and tracing."""
        statistics, key = state
        label, _ = self.network.require_loss()
        key, now = (None, None) if key is None else jax.random.split(key)
        values = {**trained, **statistics, self.network.input: images, label: labels}
        loss, moved = self._train(values, now)
        return loss, ({**statistics, **moved}, key)

    def gradient(self, trained: ArrayTree, state: Any, images: jax.Array, labels: jax.Array, scale: Any = None) -> Any:
        """The loss, the next state and the gradients, as ``((loss, state), gradients)``; a pure function.

        With ``scale``, the loss is multiplied by it before it is differentiated, and the gradients are divided by it.
        """
        if scale is None:
            return jax.value_and_grad(self.loss, has_aux=True)(trained, state, images, labels)

        def scaled(trained: ArrayTree) -> Any:
            loss, moved = self.loss(trained, state, images, labels)
            return loss * scale, (loss, moved)

        (_, found), gradients = jax.value_and_grad(scaled, has_aux=True)(trained)
        return found, jax.tree.map(lambda gradient: gradient / scale, gradients)

    # Weights and data, in and out.

    def native(self, name: str, value: np.ndarray) -> jax.Array:
        """An array of our own with a parameter's or statistic's value."""
        return jax.device_put(self._stored(name, value, self._array), self.native_device)

    def _stored(self, name: str, value: np.ndarray, dtype: Any) -> np.ndarray:
        """A copy in storage layout, which JAX may keep without copying it again."""
        layout = self._layouts.get(name)
        return np.array(value.transpose(layout) if layout else value, dtype, order="C")

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        fed = {}
        with self.scope():
            for name, array in arrays.items():
                stored = self._stored(name, array, self._activations if name == self.network.input else np.int32)
                fed[name] = jax.device_put(stored, self.native_device)
                self.issued(fed[name])
        return fed

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {name: self._neutral(name, value) for name, value in values.items()}

    def _neutral(self, name: str, value: jax.Array) -> np.ndarray:
        layout = self._layouts.get(name)
        array = np.asarray(value)
        return np.array(array.transpose(np.argsort(layout)) if layout else array, self._array, order="C")

    def parameters(self) -> dict[str, np.ndarray]:
        return self.fetch({**self.trained, **self.state[0]})

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        statistics, key = self.state
        with self.scope():
            loaded = {name: self.native(name, np.asarray(value)) for name, value in values.items()}
        self.trained = {name: loaded.get(name, value) for name, value in self.trained.items()}
        self.state = ({name: loaded.get(name, value) for name, value in statistics.items()}, key)

    def random_state(self) -> dict[str, np.ndarray]:
        key = self.state[1]
        return {} if key is None else {"key": np.array(jax.random.key_data(key))}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        if "key" in values:
            key = jax.random.wrap_key_data(np.asarray(values["key"]))
            self.state = (self.state[0], jax.device_put(key, self.native_device))

    # The measured paths.

    def forward(self, feed: Native) -> Native:
        with self.scope():
            output = self._forward(self.trained, self.state[0], feed[self.network.input])
        self.issued(output)
        return {self.network.output: output}

    def forward_backward(self, feed: Native) -> Native:
        label, name = self.network.require_loss()
        with self.scope():
            (loss, self.state), gradients = self._gradient(
                self.trained, self.state, feed[self.network.input], feed[label], self._scale
            )
        self.issued(loss, gradients)
        return {name: loss, **gradients}

    def issued(self, result: jax.Array, *others: Any) -> None:
        """Remember what `synchronize` has to wait for: one result of a program stands for the others."""
        while self._pending and self._pending[0][0].is_ready():
            self._pending.popleft()
        self._pending.append((result, others) if self.mode == "eager" else (result,))

    def synchronize(self) -> None:
        jax.block_until_ready((list(self._pending), (self.trained, self.state) if self.mode == "eager" else None))
        self._pending.clear()


class _Program:
    """The nodes that one output needs, each as a native call, in order.

    Attributes
    ----------
    random : bool
        Whether a node draws random numbers.
    """

    def __init__(self, network: Network, wanted: str, context: Context, activations: np.dtype) -> None:
        self._wanted = wanted
        self._activations = activations
        nodes = network.nodes_for([wanted])
        self.random = context.training and any(node.op_type == "Dropout" for node in nodes)
        self._constants = {name: _constant(context.constants[name], activations) for name in network.constants}
        known = {"", network.input, *network.initializers, *([network.label] if context.training else [])}
        last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
        kept = {"", wanted, *network.initializers}
        rounds = activations in _NARROW.values()
        self._steps = []
        for index, node in enumerate(nodes):
            for name in node.inputs:
                if name not in known:
                    raise NetworkError(
                        f"tensor {name!r} is not a first output, and only those are computed", where=node.name
                    )
            call = OPERATORS[node.op_type](replace(node, outputs=node.outputs[:1]), context)
            known.add(node.outputs[0])
            rounded = [rounds and _is_rounded(network, node, i) for i in range(len(node.inputs))]
            dead = [name for name in {*node.inputs} - kept if last_use[name] == index]
            self._steps.append((node, call, rounded, dead))
        self._training = context.training
        if wanted not in known:
            raise NetworkError(f"no node computes {wanted!r} as its first output", where=network.name)

    def __call__(self, given: Mapping[str, Any], key: jax.Array | None) -> tuple[Any, ArrayTree]:
        """The wanted output, and in training mode the running statistics that moved."""
        values = {**self._constants, **given, "": None}
        moved: ArrayTree = {}
        for index, (node, call, rounded, dead) in enumerate(self._steps):
            arguments = [
                values[name].astype(self._activations) if low else values[name]
                for name, low in zip(node.inputs, rounded, strict=True)
            ]
            if node.op_type == "Dropout" and key is not None:
                result = call(*arguments, key=jax.random.fold_in(key, index))
            else:
                result = call(*arguments)
            if node.op_type == "BatchNormalization" and self._training:
                result, moved[node.inputs[3]], moved[node.inputs[4]] = result
            values[node.outputs[0]] = result
            for name in dead:
                del values[name]
        return values[self._wanted], moved


def _constant(value: np.ndarray, activations: np.dtype) -> np.ndarray:
    """A constant as operators use it: numbers in the activations' type."""
    return value.astype(activations) if value.dtype.kind == "f" else value


def _is_rounded(network: Network, node: Node, index: int) -> bool:
    """Whether a node's input is a weight that is rounded where the precision has 16 bits."""
    return node.inputs[index] in network.parameters and index not in _FLOAT32_INPUTS.get(node.op_type, ())


def _weight_layouts(network: Network) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    for node in network.nodes:
        for index, name in enumerate(node.inputs):
            if name in network.parameters and name not in layouts:
                rank = len(network.shapes[name])
                layout = weight_layout(node, index, rank)
                if layout != identity(rank):
                    layouts[name] = layout
    return layouts
