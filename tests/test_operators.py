"""Level 0 through pytest, as a user runs it: problems, mistakes, bad input, operators of one's own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.cli import main
from d5suite.errors import JobError, NetworkError
from d5suite.network.operation import Operation, Tensor
from d5suite.network.work import work
from d5suite.operator_workload import require_memory
from d5suite.validate.operators import Oracle, Reference, accuracy, reference, tolerance
from tests.conftest import plugin_environment

SCHEMA = json.loads((Path(__file__).parents[1] / "results" / "schema.json").read_text())
PICTURE = b"\x89PNG\r\n"

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="measured with PyTorch")

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")

PROBLEMS = """
from d5suite.problem import Problem, Problems
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
    first = made(batch).with_batch(1).draw(seed)
    exact = made(batch, "fp64").draw(seed)
    for a, b, c, d in zip(whole, again, first, exact, strict=True):
        assert a is not None and b is not None and c is not None and d is not None
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[: len(c)], c)
        np.testing.assert_array_equal(a, d.astype(a.dtype))


INVALID: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Gem", {"A": (2, 3)}, {}, "ONNX has no operator 'Gem'"),
    ("Gemm", {"A": (2, 3), "B": (4, 5)}, {}, "Gemm is not valid ONNX"),
    ("Gemm", {"A": (2, 3, 4), "B": (4, 5)}, {}, "expected to have rank 2 but has rank 3"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 3, 3, 3)}, {"pds": [1]}, "Unrecognized attribute: pds"),
    ("Conv", {"X": (2, 3, 8, 8), "W": (4, 5, 3, 3)}, {}, "the image has 3 channels and the weight is for 5"),
    ("Softmax", {"X": (3, 4)}, {"axis": "last"}, "Mismatched attribute type"),
    ("Gather", {"data": (3, 4), "indices": (2,)}, {}, "unsupported type: tensor(float)"),
    ("ReduceSum", {"X": (3,), "axes": Tensor((1,), "int64")}, {}, "must have fixed values"),
    ("Relu", {"X": "three"}, {}, "neither a shape"),
]


@pytest.mark.parametrize(("operator", "inputs", "attributes", "message"), INVALID, ids=[i[3][:30] for i in INVALID])
def test_an_invalid_node_is_refused(operator: str, inputs: Any, attributes: Any, message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        Operation(operator, inputs, attributes, name="the problem")
    assert message in str(caught.value) and "the problem" in str(caught.value)


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
]  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "flops", "backward", "moved", "terms"), WORK, ids=lambda v: getattr(v, "name", "")
)
def test_work_is_counted_by_hand(operation: Operation, flops: int, backward: int, moved: int, terms: int) -> None:
    found = work(operation)
    assert (found.flops, found.backward_flops, found.bytes, found.terms) == (flops, backward, moved, terms)


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
    found = Oracle(operation).derivative([a, b], [dy], 0, along)
    assert found == pytest.approx(float((along * (dy @ b.T)).sum()), abs=1e-6)


def test_a_reference_survives_its_file(tmp_path: Path) -> None:
    operation = Operation("Softmax", {"X": (3, 4)}, name="family.softmax")
    made = reference(operation, 5, backward=True)
    made.save(tmp_path / "r.h5", operation.name)
    found = Reference.load(tmp_path / "r.h5", operation.name)
    assert found is not None and found.derivatives == made.derivatives and found.whole
    np.testing.assert_array_equal(found.outputs[0], made.outputs[0])
    assert Reference.load(tmp_path / "r.h5", "another") is None


def test_tolerances_tell_float16_sums_from_float32_ones() -> None:
    operation = Operation("Gemm", {"A": (64, 4096), "B": (4096, 64)})
    a, b = operation.draw(1)
    assert a is not None and b is not None
    exact = a.astype(np.float64) @ b.astype(np.float64)
    limit = tolerance(operation)
    assert accuracy(a @ b, exact).relative_l2 < limit / 10
    assert accuracy((a.astype(np.float16) @ b.astype(np.float16)).astype(np.float32), exact).relative_l2 > 3 * limit


# Through pytest


