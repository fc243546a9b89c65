"""Level 0 through pytest, as a user runs it: problems, mistakes, bad input, operators of one's
own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.backends import select
from d5suite.cli import main
from d5suite.errors import JobError, NetworkError
from d5suite.levels.contract import ContractError
from d5suite.network.operation import Operation, Tensor
from d5suite.network.work import traffic, work
from d5suite.testing import test_level0
from d5suite.testing.operations import OPERATIONS
from d5suite.testing.subject import Subject
from d5suite.validate.norms import accuracy
from d5suite.validate.operator.compare import tolerance
from d5suite.validate.operator.oracle import OperatorOracle
from d5suite.validate.operator.reference import OperatorReference, reference
from d5suite.workloads.operator import require_memory
from tests.conftest import plugin_environment

SCHEMA = json.loads((Path(__file__).parents[2] / "results" / "schema.json").read_text())
OPERATORS = Path(__file__).parents[2] / "operators"
PICTURE = b"\x89PNG\r\n"

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="measured with PyTorch")

needs_deep500 = pytest.mark.skipif(select("deep500").backend.problem() is not None, reason="measured with deep500")

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")

PROBLEMS = """
from d5suite.cases.problem import Problem, Problems
PROBLEMS = [
    Problem("conv", "Conv", {"X": (2, 3, 8, 8), "W": (4, 3, 3, 3)}, {"pads": [1, 1, 1, 1]}, "a test"),
    Problem("softmax", "Softmax", {"X": (6, 10)}, {}, "a test"),
    Problem("gemm", "Gemm", {"A": (8, 512), "B": (512, 8)}, {}, "a test"),
]
SMALL = Problems("small", smoke=PROBLEMS, standard=PROBLEMS, full=PROBLEMS)
"""

Measure = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Run pytest on a file of problems in a folder of its own."""

    def run(problems: str, *options: str, backend: str = "torch") -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_problems.py").write_text(problems)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_problems.py", "--backend", backend]
        return subprocess.run(
            [*command, "--jobs", "jobs", *options], cwd=tmp_path, env=plugin_environment(), capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip

    return run


# Operations


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 5), st.sampled_from(["fp64", "fp32", "bf16", "fp16"]))
def test_inputs_depend_on_the_seed_alone(seed: int, batch: int, precision: str) -> None:
    def made(size: int, kind: str = precision) -> Operation:
        return Operation("Conv", {"X": (size, 3, 4, 4), "W": (2, 3, 3, 3), "B": None}, precision=kind)

    whole, again = made(batch).draw(seed), Operation.from_dict(made(batch).to_dict(), precision=precision).draw(seed)
    exact = made(batch, "fp64").draw(seed)
    for a, b, c in zip(whole, again, exact, strict=True):
        assert a is not None and b is not None and c is not None
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c.astype(a.dtype))


LSTM = {"X": (7, 2, 3), "W": (1, 16, 3), "R": (1, 16, 4), "B": (1, 32)}
ATTENTION = {"Q": (1, 2, 3, 4), "K": (1, 2, 5, 4), "V": (1, 2, 5, 6)}

