"""Custom operators on every backend: C++ and Python against NumPy, integers, several outputs,
mistakes, the cache."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import erf

from d5suite.backends import Backend, discover
from d5suite.custom import CompileError, CustomOperator, Glue, compile_operator
from d5suite.errors import ConfigurationError, NetworkError
from d5suite.network.operation import Operation, Tensor
from d5suite.validate.operator.backward import check_backward, check_backward_float64
from d5suite.validate.operator.forward import check_forward
from d5suite.validate.operator.reference import exact_part, reference

BACKENDS = ["deep500", "jax", "mxnet", "tensorflow", "torch"]

EXAMPLE = Path(__file__).parents[2] / "operators" / "test_bias_gelu.py"

PICK = """
#include "d5suite_operator.h"

extern "C" int d5_output_shape(const d5_call *call, int32_t output, int64_t *shape, int32_t *rank) {
    *rank = output == 0 ? 1 : 0;
    shape[0] = call->inputs[0].shape[0];
    return D5_OK;
}

extern "C" int d5_forward(const d5_call *call) {
    if (call->inputs[0].dtype != D5_FLOAT64 || call->inputs[1].dtype != D5_INT64) return D5_UNSUPPORTED_DTYPE;
    if (call->attribute_count != 2 || call->attributes[1].count != 2) return D5_FAILED;
    if (call->outputs[1].rank != 0 || call->outputs[1].dtype != D5_INT64) return D5_UNSUPPORTED_SHAPE;
    const double *x = static_cast<const double *>(call->inputs[0].data);
    const int64_t *index = static_cast<const int64_t *>(call->inputs[1].data);
    double *y = static_cast<double *>(call->outputs[0].data);
    int64_t *total = static_cast<int64_t *>(call->outputs[1].data);
    *total = 0;
    for (int64_t i = 0, n = call->inputs[0].shape[1]; i < call->inputs[0].shape[0]; ++i) {
        y[i] = x[i * n + index[i]] * call->attributes[0].values[0] + call->attributes[1].values[1];
        *total += index[i];
    }
    return D5_OK;
}

#ifdef BACKWARD
extern "C" int d5_backward(const d5_call *call) {
    if (call->input_gradients[1].data) return D5_FAILED;
    const int64_t *index = static_cast<const int64_t *>(call->inputs[1].data);
    const double *by_y = static_cast<const double *>(call->output_gradients[0].data);
    double *by_x = static_cast<double *>(call->input_gradients[0].data);
    for (int64_t i = 0; i < d5_size(&call->inputs[0]); ++i) by_x[i] = 0;
    for (int64_t i = 0, n = call->inputs[0].shape[1]; i < call->inputs[0].shape[0]; ++i) {
        by_x[i * n + index[i]] = by_y[i] * call->attributes[0].values[0];
    }
    return D5_OK;
}
#endif
"""

PICKED: list[tuple[str, list[str], list[str], dict[str, Any]]] = [
    ("Constant", [], ["one"], {"value_ints": [1]}),
    ("Unsqueeze", ["index", "one"], ["indices"], {}),
    ("GatherElements", ["x", "indices"], ["column"], {"axis": 1}),
    ("Squeeze", ["column", "one"], ["y"], {}),
    ("ReduceSum", ["index"], ["total"], {"keepdims": 0}),
]
"""Of the meaning only the shapes and types are asked for here."""

TIMES = """
#include "d5suite_operator.h"
#include "factor.h"
D5_OUTPUTS_LIKE_FIRST_INPUT

extern "C" int d5_forward(const d5_call *call) {
    if (call->inputs[0].dtype != D5_FLOAT32) return D5_UNSUPPORTED_DTYPE;
    const float *x = static_cast<const float *>(call->inputs[0].data);
    const float *z = static_cast<const float *>(call->inputs[1].data);
    float *y = static_cast<float *>(call->outputs[0].data);
    for (int64_t i = 0; i < d5_size(&call->inputs[0]); ++i) y[i] = FACTOR * x[i] + z[i];
    return D5_OK;
}
"""
"""In float32 only. It has as many tensors as the example, so that the frameworks' glue need not be
compiled again."""

BACKWARD = """
extern "C" int d5_backward(const d5_call *call) {
    if (call->inputs[0].dtype != D5_FLOAT32) return D5_UNSUPPORTED_DTYPE;
    const float *by_y = static_cast<const float *>(call->output_gradients[0].data);
    float *by_x = static_cast<float *>(call->input_gradients[0].data);
    float *by_z = static_cast<float *>(call->input_gradients[1].data);
    for (int64_t i = 0; i < d5_size(&call->inputs[0]); ++i) by_x[i] = SLOPE * (by_z[i] = by_y[i]);
    return D5_OK;
}
"""
"""A backward pass for it."""

THREE_TIMES: list[tuple[str, list[str], list[str], dict[str, Any]]] = [("Sum", ["x", "x", "x", "z"], ["y"], {})]


ONE_IN_SHORT = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=() if name == "torch" else pytest.mark.slow) for name in BACKENDS],
    indirect=True,
)
"""For tests of what lies before the backend: builds and checks."""

LIGHT_IN_SHORT = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow if name in ("tensorflow", "torch") else ()) for name in BACKENDS],
    indirect=True,
)
"""For sources of their own: half a minute to compile with these frameworks' headers."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = discover()[0][request.param]
    if found.problem():
        pytest.skip(found.problem() or "")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def compiler() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")


