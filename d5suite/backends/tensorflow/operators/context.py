"""Context of a node, and helpers that several families share, in TensorFlow.

Imports TensorFlow, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from d5suite.levels.layouts import ConvertingContext, same
from d5suite.network import Node
from d5suite.network.nodes.layouts import Conversion, Layout, channels_last, identity
from d5suite.network.nodes.windows import Window

IMAGES_LAST = {("cuda", "fp32"): False, ("cuda", "fp64"): False}
"""Whether images are stored N, H, W, C, by device and precision; True if not listed.

TensorFlow's CPU kernels are faster with channels last (measured with oneDNN), and so are NVIDIA's
Tensor Cores, which bf16 and fp16 use. Without them cuDNN prefers channels first (NVIDIA,
"Convolutional layers user's guide", tensor layouts).
"""

Call = Callable[..., Any]

Factory = Callable[[Node, "Context"], Call]

KERNELS = ("Conv", "ConvTranspose")
"""Operators whose kernels TensorFlow wants with spatial axes first."""


def native_device(device: str) -> str:
    """Return TensorFlow's name for a device."""
    return "/CPU:0" if device == "cpu" else "/GPU:0"


def compiled(function: Call, mode: str) -> Call:
    """Return the function as a mode runs it: eager, traced into a graph, or compiled by XLA."""
    if mode == "eager":
        return function
    return tf.function(function, autograph=False, jit_compile=True if mode == "xla" else None)


def is_asynchronous(device: str) -> bool:
    """Return whether calls may return before their work is done; by default, not on the CPU."""
    return device != "cpu" or not tf.config.experimental.get_synchronous_execution()


@dataclass(kw_only=True)
class Context(ConvertingContext):
    """What a factory knows about its node and the network around it.

    Attributes
    ----------
    gradients : bool
        Whether gradients will be computed.
    native_gradients : bool
        Whether grouped and dilated convolutions have gradient kernels: XLA and cuDNN have them,
        TensorFlow's CPU kernels do not.
    xla : bool
        Whether XLA will compile the code; it has no pooling with explicit padding.
    images_last : bool
        Whether images are stored with channels last.
    device : str
        The kind of device that custom operators are built for.
    generator : tf.random.Generator, optional
        The generator that Dropout draws from; without it, as at level 0, Dropout draws from
        TensorFlow's internal state, which cannot be read.
    """

    gradients: bool = False
    native_gradients: bool = False
    xla: bool = False
    images_last: bool = True
    device: str = "cpu"
    generator: Any = None

    @property
    def recomputes(self) -> bool:
        """Whether XLA may compute a value twice, rounded differently; level 0 stores its inputs."""
        return self.xla and self.gradients and not self.single

    def image_layout(self, rank: int) -> Layout:
        """Return the layout of images in convolution and pooling."""
        return channels_last(rank) if self.images_last else identity(rank)

    def image(self, node: Node) -> tuple[Images, Call]:
        """Return a node's `Images`, and a function that converts the first input to their layout.

        The output gets the same layout.
        """
        rank = self.rank(node.inputs[0])
        layout = self.layouts[node.outputs[0]] = self.image_layout(rank)
        return Images(rank, self.images_last), self.convert(node.inputs[0], layout)

    def moved(self, how: Conversion) -> Call:
        if how.reshape is not None:
            return lambda x: tf.reshape(x, how.reshape)
        if not how.added:
            return lambda x: tf.transpose(x, how.order)
        return lambda x: tf.transpose(x[(tf.newaxis,) * how.added], how.order)


