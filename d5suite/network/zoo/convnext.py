"""ConvNeXt-Tiny.

Liu et al., "A ConvNet for the 2020s" (CVPR 2022), section 2 and figure 4. Names are torchvision's;
its weights of fully connected layers along the channels are stored transposed, (input, output).
Initial weights are those of the paper's code: normal with standard deviation 0.02 (its bounds, ±2,
are 100 deviations away), layer scales of 1e-6. Stochastic depth is left out: ONNX has no operator
for it. May import `d5suite.network` only.
"""

from __future__ import annotations

import numpy as np

from d5suite.network.builder import Builder
from d5suite.network.model import Network

_STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))
"""Channels and blocks of each stage (section 2.2)."""

_DEVIATION, _EPSILON, _LAYER_SCALE = 0.02, 1e-6, 1e-6


def _norm(b: Builder, x: str, name: str, width: int, size: int) -> str:
    """Normalise the channels of each pixel: (N, C, H, W)."""
    y = b.layer_norm(b.transpose(x, f"{name}.last", (0, 2, 3, 1), size), name, width, epsilon=_EPSILON)
    return b.transpose(y, f"{name}.first", (0, 3, 1, 2), width)


def block(b: Builder, x: str, name: str, width: int, size: int) -> str:
    """Append a block to (N, width, size, size)."""
    y = b.conv(x, f"{name}.block.0", width, 7, groups=width, bias=True, deviation=_DEVIATION)
    y = b.transpose(y, f"{name}.block.1", (0, 2, 3, 1), size)
    y = b.layer_norm(y, f"{name}.block.2", width, epsilon=_EPSILON)
    y = b.gelu(b.dense(y, f"{name}.block.3", width, 4 * width, deviation=_DEVIATION))
    y = b.dense(y, f"{name}.block.5", 4 * width, width, deviation=_DEVIATION)
    y = b.transpose(y, f"{name}.block.6", (0, 3, 1, 2), width)
    scale = b.parameter(f"{name}.layer_scale", np.full((width, 1, 1), _LAYER_SCALE))
    return b.add(b.multiply(y, scale, f"{name}.scaled"), x, name)


def _convnext_tiny(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("convnext_tiny", seed=seed, image_size=image_size, smallest=32)
    x, layer, size = b.image, 0, image_size
    for stage, (width, repeats) in enumerate(_STAGES):
        if stage == 0:
            x = b.conv(x, "features.0.0", width, 4, stride=4, padding=0, bias=True, deviation=_DEVIATION)
            size //= 4
            x = _norm(b, x, "features.0.1", width, size)
        else:
            x = _norm(b, x, f"features.{layer}.0", _STAGES[stage - 1][0], size)
            x = b.conv(x, f"features.{layer}.1", width, 2, stride=2, padding=0, bias=True, deviation=_DEVIATION)
            size //= 2
        for index in range(repeats):
            x = block(b, x, f"features.{layer + 1}.{index}", width, size)
        layer += 2
    x = b.flatten(b.global_average_pool(x, "avgpool"), "flatten")
    x = b.layer_norm(x, "classifier.0", _STAGES[-1][0], epsilon=_EPSILON)
    return b.classifier(b.linear(x, "classifier.2", classes, deviation=_DEVIATION))


NETWORKS = {"convnext_tiny": _convnext_tiny}
