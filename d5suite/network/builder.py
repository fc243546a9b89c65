"""Write a `Network` layer by layer.

Every layer takes the name of its parameters, in the field's usual form (``layer1.0.conv1``), so that published weights
fit. Initial values depend only on the seed and the parameter's name. Imports ONNX and NumPy.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from d5suite.errors import NetworkError
from d5suite.network.model import IR_VERSION, OPSET, Network

Pair = int | tuple[int, int]
"""A size in pixels, of height and width alike or of each."""


class Builder:
    """Collects layers; each method appends one and returns its output's tensor name.

    Parameters
    ----------
    name : str
        The network's name.
    seed : int
        Seed of the initial weights.
    image_size : int
        Height and width of the input in pixels.
    channels : int
        Channels of the input.
    smallest : int
        The least ``image_size`` at which every window of the network fits its input.

    Raises
    ------
    NetworkError
        If the image is smaller than that.
    """

    image = "image"
    label = "label"

    def __init__(
        self, name: str, *, seed: int = 0, image_size: int = 224, channels: int = 3, smallest: int = 1
    ) -> None:
        if image_size < smallest:
            raise NetworkError(f"the images must have at least {smallest} pixels a side, not {image_size}", where=name)
        self.name = name
        self.seed = seed
        self.image_size = image_size
        self._nodes: list = []
        self._initializers: list[TensorProto] = []
        self._channels: dict[str, int] = {self.image: channels}
        self._input = helper.make_tensor_value_info(
            self.image, TensorProto.FLOAT, ["N", channels, image_size, image_size]
        )

    def node(self, operator: str, name: str, inputs: Sequence[str], channels: int, **attributes: Any) -> str:
        """Append any ONNX operator.

        Parameters
        ----------
        operator : str
            Its name in ONNX's own domain.
        name : str
            Of the node and of its output.
        inputs : sequence of str
            Tensor names, ``""`` for an omitted one.
        channels : int
            Length of the output's axis 1.
        **attributes
            The operator's.
        """
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        self._channels[name] = channels
        return name

    def parameter(self, name: str, value: np.ndarray) -> str:
        """Add a float32 initializer; with at least one axis it is trained."""
        self._initializers.append(numpy_helper.from_array(value.astype(np.float32, copy=False), name))
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add an initializer of its own dtype, such as int64 axes."""
        self._initializers.append(numpy_helper.from_array(value, name))
        return name

    def _normal(self, name: str, shape: tuple[int, ...], deviation: float) -> str:
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        value = generator.standard_normal(shape, dtype=np.float32)
        value *= np.float32(deviation)
        return self.parameter(name, value)

    def conv(
        self,
        x: str,
        name: str,
        channels: int,
        kernel: Pair,
        *,
        stride: int = 1,
        padding: Pair | None = None,
        groups: int = 1,
        bias: bool = False,
        fan: Literal["in", "out"] = "out",
        deviation: float | None = None,
    ) -> str:
        """2-D convolution with He-normal weights: variance 2 / (kernel height · width · channels / groups).

        He et al., "Delving deep into rectifiers" (ICCV 2015). With ``fan="out"`` the channels are the output's: the
        backward form, which the published ResNets use; with ``fan="in"`` the input's: the forward form. A
        ``deviation`` is the weights' standard deviation instead. ``padding`` defaults to ``kernel // 2`` on every side.
        """
        inputs = self._channels[x]
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        if padding is None:
            padding = (height // 2, width // 2)
        top, left = (padding, padding) if isinstance(padding, int) else padding
        if deviation is None:
            fed = height * width * (inputs if fan == "in" else channels) // groups
            deviation = float(np.sqrt(2.0 / fed))
        weights = [self._normal(f"{name}.weight", (channels, inputs // groups, height, width), deviation)]
        if bias:
            weights.append(self.parameter(f"{name}.bias", np.zeros(channels)))
        return self.node(
            "Conv",
            name,
            [x, *weights],
            channels,
            kernel_shape=[height, width],
            strides=[stride, stride],
            pads=[top, left, top, left],
            group=groups,
        )

    def batch_norm(self, x: str, name: str, *, epsilon: float = 1e-5, momentum: float = 0.9, scale: float = 1.0) -> str:
        """Batch normalisation with initial scale ``scale``.

        ``momentum`` is the weight of the old running statistics (ONNX's meaning).
        """
        channels = self._channels[x]
        weights = [
            self.parameter(f"{name}.weight", np.full(channels, scale)),
            self.parameter(f"{name}.bias", np.zeros(channels)),
            self.parameter(f"{name}.running_mean", np.zeros(channels)),
            self.parameter(f"{name}.running_var", np.ones(channels)),
        ]
        return self.node("BatchNormalization", name, [x, *weights], channels, epsilon=epsilon, momentum=momentum)

    def relu(self, x: str) -> str:
        """Rectified linear unit."""
        return self.node("Relu", f"{x}.relu", [x], self._channels[x])

    def relu6(self, x: str) -> str:
        """Rectified linear unit with an upper bound of 6."""
        bounds = [self._scalar("relu6.lower", 0.0), self._scalar("relu6.upper", 6.0)]
        return self.node("Clip", f"{x}.relu6", [x, *bounds], self._channels[x])

    def _scalar(self, name: str, value: float) -> str:
        if all(name != tensor.name for tensor in self._initializers):
            self.constant(name, np.array(value, np.float32))
        return name

    def tanh(self, x: str) -> str:
        """Hyperbolic tangent."""
        return self.node("Tanh", f"{x}.tanh", [x], self._channels[x])

    def dropout(self, x: str, name: str, *, ratio: float = 0.5) -> str:
        """Zeros in place of a share ``ratio`` of the values while training, the others scaled up; else the identity."""
        return self.node("Dropout", name, [x, self._scalar(f"{name}.ratio", ratio)], self._channels[x])

    def average_pool(self, x: str, name: str, kernel: int, *, stride: int, padding: int = 0) -> str:
        """Mean over kernel × kernel windows, in which the zeros of the padding count."""
        attributes = {"pads": [padding] * 4, "count_include_pad": 1} if padding else {}
        return self.node(
            "AveragePool",
            name,
            [x],
            self._channels[x],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            **attributes,
        )

    def max_pool(self, x: str, name: str, kernel: int, *, stride: int, padding: int = 0, partial: bool = False) -> str:
        """Maximum over kernel × kernel windows; with ``partial``, also over a last one that reaches past the image."""
        attributes = {"ceil_mode": 1} if partial else {}
        return self.node(
            "MaxPool",
            name,
            [x],
            self._channels[x],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[padding] * 4,
            **attributes,
        )

    def adaptive_average_pool(self, x: str, name: str, size: int, *, side: Callable[[int], int]) -> str:
        """Mean over size × size windows that together cover the image, as PyTorch's AdaptiveAvgPool2d.

        A network that was made for one image size takes others through it. Window ``i`` of an image of ``n`` pixels
        runs from ``⌊i n / size⌋`` to ``⌈(i + 1) n / size⌉``. ONNX has a node for it where the windows are all of one
        size and step; an image of one pixel is repeated; an image of ``size`` pixels is passed on.

        Parameters
        ----------
        x, name : str
            Input and node.
        size : int
            Height and width of the output.
        side : callable
            The height and width of ``x`` at an image size of the network.

        Raises
        ------
        NetworkError
            If the windows differ; it names the nearest image sizes that fit.
        """
        given = side(self.image_size)
        windows = _even_windows(given, size)
        if given == size:
            return x
        if given == 1:
            row = self.node("Concat", f"{name}.row", [x] * size, self._channels[x], axis=3)
            return self.node("Concat", name, [row] * size, self._channels[x], axis=2)
        if windows is None:
            fits = [n for n in range(1, 2 * self.image_size + 512) if side(n) == 1 or _even_windows(side(n), size)]
            below = [n for n in fits if n < self.image_size][-1:]
            above = [n for n in fits if n > self.image_size][:1]
            raise NetworkError(
                f"maps of {given} pixels a side, from images of {self.image_size}, do not divide into {size} windows",
                where=f"{self.name}, node {name}",
                hint=f"The nearest image sizes that fit are {' and '.join(map(str, below + above))} pixels.",
            )
        return self.average_pool(x, name, windows[0], stride=windows[1])

    def global_average_pool(self, x: str, name: str) -> str:
        """Mean over each channel's image: (N, C, H, W) to (N, C, 1, 1)."""
        return self.node("GlobalAveragePool", name, [x], self._channels[x])

    def add(self, x: str, y: str, name: str) -> str:
        """Element-wise sum."""
        return self.node("Add", name, [x, y], self._channels[x])

    def concat(self, tensors: Sequence[str], name: str) -> str:
        """The channels of all tensors, one after another."""
        return self.node("Concat", name, tensors, sum(self._channels[x] for x in tensors), axis=1)

    def flatten(self, x: str, name: str, *, size: int = 1) -> str:
        """(N, C, size, size) to (N, C · size²)."""
        return self.node("Flatten", name, [x], self._channels[x] * size * size, axis=1)

    def linear(self, x: str, name: str, features: int, *, deviation: float | None = None) -> str:
        """Fully connected layer, its weights stored (output, input).

        They are normal with standard deviation ``deviation``, by default He's: variance 2 / input features.
        """
        inputs = self._channels[x]
        deviation = float(np.sqrt(2.0 / inputs)) if deviation is None else deviation
        weights = [
            self._normal(f"{name}.weight", (features, inputs), deviation),
            self.parameter(f"{name}.bias", np.zeros(features)),
        ]
        return self.node("Gemm", name, [x, *weights], features, transB=1)

    def classifier(self, logits: str, *, auxiliary: str | None = None, weight: float = 0.0) -> Network:
        """Finish a network that ends in these logits, with mean softmax cross-entropy as its loss.

        With ``auxiliary`` logits, their cross-entropy times ``weight`` is added to the loss.
        """
        losses = [(logits, "loss")] if auxiliary is None else [(logits, "loss.main"), (auxiliary, "loss.auxiliary")]
        for values, name in losses:
            self.node("SoftmaxCrossEntropyLoss", name, [values, self.label], 1, reduction="mean")
        if auxiliary is not None:
            self.node("Mul", "loss.weighted", ["loss.auxiliary", self._scalar("loss.weight", weight)], 1)
            self.node("Add", "loss", ["loss.main", "loss.weighted"], 1)
        graph = helper.make_graph(
            self._nodes,
            self.name,
            [self._input, helper.make_tensor_value_info(self.label, TensorProto.INT64, ["N"])],
            [
                helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["N", self._channels[logits]]),
                helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
            ],
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="d5suite"
        )
        model.graph.initializer.extend(self._initializers)  # not through `make_graph`, whose graph is copied once more
        return Network(model, name=self.name, input=self.image, output=logits, label=self.label, loss="loss")


def _even_windows(given: int, size: int) -> tuple[int, int] | None:
    """Kernel and stride of windows that cover ``given`` pixels, if ``size`` adaptive windows are alike."""
    starts = [i * given // size for i in range(size)]
    kernels = {-(-(i + 1) * given // size) - start for i, start in enumerate(starts)}
    strides = {after - before for before, after in itertools.pairwise(starts)}
    return (kernels.pop(), strides.pop()) if len(kernels) == len(strides) == 1 and given >= size else None
