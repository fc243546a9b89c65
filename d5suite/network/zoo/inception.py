"""Inception v3 with its auxiliary classifier.

Szegedy et al., "Rethinking the Inception architecture for computer vision" (CVPR 2016), in the form
of the authors' code and of torchvision. Images have 299 pixels. The loss is the main classifier's
plus 0.4 times the auxiliary one's: the paper gives no weight, the authors' training code has 0.4
(tensorflow/models, inception_model.py), and the often quoted 0.3 is GoogLeNet's (CVPR 2015, section
5).

The auxiliary classifier pools with a window of 5 and then convolves with one of 5, which needs maps
of 17 pixels, so images of 299. Smaller images, on which torchvision cannot train, shrink each of
the two windows to its map; the authors' code does so with the convolution (TF-slim,
`_reduced_kernel_size_for_small_input`). Published weights then fit all layers but this convolution.

Initial weights are those of the authors' code (TF-slim, inception_utils.py): He-normal in the
forward form, with standard deviation 0.01 and 0.001 in the auxiliary classifier's last two layers,
and 0.01 in the main classifier, as in the zoo's other networks. With torchvision's 0.1 everywhere,
untrained activations reach 1e7 in inference, and the loss grows in the first steps.

May import `d5suite.network` only.
"""

from __future__ import annotations

from d5suite.network.builder import Builder, PixelSize
from d5suite.network.model import Network

AUXILIARY_WEIGHT = 0.4
"""Weight of the auxiliary classifier's cross-entropy in the loss."""


def _layer(
    b: Builder,
    x: str,
    name: str,
    width: int,
    kernel: PixelSize = 1,
    *,
    stride: int = 1,
    padding: PixelSize | None = None,
    deviation: float | None = None,
) -> str:
    y = b.conv(x, f"{name}.conv", width, kernel, stride=stride, padding=padding, fan="in", deviation=deviation)
    return b.relu(b.batch_norm(y, f"{name}.bn", epsilon=1e-3))


def _chain(b: Builder, x: str, name: str, *layers: tuple[int, PixelSize]) -> str:
    """Append convolutions ``NAME_1``, ``NAME_2`` and so on, of these widths and kernels."""
    for index, (width, kernel) in enumerate(layers, 1):
        x = _layer(b, x, f"{name}_{index}", width, kernel)
    return x


def _pooled(b: Builder, x: str, name: str, width: int) -> str:
    return _layer(b, b.average_pool(x, f"{name}.average", 3, stride=1, padding=1), f"{name}.branch_pool", width)


def _module_a(b: Builder, x: str, name: str, pooled: int) -> str:
    branches = [
        _layer(b, x, f"{name}.branch1x1", 64),
        _chain(b, x, f"{name}.branch5x5", (48, 1), (64, 5)),
        _chain(b, x, f"{name}.branch3x3dbl", (64, 1), (96, 3), (96, 3)),
        _pooled(b, x, name, pooled),
    ]
    return b.concat(branches, name)


def _module_b(b: Builder, x: str, name: str) -> str:
    double = _chain(b, x, f"{name}.branch3x3dbl", (64, 1), (96, 3))
    branches = [
        _layer(b, x, f"{name}.branch3x3", 384, 3, stride=2, padding=0),
        _layer(b, double, f"{name}.branch3x3dbl_3", 96, 3, stride=2, padding=0),
        b.max_pool(x, f"{name}.branch_pool", 3, stride=2),
    ]
    return b.concat(branches, name)


def _module_c(b: Builder, x: str, name: str, width: int) -> str:
    row, column = (1, 7), (7, 1)
    branches = [
        _layer(b, x, f"{name}.branch1x1", 192),
        _chain(b, x, f"{name}.branch7x7", (width, 1), (width, row), (192, column)),
        _chain(b, x, f"{name}.branch7x7dbl", (width, 1), (width, column), (width, row), (width, column), (192, row)),
        _pooled(b, x, name, 192),
    ]
    return b.concat(branches, name)


def _module_d(b: Builder, x: str, name: str) -> str:
    small = _layer(b, x, f"{name}.branch3x3_1", 192)
    large = _chain(b, x, f"{name}.branch7x7x3", (192, 1), (192, (1, 7)), (192, (7, 1)))
    branches = [
        _layer(b, small, f"{name}.branch3x3_2", 320, 3, stride=2, padding=0),
        _layer(b, large, f"{name}.branch7x7x3_4", 192, 3, stride=2, padding=0),
        b.max_pool(x, f"{name}.branch_pool", 3, stride=2),
    ]
    return b.concat(branches, name)


def _module_e(b: Builder, x: str, name: str) -> str:
    small = _layer(b, x, f"{name}.branch3x3_1", 384)
    double = _chain(b, x, f"{name}.branch3x3dbl", (448, 1), (384, 3))
    branches = [
        _layer(b, x, f"{name}.branch1x1", 320),
        _split(b, small, f"{name}.branch3x3_2"),
        _split(b, double, f"{name}.branch3x3dbl_3"),
        _pooled(b, x, name, 192),
    ]
    return b.concat(branches, name)


def _split(b: Builder, x: str, name: str) -> str:
    return b.concat([_layer(b, x, f"{name}a", 384, (1, 3)), _layer(b, x, f"{name}b", 384, (3, 1))], name)


def _auxiliary(b: Builder, x: str, side: int, classes: int) -> str:
    window = min(5, side)
    kernel = min(5, (side - window) // 3 + 1)
    x = b.average_pool(x, "AuxLogits.average", window, stride=3)
    x = _layer(b, _layer(b, x, "AuxLogits.conv0", 128), "AuxLogits.conv1", 768, kernel, padding=0, deviation=0.01)
    x = b.flatten(b.global_average_pool(x, "AuxLogits.avgpool"), "AuxLogits.flatten")
    return b.linear(x, "AuxLogits.fc", classes, deviation=0.001)


def _inception_v3(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("inception_v3", seed=seed, image_size=image_size, smallest=75)
    x = _layer(b, b.image, "Conv2d_1a_3x3", 32, 3, stride=2, padding=0)
    x = _layer(b, _layer(b, x, "Conv2d_2a_3x3", 32, 3, padding=0), "Conv2d_2b_3x3", 64, 3)
    x = b.max_pool(x, "maxpool1", 3, stride=2)
    x = _layer(b, _layer(b, x, "Conv2d_3b_1x1", 80), "Conv2d_4a_3x3", 192, 3, padding=0)
    x = b.max_pool(x, "maxpool2", 3, stride=2)
    for name, pooled in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        x = _module_a(b, x, name, pooled)
    x = _module_b(b, x, "Mixed_6a")
    for name, width in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        x = _module_c(b, x, name, width)
    side = image_size
    for stride in (2, 1, 2, 1, 2, 2):  # the windows of 3 without padding
        side = (side - 3) // stride + 1
    auxiliary = _auxiliary(b, x, side, classes)
    x = _module_d(b, x, "Mixed_7a")
    x = _module_e(b, _module_e(b, x, "Mixed_7b"), "Mixed_7c")
    x = b.flatten(b.dropout(b.global_average_pool(x, "avgpool"), "dropout"), "flatten")
    return b.classifier(b.linear(x, "fc", classes, deviation=0.01), auxiliary=auxiliary, weight=AUXILIARY_WEIGHT)


NETWORKS = {"inception_v3": _inception_v3}
