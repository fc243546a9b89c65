"""The zoo: published sizes, image sizes, parameter names, and the same answers as evaluators
that are no backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from scipy.special import logsumexp

from d5suite.backends import discover
from d5suite.errors import NetworkError
from d5suite.network import Network
from d5suite.network.analysis import analyse
from d5suite.network.builder import Builder
from d5suite.network.nodes.windows import window
from d5suite.network.zoo import NETWORKS, build, name_in
from d5suite.network.zoo.vit import transformer
from d5suite.testing.networks import random_batch
from d5suite.validate.network.gradient import check_gradient_float64
from d5suite.validate.network.inference import check_inference
from d5suite.validate.network.oracle import inference

PUBLISHED = {
    # Parameters and GMAC of torchvision 0.29's weight metadata. ResNets of version 1: He et al.,
    # table 1; MobileNet v1: Keras's 4,253,864 parameters less 21,888 running statistics, and the
    # paper's 569 million.
    "alexnet": (61_100_840, "0.714"),
    "vgg16": (138_357_544, "15.470"),
    "vgg19": (143_667_240, "19.632"),
    "googlenet": (6_624_904, "1.498"),
    "inception_v3": (27_161_264, "5.713"),  # of the parameters, 3,326,696 are the auxiliary classifier's; no MAC is
    "resnet18": (11_689_512, "1.814"),
    "resnet34": (21_797_672, "3.664"),
    "resnet50": (25_557_032, "4.089"),
    "resnet101": (44_549_160, "7.801"),
    "resnet152": (60_192_808, "11.514"),
    "resnet50_v1": (25_557_032, "3.858"),
    "resnet101_v1": (44_549_160, "7.6"),
    "resnet152_v1": (60_192_808, "11.3"),
    "resnext50_32x4d": (25_028_904, "4.230"),
    "resnext101_32x8d": (88_791_336, "16.414"),
    "densenet121": (7_978_856, "2.834"),
    "mobilenet_v1": (4_231_976, "0.569"),
    "mobilenet_v2": (3_504_872, "0.301"),
    "squeezenet1_0": (1_248_424, "0.819"),
    "squeezenet1_1": (1_235_496, "0.349"),
    "mobilenet_v3_large": (5_483_032, "0.217"),
    "efficientnet_b0": (5_288_548, "0.386"),
    "shufflenet_v2_x1_0": (2_278_604, "0.145"),
    "regnet_x_400mf": (5_495_976, "0.414"),
    "convnext_tiny": (28_589_128, "4.456"),
    "vit_b_16": (86_567_656, "17.564"),  # attention's two products included
}

ACTIVATIONS = {  # MiB at batch 1 in float32: convnet-burden's README
    "vgg16": 58,
    "vgg19": 63,
    "inception_v3": 89,
    "resnet18": 23,
    "resnet34": 35,
    "resnet50_v1": 103,
    "resnet101_v1": 155,
    "resnet152_v1": 219,
    "resnext50_32x4d": 132,
    "densenet121": 126,
    "mobilenet_v1": 38,
    "squeezenet1_1": 17,
}

OTHER_ACTIVATIONS = {  # name: convnet-burden's figure and ours; why they differ
    # Its AlexNet is the grouped one of 2012, with 96, 256, 384, 384 and 256 channels and images of
    # 227 pixels.
    "alexnet": (3, 2.222),
    # Its GoogLeNet is Caffe's: two response normalisations (3.06 MiB) and two auxiliary classifiers
    # (0.09 MiB) in place of batch normalisation (12.31 MiB).
    "googlenet": (26, 34.742),
    # Its features alone agree (the test below). A second map of 1000×13×13 (0.645 MiB) in the
    # classifier would explain both of its rows, 29.63 and 17.32: perhaps the last ReLU does not
    # work in place there.
    "squeezenet1_0": (30, 28.990),
}


PARAMETERS: dict[str, dict[str, tuple[int, ...]]] = {  # of torchvision's state_dict; MobileNet v1: of timm's
    "alexnet": {
        "features.10.weight": (256, 256, 3, 3),
        "classifier.1.weight": (4096, 9216),
        "classifier.6.bias": (1000,),
    },
    "googlenet": {
        "conv1.bn.running_var": (64,),
        "inception3a.branch3.1.conv.weight": (32, 16, 3, 3),
        "inception5b.branch4.1.bn.weight": (128,),
        "fc.weight": (1000, 1024),
    },
    "inception_v3": {
        "Conv2d_4a_3x3.conv.weight": (192, 80, 3, 3),
        "Mixed_5b.branch_pool.conv.weight": (32, 192, 1, 1),
        "Mixed_6a.branch3x3dbl_3.bn.bias": (96,),
        "Mixed_6c.branch7x7dbl_4.conv.weight": (160, 160, 7, 1),
        "Mixed_7a.branch7x7x3_2.conv.weight": (192, 192, 1, 7),
        "Mixed_7c.branch3x3dbl_3b.conv.weight": (384, 384, 3, 1),
        "AuxLogits.conv1.conv.weight": (768, 128, 5, 5),
        "AuxLogits.fc.bias": (1000,),
    },
    "resnext50_32x4d": {"layer1.0.conv2.weight": (128, 4, 3, 3), "layer4.0.downsample.0.weight": (2048, 1024, 1, 1)},
    "densenet121": {
        "features.norm0.weight": (64,),
        "features.denseblock3.denselayer24.conv2.weight": (32, 128, 3, 3),
        "features.transition3.conv.weight": (512, 1024, 1, 1),
        "features.norm5.running_mean": (1024,),
        "classifier.weight": (1000, 1024),
    },
    "mobilenet_v1": {"conv_stem.weight": (32, 3, 3, 3), "blocks.3.5.conv_dw.weight": (512, 1, 3, 3)},
    "mobilenet_v2": {
        "features.1.conv.0.0.weight": (32, 1, 3, 3),
        "features.1.conv.2.running_mean": (16,),
        "features.2.conv.1.0.weight": (96, 1, 3, 3),
        "features.17.conv.3.weight": (320,),
        "features.18.0.weight": (1280, 320, 1, 1),
        "classifier.1.bias": (1000,),
    },
    # Of layers along tokens or channels, torchvision's weights are (output, input).
    "mobilenet_v3_large": {
        "features.1.block.0.0.weight": (16, 1, 3, 3),
        "features.4.block.2.fc1.weight": (24, 72, 1, 1),
        "features.15.block.3.1.running_var": (160,),
        "classifier.0.weight": (1280, 960),
    },
    "efficientnet_b0": {
        "features.1.0.block.1.fc1.bias": (8,),
        "features.4.2.block.1.0.weight": (480, 1, 3, 3),
        "features.7.0.block.3.0.weight": (320, 1152, 1, 1),
        "classifier.1.weight": (1000, 1280),
    },
    "shufflenet_v2_x1_0": {
        "stage2.0.branch1.2.weight": (58, 24, 1, 1),
        "stage3.7.branch2.3.weight": (116, 1, 3, 3),
        "conv5.1.running_mean": (1024,),
    },
    "regnet_x_400mf": {
        "trunk_output.block3.block3-0.proj.0.weight": (160, 64, 1, 1),
        "trunk_output.block4.block4-11.f.b.0.weight": (400, 16, 3, 3),
        "fc.weight": (1000, 400),
    },
    "convnext_tiny": {
        "features.0.0.weight": (96, 3, 4, 4),
        "features.5.8.layer_scale": (384, 1, 1),
        "features.6.0.weight": (384,),
        "features.7.2.block.3.weight": (768, 3072),
        "classifier.2.weight": (1000, 768),
    },
    "vit_b_16": {
        "class_token": (1, 1, 768),
        "conv_proj.weight": (768, 3, 16, 16),
        "encoder.pos_embedding": (1, 197, 768),
        "encoder.layers.encoder_layer_11.self_attention.in_proj.weight": (768, 2304),
        "encoder.ln.bias": (768,),
        "heads.head.weight": (1000, 768),
    },
    "squeezenet1_0": {"features.0.weight": (96, 3, 7, 7), "features.12.expand3x3.weight": (256, 64, 3, 3)},
    "squeezenet1_1": {"features.3.squeeze.bias": (16,), "classifier.1.weight": (1000, 512, 1, 1)},
}


LARGEST = ("vgg16", "vgg19", "resnext101_32x8d", "resnet152", "resnet152_v1", "resnet101", "resnet101_v1")
"""Networks that take seconds to write; others of their families do not."""


def _image_size(name: str) -> int:
    return {"inception_v3": 299, "lenet5": 32}.get(name, 224)


def test_a_recipes_name_ends_with_its_network_or_the_only_one_of_a_family() -> None:
    wanted = {"imagenet_googlenet": "googlenet", "digits_lenet": "lenet5", "mine-resnet152_v1": "resnet152_v1",
              "imagenet_resnet": None, "imagenet_other": None}  # fmt: skip
    assert {recipe: name_in(recipe) for recipe in wanted} == wanted


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGEST else ()) for name in PUBLISHED]
)
def test_sizes_and_parameters_are_the_published_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, because the largest networks take seconds to write, even with weights of zero."""

    def blank(b: Builder, tensor: str, shape: tuple[int, ...], *_: Any, **__: Any) -> str:
        return b.parameter(tensor, np.zeros(shape, np.float32))

    monkeypatch.setattr(Builder, "draw", blank)
    network = build(name, image_size=_image_size(name))
    cost = analyse(network)
    parameters, giga = PUBLISHED[name]
    assert cost.parameters == parameters
    assert f"{cost.macs / 1e9:.{len(giga.partition('.')[2])}f}" == giga
    assert network.shapes[network.output] == (None, 1000)

    mebibytes = cost.activation_bytes / 2**20
    if name in ACTIVATIONS:
        assert round(mebibytes) == ACTIVATIONS[name]
    elif name in OTHER_ACTIVATIONS:
        published, ours = OTHER_ACTIVATIONS[name]
        assert round(mebibytes) != published
        assert mebibytes == pytest.approx(ours, abs=5e-4)

    weights = {*network.parameters, *network.statistics}
    for parameter, shape in PARAMETERS.get(name, {}).items():
        assert parameter in weights
        assert network.initializers[parameter].shape == shape, parameter


