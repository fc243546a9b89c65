"""ONNX on MXNet: matrix products and Fourier transforms.

Imports NumPy, `d5suite.network` and `context`.
MXNet's Fourier transforms are for GPUs only: here they are products with a fixed matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators.context import Call, Context
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.matrix import read_einsum, read_gemm
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def gemm(node: Node, context: Context) -> Call:
    plan = read_gemm(node, context)
    alpha, beta, biased = plan.alpha, plan.beta, plan.bias is not None
    if plan.plain and plan.trans_b and not plan.trans_a and plan.features is not None:
        return lambda F, x, weight, *bias: F.FullyConnected(
            x, weight, *(bias[:1] if biased else ()), num_hidden=plan.features, no_bias=not biased, flatten=False
        )

    def call(F: Any, x: Any, y: Any, z: Any = None) -> Any:
        product = F.dot(x, y, transpose_a=plan.trans_a, transpose_b=plan.trans_b)
        product = product if alpha == 1 else product * alpha
        if z is None:
            return product
        z = z if beta == 1 else z * beta
        return product + z if isinstance(z, float | int) else F.broadcast_add(product, z)

    return call


def mat_mul(node: Node, context: Context) -> Call:
    left, right = (context.shape(name) for name in node.inputs)
    if len(right) == 2 and len(left) >= 2:  # F.dot contracts the last axis with the first
        return lambda F, x, y: F.dot(x, y)
    batches_agree = all(
        a == b or (None in (a, b) and 1 not in (a, b)) for a, b in zip(left[:-2], right[:-2], strict=False)
    )
    if len(left) == len(right) >= 3 and batches_agree:
        return lambda F, x, y: F.linalg_gemm2(x, y)
    if min(len(left), len(right)) >= 2:  # np.matmul's gradient is wrong if it broadcasts a batch axis
        rank = max(len(left), len(right))
        sizes = [(1,) * (rank - len(shape)) + tuple(shape) for shape in (left, right)]
        return lambda F, x, y: F.linalg_gemm2(
            *_widened(F, _of_rank(F, x, rank, left), _of_rank(F, y, rank, right), sizes)
        )
    return lambda F, x, y: F.np.matmul(x.as_np_ndarray(), y.as_np_ndarray()).as_nd_ndarray()


def _of_rank(F: Any, x: Any, rank: int, shape: Shape) -> Any:
    """Add leading axes of size 1, up to this rank."""
    return reduce(lambda y, _: F.expand_dims(y, axis=0), range(rank - len(shape)), x)


def _widened(F: Any, x: Any, y: Any, sizes: Sequence[Shape]) -> tuple[Any, Any]:
    """Repeat one factor's batch axes to the other's size, which may be known only at run time."""
    for axis, (one, other) in enumerate(zip(*(shape[:-2] for shape in sizes), strict=True)):
        if one == 1 != other:
            x = F.broadcast_like(x, y, lhs_axes=(axis,), rhs_axes=(axis,))
        elif other == 1 != one:
            y = F.broadcast_like(y, x, lhs_axes=(axis,), rhs_axes=(axis,))
    return x, y


def einsum(node: Node, context: Context) -> Call:
    equation = read_einsum(node, context).equation
    return lambda F, *xs: F.np.einsum(equation, *[x.as_np_ndarray() for x in xs]).as_nd_ndarray()


def det(node: Node, context: Context) -> Call:
    if not context.single:
        return lambda F, x: F.linalg_det(x)
    rank = context.rank(node.inputs[0])

    def repeatable(F: Any, x: Any) -> Any:
        """Return det(x), with the gradient det(x) x⁻ᵀ: MXNet's own overwrites what it reads."""
        y = F.BlockGrad(F.linalg_det(x))
        inverse = F.swapaxes(F.linalg_inverse(x), dim1=rank - 2, dim2=rank - 1)
        slope = F.BlockGrad(F.broadcast_mul(F.reshape(y, shape=(-2, 1, 1)) if rank > 2 else y, inverse))
        linear = F.sum(slope * x, axis=(rank - 2, rank - 1))
        return y + (linear - F.BlockGrad(linear))

    return repeatable


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
    """Return the transform's matrix: its rows are the transforms of the unit vectors."""
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