@needs_torch
def test_problems_become_ordinary_benchmarks(measure: Measure, tmp_path: Path) -> None:
    done = measure(PROBLEMS, "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, SCHEMA)
    found = {bench["name"]: bench for bench in result["benchmarks"]}
    assert set(found) == {
        f"test_{way}[{p}-torch]" for way in ("forward", "backward") for p in ("conv", "softmax", "gemm")
    }
    bench = found["test_forward[gemm-torch]"]
    assert bench["group"] == "small.gemm/forward"
    info = bench["extra_info"]["d5suite"]
    assert (info["level"], info["operator"], info["source"]) == (0, "Gemm", "a test")
    assert info["shapes"] == {"A": [8, 512], "B": [512, 8]}
    assert info["work"] == {"flops": 2 * 8 * 512 * 8, "bytes": 4 * (2 * 8 * 512 + 64)}
    assert info["achieved"]["flops_per_s"] == pytest.approx(info["work"]["flops"] / info["median_s"])
    assert 0 < info["fraction_of_ceiling"]["flops_per_s"] < 2
    assert info["repeatability"] == {"reruns": 4, "identical": True, "variance": 0.0}
    names = [
        check["name"] for check in found["test_backward[gemm-torch]"]["extra_info"]["d5suite"]["validation"]["checks"]
    ]
    assert "gradient of A (fp64) vs central differences" in names and "gradient of B (fp32) vs fp64" in names
    assert main(["compare", str(tmp_path / "out.json")]) == 0


MISTAKES = [
    ("off_by_one", "small.conv/forward: output 0 (fp32) vs ONNX's reference evaluator"),
    ("axis", "small.softmax/forward: output 0 (fp32) vs ONNX's reference evaluator"),
    ("dropped", "small.softmax/backward: gradient of X (fp32) vs fp64"),
    ("half", "small.gemm/forward: output 0 (fp32) vs ONNX's reference evaluator"),
    ("crash", "died of SIGSEGV (it crashed), while validating small.softmax/forward"),
]


@needs_torch
@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_costs_its_own_test(measure: Measure, tmp_path: Path, mistake: str, message: str) -> None:
    done = measure(PROBLEMS, "--benchmark-json", "out.json", "--benchmark-max-time", "0.01", backend=f"wrong:{mistake}")
    assert done.returncode == 1
    assert message.partition(": ")[2] in done.stdout if ": " in message else message in done.stdout
    failed = {line.split()[1].partition("::")[2] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    problem = "softmax" if mistake == "crash" else message.partition("/")[0].removeprefix("small.")
    assert failed and all(f"[{problem}-wrong:{mistake}]" in name for name in failed)
    measured = [bench["name"] for bench in json.loads((tmp_path / "out.json").read_text())["benchmarks"]]
    assert not failed & set(measured) and len(measured) + len(failed) == 6
    if mistake in ("off_by_one", "axis", "half"):
        pictures = list((tmp_path / "jobs").rglob("*.png"))
        assert pictures and all(p.read_bytes().startswith(PICTURE) for p in pictures)


@needs_torch
def test_bad_problems_cost_their_own_tests(measure: Measure) -> None:
    done = measure(
        "from d5suite.problem import Problem, Problems\n"
        "PROBLEMS = [Problem('bad', 'Gemm', {'A': (2, 3), 'B': (4, 5)}),\n"
        "            Problem('large', 'Relu', {'X': (10**6, 10**7)}),\n"
        "            Problem('unknown', 'Erf', {'X': (10,)}),\n"
        "            Problem('good', 'Relu', {'X': (10,)})]\n"
        "BAD = Problems('bad', smoke=PROBLEMS, standard=PROBLEMS, full=PROBLEMS)\n",
        "-rs", "-k", "forward",
    )  # fmt: skip
    assert done.returncode == 1
    assert "2 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    assert "Gemm is not valid ONNX" in done.stdout
    assert "bad.large: Relu(X[1000000, 10000000]) needs 640,000,000,000,000 bytes" in done.stdout
    assert "torch has no operator Erf" in done.stdout


def test_a_backend_without_level_0_is_skipped_with_the_reason(measure: Measure) -> None:
    done = measure(PROBLEMS, "-rs", backend="faulty")
    assert "faulty has no level 0" in done.stdout.replace("\n", "")
    assert "6 skipped" in done.stdout


CUSTOM = """
from d5suite.custom import CustomOperator
from d5suite.problem import Problem, Problems
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


@needs_torch
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
    done = measure(CUSTOM % tuple(sources).__repr__(), "--benchmark-max-time", "0.01")
    outcomes = {
        line.split()[1].partition("::")[2]: line for line in done.stdout.splitlines() if line.startswith("FAILED")
    }
    assert done.returncode == 1, done.stdout
    assert set(outcomes) == {
        "test_forward[broken-torch]", "test_backward[broken-torch]", "test_backward[wrong-torch]",
        "test_forward[crash-torch]", "test_backward[crash-torch]",
    }, done.stdout  # fmt: skip
    assert f"{tmp_path / 'broken.cc'}:12:" in done.stdout and "error:" in done.stdout
    assert "gradient of x (fp64) vs central differences" in done.stdout
    assert "died of SIGSEGV" in done.stdout


def test_the_table_of_operators_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "operators"], env={**os.environ, "COLUMNS": "80"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("Conv " in line and "FB 84" in line for line in lines)
    assert "F forward, B backward; 8 fp64, 4 fp32, b bf16, h fp16" in lines
