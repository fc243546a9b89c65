"""Custom operators through XLA's foreign function interface, differentiable where they have a backward pass.

`custom.cc` makes a C++ source a pair of XLA's handlers; a Python operator's source is `python.cc`, which calls back.
Imports JAX, NumPy, ONNX's numbers of types, `d5suite.custom` and `d5suite.errors`.
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

from d5suite.custom import CustomOperator, Glue, compile_library
from d5suite.custom.interface import MAX_RANK, Call, Tensor
from d5suite.errors import NetworkError

Function = Callable[..., Any]

_registered: dict[str, tuple[ctypes.CDLL, list[Any]]] = {}


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Call))


def factory(custom: CustomOperator) -> Callable[[Any, Any], Function]:
    """A factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If its source does not compile.
    NetworkError
        If not all its outputs are wanted.
    """

    def build(node: Any, context: Any) -> Function:
        if not all(node.outputs) or len(node.outputs) != len(custom.outputs):
            raise NetworkError("every output of a custom operator must be wanted", where=custom.name)
        name = custom.identifier + ("" if context.device == "cpu" else f"_{context.device}")
        if name not in _registered:
            _registered[name] = _register(custom, name, context.device)
        library, functions = _registered[name]
        addresses = [{"function": np.uint64(ctypes.cast(f, ctypes.c_void_p).value or 0)} for f in functions] or [{}, {}]

        def forward(*inputs: Any) -> tuple[Any, ...]:
            if custom.source is not None:
                shapes = _output_shapes(custom, library, inputs)
            else:
                shapes = [context.shapes[output] for output in node.outputs]
            results = [
                jax.ShapeDtypeStruct(shape, _native_type(custom, context.dtypes[output]))
                for shape, output in zip(shapes, node.outputs, strict=True)
            ]
            return tuple(jax.ffi.ffi_call(name, results)(*inputs, **addresses[0]))

        def backward(inputs: Any, outputs: Any, heads: Any) -> Any:
            results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs if _is_floating(x)]
            return jax.ffi.ffi_call(f"{name}_backward", results)(*inputs, *outputs, *heads, **addresses[1])

        call = _differentiable(forward, backward) if custom.differentiable else forward
        if len(node.outputs) == 1:
            return lambda *inputs: call(*inputs)[0]
        return call

    return build


def _differentiable(forward: Function, backward: Function) -> Function:
    """The forward pass with the other as its gradient."""
    operator = jax.custom_vjp(forward)

    def record(*inputs: Any) -> Any:
        outputs = forward(*inputs)
        return outputs, (inputs, outputs)

    def pull(recorded: Any, gradients: Any) -> tuple[Any, ...]:
        inputs, outputs = recorded
        heads = tuple(
            g if _is_floating(y) else jnp.zeros(y.shape, y.dtype)  # an integer's gradient has no type of its own
            for y, g in zip(outputs, gradients, strict=True)
        )
        found = iter(backward(inputs, outputs, heads))
        return tuple(next(found) if _is_floating(x) else None for x in inputs)

    operator.defvjp(record, pull)
    return operator


def _register(custom: CustomOperator, name: str, device: str) -> tuple[ctypes.CDLL, list[Any]]:
    """The library, and the functions that it calls if the operator is a Python operator."""
    library = ctypes.CDLL(str(_compiled(custom, name, device)))
    platform = "cpu" if device == "cpu" else "CUDA"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.D5Forward), platform=platform)
    if custom.differentiable:
        jax.ffi.register_ffi_target(f"{name}_backward", jax.ffi.pycapsule(library.D5Backward), platform=platform)
    return library, [] if custom.source is not None else _functions(custom)


def _compiled(custom: CustomOperator, name: str, device: str) -> Path:
    definitions = {
        "D5_INPUTS": str(len(custom.inputs)),
        "D5_OUTPUTS": str(len(custom.outputs)),
        **({"D5_HAS_BACKWARD": "1"} if custom.differentiable else {}),
        **({"D5_CUDA": "1"} if device == "cuda" else {}),
        **({"D5_PYTHON": "1"} if custom.source is None else {}),
    }
    glue = Glue(
        source=Path(__file__).with_name("custom.cc"),
        compile_flags=("-isystem", jax.ffi.include_dir()),
        definitions=tuple(definitions.items()),
    )
    if custom.source is not None:
        return compile_library(
            custom.name, custom.code(device), glue=glue, identifier=name, attributes=custom.attributes,
            flags=custom.flags,
        )  # fmt: skip
    if device != "cpu":
        raise NetworkError("its Python functions are called for arrays in the CPU's memory only", where=custom.name)
    return compile_library(custom.name, Path(__file__).with_name("python.cc"), glue=glue)


def _output_shapes(custom: CustomOperator, library: ctypes.CDLL, inputs: Sequence[Any]) -> list[tuple[int, ...]]:
    """The outputs' shapes, which the source tells from the inputs'."""
    described = (Tensor * len(inputs))(
        *(
            Tensor(None, (ctypes.c_int64 * x.ndim)(*x.shape), x.ndim, helper.np_dtype_to_tensor_dtype(x.dtype))
            for x in inputs
        )
    )
    call = Call(inputs=described, input_count=len(inputs), output_count=len(custom.outputs))
    call.attributes = ctypes.addressof(ctypes.c_char.in_dll(library, "d5_attributes"))
    call.attribute_count = ctypes.c_int32.in_dll(library, "d5_attribute_count").value
    shapes = []
    for index in range(len(custom.outputs)):
        shape, rank = (ctypes.c_int64 * MAX_RANK)(), ctypes.c_int32()
        code = library.d5_output_shape(ctypes.byref(call), ctypes.c_int32(index), shape, ctypes.byref(rank))
        if code:
            raise NetworkError(f"the shape of output {index} failed with code {code}", where=custom.name)
        shapes.append(tuple(shape[: rank.value]))
    return shapes


def _functions(custom: CustomOperator) -> list[Any]:
    """Both directions as C functions, which must be kept as long as they may be called.

    JAX's own callbacks bring their arguments to JAX first, for which they may need the thread that waits for them.
    """
    run, run_backward = custom.forward, custom.backward
    assert run is not None  # a custom operator has either a source or this

    def forward(call: Any) -> None:
        found = run(*_arrays(call.inputs, call.input_count), **custom.attributes)
        outputs = call.outputs[: call.output_count]
        for output, value in zip(outputs, found if isinstance(found, tuple) else (found,), strict=True):
            _write(output, value)

    def backward(call: Any) -> None:
        assert run_backward is not None  # only called if it is differentiable
        inputs, outputs = _arrays(call.inputs, call.input_count), _arrays(call.outputs, call.output_count)
        heads = _arrays(call.output_gradients, call.output_count)
        found = run_backward(inputs, outputs, heads, **custom.attributes)
        for tensor, value in zip(call.input_gradients[: call.input_count], found, strict=True):
            if tensor.data:
                _write(tensor, np.zeros(()) if value is None else value)

    return [_FUNCTION(partial(_guarded, function)) for function in (forward, backward)]


def _guarded(function: Function, call: Any) -> int:
    """D5_OK, or D5_FAILED with the exception on standard error: none can pass through XLA."""
    try:
        function(call.contents)
    except Exception:
        traceback.print_exc()
        return 3
    return 0


def _arrays(tensors: Any, count: int) -> tuple[np.ndarray, ...]:
    """Tensors to be read."""
    arrays = tuple(_array(tensor) for tensor in tensors[:count])
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _array(tensor: Any) -> np.ndarray:
    """The memory of a tensor."""
    shape, dtype = tensor.shape[: tensor.rank], np.dtype(helper.tensor_dtype_to_np_dtype(tensor.dtype))
    size = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(tensor.data) if size else None)


def _write(tensor: Any, value: Any) -> None:
    array, value = _array(tensor), np.asarray(value)
    if value.shape not in (array.shape, ()):
        raise ValueError(f"the result has shape {value.shape}, not {array.shape}")
    array[...] = value


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _native_type(custom: CustomOperator, dtype: Any) -> np.dtype:
    """The type of an output, refused if it would be shortened: the operator writes the whole."""
    native: np.dtype = jax.dtypes.canonicalize_dtype(dtype)
    if native != dtype:
        raise NetworkError(f"an output of {dtype} needs JAX's 64-bit types", where=custom.name)
    return native
