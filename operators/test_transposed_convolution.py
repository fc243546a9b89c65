"""Transposed convolutions.

pytest operators/test_transposed_convolution.py --benchmark-json transposed.json
"""

from d5suite.cases.problem import Problem, Problems

DCGAN = "DCGAN's generator: Radford et al. (ICLR 2016), figure 1: 1024, 512, 256, 128, 3 channels, 4 to 64 px"
UNET = "U-Net: Ronneberger et al. (MICCAI 2015), figure 1: 2x2 up-convolutions that halve the channels"


def generator(image: int, channels: int, filters: int, batch: int, source: str = DCGAN) -> Problem:
    """Return a 4x4 transposed convolution that doubles the image size, as in the authors' code."""
    return Problem(
        f"generator_{image}px_{channels}to{filters}_b{batch}", "ConvTranspose",
        {"X": (batch, channels, image, image), "W": (channels, filters, 4, 4)},
        {"strides": [2, 2], "pads": [1] * 4}, source,
    )  # fmt: skip


def up_convolution(image: int, channels: int, batch: int, source: str = UNET) -> Problem:
    """Return a 2x2 transposed convolution with stride 2."""
    return Problem(
        f"up_{image}px_{channels}_b{batch}", "ConvTranspose",
        {"X": (batch, channels, image, image), "W": (channels, channels // 2, 2, 2)}, {"strides": [2, 2]}, source,
    )  # fmt: skip


GENERATOR = [(4, 1024, 512), (8, 512, 256), (16, 256, 128), (32, 128, 3)]
EXPANSION = [(28, 1024), (52, 512), (100, 256), (196, 128)]

TRANSPOSED_CONVOLUTION = Problems(
    "transposed_convolution",
    smoke=[
        generator(8, 128, 64, 2, f"scaled down from 512 to 256 channels in {DCGAN}"),
        up_convolution(14, 128, 1, f"scaled down from 1024 channels and 28 px in {UNET}"),
    ],
    standard=[*(generator(*layer, 16) for layer in GENERATOR), *(up_convolution(*layer, 1) for layer in EXPANSION)],
    full=[*(generator(*layer, 128) for layer in GENERATOR), *(up_convolution(*layer, 4) for layer in EXPANSION)],
)
