"""RegNetX-400MF.

Radosavovic et al., "Designing network design spaces" (CVPR 2020), table 2: 22 blocks whose widths
follow from w_0 = 24, w_a = 24.48 and w_m = 2.54, with groups of 16 channels and no bottleneck.
Names are torchvision's. Initial weights are those of the authors' code (pycls): convolutions of
variance 2 / (kernel area · output channels), whatever the groups, and a classifier of standard
deviation 0.01. May import `d5suite.network` only.
"""

from __future__ import annotations

from d5suite.network.builder import Builder
from d5suite.network.model import Network

_STAGES = ((32, 1), (64, 2), (160, 7), (400, 12))
"""Channels and blocks of each stage (table 2: "w_i" and "d_i")."""

_GROUP = 16


def _unit(b: Builder, x: str, name: str, width: int, kernel: int, *, stride: int = 1, groups: int = 1) -> str:
    deviation = (2 / (kernel**2 * width)) ** 0.5
    return b.batch_norm(
        b.conv(x, f"{name}.0", width, kernel, stride=stride, groups=groups, deviation=deviation), f"{name}.1"
    )


def _regnet_x_400mf(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("regnet_x_400mf", seed=seed, image_size=image_size)
    x = b.relu(_unit(b, b.image, "stem", 32, 3, stride=2))
    for stage, (width, repeats) in enumerate(_STAGES, 1):
        for index in range(repeats):
            name = f"trunk_output.block{stage}.block{stage}-{index}"
            stride = 1 if index else 2
            shortcut = x if index else _unit(b, x, f"{name}.proj", width, 1, stride=stride)
            y = b.relu(_unit(b, x, f"{name}.f.a", width, 1))
            y = b.relu(_unit(b, y, f"{name}.f.b", width, 3, stride=stride, groups=width // _GROUP))
            y = b.batch_norm(b.conv(y, f"{name}.f.c.0", width, 1, deviation=(2 / width) ** 0.5), f"{name}.f.c.1")
            x = b.relu(b.add(shortcut, y, name))
    x = b.flatten(b.global_average_pool(x, "avgpool"), "flatten")
    return b.classifier(b.linear(x, "fc", classes, deviation=0.01))


NETWORKS = {"regnet_x_400mf": _regnet_x_400mf}