def picking(folder: Path, factor: float = 2.5, *, backward: bool | None = True) -> CustomOperator:
    """Without a backward pass because of a condition, if it says so, or because there is none."""
    compiler()
    (folder / "pick.cc").write_text(PICK if backward is not None else PICK.partition("#ifdef")[0])
    return CustomOperator(
        "Pick",
        inputs=["x", "index"],
        outputs=["y", "total"],
        meaning=PICKED,
        source="pick.cc",
        has_backward=backward,
        attributes={"factor": factor, "offsets": [0.0, 0.5]},
        flags=["-DBACKWARD"] if backward else [],
        file=folder / "describes.py",
    )


def picked(backend: Backend, custom: CustomOperator, precision: str = "fp64") -> tuple[Any, list[Any]]:
    inputs = {"x": (3, 4), "index": Tensor((3,), "int64", 0, 4)}
    operation = Operation(custom.op_type, inputs, outputs=[True, True], precision=precision, custom=custom)
    return backend.operator(operation), operation.draw(1)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("name", ["IN_CPP", "IN_PYTHON"])
def test_both_directions_equal_numpy(backend: Backend, name: str, precision: str) -> None:
    custom = runpy.run_path(str(EXAMPLE))[name]
    if custom.source is not None:
        compiler()
    operation = Operation(custom.op_type, {"x": (2, 3, 70), "bias": (70,)}, precision=precision, custom=custom)
    operator = backend.operator(operation)
    inputs, heads = operation.draw(0), operation.draw_gradients(0)
    fed = operator.feed(inputs)
    (y,) = operator.fetch(operator.forward(*fed))
    found = operator.fetch_gradients(operator.backward(fed)(*operator.feed_gradients(heads)))
    x, bias = (np.asarray(array, np.float64) for array in inputs)
    s = x + bias
    by_s = heads[0] * ((1 + erf(s / np.sqrt(2))) / 2 + s * np.exp(-(s**2) / 2) / np.sqrt(2 * np.pi))
    tolerance = 1e-14 if precision == "fp64" else 1e-6
    for answer, expected in zip((y, *found), (s / 2 * (1 + erf(s / np.sqrt(2))), by_s, by_s.sum((0, 1))), strict=True):
        assert answer.dtype == operation.dtypes["x"]
        np.testing.assert_allclose(answer, expected, rtol=tolerance, atol=10 * tolerance)


@LIGHT_IN_SHORT
def test_two_operators_with_an_integer_input_and_two_outputs(backend: Backend, folder: Path) -> None:
    for factor in (2.5, -1.0):
        operator, inputs = picked(backend, picking(folder, factor))
        x, index = inputs
        fed = operator.feed(inputs)
        y, total = operator.fetch(operator.forward(*fed))
        np.testing.assert_array_equal(y, x[range(3), index] * factor + 0.5)
        assert total.shape == () and total.dtype == np.int64 and total == index.sum()
        (by_x,) = operator.fetch_gradients(operator.backward(fed)(*operator.feed_gradients([np.arange(3.0)])))
        expected = np.zeros((3, 4))
        expected[range(3), index] = np.arange(3.0) * factor
        np.testing.assert_array_equal(by_x, expected)


