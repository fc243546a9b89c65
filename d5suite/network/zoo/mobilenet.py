"""MobileNet v1, v2 and v3-Large.

Howard et al., "MobileNets: efficient convolutional neural networks for mobile vision applications"
(arXiv 1704.04861, 2017), table 1, and Sandler et al., "MobileNetV2: inverted residuals and linear
bottlenecks" (CVPR 2018), table 2. Both cut ReLU off at 6, the first as its authors' code does
(TF-slim, mobilenet_v1.py). Howard et al., "Searching for MobileNetV3" (ICCV 2019), table 1, has
hard swish and squeeze-and-excitation instead. Names are torchvision's for v2 and v3, and timm's
(``mobilenetv1_100``) for v1, which torchvision lacks. Initial weights are torchvision's: He-normal
convolutions and fully connected layers of standard deviation 0.01. May import `d5suite.network`
only.
"""

from __future__ import annotations

from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _depthwise(b: Builder, x: str, name: str, width: int, stride: int, norm: str) -> str:
    return b.relu6(b.batch_norm(b.conv(x, name, width, 3, stride=stride, groups=width), norm))


def _mobilenet_v1(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("mobilenet_v1", seed=seed, image_size=image_size)
    x = b.relu6(b.batch_norm(b.conv(b.image, "conv_stem", 32, 3, stride=2), "bn1"))
    channels = 32
    for stage, (width, repeats) in enumerate(((64, 1), (128, 2), (256, 2), (512, 6), (1024, 2))):
        for index in range(repeats):
            name = f"blocks.{stage}.{index}"
            stride = 2 if stage > 0 and index == 0 else 1
            x = _depthwise(b, x, f"{name}.conv_dw", channels, stride, f"{name}.bn1")
            x = b.relu6(b.batch_norm(b.conv(x, f"{name}.conv_pw", width, 1), f"{name}.bn2"))
            channels = width
    x = b.flatten(b.global_average_pool(x, "global_pool"), "flatten")
    return b.classifier(b.linear(x, "classifier", classes, deviation=0.01))


_V2_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, output channels, blocks and stride of the first block (Sandler et al., table 2)."""


def _inverted_residual(b: Builder, x: str, name: str, *, inputs: int, expansion: int, outputs: int, stride: int) -> str:
    y, hidden, depthwise = x, inputs * expansion, 0
    if expansion != 1:
        y = b.relu6(b.batch_norm(b.conv(x, f"{name}.conv.0.0", hidden, 1), f"{name}.conv.0.1"))
        depthwise = 1
    y = _depthwise(b, y, f"{name}.conv.{depthwise}.0", hidden, stride, f"{name}.conv.{depthwise}.1")
    y = b.batch_norm(b.conv(y, f"{name}.conv.{depthwise + 1}", outputs, 1), f"{name}.conv.{depthwise + 2}")
    return b.add(x, y, name) if stride == 1 and inputs == outputs else y


def _mobilenet_v2(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("mobilenet_v2", seed=seed, image_size=image_size)
    x = b.relu6(b.batch_norm(b.conv(b.image, "features.0.0", 32, 3, stride=2), "features.0.1"))
    channels, layer = 32, 1
    for expansion, width, repeats, stride in _V2_STAGES:
        for index in range(repeats):
            x = _inverted_residual(
                b, x, f"features.{layer}", inputs=channels, expansion=expansion, outputs=width,
                stride=1 if index else stride,
            )  # fmt: skip
            channels, layer = width, layer + 1
    x = b.relu6(b.batch_norm(b.conv(x, "features.18.0", 1280, 1), "features.18.1"))
    x = b.dropout(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "classifier.0", ratio=0.2)
    return b.classifier(b.linear(x, "classifier.1", classes, deviation=0.01))


_V3_BLOCKS = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip
"""Kernel, expanded and output channels, whether with squeeze-and-excitation and with hard swish,
and stride (Howard et al., 2019, table 1)."""


def _divisible(channels: float) -> int:
    """Round to a multiple of 8, at least 90% of ``channels`` (the authors' ``_make_divisible``)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _v3_unit(b: Builder, x: str, name: str, width: int, kernel: int, *, stride: int = 1, groups: int = 1) -> str:
    # The old running statistics weigh 0.99 (section 6.1); epsilon is the authors' code's.
    x = b.conv(x, f"{name}.0", width, kernel, stride=stride, groups=groups)
    return b.batch_norm(x, f"{name}.1", epsilon=1e-3, momentum=0.99)


def _mobilenet_v3_large(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("mobilenet_v3_large", seed=seed, image_size=image_size)
    x = b.hard_swish(_v3_unit(b, b.image, "features.0", 16, 3, stride=2))
    channels = 16
    for index, (kernel, hidden, width, excite, hard, stride) in enumerate(_V3_BLOCKS, 1):
        name, activation = f"features.{index}", b.hard_swish if hard else b.relu
        y, layer = x, 0
        if hidden != channels:
            y = activation(_v3_unit(b, y, f"{name}.block.0", hidden, 1))
            layer = 1
        y = activation(_v3_unit(b, y, f"{name}.block.{layer}", hidden, kernel, stride=stride, groups=hidden))
        if excite:
            layer += 1
            gate = b.global_average_pool(y, f"{name}.block.{layer}.avgpool")
            gate = b.relu(b.conv(gate, f"{name}.block.{layer}.fc1", _divisible(hidden / 4), 1, bias=True))
            gate = b.hard_sigmoid(b.conv(gate, f"{name}.block.{layer}.fc2", hidden, 1, bias=True))
            y = b.multiply(y, gate, f"{name}.block.{layer}")
        y = _v3_unit(b, y, f"{name}.block.{layer + 1}", width, 1)
        x = b.add(y, x, name) if stride == 1 and channels == width else y
        channels = width
    x = b.hard_swish(_v3_unit(b, x, "features.16", 960, 1))
    x = b.linear(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "classifier.0", 1280, deviation=0.01)
    x = b.dropout(b.hard_swish(x), "classifier.2", ratio=0.2)
    return b.classifier(b.linear(x, "classifier.3", classes, deviation=0.01))


NETWORKS = {
    "mobilenet_v1": _mobilenet_v1,
    "mobilenet_v2": _mobilenet_v2,
    "mobilenet_v3_large": _mobilenet_v3_large,
}
