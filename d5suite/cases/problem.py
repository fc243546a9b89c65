"""A problem: one operator at one size, described once, for every backend.

A file under ``operators/`` declares one `Problems`; `d5suite.pytest_plugin` makes the tests.
Imports `d5suite.custom`, `d5suite.network`, `d5suite.job` and `d5suite.measurements`; no framework.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.cases.case import Case, Declaration, Settings, Shared, Test, declared_in, preset_of
from d5suite.custom import CustomOperator, compiler_problem
from d5suite.errors import ConfigurationError, D5Error, NetworkError
from d5suite.job import CaseJob, OperationCase, Result, is_plain_name
from d5suite.measurements import discover
from d5suite.measurements.base import Measurement

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.levels.backend import Backend
    from d5suite.network.operation import Operation

MAX_TIME_S = {"smoke": 0.06, "standard": 0.5, "full": 2.0}
"""Sampling budget per problem and direction, by preset, in seconds, unless ``--benchmark-max-time``
is given."""


@dataclass(frozen=True)
class Problem:
    """One operator at one size.

    Attributes
    ----------
    name : str
        Unique within a preset; without ``/``, ``-``, ``[`` and ``]``.
    operator : str or CustomOperator
        An ONNX operator, or a custom operator.
    inputs : mapping
        Inputs of a `d5suite.network.operation.Operation`: shapes, `Tensor` objects, arrays, None.
    attributes : mapping
        Attributes of the node.
    source : str
        Where the size comes from.
    backward : bool
        Whether the backward pass is measured, too.
    file : Path
        The Python file that describes the problem, for errors.
    """

    name: str
    operator: str | CustomOperator
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    backward: bool = True
    file: Path = field(default_factory=declared_in, compare=False, repr=False)

    def operation(self, family: str, precision: str) -> Operation:
        """Return the problem as an ONNX node.

        Raises
        ------
        NetworkError
            If the node is invalid; the error names the file and the problem.
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

    _operations: dict[tuple[str, str], dict[str, Any]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def describe(self, family: str, precision: str) -> dict[str, Any]:
        """Return the ONNX node as a job holds it; the node is made only once.

        Raises
        ------
        D5Error
            If the node is invalid, or the description raised any other error; the error names the
            file.
        """
        key = (family, precision)
        if key not in self._operations:
            try:
                found = self.operation(family, precision).to_dict()
                json.dumps(found)
            except D5Error:
                raise
            except Exception as error:  # a user's description may fail in any way
                what = f"{type(error).__name__}: {error}"
                raise ConfigurationError(what, where=f"{self.file}, {family}.{self.name}") from error
            self._operations[key] = found
        return self._operations[key]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.operator, str | CustomOperator):
            raise ConfigurationError(
                f"a problem has a name and an operator, not {self.name!r} and {self.operator!r}", where=str(self.file)
            )

    @property
    def op_type(self) -> str:
        """The operator's name; for a custom operator, with the domain."""
        return self.operator if isinstance(self.operator, str) else self.operator.op_type


@dataclass(frozen=True)
class Problems(Declaration):
    """The problems of one family of operators.

    Attributes
    ----------
    name : str
        Name of the family in reports.
    smoke, standard, full : sequence of Problem
        The problems of the presets: a few seconds on a laptop; the sizes of a usual training run;
        whole published tables.
    """

    name: str
    smoke: Sequence[Problem]
    standard: Sequence[Problem]
    full: Sequence[Problem]

    def __post_init__(self) -> None:
        if not is_plain_name(self.name):
            raise ConfigurationError(f"a family of operators cannot be called {self.name!r}", where="Problems")
        for preset in MAX_TIME_S:
            names = [problem.name for problem in self.preset(preset)]
            wrong = sorted({n for n in names if names.count(n) > 1 or set(n) & set("-[]") or not is_plain_name(n)})
            if wrong or not names:
                raise ConfigurationError(
                    f"preset {preset!r} needs problems with names that differ and have no / - [ ]: "
                    f"{', '.join(wrong) or 'it has none'}",
                    where=self.name,
                )

    def tests(self) -> Iterator[Test]:
        of_operators = [each for each in discover().values() if each.level == 0]
        for each in sorted(of_operators, key=lambda each: (each.backward, each.name)):
            yield Test(f"test_{each.name}", each, lambda settings: self.cases(settings.preset))

    def custom_operators(self) -> Iterator[CustomOperator]:
        """Yield the custom operators of all presets; a worker looks for a name among them."""
        for preset in MAX_TIME_S:
            for problem in self.preset(preset):
                if isinstance(problem.operator, CustomOperator):
                    yield problem.operator

    def cases(self, preset: str | None) -> list[ProblemCase]:
        """Return the problems of a preset as cases."""
        return [ProblemCase(self.name, problem) for problem in self.preset(preset)]

    def preset(self, name: str | None) -> Sequence[Problem]:
        """Return the problems of a preset, ``smoke`` by default.

        Raises
        ------
        ConfigurationError
            If there is no such preset.
        """
        return preset_of(self, name, MAX_TIME_S)


@dataclass(frozen=True)
class ProblemCase(Case):
    """One problem of a family.

    Attributes
    ----------
    family : str
        Name of the `Problems`.
    problem : Problem
    """

    family: str
    problem: Problem

    shares_references = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """``family.problem``."""
        return f"{self.family}.{self.problem.name}"

    @property
    def label(self) -> str:  # type: ignore[override]
        """The problem's name."""
        return self.problem.name

    @property
    def origin(self) -> str:  # type: ignore[override]
        """The file that describes the problem."""
        return str(self.problem.file)

    def is_same(self, other: Case) -> bool:
        return isinstance(other, ProblemCase) and other.problem is self.problem

    @property
    def batch(self) -> str:
        """All problems share one job per backend."""
        return "operators"

    def why_unsupported(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> str | None:
        backward = measurement.backward
        if backward and not self.problem.backward:
            return f"{self.name} has no backward pass"
        operator = self.problem.operator
        if isinstance(operator, CustomOperator):
            why = operator.lacks(settings.precision, settings.device, backward=backward)
            if why is None and operator.forward is None:
                why = compiler_problem(operator.code(settings.device))
            if why:
                return why
        lacking = backend.lacks_operator(self.problem.op_type, settings.precision, backward=backward)
        if lacking is None and backend.reduced and (settings.preset or "smoke") != "smoke":
            return f"{backend.name} is measured at smoke only: {backend.reduced}"
        return lacking

    def job(
        self, selection: Selection | None, settings: Settings, measurements: list[str], files: dict[str, str],
        shared: Shared,
    ) -> OperationCase:  # fmt: skip
        preset = self.preset_name(selection, settings)
        return OperationCase(
            name=self.name,
            preset=preset,
            measurements=measurements,
            files=files,
            sampling={"max_time_s": MAX_TIME_S[preset], **settings.sampling},
            reference=shared.reference,
            operation=self.problem.describe(self.family, settings.precision),
        )

    def preset_name(self, selection: Selection | None, settings: Settings) -> str:
        return settings.preset or next(iter(MAX_TIME_S))

    def facts(self, part: CaseJob, result: Result) -> dict[str, Any]:
        return {"source": self.problem.source, "ceilings": result.ceilings}