def test_python_functions_get_attributes_and_may_leave_out_a_gradient(backend: Backend) -> None:
    def forward(x: np.ndarray, index: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
        return x[range(len(x)), index] * factor, index.sum()

    def backward(inputs: Any, outputs: Any, gradients: Any, factor: float) -> tuple[Any, ...]:
        assert outputs[1] == inputs[1].sum() and not np.any(gradients[1])
        by_x = np.zeros_like(inputs[0])
        by_x[range(len(by_x)), inputs[1]] = gradients[0] * factor
        return by_x, None

    custom = CustomOperator(
        "PythonPick", ["x", "index"], ["y", "total"], PICKED, forward=forward, backward=backward,
        attributes={"factor": 3.0},
    )  # fmt: skip
    operator, inputs = picked(backend, custom, "fp32")
    x, index = inputs
    fed = operator.feed(inputs)
    y, total = operator.fetch(operator.forward(*fed))
    np.testing.assert_array_equal(y, x[range(3), index] * 3)
    assert total == index.sum()
    heads = operator.feed_gradients([np.ones(3, np.float32)])
    (by_x,) = operator.fetch_gradients(operator.backward(fed)(*heads))
    assert by_x.dtype == np.float32 and by_x.sum() == 9 and (by_x[range(3), index] == 3).all()


@LIGHT_IN_SHORT
def test_a_code_is_an_error_with_the_operators_name(backend: Backend, folder: Path) -> None:
    operator, inputs = picked(backend, picking(folder), "fp32")
    with pytest.raises(Exception, match=r"Pick.* failed with code 1"):
        operator.fetch(operator.forward(*operator.feed(inputs)))


@LIGHT_IN_SHORT
def test_an_operator_may_have_no_backward_pass(backend: Backend, folder: Path) -> None:
    operator, inputs = picked(backend, picking(folder, backward=False))
    fed = operator.feed(inputs)
    assert operator.fetch(operator.forward(*fed))[0].shape == (3,)
    assert picking(folder, backward=False).lacks("fp64", backward=True) == "custom::Pick has no backward pass"


def test_every_output_must_be_wanted(backend: Backend, folder: Path) -> None:
    custom = picking(folder)
    inputs = {"x": (3, 4), "index": Tensor((3,), "int64", 0, 4)}
    operation = Operation(custom.op_type, inputs, outputs=[True, False], custom=custom)
    with pytest.raises(NetworkError, match="output"):
        backend.operator(operation)


def times(folder: Path, source: str = TIMES + BACKWARD, factor: str = "3", **settings: Any) -> CustomOperator:
    compiler()
    (folder / "times.cc").write_text(source.replace("SLOPE", settings.pop("slope", "3")))
    (folder / "factor.h").write_text(f"#define FACTOR {factor}")
    settings = {"meaning": THREE_TIMES, "source": "times.cc", "precisions": ["fp32"], **settings}
    return CustomOperator("Times", ["x", "z"], ["y"], file=folder / "describes.py", **settings)


def on_six(custom: CustomOperator) -> Operation:
    return Operation(custom.op_type, dict.fromkeys(custom.inputs, (2, 3)), custom=custom)


def of_ones(operator: Any) -> np.ndarray:
    fed = operator.feed([np.ones((2, 3), np.float32) for _ in operator.operation.node.inputs])
    answer: np.ndarray = operator.fetch(operator.forward(*fed))[0]
    return answer


# The backward pass, proved in the widest precision that there is.


@pytest.mark.parametrize("slope", ["3", "3.001f"])
def test_a_backward_pass_is_proved_without_float64(backend: Backend, tmp_path: Path, slope: str) -> None:
    operation = on_six(times(tmp_path, slope=slope))
    exact = backend.operator(exact_part(operation))
    known = reference(operation, 0, backward=True)
    by_x, by_z = check_backward_float64(exact, known, 0)
    assert by_x.name == "gradient of x (fp32) vs central differences"
    assert by_x.passed == (slope == "3") and by_z.passed and by_x.tolerance < 1e-5
    timed = check_backward(backend.operator(operation), exact, 0).checks
    assert [(check.name, check.passed) for check in timed] == [
        ("gradient of x (fp32) vs fp32", True), ("gradient of z (fp32) vs fp32", True),
    ]  # fmt: skip


def test_a_kink_in_the_meaning_is_not_stepped_over() -> None:
    shape = (64, 1024)  # where a long step finds a kink

    def relu(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    custom = CustomOperator("MyRelu", ["x"], ["y"], [("Relu", ["x"], ["y"], {})], forward=relu)
    own = reference(Operation(custom.op_type, {"x": shape}, custom=custom, name="same"), 0, backward=True)
    onnx = reference(Operation("Relu", {"x": shape}, name="same"), 0, backward=True)
    assert own.derivatives == onnx.derivatives


# The optional backward pass.


@ONE_IN_SHORT
def test_a_source_without_a_backward_pass_need_not_say_so(backend: Backend, tmp_path: Path) -> None:
    custom = picking(tmp_path, backward=None)
    operator, inputs = picked(backend, custom)
    assert operator.fetch(operator.forward(*operator.feed(inputs)))[0].shape == (3,)
    assert custom.lacks("fp64", backward=True) == "custom::Pick has no backward pass"


def test_a_backward_pass_in_the_source_or_in_what_it_includes_is_found(tmp_path: Path) -> None:
    assert times(tmp_path).lacks("fp32", backward=True) is None
    assert not times(tmp_path, TIMES + "// d5_backward is not written yet").differentiable
    (tmp_path / "slope.h").write_text(BACKWARD)
    assert times(tmp_path, TIMES + '#include "slope.h"').differentiable
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "further.h").write_text(BACKWARD)
    source = TIMES + "#include <further.h>"
    assert times(tmp_path, source, flags=[f"-I{tmp_path / 'elsewhere'}"]).differentiable
    assert not times(tmp_path, source).differentiable


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (TIMES.replace("D5_OUTPUTS_LIKE_FIRST_INPUT", ""), {}, r"times.cc: .* d5_output_shape\n.*D5_OUTPUTS_"),
        (TIMES.replace("d5_forward", "forward"), {}, r"times.cc: it does not define d5_forward\n.*d5_call \*call"),
        (TIMES.replace('extern "C" int d5_forward(const', "int d5_forward("), {}, r"d5_forward, only a C\+\+ "),
        (TIMES, {"has_backward": True}, r"times.cc: it does not define d5_backward\n.*has_backward=False"),
        (f"{TIMES}#ifdef NEVER\n{BACKWARD}\n#endif", {}, r"does not define d5_backward\n.*has_backward=False"),
        ("float nowhere();" + TIMES.replace("= FACTOR *", "= nowhere() *"), {}, r"times.cc: (.*\n)+.*nowhere\(\)"),
    ],
)  # fmt: skip
def test_a_missing_function_is_named(tmp_path: Path, source: str, settings: dict[str, Any], message: str) -> None:
    custom = times(tmp_path, source, **settings)
    with pytest.raises(CompileError, match=message):
        compile_operator(custom)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_a_cuda_source_is_compiled_and_linked_without_a_gpu() -> None:
    custom = runpy.run_path(str(EXAMPLE))["IN_CPP"]
    library = compile_operator(custom, device="cuda")
    linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    assert "libcudart" in linked and "not found" not in linked


