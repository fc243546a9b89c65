"""Level 1 in Keras: a network as functional models over one graph of layers.

Layers and models are the same on every Keras backend. Keras has no gradients of its own and leaves
compilation to the caller, so one small class per backend does both. Imports Keras, the chosen
backend late, NumPy, `d5suite.levels`, `d5suite.network` and this adapter's `engine` and
`operators`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from d5suite.backends.keras.engine import scope, synchronizer, traced_scope
from d5suite.backends.keras.operators import OPERATORS, Calculation, Context, require_backend
from d5suite.errors import NetworkError
from d5suite.levels.attribution import labels
from d5suite.levels.layouts import LayoutExecutor
from d5suite.levels.network import GRADIENT_SCALE, Arrays, Native
from d5suite.network import Network
from d5suite.network.nodes.layouts import identity
from d5suite.network.nodes.schedule import by_name, check_statistics, schedule
from d5suite.network.operation import is_floating

_POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16", "fp64": "float64"}
"""Dtype policy of the layers by precision."""

_ACTIVATIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Dtype of the images by precision."""


_TRACED_SCOPE: Any = traced_scope(keras.backend.backend())


class ScopedModel(keras.Model):
    """A functional model that runs each node's operations in the node's scope.

    An operation's attribute ``d5suite_scope`` is the name of its scope.

    Attributes
    ----------
    scoped : callable or None
        Opens a scope by name, while the backend traces. On PyTorch, which does not trace, it is
        None except while a profile is taken.
    """

    scoped: ClassVar[Any] = staticmethod(_TRACED_SCOPE)

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda op: op, **settings: Any) -> Any:
        """Run the operations, each in its scope; Keras's own method opens no scopes."""
        scoped = self.scoped
        if scoped is None or "call_fn" in settings:  # the call infers shapes and runs nothing
            return super()._run_through_graph(inputs, operation_fn, **settings)

        def in_scope(operation: Any) -> Any:
            run, name = operation_fn(operation), getattr(operation, "d5suite_scope", None)

            def call(*arguments: Any, **more: Any) -> Any:
                with scoped(name):
                    return run(*arguments, **more)

            return run if name is None else call

        return super()._run_through_graph(inputs, in_scope, **settings)


def _put_in_scope(tensors: Iterable[Any], name: str) -> None:
    """Give the operations that compute symbolic tensors a scope, unless they have one."""
    waiting = list(tensors)
    while waiting:
        operation = waiting.pop()._keras_history.operation
        if not isinstance(operation, keras.layers.InputLayer) and not hasattr(operation, "d5suite_scope"):
            operation.d5suite_scope = name
            waiting += [tensor for node in operation._inbound_nodes for tensor in node.input_tensors]


