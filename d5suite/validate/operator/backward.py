"""An operator's gradients: float64 against central differences, as timed against float64.

Imports NumPy and the contract; no framework.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation
from d5suite.validate.check import Check
from d5suite.validate.norms import relative_l2
from d5suite.validate.operator.compare import (
    RERUNS,
    Another,
    Findings,
    compare,
    repeatability,
    require_types,
    rounded_as,
    tolerance,
)
from d5suite.validate.operator.evidence import Evidence
from d5suite.validate.operator.oracle import OperatorOracle, direction
from d5suite.validate.operator.pieces import in_pieces
from d5suite.validate.operator.products import Product, is_product, product_gradients
from d5suite.validate.operator.reference import DIRECTIONS, TOGETHER, OperatorReference

DIFFERENCES = 1e-6
"""Accepted error of a float64 gradient against central differences, relative to the gradient's
norm; about 1e-8 is observed."""

DEVIATIONS = 4.0
"""Widens `DIFFERENCES` for a custom operator proved in less than float64, in standard deviations of
a gradient's rounding along a standard normal direction. Differences are always in float64."""

FLOAT64_GRADIENTS = 1e-10
"""Accepted relative L2 error between two float64 gradients of one operator."""

GRID = 48
"""Evenly spread elements of a wrong gradient whose central differences are plotted."""


def _widened(arrays: Sequence[np.ndarray | None], exact: Operation) -> list[np.ndarray | None]:
    """Convert inputs to the types of the float64 operation."""
    return [
        None if array is None else array.astype(exact.dtypes[name])
        for name, array in zip(exact.node.inputs, arrays, strict=True)
    ]


def _gradients64(exact: Operator, seed: int) -> list[np.ndarray]:
    """Return the gradients at the operator's float64 inputs, as in `Operation.differentiable`."""
    operation = exact.operation
    arrays, gradients = operation.draw(seed), operation.draw_gradients(seed)
    operation.rehearse(arrays, backward=True)
    answer = exact.fetch_gradients(exact.backward(exact.feed(arrays))(*exact.feed_gradients(gradients)))
    names = [operation.node.inputs[index] for index in operation.differentiable]
    require_types(exact, "operator.backward", names, answer)
    return answer


def check_backward_float64(exact: Operator, known: OperatorReference, seed: int) -> list[Check]:
    """Compare float64 gradients with central differences and a trusted gradient, if known.

    Parameters
    ----------
    exact : Operator
        The float64 operator for `exact_part`.
    known : OperatorReference
    seed : int
    """
    operation = exact.operation
    limit = DIFFERENCES + DEVIATIONS * tolerance(operation, backward=True)
    found = dict(zip(operation.differentiable, _gradients64(exact, seed), strict=True))
    checks = []
    for key in sorted({key for key, _ in known.derivatives}):
        moved = operation.differentiable if key == TOGETHER else (key,)
        finite = all(bool(np.isfinite(found[index]).all()) for index in moved)
        norm = math.sqrt(sum(float(np.linalg.norm(found[index])) ** 2 for index in moved))
        errors = []
        for draw in range(DIRECTIONS):
            along = sum(float((found[index] * direction(operation, index, draw)).sum()) for index in moved)
            wanted = known.derivatives[key, draw]
            errors.append(abs(along - wanted) / (max(norm, abs(wanted)) or 1.0))
        names = ", ".join(operation.node.inputs[index] for index in moved)
        text = f"gradient of {names} ({operation.precision}) vs central differences"
        checks.append(Check(text, max(errors) if finite else math.inf, limit))
    for index, right in known.gradients.items():
        name = f"gradient of {operation.node.inputs[index]} (fp64) vs {known.source}'s"
        checks.append(Check(name, relative_l2(found[index], right), FLOAT64_GRADIENTS))
    return checks


