"""ONNX on PyTorch: Fourier transforms.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import torch

from d5suite.backends.torch.operators.context import Context, Function, in_float32
from d5suite.network import Node
from d5suite.network.nodes.signal import Fourier, read_dft, read_stft


def dft(node: Node, context: Context) -> Function:
    plan = read_dft(node, context)
    return lambda x, *_: _transformed(in_float32(x), plan).to(x.dtype)


def _transformed(x: torch.Tensor, plan: Fourier) -> torch.Tensor:
    """Transform numbers whose real and imaginary parts are the last axis."""
    values = x.squeeze(-1) if plan.real else torch.view_as_complex(x.contiguous())
    length, axis = plan.length, plan.axis
    if plan.inverse and plan.half:
        return torch.fft.irfft(values, length, axis).unsqueeze(-1)
    if plan.inverse:
        return torch.view_as_real(torch.fft.ifft(values, length, axis))
    if plan.half:
        return torch.view_as_real(torch.fft.rfft(values, length, axis))
    return torch.view_as_real(torch.fft.fft(values, length, axis))


def stft(node: Node, context: Context) -> Function:
    plan = read_stft(node, context)
    length, step = plan.fourier.length, plan.step

    def run(x: torch.Tensor, _: torch.Tensor, window: torch.Tensor | None = None, *__: torch.Tensor) -> torch.Tensor:
        frames = in_float32(x).unfold(1, length, step).transpose(-1, -2)
        if window is not None:
            frames = frames * in_float32(window).unsqueeze(-1)
        return _transformed(frames, plan.fourier).to(x.dtype)

    return run