INVALID: list[tuple[str, Any, dict[str, Any], str]] = [
    ("Gem", {"A": (2, 3)}, {}, "ONNX has no operator 'Gem'"),
    ("Gemm", {"A": (2, 3), "B": (4, 5)}, {}, "Gemm is not valid ONNX"),
    ("Gemm", {"A": (2, 3, 4), "B": (4, 5)}, {}, "expected to have rank 2 but has rank 3"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 3, 3, 3)}, {"pds": [1]}, "Unrecognized attribute: pds"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 5, 3, 3)}, {}, "the image has 3 channels and the weight is for 5"),
    ("Softmax", {"X": (3, 4)}, {"axis": "last"}, "Mismatched attribute type"),
    ("Gather", {"data": (3, 4), "indices": (2,)}, {}, "unsupported type: tensor(float)"),
    ("ReduceSum", {"X": (3,), "axes": Tensor((1,), "int64")}, {}, "must have fixed values"),
    ("Relu", {"X": "three"}, {}, "neither a shape"),
    ("Relu", {"X": Tensor((3, 4), "floatt")}, {}, "kind 'floatt' is neither 'float' nor the name of a type"),
    ("Relu", {"X": Tensor((3, -4))}, {}, "(3, -4) is not a shape"),
    ("Relu", {"X": (2.5,)}, {}, "(2.5,) is not a shape"),
    ("Relu", {"X": Tensor((3,), low=2.0, high=1.0)}, {}, "high is 1.0, not above low, 2.0"),
    ("Relu", {"X": Tensor((3,), low=2.0)}, {}, "low is 2.0 and high is None: give both or neither"),
    ("Gather", {"data": (3, 4), "i": Tensor((2,), "uint8", -1, 2)}, {}, "there is no uint8 from -1 to below 2"),
    ("Relu", ["X"], {}, "the inputs must be given by name"),
    ("Relu", {"X": np.array([0], "datetime64[s]")}, {}, "ONNX has no tensors of datetime64[s]"),
    ("LSTM", {**LSTM, "W": (1, 16, 5)}, {"hidden_size": 4}, "input 'W' has shape [1, 16, 5], not [1, 16, 3]"),
    ("LSTM", {**LSTM, "W": (1, 12, 3)}, {"hidden_size": 4}, "input 'W' has shape [1, 12, 3], not [1, 16, 3]"),
    ("LSTM", {**LSTM, "B": (1, 16)}, {"hidden_size": 4}, "input 'B' has shape [1, 16], not [1, 32]"),
    ("LSTM", {**LSTM, "B": None, "l": np.array([7, 8], np.int32)}, {"hidden_size": 4}, "range from 0 to 7"),
    ("LSTM", {**LSTM, "B": None, "l": None, "h": (1, 3, 4)}, {"hidden_size": 4}, "'h' has shape [1, 3, 4]"),
    ("LSTM", LSTM, {"hidden_size": 4, "activations": ["A", "Tanh", "Tanh"]}, "not 3 ONNX functions"),
    ("GRU", {"X": (7, 2, 3), "W": (1, 16, 3), "R": (1, 12, 4)}, {"hidden_size": 4}, "'W' has shape [1, 16, 3]"),
    ("Attention", {"Q": (1, 4, 3, 8), "K": (1, 4, 5, 7), "V": (1, 4, 5, 8)}, {}, "'K' has shape [1, 4, 5, 7]"),
    ("Attention", {"Q": (1, 4, 3, 8), "K": (1, 3, 5, 8), "V": (1, 3, 5, 8)}, {}, "4 heads of queries cannot share 3"),
    ("Attention", {"Q": (1, 3, 30), "K": (1, 5, 32), "V": (1, 5, 32)}, {"q_num_heads": 4, "kv_num_heads": 4},
     "30 values are not 4 heads"),
    ("Attention", {**ATTENTION, "mask": (4, 5)}, {}, "'mask' of shape [4, 5] does not broadcast to [1, 2, 3, 5]"),
    ("Attention", {**ATTENTION, "m": None, "pk": (1, 2, 7, 4)}, {}, "give both past keys and past values"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 3, 3, 3), "B": (7,)}, {}, "input 'B' has shape [7], not [4]"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 3, 3, 3)}, {"kernel_shape": [5, 5]}, "kernel_shape is [5, 5], but the"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 3, 30, 30)}, {}, "a window of 30 does not fit an image of 8"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 3, 3, 3)}, {"auto_pad": "SAME"}, "auto_pad is 'SAME', not one of"),
    ("ConvTranspose", {"X": (1, 4, 5), "W": (4, 3, 3)}, {"pads": [4, 4]}, "output would have shape [1, 3, -1]"),
    ("ConvTranspose", {"X": (1, 4, 5), "W": (4, 3, 3)}, {"output_shape": [3]}, "is smaller than the image"),
    ("ConvTranspose", {"X": (1, 4, 5), "W": (4, 3, 3)}, {"output_padding": [2]}, "output_padding [2] is not below"),
    ("MaxPool", {"X": (2, 3, 8, 8)}, {"kernel_shape": [20, 20]}, "a window of 20 does not fit an image of 8"),
    ("MaxPool", {"X": (2, 3, 8)}, {"kernel_shape": [2], "pads": [2, 2]}, "would see only padding"),
    ("LayerNormalization", {"X": (4, 16), "scale": (7,)}, {}, "'scale' of shape [7] does not broadcast to [16]"),
    ("LayerNormalization", {"X": (4, 16), "scale": (16,)}, {"axis": 5}, "axis 5 of 2"),
    ("SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": Tensor((7,), "int64", 0, 5)}, {}, "'l' has shape [7], not [6]"),
    ("SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": Tensor((6,), "int64", 0, 6)}, {}, "leave the range from 0 to 4"),
    ("SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": Tensor((6,), "int64", 0, 5)}, {"reduction": "median"},
     "reduction is 'median', not one of none, sum, mean"),
    ("Gather", {"data": (3, 4), "i": Tensor((2,), "int64", 0, 4)}, {}, "from 0 to 3 leave the range from -3 to 2"),
    ("Gather", {"data": (3, 4), "i": np.array([0, -4])}, {}, "from -4 to 0 leave the range from -3 to 2"),
    ("Gelu", {"X": (4,)}, {"approximate": "foo"}, "approximate is 'foo', not one of none, tanh"),
    ("Gemm", {"A": (2, 3), "B": (3, 4), "C": (7,)}, {}, "'C' of shape [7] does not broadcast to [2, 4]"),
    ("Transpose", {"X": (4, 5)}, {"perm": [0]}, "perm [0] is not an order of 2 axes"),
    ("ReduceMax", {"X": (4, 5), "axes": np.array([1, -1])}, {}, "repeat one"),
    ("Reshape", {"X": (4, 5), "shape": np.array([3, 7])}, {}, "[4, 5] has 20 values, but [3, 7] has 21"),
    ("Pad", {"X": (4, 5), "pads": np.array([-5, 0, 0, 0])}, {}, "would have shape [-1, 5]"),
    ("GlobalMaxPool", {"X": (4, 5)}, {}, "is not an image"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "message"), INVALID, ids=[f"{i[0]}, {i[3][:30]}" for i in INVALID]
)
def test_an_invalid_node_is_refused(operator: str, inputs: Any, attributes: Any, message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        Operation(operator, inputs, attributes, name="the problem")
    assert message in str(caught.value) and "the problem" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is not one of fp64, fp32, bf16, fp16"),
        ({"opset": 99}, "operator set 99 is not one from 21 to"),
        ({"opset": 7}, "operator set 7 is not one from 21 to"),
        ({"outputs": [False]}, "no output is wanted"),
    ],
    ids=str,
)
def test_options_of_an_operation_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        Operation("Relu", {"X": (3,)}, name="the problem", **options)


