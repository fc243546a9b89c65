"""AlexNet, without groups.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997,
2014), section 5, as torchvision has it: one column of convolutions, no response normalisation,
dropout before both hidden layers. Initial weights are He-normal, like torchvision's for VGG, but of
standard deviation 0.01 in the last layer. The original's 0.01 everywhere (Krizhevsky et al.,
NeurIPS 2012, section 5) and PyTorch's default let the signal fade from layer to layer. Imports the
builder only.
"""

from __future__ import annotations

from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _side(image_size: int) -> int:
    """Return the height and width of the last feature map."""
    side = (image_size + 4 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def _alexnet(*, classes: int, image_size: int, seed: int) -> Network:
    b = Builder("alexnet", seed=seed, image_size=image_size, smallest=63)
    x = b.relu(b.conv(b.image, "features.0", 64, 11, stride=4, padding=2, bias=True))
    x = b.max_pool(x, "features.2", 3, stride=2)
    x = b.relu(b.conv(x, "features.3", 192, 5, bias=True))
    x = b.max_pool(x, "features.5", 3, stride=2)
    for layer, width in ((6, 384), (8, 256), (10, 256)):
        x = b.relu(b.conv(x, f"features.{layer}", width, 3, bias=True))
    x = b.max_pool(x, "features.12", 3, stride=2)
    x = b.flatten(b.adaptive_average_pool(x, "avgpool", 6, side=_side), "flatten", size=6)
    x = b.relu(b.linear(b.dropout(x, "classifier.0"), "classifier.1", 4096))
    x = b.relu(b.linear(b.dropout(x, "classifier.3"), "classifier.4", 4096))
    return b.classifier(b.linear(x, "classifier.6", classes, deviation=0.01))


NETWORKS = {"alexnet": _alexnet}
