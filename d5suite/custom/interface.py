"""The structures of ``d5suite_operator.h`` in Python, to call a library without glue.

May import NumPy, ONNX and, from d5suite, `network` and `errors`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import helper

from d5suite.errors import ConfigurationError, NetworkError
from d5suite.network.custom import CustomOperator
from d5suite.network.graph import Node

MAX_RANK = 8
"""``D5_MAX_RANK``."""


class CTensor(ctypes.Structure):
    """``d5_tensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class CCall(ctypes.Structure):
    """``d5_call``."""

    _fields_ = (
        ("inputs", ctypes.POINTER(CTensor)),
        ("outputs", ctypes.POINTER(CTensor)),
        ("output_gradients", ctypes.POINTER(CTensor)),
        ("input_gradients", ctypes.POINTER(CTensor)),
        ("attributes", ctypes.c_void_p),
        ("input_count", ctypes.c_int32),
        ("output_count", ctypes.c_int32),
        ("attribute_count", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


def require_all_outputs(custom: CustomOperator, node: Node) -> None:
    """Raise `NetworkError` unless a node of a custom operator names all the operator's outputs."""
    if not all(node.outputs) or len(node.outputs) != len(custom.outputs):
        raise NetworkError("all outputs of a custom operator must be requested", where=custom.name)


def require_output_shapes(
    library: Path,
    custom: CustomOperator,
    node: Node,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype],
    device: str = "cpu",
) -> None:
    """Raise an error unless a compiled source and the operator's meaning agree on output shapes.

    Parameters
    ----------
    library : Path
        The library that the framework loads, from `d5suite.custom.compile_operator`.
    custom : CustomOperator
    node : Node
    shapes, dtypes : mapping
        By input and output of the node; shapes and types of outputs come from the meaning.
    device : str
        Device of the source.

    Raises
    ------
    ConfigurationError
        If ``d5_output_shape`` fails or disagrees.
    """
    functions = ctypes.CDLL(str(library))
    where = str(custom.code(device))
    inputs = [_described(shapes[name], dtypes[name]) for name in node.inputs]
    call = CCall(
        inputs=(CTensor * len(inputs))(*inputs),
        input_count=len(inputs),
        output_count=len(node.outputs),
        attributes=ctypes.addressof(ctypes.c_char.in_dll(functions, "d5_attributes")),
        attribute_count=ctypes.c_int32.in_dll(functions, "d5_attribute_count").value,
    )
    for index, (name, output) in enumerate(zip(custom.outputs, node.outputs, strict=True)):
        shape, rank = (ctypes.c_int64 * MAX_RANK)(), ctypes.c_int32()
        code = functions.d5_output_shape(ctypes.byref(call), ctypes.c_int32(index), shape, ctypes.byref(rank))
        if code:
            raise ConfigurationError(
                f"d5_output_shape of {custom.op_type} failed with code {code} for output {name!r}", where=where
            )
        found = tuple(shape[: rank.value])
        if found != shapes[output]:
            raise ConfigurationError(
                f"d5_output_shape of {custom.op_type} gives output {name!r} the shape {found}, but its meaning "
                f"{shapes[output]}",
                where=where,
                hint=f"One of the two is wrong; the meaning is in {custom.file}.",
            )


def _described(shape: Sequence[int], dtype: np.dtype) -> CTensor:
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    return CTensor(None, sizes, len(shape), helper.np_dtype_to_tensor_dtype(dtype))
