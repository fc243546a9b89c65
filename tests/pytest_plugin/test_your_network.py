"""The recipe of a user's own network, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.network.test_as_written import looping
from tests.network.test_given_inputs import voice
from tests.network.test_user_network import detector
from tests.test_cli import d5suite

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two inputs and two outputs."""
    return _save(tmp_path_factory.mktemp("pair"), "Tanh")


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an operator that no framework's adapter has."""
    return _save(tmp_path_factory.mktemp("lacking"), "Bernoulli")


def _save(folder: Path, operator: str) -> Path:
    node, info, kind = helper.make_node, helper.make_tensor_value_info, TensorProto.FLOAT
    nodes = [
        node("Conv", ["image", "kernel"], ["c"], pads=[1, 1, 1, 1]),
        node(operator, ["c"], ["map"], "bent"),
        node("GlobalAveragePool", ["map"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Concat", ["f", "more"], ["j"], axis=1),
        node("Gemm", ["j", "head"], ["scores"]),
    ]
    generator = np.random.default_rng(0)
    weights = {"kernel": generator.standard_normal((6, 3, 3, 3)) / 5, "head": generator.standard_normal((10, 5)) / 3}
    graph = helper.make_graph(
        nodes,
        "pair",
        [info("image", kind, ["N", 3, 8, 12]), info("more", kind, ["N", 4])],
        [info("map", kind, ["N", 6, 8, 12]), info("scores", kind, ["N", 5])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    path = folder / "pair.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def _measure(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the recipe as a user does, without the tests' own plug-ins and pytest-xdist."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "recipes" / "test_your_network.py"),
         "--benchmark-max-time=0.02", "--jobs", str(folder / "jobs"), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def _is_right(done: subprocess.CompletedProcess[str], folder: Path, backends: list[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "out.json").read_text())
    jsonschema.validate(result, json.loads((ROOT / "results" / "schema.json").read_text()))
    found = {(b["group"], b["param"]): b["extra_info"]["d5suite"] for b in result["benchmarks"]}
    for measurement in ("inference", "gradient", "training_step"):
        for backend in backends:
            info = found[f"pair/{measurement}", backend]
            assert info["dataset"]["kind"] == "inputs" and info["macs"] and "classes" not in info
            assert info["validation"]["passed"]
    checks = found["pair/inference", backends[0]]["validation"]["checks"]
    assert checks[0]["name"].endswith("vs onnxruntime, 2 tensors")


def test_a_network_of_several_inputs_and_outputs_is_measured(pair: Path, tmp_path: Path) -> None:
    done = _measure(tmp_path, "--network", str(pair), "--backend", "torch", "--benchmark-json", "out.json")
    _is_right(done, tmp_path, ["torch"])


@pytest.mark.slow
def test_it_is_measured_on_every_framework(pair: Path, tmp_path: Path) -> None:
    done = _measure(tmp_path, "--network", str(pair), "--benchmark-json", "out.json")
    _is_right(done, tmp_path, ["torch", "tensorflow", "keras", "mxnet", "jax"])  # deep500: at a reduced size


@pytest.mark.slow
def test_a_file_that_is_not_compared_with_what_is_read_of_it_is_noted(tmp_path: Path) -> None:
    node, info, kind = helper.make_node, helper.make_tensor_value_info, TensorProto.FLOAT
    nodes = [node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16), node("Cast", ["half"], ["y"], to=kind)]
    graph = helper.make_graph(nodes, "half", [info("x", kind, ["N", 4])], [info("y", kind, ["N", 4])])
    path = tmp_path / "half.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    _is_warned_of(path, tmp_path, "the file computes in 16 bits")


def _is_warned_of(path: Path, folder: Path, reason: str) -> None:
    """In the record, and in the table as well."""
    done = _measure(folder, "--network", str(path), "--backend", "torch", "-k", "inference", "--benchmark-json=o.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (bench,) = json.loads((folder / "o.json").read_text())["benchmarks"]
    (warning,) = bench["extra_info"]["d5suite"]["warnings"]
    assert f"was not compared with the file's own answer: {reason}" in warning
    assert re.search(r"torch\S*!", done.stdout) and reason in " ".join(done.stdout.split())


@pytest.mark.slow
def test_statistics_of_the_batch_are_warned_of(tmp_path: Path) -> None:
    """Inference takes the running statistics, which is another network than the file's."""
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    inputs = ["x", *"sbmv"]
    node = helper.make_node("BatchNormalization", inputs, ["y", "m2", "v2"], training_mode=1)
    weights = [
        numpy_helper.from_array(np.full(3, value, np.float32), name)
        for name, value in zip("sbmv", (1, 0, 0, 1), strict=True)
    ]
    graph = helper.make_graph(
        [node], "batch", [info("x", kind, ["N", 3, 4, 4])], [info("y", kind, ["N", 3, 4, 4])], weights
    )
    path = tmp_path / "batch.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    _is_warned_of(path, tmp_path, "the file is in training mode, where BatchNormalization uses the batch's statistics")


@pytest.mark.parametrize(
    ("backend", "variable"),
    [
        ("jax", "JAX_DISABLE_JIT"),
        pytest.param("torch:compile", "TORCHDYNAMO_DISABLE", marks=pytest.mark.slow),
        pytest.param("keras:jax", "JAX_DISABLE_JIT", marks=pytest.mark.slow),
        pytest.param("torch:compile", "TORCHDYNAMO_SUPPRESS_ERRORS", marks=pytest.mark.slow),
    ],
)
def test_a_mode_whose_compiler_is_switched_off_is_refused(
    backend: str, variable: str, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    done = _measure(tmp_path, "--network", str(pair), "--backend", backend, "-k", "inference")
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert f"mode {backend if ':' in backend else backend + ':jit'} is not what it is called: " in said
    assert variable in said


@pytest.mark.slow
def test_variables_of_a_framework_are_recorded_where_the_user_sets_them(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("TORCH_TOKEN", "secret")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)  # other tests set it in this process
    done = _measure(
        tmp_path, "--network", str(pair), "--backend", "torch", "-k", "inference", "--benchmark-json=o.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (bench,) = json.loads((tmp_path / "o.json").read_text())["benchmarks"]
    recorded = bench["extra_info"]["d5suite"]["environment"]["environment_variables"]
    assert recorded["ATEN_CPU_CAPABILITY"] == "default"
    assert "secret" not in str(recorded) and "TORCHINDUCTOR_COMPILE_THREADS" not in recorded


def test_an_operator_that_a_backend_lacks_is_a_line_with_its_node(lacking: Path, tmp_path: Path) -> None:
    done = _measure(tmp_path, "--network", str(lacking), "--backend", "torch")
    assert done.returncode == 5, done.stdout + done.stderr
    assert (
        "backend 'torch' lacks 1 operator(s) of network 'pair': Bernoulli (node bent), because it draws" in done.stdout
    )
    assert "Traceback" not in done.stdout + done.stderr


def test_without_a_network_it_measures_nothing(tmp_path: Path) -> None:
    done = _measure(tmp_path, "--backend", "torch")
    assert done.returncode == 5
    assert "3 deselected" in done.stdout and "measured with --network FILE.onnx" in done.stdout
    wrong = _measure(tmp_path, "--network", "none.onnx")
    assert wrong.returncode == 4
    assert "none.onnx: cannot read the network" in wrong.stderr
    os.mkfifo(tmp_path / "pipe.onnx")
    pipe = _measure(tmp_path, "--network", "pipe.onnx")
    assert pipe.returncode == 4
    assert "pipe.onnx: this is not a regular file" in pipe.stderr


def test_a_batch_that_fits_in_no_memory_is_refused_at_once(pair: Path, tmp_path: Path) -> None:
    done = _measure(tmp_path, "--network", str(pair), "--backend", "torch", "--batch-size", str(10**9))
    assert done.returncode == 4
    assert f"--batch-size {10**9}: a batch of 1,000,000,000 needs 1,087.8 GiB" in done.stderr


def test_what_can_run_is_known_before(pair: Path, lacking: Path) -> None:
    done = d5suite("network", str(pair), "--json", "--batch-size", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["name"] for each in found["inputs"]] == ["image", "more"]
    assert [each["shape"] for each in found["outputs"]] == [[None, 6, 8, 12], [None, 5]]
    assert found["parameters"] == 6 * 3 * 9 + 10 * 5
    assert found["loss"] == "softmax cross-entropy of scores"
    assert found["macs"] == 2 * (6 * 8 * 12 * 3 * 9 + 10 * 5)
    assert found["memory_bytes"]["training_step"]["gradients"] == 4 * found["parameters"]
    assert found["backends"]["torch"]["can"] == ["inference", "gradient", "training_step"]
    shown = d5suite("network", str(lacking))
    assert "Bernoulli (node bent)" in shown.stdout and "image" in shown.stdout


def _attention(folder: Path) -> Path:
    """Attention that looks back, and adds the lowest number by a mask that has another name."""
    node, info, kind = helper.make_node, helper.make_tensor_value_info, TensorProto.FLOAT
    lowest = np.finfo(np.float32).min
    nodes = [
        node("Gather", ["words", "ids"], ["e"], "words_at"),
        node("MatMul", ["e", "queries"], ["q"]),
        node("Transpose", ["e"], ["k"], perm=[0, 2, 1]),
        node("MatMul", ["q", "k"], ["products"]),
        node("Cast", ["seen"], ["s"], to=kind),
        node("Sub", ["one", "s"], ["hidden"]),
        node("Unsqueeze", ["hidden", "axis"], ["h"]),
        node("Max", ["h", "ahead"], ["either"]),
        node("Mul", ["either", "lowest"], ["mask"]),
        node("Add", ["products", "mask"], ["a"]),
        node("Softmax", ["a"], ["p"], axis=-1),
        node("MatMul", ["p", "e"], ["o"]),
        node("MatMul", ["o", "head"], ["scores"]),
    ]
    generator = np.random.default_rng(0)
    weights = {name: generator.standard_normal(shape) for name, shape in
               (("words", (9, 4)), ("queries", (4, 4)), ("head", (4, 5)))}  # fmt: skip
    arrays = {name: np.asarray(value, np.float32) for name, value in (weights | {"one": 1, "lowest": lowest}).items()}
    arrays["ahead"] = np.triu(np.ones((1, 6, 6), np.float32), 1)
    graph = helper.make_graph(
        nodes,
        "attention",
        [info(name, TensorProto.INT64, ["N", 6]) for name in ("ids", "seen")],
        [info("scores", kind, ["N", 6, 5])],
        [numpy_helper.from_array(value, name) for name, value in (arrays | {"axis": np.array([1])}).items()],
    )
    path = folder / "attention.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.slow
def test_a_mask_by_any_name_hides_no_token_from_itself(tmp_path: Path) -> None:
    """A token that sees none has a gradient in every framework, and none in truth."""
    done = _measure(tmp_path, "--network", str(_attention(tmp_path)), "--backend", "torch")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.slow
def test_what_the_user_gives_the_inputs_is_measured_recorded_and_compared(tmp_path: Path) -> None:
    path, generator = voice(tmp_path), np.random.default_rng(0)
    np.savez(tmp_path / "sample.npz", signal=generator.standard_normal((3, 4, 3)))
    given = ["--network", str(path), "--backend", "torch", "--input", "sr=16000", "--inputs", "sample.npz"]
    one = _measure(tmp_path, *given, "--input", "ids=0..20", "--benchmark-json", "one.json")
    assert one.returncode == 0 and "3 passed" in one.stdout, one.stdout + one.stderr
    benches = json.loads((tmp_path / "one.json").read_text())["benchmarks"]
    found = benches[0]["extra_info"]["d5suite"]
    assert found["dataset"]["inputs"].keys() == {"ids", "signal", "sr"}
    assert found["dataset"]["inputs"]["sr"] == "16000" and found["dataset"]["inputs"]["ids"] == "0..20"
    assert not found.get("warnings"), "the file's own answer is to the same inputs"
    two = _measure(tmp_path, *given, "--input", "ids=0..10", "-k", "inference", "--benchmark-json", "two.json")
    assert two.returncode == 0, two.stdout + two.stderr
    told = " ".join(d5suite("compare", str(tmp_path / "one.json"), str(tmp_path / "two.json")).stdout.split())
    assert "inputs" in told and "ids=0..20, signal=sample" in told and "ids=0..10, signal=sample" in told, told


def test_inputs_that_do_not_fit_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path = voice(tmp_path)
    done = _measure(tmp_path, "--network", str(path), "--backend", "torch", "--input", "sr=16000", "--input", "hz=3")
    assert done.returncode == 4
    assert "--input: the network has no input 'hz'" in done.stderr
    assert "Its inputs: ids, kept, signal, sr." in done.stderr
    done = _measure(tmp_path, "--inputs", "sample.npz")
    assert done.returncode == 4
    assert "--inputs is for the inputs of a network" in done.stderr


@pytest.mark.slow
def test_outputs_of_any_scale_are_trained_against_targets(tmp_path: Path) -> None:
    """A step that suits outputs near one would diverge: gradients are clipped."""
    path = detector(tmp_path)
    model = onnx.load(path)
    (kernel,) = (each for each in model.graph.initializer if each.name == "kernel")
    kernel.CopyFrom(numpy_helper.from_array(1000 * numpy_helper.to_array(kernel), "kernel"))
    onnx.save(model, path)
    done = _measure(tmp_path, "--network", str(path), "--backend", "torch", "--benchmark-json", "out.json")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    for bench in json.loads((tmp_path / "out.json").read_text())["benchmarks"]:
        assert bench["extra_info"]["d5suite"]["optimizer"]["clip_norm"] == 1


@pytest.mark.slow
def test_the_lines_of_the_page_export_a_network_and_measure_it(tmp_path: Path) -> None:
    for needed in ("torch", "onnxscript"):
        pytest.importorskip(needed)
    page = (ROOT / "docs" / "bring-your-own-network.md").read_text(encoding="utf-8")
    section = page.partition("## From PyTorch\n")[2]
    lines = section.partition("```python\n")[2].partition("```\n")[0]
    assert len([line for line in lines.splitlines() if line]) == 3
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (command,) = re.findall(r"^    pytest recipes/test_your_network.py (.+)$", section.partition("`dynamic")[0], re.M)
    done = _measure(tmp_path, *shlex.split(command))
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_file_that_d5suite_does_not_read_is_measured_by_what_reads_it(tmp_path: Path) -> None:
    done = _measure(tmp_path, "--network", str(looping(tmp_path)), "--benchmark-json", "out.json")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    (bench,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    found = bench["extra_info"]["d5suite"]
    jsonschema.validate(found["validation"], {"properties": {"passed": {"const": True}}})
    assert bench["name"] == "test_inference[onnxruntime]" and found["macs"] is None
    assert found["warnings"] == ["the file is run as it is written, because d5suite does not read it"]
    assert "d5suite does not read loop.onnx: control flow is not supported" in " ".join(done.stdout.split())


def test_a_terminal_obeys_no_name_in_a_network_and_no_exception(tmp_path: Path) -> None:
    """A node that no backend has, and a recipe that fails."""
    evil = "\x1b[2J\x1b]0;x\x07\u202e"
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"], f"node{evil}")],
        "odd",
        [info("x", kind, [1, 4])],
        [info("y", TensorProto.INT64, None)],
    )
    path = tmp_path / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    (tmp_path / "test_odd.py").write_text(f"from d5suite import Recipe\nraise RuntimeError({evil!r})\n")
    more = ("--backend", "torch", "-k", "inference", "-v", "-rs", "--continue-on-collection-errors")
    done = _measure(tmp_path, "test_odd.py", "--network", str(path), *more)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "NonZero (node node\\x1b[2J" in said and "RuntimeError: \\x1b[2J" in said, said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
