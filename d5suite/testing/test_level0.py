"""Every operator by itself at level 0: forward, backward, in every precision that is declared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation, Tensor
from d5suite.testing.operations import OPERATIONS
from d5suite.testing.subject import Subject
from d5suite.testing.waiting import ENOUGH_S, LEAST_S, elapsed, lasting, require_waiting
from d5suite.validate.operators import (
    DIRECTIONS,
    Oracle,
    Reference,
    check_backward,
    check_backward_float64,
    check_forward,
    direction,
    reference,
)

SEED = 1

FIRST = {operation.node.op_type: operation.name for operation in reversed(OPERATIONS)}
"""By operator: the operation that is tried in every precision; the others in float64 only."""


def _is_first(operation: Operation) -> bool:
    return FIRST[operation.node.op_type] == operation.name


def _require(subject: Subject, operation: Operation, *, backward: bool = False) -> None:
    subject.require(level=0)
    if operation.precision not in subject.backend.precisions:
        pytest.skip(f"no {operation.precision}: {subject.backend.absent.get(operation.precision, 'not declared')}")
    lacking = subject.backend.lacks(operation, backward=backward)
    if lacking:
        pytest.skip(lacking)


@pytest.mark.parametrize(
    ("operation", "precision"),
    [
        pytest.param(operation, precision, id=f"{operation.name}-{precision}")
        for operation in OPERATIONS
        for precision in ("fp64", "fp32", "bf16", "fp16")
        if precision == "fp64" or _is_first(operation)
    ],
)
def test_forward(subject: Subject, operation: Operation, precision: str) -> None:
    if precision == "fp64":  # or the most precise that there is
        precision = subject.exact
    operation = operation.with_precision(precision)
    _require(subject, operation)
    known = reference(operation, SEED, backward=False)
    found = check_forward(subject.operator(operation), known, SEED)
    subject.prove("operators.meaning", found.checks)
    subject.hold("operator.forward", found.repeatability["identical"], f"{operation.name} changes from call to call")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_backward(subject: Subject, operation: Operation) -> None:
    exact = operation.with_precision(subject.exact)
    _require(subject, exact, backward=True)
    if not operation.differentiable:
        pytest.skip("nothing to differentiate by")
    proved = subject.operator(exact)
    vouched = exact.precision == "fp64"
    known = reference(exact, SEED, backward=True) if vouched else _differences(exact)
    subject.prove("operator.backward", check_backward_float64(proved, known, SEED))
    for precision in subject.backend.precisions if _is_first(operation) else ():
        timed = operation.with_precision(precision)
        if precision != exact.precision and subject.backend.lacks(timed, backward=True) is None:
            operator = subject.operator(timed)
            found = (
                check_backward(operator, proved, SEED).checks
                if vouched
                else check_backward_float64(operator, _differences(timed), SEED)
            )
            subject.prove("operator.backward", found)


def _differences(operation: Operation) -> Reference:
    """Central differences at the inputs of the operation's own precision, where no float64 operator vouches for it."""
    oracle, arrays, heads = Oracle(operation), operation.draw(SEED), operation.draw_gradients(SEED)
    return Reference(
        whole=True,
        outputs=[],
        derivatives={
            (index, draw): oracle.derivative(arrays, heads, {index: direction(operation, index, draw)})
            for index in operation.differentiable
            for draw in range(DIRECTIONS)
        },
    )


def test_inputs_stay_as_they_are(subject: Subject) -> None:
    """Forward and backward, on tensors that several operators may share."""
    statistics = {"s": (4,), "b": (4,), "m": (4,), "v": Tensor((4,), low=0.5, high=2.0)}
    operation = Operation("BatchNormalization", {"X": (4, 4, 6, 5), **statistics}, {"training_mode": 1})
    _require(subject, operation)
    operator = subject.operator(operation)
    feed = operator.feed(operation.draw(SEED))
    first = operator.fetch(operator.forward(*feed))
    if subject.backend.lacks(operation, backward=True) is None:
        operator.backward(feed)(*operator.feed_gradients(operation.draw_gradients(SEED)))
    again = operator.fetch(operator.forward(*feed))
    subject.same("operator.forward", "on the inputs used before", {"output": again[0]}, {"output": first[0]})


