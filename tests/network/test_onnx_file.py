"""Files from outside: what exporters write loads; the rest is one error that names the node."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.errors import NetworkError
from d5suite.network import Network
from d5suite.network.analysis import analyse
from d5suite.validate.network.oracle import inference

IMAGE = ("N", 3, 8, 8)
WEIGHT = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
NODE = helper.make_node


def _model(
    nodes: Sequence[onnx.NodeProto], *, shape: Any = IMAGE, kind: int = TensorProto.FLOAT, opset: int = 21,
    output: Any = (None,) * 4, **constants: Any,
) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "foreign",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, output)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _conv(name: str = "conv", x: str = "x", y: str = "y") -> onnx.NodeProto:
    return NODE("Conv", [x, "w", "b"], [y], name)


def _load(folder: Path, model: onnx.ModelProto, **options: Any) -> Network:
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return Network.load(folder / "m.onnx", **options)


BIAS = np.ones(4, np.float32)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("within", [False, True], ids=["all", "within casts"])
def test_16_bit_weights_are_widened_for_a_job_chooses_the_precision(tmp_path: Path, kind: int, within: bool) -> None:
    narrow = [helper.make_tensor(n, kind, v.shape, v.ravel()) for n, v in (("w", WEIGHT), ("b", BIAS))]
    casts = [NODE("Cast", ["x"], ["x16"], "in", to=kind), NODE("Cast", ["y16"], ["y"], "out", to=TensorProto.FLOAT)]
    if within:
        model = _model([casts[0], _conv(x="x16", y="y16"), casts[1]], opset=22)
    else:
        model = _model([_conv()], kind=kind, opset=22)
    model.graph.initializer.extend(narrow)
    network = _load(tmp_path, model)
    assert {value.dtype for value in network.initializers.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(network.initializers["w"], onnx.numpy_helper.to_array(narrow[0]).astype(np.float32))
    images = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    wide = _load(tmp_path, _model([_conv()], w=network.initializers["w"], b=BIAS))
    np.testing.assert_array_equal(inference(network, images, threads=1)[0], inference(wide, images, threads=1)[0])


def test_initializers_may_be_inputs_too_and_outputs_several(tmp_path: Path) -> None:
    model = _model([_conv(y="c"), NODE("Relu", ["c"], ["y"]), NODE("Sigmoid", ["c"], ["z"])], w=WEIGHT, b=BIAS)
    for tensor in model.graph.initializer:  # as files older than 2019 have them
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert _load(tmp_path, model).parameters == ("w", "b")
    assert _load(tmp_path, model, output="z").shapes["z"] == (None, 4, 6, 6)


@pytest.mark.parametrize("opset", range(9, 27))
def test_every_opset_since_9_loads_with_its_meaning(tmp_path: Path, opset: int) -> None:
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("the installed onnx does not know it")
    squeeze = NODE("Squeeze", ["p"], ["s"], axes=[2, 3]) if opset < 13 else NODE("Squeeze", ["p", "axes"], ["s"])
    model = _model(
        [_conv(y="c"), NODE("GlobalAveragePool", ["c"], ["p"]), squeeze, NODE("Softmax", ["s"], ["y"], axis=1)],
        opset=opset, output=("N", 4), w=WEIGHT, b=BIAS, axes=np.array([2, 3]),
    )  # fmt: skip
    model.ir_version = 4 if opset == 9 else 8
    network = _load(tmp_path, model)
    images = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    if opset <= 23:
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
        expected = session.run(None, {"x": images})[0]
        np.testing.assert_allclose(inference(network, images, threads=1)[0], expected, rtol=1e-5, atol=1e-6)
    assert network.parameters == ("w", "b")


def test_the_chain_that_tf2onnx_writes_for_a_flatten_folds(tmp_path: Path) -> None:
    chain = [
        NODE("Transpose", ["x"], ["nhwc"], perm=[0, 2, 3, 1]),
        NODE("Shape", ["nhwc"], ["shape"]),
        NODE("Cast", ["shape"], ["shape32"], to=TensorProto.INT32),
        NODE("Slice", ["shape32", "zero", "one", "zero"], ["n"]),
        NODE("Squeeze", ["n", "zero"], ["scalar"]),
        NODE("Unsqueeze", ["scalar", "zero"], ["again"]),
        NODE("Concat", ["again", "rest"], ["target32"], axis=0),
        NODE("Cast", ["target32"], ["target"], to=TensorProto.INT64),
        NODE("Reshape", ["nhwc", "target"], ["y"]),
    ]
    model = _model(
        chain, output=("M", 8, 24), zero=np.array([0]), one=np.array([1]), rest=np.array([8, 24], np.int32)
    )  # fmt: skip
    network = _load(tmp_path, model)
    assert [node.op_type for node in network.nodes] == ["Transpose", "Reshape"]
    images = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
    expected = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(inference(network, images, threads=1)[0], expected.run(None, {"x": images})[0])


def test_an_input_without_a_shape_gets_one(tmp_path: Path) -> None:
    model = _model([_conv()], shape=None, w=WEIGHT, b=BIAS)
    with pytest.raises(NetworkError, match=r"states no shape of input 'x'\n  Give it: --shape x=1x3x224x224"):
        _load(tmp_path, model)
    assert _load(tmp_path, model, shapes={"x": (2, 3, 8, 8)}).shapes["y"] == (2, 4, 6, 6)
    assert _load(tmp_path, _model([_conv()], shape=(-1, 3, 8, 8), w=WEIGHT, b=BIAS)).batch_size is None


def _sequence_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None))


def _sparse(model: onnx.ModelProto) -> None:
    values, indices = helper.make_tensor("w", 1, [1], [1.0]), helper.make_tensor("i", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 3, 3, 3]))


def _cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


RELU = NODE("Relu", ["x"], ["y"], "act")
SUMMED = [NODE("ReduceSum", ["r"], ["q"]), NODE("Add", ["x", "q"], ["y"])]
BIG = np.array([1 << 30, 1 << 30, 8, 8])

REFUSED: list[tuple[onnx.ModelProto, Callable[[onnx.ModelProto], object], str]] = [
    (_model([NODE("Add", ["x", "a"], ["a2"], "one"), NODE("Relu", ["a2"], ["a"]), RELU]), lambda m: None,
     "one: Add reads 'a', which only a later node provides\n  The graph has a cycle"),
    (_model([_conv()], w=WEIGHT, b=BIAS), _cycle, "conv: Conv reads 'y', which only a later node"),
    (_model([_conv()], w=WEIGHT), lambda m: None, "conv: Conv reads 'b', which nothing provides"),
    (_model([NODE("Fused", ["x"], ["y"], "act", domain="com.acme")]), lambda m: None, "domain 'com.acme'"),
    (_model([NODE("Frob", ["x"], ["y"], "act")]), lambda m: None, "Name: act OpType: Frob"),
    (_model([NODE("QuantizeLinear", ["x", "s"], ["q"], "q"), NODE("DequantizeLinear", ["q", "s"], ["y"])],
            s=np.float32(0.1)), lambda m: None, "q: quantised networks are not supported: node 'q' is QuantizeLinear"),
    (_model([NODE("MatMulInteger", ["x", "w"], ["y"], "mm")], kind=TensorProto.INT8, w=np.ones((8, 8), np.int8)),
     lambda m: None, "mm: quantised networks are not supported"),
    (_model([NODE("SequenceConstruct", ["x"], ["s"], "seq"), NODE("ConcatFromSequence", ["s"], ["y"], axis=0)]),
     lambda m: None, "seq: sequences and optional values are not supported: node 'seq'"),
    (_model([NODE("Optional", ["x"], ["o"], "opt"), NODE("OptionalGetElement", ["o"], ["y"])]), lambda m: None,
     "opt: sequences and optional values"),
    (_model([RELU]), _sequence_input, "x: 'x' is not a tensor of numbers but sequence"),
    (_model([NODE("Identity", ["x"], ["y"])], kind=TensorProto.STRING), lambda m: None, "tensor of numbers but st"),
    (_model([_conv()], b=BIAS), _sparse, "w: sparse initializers are not supported"),
    (_model([RELU], shape=(1 << 20, 1 << 20, 8, 8)), lambda m: None, "act: Relu: 'x' of shape [1048576, 1048576"),
    (_model([RELU], shape=(1 << 40, 1 << 40, 8, 8)), lambda m: None, "act: Relu: 'x' of shape [1099511627776"),
    (_model([NODE("Expand", ["x", "s"], ["y"], "bomb")], shape=(1, 1, 8, 8), s=BIG), lambda m: None,
     "bomb: Expand: 'y' of shape [1073741824"),
    (_model([NODE("Mul", ["s", "s"], ["t"]), NODE("Expand", ["k", "t"], ["r"], "bomb"), *SUMMED], k=np.float32(1),
            s=np.array([1 << 20, 1, 1, 1 << 20])), lambda m: None, "bomb: Expand would make a constant of shape"),
    (_model([NODE("Range", ["a", "b", "c"], ["r"], "bomb"), *SUMMED], a=np.float32(0), b=np.float32(1e12),
            c=np.float32(1)), lambda m: None, "bomb: Range would make a constant of shape"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "damage", "said"), REFUSED, ids=[said[:40] for _, _, said in REFUSED])
def test_what_no_adapter_can_be_given_is_one_error_that_names_it(
    tmp_path: Path, model: onnx.ModelProto, damage: Callable[[onnx.ModelProto], object], said: str
) -> None:
    model = onnx.ModelProto.FromString(model.SerializeToString())
    damage(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NetworkError) as error:
        _load(tmp_path, model)
    assert said in str(error.value) and str(error.value).startswith(str(tmp_path / "m.onnx"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # nothing was allocated


@pytest.mark.parametrize("size", [0, -1, 1 << 31, 1 << 70])
def test_a_shape_that_no_tensor_has_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(NetworkError, match="input 'x' cannot have shape"):
        _load(tmp_path, _model([RELU]), shapes={"x": (size, 3, 8, 8)})


def test_a_data_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    model = _model([_conv()], w=WEIGHT, b=BIAS)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert np.array_equal(Network.load(tmp_path / "m.onnx").initializers["w"], WEIGHT)
    data = (tmp_path / "m.data").read_bytes()
    (tmp_path / "m.data").write_bytes(data[:100])
    with pytest.raises(NetworkError, match=r"tensor 'w' needs 432 bytes, but 'm.data' has 100 for it"):
        Network.load(tmp_path / "m.onnx")


def _large(path: Path, gib: float) -> int:
    """Write a network whose weights are a sparse file of zeros; return their number."""
    rows, columns = 1 << 13, int(gib * (1 << 30) / 4 / (1 << 13) / 4)
    shape = (rows, columns)
    model = _model(
        [NODE("Flatten", ["x"], ["f"]), NODE("Gemm", ["f", "first"], ["a0"])]
        + [NODE("Gemm", [f"a{i}", f"w{i}"], [f"a{i + 1}"], transB=i % 2) for i in range(4)]
        + [NODE("Identity", ["a4"], ["y"])],
        output=("N", rows), first=np.full((192, rows), 1e-3, np.float32),
    )  # fmt: skip
    for i in range(4):
        tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "m.data"), ("offset", str(i * 4 * rows * columns))):
            tensor.external_data.add(key=key, value=value)
        model.graph.initializer.append(tensor)
    with (path.parent / "m.data").open("wb") as data:
        data.truncate(16 * rows * columns)
    path.write_bytes(model.SerializeToString())
    return 4 * rows * columns


@pytest.mark.parametrize("gib", [0.01, pytest.param(2.2, marks=[pytest.mark.slow, pytest.mark.alone])])
def test_a_model_of_more_than_2_gib_loads_and_answers(tmp_path: Path, gib: float) -> None:
    weights = _large(tmp_path / "m.onnx", gib)
    network = Network.load(tmp_path / "m.onnx")
    assert analyse(network).parameters == weights + 192 * (1 << 13)
    answer, _ = inference(network, np.ones((1, 3, 8, 8), np.float32), threads=1)
    assert answer.shape == (1, 1 << 13) and not answer.any()
