"""ONNX in Keras: Fourier transforms. Imports Keras, `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

from keras import ops

from d5suite.backends.keras.operators.context import Context, Function, in_float32, in_onnx
from d5suite.network import Node
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


@in_onnx
def dft(node: Node, context: Context) -> Function:
    plan, order = read_dft(node, context), list(range(context.rank(node.inputs[0])))
    order[plan.axis], order[-2] = order[-2], order[plan.axis]  # Keras transforms the last axis
    moved = plan.axis != len(order) - 2

    def run(x: Any, *_: Any) -> Any:
        y = in_float32(ops.transpose(x, order) if moved else x)
        y = ops.cast(_transformed(y, plan), x.dtype)
        return ops.transpose(y, order) if moved else y

    return run


def _transformed(x: Any, plan: Fourier) -> Any:
    """Transform numbers whose real and imaginary parts are the last axis, along the one before."""
    x = x[..., : plan.taken, :]
    if plan.real and plan.half:
        return ops.stack(ops.rfft(x[..., 0], plan.length), -1)
    if plan.inverse and plan.half:
        return ops.expand_dims(ops.irfft((x[..., 0], x[..., 1]), plan.length), -1)
    x = ops.pad(x, [*[(0, 0)] * (len(x.shape) - 2), (0, plan.length - plan.taken), (0, 0)])
    real, imaginary = x[..., 0], ops.zeros_like(x[..., 0]) if plan.real else x[..., 1]
    if not plan.inverse:
        return ops.stack(ops.fft((real, imaginary)), -1)
    real, imaginary = ops.fft((real, -imaginary))  # Keras has no inverse of one axis
    return ops.stack((real, -imaginary), -1) / plan.length


@in_onnx
def stft(node: Node, context: Context) -> Function:
    plan = read_stft(node, context)

    def run(x: Any, _: Any, window: Any = None, *__: Any) -> Any:
        frames = ops.take(in_float32(x), plan.cells, 1)
        if window is not None:
            frames = frames * ops.expand_dims(in_float32(window), -1)
        return ops.cast(_transformed(frames, plan.fourier), x.dtype)

    return run
