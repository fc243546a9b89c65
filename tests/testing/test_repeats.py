"""`Tolerance.repeats` at level 0: a framework that truly is not deterministic may say so."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from d5suite.backends import Backend, discover
from d5suite.levels.contract import ContractError
from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation
from d5suite.testing import test_level0 as level0
from d5suite.testing.subject import SEED, Subject
from d5suite.validate.operator.forward import check_forward
from d5suite.validate.operator.reference import reference

torch = pytest.importorskip("torch")

PRODUCT = Operation("MatMul", {"A": (24, 640), "B": (640, 24)}, name="MatMul-long").with_precision("fp32")
"""Sums so long that noise of 1e-6 is within the error that they may have."""


@dataclass
class Noisy(Subject):
    """PyTorch in float32 with relative noise, the same in every test."""

    noise: float = 0.0
    _calls: Any = field(default_factory=itertools.count)

    def operator(self, operation: Operation) -> Operator:
        """An operator of which no two calls answer alike."""
        made = super().operator(operation)
        forward, backward = made.forward, made.backward
        if operation.precision == "fp32":
            made.forward = lambda *inputs: forward(*inputs) * self._factor()
            made.backward = lambda inputs: self._noisy(backward(inputs))  # type: ignore[method-assign]
        return made

    def _noisy(self, call: Any) -> Any:
        def noisy(*above: Any) -> list[Any]:
            factor = self._factor()
            return [each * factor for each in call(*above)]

        return noisy

    def _factor(self) -> float:
        return 1 + self.noise * (-1) ** next(self._calls)


def subject(noise: float, repeats: float) -> Noisy:
    right: Backend = discover()[0]["torch"]
    tolerances = {name: replace(each, repeats=repeats) for name, each in right.tolerances.items()}
    found = Noisy(replace(right, tolerances=tolerances), right.default_mode, "cpu", 1, noise=noise)
    found._configured = True  # this process has its threads already
    return found


def proved(found: Subject) -> Any:
    def prove(operation: Operation) -> Operator:
        return found.operator(operation.with_precision("fp64"))

    return prove


def run(found: Noisy, case: str) -> None:
    if case == "forward":
        level0.test_forward(found, PRODUCT, "fp32")
    elif case == "backward":
        level0.test_backward(found, proved(found), PRODUCT, "fp32")
    elif case == "feeds":
        level0.test_every_feed_of_an_operator_is_answered_and_its_answer_kept(found, PRODUCT, "fp32")
    else:
        level0.test_every_backward_pass_of_an_operator_is_made_anew(found, proved(found), PRODUCT, "fp32")


CASES = ("forward", "backward", "feeds", "passes")


@pytest.mark.parametrize("case", CASES)
def test_level_0_accepts_noise_within_the_declared_repeats(case: str) -> None:
    run(subject(1e-6, 1e-5), case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("noise", "repeats"), [(1e-4, 1e-5), (1e-6, 1e-7), (1e-6, 0.0)])
def test_level_0_refuses_noise_beyond_the_declared_repeats(case: str, noise: float, repeats: float) -> None:
    with pytest.raises(ContractError):
        run(subject(noise, repeats), case)


@pytest.mark.parametrize(("noise", "repeats", "passes"), [(1e-6, 0.0, True), (5e-5, 1e-4, True), (5e-5, 1e-6, False)])
def test_a_timed_call_repeats_the_proved_one_within_the_declared_repeats(
    noise: float, repeats: float, passes: bool
) -> None:
    found = check_forward(subject(0.0, 0.0).operator(PRODUCT), reference(PRODUCT, SEED, backward=False), SEED)
    assert found.repeatability["identical"] and found.repeatability["apart"] == 0
    answer = [value * np.float32(1 + noise) for value in found.answer]
    assert found.check_repeated("the last timed call", answer, repeats).passed == passes
    assert not found.repeatability["identical"]
