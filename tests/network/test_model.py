"""The neutral network: published sizes, the nine light networks, and files that must be refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from d5suite.errors import NetworkError
from d5suite.network import Network, Node
from d5suite.network.analysis import analyse
from d5suite.network.nodes.windows import window
from d5suite.network.zoo import build
from d5suite.testing.networks import tagger
from d5suite.validate.network.oracle import inference
from tests.conftest import small_network

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def test_activations_grow_with_the_batch_and_parameters_do_not() -> None:
    network = small_network()
    one, eight = analyse(network), analyse(network, batch_size=8)
    assert eight.activation_bytes == 8 * one.activation_bytes
    assert eight.macs == 8 * one.macs
    assert eight.parameters == one.parameters == sum(network.initializers[p].size for p in network.parameters)
    assert eight.nodes[0].output_shape == (8, 8, 16, 16)


def test_parameters_depend_on_seed_and_name_only() -> None:
    a, b, c = (build("resnet18", classes=n, seed=s, image_size=64) for n, s in ((10, 0), (20, 0), (10, 1)))
    name = "layer1.0.conv1.weight"
    assert np.array_equal(a.initializers[name], b.initializers[name])
    assert not np.array_equal(a.initializers[name], c.initializers[name])
    deviation = a.initializers["layer4.1.conv2.weight"].std()
    assert deviation == pytest.approx(np.sqrt(2 / (9 * 512)), rel=0.01)  # He et al. 2015


def test_recurrences_and_einsum_count_their_products() -> None:
    lstm, gru = 6 * 2 * (16 * 8 + 16 * 4), 6 * (24 * 8 + 24 * 8)
    cost = analyse(tagger(), batch_size=3)
    assert cost.macs == 3 * (lstm + gru + 6 * 4 * 3 + 6 * 3 * 5 + 8 * 5)


QUICK = ("light_resnet50", "light_shufflenet", "light_squeezenet")
TRAINED = {"light_bvlc_alexnet": 60_965_224, "light_resnet50": 25_557_032, "light_squeezenet": 1_235_496}
"""Parameters of the networks whose published ones these are."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
        for path in sorted(LIGHT.glob("light_*.onnx"))
    ],
)
def test_light_networks_load_with_their_meaning(path: Path) -> None:
    network = Network.load(path)
    shape = [n or 1 for n in network.shapes[network.input]]
    image = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    ours, _ = inference(network, image, threads=2)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    theirs = session.run(None, {session.get_inputs()[0].name: image})[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert analyse(network).macs > 1e8
    count = sum(network.initializers[name].size for name in network.parameters)
    assert count == TRAINED.get(path.stem, count)
    constants = [network.initializers[name] for name in network.constants]
    assert not [array for array in constants if array.ndim and array.dtype.kind == "f"]


def test_a_classification_loss_is_added_to_the_logits(small_onnx: Path) -> None:
    plain = Network.load(small_onnx)
    assert plain.loss is None
    network = plain.with_classification_loss()
    assert (network.label, network.loss, network.output) == ("label", "loss", plain.output)
    assert network.nodes_for([network.output]) == plain.nodes
    softmax = Network.load(LIGHT / "light_squeezenet.onnx").with_classification_loss()
    assert softmax.output not in {i for n in softmax.nodes_for([str(softmax.loss)]) for i in n.inputs}


def test_zoo_lists_what_it_has() -> None:
    with pytest.raises(NetworkError, match="no network 'resnet51'") as error:
        build("resnet51")
    assert "resnet50" in str(error.value)


def _save(tmp_path: Path, model: onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _linear(weight: TensorProto, opset: int = 21) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("MatMul", ["f", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


WEIGHT = numpy_helper.from_array(np.zeros((12, 5), np.float32), "w")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, small_onnx: Path, keep: float) -> None:
    content = small_onnx.read_bytes()
    path = tmp_path / "cut.onnx"
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(NetworkError, match=str(path)):
        Network.load(path)


@given(st.binary(max_size=200))
def test_noise_is_refused_with_the_declared_error(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noise.onnx"
        path.write_bytes(content)
        with pytest.raises(NetworkError):
            Network.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"absent\.onnx"):
        Network.load(tmp_path / "absent.onnx")


@pytest.mark.parametrize(
    ("location", "why"),
    [
        *((place, "outside the model's folder") for place in ("../secret.bin", "/etc/hostname", "")),
        ("link.bin", "is a symbolic link"),
        ("x" * 5000, "cannot lie at 'xxx.*File name too long"),
        ("a\0b", r"cannot lie at 'a\\x00b'.*embedded null"),
    ],
    ids=lambda text: text[:20].replace("\0", "0"),
)
def test_external_data_outside_the_folder_are_refused(tmp_path: Path, location: str, why: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(240))
    folder = tmp_path / "model"
    folder.mkdir()
    os.symlink(tmp_path / "secret.bin", folder / "link.bin")
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[12, 5], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    path = _save(folder, _linear(weight))
    with pytest.raises(NetworkError, match=why):
        Network.load(path)


def test_external_data_in_the_folder_are_read(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(values.tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[12, 5], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    network = Network.load(_save(tmp_path, _linear(weight)))
    assert np.array_equal(network.initializers["w"].ravel(), values)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(NetworkError, match=r"w\.bin.*missing"):
        Network.load(tmp_path / "model.onnx")


def test_a_cache_of_links_to_a_folder_of_all_files_is_read(tmp_path: Path) -> None:
    """Hugging Face's cache keeps a model and its data so; a link to elsewhere is refused."""
    values = np.arange(60, dtype=np.float32)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[12, 5], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="model.onnx_data")
    _save(blobs, _linear(weight)).rename(blobs / "a1")
    (blobs / "b2").write_bytes(values.tobytes())
    (snapshot / "model.onnx").symlink_to("../../blobs/a1")
    data = snapshot / "model.onnx_data"
    data.symlink_to("../../blobs/b2")
    assert np.array_equal(Network.load(snapshot / "model.onnx").initializers["w"].ravel(), values)
    (tmp_path / "secret").write_bytes(values.tobytes())
    data.unlink()
    data.symlink_to("../../secret")
    with pytest.raises(NetworkError, match="is a symbolic link"):
        Network.load(snapshot / "model.onnx")


def test_a_pipe_as_a_network_or_its_data_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path / "pipe.onnx", tmp_path):
        with pytest.raises(NetworkError, match=r"not a regular file|Is a directory"):
            Network.load(path)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[12, 5], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="pipe.onnx")
    with pytest.raises(NetworkError, match=r"pipe\.onnx.*is not a regular file"):
        Network.load(_save(tmp_path, _linear(weight)))


def test_an_old_opset_and_control_flow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="opset 8 is too old"):
        Network.load(_save(tmp_path, _linear(WEIGHT, opset=8)))
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["b"])],
        "b",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
            helper.make_node("Cast", ["largest"], ["c"], to=TensorProto.BOOL),
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        ],
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 2, 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8)
    with pytest.raises(NetworkError, match="control flow"):
        Network.load(_save(tmp_path, model))


