"""ONNX in TensorFlow: Fourier transforms.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


@in_onnx
def dft(node: Node, context: Context) -> Call:
    plan, order = read_dft(node, context), list(range(context.rank(node.inputs[0])))
    order[plan.axis], order[-2] = order[-2], order[plan.axis]  # TensorFlow transforms the last axis
    moved = plan.axis != len(order) - 2

    def run(x: Any, *_: Any) -> Any:
        y = in_float32(tf.transpose(x, order) if moved else x)
        y = tf.cast(_transformed(y, plan), x.dtype)
        return tf.transpose(y, order) if moved else y

    return run


def _transformed(x: Any, plan: Fourier) -> Any:
    """Transform numbers whose real and imaginary parts are the last axis, along the one before."""
    x = x[..., : plan.taken, :]
    if plan.real and plan.half:
        y = tf.signal.rfft(x[..., 0], [plan.length])
    elif plan.inverse and plan.half:
        return tf.signal.irfft(tf.complex(x[..., 0], x[..., 1]), [plan.length])[..., tf.newaxis]
    else:
        x = tf.pad(x, [*[[0, 0]] * (len(x.shape) - 2), [0, plan.length - plan.taken], [0, 0]])
        values = tf.complex(x[..., 0], tf.zeros_like(x[..., 0]) if plan.real else x[..., 1])
        y = tf.signal.ifft(values) if plan.inverse else tf.signal.fft(values)
    return tf.stack([tf.math.real(y), tf.math.imag(y)], -1)


@in_onnx
def stft(node: Node, context: Context) -> Call:
    plan = read_stft(node, context)

    def run(x: Any, _: Any, window: Any = None, *__: Any) -> Any:
        frames = tf.signal.frame(in_float32(x), plan.fourier.length, plan.step, axis=1)
        if window is not None:
            frames = frames * in_float32(window)[:, tf.newaxis]
        return tf.cast(_transformed(frames, plan.fourier), x.dtype)

    return run