@pytest.mark.parametrize(
    "operation",
    [
        operation
        for operation in OPERATIONS
        if operation.name in ("LSTM-plain", "GRU-plain", "ConvTranspose-2d", "Gemm")
    ],
    ids=lambda operation: operation.name,
)
def test_an_operator_keeps_nothing_of_an_earlier_feed(subject: Subject, operation: Operation) -> None:
    """Weights that a kernel has packed for itself, for example."""
    _require(subject, operation)
    operator = subject.operator(operation)

    def answer(seed: int) -> np.ndarray:
        return operator.fetch(operator.forward(*operator.feed(operation.draw(seed))))[0]

    first, other, again = answer(SEED), answer(SEED + 1), answer(SEED)
    fresh = subject.operator(operation)
    expected = fresh.fetch(fresh.forward(*fresh.feed(operation.draw(SEED + 1))))[0]
    found, wanted = {"first": again, "second": other}, {"first": first, "second": expected}
    subject.same("operator.forward", f"{operation.name} after another feed", found, wanted)


def test_synchronize_waits_for_an_operator(subject: Subject) -> None:
    def product(size: int) -> Operation:
        return Operation("MatMul", {"A": (size, size), "B": (size, size)}).with_precision(precision)

    precision = "fp32" if "fp32" in subject.backend.precisions else subject.exact
    _require(subject, product(64))

    def prepared(size: int) -> tuple[Operator, Callable[[], Any]]:
        operator = subject.operator(product(size))
        feed = operator.feed(product(size).draw(SEED))
        return operator, lambda: operator.forward(*feed)

    def seconds(size: int) -> float:
        operator, call = prepared(size)
        return elapsed(lambda: operator.fetch(call()))

    # Long beside the time to issue it, and then many; a result of 16 MB and more takes long to fetch from a device.
    operator, call = prepared(lasting(seconds, 512, 2048, LEAST_S / 10))
    times = math.ceil(ENOUGH_S / elapsed(lambda: operator.fetch(call())))

    def work() -> Any:
        for _ in range(times - 1):
            call()
        return call()

    require_waiting(subject, "operator.synchronize", work, operator.synchronize, operator.fetch)


def test_views_are_told_from_results_in_memory_of_their_own(subject: Subject) -> None:
    """So that nobody takes a view, for which nothing was moved, for the fastest of all copies."""
    operation = Operation("Mul", {"A": (2, 3), "B": (2, 3)})
    _require(subject, operation)
    operator = subject.operator(operation)
    a, b = operator.feed(operation.draw(SEED))
    if operator.extent(a) is None:
        pytest.skip(f"{subject.backend.name} does not tell where its tensors lie")
    product = operator.forward(a, b)
    for results, arguments, backward, wanted in (
        (product, [a, b], False, []),
        (product, [b, product], False, ["Mul.0"]),
        ([a, b], [b], True, ["B"]),
    ):
        found = operator.views(results, arguments, backward=backward)
        subject.hold("operator.extent", found == wanted, f"views {found} are found where {wanted} are")


def test_wrong_arrays_are_refused(subject: Subject) -> None:
    operation = Operation("Add", {"a": (2, 3), "b": (2, 3)})
    _require(subject, operation)
    operator = subject.operator(operation)
    a, b = operation.draw(SEED)
    assert a is not None and b is not None
    for wrong in ([a], [a, b[:1]], [a, b.astype(np.float64)], [a, None]):
        with subject.refuses("operator.feed", "a wrong feed", "Add"):
            operator.feed(wrong)


def test_every_declared_operator_is_in_an_operation(subject: Subject) -> None:
    subject.require(level=0)
    tried = {operation.node.op_type for operation in OPERATIONS}
    untried = sorted((subject.backend.operators | subject.backend.single_operators) - tried)
    what = f"nothing here tries {', '.join(untried)}: d5suite/testing/operations.py has no operation of it"
    subject.hold("backend.operators", not untried, what)