class LossModel(ScopedModel):
    """A functional model from image and label to the loss, for Keras's own training step.

    A network's loss is one of its nodes and may be any function of its tensors, so the model
    outputs the loss itself.
    """

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the model's output, which is the loss."""
        return y_pred

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Return this batch's loss; Keras's own metric is a float32 mean since the last reset."""
        return {"loss": ops.stop_gradient(y_pred)}


class Executor(LayoutExecutor):
    """A network in Keras; see `d5suite.levels.network.Executor`.

    Attributes
    ----------
    variables : dict of str to keras.Variable
        Parameters and running statistics in their storage layouts.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        check_statistics(network)
        require_backend(mode)
        self._names = (*network.parameters, *network.statistics)
        with self.scope():
            self._build()
            scale = GRADIENT_SCALE if precision == "fp16" else None
            self._engine: _Engine = _ENGINES[mode](self._inference, self._training, self._trained, scale)
            self._wait = synchronizer(mode, device)
        self.load_parameters({name: network.initializers[name] for name in self._names})

    def _build(self) -> None:
        """Build the network's layers and the models over them."""
        network = self.network
        wide = "float64" if self.precision == "fp64" else "float32"
        context = Context.of_network(
            network,
            training=False,  # the call says whether layers train
            activations=self.precision,
            weights={name: network.initializers[name] for name in self._names},
            uses=Counter(name for node in network.nodes for name in node.inputs),
            policy=_POLICIES[self.precision],
            wide_policy=wide,
            backend=self.mode,
            xla=self.mode == "jax" or (self.mode == "tensorflow" and self.device == "cuda"),
        )
        for name in network.inputs:
            rank = len(network.shapes[name])
            context.layouts[name] = context.image_layout(rank) if rank > 2 else identity(rank)
        inputs = [_input(context, name, self._input_type(name)) for name in network.inputs]
        data = list(inputs)
        context.anchor = data[0]
        if network.label is not None:
            inputs.append(_input(context, network.label, self._input_type(network.label)))
        losses = [] if network.loss is None else [network.loss]
        scopes = labels(network)
        for wanted in (network.outputs, losses):
            for step in schedule(network, wanted, training=wanted is losses):
                if any(name and name not in context.tensors for name in step.node.outputs):
                    made = by_name(step.node, OPERATORS[step.node.op_type](step.node, context))
                    _put_in_scope(made.values(), scopes[step.node.name])
                    context.tensors.update(made)
        self.variables = {name: context.variable(name) for name in self._names}
        self._trained = [self.variables[name] for name in network.parameters]
        self._layouts = context.layouts
        found = [context.tensors[name] for name in network.outputs]
        self._inference = ScopedModel(data, found if len(found) > 1 else found[0])
        self._training = None
        if network.loss is not None:
            self._graph = inputs, context.tensors[network.loss]
            self._training = self.loss_model()
            used = {id(variable) for variable in self._training.trainable_variables}
            unused = [variable for variable in self._trained if id(variable) not in used]
            if unused:
                self._graph = inputs, _with_zero_gradients(self._graph[1], unused, wide)
                self._training = self.loss_model()

    def loss_model(self) -> LossModel:
        """Return a new loss model over the executor's layers, to compile with an optimizer."""
        return LossModel(*self._graph)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which layers are built and run; see `engine.scope`."""
        return scope(self.mode, self.device, exact=self.precision == "fp64")

    def hold(self, give_back: Callable[[], None] | None) -> None:
        """Let a trainer hold the variables' values until they are read; None gets them back now."""
        self._engine.hold(give_back)

    def _input_type(self, name: str) -> str:
        """Return the type of an input; indices are int32, which every backend has."""
        dtype = self.network.dtypes[name]
        return _ACTIVATIONS[self.precision] if is_floating(dtype) else "int32" if dtype == np.int64 else str(dtype)

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        fed = {}
        with self.scope():
            for name, array in arrays.items():
                wanted = self._input_type(name)
                dtype = self.array_type if is_floating(self.network.dtypes[name]) else wanted
                value = np.array(self.stored(name, np.asarray(array)), dtype, order="C")
                fed[name] = ops.convert_to_tensor(value, dtype=wanted)
        return fed

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        with self.scope():
            arrays = {name: ops.convert_to_numpy(ops.stop_gradient(value)) for name, value in values.items()}
        return {name: np.array(self.restored(name, array), self.array_type) for name, array in arrays.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        self.hold(None)
        return self.fetch({name: variable.value for name, variable in self.variables.items()})

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        self.hold(None)
        with self.scope():
            for name, value in values.items():
                self.variables[name].assign(np.array(self.stored(name, np.asarray(value)), self.array_type, order="C"))

    def random_state(self) -> dict[str, np.ndarray]:
        self.hold(None)
        with self.scope():
            return self._engine.random_state(self.device) if self.drops else {}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        with self.scope():
            self._engine.load_random_state(values)

    def forward(self, feed: Native) -> Native:
        with self.scope():
            found = self._engine.forward([feed[name] for name in self.network.inputs])
        outputs = self.network.outputs
        return dict(zip(outputs, found if len(outputs) > 1 else [found], strict=True))

    def forward_backward(self, feed: Native) -> Native:
        return self.loss_and_gradients(feed)

    def loss_and_gradients(self, feed: Native, scale: Any = None) -> Native:
        """Return the loss and its gradients; with a scale, the gradients of the scaled loss."""
        label, loss_name = self.network.require_loss()
        with self.scope():
            loss, gradients = self._engine.forward_backward(
                [feed[name] for name in (*self.network.inputs, label)], scale
            )
        return {loss_name: loss, **dict(zip(self.network.parameters, gradients, strict=True))}

    def traced(self, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Return the loss and its gradients, for a TensorFlow function that traces this call."""
        found: tuple[Any, list[Any]] = self._engine.traced(*inputs)
        return found

    def pending(self, values: Any) -> None:
        """Add results for `synchronize` to wait for."""
        self._engine.pending["step"] = values

    def synchronize(self) -> None:
        self._wait(self._engine.pending)


def _input(context: Context, name: str, dtype: str) -> Any:
    stored = context.stored(name)
    if stored is None:
        raise NetworkError(f"the shape of input {name!r} is not fixed", where=name)
    context.tensors[name] = keras.Input(batch_shape=stored, dtype=dtype)
    return context.tensors[name]


def _with_zero_gradients(loss: Any, unused: list[Any], policy: str) -> Any:
    """Return the loss plus 0 times unused parameters, so that the optimizer decays these too."""
    layer = Calculation(
        lambda loss, *parameters: loss + sum(ops.sum(p) * 0 for p in parameters), [..., *unused], (), dtype=policy
    )
    return layer(loss)


class _Engine:
    """Compiles and differentiates models on one Keras backend.

    Parameters
    ----------
    inference, training : keras.Model
    trained : list of keras.Variable
    scale : float or None
        Factor by which the loss is multiplied before, and its gradients divided after, the backward
        pass.
    """

    def __init__(self, inference: Any, training: Any, trained: list[Any], scale: float | None) -> None:
        self.inference, self.training, self.trained, self.scale = inference, training, trained, scale
        self.pending: dict[str, Any] = {}

    def hold(self, give_back: Callable[[], None] | None) -> None:
        """Do nothing: variables that change in place are always up to date."""

    def forward(self, inputs: list[Any]) -> Any:
        raise NotImplementedError

    def forward_backward(self, inputs: list[Any], scale: Any) -> tuple[Any, list[Any]]:
        """Return the loss and its gradients; with a scale, the gradients of the scaled loss."""
        raise NotImplementedError

    def traced(self, *inputs: Any) -> tuple[Any, list[Any]]:
        """See `Executor.traced`."""
        raise NotImplementedError

    def unscaled(self, gradients: list[Any]) -> list[Any]:
        """Divide gradients by `scale`."""
        return gradients if self.scale is None else [ops.divide(gradient, self.scale) for gradient in gradients]

    def _generators(self) -> dict[str, Any]:
        """Return the random states of the Dropout layers, by layer."""
        layers = [layer for layer in self.training.layers if isinstance(layer, keras.layers.Dropout)]
        return {layer.name: layer.seed_generator.state for layer in layers}

    def random_state(self, device: str) -> dict[str, np.ndarray]:
        return {name: np.array(ops.convert_to_numpy(state.value)) for name, state in self._generators().items()}

    def load_random_state(self, values: Arrays) -> None:
        states = self._generators() if values else {}
        for name, value in values.items():
            states[name].assign(np.array(value))  # JAX keeps aligned arrays


def _times(loss: Any, scale: Any) -> Any:
    return loss if scale is None else loss * scale


class _TensorFlow(_Engine):
    def __init__(self, inference: Any, training: Any, trained: list[Any], scale: float | None) -> None:
        import tensorflow as tf

        super().__init__(inference, training, trained, scale)

        def scaled_gradients(scale: Any, *inputs: Any) -> tuple[Any, list[Any]]:
            with tf.GradientTape() as tape:
                loss = training(list(inputs), training=True)
                scaled = _times(loss, scale)
            values = [variable.value for variable in trained]
            return loss, tape.gradient(scaled, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)

        self._scaled = scaled_gradients
        self._forward = tf.function(
            lambda inputs: inference(inputs, training=False), autograph=False, jit_compile=inference.jit_compile
        )
        if training is not None:
            self._gradient, self._scaled_gradient = (
                tf.function(function, autograph=False, jit_compile=training.jit_compile)
                for function in (self.traced, scaled_gradients)
            )

    def traced(self, *inputs: Any) -> tuple[Any, list[Any]]:
        loss, gradients = self._scaled(self.scale, *inputs)
        return loss, self.unscaled(gradients)

    def forward(self, inputs: list[Any]) -> Any:
        return self._forward(inputs)

    def forward_backward(self, inputs: list[Any], scale: Any) -> tuple[Any, list[Any]]:
        return self._gradient(*inputs) if scale is None else self._scaled_gradient(scale, *inputs)


class _Torch(_Engine):
    def forward(self, inputs: list[Any]) -> Any:
        import torch

        with torch.no_grad():
            return self.inference(inputs, training=False)

    def forward_backward(self, inputs: list[Any], scale: Any) -> tuple[Any, list[Any]]:
        import torch

        loss = self.training(inputs, training=True)
        scaled = _times(loss, self.scale if scale is None else scale)
        values = [variable.value for variable in self.trained]
        gradients = list(torch.autograd.grad(scaled, values, materialize_grads=True) if values else ())
        if scale is None and self.scale is not None and gradients:
            gradients = list(torch._foreach_div(gradients, self.scale))
        return loss.detach(), gradients

    # On PyTorch, Keras's Dropout draws from PyTorch's process-wide generator, not from its own.

    def random_state(self, device: str) -> dict[str, np.ndarray]:
        import torch

        state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
        return {device: state.numpy().copy()}

    def load_random_state(self, values: Arrays) -> None:
        import torch

        load = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
        for device, value in values.items():
            load[device](torch.tensor(value, device="cpu"))


class _Jax(_Engine):
    def __init__(self, inference: Any, training: Any, trained: list[Any], scale: float | None) -> None:
        import jax

        super().__init__(inference, training, trained, scale)
        self._give_back: Callable[[], None] | None = None
        self._inference_variables = inference.trainable_variables, inference.non_trainable_variables

        def forward(parameters: list[Any], others: list[Any], inputs: list[Any]) -> Any:
            return inference.stateless_call(parameters, others, inputs, training=False)[0]

        self._forward = jax.jit(forward)
        if training is not None:
            variables = training.trainable_variables
            self._training_variables = variables, training.non_trainable_variables
            places = {id(variable): i for i, variable in enumerate(variables)}
            order = [places[id(variable)] for variable in trained]

            def scaled_loss(parameters: list[Any], others: list[Any], inputs: list[Any], scale: Any) -> tuple[Any, Any]:
                loss, moved = training.stateless_call(parameters, others, inputs, training=True)
                return _times(loss, scale), (loss, moved)

            def scaled_gradients(scale: Any, *arguments: Any) -> tuple[Any, list[Any], list[Any]]:
                (_, (loss, moved)), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(*arguments, scale)
                return loss, [gradients[i] for i in order], moved

            def loss_and_gradients(*arguments: Any) -> tuple[Any, list[Any], list[Any]]:
                loss, gradients, moved = scaled_gradients(self.scale, *arguments)
                return loss, self.unscaled(gradients), moved

            self._gradient, self._scaled_gradient = jax.jit(loss_and_gradients), jax.jit(scaled_gradients)

    def hold(self, give_back: Callable[[], None] | None) -> None:
        if self._give_back is not None and give_back is not self._give_back:
            self._give_back()
        self._give_back = give_back

    def forward(self, inputs: list[Any]) -> Any:
        self.hold(None)
        parameters, others = self._inference_variables
        output = self._forward([v.value for v in parameters], [v.value for v in others], inputs)
        self.pending["forward"] = output
        return output

    def forward_backward(self, inputs: list[Any], scale: Any) -> tuple[Any, list[Any]]:
        self.hold(None)
        parameters, others = self._training_variables
        arguments = [v.value for v in parameters], [v.value for v in others], inputs
        loss, gradients, moved = (
            self._gradient(*arguments) if scale is None else self._scaled_gradient(scale, *arguments)
        )
        for variable, value in zip(others, moved, strict=True):
            variable.assign(value)
        self.pending["gradient"] = loss, gradients  # not `moved`: a training step may donate it
        return loss, gradients


_ENGINES = {"tensorflow": _TensorFlow, "torch": _Torch, "jax": _Jax}
