"""Many calls of one shape with different values, whose answers are kept and computed again.

An adapter that captures and replays its work, or reuses memory, is right in any single call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from d5suite.levels.description import PRECISIONS
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.levels.training import LOSS_SCALE
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import Batch, classifier, random_batch
from d5suite.testing.subject import Subject, copied
from d5suite.validate.check import Check
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.norms import FLOAT64, relative_l2
from d5suite.validate.training.trajectory import train_by_formula

CALLS = 6
"""Calls of one shape with different values; a case makes all of them twice on one executor."""

NETWORK = classifier().at_generic_point()

OPTIMIZER = SGD(2.0**-5, momentum=0.5)

WHOLE = {"fp64": 1e-6, "fp32": 1e-3, "bf16": 0.2, "fp16": 0.05}
"""Accepted relative error of all gradients together, or of the change of all parameters, by
precision. It allows for roundings, and for ReLUs that they flip. An answer to another batch is off
by about 1."""

STEP = 1e-8
"""Step of the central difference along a gradient of norm 1; a larger step crosses kinks."""

KINDS = {"forward": "executor.forward", "gradients": "executor.forward_backward", "steps": "trainer.meaning"}
"""Kinds of calls, and the clause that a wrong answer breaks."""

Call = Callable[[Native], Native]


class RepeatedCalls:
    """Calls of each kind on one executor; `reset` returns to the initial state."""

    def __init__(self, subject: Subject, precision: str) -> None:
        self.executor = subject.executor(NETWORK, precision)
        self._start = self.executor.parameters()
        self._of: dict[str, Call] = {"forward": self.executor.forward, "gradients": self.executor.forward_backward}
        self._trainer = None
        if 2 in subject.backend.levels and "gradient" not in subject.backend.absent:
            self._trainer = subject.trainer(self.executor, OPTIMIZER)
            self._of["steps"] = self._trainer.step
            self._fresh = self._trainer.state()
            if precision == "fp16":
                self._fresh[LOSS_SCALE] = np.array(64.0)  # so that no step is skipped

    def reset(self) -> None:
        """Load the initial parameters, statistics and optimizer state."""
        self.executor.load_parameters(self._start)
        if self._trainer is not None:
            self._trainer.load_state(self._fresh)

    def of(self, kind: str) -> Call:
        """Reset, and return the call of one of `KINDS`."""
        self.reset()
        return self._of[kind]


@pytest.fixture(scope="module")
def calls(subject: Subject) -> Callable[[str, str], RepeatedCalls]:
    """Return calls by precision, compiled once; skip undeclared ones."""
    made = cache(lambda precision: RepeatedCalls(subject, precision))

    def require(kind: str, precision: str) -> RepeatedCalls:
        level = 2 if kind == "steps" else 1
        subject.require(NETWORK, gradient=kind != "forward", level=level, precision=precision)
        return made(precision)

    return require


EACH = [pytest.param(kind, precision, id=f"{kind}-{precision}") for precision in PRECISIONS for kind in KINDS]


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    return copied({"image": batch[0], "label": batch[1]})


def _part(answer: Native, *, gradients: bool) -> dict[str, Any]:
    """Return the gradients of an answer, or the rest, which outlives the next call."""
    return {name: value for name, value in answer.items() if (name in NETWORK.parameters) is gradients}


def _whole(answer: Arrays) -> np.ndarray:
    return np.concatenate([np.ravel(answer[name]).astype(np.float64) for name in sorted(answer)])


@pytest.mark.parametrize(("kind", "precision"), EACH)
def test_every_call_of_one_shape_is_answered_anew_and_its_answer_kept(
    subject: Subject, calls: Callable[[str, str], RepeatedCalls], kind: str, precision: str
) -> None:
    """Fetch outputs and losses after the last call; then repeat all calls and fetch at once."""
    made, clause = calls(kind, precision), KINDS[kind]
    executor = made.executor
    batches = [random_batch(NETWORK, seed=seed) for seed in range(CALLS)]
    feeds = [executor.feed(_arrays(batch)) for batch in batches]
    call = made.of(kind)
    natives, gradients = [], []
    for feed in feeds:
        native = call(feed)
        natives.append(_part(native, gradients=False))
        gradients.append(executor.fetch(_part(native, gradients=True)))
    held, end = [executor.fetch(native) for native in natives], executor.parameters()
    call = made.of(kind)
    once, again = [executor.fetch(call(feed)) for feed in feeds], executor.parameters()

    made.reset()
    subject.prove(clause, _checks(subject, kind, executor, once, batches, again))
    for number, answer in enumerate(held, start=1):
        nearest = 1 + int(
            np.argmin([np.linalg.norm(_whole(answer) - _whole(_part(other, gradients=False))) for other in once])
        )
        what = (
            f"the answer of call {number} of {kind} in {precision}, fetched after the last, is that of call {nearest}"
        )
        subject.hold("executor.lifetime", nearest == number, what)
    for number, (found, first, rest) in enumerate(zip(once, held, gradients, strict=True), start=1):
        what = f"{kind} in {precision}, call {number} made again"
        subject.repeated(clause, what, found, {**first, **rest}, precision)
    subject.repeated(clause, f"{kind} in {precision}, parameters after all calls again", again, end, precision)


def _checks(
    subject: Subject, kind: str, executor: Executor, answers: list[dict[str, np.ndarray]], batches: list[Batch],
    end: Arrays,
) -> Iterator[Check]:  # fmt: skip
    """Compare answers with ONNX's evaluator, and steps with the optimizer's formula."""
    precision = executor.precision
    tolerances = subject.backend.tolerances[precision]
    if kind == "steps":
        start, run = executor.parameters(), train_by_formula(executor, OPTIMIZER, batches)
        for number, (answer, loss) in enumerate(zip(answers, run.losses, strict=True), start=1):
            what = f"the loss of step {number} in {precision} vs the formula"
            yield Check(what, relative_l2(answer["loss"], loss), max(tolerances.trajectory, FLOAT64))
        error = relative_l2(_whole(end) - _whole(start), _whole(run.parameters) - _whole(start))
        yield Check(f"the parameters' change in {CALLS} steps in {precision} vs the formula", error, WHOLE[precision])
        return
    name = NETWORK.output if kind == "forward" else "loss"
    oracle = NetworkOracle(NETWORK, training=kind == "gradients")
    for number, (answer, (images, labels)) in enumerate(zip(answers, batches, strict=True), start=1):
        what = f"of call {number} of one shape in {precision}"
        error = relative_l2(answer[name], oracle.run(images, labels)[0])
        yield Check(f"{name} {what} vs onnx.reference", error, max(tolerances.outputs, FLOAT64))
        if kind == "gradients":
            gradients = {key: answer[key].astype(np.float64) for key in NETWORK.parameters}
            norm = float(np.linalg.norm(_whole(gradients)))
            along = {key: value / norm for key, value in gradients.items()}
            error = abs(oracle.derivative(images, labels, along, STEP) / norm - 1)
            yield Check(f"gradient {what} vs the central difference along it", error, WHOLE[precision])


@pytest.mark.parametrize(("kind", "precision"), EACH)
def test_an_array_that_was_fed_is_neither_changed_nor_kept(
    subject: Subject, calls: Callable[[str, str], RepeatedCalls], kind: str, precision: str
) -> None:
    made = calls(kind, precision)
    executor, batch, other = made.executor, random_batch(NETWORK, seed=CALLS), random_batch(NETWORK, seed=CALLS + 1)

    def answer(arrays: dict[str, np.ndarray], then: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Feed arrays, and overwrite them before the call."""
        call, feed = made.of(kind), executor.feed(arrays)
        for name, value in then.items():
            arrays[name][...] = value
        return executor.fetch(call(feed))

    given = _arrays(batch)
    expected = answer(given, {})
    executor.synchronize()
    subject.same("executor.copy", f"the arrays fed, after {kind} in {precision}", given, _arrays(batch))
    found = answer(given, _arrays(other))
    what = f"{kind} in {precision} of arrays that were overwritten once feed had returned"
    subject.repeated("executor.copy", what, found, expected, precision)
