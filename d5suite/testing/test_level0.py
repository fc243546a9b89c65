"""Single operators at level 0: forward and backward, in every declared precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from d5suite.levels.description import PRECISIONS
from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation, Tensor
from d5suite.testing.operations import OPERATIONS, REPRESENTATIVE
from d5suite.testing.subject import Subject
from d5suite.testing.waiting import ENOUGH_S, LEAST_S, elapsed, lasting, require_waiting
from d5suite.validate.operator.backward import check_backward, check_backward_float64
from d5suite.validate.operator.compare import RERUNS
from d5suite.validate.operator.forward import check_forward
from d5suite.validate.operator.oracle import OperatorOracle, direction
from d5suite.validate.operator.reference import DIRECTIONS, OperatorReference, reference

SEED = 1

FIRST = {operation.node.op_type: operation.name for operation in reversed(OPERATIONS)}
"""The first operation of each operator: it runs in every precision, the others in float64."""

CASES = [
    pytest.param(operation, precision, id=f"{operation.name}-{precision}", marks=() if quick else pytest.mark.slow)
    for operation in OPERATIONS
    for first in (operation.name == FIRST[operation.node.op_type],)
    for precision in (("fp64", "fp32", "bf16", "fp16") if first else ("fp64",))
    for quick in (first and (precision == "fp64" or operation.node.op_type in REPRESENTATIVE),)
]
"""Operations and precisions; ``fp64`` means the most precise one that the backend declares."""


def _require(subject: Subject, operation: Operation, *, backward: bool = False) -> None:
    subject.require(level=0, precision=operation.precision)
    lacking = subject.backend.lacks(operation, backward=backward)
    if lacking:
        pytest.skip(lacking)


@pytest.mark.parametrize(("operation", "precision"), CASES)
def test_forward(subject: Subject, operation: Operation, precision: str) -> None:
    operation = operation.with_precision(subject.exact if precision == "fp64" else precision)
    _require(subject, operation)
    known = reference(operation, SEED, backward=False)
    found = check_forward(subject.operator(operation), known, SEED)
    subject.prove("operators.meaning", found.checks)
    what = f"{operation.name} changes from call to call"
    subject.deterministic("operator.forward", what, found, operation.precision)


@pytest.fixture(scope="module")
def proved(subject: Subject) -> Callable[[Operation], Operator]:
    """Prove an operation's gradient in the most precise precision, once for consecutive cases."""
    last: list[tuple[Operation, Operator]] = []

    def prove(operation: Operation) -> Operator:
        if not last or last[0][0] is not operation:
            last.clear()
            exact = operation.with_precision(subject.exact)
            operator = subject.operator(exact)
            subject.prove("operator.backward", check_backward_float64(operator, _known(exact, SEED), SEED))
            last.append((operation, operator))
        return last[0][1]

    return prove


@pytest.mark.parametrize(("operation", "precision"), CASES)
def test_backward(
    subject: Subject, proved: Callable[[Operation], Operator], operation: Operation, precision: str
) -> None:
    exact = operation.with_precision(subject.exact)
    _require(subject, exact, backward=True)
    if not operation.differentiable:
        pytest.skip("nothing to differentiate by")
    vouching = proved(operation)
    if precision in ("fp64", exact.precision):
        return
    timed = operation.with_precision(precision)
    _require(subject, timed, backward=True)
    _prove_backward(subject, subject.operator(timed), vouching, SEED)


def _prove_backward(subject: Subject, operator: Operator, vouching: Operator, seed: int, reruns: int = RERUNS) -> None:
    """Prove a gradient by the backend's float64 gradient, if there is one, or by differences."""
    operation = operator.operation
    if operation.precision == "fp64" or vouching.operation.precision != "fp64":
        subject.prove("operator.backward", check_backward_float64(operator, _known(operation, seed), seed))
        return
    found = check_backward(operator, vouching, seed, reruns=reruns)
    subject.prove("operator.backward", found.checks)
    what = f"the gradient of {operation.name} changes from call to call"
    subject.deterministic("operator.backward", what, found, operation.precision)


