"""Level 0: one ONNX node, in Keras.

Imports Keras, NumPy, `d5suite.levels`, `d5suite.network`, this package and `engine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.backends.keras.engine import ENGINES, scope
from d5suite.backends.keras.operators.context import Context, Function, require_backend
from d5suite.backends.keras.operators.table import OPERATORS
from d5suite.levels import operator as level
from d5suite.levels.layouts import arranged
from d5suite.network.operation import Operation, is_floating

_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4), "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2),
    "GroupNormalization": (1, 2), "LayerNormalization": (1, 2), "RMSNormalization": (1,),
}  # fmt: skip
"""Inputs that are variables of a Keras layer."""


class Operator(level.Operator):
    """One ONNX node in Keras: a layer, or a function of `keras.ops`.

    On PyTorch, where Keras compiles nothing, a layer computes with its variables. A call with a new
    feed loads the weights of that feed into the variables.
    """

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        require_backend(mode)
        self._exact = any(dtype == np.float64 for dtype in operation.dtypes.values())
        # For each native input: the node's input, the number of its part, and the model's variable
        # or symbolic tensor that takes it.
        self._places: list[tuple[str, int | None, Any]] = []
        self._others: list[Any] = []  # a model's other variables: random states
        self._result_shapes: dict[str, Any] = {}  # of a layer's outputs
        with self._scope():
            context = self._context()
            made = OPERATORS[operation.node.op_type](operation.node, context)
            self._layouts, self.packing = context.layouts, context.packing
            results = made if isinstance(made, tuple) else (made,)
            if any(isinstance(result, keras.KerasTensor) for result in results):
                shapes = zip(operation.node.outputs, results, strict=False)
                self._result_shapes = {name: tuple(result.shape) for name, result in shapes if result is not None}
                model, call, eager = self._model(context, made)
                eager = self._with_weights(eager) if mode == "torch" else eager
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
        weights = [node.inputs[i] for i in _WEIGHTS.get(node.op_type, ()) if i < len(node.inputs) and node.inputs[i]]
        weights = [name for name in weights if name not in operation.constants]
        floating = [operation.dtypes[name] for name in operation.dtypes if is_floating(operation.dtypes[name])]
        policy = str(floating[0]) if floating else "float32"
        context = Context.of_operation(
            operation,
            weights={name: np.zeros(operation.shapes[name]) for name in weights},
            uses=Counter(node.inputs),
            policy=policy,
            wide_policy="float64" if policy == "float64" else "float32",
            backend=self.mode,
        )
        for name in node.inputs:
            if name and name not in (*context.constants, *context.weights):
                context.tensors[name] = context.input(name)
        return context

    def _model(self, context: Context, made: Any) -> tuple[Any, Function, Function]:
        """Return a functional model and two calls: with weights as arguments, and with its own."""
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
        model.trainable = False  # PyTorch records nothing unless asked to
        self._others = [v for v in model.variables if all(v is not target for target in targets)]
        held = [(i, target) for i, target in enumerate([*targets, *self._others]) if i not in data]
        training = self.operation.training

        def eager(*inputs: Any) -> Any:
            results = model([inputs[i] for i in data], training=training)
            if not several:
                return results
            found = iter([results] if sum(wanted) == 1 else results)  # a model returns a single output bare
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

    def _with_weights(self, eager: Function) -> Function:
        """Return a call that points the layer's variables to the weights it is given."""
        variables = [(i, target) for i, (_, _, target) in enumerate(self._places) if isinstance(target, keras.Variable)]
        if not variables:
            return eager
        (first, _), *_ = variables
        moves, held = self.operation.training, None  # a layer in training overwrites its statistics

        def call(*inputs: Any) -> Any:
            nonlocal held
            if inputs[first] is not held:
                held = inputs[first]
                for index, variable in variables:
                    weight = inputs[index].to(variable.value.dtype)
                    variable.value.data = weight.clone() if moves else weight
            return eager(*inputs)

        return call

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        self.check_feed(arrays)
        given = {
            name: self._stored(name, array)
            for name, array in zip(self.operation.node.inputs, arrays, strict=True)
            if array is not None
        }
        fed: list[Any] = []
        with self._scope():
            for name, part, _ in self._places:
                fed.append(self._native(given[name] if part is None else given[name][part]) if name else None)
            return [*fed, *(variable.value for variable in self._others)]

    def to_native(self, name: str, array: np.ndarray) -> Any:
        stored = self._stored(name, array)
        with self._scope():
            return self._native(stored.reshape(self._result_shapes.get(name, stored.shape)))

    def _stored(self, name: str, array: np.ndarray) -> np.ndarray:
        if name in self.packing:
            array = self.packing[name].pack(array)
        return np.array(arranged(array, self._layouts.get(name)), order="C")

    def _native(self, array: np.ndarray) -> Any:
        dtype = str(array.dtype)
        if self.mode == "jax" and not self._exact:
            dtype = {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)  # JAX has no 64-bit integers
        if self.mode == "torch" and dtype == "uint64":
            dtype = "int64"  # as Keras does with uint32
        return ops.convert_to_tensor(array, dtype=dtype)

    def to_neutral(self, name: str, value: Any) -> np.ndarray:
        operation = self.operation
        with self._scope():
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
            fetched.append(self.to_neutral(name, self.packing[name].unpack(whole) if name in self.packing else whole))
        return fetched

    def _sources(self) -> list[int]:
        """Return the numbers of the native inputs that have a gradient."""
        names = [self.operation.node.inputs[index] for index in self.operation.differentiable]
        return [i for i, (name, _, _) in enumerate(self._places) if name in names]

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._engine.backward(inputs, self._sources(), self.operation.differentiated)

    def extent(self, value: Any) -> tuple[int, int] | None:
        return self._engine.extent(value)

    def synchronize(self, *results: Any) -> None:
        self._engine.synchronize(results)


def _array(value: Any) -> np.ndarray:
    """Return a tensor as a NumPy array."""
    if isinstance(value, np.ndarray) or len(value.shape):
        return np.asarray(ops.convert_to_numpy(value))
    # TensorFlow converts bfloat16 scalars to Python numbers.
    return np.asarray(ops.convert_to_numpy(ops.reshape(value, (1,)))).reshape(())
