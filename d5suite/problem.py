"""A problem: one operator at one size, described once, for every backend.

A file under ``operators/`` declares one `Problems`; the tests come from the library (`d5suite.pytest_plugin`). Imports
the contract's neutral descriptions only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.custom import CustomOperator, compiler_problem
from d5suite.errors import ConfigurationError, DataError, NetworkError

if TYPE_CHECKING:
    from d5suite.levels.backend import Backend
    from d5suite.network.operation import Operation

DIRECTIONS = ("forward", "backward")
"""What is measured of a problem."""

MAX_TIME_S = {"smoke": 0.06, "standard": 0.5, "full": 2.0}
"""Sampling budget of one direction of a problem by preset, in seconds, unless ``--benchmark-max-time`` is given."""


@dataclass(frozen=True)
class Problem:
    """One operator at one size.

    Attributes
    ----------
    name : str
        Unique within its file; without ``/`` and ``-``.
    operator : str or CustomOperator
        The ONNX operator, or one of your own.
    inputs : mapping
        As `d5suite.network.operation.Operation` takes them: shapes, `Tensor` objects, arrays, None.
    attributes : mapping
        The node's.
    source : str
        Where the size is published or taken from.
    backward : bool
        Whether its backward pass is measured too.
    file : Path
        The Python file that describes it, for errors.
    """

    name: str
    operator: str | CustomOperator
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    backward: bool = True
    file: Path = field(default_factory=lambda: _caller(), compare=False, repr=False)

    def operation(self, family: str, precision: str) -> Operation:
        """The ONNX node.

        Raises
        ------
        NetworkError
            If it is not valid, with the file and the problem's name.
        """
        from d5suite.network.operation import Operation

        custom = None if isinstance(self.operator, str) else self.operator
        try:
            operation = Operation(
                self.op_type, self.inputs, self.attributes, name=f"{family}.{self.name}", precision=precision,
                outputs=[True] * (1 if custom is None else len(custom.outputs)), custom=custom,
            )  # fmt: skip
        except NetworkError as error:
            raise NetworkError(error.what, where=f"{self.file}, {error.where}", hint=error.hint) from error
        empty = [name for name in operation.outputs if 0 in operation.shapes[name]]
        if empty:
            raise NetworkError(
                f"{operation.describe()} has nothing to measure: {', '.join(empty)} is empty",
                where=f"{self.file}, {operation.name}",
            )
        return operation

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.operator, str | CustomOperator):
            raise ConfigurationError(
                f"a problem has a name and an operator, not {self.name!r} and {self.operator!r}", where=str(self.file)
            )

    @property
    def op_type(self) -> str:
        """The operator's name, with its domain if it is a custom one."""
        return self.operator if isinstance(self.operator, str) else self.operator.op_type


def _caller() -> Path:
    """The file whose code makes a problem."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, "<string>") and frame.f_back is not None:
        frame = frame.f_back
    return Path(frame.f_code.co_filename)


@dataclass(frozen=True)
class Problems:
    """The problems of one family of operators.

    Attributes
    ----------
    name : str
        As reports call the family.
    smoke, standard, full : sequence of Problem
        The presets: seconds on a laptop, the sizes of a usual training run, and whole published tables.
    """

    name: str
    smoke: Sequence[Problem]
    standard: Sequence[Problem]
    full: Sequence[Problem]

    def __post_init__(self) -> None:
        for preset in MAX_TIME_S:
            names = [problem.name for problem in self.preset(preset)]
            wrong = sorted({n for n in names if names.count(n) > 1 or set(n) & set("/-[]")})
            if wrong or not names:
                raise ConfigurationError(
                    f"preset {preset!r} needs problems with names that differ and have no / - [ ]: "
                    f"{', '.join(wrong) or 'it has none'}",
                    where=self.name,
                )

    def preset(self, name: str | None) -> Sequence[Problem]:
        """The problems of a preset, ``smoke`` by default.

        Raises
        ------
        ConfigurationError
            If there is no such preset.
        """
        if name is not None and name not in MAX_TIME_S:
            raise ConfigurationError(
                f"there is no preset {name!r} of operators", where=self.name, hint=f"Presets: {', '.join(MAX_TIME_S)}."
            )
        found: Sequence[Problem] = getattr(self, name or "smoke")
        return found


@dataclass(frozen=True)
class Task:
    """One direction of one problem, as a measurement of a job.

    Attributes
    ----------
    family : str
        Name of the `Problems`.
    problem : Problem
    direction : str
        One of `DIRECTIONS`.
    """

    family: str
    problem: Problem
    direction: str

    @property
    def group(self) -> str:
        """``family.problem``: what results of different backends are compared under."""
        return f"{self.family}.{self.problem.name}"

    @property
    def measurement(self) -> str:
        """Its name in a job."""
        return f"{self.group}/{self.direction}"

    def cannot(self, backend: Backend, precision: str, preset: str, device: str) -> str | None:
        """Why it is not measured on a backend, or None."""
        backward = self.direction == "backward"
        if backward and not self.problem.backward:
            return f"{self.group} has no backward pass"
        operator = self.problem.operator
        if isinstance(operator, CustomOperator):
            why = operator.lacks(precision, device, backward=backward)
            if why is None and operator.forward is None:
                why = compiler_problem(operator.code(device))
            if why:
                return why
        lacking = backend.lacks_operator(self.problem.op_type, precision, backward=backward)
        if lacking is None and backend.reduced and preset != "smoke":
            return f"{backend.name} is measured at smoke only: {backend.reduced}"
        return lacking


def operation_from_dict(content: Mapping[str, Any], precision: str) -> Operation:
    """An operation of a job, with its custom operator imported from the file that the job names.

    Raises
    ------
    DataError
        If the file describes no such operator.
    """
    from d5suite.network.operation import Operation

    custom = content.get("custom")
    found = _custom_operator(custom["file"], custom["name"]) if custom else None
    return Operation.from_dict(content, precision=precision, custom=found)


def _custom_operator(file: str, name: str) -> CustomOperator:
    """The custom operator of this name in the user's own file, the same that pytest collects; it is imported."""
    path = Path(file)
    spec = importlib.util.spec_from_file_location("d5suite_custom_operators", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise DataError("there is no such Python file", where=file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for value in _described(vars(module).values()):
        if value.name == name:
            return value
    raise DataError(f"it describes no custom operator {name!r}", where=file)


def _described(values: Iterable[object]) -> Iterator[CustomOperator]:
    """The custom operators among a module's values, and those of its problems."""
    for value in values:
        if isinstance(value, CustomOperator):
            yield value
        elif isinstance(value, Problems):
            for preset in MAX_TIME_S:
                yield from _described(problem.operator for problem in value.preset(preset))
