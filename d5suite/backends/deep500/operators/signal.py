"""ONNX on deep500: Fourier transforms, by NumPy.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, Formula
from d5suite.network import Node
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def dft(node: Node, context: Context) -> CustomOperator:
    plan = read_dft(node, context)
    return Formula(
        context.describe(node),
        lambda x: _transformed(x, plan),
        lambda gradient, inputs, _: [_transposed(gradient, plan).astype(inputs[0].dtype)],
    )


def _transformed(x: np.ndarray, plan: Fourier) -> np.ndarray:
    """Transform numbers whose real and imaginary parts are the last axis."""
    values = x[..., 0] if plan.real else x[..., 0] + 1j * x[..., 1]
    if plan.inverse and plan.half:
        return np.fft.irfft(values, plan.length, plan.axis)[..., None].astype(x.dtype)
    function = np.fft.ifft if plan.inverse else np.fft.rfft if plan.half else np.fft.fft
    y = function(values, plan.length, plan.axis)
    return np.stack([y.real, y.imag], -1).astype(x.dtype)


def _transposed(gradient: np.ndarray, plan: Fourier) -> np.ndarray:
    """Return the gradient by the numbers: the transform is linear, so this is its transpose.

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
