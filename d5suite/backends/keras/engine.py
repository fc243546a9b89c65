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
"""Takes the backend's tensors; returns a tensor, or a tuple of tensors and None."""


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
    """Return what opens a named scope while a function is traced; None on PyTorch, which does not.

    A scope names operations and costs nothing when they run.
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


class Engine:
    """Runs one operator on its Keras backend, compiled where Keras compiles, and differentiates it.

    Parameters
    ----------
    call : callable
        The pure function from the flat list of the operator's tensors to a tuple of all outputs.
    eager : callable
        The same function for a backend that runs one operator at a time and does not modify its
        weights.
    mode, device : str
    exact : bool
        Whether the operator computes in float64.
    compiled : bool
        Whether Keras would have TensorFlow use XLA.

    Attributes
    ----------
    forward : callable
        `call` or `eager`, as measured.
    """

    forward: Call

    def __init__(self, call: Call, eager: Call, *, mode: str, device: str, exact: bool, compiled: bool) -> None:
        self.device, self.exact = device, exact
        self._scope = lambda: scope(mode, device, exact=exact)
        self._call, self._eager, self._compiled = call, eager, compiled
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

    def synchronize(self, results: Sequence[Any]) -> None:
        """Wait for the device; ``results`` is the last call's result."""
        raise NotImplementedError

    def extent(self, value: Any) -> tuple[int, int] | None:
        """See `d5suite.levels.operator.Operator.extent`."""
        raise NotImplementedError


def _chosen(outputs: Any, heads: Sequence[int]) -> list[Any]:
    """Return some outputs of a call, which returns a tuple if it has several."""
    return [outputs[index] if isinstance(outputs, tuple) else outputs for index in heads]


class _TensorFlow(Engine):
    def _prepare(self) -> None:
        import tensorflow as tf

        # The scope is inside: a function is traced again under another device.
        self.forward = tf.function(self._scoped(self._call), autograph=False, jit_compile=self._compiled)

    def backward(self, inputs: Sequence[Any], sources: Sequence[int], heads: Sequence[int]) -> Call:
        import tensorflow as tf

        by = [inputs[index] for index in sources]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(by)
            of = _chosen(self.forward(*inputs), heads)
        gradient, zero = tape.gradient, tf.UnconnectedGradients.ZERO
        found = gradient(of, by, [tf.zeros_like(y) for y in of], unconnected_gradients=zero)
        if any(isinstance(each, tf.IndexedSlices) for each in found):  # the scatter is part of the gradient
            dense = tf.convert_to_tensor
            return lambda *gradients: [dense(g) for g in gradient(of, by, gradients, unconnected_gradients=zero)]
        return lambda *gradients: gradient(of, by, gradients, unconnected_gradients=zero)

    def synchronize(self, results: Sequence[Any]) -> None:
        import tensorflow as tf

        # On the CPU, TensorFlow's functions return when they are done, unless execution is
        # asynchronous.
        if self.device != "cpu" or not tf.config.experimental.get_synchronous_execution():
            tf.test.experimental.sync_devices()

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

    def synchronize(self, results: Sequence[Any]) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

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

    def synchronize(self, results: Sequence[Any]) -> None:
        import jax

        jax.block_until_ready(results)  # calls run in order, and JAX can wait for nothing else

    def extent(self, value: Any) -> tuple[int, int] | None:
        import jax

        return (value.unsafe_buffer_pointer(), value.nbytes) if isinstance(value, jax.Array) else None


ENGINES: dict[str, type[Engine]] = {"tensorflow": _TensorFlow, "torch": _Torch, "jax": _Jax}
"""Engines by Keras's backend."""
