"""Convolutions in one, two and three dimensions.

pytest operators/test_convolution.py --benchmark-json convolution.json
"""

from d5suite.cases.problem import Problem, Problems

DEEPBENCH = "Baidu DeepBench, code/kernels/conv_problems.h"
RESNET50 = "ResNet-50 v1.5: He et al. (CVPR 2016), table 1, with the stride in the 3x3 convolution"
C3D = "C3D: Tran et al. (ICCV 2015), figure 3: 3x3x3 kernels on 16 frames of 112 px"
VGG16 = "VGG-16: Simonyan and Zisserman (ICLR 2015), table 1, configuration D"


def conv2d(
    width: int, height: int, channels: int, batch: int, filters: int, size: tuple[int, int], pad: int, stride: int,
    source: str = DEEPBENCH,
) -> Problem:  # fmt: skip
    """Return a 2-D convolution, with sizes in DeepBench's order; ``size`` is width by height."""
    across, down = size
    return Problem(
        f"{width}x{height}x{channels}_b{batch}_{filters}f{across}x{down}_s{stride}_p{pad}",
        "Conv",
        {"X": (batch, channels, height, width), "W": (filters, channels, down, across)},
        {"pads": [pad] * 4, "strides": [stride] * 2},
        source,
    )


def square(image: int, channels: int, filters: int, size: int, stride: int, batch: int, source: str) -> Problem:
    """Return a convolution of a square image, padded by half the kernel size."""
    return conv2d(image, image, channels, batch, filters, (size, size), size // 2, stride, source)


def conv1d(batch: int) -> Problem:
    """Return layer 2 of wav2vec 2.0's feature encoder on one second of speech at 16 kHz."""
    return Problem(
        f"speech_1d_b{batch}", "Conv", {"X": (batch, 512, 3199), "W": (512, 512, 3)}, {"strides": [2]},
        "Baevski et al. (NeurIPS 2020), section 4.2: 512 channels, widths 10,3,3,3,3,2,2, strides 5,2,2,2,2,2,2",
    )  # fmt: skip


def conv1d_small(batch: int) -> Problem:
    """Return a text classifier's convolution: 100 filters of width 3, 300-dimensional vectors."""
    return Problem(
        f"text_1d_b{batch}", "Conv", {"X": (batch, 300, 64), "W": (100, 300, 3)}, {},
        "Kim (EMNLP 2014), section 3.1: 100 feature maps each of widths 3, 4, 5, 300-dimensional word vectors",
    )  # fmt: skip


def conv3d(channels: int, filters: int, frames: int, image: int, batch: int, source: str = C3D) -> Problem:
    """Return a layer of C3D."""
    return Problem(
        f"video_3d_{channels}to{filters}_b{batch}", "Conv",
        {"X": (batch, channels, frames, image, image), "W": (filters, channels, 3, 3, 3)}, {"pads": [1] * 6},
        source,
    )  # fmt: skip


def without_repeats(problems: list[Problem]) -> list[Problem]:
    """Keep the first problem of each name: tables share layers, and DeepBench repeats layers."""
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(problem.name, problem)
    return list(found.values())


RESNET50_LAYERS = [
    (224, 3, 64, 7, 2), (56, 64, 64, 1, 1), (56, 64, 64, 3, 1), (56, 64, 256, 1, 1), (56, 256, 64, 1, 1),
    (56, 256, 128, 1, 1), (56, 128, 128, 3, 2), (28, 128, 512, 1, 1), (56, 256, 512, 1, 2), (28, 512, 128, 1, 1),
    (28, 128, 128, 3, 1), (28, 512, 256, 1, 1), (28, 256, 256, 3, 2), (14, 256, 1024, 1, 1), (28, 512, 1024, 1, 2),
    (14, 1024, 256, 1, 1), (14, 256, 256, 3, 1), (14, 1024, 512, 1, 1), (14, 512, 512, 3, 2), (7, 512, 2048, 1, 1),
    (14, 1024, 2048, 1, 2), (7, 2048, 512, 1, 1), (7, 512, 512, 3, 1),
]  # fmt: skip
"""Image size, channels, filters, kernel size and stride of ResNet-50's distinct convolutions."""

VGG16_LAYERS = [(224, 3, 64), (224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256), (56, 256, 256),
                (28, 256, 512), (28, 512, 512), (14, 512, 512)]  # fmt: skip

DEEPBENCH_TRAINING: list[tuple[tuple[int, ...], tuple[int, int, int], tuple[int, tuple[int, int], int, int]]] = [
    # Speech
    ((4, 8, 16, 32), (700, 161, 1), (32, (20, 5), 0, 2)), ((4, 8, 16, 32), (341, 79, 32), (32, (10, 5), 0, 2)),
    # Characters
    *(((16,), image, (filters, (3, 3), 1, 1)) for image, filters in
      (((480, 48, 1), 16), ((240, 24, 16), 32), ((120, 12, 32), 64), ((60, 6, 64), 128))),
    # Faces
    ((8,), (108, 108, 3), (64, (3, 3), 1, 2)),
    *(((8,), image, (filters, (3, 3), 1, 1)) for image, filters in
      (((54, 54, 64), 64), ((27, 27, 128), 128), ((14, 14, 128), 256), ((7, 7, 256), 512))),
    # VGG
    *(((8, 16), (size, size, channels), (filters, (3, 3), 1, 1)) for size, channels, filters in
      ((224, 3, 64), (112, 64, 128), (56, 128, 256), (28, 256, 512), (14, 512, 512), (7, 512, 512))),
    # GoogLeNet
    ((16,), (224, 224, 3), (64, (7, 7), 3, 2)), ((16,), (28, 28, 192), (32, (5, 5), 2, 1)),
    ((16,), (28, 28, 192), (64, (1, 1), 0, 1)), ((16,), (14, 14, 512), (48, (5, 5), 2, 1)),
    ((16,), (14, 14, 512), (192, (1, 1), 0, 1)), ((16,), (7, 7, 832), (256, (1, 1), 0, 1)),
    ((16,), (7, 7, 832), (128, (5, 5), 2, 1)),
    # ResNet-50
    *(((8, 16), (size, size, channels), (filters, (3, 3), 1, 1)) for size, channels, filters in
      ((56, 64, 64), (28, 128, 128), (14, 256, 256))),
    *(((8, 16), (size, size, channels), (filters, (1, 1), 0, stride)) for size, channels, filters, stride in
      ((56, 64, 256, 2), (28, 128, 512, 2), (14, 256, 256, 1), (14, 256, 1024, 2), (7, 512, 512, 1), (112, 64, 64, 1),
       (56, 64, 256, 1), (56, 256, 64, 1), (56, 256, 128, 2), (28, 128, 512, 1), (28, 512, 128, 1), (28, 512, 256, 2),
       (14, 256, 1024, 1), (28, 512, 1024, 2), (14, 1024, 256, 1), (14, 1024, 512, 2), (7, 512, 2048, 1),
       (14, 1024, 2048, 2), (7, 2048, 512, 1))),
    ((8, 16), (7, 7, 2048), (512, (1, 1), 3, 2)),
    # Speech again
    ((16,), (700, 161, 1), (64, (5, 5), 1, 2)), ((16,), (350, 80, 64), (64, (3, 3), 1, 1)),
    ((16,), (350, 80, 64), (128, (5, 5), 1, 2)), ((16,), (175, 40, 128), (128, (3, 3), 1, 1)),
    ((16,), (175, 40, 128), (256, (5, 5), 1, 2)), ((16,), (84, 20, 256), (256, (3, 3), 1, 1)),
    ((16,), (84, 20, 256), (512, (5, 5), 1, 2)), ((16,), (42, 10, 512), (512, (3, 3), 1, 1)),
]  # fmt: skip
"""DeepBench's training problems: batch sizes; width, height and channels; number of filters, filter
size, padding and stride."""

CONVOLUTION = Problems(
    "convolution",
    smoke=[
        square(14, 256, 256, 3, 1, 1, RESNET50), square(28, 128, 512, 1, 1, 1, RESNET50),
        square(56, 64, 64, 3, 1, 1, RESNET50), conv2d(120, 12, 32, 1, 64, (3, 3), 1, 1), conv1d_small(8),
        conv3d(32, 32, 4, 14, 1, f"scaled down from 64 to 128 channels, 16 frames of 56 px in {C3D}"),
    ],
    standard=[
        *(square(*layer, 8, RESNET50) for layer in RESNET50_LAYERS),
        *(square(*layer, 3, 1, 4, VGG16) for layer in VGG16_LAYERS[2:]),
        conv1d(2), conv3d(64, 128, 16, 56, 1),
    ],
    full=without_repeats([
        *(conv2d(width, height, channels, batch, filters, size, pad, stride)
          for batches, (width, height, channels), (filters, size, pad, stride) in DEEPBENCH_TRAINING
          for batch in batches),
        *(square(*layer, 32, RESNET50) for layer in RESNET50_LAYERS),
        *(square(*layer, 3, 1, 16, VGG16) for layer in VGG16_LAYERS),
        conv1d(16), conv3d(64, 128, 16, 56, 8), conv3d(128, 256, 8, 28, 8),
    ]),
)  # fmt: skip
