"""A level-0 job in this process: its operators, their validation and their measurements.

The same face as `d5suite.workload.Workload`, for jobs that name operations instead of a network. Imports the contract,
validation and measuring; frameworks only through `d5suite.levels.backend.Backend`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from d5suite.backends import Selection, discover, select
from d5suite.errors import JobError, ValidationError
from d5suite.job import Job
from d5suite.levels.operator import Operator
from d5suite.measure.sampling import SamplingSettings, sample_kernel
from d5suite.network.operation import Operation
from d5suite.network.work import work
from d5suite.problem import operation_from_dict
from d5suite.validate.checks import Validation
from d5suite.validate.operators import (
    Findings,
    Reference,
    check_backward,
    check_backward_float64,
    check_forward,
    exact_part,
    reference,
    save_heat_map,
)
from d5suite.workload import Measured

COPIES = 8
"""Sizes of an operation's tensors that validating it may need at a time, in float32: inputs, outputs and gradients, as
timed, in float64, and in the reference."""

CEILING_GEMM = 2048
"""Rows and columns of the matrices whose product sets the ceiling of arithmetic: large enough for libraries to reach
their best, and a fifth of a second on a laptop."""

CEILING_COPY = 1 << 24
"""Values of the array whose element-wise pass sets the ceiling of memory: 64 MiB in float32, beyond any cache."""

CEILING_TIME_S = 0.5
"""Sampling budget of each ceiling, in seconds."""


class OperatorWorkload:
    """Everything a level-0 job's measurements share.

    Parameters
    ----------
    job : Job

    Raises
    ------
    D5Error
        If the backend cannot be used.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.selection: Selection = select(f"{job.backend['name']}:{job.backend['mode']}")
        self.backend = self.selection.backend
        self.backend.check(device=job.device, precision=job.precision)
        self.settings = SamplingSettings.from_dict(job.sampling)
        self.validations: dict[str, Validation] = {}
        self._specifications = {content["name"]: content for content in job.operations}
        self._built: _Built | None = None

    def order(self) -> Iterator[list[str]]:
        """Measurements that are validated before any of them is measured: those of one operation."""
        groups: dict[str, list[str]] = {}
        for name in self.job.measurements:
            groups.setdefault(name.rpartition("/")[0], []).append(name)
        yield from groups.values()

    def level(self, measurement: str) -> int:
        """The benchmark level."""
        return 0

    def _operation(self, measurement: str) -> _Built:
        name = measurement.rpartition("/")[0]
        if self._built is None or self._built.operation.name != name:
            self._built = None
            gc.collect()
            if name not in self._specifications:
                raise JobError(f"the job has no operation {name!r}")
            operation = operation_from_dict(self._specifications[name], self.job.precision)
            require_memory(operation)
            self._built = _Built(operation, self)
        return self._built

    def operator(self, operation: Operation) -> Operator:
        """One operation on the job's backend, mode and device."""
        return self.backend.operator(operation, mode=self.selection.mode, device=self.job.device)

    def exact_operator(self, operation: Operation) -> Operator:
        """The same in the mode whose float64 answers vouch for the job's."""
        mode = self.backend.proving_mode(self.selection.mode)
        return self.backend.operator(operation, mode=mode, device=self.job.device)

    def validate(self, measurement: str) -> Validation:
        """Run the checks of one measurement.

        Raises
        ------
        ValidationError
            At the first check that fails, with the path of a picture of where the answer is wrong.
        """
        validation = self.validations[measurement] = Validation()
        built = self._operation(measurement)
        forward = measurement.endswith("/forward")
        found = built.check_forward() if forward else built.check_backward(validation)
        built.findings[measurement] = found
        self._require(validation, found, measurement)
        return validation

    def _require(self, validation: Validation, found: Findings, measurement: str) -> None:
        try:
            validation.require(found.checks)
        except ValidationError as error:
            if found.evidence is None or self.job.reference is None:
                raise
            name, answer, expected = found.evidence
            path = Path(self.job.reference).parent / f"{self.selection}-{measurement}.png".replace("/", "-")
            save_heat_map(path, f"{self.selection}, {measurement}, {name}", answer, expected)
            raise ValidationError(error.what, where=error.where, hint=f"Where it is wrong: {path}") from error

    def release(self) -> None:
        """Let go of what only validation needs, before anything is timed."""
        if self._built is not None:
            self._built.release()
        gc.collect()

    def measure(self, measurement: str) -> Measured:
        """Time one direction of an operation."""
        built = self._operation(measurement)
        operation, operator = built.operation, built.operator
        cost, found = work(operation), built.findings[measurement]
        if measurement.endswith("/forward"):
            flops, moved = cost.flops, cost.bytes
        else:
            flops, moved = cost.backward_flops or 0, cost.backward_bytes
        samples, iterations = sample_kernel(found.call, tuple(found.arguments), operator.synchronize, self.settings)
        samples = replace(samples, first_call_s=found.first_call_s)
        median = samples.median_s
        extra = {
            "operator": operation.node.op_type,
            "shapes": {name: list(operation.shapes[name]) for name in operation.node.inputs if name},
            "iterations": iterations,
            "work": {"flops": flops or None, "bytes": moved},
            "achieved": {"flops_per_s": flops / median if flops else None, "bytes_per_s": moved / median},
            "accuracy": found.accuracy.to_dict(),
            "repeatability": found.repeatability,
        }
        return Measured(samples, 1, None, {}, extra)

    def ceilings(self) -> dict[str, float]:
        """What this backend reaches with a large matrix product and a large copy, in FLOP/s and bytes/s."""
        settings = SamplingSettings(max_time_s=CEILING_TIME_S)
        product = Operation(
            "Gemm", {"A": (CEILING_GEMM, CEILING_GEMM), "B": (CEILING_GEMM, CEILING_GEMM)}, name="large product",
            precision=self.job.precision,
        )  # fmt: skip
        copy = Operation("Relu", {"X": (CEILING_COPY,)}, name="large copy", precision=self.job.precision)
        found = {}
        for key, operation in (("flops_per_s", product), ("bytes_per_s", copy)):
            if self.backend.lacks(operation) is None:
                operator = self.operator(operation)
                feed = tuple(operator.feed(operation.draw(self.job.seed)))
                samples, _ = sample_kernel(operator.forward, feed, operator.synchronize, settings)
                cost = work(operation)
                found[key] = (cost.flops if key == "flops_per_s" else cost.bytes) / min(samples.samples_s)
        # What the framework has made of itself by now stays, and is not looked through at each of hundreds of
        # collections, of which each can take 0.2 s.
        gc.collect()
        gc.freeze()
        return found


