"""Sums, means and maxima along axes.

pytest operators/test_reduction.py --benchmark-json reduction.json
"""

import numpy as np

from d5suite.cases.problem import Problem, Problems

IMAGE = "ResNet-50's second stage: He et al. (CVPR 2016), table 1"


def reduce(operator: str, name: str, axes: list[int], batch: int) -> Problem:
    """Return a reduction of a batch of images along some axes."""
    return Problem(
        f"{operator.removeprefix('Reduce').lower()}_{name}_b{batch}", operator,
        {"X": (batch, 256, 56, 56), "axes": np.array(axes)}, {"keepdims": 0}, IMAGE,
    )  # fmt: skip


def sizes(batch: int) -> list[Problem]:
    """Return contiguous, strided and full reductions at this batch size."""
    return [
        reduce("ReduceSum", "rows", [3], batch), reduce("ReduceSum", "channels", [1], batch),
        reduce("ReduceSum", "all", [0, 1, 2, 3], batch), reduce("ReduceMean", "images", [2, 3], batch),
        reduce("ReduceMax", "images", [2, 3], batch), reduce("ReduceMax", "batch", [0], batch),
    ]  # fmt: skip


REDUCTION = Problems(
    "reduction",
    smoke=[reduce("ReduceSum", "channels", [1], 1), reduce("ReduceMean", "images", [2, 3], 1),
           reduce("ReduceMax", "rows", [3], 1)],
    standard=sizes(8),
    full=sizes(32),
)  # fmt: skip