DRAWN = [
    each
    for each in OPERATIONS
    if each.node.op_type != "GlobalMaxPool" and any(isinstance(value, Tensor) for value in each.inputs.values())
]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.sampled_from(DRAWN), st.randoms(use_true_random=False))
def test_the_evaluator_runs_what_is_not_refused(operation: Operation, random: Random) -> None:
    """Operations with one drawn input of another shape; not ONNX's GlobalMaxPool, which takes
    images of two dimensions."""
    inputs = dict(operation.inputs)
    name, drawn = random.choice([(key, value) for key, value in inputs.items() if isinstance(value, Tensor)])
    shape = list(drawn.shape)
    change = random.choice(["longer", "shorter", "more axes", "fewer axes", "another order"])
    if change == "another order":
        random.shuffle(shape)
    elif change == "more axes":
        shape.insert(random.randint(0, len(shape)), random.choice([1, 2]))
    elif shape:
        axis = random.randrange(len(shape))
        if change == "fewer axes":
            del shape[axis]
        else:
            shape[axis] = max(shape[axis] + (1 if change == "longer" else -1), 1)
    content = operation.to_dict()
    content["inputs"][name]["shape"] = shape
    try:
        changed = Operation.from_dict(content)
    except NetworkError:
        return
    found = OperatorOracle(changed).run(changed.draw(1))
    assert [value.shape for value in found] == [changed.shapes[output] for output in changed.outputs]


def test_what_onnx_allows_is_allowed() -> None:
    ignored = Operation(
        "SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": np.array([-1, 0, 4, 3, -1, 2])}, {"ignore_index": -1}
    )
    assert ignored.shapes[ignored.outputs[0]] == ()
    cached = Operation("Attention", {**ATTENTION, "mask": (3, 9), "past_key": (1, 2, 7, 4), "past_value": (1, 2, 7, 6)})
    assert cached.shapes[cached.outputs[0]] == (1, 2, 3, 6)
    of_numpy: dict[str, Any] = {"shape": (np.int64(4), 5), "low": np.float32(0.5), "high": np.float32(2.0)}
    made = Operation("Transpose", {"X": Tensor(**of_numpy)}, {"perm": np.array([1, 0])})
    assert json.dumps(made.to_dict()) and made.shapes[made.outputs[0]] == (5, 4)


