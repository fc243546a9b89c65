"""`CustomOperator`: the code of an operator, its tensors, and its meaning in ONNX operators.

May import ONNX, NumPy and, from d5suite, `network` and `errors`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from d5suite.errors import ConfigurationError, DataError, NetworkError, calling_file
from d5suite.network.normalise import IR_VERSION

DOMAIN = "custom"
"""The ONNX domain of custom operators: ``custom::Name``."""

INTERFACE = "d5suite_operator.h"
"""The header that sources include; it declares the functions they define."""

Formula = Callable[..., "np.ndarray | tuple[np.ndarray, ...]"]
"""A function of NumPy arrays."""

WIDEST_FIRST = ("fp64", "fp32", "fp16", "bf16")
"""Precisions, from the smallest unit roundoff to the largest."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def checker_context(opset: int) -> Any:
    """Return the context in which ONNX's checker judges a node of an operator set."""
    context = onnx.checker.C.CheckerContext()
    context.ir_version = IR_VERSION
    context.opset_imports = {"": opset}
    return context


@dataclass(frozen=True)
class CustomOperator:
    """An operator that no framework has.

    Its code is a source file with the C interface of ``d5suite_operator.h``, or Python functions of
    NumPy arrays.

    Parameters
    ----------
    name : str
        A Python identifier.
    inputs, outputs : sequence of str
        Names of the tensors.
    meaning : sequence of tuple
        ONNX nodes ``(operator, inputs, outputs, attributes)`` that compute the same
        result. They are the reference for answers, and determine the outputs' shapes and types.
    source : str or Path, optional
        A ``.cc``, ``.cpp`` or, for a GPU, ``.cu`` file, relative to the folder of ``file``.
    cuda_source : str or Path, optional
        The same operator for GPUs.
    has_backward : bool, optional
        Whether the source defines ``d5_backward``. By default it does if the name occurs in the
        source or in a local file that it includes. Set it if preprocessor conditions decide.
    forward : callable, optional
        A Python operator: takes input arrays, returns the output array or a tuple of arrays.
    backward : callable, optional
        Takes the tuples of input arrays, output arrays and output gradients; returns the tuple of
        input gradients, with None for an input without gradient.
    attributes : mapping of str to number or list of numbers
        Constant settings: in ``d5_call`` for a source, keyword arguments for Python functions.
    flags : sequence of str
        Additional compiler flags.
    precisions : sequence of str
        The supported precisions, of fp64, fp32, bf16 and fp16.
    file : Path
        The Python file that describes it; by default the caller's.

    Raises
    ------
    ConfigurationError
        If it has no code or two kinds of code, its name is not an identifier, or its meaning uses
        an unknown ONNX operator, reads an unknown tensor or omits an output.
    DataError
        If a source file is missing.
    """

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    meaning: Sequence[tuple[str, Sequence[str], Sequence[str], Any]]
    source: str | Path | None = None
    cuda_source: str | Path | None = None
    has_backward: bool | None = None
    forward: Formula | None = None
    backward: Formula | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    precisions: Sequence[str] = ("fp64", "fp32")
    file: Path = field(default_factory=lambda: calling_file(__file__).resolve())

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigurationError(f"{self.name!r} is not an identifier", where="custom operator")
        if (self.source is None) == (self.forward is None):
            raise ConfigurationError("give either a source or a Python function", where=self.where)
        for source in (self.source, self.cuda_source):
            if source is not None and not (self.file.parent / source).is_file():
                raise DataError("there is no such source file", where=str(self.file.parent / source))
        unknown = sorted({*self.precisions} - {*WIDEST_FIRST})
        if unknown or not self.precisions:
            raise ConfigurationError(
                f"there are no precisions {unknown}" if unknown else "it has no precision",
                where=self.where,
                hint=f"Precisions: {', '.join(WIDEST_FIRST)}.",
            )
        self._check_meaning()

    def _check_meaning(self) -> None:
        known = {"", *self.inputs}
        for step in self.meaning:
            if len(step) != 4:
                raise ConfigurationError(
                    f"{step!r} in its meaning is not (operator, inputs, outputs, attributes)", where=self.where
                )
            kind, inputs, outputs, _ = step
            if not onnx.defs.has(kind):
                alike = difflib.get_close_matches(kind, {s.name for s in onnx.defs.get_all_schemas() if not s.domain})
                raise ConfigurationError(
                    f"its meaning uses {kind!r}, which is not an ONNX operator",
                    where=self.where,
                    hint=f"Did you mean {' or '.join(alike)}?" if alike else None,
                )
            missing = [name for name in inputs if name not in known]
            if missing:
                raise ConfigurationError(
                    f"{kind} in its meaning reads {', '.join(map(repr, missing))}, which is neither an input nor "
                    "computed before",
                    where=self.where,
                )
            known.update(outputs)
        missing = [name for name in self.outputs if name not in known]
        if missing:
            raise ConfigurationError(
                f"its meaning does not compute the output {', '.join(map(repr, missing))}", where=self.where
            )

    @property
    def where(self) -> str:
        """The file and name, for error messages."""
        return f"{self.file}, {self.op_type}"

    @property
    def op_type(self) -> str:
        """The name in ONNX nodes."""
        return f"{DOMAIN}::{self.name}"

    @property
    def differentiable(self) -> bool:
        """Whether it has a backward pass."""
        if self.source is None:
            return self.backward is not None
        if self.has_backward is not None:
            return self.has_backward
        return any(re.search(r"\bd5_backward\b", _COMMENT.sub(" ", text)) for text in self._texts())

    @property
    def widest(self) -> str:
        """The widest supported precision; its answers are the reference for the others."""
        return next(precision for precision in WIDEST_FIRST if precision in self.precisions)

    @property
    def identifier(self) -> str:
        """A name to register the operator under, unique to its code and settings.

        For a source it is the same in every process, and changes with the source and the local
        files that it includes. For Python functions it is valid as long as they exist.
        """
        settings = (
            sorted(self.attributes.items()), list(self.flags), self.differentiable, len(self.inputs), len(self.outputs),
        )  # fmt: skip
        code = list(self._texts()) if self.source is not None else [id(self.forward), id(self.backward)]
        return f"{self.name}_{hashlib.sha256(repr((code, settings)).encode()).hexdigest()[:8]}"

    def _texts(self) -> Iterator[str]:
        """Yield the text of the sources and of the local files that they include."""
        folders = [Path(flag[2:]) for flag in self.flags if flag.startswith("-I") and flag != "-I"]
        folders += [Path(after) for flag, after in zip(self.flags, self.flags[1:], strict=False) if flag == "-I"]
        waiting = [self.file.parent / s for s in (self.source, self.cuda_source) if s is not None]
        seen: set[Path] = set()
        while waiting:
            path = waiting.pop(0).resolve()
            if path in seen or path.name == INTERFACE or not path.is_file():
                continue
            seen.add(path)
            text = path.read_text(encoding="utf-8", errors="replace")
            yield text
            waiting += [folder / name for name in _INCLUDE.findall(text) for folder in (path.parent, *folders)]

    def code(self, device: str) -> Path:
        """Return the source file for a device.

        Raises
        ------
        ConfigurationError
            If there is none.
        """
        source = self.source if device == "cpu" else self.cuda_source
        if source is None:
            raise ConfigurationError(f"there is no source for device {device!r}", where=self.name)
        return (self.file.parent / source).resolve()

    def lacks(self, precision: str, device: str = "cpu", *, backward: bool = False) -> str | None:
        """Return why it cannot run in a precision, on a device or backward; None if it can."""
        if device != "cpu" and self.forward is None and self.cuda_source is None:
            return f"{self.op_type} has no source for {device}"
        if precision not in self.precisions:
            return f"{self.op_type} has no {precision}"
        if backward and not self.differentiable:
            return f"{self.op_type} has no backward pass"
        return None

    def require_tensors(self, inputs: Sequence[str], outputs: int) -> None:
        """Raise a `NetworkError` if a node's tensors differ from the operator's in number or order.

        Parameters
        ----------
        inputs : sequence of str
            The node's tensor names; ``""`` for an omitted input.
        outputs : int
        """
        for what, found, names in (("inputs", len(inputs), self.inputs), ("outputs", outputs, self.outputs)):
            if found != len(names):
                raise NetworkError(
                    f"it is used with {found} {what}, but has {len(names)}: {', '.join(names)}", where=self.where
                )
        if "" in inputs:
            raise NetworkError(f"its input {self.inputs[list(inputs).index('')]!r} is omitted", where=self.where)
        if {*inputs} == {*self.inputs} and list(inputs) != list(self.inputs):
            raise NetworkError(
                f"its inputs are {', '.join(self.inputs)}, but are given in another order: {', '.join(inputs)}",
                where=self.where,
            )

    def function(self, opset: int) -> onnx.FunctionProto:
        """Return the operator's meaning as an ONNX function.

        Raises
        ------
        ConfigurationError
            If a node is not valid in this operator set.
        """
        nodes = []
        for kind, inputs, outputs, attributes in self.meaning:
            try:
                node = helper.make_node(kind, list(inputs), list(outputs), **dict(attributes))
                onnx.checker.check_node(node, checker_context(opset))
            except (onnx.checker.ValidationError, TypeError, ValueError) as error:
                line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                raise ConfigurationError(
                    f"{kind} in its meaning is not valid in ONNX's operator set {opset}: {line}", where=self.where
                ) from error
            nodes.append(node)
        opsets = [helper.make_opsetid("", opset)]
        return helper.make_function(DOMAIN, self.name, list(self.inputs), list(self.outputs), nodes, opsets)

    def call_forward(
        self, inputs: Sequence[np.ndarray], shapes: Sequence[Sequence[int]], dtypes: Sequence[np.dtype]
    ) -> list[np.ndarray]:
        """Call a Python operator's ``forward``; return arrays in the outputs' types.

        Raises
        ------
        ConfigurationError
            If the number of arrays or a shape differs from the outputs'.
        """
        assert self.forward is not None  # a source has no Python function
        found = self.forward(*inputs, **self.attributes)
        arrays = found if isinstance(found, tuple) else (found,)
        self._check_count("forward", len(arrays), "outputs", self.outputs)
        return [
            self._of_shape(f"forward returns output {name!r}", np.asarray(array, dtype), shape)
            for name, array, shape, dtype in zip(self.outputs, arrays, shapes, dtypes, strict=True)
        ]

    def call_backward(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Call a Python operator's ``backward``; return arrays in the inputs' types, 0 for None.

        Raises
        ------
        ConfigurationError
            If it has no backward pass, or does not return None or an array of the right shape for
            each input.
        """
        if self.backward is None:
            raise ConfigurationError("it has no backward pass", where=self.where)
        found = self.backward(tuple(inputs), tuple(outputs), tuple(gradients), **self.attributes)
        answers = found if isinstance(found, tuple | list) else (found,)
        self._check_count("backward", len(answers), "inputs", self.inputs)
        return [
            np.zeros_like(x)
            if answer is None
            else self._of_shape(f"backward returns the gradient of {name!r}", np.asarray(answer, x.dtype), x.shape)
            for name, x, answer in zip(self.inputs, inputs, answers, strict=True)
        ]

    def rehearse(
        self,
        inputs: Sequence[np.ndarray],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[np.dtype],
        *,
        backward: bool = False,
    ) -> None:
        """Call a Python operator's functions outside any framework, because some hide exceptions.

        Parameters
        ----------
        inputs : sequence of numpy.ndarray
        shapes, dtypes : sequence
            Shapes and types of the outputs.
        backward : bool
            Also call the backward pass, with gradients of zero.

        Raises
        ------
        ConfigurationError
            As in `call_forward` and `call_backward`; other exceptions pass through.
        """
        outputs = self.call_forward(inputs, shapes, dtypes)
        if backward:
            self.call_backward(inputs, outputs, [np.zeros_like(output) for output in outputs])

    def _check_count(self, direction: str, found: int, what: str, names: Sequence[str]) -> None:
        if found != len(names):
            raise ConfigurationError(
                f"{direction} returns {found} arrays for {len(names)} {what} ({', '.join(names)})", where=self.where,
                hint="Return several as a tuple." if direction == "forward" else "Return one for each input, or None.",
            )  # fmt: skip

    def _of_shape(self, what: str, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        if array.shape != tuple(shape):
            raise ConfigurationError(f"{what} with shape {array.shape}, not {tuple(shape)}", where=self.where)
        return array
