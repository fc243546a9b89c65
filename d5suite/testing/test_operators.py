"""One-operator networks, against ONNX's reference evaluator."""

from __future__ import annotations

import pytest

from d5suite.testing.cases import CASES, Case, one_operator, values
from d5suite.testing.subject import Subject, output
from d5suite.validate.network.oracle import Oracle


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator_means_what_onnx_says(subject: Subject, case: Case) -> None:
    network = one_operator(case.operator, case.shape, case.inputs, **case.attributes)
    subject.require(network)
    x = values(*case.shape, seed=7)
    expected, _ = Oracle(network, training=False).run(x)
    answer = output(subject.executor(network), x)
    subject.close("operators.meaning", str(case), answer, expected, subject.rounding)


def test_every_declared_operator_is_in_a_case(subject: Subject) -> None:
    tried = {case.operator for case in CASES} | {"SoftmaxCrossEntropyLoss"}
    untried = sorted(subject.backend.operators - tried)
    if untried:
        pytest.skip(f"the kit has no case of: {', '.join(untried)}; ONNX's own node tests cover them")
