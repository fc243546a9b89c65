"""An operator's outputs, as timed, against ONNX's reference evaluator in float64.

Imports NumPy and the contract; no framework.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation
from d5suite.validate.check import Check
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
from d5suite.validate.operator.pieces import in_pieces
from d5suite.validate.operator.products import Product, is_product, product
from d5suite.validate.operator.reference import OperatorReference


def check_forward(
    operator: Operator, known: OperatorReference, seed: int, exact: Operator | None = None, reruns: int = RERUNS
) -> Findings:
    """Compare the wanted outputs with the reference.

    Parameters
    ----------
    operator : Operator
        As timed.
    known : OperatorReference
    seed : int
    exact : Operator, optional
        The same backend's operator for `exact_part`; required if the reference covers a piece.
    reruns : int
    """
    operation = operator.operation
    arrays = operation.draw(seed)
    operation.rehearse(arrays)
    feed = operator.feed(arrays)
    start = time.perf_counter()
    output = operator.forward(*feed)
    operator.synchronize(output)
    first_call_s = time.perf_counter() - start
    answer = operator.fetch(output)
    require_types(operator, "operator.forward", operation.outputs, answer)
    repeated = repeatability(answer, lambda: operator.fetch(operator.forward(*feed)), reruns)
    names = [f"output {i}" for i in range(len(answer))]
    proof: list[Check] = []
    expected: Sequence[np.ndarray | Product]
    pieces = None if known.whole else in_pieces(operation)
    if pieces is None:
        expected, what = known.outputs, "ONNX's reference evaluator"
    else:
        assert exact is not None
        part = exact.operation
        piece = exact.fetch(exact.forward(*exact.feed(part.draw(seed))))
        require_types(exact, "operator.forward", part.outputs, piece)
        what = f"ONNX's reference evaluator, one of {pieces.count} pieces"
        of_piece = [f"output {i} (fp64)" for i in range(len(piece))]
        proof, worst, evidence = compare(f"vs {what}", of_piece, piece, known.outputs, lambda _: tolerance(part))
        what = "a product in fp64" if is_product(operation) else f"its {pieces.count} pieces in fp64"
        expected = [] if evidence is not None else _in_pieces(operation, exact, arrays)

    def limit(dtype: np.dtype) -> float:
        return tolerance(operation, dtype=dtype)

    def another(number: int) -> Another:
        arrays = operation.draw(seed + number)
        wanted = known.further[number - 1] if pieces is None else _in_pieces(operation, exact, arrays)
        return Another(lambda: (operator.forward, operator.feed(arrays)), rounded_as(answer, wanted))

    what = f"({operation.precision}) vs {what}"
    checks: list[Check] = []
    if all(check.passed for check in proof):
        checks, worst, evidence = compare(what, names, answer, expected, limit)
    return Findings(
        [*proof, *checks], worst, repeated, operator.forward, feed, first_call_s, names, answer, what, limit,
        lambda number: operator.feed(operation.draw(seed + number)), another, evidence,
    )  # fmt: skip


def _in_pieces(
    operation: Operation, exact: Operator | None, arrays: Sequence[np.ndarray | None]
) -> Sequence[np.ndarray | Product]:
    """Return the float64 outputs of a large operation, from an operator for one piece."""
    pieces = in_pieces(operation)
    assert exact is not None and pieces is not None
    return product(operation, arrays) if is_product(operation) else pieces.outputs(exact, arrays)