def test_what_does_not_fit_into_memory_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(JobError, match=r"needs 3,200,000,000,000,000 bytes .* are free"):
        require_memory(Operation("Relu", {"X": (10**6, 5 * 10**7)}))


WORK = [
    (Operation("Gemm", {"A": (4, 5), "B": (5, 6)}), 2 * 4 * 5 * 6, 4 * 4 * 5 * 6, 4 * (20 + 30 + 24), 5),
    (Operation("Conv", {"X": (2, 8, 5, 5), "W": (6, 4, 3, 3)}, {"group": 2}), 2 * 2 * 6 * 9 * 36, 4 * 2 * 6 * 9 * 36,
     4 * (400 + 216 + 108), 36),
    (Operation("ConvTranspose", {"X": (1, 3, 4, 4), "W": (3, 2, 2, 2)}, {"strides": [2, 2]}), 2 * 48 * 8, 4 * 48 * 8,
     4 * (48 + 24 + 128), 3),
    (Operation("Attention", {"Q": (1, 2, 3, 4), "K": (1, 2, 5, 4), "V": (1, 2, 5, 6)}), 2 * 2 * 15 * 10,
     4 * 2 * 15 * 10, 4 * (24 + 40 + 60 + 36), 9),
    (Operation("LSTM", {"X": (7, 2, 3), "W": (1, 16, 3), "R": (1, 16, 4)}, {"hidden_size": 4}), 2 * 14 * 112,
     4 * 14 * 112, 4 * (42 + 48 + 64 + 56), 28),
    (Operation("Relu", {"X": (10, 10)}), 100, None, 800, 1),
    (Operation("Transpose", {"X": (10, 10)}), 0, 0, 800, 1),
    (Operation("ReduceSum", {"X": (10, 10), "axes": np.array([1])}), 100, None, 4 * 110 + 8, 10),
    (Operation("Gather", {"T": (200_000, 64), "i": Tensor((256,), "int64", 0, 200_000)}), 0, 0, 256 * (64 * 8 + 8), 1),
    # 7 past keys and 5 new ones for 3 queries, in 2 heads.
    (Operation("Attention", {**ATTENTION, "mask": None, "pk": (1, 2, 7, 4), "pv": (1, 2, 7, 6)}), 2 * 2 * 3 * 12 * 10,
     4 * 2 * 3 * 12 * 10, 4 * (24 + 40 + 60 + 56 + 84 + 36), 20),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "flops", "backward", "moved", "terms"), WORK, ids=lambda v: getattr(v, "name", "")
)
def test_work_is_counted_by_hand(operation: Operation, flops: int, backward: int, moved: int, terms: int) -> None:
    found = work(operation)
    assert (found.flops, found.backward_flops, found.bytes, found.terms) == (flops, backward, moved, terms)


BACKWARD_TRAFFIC = [
    (Operation("Transpose", {"X": (10, 20)}), 2 * 200),
    (Operation("Add", {"A": (10, 20), "B": (20,)}), 2 * 200 + 20),
    (Operation("Concat", {"A": (10, 20), "B": (10, 5)}, {"axis": 1}), 2 * 250),
    (Operation("Gather", {"T": (100, 20), "i": Tensor((5,), "int64", 0, 100)}), 100 + 5 * 2 + 2000),
    (Operation("Mul", {"A": (10, 20), "B": (20,)}), 3 * 200 + 2 * 20),
    (Operation("Mul", {"A": (10, 20), "B": np.ones(20, np.float32)}), 2 * 200 + 20),
    (Operation("Relu", {"X": (10, 20)}), 3 * 200),
    (Operation("ReduceSum", {"X": (10, 20), "axes": np.array([1])}), 10 + 200),
    (Operation("Gemm", {"A": (2, 3), "B": (3, 4), "C": (4,)}), 8 + 6 + 12 + 6 + 12 + 4),
    (Operation("LSTM", {"X": (7, 2, 3), "W": (1, 16, 3), "R": (1, 16, 4)}, {"hidden_size": 4}),
     56 + 2 * (42 + 48 + 64)),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "floats"), BACKWARD_TRAFFIC, ids=lambda v: getattr(v, "name", ""))