def _known(operation: Operation, seed: int) -> OperatorReference:
    """Return central differences, at inputs rounded to the operation's precision."""
    if operation.precision == "fp64":
        return reference(operation, seed, backward=True)
    oracle, arrays, heads = OperatorOracle(operation), operation.draw(seed), operation.draw_gradients(seed)
    return OperatorReference(
        whole=True,
        outputs=[],
        derivatives={
            (index, draw): oracle.derivative(arrays, heads, {index: direction(operation, index, draw)})
            for index in operation.differentiable
            for draw in range(DIRECTIONS)
        },
    )


def test_inputs_stay_as_they_are(subject: Subject) -> None:
    """Other operators may use the same inputs."""
    statistics = {"s": (4,), "b": (4,), "m": (4,), "v": Tensor((4,), low=0.5, high=2.0)}
    operation = Operation("BatchNormalization", {"X": (4, 4, 6, 5), **statistics}, {"training_mode": 1})
    _require(subject, operation)
    operator = subject.operator(operation)
    feed = operator.feed(operation.draw(SEED))
    first = operator.fetch(operator.forward(*feed))
    if subject.backend.lacks(operation, backward=True) is None:
        operator.backward(feed)(*operator.feed_gradients(operation.draw_gradients(SEED)))
    again = operator.fetch(operator.forward(*feed))
    outputs = {"output": again[0]}, {"output": first[0]}
    subject.repeated("operator.forward", "on the inputs used before", *outputs, operation.precision)


FEEDS = 6
"""Feeds of one operator with different values."""

FED = [
    pytest.param(
        operation, precision, id=f"{kind}-{precision}", marks=() if kind in ("Conv", "Softmax") else pytest.mark.slow
    )
    for kind in REPRESENTATIVE
    for operation in OPERATIONS
    if operation.name == FIRST[kind]
    for precision in PRECISIONS
]