def first_extreme(best: Call) -> Call:
    """Return a reduction to the element that ``best``, `tf.argmax` or `tf.argmin`, finds.

    TensorFlow's own gradient compares the elements with the maximum, and XLA may compute either
    again with other roundings: then no element equals the maximum (docs/findings.md). Here the
    gradient goes to the first of equal elements.
    """

    def extreme(x: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
        kept = [axis for axis in range(len(x.shape)) if axis not in axes]
        flat = tf.transpose(x, [*kept, *axes])
        flat = tf.reshape(flat, tf.concat((tf.shape(flat)[: len(kept)], [-1]), 0))
        index = best(flat, -1, output_type=tf.int32)[..., tf.newaxis]
        y = tf.reduce_sum(tf.where(tf.range(tf.shape(flat)[-1]) == index, flat, tf.zeros([], x.dtype)), -1)
        for axis in sorted(axes) if keepdims else ():
            y = tf.expand_dims(y, axis)
        return y

    return extreme


def in_float32(x: Any) -> Any:
    """Widen bfloat16 and float16 to float32."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.bfloat16, tf.float16) else x


def add_bias(y: Any, bias: Any, context: Context, data_format: str | None = None) -> Any:
    """Add a bias per channel."""
    # On the CPU, TensorFlow (2.21) sums the bias's bfloat16 gradient in bfloat16, unless oneDNN
    # fuses the sum with a convolution's gradient.
    if y.dtype == tf.bfloat16 and context.gradients and context.single:
        return y + bias
    return tf.nn.bias_add(y, bias, data_format)


@dataclass(frozen=True)
class Images:
    """Images as TensorFlow's windowed kernels take them: one-dimensional ones get a second axis."""

    rank: int
    last: bool

    @property
    def dimensions(self) -> int:
        """Spatial dimensions that the kernel sees."""
        return max(self.rank - 2, 2)

    @property
    def data_format(self) -> str:
        """TensorFlow's name of the layout."""
        space = "DHW"[-self.dimensions :]
        return f"N{space}C" if self.last else f"NC{space}"

    @property
    def channel_axis(self) -> int:
        """The stored axis of channels."""
        return -1 if self.last else 1

    def spatial(self, values: Sequence[Any], rest: Any) -> list[Any]:
        """Return values for the spatial axes, and ``rest`` for batch and channels, as stored."""
        return [rest, *values, rest] if self.last else [rest, rest, *values]

    def lift(self, w: Window) -> Window:
        """Return a window over the images as the kernel sees them."""
        if self.rank > 3:
            return w
        ones = {name: (1, *getattr(w, name)) for name in ("image", "kernel", "strides", "dilations", "outputs")}
        zeros = {name: (0, *getattr(w, name)) for name in ("pads_begin", "pads_end", "overhang")}
        return replace(w, **ones, **zeros)

    def enter(self, x: Any) -> Any:
        """Add a second spatial axis if there is only one."""
        return x if self.rank > 3 else tf.expand_dims(x, 1 if self.last else 2)

    def leave(self, x: Any) -> Any:
        """Undo `enter`."""
        return x if self.rank > 3 else tf.squeeze(x, 1 if self.last else 2)

    def padding(self, w: Window) -> Call:
        """Return a function of an image and a value that pads the image for a window."""
        if not w.padded:
            return same
        pads = self.spatial(w.pads, (0, 0))
        return lambda x, value: tf.pad(x, pads, constant_values=tf.cast(value, x.dtype))

    def undilated(self, x: Any, w: Window, kernel: Call) -> Any:
        """Run ``kernel(x, strides)`` on each phase of a dilated window, without padding."""
        if not w.dilated:
            return kernel(x, w.strides)
        count = self.dimensions
        last, first, once = channels_last(count + 2), (0, count + 1, *range(1, count + 1)), (1,) * count
        if not self.last:
            x = tf.transpose(x, last)
        sizes = x.shape[1:-1]
        fill = [[0, -size % dilation] for size, dilation in zip(sizes, w.dilations, strict=True)]
        x = tf.space_to_batch(x, w.dilations, fill)
        x = kernel(x, once) if self.last else tf.transpose(kernel(tf.transpose(x, first), once), last)
        outputs = [size - span + 1 for size, span in zip(sizes, w.spans, strict=True)]
        crops = [
            [0, count * dilation - size]
            for count, dilation, size in zip(x.shape[1:-1], w.dilations, outputs, strict=True)
        ]
        x = tf.batch_to_space(x, w.dilations, crops)
        if max(w.strides) > 1:
            x = x[(slice(None), *(slice(None, None, stride) for stride in w.strides))]
        return x if self.last else tf.transpose(x, first)
