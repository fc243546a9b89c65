"""ONNX on deep500: matrix products and Fourier transforms.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, Factory, Formula, collapsed, formula
from d5suite.backends.deep500.repairs import custom_op_python as native
from d5suite.network import Node
from d5suite.network.nodes.matrix import read_einsum, read_gemm
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


class _Gemm(native.GemmOp):
    """deep500's Gemm, with an optional third input whose gradient works for a batch of one."""

    def forward(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        product: np.ndarray = super().forward(a, b, a.dtype.type(0) if c is None else c)
        return product

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        above = grads[0]
        gradients = super().backward(grads, [*fwd_inputs[:2], above], fwd_outputs)[:2]
        added = [native.AddOp([], []).backward([self.beta * above], [above, c], fwd_outputs)[1] for c in fwd_inputs[2:]]
        return [*gradients, *added]


def gemm(node: Node, context: Context) -> CustomOperator:
    plan = read_gemm(node, context)
    return _Gemm(*context.describe(node), plan.alpha, plan.beta, plan.trans_a, plan.trans_b)


def mat_mul(node: Node, context: Context) -> CustomOperator:
    """deep500's MatMul, for two matrices; for stacks its gradient transposes all axes."""
    if [context.rank(name) for name in node.inputs] == [2, 2]:
        return native.MatMulOp(*context.describe(node))

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
        a, b = inputs
        left, right = a.ndim == 1, b.ndim == 1  # a vector is a row on the left, a column on the right
        gradient = gradient[..., None] if right else gradient
        gradient = gradient[..., None, :] if left else gradient
        rows, columns = (a[None, :] if left else a), (b[:, None] if right else b)
        by_rows, by_columns = gradient @ columns.swapaxes(-1, -2), rows.swapaxes(-1, -2) @ gradient
        return [
            collapsed(by_rows, rows.shape).reshape(a.shape),
            collapsed(by_columns, columns.shape).reshape(b.shape),
        ]

    return Formula(context.describe(node), np.matmul, backward)


def einsum(node: Node, context: Context) -> CustomOperator:
    plan = read_einsum(node, context)
    terms, output, equation = plan.inputs, plan.output, plan.equation

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        found = []
        for index, (term, x) in enumerate(zip(terms, inputs, strict=True)):
            others = [*terms[:index], output, *terms[index + 1 :]]
            known = "".join(letter for letter in dict.fromkeys(term) if any(letter in other for other in others))
            arrays = [*inputs[:index], gradient, *inputs[index + 1 :]]
            part = np.einsum(f"{','.join(others)}->{known}", *arrays)
            axes = "".join(dict.fromkeys(term))
            whole = np.zeros_like(x)
            # Each cell in the sum has the output's gradient; of a diagonal, only its cells.
            cells = np.einsum(f"{term}->{axes}", whole)
            cells[...] = part.reshape([n if a in known else 1 for a, n in zip(axes, cells.shape, strict=True)])
            found.append(whole)
        return found

    return Formula(context.describe(node), lambda *xs: np.einsum(equation, *xs), backward)


def _det_gradient(gradient: np.ndarray, inputs: Sequence[np.ndarray], output: np.ndarray) -> list[np.ndarray]:
    """Return det(x) x⁻ᵀ, by Jacobi's formula; for a singular matrix, the limit."""
    (x,) = inputs
    left, values, right = np.linalg.svd(x)
    # With x = U diag(s) V: the cofactors are det(U) det(V) U diag(products of the other s) V.
    others = np.stack([np.delete(values, i, -1).prod(-1) for i in range(x.shape[-1])], -1)
    sign = np.linalg.det(left) * np.linalg.det(right)
    return [((gradient * sign)[..., None, None] * (left * others[..., None, :]) @ right).astype(x.dtype)]


def dft(node: Node, context: Context) -> CustomOperator:
    plan = read_dft(node, context)
    return Formula(
        context.describe(node),
        lambda x: _transformed(x, plan),
        lambda gradient, inputs, _: [_transposed(gradient, plan).astype(inputs[0].dtype)],
    )


def _transformed(x: np.ndarray, plan: Fourier) -> np.ndarray:
    """Fourier-transform numbers whose real and imaginary parts are the last axis."""
    values = x[..., 0] if plan.real else x[..., 0] + 1j * x[..., 1]
    if plan.inverse and plan.half:
        return np.fft.irfft(values, plan.length, plan.axis)[..., None].astype(x.dtype)
    function = np.fft.ifft if plan.inverse else np.fft.rfft if plan.half else np.fft.fft
    y = function(values, plan.length, plan.axis)
    return np.stack([y.real, y.imag], -1).astype(x.dtype)


def _transposed(gradient: np.ndarray, plan: Fourier) -> np.ndarray:
    """Return the gradient of the numbers: the transposed transform, since the transform is linear.

    The transpose of Σ exp(-2πi kn/N) x_n is Σ exp(2πi kn/N) g_k: N times the inverse transform.
    """
    length, axis = plan.length, plan.axis
    if plan.inverse and plan.half:
        found = np.fft.rfft(gradient[..., 0], length, axis) / length
        weights = np.full(length // 2 + 1, 2.0)  # the other half of a spectrum has the same numbers
        weights[0] = 1
        if length % 2 == 0:
            weights[-1] = 1
        found = found * weights.reshape(-1, *[1] * (found.ndim - 1 - axis))
    else:
        values = gradient[..., 0] + 1j * gradient[..., 1]
        if plan.inverse:
            found = np.fft.fft(values, length, axis) / length
        else:
            found = np.fft.ifft(values, length, axis) * length  # what a half spectrum lacks is zero
    found = np.moveaxis(np.moveaxis(found, axis, 0)[: plan.taken], 0, axis)
    missing = [(0, plan.size - plan.taken if place == axis else 0) for place in range(found.ndim)]
    found = np.pad(found, missing)
    return found.real[..., None] if plan.real else np.stack([found.real, found.imag], -1)


def stft(node: Node, context: Context) -> CustomOperator:
    plan = read_stft(node, context)
    cells = plan.cells

    def forward(x: np.ndarray, window: np.ndarray | None = None) -> np.ndarray:
        frames = x[:, cells]
        return _transformed(frames if window is None else frames * window[:, None], plan.fourier)

    def backward(gradient: np.ndarray, inputs: Sequence[np.ndarray], _: np.ndarray) -> list[np.ndarray]:
        x, *windows = inputs
        by_frames = _transposed(gradient, plan.fourier).astype(x.dtype)
        found, by_windows = np.zeros_like(x), []
        for window in windows:
            by_windows.append((by_frames * x[:, cells]).sum((0, 1, 3)))
            by_frames = by_frames * window[:, None]
        places: Any = (slice(None), cells)
        np.add.at(found, places, by_frames)
        return [found, *by_windows]

    return Formula(context.describe(node), forward, backward)


OPERATORS: dict[str, Factory] = {
    "Det": formula(lambda x: np.asarray(np.linalg.det(x)), _det_gradient),
}
