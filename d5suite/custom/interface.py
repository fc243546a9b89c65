"""The C interface of ``d5suite_operator.h`` for Python: its structures, for those who call a library without glue.

Imports the standard library only.
"""

from __future__ import annotations

import ctypes

MAX_RANK = 8
"""``D5_MAX_RANK``."""


class Tensor(ctypes.Structure):
    """``d5_tensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class Call(ctypes.Structure):
    """``d5_call``."""

    _fields_ = (
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        ("output_gradients", ctypes.POINTER(Tensor)),
        ("input_gradients", ctypes.POINTER(Tensor)),
        ("attributes", ctypes.c_void_p),
        ("input_count", ctypes.c_int32),
        ("output_count", ctypes.c_int32),
        ("attribute_count", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )
