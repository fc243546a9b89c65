"""The parts that Keras leaves to its backends: devices, float64, compilation and gradients.

Imports Keras, NumPy and, late, the chosen backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

Call = Callable[..., Any]
"""Takes the backend's tensors; returns a tensor, or a tuple in which unwanted ones are None."""


@contextlib.contextmanager
def scope(mode: str, device: str, *, exact: bool) -> Iterator[None]:
    """Select the device and, if exact, float64, while layers are built and run."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.device(_device(mode, device)))
        if exact:
            stack.enter_context(_float64())
            if mode == "jax":
                stack.enter_context(_jax_float64())
        yield


def _device(mode: str, device: str) -> str:
    """Return Keras's name for a device.

    PyTorch treats a numbered CPU as another device, to which it would copy everything.
    """
    if device == "cpu":
        return "cpu" if mode == "torch" else "cpu:0"
    return "gpu:0"


def traced_scope(mode: str) -> Callable[[str], contextlib.AbstractContextManager[Any]] | None:
    """Return the function that opens a named scope during tracing; None on PyTorch.

    PyTorch does not trace. A scope names operations and costs nothing when they run.
    """
    if mode == "tensorflow":
        import tensorflow as tf

        return tf.name_scope
    if mode == "jax":
        import jax

        return jax.named_scope
    return None


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """Make float64 Keras's default type, and keep it in type promotion.

    On PyTorch and JAX, half of Keras's operations turn float64 into float32 (`keras.ops.matmul`,
    `mean`, `tanh`), by a table without a public switch (Keras 3.15).
    """
    from keras.src.backend.common import dtypes

    before, promoted = keras.config.floatx(), dtypes.BIT64_TO_BIT32_DTYPE["float64"]
    keras.config.set_floatx("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = promoted


def _jax_float64() -> Any:
    """Return a context in which JAX has 64-bit types."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before JAX 0.8

    return enable_x64()


def synchronizer(mode: str, device: str) -> Call:
    """Return a function that waits for given results and, on a GPU, for all work before them.

    Calls run in order. JAX can wait for arrays only.
    """
    if mode == "jax":
        import jax

        wait: Call = jax.block_until_ready
        return wait
    if mode == "torch":
        import torch

        return (lambda _: None) if device == "cpu" else lambda _: torch.cuda.synchronize()
    import tensorflow as tf

    # On the CPU, TensorFlow's functions return when they are done, unless they are asynchronous.
    if device == "cpu" and tf.config.experimental.get_synchronous_execution():
        return lambda _: None
    return lambda _: tf.test.experimental.sync_devices()


class Engine:
    """Runs one operator on its Keras backend, compiled where Keras compiles, and differentiates it.

    Parameters
    ----------
    call : callable
        The pure function of the operator's tensors; it returns one output, or a tuple of several.
    eager : callable
        The same function on the layers' own variables, for PyTorch's forward pass, which Keras does
        not compile.
    mode, device : str
    exact : bool
        Whether the operator computes in float64.
    compiled : bool
        Whether Keras would have TensorFlow compile the operator by XLA.

    Attributes
    ----------
    forward : callable
        The function to time, made of `call` or `eager`.
    synchronize : callable
        Waits for the last call's result, which it is given; see `synchronizer`.
    """

    forward: Call

    def __init__(self, call: Call, eager: Call, *, mode: str, device: str, exact: bool, compiled: bool) -> None:
        self.device, self.exact = device, exact
        self._scope = lambda: scope(mode, device, exact=exact)
        self._call, self._eager, self._compiled = call, eager, compiled
        self.synchronize = synchronizer(mode, device)
        self._prepare()

    def _scoped(self, call: Call) -> Call:
        def run(*inputs: Any) -> Any:
            with self._scope():
                return call(*inputs)

        return run

    def _prepare(self) -> None:
        raise NotImplementedError

    def backward(self, inputs: Sequence[Any], sources: Sequence[int], heads: Sequence[int]) -> Call:
        """Record a forward pass; return a function that takes and returns gradients.

        It maps gradients of the outputs ``heads`` to gradients of the inputs ``sources``.
        """
        raise NotImplementedError

    def extent(self, value: Any) -> tuple[int, int] | None:
        """See `d5suite.levels.operator.Operator.extent`."""
        raise NotImplementedError


def _chosen(outputs: Any, heads: Sequence[int]) -> list[Any]:
    """Return the outputs ``heads`` of a call, which returns a tuple if it has several."""
    return [outputs[index] if isinstance(outputs, tuple) else outputs for index in heads]


