"""A level-0 job in this process: its operators, their validation and their measurements.

The same face as `d5suite.workload.Workload`, for jobs that name operations instead of a network. Imports the contract,
validation and measuring; frameworks only through `d5suite.levels.backend.Backend`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from d5suite.backends import Selection, discover, select
from d5suite.errors import JobError, ValidationError
from d5suite.job import Job
from d5suite.levels.operator import Operator
from d5suite.measure.memory import free_memory
from d5suite.measure.sampling import SamplingSettings, sample_kernel
from d5suite.network.operation import PRECISIONS, Operation
from d5suite.network.work import traffic, work
from d5suite.problem import operation_from_dict
from d5suite.validate.checks import Check, Validation
from d5suite.validate.operators import (
    Evidence,
    Findings,
    Reference,
    check_backward,
    check_backward_float64,
    check_forward,
    exact_part,
    gradient_evidence,
    reference,
    save_heat_map,
)
from d5suite.validate.pieces import gathered
from d5suite.workload import Measured

COPIES = 8
"""Sizes of an operation's tensors that validating it may need at a time, in float32: inputs, outputs and gradients, as
timed, in float64, and in the reference."""

INTERMEDIATE_COPIES = 4
"""The same for what lies between: scores of attention, for one, come unmasked, masked, as softmax, and backward."""

CEILING_GEMM = 2048
"""Rows and columns of the matrices whose product sets the ceiling of arithmetic: large enough for libraries to reach
their best, and a fifth of a second on a laptop."""

CEILING_COPY = {"cpu": 30 << 20, "cuda": 256 << 20}
"""Bytes whose copy sets the ceiling of memory, by device. Read and written, 60 MiB are beyond most processors' caches.
For results above 32 MiB the C library takes every page anew from the system: on a virtual machine that took five times
as long as copying, and PyTorch reached 1.7 of 10 GB/s. A GPU's allocator keeps what it has."""

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
            require_memory(operation, self.job.device)
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
        if measurement.endswith("/forward"):
            found = built.check_forward()
        else:
            proof, evidence = built.prove_gradients()
            self._require(validation, proof, measurement, evidence)
            found = built.check_backward()
        built.findings[measurement] = found
        self._require(validation, found.checks, measurement, lambda: found.evidence)
        return validation

    def _require(
        self, validation: Validation, checks: list[Check], measurement: str, evidence: Callable[[], Evidence | None]
    ) -> None:
        try:
            validation.require(checks)
        except ValidationError as error:
            shown = evidence() if self.job.reference is not None else None
            hint = error.hint
            if shown is not None and self.job.reference is not None:
                name, answer, expected = shown
                path = Path(self.job.reference).parent / f"{self.selection}-{measurement}.png".replace("/", "-")
                save_heat_map(path, f"{self.selection}, {measurement}, {name}", answer, expected)
                hint = f"Where it is wrong: {path}"
            raise ValidationError(error.what, where=f"{self.selection}, {measurement}", hint=hint) from error

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
        backward = measurement.endswith("/backward")
        flops = (cost.backward_flops or 0) if backward else cost.flops
        shared = operator.views(found.call(*found.arguments), found.arguments, backward=backward)
        moved = traffic(operation, backward=backward, views=shared)
        samples, iterations = sample_kernel(found.call, tuple(found.arguments), operator.synchronize, self.settings)
        samples = replace(samples, first_call_s=found.first_call_s)
        median = samples.median_s
        extra = {
            "operator": operation.node.op_type,
            "shapes": {name: list(operation.shapes[name]) for name in operation.node.inputs if name},
            "iterations": iterations,
            "work": {"flops": flops or None, "bytes": moved},
            "views": [f"gradient of {name}" if backward else name for name in shared],
            "achieved": {
                "flops_per_s": flops / median if flops else None,
                "bytes_per_s": moved / median if moved else None,
            },
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
        # Two halves put together: there is nothing to it but copying, and no view will do.
        half = (CEILING_COPY[self.job.device] // 2 // PRECISIONS[self.job.precision].itemsize,)
        copy = Operation("Concat", {"A": half, "B": half}, {"axis": 0}, name="large copy", precision=self.job.precision)
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
        """The operation, or one piece of a large one, in float64, for validation only."""
        return self.workload.exact_operator(exact_part(self.operation))

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

    def prove_gradients(self) -> tuple[list[Check], Callable[[], Evidence]]:
        """The float64 gradients against differences, and how to find out where they are wrong."""
        seed = self.workload.job.seed
        checks = check_backward_float64(self.exact, self.known, seed)
        return checks, partial(gradient_evidence, self.exact, self.known, seed)

    def check_backward(self) -> Findings:
        """The gradients, as timed, against the float64 ones."""
        return check_backward(self.operator, self.exact, self.workload.job.seed)

    def release(self) -> None:
        """Drop the float64 operator and the reference."""
        for name in ("exact", "known"):
            self.__dict__.pop(name, None)
        for found in self.findings.values():
            found.evidence = None


def require_memory(operation: Operation, device: str = "cpu") -> None:
    """Raise `JobError` if what validation needs does not fit into free memory, of the machine, the job or the device.

    Nothing has been allocated for it yet.
    """
    kept = _intermediates(operation)
    part = exact_part(operation)
    between = kept * operation.dtypes[operation.outputs[0]].itemsize + (_intermediates(part) + gathered(part)) * 8
    needed = COPIES * operation.nbytes() + INTERMEDIATE_COPIES * between
    where, free = min(free_memory(device).items(), key=lambda each: each[1])
    if needed > free:
        workspace = f", and {INTERMEDIATE_COPIES * between:,} for what lies between them" if between else ""
        raise JobError(
            f"{operation.describe()} needs {needed:,} bytes ({operation.nbytes():,} for its tensors, which validation "
            f"holds {COPIES} times{workspace}), and {free:,} are free {where}",
            where=operation.name,
            hint="Choose a smaller preset or a machine with more memory.",
        )


def _intermediates(operation: Operation) -> int:
    """Values between inputs and outputs, where there are many: scores, gates."""
    node, shapes = operation.node, operation.shapes
    if node.op_type == "Attention":
        q, k = (shapes[name] for name in node.inputs[:2])
        return q[0] * (node.attributes["q_num_heads"] if len(q) == 3 else q[1]) * q[-2] * k[-2]
    if node.op_type in ("GRU", "LSTM"):
        x, weight = (shapes[name] for name in node.inputs[:2])
        return math.prod(x[:2]) * math.prod(weight[:2])
    return 0


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
