"""One ONNX node: the native operators and the reference, which both directions share."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends import Selection, discover
from d5suite.custom import CustomOperator
from d5suite.errors import DataError, JobError
from d5suite.files import import_file
from d5suite.instruments.clock import now
from d5suite.instruments.memory import free_memory
from d5suite.instruments.sampling import sample_kernel
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import Job, OperationCase
from d5suite.levels.operator import Operator
from d5suite.network.operation import PRECISIONS, Operation
from d5suite.network.work import work
from d5suite.validate.operator.compare import compare, tolerance
from d5suite.validate.operator.pieces import gathered
from d5suite.validate.operator.products import product
from d5suite.validate.operator.reference import OperatorReference, exact_part, reference
from d5suite.workloads.base import Workload

COPIES = 8
"""Copies of an operation's tensors that a proof may hold at once: inputs, outputs and gradients, as
timed, in float64 and in the reference."""

FURTHER = 2
"""Number of further inputs: one takes turns with the proved input while timed, and one is fed after
timing."""

INTERMEDIATE_COPIES = 4
"""Copies of intermediate values: attention's scores exist unmasked, masked, after the softmax, and
in the backward pass."""

CEILING_GEMM = 2048
"""Rows and columns of the matrices whose product sets the arithmetic ceiling: large enough for
libraries to reach their peak, and a fifth of a second on a laptop."""

CEILING_COPY = {"cpu": 30 << 20, "cuda": 256 << 20}
"""Bytes whose copy sets the bandwidth ceiling, by device. On a CPU, 60 MiB are read and written,
more than most processors' caches hold. For results above 32 MiB the C library requests every page
anew from the system: on a virtual machine this took five times as long as copying, and a framework
reached 1.7 of 10 GB/s. A GPU's allocator reuses memory."""

CEILING_ROW = 1024
"""Elements per row of the copy. For vectors, ONNX's shape inference follows the values for seconds,
and one framework copies one value at a time: 0.9 of 23 GB/s."""

CEILING_TIME_S = 0.5
"""Sampling budget of each ceiling, in seconds."""

CEILING_BUDGETS = 10
"""Time limit of a ceiling, in multiples of a measurement's sampling budget. `CEILING_ROUNDS`
samples are always taken."""

CEILING_ROUNDS = 2
"""Fewest samples of a ceiling, after the first call and the call that sets the calls per sample."""


class OperatorWorkload(Workload):
    """One ONNX node on one backend.

    Parameters
    ----------
    job : Job
    case : OperationCase
    selection : Selection

    Raises
    ------
    JobError
        If the operation's proof does not fit into memory.
    """

    kind = "operation"
    operator_s = 0.0
    """Seconds that it took to build `operator`; 0 before."""

    def __init__(self, job: Job, case: OperationCase, selection: Selection) -> None:
        super().__init__(job, case, selection)
        self.case = case
        self.reference = case.reference
        self.operation = operation_from_dict(case.operation, job.precision)
        require_memory(self.operation, job.device)

    @classmethod
    def ceilings(cls, job: Job, selection: Selection, tell: Callable[[str], None]) -> dict[str, float | None]:
        """Measure the rates that this backend reaches in a large matrix product and a large copy.

        Returns
        -------
        dict
            FLOP/s and bytes/s; None if the answer is wrong, or computed only when fetched.
        """
        tell("measuring the machine's ceilings")
        found = _ceilings(job, selection)
        # Hundreds of collections follow; each would take 0.2 s to walk the framework's objects.
        gc.collect()
        gc.freeze()
        return found

    def facts(self) -> dict[str, Any]:
        return {}

    @cached_property
    def operator(self) -> Operator:
        """The operator as it is timed: the same object is proved and timed."""
        start = now()
        made = self.backend.operator(self.operation, mode=self.selection.mode, device=self.job.device)
        self.operator_s = now() - start
        return made

    @cached_property
    def exact(self) -> Operator:
        """The operation, or one piece of a large operation, in float64; for proofs only."""
        mode = self.backend.proving_mode(self.selection.mode)
        return self.backend.operator(exact_part(self.operation), mode=mode, device=self.job.device)

    @cached_property
    def known(self) -> OperatorReference:
        """The recorded reference, or a new reference if the job runs by hand."""
        backward = "backward" in self.case.measurements
        recorded = OperatorReference.load(Path(self.reference), self.operation.name) if self.reference else None
        if recorded is not None and (recorded.derivatives or not backward):
            return recorded
        return reference(self.operation, self.job.seed, backward=backward, further=FURTHER)

    def free_validation(self) -> None:
        for name in ("exact", "known"):
            self.__dict__.pop(name, None)
        gc.collect()


def operation_from_dict(content: Mapping[str, Any], precision: str) -> Operation:
    """Rebuild a job's operation; import a custom operator from the file that the job names.

    Raises
    ------
    DataError
        If the file does not describe the custom operator.
    """
    custom = content.get("custom")
    found = _custom_operator(custom["file"], custom["name"]) if custom else None
    return Operation.from_dict(content, precision=precision, custom=found)


def _custom_operator(file: str, name: str) -> CustomOperator:
    """Return the custom operator of this name from a user's file."""
    for value in vars(import_file(file)).values():
        described = [value] if isinstance(value, CustomOperator) else ()
        if not described and callable(getattr(type(value), "custom_operators", None)):
            described = value.custom_operators()
        for each in described:
            if each.name == name:
                return each
    raise DataError(f"it describes no custom operator {name!r}", where=file)


