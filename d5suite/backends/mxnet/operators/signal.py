"""ONNX on MXNet: Fourier transforms. Imports NumPy, `d5suite.network` and `context`.

MXNet's transforms are for GPUs only, so that these are products with the transform's matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators.context import Call, Context
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def dft(node: Node, context: Context) -> Call:
    plan, shape = read_dft(node, context), list(context.shape(node.inputs[0]))
    context.keep(node, _matrix(plan))
    last = len(shape) - 2
    shape[plan.axis], shape[last] = shape[last], shape[plan.axis]

    def call(F: Any, x: Any, *more: Any) -> Any:
        y = _product(F, F.swapaxes(x, dim1=plan.axis, dim2=last), more[-1], plan, tuple(shape[:last]))
        return F.swapaxes(y, dim1=plan.axis, dim2=last)

    return call


def _matrix(plan: Fourier) -> np.ndarray:
    """Return the matrix whose rows are the transforms of each part of each number alone."""
    parts = 1 if plan.real else 2
    alone = np.eye(plan.size * parts).reshape(-1, plan.size, parts)
    values = alone[..., 0] if plan.real else alone[..., 0] + 1j * alone[..., 1]
    if plan.inverse and plan.half:
        return np.fft.irfft(values, plan.length, 1)
    function = np.fft.ifft if plan.inverse else np.fft.rfft if plan.half else np.fft.fft
    y = function(values, plan.length, 1)
    return np.stack([y.real, y.imag], -1).reshape(len(y), -1)


def _product(F: Any, x: Any, matrix: Any, plan: Fourier, leading: Shape) -> Any:
    """Multiply numbers on the last axis but one, and their parts, by the transform's matrix."""
    rows = F.reshape(x, shape=(-1, plan.size * (1 if plan.real else 2)))
    ahead = [-1 if n is None else n for n in leading]
    return F.reshape(F.dot(rows, matrix), shape=(*ahead, plan.kept, 1 if plan.inverse and plan.half else 2))


def stft(node: Node, context: Context) -> Call:
    plan = read_stft(node, context)
    context.keep(node, _matrix(plan.fourier))
    batch, length = context.shape(node.inputs[0])[0], plan.fourier.length
    begins = [index * plan.step for index in range(plan.count)]

    def call(F: Any, x: Any, *more: Any) -> Any:
        frames = F.stack(*[F.slice_axis(x, axis=1, begin=n, end=n + length) for n in begins], axis=1)
        if plan.windowed:
            frames = F.broadcast_mul(frames, F.reshape(more[1], shape=(1, 1, -1, 1)))
        return _product(F, frames, more[-1], plan.fourier, (batch, plan.count))

    return call
