"""ONNX on JAX: matrix products and Fourier transforms.

Imports JAX, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from d5suite.backends.jax.operators.context import Call, Context, broadcast, in_float32
from d5suite.levels.layouts import in_onnx, same
from d5suite.network import Node
from d5suite.network.nodes.layouts import identity
from d5suite.network.nodes.matrix import read_einsum, read_gemm
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def gemm(node: Node, context: Context) -> Call:
    plan, precision = read_gemm(node, context), context.precision
    alpha, beta = plan.alpha, plan.beta
    first, second = (context.layout(name) for name in node.inputs[:2])
    contracted = ((first.index(0 if plan.trans_a else 1),), (second.index(1 if plan.trans_b else 0),))
    convert = same if plan.bias is None else context.convert(node.inputs[2], identity(len(plan.bias)))

    def call(x: Any, y: Any, z: Any = None) -> Any:
        product = lax.dot_general(x, y, (contracted, ((), ())), precision=precision)
        if alpha != 1:
            product = alpha * product
        if z is None:
            return product
        return broadcast(jnp.add, product, convert(z) if beta == 1 else beta * convert(z))

    return call


def mat_mul(node: Node, context: Context) -> Call:
    first, second = (context.convert(name, identity(context.rank(name))) for name in node.inputs)
    precision = context.precision
    return lambda x, y: jnp.matmul(first(x), second(y), precision=precision)


@in_onnx
def einsum(node: Node, context: Context) -> Call:
    equation, precision = read_einsum(node, context).equation, context.precision
    return lambda *xs: jnp.einsum(equation, *xs, precision=precision)


@in_onnx
def det(node: Node, context: Context) -> Call:
    return lambda x: jnp.linalg.det(in_float32(x)).astype(x.dtype)


@in_onnx
def dft(node: Node, context: Context) -> Call:
    plan = read_dft(node, context)
    return lambda x, *_: _transformed(in_float32(x), plan).astype(x.dtype)


def _transformed(x: Any, plan: Fourier) -> Any:
    """Fourier-transform numbers whose real and imaginary parts are the last axis."""
    values = x[..., 0] if plan.real else lax.complex(x[..., 0], x[..., 1])
    if plan.inverse and plan.half:
        return jnp.fft.irfft(values, plan.length, plan.axis)[..., None]
    function = jnp.fft.ifft if plan.inverse else jnp.fft.rfft if plan.half else jnp.fft.fft
    y = function(values, plan.length, plan.axis)
    return jnp.stack([y.real, y.imag], -1)


@in_onnx
def stft(node: Node, context: Context) -> Call:
    plan = read_stft(node, context)

    def call(x: Any, _: Any, window: Any = None, *__: Any) -> Any:
        frames = in_float32(x)[:, plan.cells]
        if window is not None:
            frames = frames * in_float32(window)[:, None]
        return _transformed(frames, plan.fourier).astype(x.dtype)

    return call