def _ceilings(job: Job, selection: Selection) -> dict[str, float | None]:
    budget = max(SamplingSettings.from_dict(case.sampling).max_time_s for case in job.cases)
    # The fastest call counts, so calls that warm up do no harm.
    settings = SamplingSettings(
        max_time_s=min(CEILING_TIME_S, CEILING_BUDGETS * budget), min_rounds=CEILING_ROUNDS, warmup="off"
    )
    # Concatenating two halves needs a copy: a view is impossible.
    half = (CEILING_COPY[job.device] // 2 // PRECISIONS[job.precision].itemsize // CEILING_ROW, CEILING_ROW)
    square = (CEILING_GEMM, CEILING_GEMM)
    found: dict[str, float | None] = {}
    for key, operator_name, shapes, attributes in (
        ("flops_per_s", "Gemm", {"A": square, "B": square}, {}),
        ("bytes_per_s", "Concat", {"A": half, "B": half}, {"axis": 0}),
    ):
        if selection.backend.lacks_operator(operator_name, job.precision) is None:
            operation = Operation(operator_name, shapes, attributes, name=f"large {key}", precision=job.precision)
            operator = selection.backend.operator(operation, mode=selection.mode, device=job.device)
            arrays = operation.draw(job.seed)
            feed = tuple(operator.feed(arrays))
            samples, _ = sample_kernel(operator.forward, feed, operator.synchronize, settings)
            cost, call_s = work(operation), min(samples.samples_s)
            right = _is_right(operator, arrays, feed, call_s)
            found[key] = (cost.flops if key == "flops_per_s" else cost.bytes) / call_s if right else None
    return found


LATE = 2.0
"""Largest accepted difference between the first and the second fetch of an answer, in multiples of
a call's time."""

LEAST_CALL_S = 1e-3
"""Least time of a call in that comparison: the time to fetch 30 MiB varies by more than a short
call takes."""


def _is_right(operator: Operator, arrays: Sequence[np.ndarray | None], feed: Sequence[Any], call_s: float) -> bool:
    """Return whether a ceiling's answer is right, and computed in the call, not in the fetch."""
    operation, firsts, seconds = operator.operation, [], []
    for _ in range(2):
        result = operator.forward(*feed)
        operator.synchronize(result)
        times = [time.perf_counter()]
        for _ in range(2):
            (answer,) = operator.fetch(result)
            times.append(time.perf_counter())
        firsts.append(times[1] - times[0])
        seconds.append(times[2] - times[1])
    if min(firsts) - min(seconds) > LATE * max(call_s, LEAST_CALL_S):
        return False
    is_product = operation.node.op_type == "Gemm"
    whole = np.concatenate([array for array in arrays if array is not None]) if not is_product else None
    expected = product(operation, arrays)[0] if whole is None else whole
    checks, _, _ = compare("", operation.outputs, [answer], [expected], lambda dtype: tolerance(operation, dtype=dtype))
    return all(check.passed for check in checks)


def require_memory(operation: Operation, device: str = "cpu") -> None:
    """Raise `JobError` if an operation's proof does not fit into free memory.

    The least free memory of machine, job and device counts, before the proof allocates anything.
    """
    kept = _intermediates(operation)
    part = exact_part(operation)
    between = kept * operation.dtypes[operation.outputs[0]].itemsize + (_intermediates(part) + gathered(part)) * 8
    needed = COPIES * operation.nbytes() + INTERMEDIATE_COPIES * between
    where, free = min(free_memory(device).items(), key=lambda each: each[1])
    if needed > free:
        workspace = f", and {INTERMEDIATE_COPIES * between:,} for intermediate values" if between else ""
        raise JobError(
            f"{operation.describe()} needs {needed:,} bytes ({operation.nbytes():,} for its tensors, which validation "
            f"holds {COPIES} times{workspace}), and {free:,} are free {where}",
            where=operation.name,
            hint="Choose a smaller preset or a machine with more memory.",
        )


def _intermediates(operation: Operation) -> int:
    """Count intermediate values: attention's scores or a recurrence's gates; 0 for other nodes."""
    node, shapes = operation.node, operation.shapes
    if node.op_type == "Attention":
        q, k = (shapes[name] for name in node.inputs[:2])
        return q[0] * (node.attributes["q_num_heads"] if len(q) == 3 else q[1]) * q[-2] * k[-2]
    if node.op_type in ("GRU", "LSTM"):
        x, weight = (shapes[name] for name in node.inputs[:2])
        return math.prod(x[:2]) * math.prod(weight[:2])
    return 0


def compute_reference(job: Job, case: OperationCase) -> str:
    """Add an operation's reference to the case's file; return the source of its gradient.

    Raises
    ------
    JobError
        If the case names no file, or the reference does not fit into memory.
    """
    if case.reference is None:
        raise JobError("a job for references must say where they go")
    operation = operation_from_dict(case.operation, job.precision)
    require_memory(operation)
    backward = "backward" in case.measurements
    trusted = _trusted(exact_part(operation)) if backward else None
    found = reference(operation, job.seed, backward=backward, further=FURTHER, trusted=trusted)
    found.save(Path(case.reference), case.name)
    return found.source or "differences"


def _trusted(exact: Operation) -> Operator | None:
    """Return a float64 operator of an installed backend whose gradient is known to be right."""
    for backend in discover()[0].values():
        if exact.node.op_type in backend.right_gradients and backend.problem() is None:
            return backend.operator(exact)
    return None
