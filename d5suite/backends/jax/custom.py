"""Custom operators through XLA's foreign function interface (FFI), with their gradients.

`custom.cc` wraps a C++ source in two XLA handlers, forward and backward. For a Python operator the
source is `python.cc`, which calls the Python functions. Imports JAX, NumPy, ONNX's type numbers,
`d5suite.custom` and `d5suite.errors`.
"""

from __future__ import annotations

import ctypes
import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import helper

from d5suite.custom import DEFINITIONS, CustomOperator, Glue, compile_library, compile_operator
from d5suite.custom.interface import CCall, require_all_outputs, require_output_shapes
from d5suite.errors import NetworkError

Function = Callable[..., Any]

_registered: dict[str, tuple[Path, list[Any]]] = {}
"""By XLA target: the library and, for a Python operator, its callbacks."""

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(CCall))


def factory(custom: CustomOperator) -> Callable[[Any, Any], Function]:
    """Return a factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If the operator's source does not compile.
    ConfigurationError
        If the source and the operator's description disagree on the outputs' shapes.
    NetworkError
        If not all outputs of the operator are wanted.
    """

    def build(node: Any, context: Any) -> Function:
        require_all_outputs(custom, node)
        name = custom.identifier + ("" if context.device == "cpu" else f"_{context.device}")
        shapes = [context.shapes[output] for output in node.outputs]
        if custom.source is None:  # its callbacks check the outputs' shapes
            name += "".join(f"_{'x'.join(map(str, shape))}" for shape in shapes)
        if name not in _registered:
            _registered[name] = _register(custom, name, context.device, shapes)
        library, functions = _registered[name]
        if custom.source is not None:
            require_output_shapes(library, custom, node, context.shapes, context.dtypes, context.device)
        addresses = [{"function": np.uint64(ctypes.cast(f, ctypes.c_void_p).value or 0)} for f in functions] or [{}, {}]

        def forward(*inputs: Any) -> tuple[Any, ...]:
            results = [
                jax.ShapeDtypeStruct(shape, _native_type(custom, context.dtypes[output]))
                for shape, output in zip(shapes, node.outputs, strict=True)
            ]
            return tuple(jax.ffi.ffi_call(name, results)(*inputs, **addresses[0]))

        def backward(inputs: Any, outputs: Any, heads: Any) -> Any:
            results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs if _is_floating(x)]
            call = jax.ffi.ffi_call(f"{name}_backward", results)
            return call(*inputs, *outputs, *heads, **addresses[1], inputs=np.int64(len(inputs)))

        call = _differentiable(forward, backward) if custom.differentiable else forward
        if len(node.outputs) == 1:
            return lambda *inputs: call(*inputs)[0]
        return call

    return build


def _differentiable(forward: Function, backward: Function) -> Function:
    """Return the forward pass with the backward pass as its gradient."""
    operator = jax.custom_vjp(forward)

    def record(*inputs: Any) -> Any:
        outputs = forward(*inputs)
        return outputs, (inputs, outputs)

    def pull(recorded: Any, gradients: Any) -> tuple[Any, ...]:
        inputs, outputs = recorded
        heads = tuple(
            g if _is_floating(y) else jnp.zeros(y.shape, y.dtype)  # an integer's gradient is float0, which FFI lacks
            for y, g in zip(outputs, gradients, strict=True)
        )
        found = iter(backward(inputs, outputs, heads))
        return tuple(next(found) if _is_floating(x) else None for x in inputs)

    operator.defvjp(record, pull)
    return operator


def _register(
    custom: CustomOperator, name: str, device: str, shapes: Sequence[Sequence[int]]
) -> tuple[Path, list[Any]]:
    path = _compiled(custom, name, device)
    library = ctypes.CDLL(str(path))
    platform = "cpu" if device == "cpu" else "CUDA"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.D5Forward), platform=platform)
    if custom.differentiable:
        jax.ffi.register_ffi_target(f"{name}_backward", jax.ffi.pycapsule(library.D5Backward), platform=platform)
    return path, [] if custom.source is not None else _functions(custom, shapes)


def _compiled(custom: CustomOperator, name: str, device: str) -> Path:
    glue = Glue(
        source=Path(__file__).with_name("custom.cc"),
        version=f"jax {jax.__version__}, jaxlib {jax.lib.__version__}",
        compile_flags=("-isystem", jax.ffi.include_dir()),
        definitions=DEFINITIONS[device] + ((("D5_PYTHON", "1"),) if custom.source is None else ()),
    )
    if custom.source is not None:
        return compile_operator(custom, device=device, glue=glue, identifier=name)
    if device != "cpu":
        raise NetworkError("a Python operator runs on the CPU only", where=custom.name)
    return compile_library(custom.name, Path(__file__).with_name("python.cc"), glue=glue)


def _functions(custom: CustomOperator, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Return both passes as C functions, which the caller must keep while they may be called.

    JAX's own callbacks convert their arguments to JAX arrays first, which can deadlock: it may need
    the thread that waits for the callback.
    """

    def forward(call: Any) -> None:
        outputs = [_array(output) for output in call.outputs[: call.output_count]]
        inputs = _arrays(call.inputs, call.input_count)
        for output, value in zip(outputs, custom.call_forward(inputs, shapes, [y.dtype for y in outputs]), strict=True):
            output[...] = value

    def backward(call: Any) -> None:
        inputs, outputs = _arrays(call.inputs, call.input_count), _arrays(call.outputs, call.output_count)
        heads = _arrays(call.output_gradients, call.output_count)
        found = custom.call_backward(inputs, outputs, heads)
        for tensor, value in zip(call.input_gradients[: call.input_count], found, strict=True):
            if tensor.data:
                _array(tensor)[...] = value

    return [_FUNCTION(partial(_guarded, function)) for function in (forward, backward)]


def _guarded(function: Function, call: Any) -> int:
    """Return D5_OK, or print the exception and return D5_FAILED: XLA propagates no exceptions."""
    try:
        function(call.contents)
    except Exception:
        traceback.print_exc()
        return 3
    return 0


def _arrays(tensors: Any, count: int) -> tuple[np.ndarray, ...]:
    """Return tensors as read-only arrays."""
    arrays = tuple(_array(tensor) for tensor in tensors[:count])
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _array(tensor: Any) -> np.ndarray:
    """Return a view of a tensor's memory."""
    shape, dtype = tensor.shape[: tensor.rank], np.dtype(helper.tensor_dtype_to_np_dtype(tensor.dtype))
    size = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(tensor.data) if size else None)


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _native_type(custom: CustomOperator, dtype: Any) -> np.dtype:
    """Return an output's type; raise `NetworkError` if JAX would store it in fewer bits.

    The operator writes all bits of the type.
    """
    native: np.dtype = jax.dtypes.canonicalize_dtype(dtype)
    if native != dtype:
        raise NetworkError(f"an output of {dtype} needs JAX's 64-bit types", where=custom.name)
    return native
