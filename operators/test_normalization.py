"""Batch normalization, in training and inference, and layer normalization.

pytest operators/test_normalization.py --benchmark-json normalization.json
"""

from d5suite.cases.problem import Problem, Problems
from d5suite.network.operation import Tensor

RESNET50 = "ResNet-50: He et al. (CVPR 2016), table 1"
TRANSFORMER = "BERT-base (Devlin et al., 2019, section 3): hidden size 768, 128 tokens"


def batch(image: int, channels: int, size: int, *, training: bool = True) -> Problem:
    """Return the normalization of a batch of images per channel."""
    vector = (channels,)
    return Problem(
        f"batch_{image}px_{channels}_b{size}" + ("" if training else "_inference"), "BatchNormalization",
        {"X": (size, channels, image, image), "scale": vector, "B": vector, "mean": vector,
         "variance": Tensor(vector, low=0.5, high=2.0)},
        {"training_mode": int(training)}, RESNET50,
    )  # fmt: skip


def layer(size: int) -> Problem:
    """Return the layer normalization of a batch of sentences."""
    return Problem(
        f"layer_b{size}", "LayerNormalization", {"X": (size, 128, 768), "scale": (768,), "B": (768,)}, {},
        TRANSFORMER,
    )  # fmt: skip


LAYERS = [(112, 64), (56, 64), (56, 256), (28, 128), (28, 512), (14, 256), (14, 1024), (7, 512), (7, 2048)]

NORMALIZATION = Problems(
    "normalization",
    smoke=[batch(28, 128, 2), batch(28, 128, 2, training=False), layer(1)],
    standard=[*(batch(*each, 8) for each in LAYERS), batch(56, 256, 8, training=False), layer(8)],
    full=[*(batch(*each, 32, training=kind) for kind in (True, False) for each in LAYERS), layer(32)],
)
