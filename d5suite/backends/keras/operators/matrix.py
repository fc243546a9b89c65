"""ONNX in Keras: matrix products and Fourier transforms.

Imports Keras, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

from keras import layers, ops

from d5suite.backends.keras.operators.context import Context, Function, in_float32, in_onnx
from d5suite.network import Node
from d5suite.network.nodes.layouts import identity
from d5suite.network.nodes.matrix import read_einsum, read_gemm
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def gemm(node: Node, context: Context) -> Any:
    plan = read_gemm(node, context)
    alpha, beta, trans_a, trans_b = plan.alpha, plan.beta, plan.trans_a, plan.trans_b
    a, *weights = [name for name in node.inputs if name]
    if plan.plain and not trans_a and context.owned(*weights) and context.computed(a):
        settings = {"kernel_initializer": "zeros", **context.settings(node)}
        layer = layers.Dense(plan.features, use_bias=len(weights) > 1, **settings)
        y = layer(context.enter(node, 0, identity(2)))
        context.own(weights, layer.kernel, layer.bias, layout=(1, 0) if trans_b else None)
        return y
    to_a, to_b = map(context.to_onnx, node.inputs[:2])
    # TensorFlow 2.21 fuses this addition into the product, and then fails on a bias of two axes.
    row = plan.bias == (1, plan.features)

    def run(x: Any, y: Any, z: Any = None) -> Any:
        x, y = to_a(x), to_b(y)
        product = ops.matmul(ops.transpose(x) if trans_a else x, ops.transpose(y) if trans_b else y)
        if alpha != 1:
            product = product * alpha
        if z is None or beta == 0:
            return product
        if row:
            z = ops.reshape(z, (-1,))
        return product + (z if beta == 1 else z * beta)

    return context.calculate(node, run)


def mat_mul(node: Node, context: Context) -> Any:
    first, second = map(context.to_onnx, node.inputs)
    return context.calculate(node, lambda x, y: ops.matmul(first(x), second(y)))


@in_onnx
def einsum(node: Node, context: Context) -> Function:
    equation = read_einsum(node, context).equation
    return lambda *xs: ops.einsum(equation, *xs)


@in_onnx
def det(node: Node, context: Context) -> Function:
    return lambda x: ops.cast(ops.det(in_float32(x)), x.dtype)


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
    """Fourier-transform the last axis but one; the last axis holds real and imaginary parts."""
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