def test_backward_traffic_is_counted_by_hand(operation: Operation, floats: int) -> None:
    assert work(operation).backward_bytes == 4 * floats


def test_views_move_nothing() -> None:
    biased = Operation("Add", {"A": (10, 20), "B": (20,)})
    assert traffic(biased, backward=True, views=["A"]) == 4 * (200 + 20)
    assert traffic(biased, backward=True, views=["A", "B"]) == 0
    assert traffic(Operation("Transpose", {"X": (10, 20)}), views=["Transpose.0"]) == 0


# References


def test_accuracy_counts_units_in_the_last_place() -> None:
    expected = np.array([1.0, -2.0, 1024.0])
    answer = np.nextafter(expected.astype(np.float32), np.float32(np.inf))
    found = accuracy(answer, expected)
    assert found.ulp_max == pytest.approx(1, rel=0.6) and found.ulp_median == pytest.approx(1, rel=0.6)
    assert found.l_inf == pytest.approx(1024 * 2**-23, rel=1e-3)
    assert accuracy(np.array([np.nan], np.float32), np.array([1.0])).relative_l2 == np.inf


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_differences_give_the_gradient_of_a_product(seed: int) -> None:
    operation = Operation("MatMul", {"A": (3, 4), "B": (4, 2)}, precision="fp64")
    a, b = operation.draw(seed)
    (dy,) = operation.draw_gradients(seed)
    assert a is not None and b is not None
    along = np.random.default_rng(seed).standard_normal((3, 4))
    found = OperatorOracle(operation).derivative([a, b], [dy], {0: along})
    assert found == pytest.approx(float((along * (dy @ b.T)).sum()), abs=1e-6)


def test_a_failure_of_the_evaluator_is_one_line() -> None:
    operation = Operation("Gemm", {"A": (2, 3), "B": (3, 4)}, name="the problem")
    with pytest.raises(NetworkError, match=r"the problem: .* fails on Gemm\(.*ValueError") as caught:
        OperatorOracle(operation).run([np.ones((2, 3)), np.ones((5, 16))])
    assert len(str(caught.value).splitlines()) == 1


def test_a_reference_survives_its_file(tmp_path: Path) -> None:
    operation = Operation("Softmax", {"X": (3, 4)}, name="family.softmax")
    made = reference(operation, 5, backward=True)
    made.save(tmp_path / "r.h5", operation.name)
    found = OperatorReference.load(tmp_path / "r.h5", operation.name)
    assert found is not None and found.derivatives == made.derivatives and found.whole
    np.testing.assert_array_equal(found.outputs[0], made.outputs[0])
    assert OperatorReference.load(tmp_path / "r.h5", "another") is None


def test_tolerances_tell_float16_sums_from_float32_ones() -> None:
    operation = Operation("Gemm", {"A": (64, 4096), "B": (4096, 64)})
    a, b = operation.draw(1)
    assert a is not None and b is not None
    exact = a.astype(np.float64) @ b.astype(np.float64)
    limit = tolerance(operation)
    assert accuracy(a @ b, exact).relative_l2 < limit / 10
    assert accuracy((a.astype(np.float16) @ b.astype(np.float16)).astype(np.float32), exact).relative_l2 > 3 * limit


# Through pytest


VIEWS = """    Problem("add", "Add", {"A": (40, 50), "B": (50,)}),
    Problem("move", "Transpose", {"X": (40, 50)}),
]
SMALL ="""


