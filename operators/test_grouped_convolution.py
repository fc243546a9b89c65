"""Depthwise and grouped convolutions.

pytest operators/test_grouped_convolution.py --benchmark-json grouped.json
"""

from d5suite.cases.problem import Problem, Problems

MOBILENET = "MobileNet v1: Howard et al. (2017), table 1"
RESNEXT = "ResNeXt-50 32x4d: Xie et al. (CVPR 2017), table 1"


def depthwise(image: int, channels: int, stride: int, batch: int) -> Problem:
    """Return a depthwise 3x3 convolution."""
    return Problem(
        f"depthwise_{image}px_{channels}_s{stride}_b{batch}", "Conv",
        {"X": (batch, channels, image, image), "W": (channels, 1, 3, 3)},
        {"pads": [1] * 4, "strides": [stride] * 2, "group": channels}, MOBILENET,
    )  # fmt: skip


def grouped(image: int, channels: int, stride: int, batch: int) -> Problem:
    """Return a 3x3 convolution in 32 groups."""
    return Problem(
        f"grouped_{image}px_{channels}_s{stride}_b{batch}", "Conv",
        {"X": (batch, channels, image, image), "W": (channels, channels // 32, 3, 3)},
        {"pads": [1] * 4, "strides": [stride] * 2, "group": 32}, RESNEXT,
    )  # fmt: skip


MOBILENET_LAYERS = [(112, 32, 1), (112, 64, 2), (56, 128, 1), (56, 128, 2), (28, 256, 1), (28, 256, 2), (14, 512, 1),
                    (14, 512, 2), (7, 1024, 1)]  # fmt: skip
RESNEXT_LAYERS = [(56, 128, 1), (56, 256, 2), (28, 256, 1), (28, 512, 2), (14, 512, 1), (14, 1024, 2), (7, 1024, 1)]

GROUPED_CONVOLUTION = Problems(
    "grouped_convolution",
    smoke=[depthwise(28, 256, 1, 1), depthwise(14, 512, 2, 1), grouped(14, 512, 1, 1)],
    standard=[*(depthwise(*layer, 8) for layer in MOBILENET_LAYERS), *(grouped(*layer, 8) for layer in RESNEXT_LAYERS)],
    full=[*(depthwise(*layer, 64) for layer in MOBILENET_LAYERS), *(grouped(*layer, 32) for layer in RESNEXT_LAYERS)],
)