# Other mistakes.


@pytest.mark.parametrize(
    ("meaning", "message"),
    [
        ([("Summ", ["x"], ["y"], {})], r"describes.py, custom::Times: .*'Summ'.*not an ONNX operator\n.* Sum"),
        ([("Relu", ["w"], ["y"], {})], r"describes.py, custom::Times: Relu in its meaning reads 'w'"),
        ([("Relu", ["x"], ["w"], {})], r"describes.py, custom::Times: .*does not compute the output 'y'"),
        ([("Relu", ["x"], ["y"])], r"describes.py, custom::Times: .*is not \(operator, inputs, outputs, attributes\)"),
        ([("Gelu", ["x"], ["y"], {"aproximate": "none"})], r"describes.py, custom::Times: Gelu.*set 23: .*aproximate"),
        ([("Add", ["x"], ["y"], {})], r"describes.py, custom::Times: Add in its meaning is not valid"),
    ],
)  # fmt: skip
def test_a_wrong_meaning_is_an_error_of_the_description(tmp_path: Path, meaning: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        on_six(times(tmp_path, meaning=meaning))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"x": (3, 4)}, 2, "is used with 1 inputs, but has 2: x, index"),
        ({"x": (3, 4), "index": None}, 2, "its input 'index' is omitted"),
        ({"index": Tensor((3,), "int64"), "x": (3, 4)}, 2, "are given in another order: index, x"),
        ({"x": (3, 4), "index": Tensor((3,), "int64")}, 1, "is used with 1 outputs, but has 2: y, total"),
    ],
)
def test_other_tensors_than_it_takes_are_refused(folder: Path, inputs: Any, outputs: int, message: str) -> None:
    custom = picking(folder)
    with pytest.raises(NetworkError, match=f"describes.py, custom::Pick: .*{message}"):
        Operation(custom.op_type, inputs, outputs=[True] * outputs, custom=custom)


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"custom::Times: .*'fp23'.*\n.*fp64, fp32"):
        times(tmp_path, precisions=["fp32", "fp23"])


