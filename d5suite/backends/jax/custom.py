"""Custom operators through XLA's foreign function interface, differentiable where they have a backward pass.

`custom.cc` makes a C++ source a pair of XLA's handlers; a Python operator is a callback. Imports JAX, NumPy,
`d5suite.custom` and `d5suite.errors`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper

from d5suite.custom import CustomOperator, Glue, compile_library
from d5suite.errors import NetworkError

Function = Callable[..., Any]

_MAX_RANK = 8  # D5_MAX_RANK
_libraries: dict[str, ctypes.CDLL] = {}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.POINTER(_Tensor)),
        ("outputs", ctypes.POINTER(_Tensor)),
        ("output_gradients", ctypes.POINTER(_Tensor)),
        ("input_gradients", ctypes.POINTER(_Tensor)),
        ("attributes", ctypes.c_void_p),
        ("input_count", ctypes.c_int32),
        ("output_count", ctypes.c_int32),
        ("attribute_count", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


def factory(custom: CustomOperator) -> Callable[[Any, Any], Function]:
    """A factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If its source does not compile.
    """

    def build(node: Any, context: Any) -> Function:
        names = [*node.outputs, *[""] * (len(custom.outputs) - len(node.outputs))]

        def types(inputs: Sequence[Any]) -> list[np.dtype]:
            return [_native_type(custom, context.dtypes.get(name, inputs[0].dtype)) for name in names]

        if custom.source is not None:
            forward, backward = _from_source(custom, context.device, types)
        else:
            forward, backward = _from_python(custom, [context.shapes.get(name) for name in names], types)
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
    return operator  # type: ignore[no-any-return]


def _from_source(custom: CustomOperator, device: str, types: Function) -> tuple[Function, Function]:
    name = custom.identifier if device == "cpu" else f"{custom.identifier}_{device}"
    if name not in _libraries:
        _libraries[name] = _register(custom, name, device)
    library = _libraries[name]

    def forward(*inputs: Any) -> tuple[Any, ...]:
        shapes = _output_shapes(custom, library, inputs)
        results = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types(inputs), strict=True)]
        return tuple(jax.ffi.ffi_call(name, results)(*inputs))

    def backward(inputs: Any, outputs: Any, heads: Any) -> Any:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs if _is_floating(x)]
        return jax.ffi.ffi_call(f"{name}_backward", results)(*inputs, *outputs, *heads)

    return forward, backward


def _register(custom: CustomOperator, name: str, device: str) -> ctypes.CDLL:
    definitions = {
        "D5_OPERATOR": name,
        "D5_INPUTS": str(len(custom.inputs)),
        "D5_OUTPUTS": str(len(custom.outputs)),
        **({"D5_HAS_BACKWARD": "1"} if custom.differentiable else {}),
        **({"D5_CUDA": "1"} if device == "cuda" else {}),
    }
    glue = Glue(
        source=Path(__file__).with_name("custom.cc"),
        compile_flags=("-isystem", jax.ffi.include_dir()),
        definitions=tuple(definitions.items()),
    )
    path = compile_library(
        custom.name, custom.code(device), glue=glue, attributes=custom.attributes, flags=custom.flags
    )
    library = ctypes.CDLL(str(path))
    platform = "cpu" if device == "cpu" else "CUDA"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.D5Forward), platform=platform)
    if custom.differentiable:
        jax.ffi.register_ffi_target(f"{name}_backward", jax.ffi.pycapsule(library.D5Backward), platform=platform)
    return library


def _output_shapes(custom: CustomOperator, library: ctypes.CDLL, inputs: Sequence[Any]) -> list[tuple[int, ...]]:
    """The outputs' shapes, which the source tells from the inputs'."""
    described = (_Tensor * len(inputs))(
        *(
            _Tensor(None, (ctypes.c_int64 * x.ndim)(*x.shape), x.ndim, helper.np_dtype_to_tensor_dtype(x.dtype))
            for x in inputs
        )
    )
    call = _Call(inputs=described, input_count=len(inputs), output_count=len(custom.outputs))
    call.attributes = ctypes.addressof(ctypes.c_char.in_dll(library, "d5_attributes"))
    call.attribute_count = ctypes.c_int32.in_dll(library, "d5_attribute_count").value
    shapes = []
    for index in range(len(custom.outputs)):
        shape, rank = (ctypes.c_int64 * _MAX_RANK)(), ctypes.c_int32()
        code = library.d5_output_shape(ctypes.byref(call), ctypes.c_int32(index), shape, ctypes.byref(rank))
        if code:
            raise NetworkError(f"the shape of output {index} failed with code {code}", where=custom.op_type)
        shapes.append(tuple(shape[: rank.value]))
    return shapes


def _from_python(custom: CustomOperator, shapes: Sequence[Any], types: Function) -> tuple[Function, Function]:
    if None in shapes:
        raise NetworkError("the shapes of all outputs must be known", where=custom.op_type)
    run, run_backward = custom.forward, custom.backward
    assert run is not None  # a custom operator has either a source or this

    first, second = len(custom.inputs), len(custom.inputs) + len(custom.outputs)

    def call(arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        found = run(*arrays, **custom.attributes)
        return found if isinstance(found, tuple) else (found,)

    def call_backward(arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        assert run_backward is not None  # only called if it is differentiable
        inputs = tuple(arrays[:first])
        found = run_backward(inputs, tuple(arrays[first:second]), tuple(arrays[second:]), **custom.attributes)
        return [g for x, g in zip(inputs, found, strict=True) if _is_floating(x)]

    native, native_backward = _callback(call), _callback(call_backward)

    def forward(*inputs: Any) -> tuple[Any, ...]:
        results = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types(inputs), strict=True)]
        return native(results, inputs)  # type: ignore[no-any-return]

    def backward(inputs: Any, outputs: Any, heads: Any) -> Any:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs if _is_floating(x)]
        return native_backward(results, (*inputs, *outputs, *heads))

    return forward, backward


def _callback(function: Function) -> Function:
    """A function of NumPy arrays as one ``(results, inputs)`` of JAX's arrays, which gives arrays like the results.

    It is called outside of any scope with 64-bit types, where JAX would shorten them: they go as pairs of 32 bits.
    """

    @lru_cache  # JAX compiles a callback anew for every function that it has not met
    def host(results: tuple[Any, ...], kinds: tuple[np.dtype, ...]) -> Function:
        def call(*halves: Any) -> tuple[np.ndarray, ...]:
            arrays = [
                np.ascontiguousarray(half).view(kind)[..., 0] if kind.itemsize == 8 else np.asarray(half)
                for half, kind in zip(halves, kinds, strict=True)
            ]
            return tuple(
                _halves(np.zeros(result.shape) if array is None else np.asarray(array), result.dtype)
                for result, array in zip(results, function(arrays), strict=True)
            )

        return call

    def call(results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        halves = [lax.bitcast_convert_type(x, np.uint32) if x.dtype.itemsize == 8 else x for x in inputs]
        wanted = [jax.ShapeDtypeStruct((*r.shape, 2), np.uint32) if r.dtype.itemsize == 8 else r for r in results]
        found = jax.pure_callback(host(tuple(results), tuple(x.dtype for x in inputs)), wanted, *halves)
        return tuple(
            lax.bitcast_convert_type(y, r.dtype) if r.dtype.itemsize == 8 else y
            for y, r in zip(found, results, strict=True)
        )

    return call


def _halves(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    array = np.ascontiguousarray(array.astype(dtype, copy=False).reshape(*array.shape, 1))
    return array.view(np.uint32) if dtype.itemsize == 8 else array[..., 0]


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _native_type(custom: CustomOperator, dtype: Any) -> np.dtype:
    """The type of an output, refused if it would be shortened: the operator writes the whole."""
    native: np.dtype = jax.dtypes.canonicalize_dtype(dtype)
    if native != dtype:
        raise NetworkError(f"an output of {dtype} needs JAX's 64-bit types", where=custom.op_type)
    return native