def test_every_network_is_counted() -> None:
    assert set(NETWORKS) == {*PUBLISHED, "lenet5"}


@pytest.mark.parametrize(("name", "mebibytes"), [("squeezenet1_0", 841), ("squeezenet1_1", 483)])
def test_squeezenets_features_take_the_published_memory(name: str, mebibytes: int) -> None:
    """convnet-burden's reports: up to the last fire module, 128 images of 112 pixels."""
    nodes = analyse(build(name, image_size=112), batch_size=128).nodes
    counted = sum(node.activation_bytes for node in nodes if node.name.startswith("features."))
    assert round(counted / 2**20) == mebibytes


SMALLEST = {
    "alexnet": 63,
    "vgg16": 32,
    "googlenet": 31,
    "inception_v3": 75,
    "resnet18": 1,
    "resnext50_32x4d": 1,
    "densenet121": 29,
    "mobilenet_v1": 1,
    "mobilenet_v2": 1,
    "squeezenet1_0": 29,
    "squeezenet1_1": 25,
    "mobilenet_v3_large": 1,
    "efficientnet_b0": 1,
    "shufflenet_v2_x1_0": 1,
    "regnet_x_400mf": 1,
    "convnext_tiny": 32,
}


@pytest.mark.parametrize("name", SMALLEST)
def test_too_small_an_image_is_refused_with_the_smallest_that_fits(name: str) -> None:
    least = SMALLEST[name]
    with pytest.raises(NetworkError, match=f"{name}: the images must have at least {least} pixels") as error:
        build(name, classes=10, image_size=least - 1)
    assert error.value.where == name