@dataclass
class _Built:
    """One operation's native operators."""

    operation: Operation
    workload: OperatorWorkload

    def __post_init__(self) -> None:
        self.findings: dict[str, Findings] = {}

    @cached_property
    def operator(self) -> Operator:
        """As it is timed: the very object that is validated is measured afterwards."""
        return self.workload.operator(self.operation)

    @cached_property
    def exact(self) -> Operator:
        """The whole operation in float64, for validation only."""
        return self.workload.exact_operator(self.operation.with_precision("fp64"))

    @cached_property
    def known(self) -> Reference:
        """The reference, computed by a process of its own for all backends, or here when a job is run by hand."""
        job = self.workload.job
        backward = any(name == f"{self.operation.name}/backward" for name in job.measurements)
        recorded = Reference.load(Path(job.reference), self.operation.name) if job.reference else None
        if recorded is not None and (recorded.derivatives or not backward):
            return recorded
        return reference(self.operation, job.seed, backward=backward)

    def check_forward(self) -> Findings:
        """The outputs against ONNX's evaluator."""
        exact = None if self.known.whole else self.exact
        return check_forward(self.operator, self.known, self.workload.job.seed, exact)

    def check_backward(self, validation: Validation) -> Findings:
        """The gradients: in float64 against differences, then as timed against float64."""
        job = self.workload.job
        part = exact_part(self.operation)
        exact = self.exact if self.known.whole else self.workload.exact_operator(part)
        validation.require(check_backward_float64(exact, self.known, job.seed))
        return check_backward(self.operator, self.exact, job.seed)

    def release(self) -> None:
        """Drop the float64 operator and the reference."""
        for name in ("exact", "known"):
            self.__dict__.pop(name, None)
        for found in self.findings.values():
            found.evidence = None


def require_memory(operation: Operation) -> None:
    """Raise `JobError` if an operation's tensors, as often as validation needs them, do not fit into free memory.

    Nothing has been allocated for it yet.
    """
    needed = COPIES * operation.nbytes()
    free = psutil.virtual_memory().available
    if needed > free:
        raise JobError(
            f"{operation.describe()} needs {needed:,} bytes ({operation.nbytes():,} for its tensors, which validation "
            f"holds {COPIES} times), and {free:,} are free",
            where=operation.name,
            hint="Choose a smaller preset or a machine with more memory.",
        )


class References:
    """The job that computes the references of a session's operations, for all backends."""

    def __init__(self, job: Job) -> None:
        if job.reference is None:
            raise JobError("a job for references must say where they go")
        self.job = job
        self.path = Path(job.reference)
        self._specifications = {content["name"]: content for content in job.operations}
        self._computed: dict[str, str] = {}

    def compute(self, measurement: str) -> dict[str, Any]:
        """Add one operation's reference to the file, for all its measurements in the job.

        Returns
        -------
        dict
            Which backend's gradient it holds, if any.
        """
        name = measurement.rpartition("/")[0]
        if name in self._computed:
            return {"reference": self._computed[name]}
        operation = operation_from_dict(self._specifications[name], self.job.precision)
        require_memory(operation)
        backward = f"{name}/backward" in self.job.measurements
        trusted = self._trusted(exact_part(operation)) if backward else None
        found = reference(operation, self.job.seed, backward=backward, trusted=trusted)
        found.save(self.path, name)
        self._computed[name] = found.source or "differences"
        return {"reference": self._computed[name]}

    def _trusted(self, exact: Operation) -> Operator | None:
        """The float64 operator of an installed backend that is right about this operator's gradient."""
        for backend in discover()[0].values():
            if exact.node.op_type in backend.right_gradients and backend.problem() is None:
                return backend.operator(exact)
        return None
