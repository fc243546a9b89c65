"""The description of deep500's reference backend; only the modules beside it import deep500.

Users of deep500 can import the bridge's `BridgedExecutor` and `BridgedOperator` from here.
"""

import importlib
from typing import Any

from d5suite.levels.backend import Backend
from d5suite.levels.description import usual_tolerances
from d5suite.network.operators import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS
from d5suite.network.variants import ON_NO_ADAPTER

BACKEND = Backend(
    name="deep500",
    title="Deep500 reference (NumPy)",
    package="d5suite.backends.deep500",
    requires=("deep500", "jinja2", "networkx", "six", "tqdm"),
    distributions=("deep500",),
    install="pip install 'd5suite[deep500]'",
    variables=("NUMPY_MADVISE_HUGEPAGE",),
    modes={
        "vectorised": "deep500's NumPy operators, graph executor and optimizers; custom convolution and pooling",
        "reference": "deep500's own convolution and pooling too, which loop in Python: for networks up to LeNet-5",
    },
    levels=frozenset({0, 1, 2, 3}),
    devices=("cpu",),
    precisions=("fp32", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    variants=ON_NO_ADAPTER,
    right_gradients=frozenset(
        {"Add", "Flatten", "Gemm", "GlobalAveragePool", "Reshape", "Squeeze", "Sum", "Unsqueeze"}
    ),
    tolerances=usual_tolerances(
        fp64="rounding: seen 5e-16 in outputs and losses on LeNet-5 and on networks of every operator",
        fp32="rounding: seen 2.3e-7 in outputs, 4e-7 in gradients and 5e-7 in losses on LeNet-5 and on a network "
        "of every operator; a ReLU that a rounding flips moved a gradient of ResNet-18 by 4e-2 and losses of "
        "ResNet-50 by 1.9e-3",
    ),
    expected_failures={
        **dict.fromkeys(
            ("test_einsum_batch_matmul_bfloat16_cpu", "test_einsum_sum_bfloat16_cpu"),
            "NumPy's einsum computes in its own types only",
        ),
    },
    absent={
        "stock": "deep500 has no options; the mode reference is its own code alone",
        "scheme:horovod": "Horovod has no extension for deep500",
        "cuda": "deep500 0.2.0 has no reference operators for a GPU",
        "bf16": "NumPy has no bfloat16",
        "fp16": "deep500's operators compute in float32 and float64",
        "baseline": "deep500's own step is the hand-written reference; there is nothing native beneath it",
        "early gradients": "deep500's backward pass is one call, which returns them together",
        "loader": "deep500 0.2.0, as published on PyPI, reads no image files",
    },
    reduced="it is NumPy, to be read rather than to be fast: one training step of ResNet-50 on two images of 64 px "
    "takes a second, and with deep500's own convolution a quarter of an hour",
)


def __getattr__(name: str) -> Any:
    """Import deep500 and return a class of the bridge."""
    if name in ("BridgedExecutor", "BridgedNetwork", "BridgedOperator"):
        return getattr(importlib.import_module(f"{__name__}.bridge"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