def test_a_huge_constant_is_refused_before_it_is_made(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["s"], ["c"], "bomb"), helper.make_node("Add", ["x", "c"], ["y"])],
        "bomb",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["A", "B", "C", "D"])],
        [numpy_helper.from_array(np.array([1 << 20, 1 << 20, 1, 1]), "s")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8)
    with pytest.raises(NetworkError, match="constant of shape"):
        Network.load(_save(tmp_path, model))


def test_a_shape_error_in_the_graph_is_refused(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.zeros((13, 5), np.float32), "w")
    with pytest.raises(NetworkError, match="not valid ONNX"):
        Network.load(_save(tmp_path, _linear(weight)))


def test_wrong_names_list_what_there_is(small_onnx: Path) -> None:
    with pytest.raises(NetworkError, match="no output 'logits'") as error:
        Network.load(small_onnx, output="logits")
    assert "It has: fc" in str(error.value)


@given(
    size=st.integers(1, 40),
    kernel=st.integers(1, 7),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    automatic=st.sampled_from(["SAME_UPPER", "SAME_LOWER"]),
)
def test_same_padding_gives_one_output_per_stride(
    size: int, kernel: int, stride: int, dilation: int, automatic: str
) -> None:
    node = Node("n", "Conv", ("x", "w"), ("y",), {
        "kernel_shape": [kernel], "strides": [stride], "dilations": [dilation], "auto_pad": automatic,
    })  # fmt: skip
    found = window(node, (size,))
    assert found.outputs == (-(-size // stride),)
    difference = found.pads_end[0] - found.pads_begin[0]
    assert difference in ((0, 1) if automatic == "SAME_UPPER" else (0, -1))
