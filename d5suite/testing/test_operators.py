"""One-operator networks, against ONNX's reference evaluator."""

from __future__ import annotations

import numpy as np
import pytest

from d5suite.network.operation import Operation
from d5suite.testing.cases import CASES, OperatorCase, all_fed, fed_inputs, one_operator, values
from d5suite.testing.operations import OPERATIONS
from d5suite.testing.subject import Subject, output
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.operator.reference import reference

SEED = 1

QUICKLY = ("Conv", "ConvTranspose", "LayerNormalization", "MatMul")
"""Operators whose inputs are all fed in the short form."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator_means_what_onnx_says(subject: Subject, case: OperatorCase) -> None:
    network = one_operator(case.operator, case.shape, case.inputs, **case.attributes)
    subject.require(network)
    x = values(*case.shape, seed=7)
    expected, _ = NetworkOracle(network, training=False).run(x)
    answer = output(subject.executor(network), x)
    subject.close("operators.meaning", str(case), answer, expected, subject.rounding)


FED = [
    pytest.param(operation, id=operation.name, marks=() if operation.node.op_type in QUICKLY else pytest.mark.slow)
    for operation in OPERATIONS
    if len(fed_inputs(operation)) > 1 and operation.node.op_type not in ("BatchNormalization", "Dropout")
]
"""Operations with several floating-point inputs, all of which a network can compute."""


@pytest.mark.parametrize("operation", FED)
def test_what_is_a_weight_elsewhere_may_be_computed(subject: Subject, operation: Operation) -> None:
    """A computed tensor may have another layout than a weight."""
    operation = operation.with_precision(subject.exact)
    drawn = operation.draw(SEED)
    network = all_fed(operation, drawn)
    subject.require(network)
    executor = subject.executor(network)
    given = {name: np.asarray(each) for name, each in zip(operation.node.inputs, drawn, strict=True)}
    answer = executor.fetch(executor.forward(executor.feed({name: given[name] for name in network.inputs})))
    expected = reference(operation, SEED, backward=False).outputs[0]
    what = f"{operation.name} of computed tensors"
    subject.named("executor.forward", what, answer, dict.fromkeys(network.outputs, expected))
    subject.close("operators.meaning", what, answer[network.output], expected, subject.rounding)


def test_every_declared_operator_is_in_a_case(subject: Subject) -> None:
    tried = {case.operator for case in CASES} | {"SoftmaxCrossEntropyLoss"}
    untried = sorted(subject.backend.operators - tried)
    if untried:
        pytest.skip(f"the kit has no case of: {', '.join(untried)}; ONNX's own node tests cover them")
