"""ONNX on PyTorch: matrix products and Fourier transforms.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Factory, Function, in_float32, native
from d5suite.network import Node
from d5suite.network.nodes.matrix import read_einsum, read_gemm
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def gemm(node: Node, context: Context) -> Function:
    plan = read_gemm(node, context)
    alpha, beta, trans_a, trans_b = plan.alpha, plan.beta, plan.trans_a, plan.trans_b
    if plan.plain and trans_b and not trans_a:
        return F.linear
    if plan.plain and not (trans_a or trans_b or plan.bias is not None):
        return torch.mm

    def gemm(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        x, y = x.t() if trans_a else x, y.t() if trans_b else y
        if z is not None:
            return torch.addmm(z, x, y, beta=beta, alpha=alpha)
        return alpha * torch.mm(x, y) if alpha != 1 else torch.mm(x, y)

    return gemm


def einsum(node: Node, context: Context) -> Function:
    equation = read_einsum(node, context).equation
    return lambda *xs: torch.einsum(equation, *xs)


def det(node: Node, context: Context) -> Function:
    return lambda x: torch.linalg.det(in_float32(x)).to(x.dtype)


def dft(node: Node, context: Context) -> Function:
    plan = read_dft(node, context)
    return lambda x, *_: _transformed(in_float32(x), plan).to(x.dtype)


def _transformed(x: torch.Tensor, plan: Fourier) -> torch.Tensor:
    """Fourier-transform numbers whose real and imaginary parts are the last axis."""
    values = x.squeeze(-1) if plan.real else torch.view_as_complex(x.contiguous())
    if plan.inverse and plan.half:
        return torch.fft.irfft(values, plan.length, plan.axis).unsqueeze(-1)
    function = torch.fft.ifft if plan.inverse else torch.fft.rfft if plan.half else torch.fft.fft
    return torch.view_as_real(function(values, plan.length, plan.axis))


def stft(node: Node, context: Context) -> Function:
    plan = read_stft(node, context)
    length, step = plan.fourier.length, plan.step

    def run(x: torch.Tensor, _: torch.Tensor, window: torch.Tensor | None = None, *__: torch.Tensor) -> torch.Tensor:
        frames = in_float32(x).unfold(1, length, step).transpose(-1, -2)
        if window is not None:
            frames = frames * in_float32(window).unsqueeze(-1)
        return _transformed(frames, plan.fourier).to(x.dtype)

    return run


OPERATORS: dict[str, Factory] = {
    "MatMul": native(torch.matmul),
}
