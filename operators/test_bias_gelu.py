"""A custom operator: bias and GELU fused, once in C++ and once in Python.

pytest operators/test_bias_gelu.py --benchmark-json bias_gelu.json
"""

import numpy as np
from scipy.special import erf

from d5suite.cases.problem import Problem, Problems
from d5suite.custom import CustomOperator

MEANING = [("Add", ["x", "bias"], ["sum"], {}), ("Gelu", ["sum"], ["y"], {"approximate": "none"})]
TRANSFORMER = "BERT-base's feed-forward part (Devlin et al., 2019, section 3): 3072 units, 128 tokens"

IN_CPP = CustomOperator(
    "BiasGelu",
    inputs=["x", "bias"],
    outputs=["y"],
    meaning=MEANING,
    source="bias_gelu.cc",
    cuda_source="bias_gelu.cu",
)


def forward(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the GELU of x plus the bias."""
    s = x + bias
    return (s / 2 * (1 + erf(s / np.sqrt(2)))).astype(x.dtype)


def backward(
    inputs: tuple[np.ndarray, ...], outputs: tuple[np.ndarray, ...], gradients: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    """Return the gradients of x and of the bias."""
    x, bias = inputs
    s = x + bias
    slope = (1 + erf(s / np.sqrt(2))) / 2 + s * np.exp(-(s**2) / 2) / np.sqrt(2 * np.pi)
    gradient = (gradients[0] * slope).astype(x.dtype)
    return gradient, gradient.reshape(-1, bias.size).sum(0)


IN_PYTHON = CustomOperator(
    "PythonBiasGelu", inputs=["x", "bias"], outputs=["y"], meaning=MEANING, forward=forward, backward=backward
)


def fused(operator: CustomOperator, batch: int) -> Problem:
    """Return the transformer's activation function with a bias."""
    language = "python" if operator.source is None else "cpp"
    return Problem(f"{language}_b{batch}", operator, {"x": (batch, 128, 3072), "bias": (3072,)}, source=TRANSFORMER)


BIAS_GELU = Problems(
    "bias_gelu",
    smoke=[fused(IN_CPP, 1), fused(IN_PYTHON, 1)],
    standard=[fused(IN_CPP, 8), fused(IN_PYTHON, 8)],
    full=[fused(IN_CPP, 32), fused(IN_PYTHON, 32)],
)
