"""A pass: its needs, whether it disturbs timing, the work that it does, and the part it records.

Imports `d5suite.measurements`, `d5suite.workloads` and `d5suite.errors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

from d5suite.errors import D5Error
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.tables import Column
from d5suite.workloads.base import Workload

MISSING = {"type": "string", "description": "why it was not taken"}
"""JSON schema of the reason that replaces a missing part."""


FILES = "files"
"""Key of a part: the folder that the pass has left beside the job's result, relative to the
result's folder. The record names the folder relative to the current folder."""


class PassError(D5Error):
    """Raised by a pass that cannot run; the record then has the reason as ``missing``."""


class PreparedStep(NamedTuple):
    """The argument of a pass: a measurement's step, ready to run.

    Attributes
    ----------
    workload : Workload
        Objects that the measurements of the case share: the job, the backend, the data.
    measurement : Measurement
    step : Step
        Enter the step as a context manager, then call `Step.run` and `Step.synchronize` as often as
        needed.
    settings : SamplingSettings
        Settings with which `TIME` samples the step.
    """

    workload: Workload
    measurement: Measurement
    step: Step
    settings: SamplingSettings


class Pass(ABC):
    """One pass over a prepared step. It adds to the record, and never changes the samples.

    Attributes
    ----------
    name : str
        Name in ``--passes`` and in the record.
    disturbs : bool
        Whether the pass has effects that could change the samples. It then runs after the timed
        answers are proved, from the step's initial state. Otherwise it runs before the first proof.
    needs : sequence of str
        Keys of `Backend.absent`: records of a backend that lacks a key do not have this part.
    schema : mapping
        JSON schema of the pass's part of the record: ``required`` and ``properties``.
    columns : sequence of Column
        Figures that tables and pages show; `Column.value` is a path inside the part.
    """

    name: ClassVar[str]
    disturbs: ClassVar[bool] = True
    needs: ClassVar[Sequence[str]] = ()
    schema: ClassVar[Mapping[str, Any]] = {}
    columns: ClassVar[Sequence[Column]] = ()

    def problem(self, prepared: PreparedStep) -> str:
        """Return why the pass cannot run for a measurement; empty if it can."""
        backend = prepared.workload.backend
        lacking = [f"{backend.name} has no {key}: {backend.absent[key]}" for key in self.needs if key in backend.absent]
        return "; ".join(lacking)

    @abstractmethod
    def take(self, prepared: PreparedStep) -> dict[str, Any]:
        """Run the step, and return this pass's part as `schema` describes it; JSON-able.

        Raises
        ------
        PassError
            If the pass cannot run after all.
        """

    @classmethod
    def record(cls, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that a part adds to the record: the part, under the pass's name."""
        return {cls.name: part}

    @classmethod
    def properties(cls) -> dict[str, Any]:
        """Return the JSON schemas of the keys of `record`."""
        schema = {"type": "object", **cls.schema}
        schema["properties"] = {**schema.get("properties", {}), "missing": MISSING}
        required = schema.pop("required", None)
        if required:
            schema |= {"if": {"not": {"required": ["missing"]}}, "then": {"required": required}}
        return {cls.name: schema}

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Return all that a reader of results needs to know about the pass, JSON-able."""
        columns = [asdict(each) | {"value": f"{cls.name}.{each.value}"} for each in cls.columns]
        return {"columns": columns, "properties": cls.properties()}


def take(one: Pass, prepared: PreparedStep) -> dict[str, Any]:
    """Run a pass and return its part; if the pass cannot run, return why it is ``missing``.

    A pass that disturbs timing runs after the samples, so the step is reset first.
    """
    problem = one.problem(prepared)
    if problem:
        return {"missing": problem}
    if one.disturbs:
        prepared.step.reset()
    try:
        return one.take(prepared)
    except PassError as error:
        return {"missing": str(error)}
