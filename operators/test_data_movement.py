"""Transposition and concatenation: memory traffic without arithmetic.

pytest operators/test_data_movement.py --benchmark-json movement.json
"""

from d5suite.cases.problem import Problem, Problems

DENSENET = "DenseNet-121's first block: Huang et al. (CVPR 2017), table 1: growth rate 32"
TRANSFORMER = "BERT-base (Devlin et al., 2019, section 3): 12 heads of 64, 128 tokens"
IMAGE = "ResNet-50's second stage, from N, C, H, W to N, H, W, C"


def channels_last(batch: int) -> Problem:
    """Return the conversion of images to the channels-last layout."""
    return Problem(f"channels_last_b{batch}", "Transpose", {"X": (batch, 256, 56, 56)}, {"perm": [0, 2, 3, 1]}, IMAGE)


def heads(batch: int) -> Problem:
    """Return the transposition that moves heads before tokens."""
    return Problem(f"heads_b{batch}", "Transpose", {"X": (batch, 128, 12, 64)}, {"perm": [0, 2, 1, 3]}, TRANSFORMER)


def dense(batch: int) -> Problem:
    """Return the input of a dense layer: all earlier features, and the new features."""
    return Problem(
        f"dense_b{batch}", "Concat", {"A": (batch, 224, 56, 56), "B": (batch, 32, 56, 56)}, {"axis": 1}, DENSENET
    )


DATA_MOVEMENT = Problems(
    "data_movement",
    smoke=[channels_last(1), heads(1), dense(1)],
    standard=[channels_last(8), heads(8), dense(8)],
    full=[channels_last(32), heads(32), dense(32)],
)
