"""ONNX on JAX: Fourier transforms.

Imports JAX, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from d5suite.backends.jax.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import in_onnx
from d5suite.network import Node
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


@in_onnx
def dft(node: Node, context: Context) -> Call:
    plan = read_dft(node, context)
    return lambda x, *_: _transformed(in_float32(x), plan).astype(x.dtype)


def _transformed(x: Any, plan: Fourier) -> Any:
    """Transform numbers whose real and imaginary parts are the last axis."""
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