def check_backward(operator: Operator, exact: Operator, seed: int, reruns: int = RERUNS) -> Findings:
    """Compare gradients, as timed, with the proved float64 operator's at the same inputs.

    Parameters
    ----------
    operator : Operator
        As timed.
    exact : Operator
        The same backend's float64 operator for `exact_part`.
    seed : int
    reruns : int
    """
    operation, proved = operator.operation, exact.operation
    arrays, gradients = operation.draw(seed), operation.draw_gradients(seed)
    feed, heads = operator.feed(arrays), operator.feed_gradients(gradients)
    start = time.perf_counter()
    call = operator.backward(feed)
    output = call(*heads)
    operator.synchronize(output)
    first_call_s = time.perf_counter() - start
    answer = operator.fetch_gradients(output)
    names = [operation.node.inputs[index] for index in operation.differentiable]
    require_types(operator, "operator.backward", names, answer)
    repeated = repeatability(answer, lambda: operator.fetch_gradients(call(*heads)), reruns)
    expected = _expected(operation, exact, arrays, gradients)
    pieces = in_pieces(operation)
    what = "products in fp64" if is_product(operation) else f"its {pieces.count} pieces in fp64" if pieces else ""
    what = f"({operation.precision}) vs {what or proved.precision}"
    names = [f"gradient of {name}" for name in names]

    def limit(dtype: np.dtype) -> float:
        return tolerance(operation, backward=True, dtype=dtype)

    def another(number: int) -> Another:
        """Make other gradients of the outputs; from number 2 on, other inputs too."""
        same = number == 1
        inputs, above = arrays if same else operation.draw(seed + number), operation.draw_gradients(seed + number)
        wanted = rounded_as(answer, _expected(operation, exact, inputs, above))

        def fed() -> tuple[Callable[..., Any], Sequence[Any]]:
            return call if same else operator.backward(operator.feed(inputs)), operator.feed_gradients(above)

        return Another(fed, wanted)

    checks, worst, evidence = compare(what, names, answer, expected, limit)
    return Findings(
        checks, worst, repeated, call, heads, first_call_s, names, answer, what, limit,
        lambda number: operator.feed_gradients(operation.draw_gradients(seed + number)), another, evidence,
    )  # fmt: skip


def _expected(
    operation: Operation, exact: Operator, arrays: Sequence[np.ndarray | None], gradients: Sequence[np.ndarray]
) -> Sequence[np.ndarray | Product]:
    """Return the float64 gradients at these inputs, from an operator for the whole or a piece."""
    proved, pieces = exact.operation, in_pieces(operation)
    if is_product(operation):
        return product_gradients(operation, arrays, gradients[0])
    if pieces is not None:
        return pieces.gradients(exact, arrays, gradients)
    heads = [
        g.astype(proved.dtypes[proved.node.outputs[i]]) for i, g in zip(proved.differentiated, gradients, strict=True)
    ]
    native = exact.backward(exact.feed(_widened(arrays, proved)))(*exact.feed_gradients(heads))
    return exact.fetch_gradients(native)


def gradient_evidence(exact: Operator, known: OperatorReference, seed: int) -> Evidence:
    """Return the worst float64 gradient that failed `check_backward_float64`.

    The whole gradient if a trusted one is known, else `GRID` evenly spread elements with their
    central differences.
    """
    operation = exact.operation
    found = dict(zip(operation.differentiable, _gradients64(exact, seed), strict=True))
    arrays, gradients = operation.draw(seed), operation.draw_gradients(seed)
    oracle = OperatorOracle(operation)
    candidates = []
    for index, gradient in found.items():
        name = f"gradient of {operation.node.inputs[index]} ({operation.precision})"
        if index in known.gradients:
            candidates.append(Evidence(name, gradient, known.gradients[index]))
            continue
        places = np.ix_(*_spread(gradient.shape))
        expected = np.zeros(gradient[places].shape)
        numbers = np.arange(gradient.size).reshape(gradient.shape)[places]
        for place in np.ndindex(expected.shape):
            unit = np.zeros(gradient.shape)
            unit.reshape(-1)[numbers[place]] = 1.0
            expected[place] = oracle.derivative(arrays, gradients, {index: unit})
        text = f"{name}, {expected.size} of {gradient.size} elements"
        candidates.append(Evidence(text, gradient[places], expected))
    return max(candidates, key=lambda each: relative_l2(each.answer, each.expected))


def _spread(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return evenly spread indices per axis: at most `GRID` combinations, densest on last axes."""
    counts = [1] * len(shape)
    while True:
        longer = [i for i, n in enumerate(counts) if n < shape[i] and math.prod(counts) // n * (n + 1) <= GRID]
        if not longer:
            return [np.linspace(0, n - 1, count).astype(int) for n, count in zip(shape, counts, strict=True)]
        counts[min(longer, key=lambda i: (counts[i], -i))] += 1