class _TensorFlow(Engine):
    def _prepare(self) -> None:
        # The scope is inside: a function is traced again under another device.
        self.forward = self._traced(self._scoped(self._call))
        self._recorders: dict[tuple[Any, ...], Callable[[list[Any]], Call]] = {}

    def _traced(self, call: Call) -> Call:
        import tensorflow as tf

        return tf.function(call, autograph=False, jit_compile=self._compiled)

    def backward(self, inputs: Sequence[Any], sources: Sequence[int], heads: Sequence[int]) -> Call:
        import tensorflow as tf

        kinds = tuple((value.dtype, *value.shape) if tf.is_tensor(value) else None for value in inputs)
        key = (kinds, tuple(sources), tuple(heads))
        if key not in self._recorders:  # tracing takes a tenth of a second
            self._recorders[key] = self._traced_backward(inputs, sources, heads)
        return self._recorders[key]([value for value in inputs if tf.is_tensor(value)])

    def _traced_backward(
        self, inputs: Sequence[Any], sources: Sequence[int], heads: Sequence[int]
    ) -> Callable[[list[Any]], Call]:
        """Trace both passes as one graph and cut it where the second reads the first's results.

        A persistent tape would have TensorFlow build what second derivatives need, too. The
        returned function runs the first pass on tensors like these, and returns the second pass.
        """
        import tensorflow as tf

        kinds = [tf.TensorSpec(value.shape, value.dtype) for value in inputs if tf.is_tensor(value)]
        first: set[str] = set()

        def both(*values: Any) -> Any:
            rest = iter(values)
            arguments = [next(rest) if tf.is_tensor(value) else value for value in inputs]
            of, by = _chosen(self._call(*arguments), heads), [arguments[index] for index in sources]
            first.update(operation.name for operation in of[0].graph.get_operations())
            above = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in of]
            found = tf.gradients(of, by, above, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return above, [tf.convert_to_tensor(each) for each in found]  # the scatter is part of the gradient

        whole = tf.compat.v1.wrap_function(self._scoped(both), kinds)
        above, found = whole.structured_outputs
        fixed = {tensor.name for tensor in whole.graph.internal_captures}
        needed = {tensor.name: tensor for tensor in found}
        for operation in reversed(whole.graph.get_operations()):
            if operation.name not in first and any(tensor.name in needed for tensor in operation.outputs):
                needed.update((tensor.name, tensor) for tensor in operation.inputs)
        # Constants stay in both halves: kernels read shapes and axes when they are built.
        read = {
            name: tensor
            for name, tensor in needed.items()
            if tensor.op.name in first and tensor.op.type != "Const" and name not in fixed
        }
        names = [tensor.name for tensor in whole.inputs][: len(kinds)]
        made = [tensor for name, tensor in read.items() if name not in names]
        record = self._traced(whole.prune(whole.inputs, made)) if made else lambda *_: ()
        replay = self._traced(whole.prune([*read.values(), *above], found))

        def begin(fed: list[Any]) -> Call:
            fed = [tf.convert_to_tensor(value) for value in fed]  # some are variables
            values = dict(zip(names, fed, strict=True))
            values.update(zip((tensor.name for tensor in made), record(*fed), strict=True))
            kept = [values[name] for name in read]
            return lambda *gradients: replay(*kept, *gradients)

        return begin

    def extent(self, value: Any) -> tuple[int, int] | None:
        import tensorflow as tf

        if self.device != "cpu" or not isinstance(value, tf.Tensor):
            return None
        if value.dtype == tf.bfloat16:  # not a type of Python's buffers
            value = tf.bitcast(value, tf.uint16)
        array = np.asarray(memoryview(value))  # the tensor's own memory
        return array.ctypes.data, array.nbytes


class _Torch(Engine):
    def _prepare(self) -> None:
        from keras.src.backend.torch.core import get_device

        elsewhere = get_device().startswith("cuda") != (self.device == "cuda")
        self.forward = self._scoped(self._eager) if self.exact or elsewhere else self._eager

    def backward(self, inputs: Sequence[Any], sources: Sequence[int], heads: Sequence[int]) -> Call:
        import torch

        leaves = list(inputs)
        for index in sources:
            leaves[index] = inputs[index].detach().requires_grad_()
        by = [leaves[index] for index in sources]
        of = _chosen(self._scoped(self._call)(*leaves), heads)
        gradient = torch.autograd.grad
        return lambda *gradients: gradient(of, by, gradients, retain_graph=True)

    def extent(self, value: Any) -> tuple[int, int] | None:
        import torch

        if not isinstance(value, torch.Tensor):
            return None
        memory = value.untyped_storage()
        return memory.data_ptr(), memory.nbytes()


class _Jax(Engine):
    def _prepare(self) -> None:
        import jax

        def record(by: list[Any], others: list[Any], sources: tuple[int, ...], heads: tuple[int, ...]) -> Any:
            def run(*by: Any) -> list[Any]:
                inputs = list(others)
                for index, value in zip(sources, by, strict=True):
                    inputs[index] = value
                return _chosen(traced(*inputs), heads)

            return jax.vjp(run, *by)

        traced = self._scoped(self._call)
        forward = jax.jit(traced)
        self.forward = self._scoped(forward) if self.exact else forward
        self._record = jax.jit(record, static_argnums=(2, 3))
        self._replay = jax.jit(lambda pullback, gradients: pullback(gradients))

    def backward(self, inputs: Sequence[Any], sources: Sequence[int], heads: Sequence[int]) -> Call:
        others = [None if index in sources else value for index, value in enumerate(inputs)]
        with self._scope():
            _, pullback = self._record([inputs[index] for index in sources], others, tuple(sources), tuple(heads))
        replay = self._replay  # the forward pass's residuals are arguments
        run: Call = lambda *gradients: replay(pullback, list(gradients))  # noqa: E731
        return self._scoped(run) if self.exact else run

    def extent(self, value: Any) -> tuple[int, int] | None:
        import jax

        return (value.unsafe_buffer_pointer(), value.nbytes) if isinstance(value, jax.Array) else None


ENGINES: dict[str, type[Engine]] = {"tensorflow": _TensorFlow, "torch": _Torch, "jax": _Jax}
"""Engines by Keras's backend."""
