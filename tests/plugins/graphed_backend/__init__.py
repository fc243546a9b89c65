"""PyTorch's mode ``cuda_graphs`` on a CPU: graphs are scripted, all else is the adapter's own.

Each mode but the first plants a mistake that code with graphs makes.
"""

from dataclasses import replace

from d5suite.backends.torch import BACKEND as RIGHT

BACKEND = replace(
    RIGHT,
    name="graphed",
    package="graphed_backend",
    modes={
        "right": "no mistake",
        "uncopied": "answers of forward lie where the next call puts its own",
        "unrestored": "recording moves the running statistics",
        "unfed": "a graph reads the input that it was recorded with",
        "moved": "inference reads weights that loading has put elsewhere",
        "one_size": "a graph takes batches of the first one's size only",
    },
    levels=frozenset({1, 2}),
    precisions=("fp32", "bf16", "fp64"),
    schemes={},
    absent={
        **RIGHT.mode_absent["cuda_graphs"],
        **dict.fromkeys(("custom", "profile", "baseline", "loader"), "the mode is of forward and backward alone"),
        "cuda": "its graphs are scripted on the CPU",
    },
    mode_absent={},
    expected_failures={},
)
