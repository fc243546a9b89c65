"""Compare an operator's native answer with its reference: tolerance, repeatability, findings.

Imports NumPy and the contract; no framework.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d5suite.levels.contract import ContractError
from d5suite.levels.operator import Operator
from d5suite.network.operation import PRECISIONS, Operation, is_floating
from d5suite.network.work import work
from d5suite.validate.check import Check
from d5suite.validate.norms import UNIT_ROUNDOFF, Accuracy, accuracy, relative_l2
from d5suite.validate.operator.evidence import Evidence
from d5suite.validate.operator.products import Product

ROUNDINGS = 4.0
"""Allowance for rounding to the tensors' own type, in units of roundoff: rounding of the answer and
of intermediate values in the last steps. A recurrence is allowed √steps times as much."""

ACCUMULATION = 16.0
"""Allowance for sums, in units of float32's or float64's roundoff times √terms, the growth of
rounding errors of random sign (Higham, "Accuracy and Stability of Numerical Algorithms", section
2.8). Fast convolution algorithms need the factor. Sums in float16 or bfloat16, or inputs truncated
to TF32, exceed it many times."""

RERUNS = 4
"""Number of repeated calls on the same inputs, to test determinism."""

RERUN_TIME_S = 1.0
"""Seconds after which no further repetition starts."""


def tolerance(operation: Operation, *, backward: bool = False, dtype: np.dtype | None = None) -> float:
    """Return the accepted relative L2 error of an operation; see `ROUNDINGS` and `ACCUMULATION`.

    ``dtype`` is the tensor's type if it differs from the operation's precision: some statistics
    are always float32.
    """
    cost = work(operation)
    precision = operation.precision
    if dtype is not None:
        precision = next((key for key, value in PRECISIONS.items() if value == dtype), precision)
    own = UNIT_ROUNDOFF[precision]
    sums = UNIT_ROUNDOFF["fp64" if precision == "fp64" else "fp32"]
    terms = cost.backward_terms if backward else cost.terms
    return ROUNDINGS * own * math.sqrt(cost.steps) * (2 if backward else 1) + ACCUMULATION * sums * math.sqrt(terms)


@dataclass(frozen=True)
class Another:
    """Other inputs and the expected answer, for the checks after timing.

    Attributes
    ----------
    feed : callable
        Makes the native call and its arguments.
    expected : sequence
        The expected answer: arrays in the answer's types, or products.
    """

    feed: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
    expected: Sequence[np.ndarray | Product]


@dataclass
class Findings:
    """The checks of an operator, and what they leave for timing and for later checks.

    Attributes
    ----------
    checks : list of Check
    accuracy : Accuracy
        Errors of the worst tensor.
    repeatability : dict
        ``reruns``, ``identical``, the largest ``variance`` of an element over the runs, and
        ``apart``, the largest relative L2 error of a run against the first.
    call : callable
        The checked native call, which is timed.
    arguments : sequence
        The call's native arguments.
    first_call_s : float
        Seconds of the first call, with tracing and compilation; backward also with the recorded
        forward pass.
    names : sequence of str
        Names of the answer's tensors.
    answer : list of numpy.ndarray
        The checked answer.
    what : str
        What the answer was compared with.
    limit : callable
        Returns the tolerance of a type.
    feed : callable
        Takes a number, and makes other arguments of the call.
    another : callable
        Takes a number, from 1; makes other inputs and computes the expected answer in float64.
    evidence : Evidence or None
        The first wrong tensor.
    """

    checks: list[Check]
    accuracy: Accuracy
    repeatability: dict[str, Any]
    call: Callable[..., Any]
    arguments: Sequence[Any]
    first_call_s: float
    names: Sequence[str]
    answer: list[np.ndarray]
    what: str
    limit: Callable[[np.dtype], float]
    feed: Callable[[int], Sequence[Any]]
    another: Callable[[int], Another]
    evidence: Evidence | None = None

    def check_again(
        self,
        of: str,
        answer: list[np.ndarray],
        expected: Sequence[np.ndarray | Product],
        limit: Callable[[np.dtype], float] | None = None,
    ) -> Check:
        """Check an answer to other inputs, with the same tolerance; return the worst check."""
        checks, _, _ = compare(f"of {of} {self.what}", self.names, answer, expected, limit or self.limit)
        return max(checks, key=lambda check: (not check.passed, check.error - check.tolerance))

    def check_repeated(self, of: str, answer: list[np.ndarray], repeats: float = 0.0) -> Check:
        """Compare an answer to the same inputs with the proved one, and count it as a rerun.

        ``repeats`` is the backend's `Tolerance.repeats`; it applies if it exceeds the limit.
        """
        again, before = self.repeatability, self.answer
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, answer, strict=True)):
            apart = max(
                float(np.square(a.astype(np.float64) - b).max(initial=0.0)) for a, b in zip(before, answer, strict=True)
            )
            again |= {"identical": False, "variance": max(again["variance"], apart / 4)}
        again["reruns"] += 1
        expected = [value.astype(np.float64) for value in before]
        return self.check_again(of, answer, expected, lambda dtype: max(self.limit(dtype), repeats))


def rounded_as(answer: Sequence[np.ndarray], expected: Sequence[np.ndarray | Product]) -> list[np.ndarray | Product]:
    """Round expected tensors to the answer's types, which saves memory until they are needed."""
    return [
        wanted if isinstance(wanted, Product) else wanted.astype(got.dtype)
        for got, wanted in zip(answer, expected, strict=True)
    ]


