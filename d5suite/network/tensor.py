"""The inputs of an `Operation`: random `Tensor` objects and constant arrays.

May import ONNX, NumPy and `d5suite.errors`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from d5suite.errors import NetworkError

PRECISIONS: Mapping[str, np.dtype] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
"""NumPy's floating-point type by precision."""


@dataclass(frozen=True)
class Tensor:
    """An input with random values; an `Operation` refuses an invalid one.

    Attributes
    ----------
    shape : tuple of int
    kind : str
        ``float`` for the operation's floating-point type, or a NumPy type such as ``int64``.
    low, high : float, optional
        Values are uniform in [low, high). Without these, floating-point values are standard normal
        and integers are 0 or 1.
    scale : float
        Factor on a standard normal tensor.
    """

    shape: tuple[int, ...]
    kind: str = "float"
    low: float | None = None
    high: float | None = None
    scale: float = 1.0

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Smallest and largest possible values of an integer tensor; None for other kinds."""
        if self.kind == "float" or np.dtype(self.kind).kind not in "iu":
            return None
        return int(0 if self.low is None else self.low), int(2 if self.high is None else self.high) - 1

    def draw(self, generator: np.random.Generator, floating: np.dtype) -> np.ndarray:
        """Draw values; ``floating`` is the operation's floating-point type."""
        dtype = floating if self.kind == "float" else np.dtype(self.kind)
        if dtype == np.bool_:
            return generator.random(self.shape) < 0.5
        if self.bounds is not None:
            least, most = self.bounds
            return generator.integers(least, most, self.shape, dtype=dtype, endpoint=True)
        if not is_floating(dtype):
            raise NetworkError(f"values of type {self.kind!r} cannot be drawn", hint="Give an array.")
        if self.low is not None and self.high is not None:
            return generator.uniform(self.low, self.high, self.shape).astype(dtype)
        return (generator.standard_normal(self.shape) * self.scale).astype(dtype)


def is_floating(dtype: np.dtype) -> bool:
    """Return whether a tensor of this type can have a gradient."""
    return dtype.kind == "f" or dtype == PRECISIONS["bf16"]


def checked_input(key: str, value: Any, floating: np.dtype, *, where: str) -> Tensor | np.ndarray | None:
    """Return an input in canonical form; a float32 array is converted to ``floating``.

    Raises
    ------
    NetworkError
        If it is not a valid shape, a valid `Tensor`, an array or None.
    """
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return value.astype(floating)
    if value is None or isinstance(value, np.ndarray):
        return value
    if isinstance(value, tuple | list):
        value = Tensor(tuple(value))
    if not isinstance(value, Tensor):
        raise NetworkError(f"input {key!r}: {value!r} is neither a shape, nor a Tensor, nor an array", where=where)
    problem = _tensor_problem(value)
    if problem:
        raise NetworkError(f"input {key!r}: {problem}", where=where)
    shape = tuple(operator.index(n) for n in value.shape)
    return Tensor(shape, value.kind, plain(value.low), plain(value.high), plain(value.scale))


def _tensor_problem(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be drawn; None if it can."""
    shape, kind, low, high = tensor.shape, tensor.kind, tensor.low, tensor.high
    if not isinstance(shape, tuple | list) or not all(_is_integer(n) and n >= 0 for n in shape):
        return f"{shape!r} is not a shape of whole numbers from 0"
    if not isinstance(kind, str):
        return f"kind {kind!r} is neither 'float' nor the name of a type"
    if kind != "float":
        try:
            helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        except (TypeError, ValueError, KeyError):
            return f"kind {kind!r} is neither 'float' nor the name of a type that ONNX has"
    numbers = [("scale", tensor.scale), *((key, n) for key, n in (("low", low), ("high", high)) if n is not None)]
    for key, number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float | np.number) or not math.isfinite(number):
            return f"{key} is {number!r}, not a finite number"
    if tensor.bounds is None:
        if (low is None) != (high is None):
            return f"low is {low} and high is {high}: give both or neither"
        if low is not None and high is not None and low >= high:
            return f"high is {high}, not above low, {low}"
        return None
    (least, most), limits = tensor.bounds, np.iinfo(np.dtype(kind))
    if least > most or least < limits.min or most > limits.max:
        return f"there is no {kind} from {least} to below {most + 1}"
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def input_to_dict(value: Tensor | np.ndarray | None) -> Any:
    """Describe an input in JSON's types, for `input_from_dict`."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return {"values": value.tolist(), "dtype": str(value.dtype), "shape": list(value.shape)}
    return {
        "shape": list(value.shape), "kind": value.kind, "low": value.low, "high": value.high, "scale": value.scale,
    }  # fmt: skip


def input_from_dict(content: Any) -> Tensor | np.ndarray | None:
    """Rebuild an input from `input_to_dict`."""
    if content is None:
        return None
    if "values" in content:
        return np.array(content["values"], content["dtype"]).reshape(content["shape"])
    return Tensor(tuple(content["shape"]), content["kind"], content["low"], content["high"], content["scale"])


def plain(value: Any) -> Any:
    """Convert an attribute to Python's own numbers, strings and lists."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value