def test_a_source_with_another_shape_than_its_meaning_is_at_fault(backend: Backend, tmp_path: Path) -> None:
    custom = times(tmp_path, meaning=[("Transpose", ["x"], ["y"], {})])
    with pytest.raises(ConfigurationError, match=r"times.cc: .*'y' the shape \(2, 3\), but its meaning \(3, 2\)"):
        backend.operator(on_six(custom))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x.T, r"custom::Wrong: forward returns output 'y' with shape \(3, 2\), not \(2, 3\)"),
        (lambda x: (x, x), "custom::Wrong: forward returns 2 arrays for 1 outputs"),
    ],
)
def test_a_function_with_another_shape_than_its_meaning_is_at_fault(
    backend: Backend, answer: Any, message: str
) -> None:
    custom = CustomOperator("Wrong", ["x"], ["y"], [("Relu", ["x"], ["y"], {})], forward=answer)
    operator = backend.operator(on_six(custom))
    known = reference(operator.operation, 0, backward=False)
    with pytest.raises(ConfigurationError, match=f"test_operators.py, {message}"):
        check_forward(operator, known, 0)
    with pytest.raises(Exception, match=r"(?i)wrong|custom"):
        of_ones(operator)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda i, o, g: (g[0].T, None), r"backward returns the gradient of 'x' with shape \(3, 2\), not \(2, 3\)"),
        (lambda i, o, g: g[0], "backward returns 1 arrays for 2 inputs"),
    ],
)
def test_a_gradient_of_another_shape_than_its_input_is_at_fault(backend: Backend, answer: Any, message: str) -> None:
    custom = CustomOperator(
        "Wrong", ["x", "z"], ["y"], [("Add", ["x", "z"], ["y"], {})], forward=np.add, backward=answer
    )
    exact = backend.operator(exact_part(on_six(custom)))
    known = reference(on_six(custom), 0, backward=True)
    with pytest.raises(ConfigurationError, match=f"test_operators.py, custom::Wrong: {message}"):
        check_backward_float64(exact, known, 0)


# The cache.


def test_nothing_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))

    def compiled(factor: float) -> dict[Path, tuple[int, int]]:
        custom = picking(tmp_path, factor)
        compile_operator(custom, identifier=custom.identifier)
        made = (path for path in (tmp_path / "cache").rglob("*.*") if path.suffix in (".o", ".so"))
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in made}

    before = compiled(2.5)
    assert compiled(2.5) == before
    further = compiled(7.0)
    assert sorted(path.suffix for path in further.keys() - before.keys()) == [".o", ".so"]  # the attributes'
    assert before.items() <= further.items()


@pytest.mark.parametrize("damage", ["cut short", "empty", "changed", "without its checksum"])
def test_a_damaged_library_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))
    custom = times(tmp_path)
    library = compile_operator(custom, identifier=custom.identifier)
    whole = {path: path.read_bytes() for path in library.parent.glob("*.*o")}
    assert len(whole) == 3
    for path, content in whole.items():
        if damage == "cut short":
            os.truncate(path, len(content) // 2)
        elif damage == "empty":
            os.truncate(path, 0)
        elif damage == "changed":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            path.with_name(f".{path.name}.sha256").unlink()
    assert compile_operator(custom, identifier=custom.identifier) == library
    assert {path: path.read_bytes() for path in library.parent.glob("*.*o")} == whole
    assert f"rebuilding {library}: damaged or missing checksums" in capsys.readouterr().err


def test_another_process_finds_what_one_has_compiled(tmp_path: Path) -> None:
    times(tmp_path)
    (tmp_path / "describes.py").write_text(
        "from d5suite.custom import CustomOperator, compile_operator\n"
        "x = CustomOperator('Times', ['x', 'z'], ['y'], [('Relu', ['x'], ['y'], {})], source='times.cc')\n"
        "print(compile_operator(x, identifier=x.identifier), x.identifier)\n"
    )
    environment = {**os.environ, "D5SUITE_CACHE": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        command = [sys.executable, str(tmp_path / "describes.py")]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        found.append((printed, {(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("*.*")}))
    assert found[0] == found[1]


@ONE_IN_SHORT
def test_a_changed_header_is_compiled_again(backend: Backend, tmp_path: Path) -> None:
    for factor in (3, 4):
        answer = of_ones(backend.operator(on_six(times(tmp_path, factor=str(factor)))))
        np.testing.assert_array_equal(answer, np.full((2, 3), factor + 1))


def test_a_glue_is_compiled_again_for_another_version_of_its_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))
    custom = times(tmp_path)
    (tmp_path / "framework").mkdir()
    (tmp_path / "glue.cc").write_text('#include "framework/version.h"\nint native() { return VERSION; }')

    def compiled(version: str) -> Path:
        (tmp_path / "framework" / "version.h").write_text(f"#define VERSION {version}")
        return compile_operator(custom, glue=Glue(tmp_path / "glue.cc", f"framework {version}"))

    first = compiled("1")
    assert compiled("1") == first
    assert compiled("2") != first
