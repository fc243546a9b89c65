"""Fourier transforms.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext, has_input


@dataclass(frozen=True)
class Fourier:
    """A discrete Fourier transform; the last axis holds real and imaginary parts.

    Attributes
    ----------
    axis : int
        The transformed axis; never the last one.
    size : int
        Size of the axis.
    length : int
        Length of the transform: the input is cut or padded with zeros to it.
    real : bool
        Whether the input has real parts only.
    inverse : bool
        Whether it is the inverse transform, which divides by `length`.
    half : bool
        Whether the spectrum is that of real numbers, so that the first ``length // 2 + 1`` values
        suffice: the transform returns them, and the inverse takes them and returns real parts.
    """

    axis: int
    size: int
    length: int
    real: bool
    inverse: bool
    half: bool

    @property
    def taken(self) -> int:
        """Number of input values used."""
        return min(self.size, self.length // 2 + 1 if self.half and self.inverse else self.length)

    @property
    def kept(self) -> int:
        """Number of values that the transform returns."""
        return self.length // 2 + 1 if self.half and not self.inverse else self.length


def read_dft(node: Node, context: NodeContext) -> Fourier:
    """Read a DFT.

    Raises
    ------
    NetworkError
        If the size of the axis is unknown.
    """
    shape, length, place = context.shape(node.inputs[0]), context.constant(node, 1), context.constant(node, 2)
    axis = (-2 if place is None else int(place.item())) % len(shape)
    size, inverse, half = shape[axis], bool(node.attributes["inverse"]), bool(node.attributes["onesided"])
    if size is None:
        raise NetworkError("DFT along an axis of unknown size", where=node.name)
    default = 2 * (size - 1) if inverse and half else size
    return Fourier(axis, size, default if length is None else int(length.item()), shape[-1] == 1, inverse, half)


@dataclass(frozen=True)
class ShortFourier:
    """An STFT: transforms of successive frames of a signal.

    Attributes
    ----------
    step : int
        Distance between the starts of successive frames.
    count : int
        Number of frames.
    windowed : bool
        Whether frames are multiplied by a window.
    fourier : Fourier
        The transform of (batch, frames, `Fourier.length`, parts).
    """

    step: int
    count: int
    windowed: bool
    fourier: Fourier

    @property
    def cells(self) -> np.ndarray:
        """Indices of every frame's values in the signal: int64 (frames, `Fourier.length`)."""
        return np.arange(self.count)[:, None] * self.step + np.arange(self.fourier.length)


def read_stft(node: Node, context: NodeContext) -> ShortFourier:
    """Read an STFT.

    Raises
    ------
    NetworkError
        If the length of the signal is unknown, or a window is not as long as a frame.
    """
    shape, step, length = context.shape(node.inputs[0]), context.constant(node, 1), context.constant(node, 3)
    assert step is not None  # ONNX has no default
    windowed = has_input(node, 2)
    window = context.shape(node.inputs[2])[0] if windowed else None
    frame = int(length.item()) if length is not None else window or shape[1]
    if shape[1] is None or frame is None:
        raise NetworkError("STFT of a signal of unknown length", where=node.name)
    if windowed and window != frame:
        raise NetworkError(f"STFT: a window of {window} for frames of {frame}", where=node.name)
    every, half = int(step.item()), bool(node.attributes["onesided"])
    return ShortFourier(
        every,
        (shape[1] - frame) // every + 1,
        windowed,
        Fourier(2, frame, frame, shape[2] == 1, inverse=False, half=half),
    )