def _copies(arrays: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    return [None if array is None else array.copy() for array in arrays]


def _by_name(values: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    return {str(index): value for index, value in enumerate(values) if value is not None}


@pytest.mark.parametrize(("operation", "precision"), FED)
def test_every_feed_of_an_operator_is_answered_and_its_answer_kept(
    subject: Subject, operation: Operation, precision: str
) -> None:
    operation = operation.with_precision(precision)
    _require(subject, operation)
    operator = subject.operator(operation)
    draws = [operation.draw(SEED + index) for index in range(FEEDS)]
    given = [_copies(draw) for draw in draws]
    feeds = [operator.feed(arrays) for arrays in given]
    held = [operator.forward(*feed) for feed in feeds]
    once = []
    for index in range(FEEDS):
        found = check_forward(operator, reference(operation, SEED + index, backward=False), SEED + index, reruns=1)
        subject.prove("operators.meaning", found.checks)
        what = f"feed {index + 1} is answered differently"
        subject.deterministic("operator.forward", what, found, precision)
        once.append(_by_name(operator.fetch(operator.forward(*feeds[index]))))
    for index, native in enumerate(held):
        what = f"the answer to feed {index + 1}, fetched after others,"
        subject.repeated("operator.lifetime", what, _by_name(operator.fetch(native)), once[index], precision)
    for arrays, draw in zip(given, draws, strict=True):
        subject.same("operator.copy", "the arrays fed, after all calls", _by_name(arrays), _by_name(draw))
    feed = operator.feed(given[0])
    for array, other in zip(given[0], draws[1], strict=True):
        if array is not None:
            array[...] = other
    found_copy = _by_name(operator.fetch(operator.forward(*feed)))
    what = "the answer after the arrays fed were overwritten"
    subject.repeated("operator.copy", what, found_copy, once[0], precision)


@pytest.mark.parametrize(("operation", "precision"), FED)
def test_every_backward_pass_of_an_operator_is_made_anew(
    subject: Subject, proved: Callable[[Operation], Operator], operation: Operation, precision: str
) -> None:
    exact, timed = operation.with_precision(subject.exact), operation.with_precision(precision)
    for each in (exact, timed):
        _require(subject, each, backward=True)
    vouching, operator = proved(operation), subject.operator(timed)
    for seed in range(SEED, SEED + FEEDS):
        _prove_backward(subject, operator, vouching, seed, reruns=1)
    seeds = range(SEED, SEED + FEEDS)
    above = [timed.draw_gradients(seed) for seed in seeds]
    given = [[array.copy() for array in arrays] for arrays in above]
    heads = [operator.feed_gradients(arrays) for arrays in given]
    one, two, fresh = (operator.backward(operator.feed(timed.draw(seed))) for seed in (SEED, SEED + 1, SEED))
    found = [_by_name(operator.fetch_gradients(one(*each))) for each in heads]
    expected = _by_name(operator.fetch_gradients(fresh(*heads[-1])))
    what = f"the gradient of call {FEEDS} of one function"
    subject.repeated("operator.backward", what, found[-1], expected, precision)
    subject.same("operator.copy", "the outputs' gradients fed, after a call", _by_name(given[0]), _by_name(above[0]))
    two(*heads[1])
    again = _by_name(operator.fetch_gradients(one(*heads[0])))
    subject.repeated("operator.lifetime", "the gradient after another function's call", again, found[0], precision)
    head = operator.feed_gradients(given[0])
    for array, other in zip(given[0], above[1], strict=True):
        array[...] = other
    again = _by_name(operator.fetch_gradients(one(*head)))
    what = "the gradient after the arrays fed were overwritten"
    subject.repeated("operator.copy", what, again, found[0], precision)


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
    """For example, a kernel may pack the weights."""
    _require(subject, operation)
    operator = subject.operator(operation)

    def answer(seed: int) -> np.ndarray:
        return operator.fetch(operator.forward(*operator.feed(operation.draw(seed))))[0]

    first, other, again = answer(SEED), answer(SEED + 1), answer(SEED)
    fresh = subject.operator(operation)
    expected = fresh.fetch(fresh.forward(*fresh.feed(operation.draw(SEED + 1))))[0]
    found, wanted = {"first": again, "second": other}, {"first": first, "second": expected}
    subject.repeated("operator.forward", f"{operation.name} after another feed", found, wanted, operation.precision)


def test_synchronize_waits_for_an_operator(subject: Subject) -> None:
    def product(size: int) -> Operation:
        return Operation("MatMul", {"A": (size, size), "B": (size, size)}).with_precision(precision)

    precision = subject.timed
    _require(subject, product(64))

    def prepared(size: int) -> tuple[Operator, Callable[[], Any]]:
        operator = subject.operator(product(size))
        feed = operator.feed(product(size).draw(SEED))
        return operator, lambda: operator.forward(*feed)

    def seconds(size: int) -> float:
        operator, call = prepared(size)
        return elapsed(lambda: operator.fetch(call()))

    # Many products, each much longer than issuing it. One large product would do, but fetching its
    # 16 MB from a device takes long.
    operator, call = prepared(lasting(seconds, 512, 2048, LEAST_S / 10))
    times = math.ceil(ENOUGH_S / elapsed(lambda: operator.fetch(call())))

    def work() -> Any:
        for _ in range(times - 1):
            call()
        return call()

    require_waiting(subject, "operator.synchronize", work, operator.synchronize, operator.fetch)


def test_views_are_told_from_copies(subject: Subject) -> None:
    """A view moves no bytes, and must not be timed as a copy."""
    operation = Operation("Mul", {"A": (2, 3), "B": (2, 3)})
    _require(subject, operation)
    operator = subject.operator(operation)
    a, b = operator.feed(operation.draw(SEED))
    if operator.extent(a) is None:
        pytest.skip(f"{subject.backend.name} does not report where tensors lie in memory")
    product = operator.forward(a, b)
    for results, arguments, backward, wanted in (
        (product, [a, b], False, []),
        (product, [b, product], False, ["Mul.0"]),
        ([a, b], [b], True, ["B"]),
    ):
        found = operator.views(results, arguments, backward=backward)
        subject.hold("operator.extent", found == wanted, f"views {found} are reported, not {wanted}")


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
    what = f"no operation in d5suite/testing/operations.py tests {', '.join(untried)}"
    subject.hold("backend.operators", not untried, what)