@pytest.mark.parametrize("name", [name for name in SMALLEST if name not in ("alexnet", "vgg16")])
def test_the_smallest_image_fits(name: str) -> None:
    network = build(name, classes=7, image_size=SMALLEST[name])
    assert network.shapes[network.output] == (None, 7)
    for node in network.nodes:
        if node.op_type in ("Conv", "MaxPool", "AveragePool"):
            kernel = node.attributes["kernel_shape"]
            sizes = network.shapes[node.outputs[0]][2:]
            assert window(node, network.shapes[node.inputs[0]][2:], kernel).outputs == sizes, node.name


def test_vision_transformers_take_whole_patches() -> None:
    with pytest.raises(NetworkError, match="a multiple of 16 pixels a side, not 40"):
        build("vit_b_16", classes=10, image_size=40)


def test_inception_adds_the_auxiliary_loss_with_its_weight_at_every_image_size() -> None:
    larger = build("inception_v3", classes=10, image_size=203)
    assert larger.initializers["AuxLogits.conv1.conv.weight"].shape == (768, 128, 3, 3)
    network = build("inception_v3", classes=10, image_size=75)
    images, labels = random_batch(network, 2)
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    logits = ("fc", "AuxLogits.fc")
    model.graph.output.append(onnx.helper.make_tensor_value_info(logits[1], onnx.TensorProto.FLOAT, None))
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    main, auxiliary, loss = session.run([*logits, "loss"], {"image": images, "label": labels})
    parts = [np.mean(logsumexp(x, axis=1) - x[np.arange(2), labels]) for x in (main, auxiliary)]
    assert loss == pytest.approx(parts[0] + 0.4 * parts[1], rel=1e-5)


