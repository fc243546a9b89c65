"""Level 1 on JAX: a network as pure functions of its parameters, compiled by XLA.

Parameters are a dict of arrays by neutral name. Running statistics and the random key are a second
pytree, and a training pass returns a new one. Imports JAX, NumPy, `d5suite.levels`,
`d5suite.network` and the adapter's `runtime` and `operators`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from d5suite.backends.jax import runtime
from d5suite.backends.jax.operators import OPERATORS, Context
from d5suite.levels.attribution import labels, no_scope
from d5suite.levels.layouts import LayoutExecutor
from d5suite.levels.network import GRADIENT_SCALE, Arrays, Native
from d5suite.network import Network
from d5suite.network.nodes.layouts import channels_last, weight_layouts
from d5suite.network.nodes.schedule import by_name, check_statistics, is_rounded, schedule
from d5suite.network.operation import is_floating

_NARROW = {"bf16": np.dtype(jnp.bfloat16), "fp16": np.dtype(np.float16)}
"""Type of activations, and of weights where they are used, by precision."""

ArrayTree = dict[str, jax.Array]

Scope = Callable[[str], AbstractContextManager[Any]]
"""Returns the scope of a node or of the update, from its name."""


class Executor(LayoutExecutor):
    """A network on JAX.

    Attributes
    ----------
    trained : dict of str to jax.Array
        The parameters in their storage layouts.
    state : tuple
        Running statistics by name, and the random key of the next training pass (None without
        Dropout).
    native_device : jax.Device
    scope_of : Scope
        Returns the scope in which a node or the update is traced, from its name. In mode ``eager``
        it does nothing, because it would cost time in every step.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        check_statistics(network)
        self._activations = _NARROW.get(precision, np.dtype(self.array_type))
        self.native_device = runtime.native_device(device)
        self._layouts = weight_layouts(network)
        self._layouts.update({name: channels_last(len(network.shapes[name])) for name in network.inputs})
        inference = self._context(training=False)
        self._infer = _Program(network, network.outputs, inference, self._activations)
        self._layouts.update({name: inference.layout(name) for name in network.outputs})
        if network.loss is not None:
            self._train = _Program(network, [network.loss], self._context(training=True), self._activations)
        random = network.loss is not None and self._train.random
        with self.scope():
            self.trained = {name: self.native(name, network.initializers[name]) for name in network.parameters}
            statistics = {name: self.native(name, network.initializers[name]) for name in network.statistics}
            key = jax.device_put(runtime.initial_key(), self.native_device) if random else None
        self.state: tuple[ArrayTree, jax.Array | None] = (statistics, key)
        self.scope_of: Scope = no_scope if mode == "eager" else jax.named_scope
        self._forward = self.compiled(self._run)
        self._gradient = self.compiled(self.gradient)
        self._scale = np.float32(GRADIENT_SCALE) if precision == "fp16" else None
        self._pending: deque[Any] = deque()

    def _context(self, *, training: bool) -> Context:
        # On the CPU float32 is always float32; on GPUs XLA's default is TF32.
        exact = lax.Precision.HIGHEST if self.device == "cuda" and self.precision not in _NARROW else None
        return Context.of_network(
            self.network, training=training, activations=self.precision, layouts=dict(self._layouts), precision=exact
        )

    def scope(self) -> AbstractContextManager[None]:
        """Return the scope for arrays and calls; float64 needs JAX's 64-bit types."""
        return runtime.double_precision() if self.precision == "fp64" else nullcontext()

    def compiled(self, function: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """Return the function as this mode runs it.

        Except in modes ``eager`` and ``stock``, results may reuse the memory of arguments
        ``donate``.
        """
        if self.mode == "eager":
            return function
        jitted: Callable[..., Any] = jax.jit(function, donate_argnums=() if self.mode == "stock" else donate)
        return jitted

    def _run(self, trained: ArrayTree, statistics: ArrayTree, inputs: ArrayTree) -> list[jax.Array]:
        outputs, _ = self._infer({**trained, **statistics, **inputs}, None, self.scope_of)
        return outputs

    def loss(self, trained: ArrayTree, state: Any, inputs: ArrayTree) -> tuple[jax.Array, Any]:
        """Return the loss in training mode and the next state. Pure, for tracing."""
        statistics, key = state
        key, now = (None, None) if key is None else jax.random.split(key)
        (loss,), moved = self._train({**trained, **statistics, **inputs}, now, self.scope_of)
        return loss, ({**statistics, **moved}, key)

    def gradient(self, trained: ArrayTree, state: Any, inputs: ArrayTree, scale: Any = None) -> Any:
        """Return ``((loss, next state), gradients)``. Pure, for tracing.

        With ``scale``, the loss is multiplied by it before differentiation, and the gradients are
        divided by it.
        """
        if scale is None:
            return jax.value_and_grad(self.loss, has_aux=True)(trained, state, inputs)

        def scaled(trained: ArrayTree) -> Any:
            loss, moved = self.loss(trained, state, inputs)
            return loss * scale, (loss, moved)

        (_, found), gradients = jax.value_and_grad(scaled, has_aux=True)(trained)
        return found, jax.tree.map(lambda gradient: gradient / scale, gradients)

    def native(self, name: str, value: np.ndarray) -> jax.Array:
        """Copy a parameter's or statistic's value to the device."""
        return jax.device_put(self._stored(name, value, self.array_type), self.native_device)

    def _stored(self, name: str, value: np.ndarray, dtype: Any) -> np.ndarray:
        """Copy an array into its storage layout; JAX may keep the copy as its own memory."""
        return np.array(self.stored(name, value), dtype, order="C")

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        fed = {}
        with self.scope():
            for name, array in arrays.items():
                dtype = self.network.dtypes[name]
                floating, index = is_floating(dtype), dtype == np.int64  # JAX's own indices are int32
                stored = self._stored(name, array, self._activations if floating else np.int32 if index else dtype)
                fed[name] = jax.device_put(stored, self.native_device)
                self.issued(fed[name])
        return fed

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {name: self.restored(name, np.array(value, self.array_type)) for name, value in values.items()}

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
            key = jax.random.wrap_key_data(np.array(values["key"]))  # JAX keeps aligned arrays
            self.state = (self.state[0], jax.device_put(key, self.native_device))

    def forward(self, feed: Native) -> Native:
        with self.scope():
            outputs = self._forward(self.trained, self.state[0], {name: feed[name] for name in self.network.inputs})
        self.issued(*outputs)
        return dict(zip(self.network.outputs, outputs, strict=True))

    def training_inputs(self, feed: Native) -> ArrayTree:
        """Return the inputs and the label of a feed."""
        return {name: feed[name] for name in (*self.network.inputs, self.network.require_loss()[0])}

    def forward_backward(self, feed: Native) -> Native:
        _, name = self.network.require_loss()
        with self.scope():
            (loss, self.state), gradients = self._gradient(
                self.trained, self.state, self.training_inputs(feed), self._scale
            )
        self.issued(loss, gradients)
        return {name: loss, **gradients}

    def issued(self, result: jax.Array, *others: Any) -> None:
        """Record results for `synchronize` to wait for; of a compiled program, one is enough."""
        while self._pending and self._pending[0][0].is_ready():
            self._pending.popleft()
        self._pending.append((result, others) if self.mode == "eager" else (result,))

    def synchronize(self) -> None:
        jax.block_until_ready((list(self._pending), (self.trained, self.state) if self.mode == "eager" else None))
        self._pending.clear()


class _Program:
    """The nodes that some outputs need, as native calls in order.

    Attributes
    ----------
    random : bool
        Whether a node draws random numbers.
    """

    def __init__(self, network: Network, wanted: Sequence[str], context: Context, activations: np.dtype) -> None:
        self._wanted = wanted
        self._activations = activations
        steps = schedule(network, wanted, training=context.training)
        self.random = context.training and any(step.node.op_type == "Dropout" for step in steps)
        self._constants = {name: _constant(context.constants[name], activations) for name in network.constants}
        rounds = activations in _NARROW.values()
        self._steps = []
        scopes = labels(network)
        for step in steps:
            node = step.node
            rounded = [rounds and is_rounded(network, node, i) for i in range(len(node.inputs))]
            self._steps.append((node, OPERATORS[node.op_type](node, context), rounded, step.dead, scopes[node.name]))
        self._training = context.training

    def __call__(self, given: Mapping[str, Any], key: jax.Array | None, scope: Scope) -> tuple[list[Any], ArrayTree]:
        """Return the wanted outputs and, in training mode, the updated running statistics.

        Each node runs in its scope.
        """
        values = {**self._constants, **given, "": None}
        moved: ArrayTree = {}
        for index, (node, call, rounded, dead, name) in enumerate(self._steps):
            with scope(name):
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
            values.update(by_name(node, result))
            for name in dead:
                del values[name]
        return [values[name] for name in self._wanted], moved


def _constant(value: np.ndarray, activations: np.dtype) -> np.ndarray:
    """Copy a constant; cast floating-point values to the activations' type.

    JAX caches the type of an array by the array's identity. If a float32 and a float64 program
    shared an array of integers, it would have 32 bits in both.
    """
    return value.astype(activations) if value.dtype.kind == "f" else value.copy()
