"""VGG-16 and VGG-19.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition" (ICLR
2015), table 1, columns D and E. Initial weights are torchvision's: He-normal convolutions, linear
layers of standard deviation 0.01. May import `d5suite.network` only.
"""

from __future__ import annotations

from functools import partial

from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _vgg(name: str, repeats: tuple[int, ...], *, classes: int, image_size: int, seed: int) -> Network:
    b = Builder(name, seed=seed, image_size=image_size, smallest=32)
    x, layer = b.image, 0
    for width, count in zip((64, 128, 256, 512, 512), repeats, strict=True):
        for _ in range(count):
            x = b.relu(b.conv(x, f"features.{layer}", width, 3, bias=True))
            layer += 2
        x = b.max_pool(x, f"features.{layer}", 2, stride=2)
        layer += 1
    x = b.adaptive_average_pool(x, "avgpool", 7, side=lambda pixels: pixels // 32)
    x = b.relu(b.linear(b.flatten(x, "flatten", size=7), "classifier.0", 4096, deviation=0.01))
    x = b.relu(b.linear(b.dropout(x, "classifier.2"), "classifier.3", 4096, deviation=0.01))
    return b.classifier(b.linear(b.dropout(x, "classifier.5"), "classifier.6", classes, deviation=0.01))


NETWORKS = {
    "vgg16": partial(_vgg, "vgg16", (2, 2, 3, 3, 3)),
    "vgg19": partial(_vgg, "vgg19", (2, 2, 4, 4, 4)),
}