def _adaptive(image_size: int, size: int) -> Network:
    b = Builder("adaptive", image_size=image_size, channels=2)
    x = b.adaptive_average_pool(b.relu(b.image), "pool", size, side=lambda pixels: pixels)
    return b.classifier(b.linear(b.flatten(x, "flatten", size=size), "fc", 2 * size * size))


@pytest.mark.parametrize("image_size", [1, 3, 4, 6, 7])
def test_adaptive_pooling_averages_pytorchs_windows(image_size: int) -> None:
    network = _adaptive(image_size, 3)
    assert network.initializers["fc.weight"].shape == (18, 18)
    rows = np.zeros((3, image_size))
    for i in range(3):
        begin, end = i * image_size // 3, -(-(i + 1) * image_size // 3)
        rows[i, begin:end] = 1 / (end - begin)
    images = np.random.default_rng(0).random((2, 2, image_size, image_size), np.float32)
    pooled = (rows @ images @ rows.T).reshape(2, -1)
    answer, _ = inference(network, images, threads=1)
    np.testing.assert_allclose(answer, pooled @ network.initializers["fc.weight"].T, rtol=1e-4, atol=1e-5)


def test_adaptive_pooling_names_image_sizes_that_fit() -> None:
    with pytest.raises(NetworkError, match="maps of 5 pixels") as error:
        _adaptive(5, 3)
    assert "nearest image sizes that fit are 4 and 6 pixels" in str(error.value)
    with pytest.raises(NetworkError, match="maps of 2 pixels") as error:
        build("alexnet", classes=2, image_size=100)
    assert "nearest image sizes that fit are 94 and 223 pixels" in str(error.value)


GRADIENTS = {"squeezenet1_1": 32, "mobilenet_v1": 64, "mobilenet_v2": 64, "densenet121": 32, "googlenet": 32}
"""Networks whose gradients are checked, and image sizes.

ONNX's evaluator takes 6 s of a core for ResNeXt-50, 22 s for AlexNet, and minutes for Inception and
VGG.
"""

ANSWERS = {
    **GRADIENTS,
    "squeezenet1_0": 33,
    "resnet50_v1": 64,
    "resnext50_32x4d": 32,
    "inception_v3": 107,
    "alexnet": 64,
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n.startswith("squeezenet") else pytest.mark.slow) for n in ANSWERS]
)
def test_an_executor_agrees_with_evaluators_that_are_no_backend(name: str) -> None:
    backend = discover()[0]["torch"]
    if backend.problem() is not None:
        pytest.skip("needs PyTorch")
    network = build(name, classes=10, image_size=ANSWERS[name]).at_generic_point()
    images, labels = random_batch(network, 4)
    checks = check_inference(backend.executor(network), images, tolerance=1e-5, threads=1)
    if name in GRADIENTS:
        network = network.without_dropout()
        checks += check_gradient_float64(backend.executor(network, precision="fp64"), images, labels)
    assert all(check.passed for check in checks), checks


TODAY = (
    "mobilenet_v3_large", "efficientnet_b0", "shufflenet_v2_x1_0", "regnet_x_400mf", "convnext_tiny", "vit_b_16",
)  # fmt: skip


def _of_today(name: str) -> Network:
    if name == "vit_b_16":  # two of its twelve equal layers, of an eighth of their width
        return transformer(name, 96, 2, 4, 384, classes=10, image_size=64, seed=0)
    return build(name, classes=10, image_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("name", TODAY)
def test_todays_networks_have_the_same_gradients_in_two_frameworks(name: str) -> None:
    """`d5suite conformance NAME --zoo` compares every backend with ONNX's evaluator, for longer.

    Further frameworks run further versions of these in ``tests/test_public_networks.py``, except of
    EfficientNet.
    """
    network = _of_today(name).without_dropout().at_generic_point()
    images, labels = random_batch(network, 4)
    answers = []
    names = ("torch", "mxnet", *(["tensorflow"] if name == "efficientnet_b0" else []))
    for backend in (discover()[0][each] for each in names):
        if backend.problem() is None:
            executor = backend.executor(network, precision="fp64")
            feed = executor.feed({network.input: images, network.label or "": labels})
            answers.append(executor.fetch(executor.forward_backward(feed)))
    if len(answers) < 2:
        pytest.skip("needs two frameworks")
    whole = np.sqrt(sum(np.sum(value**2) for value in answers[0].values()))
    for other in answers[1:]:
        for tensor, value in answers[0].items():
            # Some are zero but for roundings, as a key's bias: softmax ignores what all keys share.
            scale = max(np.linalg.norm(value), 1e-6 * whole)
            assert np.linalg.norm(other[tensor] - value) < 1e-9 * scale, tensor
