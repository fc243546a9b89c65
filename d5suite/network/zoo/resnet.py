"""ResNet-18/34/50/101/152 of version 1.5, the last three of version 1 too, and ResNeXt-50 and -101.

He et al., "Deep residual learning for image recognition" (CVPR 2016), table 1: version 1, which has
the stride of a bottleneck in its first 1×1 convolution. Version 1.5 has the stride in the 3×3
convolution (Goyal et al., "Accurate, large minibatch SGD", 2017, footnote 5). ResNeXt (Xie et al.,
"Aggregated residual transformations for deep neural networks", CVPR 2017, table 1) divides the 3×3
convolution into groups. Initial weights are Goyal et al.'s (section 5.1): He-normal convolutions, a
classifier of standard deviation 0.01, and a scale of zero at the end of every residual branch,
without which the first training steps are chaotic and no two machines agree on them. May import
`d5suite.network` only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _basic(b: Builder, x: str, name: str, width: int, stride: int) -> str:
    y = b.relu(b.batch_norm(b.conv(x, f"{name}.conv1", width, 3, stride=stride), f"{name}.bn1"))
    return b.batch_norm(b.conv(y, f"{name}.conv2", width, 3), f"{name}.bn2", scale=0.0)


def _bottleneck(
    b: Builder, x: str, name: str, width: int, stride: int, *, groups: int = 1, each: int = 64, version_1: bool = False
) -> str:
    """Append a bottleneck, whose groups have ``width * each / 64`` channels each."""
    inner = width * each // 64 * groups
    first, second = (stride, 1) if version_1 else (1, stride)
    y = b.relu(b.batch_norm(b.conv(x, f"{name}.conv1", inner, 1, stride=first), f"{name}.bn1"))
    y = b.conv(y, f"{name}.conv2", inner, 3, stride=second, groups=groups)
    y = b.relu(b.batch_norm(y, f"{name}.bn2"))
    return b.batch_norm(b.conv(y, f"{name}.conv3", 4 * width, 1), f"{name}.bn3", scale=0.0)


def _resnet(
    name: str,
    block: Callable[[Builder, str, str, int, int], str],
    expansion: int,
    blocks: tuple[int, int, int, int],
    *,
    classes: int,
    image_size: int,
    seed: int,
) -> Network:
    b = Builder(name, seed=seed, image_size=image_size)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 64, 7, stride=2), "bn1"))
    x = b.max_pool(x, "maxpool", 3, stride=2, padding=1)
    channels = 64
    for stage, repeats in enumerate(blocks):
        width = 64 << stage
        for index in range(repeats):
            layer = f"layer{stage + 1}.{index}"
            stride = 2 if stage > 0 and index == 0 else 1
            shortcut = x
            if stride != 1 or channels != expansion * width:
                shortcut = b.conv(x, f"{layer}.downsample.0", expansion * width, 1, stride=stride)
                shortcut = b.batch_norm(shortcut, f"{layer}.downsample.1")
            x = b.relu(b.add(block(b, x, layer, width, stride), shortcut, f"{layer}.add"))
            channels = expansion * width
    x = b.flatten(b.global_average_pool(x, "avgpool"), "flatten")
    return b.classifier(b.linear(x, "fc", classes, deviation=0.01))


_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks in each stage of the networks with bottlenecks."""

_ORIGINAL = partial(_bottleneck, version_1=True)

NETWORKS = {
    "resnet18": partial(_resnet, "resnet18", _basic, 1, (2, 2, 2, 2)),
    "resnet34": partial(_resnet, "resnet34", _basic, 1, (3, 4, 6, 3)),
    **{f"resnet{n}": partial(_resnet, f"resnet{n}", _bottleneck, 4, blocks) for n, blocks in _DEPTHS.items()},
    **{f"resnet{n}_v1": partial(_resnet, f"resnet{n}_v1", _ORIGINAL, 4, blocks) for n, blocks in _DEPTHS.items()},
    "resnext50_32x4d": partial(_resnet, "resnext50_32x4d", partial(_bottleneck, groups=32, each=4), 4, _DEPTHS[50]),
    "resnext101_32x8d": partial(_resnet, "resnext101_32x8d", partial(_bottleneck, groups=32, each=8), 4, _DEPTHS[101]),
}
