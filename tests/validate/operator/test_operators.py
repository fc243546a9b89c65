"""The checks of single operators: large ones in pieces, mistakes that only some pieces have,
pictures."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import d5suite
from d5suite.cases.problem import MAX_TIME_S, Problems
from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation, Tensor
from d5suite.validate.check import Check
from d5suite.validate.norms import relative_l2
from d5suite.validate.operator import pieces, products
from d5suite.validate.operator.backward import check_backward, check_backward_float64, gradient_evidence
from d5suite.validate.operator.forward import check_forward
from d5suite.validate.operator.reference import exact_part, reference
from tests.conftest import plugin_environment

SEED = 3

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="checked with PyTorch")


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LIMITS", dict.fromkeys(pieces.LIMITS, 50.0))
    monkeypatch.setattr(pieces, "OTHERS_LIMIT", 20.0)


VECTOR = {"s": (4,), "b": (4,), "m": (4,), "v": Tensor((4,), low=0.5, high=2.0)}
LSTM = {"X": (6, 4, 3), "W": (1, 20, 3), "R": (1, 20, 5), "B": (1, 40)}
BOTH = {"X": (6, 4, 3), "W": (2, 20, 3), "R": (2, 20, 5), "B": (2, 40), "l": None, "h": (2, 4, 5), "c": (2, 4, 5)}
GRU = {"W": (1, 15, 3), "R": (1, 15, 5)}
UNEVEN = {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [2, 2], "group": 2}
TRANSPOSED = {"transA": 1, "transB": 1, "alpha": 2.0, "beta": 0.5}
CASES = [
    (Operation("Conv", {"X": (4, 3, 6, 6), "W": (4, 3, 3, 3), "B": (4,)}), 64),
    (Operation("Conv", {"X": (2, 4, 9, 8), "W": (4, 2, 3, 2)}, UNEVEN, name="uneven pads"), 56),
    (Operation("Conv", {"X": (1, 3, 12), "W": (2, 3, 3)}, {"auto_pad": "SAME_LOWER", "strides": [2]}, name="1-D"), 6),
    (Operation("ConvTranspose", {"X": (4, 3, 6, 6), "W": (3, 2, 2, 2)}, {"strides": [2, 2]}), 8),
    (Operation("ConvTranspose", {"X": (2, 4, 6, 6), "W": (4, 2, 2, 2)}, {"group": 2}, name="grouped"), 2),
    (Operation("MaxPool", {"X": (4, 4, 6, 6)}, {"kernel_shape": [2, 2], "strides": [2, 2]}), 16),
    (Operation("Gemm", {"A": (6, 4), "B": (4, 10), "C": (10,)}), 6),
    (Operation("Gemm", {"A": (4, 6), "B": (10, 4), "C": (6, 10)}, TRANSPOSED, name="transposed"), 6),
    (Operation("Gemm", {"A": (4, 6), "B": (10, 4), "C": (6, 1)}, {**TRANSPOSED, "beta": 1.0}, name="column"), 6),
    (Operation("MatMul", {"A": (2, 3, 4, 5), "B": (3, 5, 6)}), 24),
    (Operation("MatMul", {"A": (2, 1, 4, 5), "B": (3, 5, 6)}, name="repeated batch"), 24),
    (Operation("Attention", {"Q": (2, 4, 3, 5), "K": (2, 2, 6, 5), "V": (2, 2, 6, 7)}, {"is_causal": 1}), 4),
    (Operation("Softmax", {"X": (4, 10)}), 2),
    (Operation("Mul", {"X": (4, 10), "Y": (4, 1)}), 2),
    (Operation("LayerNormalization", {"X": (4, 3, 5), "s": (5,), "b": (5,)}), 4),
    (Operation("BatchNormalization", {"X": (4, 4, 3, 5), **VECTOR}, {"training_mode": 1}, outputs=[True] * 3), 4),
    (Operation("LSTM", LSTM, {"hidden_size": 5}), 24),
    (Operation("LSTM", {**LSTM, "B": None}, {"hidden_size": 5, "direction": "reverse"}, name="reverse",
               outputs=[True] * 3), 24),
    (Operation("LSTM", BOTH, {"hidden_size": 5, "direction": "bidirectional"}, name="both", outputs=[True] * 3), 4),
    (Operation("GRU", {"X": (6, 4, 3), **GRU, "B": (1, 30), "l": None, "h": (1, 4, 5)},
               {"hidden_size": 5, "linear_before_reset": 1}, outputs=[True] * 2), 24),
    (Operation("GRU", {"X": (4, 6, 3), **GRU}, {"hidden_size": 5, "layout": 1}, name="last state",
               outputs=[False, True]), 24),
]  # fmt: skip


@needs_torch
@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(("operation", "count"), CASES, ids=lambda value: getattr(value, "name", None))
def test_pieces_make_the_whole(operation: Operation, count: int) -> None:
    """Outputs and gradients of the one-piece operator, put together, are the whole operator's."""
    backend = d5suite.backend("torch")
    found = pieces.in_pieces(operation)
    assert found is not None and found.count == count
    whole = operation.with_precision("fp64")
    one, all_at_once = backend.operator(found.part), backend.operator(whole)
    arrays, gradients = whole.draw(SEED), whole.draw_gradients(SEED)
    feed = all_at_once.feed(arrays)
    outputs = all_at_once.fetch(all_at_once.forward(*feed))
    inputs = all_at_once.fetch_gradients(all_at_once.backward(feed)(*all_at_once.feed_gradients(gradients)))
    for made, expected in (
        *zip(found.outputs(one, arrays), outputs, strict=True),
        *zip(found.gradients(one, arrays, gradients), inputs, strict=True),
    ):
        assert made.shape == expected.shape and relative_l2(made, expected) < 1e-13


