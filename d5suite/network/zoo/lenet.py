"""LeNet-5.

LeCun et al., "Gradient-based learning applied to document recognition" (Proceedings of the IEEE,
1998), figure 2, in its modern form: means without trainable coefficients in place of the
subsampling layers, every feature map of the third layer connected to all of the second, tanh
without scaling, and a softmax classifier. May import `d5suite.network` only.
"""

from __future__ import annotations

from d5suite.errors import NetworkError
from d5suite.network.builder import Builder
from d5suite.network.model import Network


def _lenet5(*, classes: int, image_size: int, seed: int) -> Network:
    if image_size != 32:
        raise NetworkError(f"LeNet-5 takes greyscale images of 32 pixels, not {image_size}", where="lenet5")
    b = Builder("lenet5", seed=seed, image_size=image_size, channels=1)
    x = b.average_pool(b.tanh(b.conv(b.image, "c1", 6, 5, padding=0, bias=True)), "s2", 2, stride=2)
    x = b.average_pool(b.tanh(b.conv(x, "c3", 16, 5, padding=0, bias=True)), "s4", 2, stride=2)
    x = b.flatten(b.tanh(b.conv(x, "c5", 120, 5, padding=0, bias=True)), "flatten")
    x = b.tanh(b.linear(x, "f6", 84, deviation=0.1))
    return b.classifier(b.linear(x, "output", classes, deviation=0.1))


NETWORKS = {"lenet5": _lenet5}
