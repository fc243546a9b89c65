"""What a custom operator is, neutrally: its code, its inputs and outputs, and its meaning in ONNX operators.

Imports ONNX, NumPy and `d5suite.errors`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from d5suite.errors import ConfigurationError, DataError

DOMAIN = "custom"
"""The ONNX domain of custom operators: they are ``custom::Name``."""

Formula = Callable[..., "np.ndarray | tuple[np.ndarray, ...]"]
"""A function of NumPy arrays."""


@dataclass(frozen=True)
class CustomOperator:
    """An operator that no framework has.

    Its code is either a source file with the C interface of ``d5suite_operator.h`` or Python functions on NumPy arrays.

    Parameters
    ----------
    name : str
        An identifier.
    inputs, outputs : sequence of str
        Names of the tensors.
    meaning : sequence of tuple
        ONNX nodes ``(operator, inputs, outputs, attributes)`` that compute the same: the reference that answers are
        checked against, and what tells the outputs' shapes and types.
    source : str or Path, optional
        A ``.cc``, ``.cpp`` or, for a GPU, ``.cu`` file, from the folder of the file that describes the operator.
    cuda_source : str or Path, optional
        The same operator for GPUs.
    has_backward : bool
        Whether the source defines ``d5_backward``.
    forward : callable, optional
        From input arrays to the output array, or a tuple of several: a Python operator.
    backward : callable, optional
        From a tuple of input arrays, one of output arrays and one of the outputs' gradients to a tuple of the inputs'
        gradients, None for an input without.
    attributes : mapping of str to number or list of numbers
        Fixed settings, which the source finds in ``d5_call`` and Python functions get by name.
    flags : sequence of str
        Further compiler flags.
    precisions : sequence of str
        What the code can do, of fp64, fp32, bf16 and fp16.
    file : Path
        The Python file that describes it; by default the one that this is called in.

    Raises
    ------
    ConfigurationError
        If it has no code, or two codes, or a name that is no identifier.
    """

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    meaning: Sequence[tuple[str, Sequence[str], Sequence[str], Any]]
    source: str | Path | None = None
    cuda_source: str | Path | None = None
    has_backward: bool = True
    forward: Formula | None = None
    backward: Formula | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    precisions: Sequence[str] = ("fp64", "fp32")
    file: Path = field(default_factory=lambda: _caller())

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigurationError(f"{self.name!r} is not an identifier", where="custom operator")
        if (self.source is None) == (self.forward is None):
            raise ConfigurationError("give either a source or a Python function", where=self.name)
        for source in (self.source, self.cuda_source):
            if source is not None and not (self.file.parent / source).is_file():
                raise DataError("there is no such source file", where=str(self.file.parent / source))

    @property
    def op_type(self) -> str:
        """What ONNX nodes call it."""
        return f"{DOMAIN}::{self.name}"

    @property
    def differentiable(self) -> bool:
        """Whether it has a backward pass."""
        return self.has_backward if self.source is not None else self.backward is not None

    @property
    def identifier(self) -> str:
        """A name to register it under, different for operators with other code or settings."""
        code = [(self.file.parent / s).read_bytes() for s in (self.source, self.cuda_source) if s is not None]
        functions = (id(self.forward), id(self.backward))
        settings = (sorted(self.attributes.items()), list(self.flags), self.has_backward, functions, self.file)
        return f"{self.name}_{hashlib.sha256(repr((code, settings)).encode()).hexdigest()[:8]}"

    def code(self, device: str) -> Path:
        """The source file for a device.

        Raises
        ------
        ConfigurationError
            If it has none for it.
        """
        source = self.source if device == "cpu" else self.cuda_source
        if source is None:
            raise ConfigurationError(f"there is no source for device {device!r}", where=self.name)
        return (self.file.parent / source).resolve()

    def lacks(self, precision: str, device: str = "cpu", *, backward: bool = False) -> str | None:
        """Why it is not run in a precision, on a device, or backwards, or None."""
        if device != "cpu" and self.forward is None and self.cuda_source is None:
            return f"{self.op_type} has no source for {device}"
        if precision not in self.precisions:
            return f"{self.op_type} has no {precision}"
        if backward and not self.differentiable:
            return f"{self.op_type} has no backward pass"
        return None

    def function(self, opset: int) -> onnx.FunctionProto:
        """Its meaning as an ONNX function."""
        return helper.make_function(
            DOMAIN,
            self.name,
            list(self.inputs),
            list(self.outputs),
            [helper.make_node(kind, list(i), list(o), **dict(a)) for kind, i, o, a in self.meaning],
            [helper.make_opsetid("", opset)],
        )


def _caller() -> Path:
    """The file that describes an operator."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in (__file__, "<string>") and frame.f_back is not None:
        frame = frame.f_back
    return Path(frame.f_code.co_filename).resolve()
