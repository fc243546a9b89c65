"""Large matrix products, checked along random directions.

T = L R takes m k n multiply-accumulates, but T v and L (R v) only m n + k n + m k (Freivalds,
"Probabilistic machines can use less running time", IFIP 1977). For standard normal v the mean of
‖(T - L R) v‖² is ‖T - L R‖², so the projections have the same tolerance. With two directions, an
error of rank one is underestimated by more than a factor of ten in at most 1% of cases. A few rows
are computed in full, for accuracy by element.

Imports NumPy and `d5suite.network.operation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from d5suite.network.operation import Operation
from d5suite.network.work import multiply_accumulates

PROJECTED_FROM = 1e10
"""Multiply-accumulates from which a Gemm is checked along random directions: about 1 s in float64
on two cores."""

DIRECTIONS = 2
"""Number of random directions."""

ROWS = 8
"""Number of random rows that are computed in full."""


class Product(NamedTuple):
    """The expected value of a tensor in float64: ``scale * left @ right + addend``.

    Attributes
    ----------
    left, right : numpy.ndarray
        Matrices.
    scale : float
    addend : numpy.ndarray or None
        In the tensor's shape.
    """

    left: np.ndarray
    right: np.ndarray
    scale: float
    addend: np.ndarray | None = None

    def projected(self, tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Project a tensor and its expected value on random directions."""
        along = np.random.default_rng(0xF5).standard_normal((tensor.shape[1], DIRECTIONS))
        wanted = self.scale * (self.left @ (self.right @ along))
        if self.addend is not None:
            wanted += self.addend @ along
        return tensor.astype(np.float64) @ along, wanted

    def rows(self, tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return random rows of a tensor and their expected values."""
        count = min(ROWS, len(tensor))
        chosen = np.sort(np.random.default_rng(0xF6).choice(len(tensor), count, replace=False))
        wanted = self.scale * (self.left[chosen] @ self.right)
        if self.addend is not None:
            wanted += self.addend[chosen]
        return tensor[chosen], wanted


def is_product(operation: Operation) -> bool:
    """Tell whether an operation is a matrix product to check along random directions."""
    return operation.node.op_type == "Gemm" and multiply_accumulates(operation) >= PROJECTED_FROM


def product(operation: Operation, arrays: Sequence[np.ndarray | None]) -> list[Product]:
    """Return a Gemm's expected output Y = alpha A' B' + beta C (ONNX operator specification)."""
    a, b, alpha = _factors(operation, arrays)
    beta = float(operation.node.attributes["beta"])
    c = arrays[2] if len(arrays) > 2 else None
    shape = operation.shapes[operation.outputs[0]]
    return [Product(a, b, alpha, None if c is None else np.broadcast_to(beta * c.astype(np.float64), shape))]


def product_gradients(
    operation: Operation, arrays: Sequence[np.ndarray | None], head: np.ndarray
) -> list[Product | np.ndarray]:
    """Return a Gemm's expected gradients, by input in `Operation.differentiable`.

    dA' = alpha G B'ᵀ, dB' = alpha A'ᵀ G, dC = beta G, summed over C's broadcast axes.
    """
    a, b, alpha = _factors(operation, arrays)
    g, settings = head.astype(np.float64), operation.node.attributes
    found: list[Product | np.ndarray] = []
    for index in operation.differentiable:
        if index == 0:
            found.append(Product(b, g.T, alpha) if settings["transA"] else Product(g, b.T, alpha))
        elif index == 1:
            found.append(Product(g.T, a, alpha) if settings["transB"] else Product(a.T, g, alpha))
        else:
            shape = operation.shapes[operation.node.inputs[2]]
            padded = (1,) * (2 - len(shape)) + shape
            repeated = tuple(axis for axis, n in enumerate(padded) if n == 1)
            found.append(float(settings["beta"]) * g.sum(repeated, keepdims=True).reshape(shape))
    return found


def _factors(operation: Operation, arrays: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray, float]:
    settings = operation.node.attributes
    first, second = arrays[0], arrays[1]
    assert first is not None and second is not None  # a Gemm has both
    a, b = first.astype(np.float64), second.astype(np.float64)
    return a.T if settings["transA"] else a, b.T if settings["transB"] else b, float(settings["alpha"])
