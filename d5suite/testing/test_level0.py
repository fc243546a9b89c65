"""Every operator by itself at level 0: forward, backward, in every precision that is declared."""

from __future__ import annotations

import numpy as np
import pytest

from d5suite.errors import D5Error
from d5suite.levels.contract import ContractError
from d5suite.network.operation import Operation, Tensor
from d5suite.testing.operations import OPERATIONS
from d5suite.testing.subject import Subject
from d5suite.validate.checks import Validation
from d5suite.validate.operators import (
    check_backward,
    check_backward_float64,
    check_forward,
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
    Validation().require(found.checks)
    assert found.repeatability["identical"], ContractError(
        subject.backend.name, "operator.forward", f"{operation.name} changes from call to call"
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_backward(subject: Subject, operation: Operation) -> None:
    exact = operation.with_precision("fp64")
    _require(subject, exact, backward=True)
    if not operation.differentiable:
        pytest.skip("nothing to differentiate by")
    proved = subject.operator(exact)
    Validation().require(check_backward_float64(proved, reference(exact, SEED, backward=True), SEED))
    for precision in subject.backend.precisions if _is_first(operation) else ():
        timed = operation.with_precision(precision)
        if precision != "fp64" and subject.backend.lacks(timed, backward=True) is None:
            Validation().require(check_backward(subject.operator(timed), proved, SEED).checks)


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
    np.testing.assert_array_equal(first[0], operator.fetch(operator.forward(*feed))[0])


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
    np.testing.assert_array_equal(first, again)
    expected = fresh.fetch(fresh.forward(*fresh.feed(operation.draw(SEED + 1))))[0]
    np.testing.assert_array_equal(other, expected)


def test_wrong_arrays_are_refused(subject: Subject) -> None:
    operation = Operation("Add", {"a": (2, 3), "b": (2, 3)})
    _require(subject, operation)
    operator = subject.operator(operation)
    a, b = operation.draw(SEED)
    assert a is not None and b is not None
    for wrong in ([a], [a, b[:1]], [a, b.astype(np.float64)], [a, None]):
        with pytest.raises(D5Error, match="Add"):
            operator.feed(wrong)


def test_every_declared_operator_is_in_an_operation(subject: Subject) -> None:
    subject.require(level=0)
    tried = {operation.node.op_type for operation in OPERATIONS}
    untried = sorted((subject.backend.operators | subject.backend.single_operators) - tried)
    if untried:
        pytest.skip(f"the kit has no operation of: {', '.join(untried)}; ONNX's own node tests cover them")
