"""Maximum, average and global pooling.

pytest operators/test_pooling.py --benchmark-json pooling.json
"""

from d5suite.cases.problem import Problem, Problems

RESNET50 = "ResNet-50: He et al. (CVPR 2016), table 1"
VGG16 = "VGG-16: Simonyan and Zisserman (ICLR 2015), table 1"
DENSENET = "DenseNet-121: Huang et al. (CVPR 2017), table 1, transition layers"


def maximum(image: int, channels: int, kernel: int, pad: int, batch: int, source: str) -> Problem:
    """Return maximum pooling with stride 2."""
    return Problem(
        f"max{kernel}_{image}px_{channels}_b{batch}", "MaxPool", {"X": (batch, channels, image, image)},
        {"kernel_shape": [kernel] * 2, "strides": [2, 2], "pads": [pad] * 4}, source,
    )  # fmt: skip


def average(image: int, channels: int, batch: int, source: str = DENSENET) -> Problem:
    """Return 2x2 average pooling with stride 2."""
    return Problem(
        f"average2_{image}px_{channels}_b{batch}", "AveragePool", {"X": (batch, channels, image, image)},
        {"kernel_shape": [2, 2], "strides": [2, 2]}, source,
    )  # fmt: skip


def everything(image: int, channels: int, batch: int) -> Problem:
    """Return global pooling: the mean of every channel."""
    shape = (batch, channels, image, image)
    return Problem(f"global_{image}px_{channels}_b{batch}", "GlobalAveragePool", {"X": shape}, source=RESNET50)


def sizes(batch: int) -> list[Problem]:
    """Return every pooling problem at this batch size."""
    return [
        maximum(112, 64, 3, 1, batch, RESNET50), maximum(224, 64, 2, 0, batch, VGG16),
        maximum(28, 512, 2, 0, batch, VGG16),
        average(56, 128, batch), average(28, 256, batch), average(14, 512, batch), everything(7, 2048, batch),
    ]  # fmt: skip


POOLING = Problems(
    "pooling",
    smoke=[
        maximum(56, 64, 3, 1, 1, f"scaled down from 112 px in {RESNET50}"),
        average(28, 128, 1, f"scaled down from 56 px in {DENSENET}"),
        everything(7, 2048, 1),
    ],
    standard=sizes(8),
    full=sizes(32),
)
