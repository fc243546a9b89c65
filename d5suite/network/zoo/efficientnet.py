"""EfficientNet-B0.

Tan and Le, "EfficientNet: rethinking model scaling for convolutional neural networks" (ICML 2019),
table 1; a block is MnasNet's (Tan et al., CVPR 2019) with squeeze-and-excitation of a quarter of
the block's inputs. Names are torchvision's. Initial weights are those of the authors' code:
He-normal convolutions and a classifier uniform in ±1/√classes. Stochastic depth is left out: ONNX
has no operator for it. May import `d5suite.network` only.
"""

from __future__ import annotations

from d5suite.network.builder import Builder
from d5suite.network.model import Network

_STAGES = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)  # fmt: skip
"""Expansion, kernel, stride of the first block, output channels and blocks (table 1)."""


def block(b: Builder, x: str, name: str, *, inputs: int, hidden: int, kernel: int, stride: int, outputs: int) -> str:
    """Append an inverted residual block with squeeze-and-excitation."""
    y, layer = x, 0
    if hidden != inputs:
        y = b.silu(b.batch_norm(b.conv(y, f"{name}.0.0", hidden, 1), f"{name}.0.1"))
        layer = 1
    y = b.conv(y, f"{name}.{layer}.0", hidden, kernel, stride=stride, groups=hidden)
    y = b.silu(b.batch_norm(y, f"{name}.{layer}.1"))
    excitation = f"{name}.{layer + 1}"
    gate = b.conv(b.global_average_pool(y, f"{excitation}.avgpool"), f"{excitation}.fc1", inputs // 4, 1, bias=True)
    gate = b.sigmoid(b.conv(b.silu(gate), f"{excitation}.fc2", hidden, 1, bias=True))
    y = b.multiply(y, gate, excitation)
    y = b.batch_norm(b.conv(y, f"{name}.{layer + 2}.0", outputs, 1), f"{name}.{layer + 2}.1")
    return b.add(y, x, name) if stride == 1 and inputs == outputs else y


def _efficientnet_b0(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("efficientnet_b0", seed=seed, image_size=image_size)
    x = b.silu(b.batch_norm(b.conv(b.image, "features.0.0", 32, 3, stride=2), "features.0.1"))
    channels = 32
    for stage, (expansion, kernel, stride, width, repeats) in enumerate(_STAGES, 1):
        for index in range(repeats):
            x = block(
                b, x, f"features.{stage}.{index}.block", inputs=channels, hidden=channels * expansion, kernel=kernel,
                stride=1 if index else stride, outputs=width,
            )  # fmt: skip
            channels = width
    x = b.silu(b.batch_norm(b.conv(x, "features.8.0", 1280, 1), "features.8.1"))
    x = b.dropout(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "classifier.0", ratio=0.2)
    return b.classifier(b.linear(x, "classifier.1", classes, deviation=(3 * classes) ** -0.5, uniform=True))


NETWORKS = {"efficientnet_b0": _efficientnet_b0}