@needs_torch
@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(
    "settings", [{}, {"transA": 1}, {"transB": 1}, {"transA": 1, "transB": 1, "alpha": 2.0}], ids=str
)
@pytest.mark.parametrize("repeated", [(60, 70), (70,), (60, 1), ()], ids=str)
def test_a_very_large_product_is_checked_along_random_directions(
    settings: dict[str, Any], repeated: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right one passes; one wrong element of 4200 is found, though it is in none of the rows
    that are computed."""
    monkeypatch.setattr(products, "PROJECTED_FROM", 1e5)
    inputs = {
        "A": (50, 60) if "transA" in settings else (60, 50), "B": (70, 50) if "transB" in settings else (50, 70),
        "C": repeated,
    }  # fmt: skip
    operation = Operation("Gemm", inputs, {**settings, "beta": 0.5})
    assert _failures(operation, "torch", _right) == []

    def spoil(operator: Operator) -> Operator:
        return _one_element_is_off(operator) if operator.operation is operation else operator

    assert _failures(operation, "torch", spoil) == ["output 0 along random directions (fp32) vs a product in fp64"]


@needs_torch
@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("operation", [CASES[0][0], CASES[6][0], CASES[16][0]], ids=lambda operation: operation.name)
def test_a_right_operator_passes_in_pieces(operation: Operation) -> None:
    assert _failures(operation, "torch", _right) == []


def _right(operator: Operator) -> Operator:
    return operator


def _second_image_is_the_first(operator: Operator) -> Operator:
    native = operator.forward

    def forward(*inputs: Any) -> Any:
        y = native(*inputs).clone()
        y[1:2] = y[:1] * 7
        return y

    operator.forward = forward
    return operator


def _only_the_first_has_gradients(operator: Operator) -> Operator:
    native = operator.backward

    def backward(inputs: Sequence[Any]) -> Callable[..., Any]:
        call = native(inputs)

        def first_only(dy: Any) -> Any:
            kept = dy.clone()
            kept[1:] = 0
            return call(kept)

        return first_only

    operator.backward = backward  # type: ignore[method-assign]
    return operator


def _one_element_is_off(operator: Operator) -> Operator:
    native = operator.forward

    def forward(*inputs: Any) -> Any:
        y = native(*inputs).clone()
        y[-1, -1] += 0.5
        return y

    operator.forward = forward
    return operator


def _forgets_its_state(operator: Operator) -> Operator:
    native = operator.forward

    def forward(x: Any, *others: Any) -> Any:
        import torch

        halves = [native(half, *others) for half in x.split(3)] if len(x) == 6 else [native(x, *others)]
        return torch.cat([half if torch.is_tensor(half) else half[0] for half in halves])

    if operator.operation.precision == "fp32":
        operator.forward = forward
    return operator


MISTAKES = [
    (CASES[0][0], _second_image_is_the_first, "output 0 (fp32) vs its 64 pieces in fp64"),
    (CASES[0][0], _only_the_first_has_gradients, "gradient of W (fp32) vs its 64 pieces in fp64"),
    (CASES[6][0], _one_element_is_off, "output 0 (fp64) vs ONNX's reference evaluator, one of 6 pieces"),
    (CASES[16][0], _forgets_its_state, "output 0 (fp32) vs its 24 pieces in fp64"),
]


@needs_torch
@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize(("operation", "mistake", "finding"), MISTAKES, ids=[m[1].__name__ for m in MISTAKES])
def test_a_mistake_in_some_pieces_is_found(operation: Operation, mistake: Any, finding: str) -> None:
    """The same mistake in both precisions, and for every size of a batch."""
    assert finding in _failures(operation, "torch", mistake)


def _failures(operation: Operation, backend: str, spoil: Callable[[Operator], Operator]) -> list[str]:
    exact = spoil(d5suite.backend(backend).operator(exact_part(operation)))
    timed = spoil(d5suite.backend(backend).operator(operation))
    known = reference(operation, SEED, backward=True)
    checks: list[Check] = [
        *check_forward(timed, known, SEED, exact).checks,
        *check_backward_float64(exact, known, SEED),
        *check_backward(timed, exact, SEED).checks,
    ]
    assert len(checks) > 3
    return [check.name for check in checks if not check.passed]


WHOLE = {"Concat", "Gather", "ReduceMax", "ReduceMean", "ReduceSum", "SoftmaxCrossEntropyLoss", "Transpose"}
"""Operators that are never cut; each costs about as much as reading its inputs."""

LARGEST = {"Attention": 2e10, "ConvTranspose": 4e7}
"""Pieces that are larger than they should be: four heads of 4096 tokens with their key, one filter
of an image."""


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[3] / "operators").glob("test_*.py")), ids=lambda f: f.stem
)
def test_the_evaluator_is_asked_for_little_of_a_published_problem(file: Path) -> None:
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    (family,) = (value for value in vars(module).values() if isinstance(value, Problems))
    for problem in {problem.name: problem for preset in MAX_TIME_S for problem in family.preset(preset)}.values():
        operation = problem.operation(family.name, "fp32")
        if operation.custom is None and problem.op_type not in WHOLE:
            own = pieces.LIMITS.get(problem.op_type, pieces.OTHERS_LIMIT)
            if problem.op_type in ("GRU", "LSTM"):
                own = max(own, pieces.size(operation) / pieces.PIECES_OF_A_RECURRENCE)
            assert pieces.size(exact_part(operation)) <= LARGEST.get(problem.op_type, own), problem.name


# Through pytest

PROBLEMS = """
import numpy as np
from d5suite.custom import CustomOperator
from d5suite.cases.problem import Problem, Problems
WRONG = CustomOperator(
    "Twice", inputs=["x"], outputs=["y"], meaning=[("Add", ["x", "x"], ["y"], {})],
    forward=lambda x: 2 * x, backward=lambda inputs, outputs, gradients: 1.5 * gradients[0],
)
PROBLEMS = [Problem("wrong", WRONG, {"x": (40, 50)}), Problem("large", "Relu", {"X": (20000, 10000)})]
TWICE = Problems("twice", smoke=PROBLEMS, standard=PROBLEMS, full=PROBLEMS)
"""


@pytest.mark.slow
@needs_torch
def test_a_wrong_gradient_has_a_picture_and_a_place_and_the_job_s_limit_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_problems.py").write_text(PROBLEMS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_problems.py", "--backend", "torch"]
    done = subprocess.run(
        [*command, "--jobs", "jobs", "-k", "backward", "--job-memory", "6G"], cwd=tmp_path, env=plugin_environment(),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "2 failed" in done.stdout, done.stdout
    assert "torch, twice.wrong/backward: gradient of x (fp64) vs central differences" in done.stdout, done.stdout
    (picture,) = (tmp_path / "jobs").rglob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.name in done.stdout
    assert "free under the limit of --job-memory" in done.stdout


@needs_torch
def test_a_wrong_gradient_is_shown_beside_differences() -> None:
    operation = Operation("MatMul", {"A": (5, 40), "B": (40, 60)}, precision="fp64")
    operator = d5suite.backend("torch").operator(operation)
    feed = operator.feed(operation.draw(SEED))
    right = operator.fetch_gradients(operator.backward(feed)(*operator.feed_gradients(operation.draw_gradients(SEED))))
    native = operator.backward

    def backward(inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda dy: (native(inputs)(dy)[0], native(inputs)(dy)[1] * 2)

    operator.backward = backward  # type: ignore[method-assign]
    known = reference(operation, SEED, backward=True)
    assert [check.passed for check in check_backward_float64(operator, known, SEED)] == [True, False]
    evidence = gradient_evidence(operator, known, SEED)
    assert evidence.name == "gradient of B (fp64), 48 of 2400 elements"
    assert evidence.answer.shape == (6, 8)
    np.testing.assert_allclose(
        evidence.expected, right[1][np.ix_([0, 7, 15, 23, 31, 39], [0, 8, 16, 25, 33, 42, 50, 59])], atol=1e-6
    )