def require_types(operator: Operator, clause: str, names: Sequence[str], answer: Sequence[np.ndarray]) -> None:
    """Raise `ContractError` unless the tensors have the operation's shapes and types."""
    operation = operator.operation
    if len(answer) != len(names):
        raise ContractError(operator.backend, clause, f"{len(answer)} tensors where {len(names)} are wanted")
    for name, value in zip(names, answer, strict=True):
        if value.shape != operation.shapes[name] or value.dtype != operation.dtypes[name]:
            raise ContractError(
                operator.backend, "operator.fetch", f"tensor {name!r} of {operation.name} is {value.dtype} of shape "
                f"{value.shape}, not {operation.dtypes[name]} of shape {operation.shapes[name]}",
            )  # fmt: skip


def repeatability(first: Sequence[np.ndarray], again: Callable[[], list[np.ndarray]], reruns: int) -> dict[str, Any]:
    """Call again until `RERUN_TIME_S` has passed, at least once, and compare the answers."""
    start = time.perf_counter()
    count, others = 0, []
    while count < reruns and (count == 0 or time.perf_counter() - start < RERUN_TIME_S):
        run = again()
        count += 1
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, run, strict=True)):
            others.append(run)
    variance = apart = 0.0
    if others:
        apart = max(relative_l2(run[i], first[i]) for run in others for i in range(len(first)))
        runs = [*others, *[first] * (1 + count - len(others))]
        variance = max(
            float(np.var(np.stack([run[i].astype(np.float64) for run in runs]), axis=0).max(initial=0.0))
            for i in range(len(first))
        )
    return {"reruns": count, "identical": not others, "variance": variance, "apart": apart}


def compare(
    what: str,
    names: Sequence[str],
    answer: Sequence[np.ndarray],
    expected: Iterable[np.ndarray | Product],
    limit: Callable[[np.dtype], float],
) -> tuple[list[Check], Accuracy, Evidence | None]:
    """Compare tensors one by one; large products by some rows and along random directions."""
    checks, evidence = [], None
    worst = Accuracy(-1.0, 0.0, 0.0, 0.0)
    compared: list[tuple[str, np.ndarray, np.ndarray]] = []
    for name, got, wanted in zip(names, answer, expected, strict=True):
        if isinstance(wanted, Product):
            compared.append((f"{name}, random rows,", *wanted.rows(got)))
            along, right = wanted.projected(got)
            checks.append(Check(f"{name} along random directions {what}", relative_l2(along, right), limit(got.dtype)))
            if not checks[-1].passed and evidence is None:
                evidence = Evidence(f"{name} along random directions", along, right)
        else:
            compared.append((name, got, wanted))
    for name, got, wanted in compared:
        rounded = is_floating(got.dtype)
        found = accuracy(got, wanted) if rounded else Accuracy(relative_l2(got, wanted), 0.0, 0.0, 0.0)
        check = Check(f"{name} {what}", found.relative_l2, limit(got.dtype) if rounded else 0.0)
        checks.append(check)
        if not check.passed and evidence is None:
            evidence = Evidence(name, got, wanted)
        if found.relative_l2 > worst.relative_l2:
            worst = found
    return checks, worst, evidence