@needs_torch
def test_problems_become_ordinary_benchmarks(measure: Measure, tmp_path: Path) -> None:
    problems = PROBLEMS.replace("]\nSMALL =", VIEWS)
    done = measure(problems, "--benchmark-json", "out.json", "--benchmark-max-time", "0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, SCHEMA)
    found = {bench["name"]: bench for bench in result["benchmarks"]}
    assert set(found) == {
        f"test_{way}[{p}-torch]" for way in ("forward", "backward") for p in ("conv", "softmax", "gemm", "add", "move")
    }
    _views_have_no_rate({bench["group"]: bench["extra_info"]["d5suite"] for bench in result["benchmarks"]})
    bench = found["test_forward[gemm-torch]"]
    assert bench["group"] == "small.gemm/forward"
    info = bench["extra_info"]["d5suite"]
    assert (info["level"], info["operator"], info["source"]) == (0, "Gemm", "a test")
    assert info["shapes"] == {"A": [8, 512], "B": [512, 8]}
    assert info["work"] == {"flops": 2 * 8 * 512 * 8, "bytes": 4 * (2 * 8 * 512 + 64)}
    assert info["achieved"]["flops_per_s"] == pytest.approx(info["work"]["flops"] / info["median_s"])
    assert 0 < info["fraction_of_ceiling"]["flops_per_s"] < 2
    assert info["repeatability"] == {"reruns": 5, "identical": True, "variance": 0.0}  # one was timed
    names = [
        check["name"] for check in found["test_backward[gemm-torch]"]["extra_info"]["d5suite"]["validation"]["checks"]
    ]
    assert "gradient of A (fp64) vs central differences" in names and "gradient of B (fp32) vs fp64" in names
    assert main(["compare", str(tmp_path / "out.json")]) == 0


def _views_have_no_rate(found: Mapping[str, Any]) -> None:
    """PyTorch's gradient of a transposition is its argument in another order, and that of a sum
    is its argument."""
    view = found["small.move/backward"]
    assert (view["views"], view["work"]["bytes"]) == (["gradient of X"], 0)
    assert view["achieved"]["bytes_per_s"] is None and view["fraction_of_ceiling"]["bytes_per_s"] is None
    assert found["small.move/forward"]["views"] == [] and found["small.move/forward"]["work"]["bytes"] == 4 * 4000
    part = found["small.add/backward"]
    assert (part["views"], part["work"]["bytes"]) == (["gradient of A"], 4 * (2000 + 50))
    assert part["fraction_of_ceiling"]["bytes_per_s"] > 0
    assert found["small.add/forward"]["views"] == []


MISTAKES = {
    "off_by_one": ("conv", "forward", "output 0 (fp32) vs ONNX's reference evaluator"),
    "axis": ("softmax", "forward", "output 0 (fp32) vs ONNX's reference evaluator"),
    "dropped": ("softmax", "backward", "gradient of X (fp32) vs fp64"),
    "half": ("gemm", "forward", "output 0 (fp32) vs ONNX's reference evaluator"),
    "crash": ("softmax", "forward", "died of SIGSEGV (it crashed), while validating small.crash/forward"),
}
"""The problem that a mistake is made in, the way that fails, and what is said of it."""


@needs_torch
@pytest.mark.parametrize(
    "mistakes",
    [
        pytest.param(("off_by_one",), id="one", marks=pytest.mark.quick),
        pytest.param(tuple(MISTAKES), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_costs_its_own_tests(measure: Measure, tmp_path: Path, mistakes: tuple[str, ...]) -> None:
    """In one run, beside the same problems without a mistake: a framework starts for seconds."""
    wrong = f"PROBLEMS += [replace(each, name=m) for m, p in {[(m, MISTAKES[m][0]) for m in mistakes]}"
    problems = PROBLEMS.replace(
        "SMALL =", f"from dataclasses import replace\n{wrong} for each in PROBLEMS[:3] if each.name == p]\nSMALL ="
    )
    done = measure(
        problems, "--benchmark-json", "out.json", "--benchmark-max-time", "0.01", "-k", "not (backward and crash)",
        backend="wrong:named",
    )  # fmt: skip
    assert done.returncode == 1
    failed = {line.split()[1].partition("::")[2] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    measured = {bench["name"] for bench in json.loads((tmp_path / "out.json").read_text())["benchmarks"]}
    assert not failed & measured and len(measured) + len(failed) == 6 + 2 * len(mistakes) - ("crash" in mistakes)
    assert all(name.partition("[")[2].partition("-")[0] in mistakes for name in failed), failed
    pictures = [path.name for path in (tmp_path / "jobs").rglob("*.png") if path.read_bytes().startswith(PICTURE)]
    for mistake in mistakes:
        _, way, message = MISTAKES[mistake]
        assert f"test_{way}[{mistake}-wrong:named]" in failed, mistake
        assert (message if mistake == "crash" else f"small.{mistake}/{way}: {message}") in done.stdout, mistake
        if mistake in ("off_by_one", "axis", "half"):
            assert any(name.startswith(f"wrong:named-small.{mistake}") for name in pictures), mistake
    assert ("test_forward[dropped-wrong:named]" in measured) == ("dropped" in mistakes)  # its gradient alone is wrong


@needs_deep500
def test_bad_problems_cost_their_own_tests(measure: Measure) -> None:
    done = measure(
        "from d5suite.cases.problem import Problem, Problems\n"
        "PROBLEMS = [Problem('bad', 'Gemm', {'A': (2, 3), 'B': (4, 5)}),\n"
        "            Problem('large', 'Relu', {'X': (10**6, 10**7)}),\n"
        "            Problem('unknown', 'Bernoulli', {'X': (10, 10)}),\n"
        "            Problem('good', 'Relu', {'X': (10,)})]\n"
        "BAD = Problems('bad', smoke=PROBLEMS, standard=PROBLEMS, full=PROBLEMS)\n",
        "-rs", "-k", "forward", "--benchmark-max-time", "0.01", backend="deep500",
    )  # fmt: skip
    assert done.returncode == 1
    assert "2 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    assert "Gemm is not valid ONNX" in done.stdout
    assert "bad.large: Relu(X[1000000, 10000000]) needs 640,000,000,000,000 bytes" in done.stdout
    assert "deep500 has no operator Bernoulli" in done.stdout


def test_views_of_deep500_are_told() -> None:
    operation = Operation("Transpose", {"X": (4, 5)})
    backend = select("deep500").backend
    if backend.problem() is not None:
        pytest.skip("measured with deep500")
    operator = backend.operator(operation)
    feed = operator.feed(operation.draw(1))
    assert operator.views(operator.forward(*feed), feed, backward=False) == ["Transpose.0"]


@pytest.mark.slow
@needs_deep500
def test_problems_that_make_no_sense_leave_the_others_alone(measure: Measure, tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text(
        "from d5suite.cases.problem import Problem, Problems\n"
        "PROBLEMS = [Problem('relu', 'Relu', {'X': (10,)}), Problem('twin', 'Relu', {'X': (11,)})]\n"
        "GOOD = Problems('good', smoke=PROBLEMS, standard=PROBLEMS, full=PROBLEMS)\n"
    )
    (tmp_path / "test_twins.py").write_text(
        "from d5suite.cases.problem import Problem, Problems\n"
        "TWINS = [Problem('twin', 'Relu', {'X': (12,)})]\n"
        "MORE = Problems('good', smoke=TWINS, standard=TWINS, full=TWINS)\n"
    )
    done = measure(
        "from d5suite.network.operation import Tensor\n"
        "from d5suite.cases.problem import Problem, Problems\n"
        "PROBLEMS = [Problem('kind', 'Relu', {'X': Tensor((3, 4), 'floatt')}),\n"
        "            Problem('shape', 'Relu', {'X': object()}),\n"
        "            Problem('attributes', 'Relu', {'X': (3,)}, ['axis']),\n"
        "            Problem('nothing', 'Relu', {'X': (0, 3)}),\n"
        "            Problem('sound', 'Relu', {'X': (3,)})]\n"
        "BAD = Problems('bad', smoke=PROBLEMS, standard=PROBLEMS, full=PROBLEMS)\n",
        "test_good.py", "test_twins.py", "--benchmark-max-time", "0.01", backend="deep500",
    )  # fmt: skip
    failed = sorted(line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED"))
    ways, bad = ("backward", "forward"), ("kind", "shape", "attributes", "nothing")
    assert failed == sorted(
        [*(f"test_problems.py::test_{way}[{p}-deep500]" for way in ways for p in bad)]
        + [f"{file}::test_{way}[twin-deep500]" for way in ways for file in ("test_good.py", "test_twins.py")]
    ), done.stdout
    assert "4 passed" in done.stdout
    assert f"{tmp_path / 'test_problems.py'}, bad.kind: input 'X': kind 'floatt' is neither" in done.stdout
    assert "good.twin: two cases have this name" in done.stdout
    assert len(done.stdout.splitlines()) < 120, done.stdout


def test_a_backend_without_level_0_is_skipped_with_the_reason(measure: Measure) -> None:
    done = measure(PROBLEMS, "-rs", backend="faulty")
    assert done.returncode == 5
    assert "faulty has no level 0" in done.stdout.replace("\n", "")
    assert "6 skipped" in done.stdout


CUSTOM = """
from d5suite.custom import CustomOperator
from d5suite.cases.problem import Problem, Problems
def twice(name, source):
    return CustomOperator(name, inputs=["x"], outputs=["y"], meaning=[("Add", ["x", "x"], ["y"], {})], source=source)
PROBLEMS = [Problem(name, twice(name.title(), f"{name}.cc"), {"x": (4, 5)}) for name in %s]
TWICE = Problems("twice", smoke=PROBLEMS, standard=PROBLEMS, full=PROBLEMS)
"""

TWICE = """#include "d5suite_operator.h"
D5_OUTPUTS_LIKE_FIRST_INPUT
template <typename T> static void scale(const void *x, void *y, int64_t n, T by) {
    for (int64_t i = 0; i < n; ++i) static_cast<T *>(y)[i] = by * static_cast<const T *>(x)[i];
}
static int run(const d5_call *call, const void *x, void *y, double by) {
    if (call->inputs[0].dtype == D5_FLOAT32) scale<float>(x, y, d5_size(call->inputs), by);
    else scale<double>(x, y, d5_size(call->inputs), by);
    return D5_OK;
}
extern "C" int d5_forward(const d5_call *call) {
    FORWARD
    return run(call, call->inputs[0].data, call->outputs[0].data, 2);
}
extern "C" int d5_backward(const d5_call *call) {
    return run(call, call->output_gradients[0].data, call->input_gradients[0].data, SLOPE);
}
"""


@pytest.mark.slow
@needs_deep500
@needs_compiler
def test_faulty_custom_operators_cost_their_own_tests(measure: Measure, tmp_path: Path) -> None:
    sources = {
        "good": TWICE.replace("FORWARD", "").replace("SLOPE", "2"),
        "broken": TWICE.replace("FORWARD", "this is not C++").replace("SLOPE", "2"),
        "wrong": TWICE.replace("FORWARD", "").replace("SLOPE", "1.5"),
        "crash": TWICE.replace("FORWARD", "*(volatile int *)nullptr = 1;").replace("SLOPE", "2"),
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.cc").write_text(source)
    done = measure(CUSTOM % tuple(sources).__repr__(), "--benchmark-max-time", "0.01", backend="deep500")
    outcomes = {
        line.split()[1].partition("::")[2]: line for line in done.stdout.splitlines() if line.startswith("FAILED")
    }
    assert done.returncode == 1, done.stdout
    assert set(outcomes) == {
        "test_forward[broken-deep500]", "test_backward[broken-deep500]", "test_backward[wrong-deep500]",
        "test_forward[crash-deep500]", "test_backward[crash-deep500]",
    }, done.stdout  # fmt: skip
    assert f"{tmp_path / 'broken.cc'}:12:" in done.stdout and "error:" in done.stdout
    assert "gradient of x (fp64) vs central differences" in done.stdout
    assert "died of SIGSEGV" in done.stdout


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("gemm", 160),  # training_set of gemm_problems.h
        ("convolution", 90),  # of conv_problems.h, whose 94 rows have 4 twice
        ("recurrent", 40),  # of rnn_problems.h, without its plain recurrences
    ],
)
def test_published_tables_are_whole(file: str, rows: int) -> None:
    specification = importlib.util.spec_from_file_location(file, OPERATORS / f"test_{file}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    full = getattr(module, file.upper()).full
    assert sum(problem.source.startswith("Baidu DeepBench") for problem in full) == rows
    assert all(problem.operation(file, "fp32").outputs for problem in full)


def test_the_kit_fails_for_an_operator_that_it_does_not_try() -> None:
    backend = select("torch").backend
    more = replace(backend, single_operators=backend.single_operators | {"Bernoulli"})
    test_level0.test_every_declared_operator_is_in_an_operation(Subject(backend, "eager", "cpu", 1))
    with pytest.raises(ContractError, match=r"no operation in .* tests Bernoulli"):
        test_level0.test_every_declared_operator_is_in_an_operation(Subject(more, "eager", "cpu", 1))


def test_the_table_of_operators_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "operators"], env={**os.environ, "COLUMNS": "80"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("Conv " in line and "FB 84" in line for line in lines)
    assert "F forward, B backward; 8 fp64, 4 fp32, b bf16, h fp16" in lines
