"""ONNX in TensorFlow: matrix products and Fourier transforms.

Imports TensorFlow, `d5suite.errors`, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, add_bias, in_float32
from d5suite.errors import NetworkError
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.matrix import read_einsum, read_gemm
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def gemm(node: Node, context: Context) -> Call:
    plan = read_gemm(node, context)
    alpha, beta = plan.alpha, plan.beta
    transpose_a = plan.trans_a != (context.layout(node.inputs[0]) == (1, 0))
    transpose_b = plan.trans_b != (context.layout(node.inputs[1]) == (1, 0))
    has_bias = plan.bias is not None and beta != 0
    # TensorFlow's graph optimizer (2.21) fuses an added (1, features) into the product as a bias,
    # and then rejects it.
    row = alpha == 1 == beta and plan.bias == (1, plan.features)
    vector = alpha == 1 and plan.has_vector

    def run(x: Any, y: Any, bias: Any = None) -> Any:
        product = tf.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b)
        if vector:
            return add_bias(product, bias, context)
        if row:
            return add_bias(product, tf.reshape(bias, [-1]), context)
        if alpha != 1:
            product = product * tf.cast(alpha, product.dtype)
        if has_bias:
            product = product + (bias if beta == 1 else bias * tf.cast(beta, product.dtype))
        return product

    return run


def mat_mul(node: Node, context: Context) -> Call:
    ranks = [context.rank(name) for name in node.inputs]
    first, second = map(context.to_onnx, node.inputs)
    if ranks[0] > 3 and ranks[1] == 2:  # TensorFlow (2.21) multiplies (N, 1, M, K) by a matrix wrongly
        return lambda x, y: tf.tensordot(first(x), second(y), 1)
    if min(ranks) > 1:
        return lambda x, y: tf.matmul(first(x), second(y))

    def run(x: Any, y: Any) -> Any:
        x, y = first(x), second(y)
        product = tf.matmul(x[tf.newaxis] if ranks[0] == 1 else x, y[:, tf.newaxis] if ranks[1] == 1 else y)
        if ranks[1] == 1:
            product = tf.squeeze(product, -1)
        return tf.squeeze(product, -1 if ranks[1] == 1 else -2) if ranks[0] == 1 else product

    return run


@in_onnx
def einsum(node: Node, context: Context) -> Call:
    equation = read_einsum(node, context).equation
    return lambda *xs: tf.einsum(equation, *xs)


@in_onnx
def det(node: Node, context: Context) -> Call:
    if context.xla:
        raise NetworkError("TensorFlow's XLA compiles no determinant", where=node.name, hint="Choose another mode.")
    return lambda x: tf.cast(tf.linalg.det(in_float32(x)), x.dtype)


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
    """Fourier-transform the last axis but one; the last axis holds real and imaginary parts."""
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
