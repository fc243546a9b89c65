"""A pass: what it needs, whether it disturbs timing, what it runs and what it records.

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
"""JSON schema of the reason that stands in the place of a part."""


FILES = "files"
"""Key of a part: the folder that the pass has left beside the job's result, relative to it. What is
saved lies beside the results, and the record names it there."""


class PassError(D5Error):
    """Raised by a pass that cannot be taken; the record then has the reason as ``missing``."""


class PreparedStep(NamedTuple):
    """What a pass is given: a measurement's step, ready to run.

    Attributes
    ----------
    workload : Workload
        What the measurements of the case share: the job, the backend, the data.
    measurement : Measurement
    step : Step
        Enter it as a context manager, then `Step.run` and `Step.synchronize` as often as needed.
    settings : SamplingSettings
        How `TIME` samples the step.
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
        As ``--passes`` and the record call it.
    disturbs : bool
        Whether it leaves behind what could change the samples: it then runs after what was timed
        is proved, from the step's initial state. Otherwise it runs before the proof.
    needs : sequence of str
        Keys of `Backend.absent`: a backend that lacks one has no such part in its records.
    schema : mapping
        JSON schema of its part of the record: ``required`` and ``properties``.
    columns : sequence of Column
        Figures that tables and pages show; `Column.value` is a path in its part.
    """

    name: ClassVar[str]
    disturbs: ClassVar[bool] = True
    needs: ClassVar[Sequence[str]] = ()
    schema: ClassVar[Mapping[str, Any]] = {}
    columns: ClassVar[Sequence[Column]] = ()

    def problem(self, prepared: PreparedStep) -> str:
        """Return why it cannot be taken of a measurement; empty if it can."""
        backend = prepared.workload.backend
        lacking = [f"{backend.name} has no {key}: {backend.absent[key]}" for key in self.needs if key in backend.absent]
        return "; ".join(lacking)

    @abstractmethod
    def take(self, prepared: PreparedStep) -> dict[str, Any]:
        """Run the step, and return this pass's part by `schema`; JSON-able.

        Raises
        ------
        PassError
            If it cannot be taken after all.
        """

    @classmethod
    def record(cls, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a part adds to the record: the part, under the name of the pass."""
        return {cls.name: part}

    @classmethod
    def properties(cls) -> dict[str, Any]:
        """Return the JSON schema of each key of `record`."""
        schema = {"type": "object", **cls.schema}
        schema["properties"] = {**schema.get("properties", {}), "missing": MISSING}
        required = schema.pop("required", None)
        if required:
            schema |= {"if": {"not": {"required": ["missing"]}}, "then": {"required": required}}
        return {cls.name: schema}

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Return all that a reader of results needs to know about it, JSON-able."""
        columns = [asdict(each) | {"value": f"{cls.name}.{each.value}"} for each in cls.columns]
        return {"columns": columns, "properties": cls.properties()}


def take(one: Pass, prepared: PreparedStep) -> dict[str, Any]:
    """Take a pass, if it can be taken; else return why it is ``missing``.

    A pass that disturbs follows the samples, so the step is first reset.
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
