"""`Tolerance.repeats`: a framework that truly is not deterministic may say so."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from d5suite.backends import Backend, discover
from d5suite.levels.contract import ContractError
from d5suite.levels.network import Executor, Native
from d5suite.levels.operator import Operator
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.network.operation import Operation
from d5suite.optimizers.settings import Optimizer
from d5suite.testing import test_distributed as distributed
from d5suite.testing import test_gradients as gradients
from d5suite.testing import test_level0 as level0
from d5suite.testing import test_networks as networks
from d5suite.testing import test_process as process
from d5suite.testing import test_training as training
from d5suite.testing.networks import dropping
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


@dataclass
class Unsteady(Subject):
    """PyTorch with noise on answers and updates; 1e-8 of it in float64.

    Parameters
    ----------
    noise : float
    """

    noise: float = 0.0
    _drawn: Any = field(default_factory=lambda: torch.Generator().manual_seed(SEED))

    def executor(self, network: Network, precision: str | None = None) -> Executor:
        """An executor of which no two calls answer alike."""
        made: Any = super().executor(network, precision)
        for name in ("forward", "forward_backward"):
            setattr(made, name, self._answering(getattr(made, name), made.precision))
        return made

    def trainer(self, executor: Executor, optimizer: Optimizer) -> Trainer:
        """A trainer of which no two updates are alike, as its gradients are summed in any order."""
        made: Any = super().trainer(executor, optimizer)
        update = made._update

        def noisy() -> None:
            for tensor in made._tensors:
                tensor.grad = self._unlike(tensor.grad, executor.precision)
            update()

        made._update = noisy
        made.step = self._answering(made.step, executor.precision)
        return made

    def _answering(self, call: Any, precision: str) -> Any:
        def answering(*feeds: Native) -> Native:
            return {name: self._unlike(value, precision) for name, value in call(*feeds).items()}

        return answering

    def _unlike(self, value: Any, precision: str) -> Any:
        noise = self.noise * (1e-8 if precision == "fp64" else 1.0)
        return value * (1 + noise * torch.randn(value.shape, generator=self._drawn, dtype=torch.float64)).to(value)


def unsteady(noise: float, repeats: float) -> Unsteady:
    right: Backend = discover()[0]["torch"]
    tolerances = {
        name: replace(each, repeats=repeats * (1e-6 if name == "fp64" else 1.0))
        for name, each in right.tolerances.items()
    }
    found = Unsteady(replace(right, tolerances=tolerances), right.default_mode, "cpu", 1, noise=noise)
    found._configured = True
    return found


HIGHER: dict[str, Any] = {
    "inference": networks.test_inference_changes_nothing,
    "executors": networks.test_two_executors_do_not_share_anything,
    "seed": networks.test_the_same_seed_gives_the_same_answer,
    "saved": lambda found: training.test_training_goes_on_from_a_saved_state_to_the_last_bit(found, "adam"),
    "dropout": training.test_training_with_dropout_goes_on_to_the_last_bit,
    "drawn": training.test_gradients_with_dropout_are_drawn_again_from_a_random_state,
    "scaling": training.test_loss_scaling_follows_its_definition,
    "replicas": lambda found: distributed.test_replicas_with_averaged_gradients_train_as_one_process(
        found, 2, "clip-norm"
    ),
    "weights": distributed.test_parameters_are_copied_and_the_optimizers_state_stays,
}
"""Cases of the kit that make a computation twice."""


@pytest.mark.parametrize("case", HIGHER)
def test_levels_1_to_3_accept_noise_within_the_declared_repeats(case: str) -> None:
    HIGHER[case](unsteady(1e-5, 1e-3))


@pytest.mark.parametrize("case", HIGHER)
@pytest.mark.parametrize(("noise", "repeats"), [(1e-2, 1e-5), (1e-5, 0.0)])
def test_levels_1_to_3_refuse_noise_beyond_the_declared_repeats(case: str, noise: float, repeats: float) -> None:
    with pytest.raises(ContractError):
        HIGHER[case](unsteady(noise, repeats))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("case", ["inference", "executors", "seed"])
def test_noise_in_one_precision_only_is_refused(case: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, unlike = unsteady(1e-1, 0.0), Unsteady._unlike
    monkeypatch.setattr(
        Unsteady, "_unlike", lambda self, value, where: unlike(self, value, where) if where == precision else value
    )
    with pytest.raises(ContractError, match=f"in {precision}"):
        HIGHER[case](found)


def test_a_tensor_that_is_mere_rounding_repeats_within_that_of_all_tensors() -> None:
    """Such is the gradient of a bias before BatchNormalization."""
    found = unsteady(0.0, 1e-5)
    once = {"weight": np.ones(100), "bias": np.array([1e-8])}
    found.repeated("executor.forward_backward", "again", {**once, "bias": np.array([-1e-8])}, once, "fp32")
    with pytest.raises(ContractError):
        found.repeated("executor.forward_backward", "again", {**once, "bias": np.array([1e-6])}, once, "fp32")
    for wrong in ({"weight": once["weight"]}, {**once, "more": once["bias"]}, {**once, "bias": np.array(1e-8)}):
        with pytest.raises(ContractError):
            found.repeated("executor.forward_backward", "again", wrong, once, "fp32")


def test_noise_is_not_taken_for_what_dropout_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    found = unsteady(1e-5, 1e-3)
    gradients.test_dropout_drops_in_training_only(found)
    undropped = dropping().without_dropout()
    monkeypatch.setattr(gradients, "dropping", lambda: undropped)
    with pytest.raises(ContractError, match="Dropout does not drop"):
        gradients.test_dropout_drops_in_training_only(found)


LOSSES = [1.5, 1.7, 1.6]


@pytest.mark.parametrize(
    ("again", "other", "repeats", "broken"),
    [
        (1.0, 1.1, 0.0, ""),
        (1 + 1e-5, 1.1, 1e-3, ""),
        (1 + 1e-5, 1.1, 0.0, "two processes with one seed differ"),
        (1 + 1e-2, 1.1, 1e-3, "two processes with one seed differ"),
        (1.0, 1.0, 0.0, "two seeds give the same numbers"),
        (1.0, 1 + 1e-5, 1e-3, "two seeds give the same numbers"),
    ],
)
def test_two_processes_repeat_a_seeds_losses_within_the_declared_repeats(
    again: float, other: float, repeats: float, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeded(_: Subject, seed: int, *further: str) -> dict[str, Any]:
        factor = other if seed == 4 else again if further else 1.0
        return {"precision": "fp32", "losses": [loss * factor for loss in LOSSES]}

    monkeypatch.setattr(process, "_seeded", seeded)
    if not broken:
        process.test_a_seed_decides_the_random_numbers(unsteady(0.0, repeats))
        return
    with pytest.raises(ContractError, match=broken):
        process.test_a_seed_decides_the_random_numbers(unsteady(0.0, repeats))
