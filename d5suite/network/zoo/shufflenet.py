"""ShuffleNet v2 of width 1.

Ma et al., "ShuffleNet V2: practical guidelines for efficient CNN architecture design" (ECCV 2018),
table 5 and figure 3. Names are torchvision's. The paper does not say how weights start: these are
He-normal convolutions and a classifier of standard deviation 0.01. May import `d5suite.network`
only.
"""

from __future__ import annotations

from d5suite.network.builder import Builder
from d5suite.network.model import Network

_STAGES = ((116, 4), (232, 8), (464, 4))
"""Channels and units of stages 2 to 4."""


def _unit(b: Builder, x: str, name: str, width: int, kernel: int, norm: str, *, stride: int = 1) -> str:
    """Convolve and normalise; 3×3 convolutions are depthwise."""
    return b.batch_norm(b.conv(x, name, width, kernel, stride=stride, groups=1 if kernel == 1 else width), norm)


def shuffled(b: Builder, x: str, name: str, width: int, size: int) -> str:
    """Interleave both halves of the channels of (N, width, size, size)."""
    x = b.reshape(x, f"{name}.halves", (0, 2, width // 2, size, size))
    x = b.transpose(x, f"{name}.pairs", (0, 2, 1, 3, 4), width // 2)
    return b.reshape(x, f"{name}.shuffled", (0, width, size, size))


def _shufflenet_v2_x1_0(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("shufflenet_v2_x1_0", seed=seed, image_size=image_size)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1.0", 24, 3, stride=2), "conv1.1"))
    x = b.max_pool(x, "maxpool", 3, stride=2, padding=1)
    channels, size = 24, -(-image_size // 4)
    for stage, (width, repeats) in enumerate(_STAGES, 2):
        half = width // 2
        for index in range(repeats):
            name = f"stage{stage}.{index}"
            stride = 1 if index else 2
            if index:
                left, right = b.part(x, f"{name}.left", 0, half), b.part(x, f"{name}.right", half, width)
            else:
                size = -(-size // 2)
                left = _unit(b, x, f"{name}.branch1.0", channels, 3, f"{name}.branch1.1", stride=2)
                left = b.relu(_unit(b, left, f"{name}.branch1.2", half, 1, f"{name}.branch1.3"))
                right = x
            right = b.relu(_unit(b, right, f"{name}.branch2.0", half, 1, f"{name}.branch2.1"))
            right = _unit(b, right, f"{name}.branch2.3", half, 3, f"{name}.branch2.4", stride=stride)
            right = b.relu(_unit(b, right, f"{name}.branch2.5", half, 1, f"{name}.branch2.6"))
            x = shuffled(b, b.concat([left, right], f"{name}.joined"), name, width, size)
        channels = width
    x = b.relu(b.batch_norm(b.conv(x, "conv5.0", 1024, 1), "conv5.1"))
    x = b.flatten(b.global_average_pool(x, "mean"), "flatten")
    return b.classifier(b.linear(x, "fc", classes, deviation=0.01))


NETWORKS = {"shufflenet_v2_x1_0": _shufflenet_v2_x1_0}
