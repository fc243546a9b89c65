"""Write a `Network` layer by layer.

Layers are named like their parameters, in the field's usual form (``layer1.0.conv1``), so that
published weights fit. Initial values depend only on the seed and the parameter's name. May import
ONNX, NumPy and, from d5suite, `network` and `errors`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from d5suite.errors import NetworkError
from d5suite.network.model import Network
from d5suite.network.normalise import IR_VERSION, OPSET

PixelSize = int | tuple[int, int]
"""A size in pixels: one number for height and width, or (height, width)."""


class Builder:
    """Builds a network; each layer has a method that appends it and returns its output's name.

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
        The smallest ``image_size`` at which every window fits its input.

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
            The operator's name in ONNX's own domain.
        name : str
            The name of the node and of its output.
        inputs : sequence of str
            Tensor names, ``""`` for an omitted one.
        channels : int
            Length of the output's axis 1.
        **attributes
            The operator's attributes.
        """
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        self._channels[name] = channels
        return name

    def parameter(self, name: str, value: np.ndarray) -> str:
        """Add a float32 initializer; a scalar does not count as a parameter."""
        self._initializers.append(numpy_helper.from_array(value.astype(np.float32, copy=False), name))
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add an initializer with the dtype of ``value``, such as int64 axes."""
        self._initializers.append(numpy_helper.from_array(value, name))
        return name

    def draw(self, name: str, shape: tuple[int, ...], deviation: float, *, uniform: bool = False) -> str:
        """Add a random parameter, normal or uniform, with mean 0 and this standard deviation."""
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if uniform:
            value = generator.random(shape, dtype=np.float32)
            value -= np.float32(0.5)
            value *= np.float32(deviation * 12**0.5)
        else:
            value = generator.standard_normal(shape, dtype=np.float32)
            value *= np.float32(deviation)
        return self.parameter(name, value)

    def conv(
        self,
        x: str,
        name: str,
        channels: int,
        kernel: PixelSize,
        *,
        stride: int = 1,
        padding: PixelSize | None = None,
        groups: int = 1,
        bias: bool = False,
        fan: Literal["in", "out"] = "out",
        deviation: float | None = None,
    ) -> str:
        """2-D convolution with He-normal weights.

        Their variance is 2 / (kernel height · width · channels / groups) (He et al., "Delving deep
        into rectifiers", ICCV 2015). The channels are the output's for ``fan="out"`` (the backward
        form, as in the published ResNets) and the input's for ``fan="in"`` (the forward form).
        ``deviation`` sets the standard deviation instead. ``padding`` defaults to ``kernel // 2``.
        """
        inputs = self._channels[x]
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        if padding is None:
            padding = (height // 2, width // 2)
        top, left = (padding, padding) if isinstance(padding, int) else padding
        if deviation is None:
            fed = height * width * (inputs if fan == "in" else channels) // groups
            deviation = float(np.sqrt(2.0 / fed))
        weights = [self.draw(f"{name}.weight", (channels, inputs // groups, height, width), deviation)]
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

        ``momentum`` is the weight of the old running statistics, as in ONNX.
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
        bounds = [self.scalar("relu6.lower", 0.0), self.scalar("relu6.upper", 6.0)]
        return self.node("Clip", f"{x}.relu6", [x, *bounds], self._channels[x])

    def scalar(self, name: str, value: float) -> str:
        """Add a scalar float32 constant, which is not trained, unless the name already exists."""
        if all(name != tensor.name for tensor in self._initializers):
            self.constant(name, np.array(value, np.float32))
        return name

    def tanh(self, x: str) -> str:
        """Hyperbolic tangent."""
        return self.node("Tanh", f"{x}.tanh", [x], self._channels[x])

    def sigmoid(self, x: str) -> str:
        """Logistic function."""
        return self.node("Sigmoid", f"{x}.sigmoid", [x], self._channels[x])

    def silu(self, x: str) -> str:
        """``x · sigmoid(x)`` (Elfwing et al., 2017; also called swish)."""
        return self.multiply(x, self.sigmoid(x), f"{x}.silu")

    def hard_swish(self, x: str) -> str:
        """``x · max(0, min(1, x / 6 + 1 / 2))`` (Howard et al., ICCV 2019, section 5.2)."""
        return self.node("HardSwish", f"{x}.hardswish", [x], self._channels[x])

    def hard_sigmoid(self, x: str) -> str:
        """``max(0, min(1, x / 6 + 1 / 2))``."""
        return self.node("HardSigmoid", f"{x}.hardsigmoid", [x], self._channels[x], alpha=1 / 6, beta=0.5)

    def gelu(self, x: str) -> str:
        """``x · Φ(x)`` with the exact normal distribution function, not the tanh approximation."""
        return self.node("Gelu", f"{x}.gelu", [x], self._channels[x])

    def softmax(self, x: str) -> str:
        """Softmax along the last axis."""
        return self.node("Softmax", f"{x}.softmax", [x], self._channels[x], axis=-1)

    def layer_norm(self, x: str, name: str, features: int, *, epsilon: float) -> str:
        """Layer normalisation of the last axis, which has length ``features``."""
        weights = [
            self.parameter(f"{name}.weight", np.ones(features)),
            self.parameter(f"{name}.bias", np.zeros(features)),
        ]
        return self.node("LayerNormalization", name, [x, *weights], self._channels[x], axis=-1, epsilon=epsilon)

    def dropout(self, x: str, name: str, *, ratio: float = 0.5) -> str:
        """Dropout: in training, zero a fraction ``ratio`` of the values and scale up the others."""
        return self.node("Dropout", name, [x, self.scalar(f"{name}.ratio", ratio)], self._channels[x])

    def average_pool(self, x: str, name: str, kernel: int, *, stride: int, padding: int = 0) -> str:
        """Mean over kernel × kernel windows, including the padding's zeros."""
        attributes = {"pads": [padding] * 4, "count_include_pad": 1} if padding else {}
        return self._pool("AveragePool", x, name, kernel, stride, **attributes)

    def max_pool(self, x: str, name: str, kernel: int, *, stride: int, padding: int = 0, partial: bool = False) -> str:
        """Maximum over kernel × kernel windows; ``partial`` adds the last, incomplete window."""
        attributes = {"ceil_mode": 1} if partial else {}
        return self._pool("MaxPool", x, name, kernel, stride, pads=[padding] * 4, **attributes)

    def _pool(self, operator: str, x: str, name: str, kernel: int, stride: int, **attributes: Any) -> str:
        sizes = {"kernel_shape": [kernel, kernel], "strides": [stride, stride]}
        return self.node(operator, name, [x], self._channels[x], **sizes, **attributes)

    def adaptive_average_pool(self, x: str, name: str, size: int, *, side: Callable[[int], int]) -> str:
        """Mean over size × size windows that cover the image, like PyTorch's AdaptiveAvgPool2d.

        It adapts a network made for one image size to others. Window ``i`` of an image of ``n``
        pixels runs from ``⌊i n / size⌋`` to ``⌈(i + 1) n / size⌉``. ONNX can express it if all
        windows have the same size and step. An image of one pixel is repeated; an image of ``size``
        pixels is returned unchanged.

        Parameters
        ----------
        x, name : str
            Input and node.
        size : int
            Height and width of the output.
        side : callable
            Maps an image size of the network to the height and width of ``x``.

        Raises
        ------
        NetworkError
            If the windows differ; the message names the nearest image sizes that fit.
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

    def multiply(self, x: str, y: str, name: str) -> str:
        """Element-wise product; ``y`` may be repeated along axes of length 1."""
        return self.node("Mul", name, [x, y], self._channels[x])

    def reshape(self, x: str, name: str, shape: Sequence[int]) -> str:
        """Reshape; a 0 keeps the length of its axis. ``shape`` must state the length of axis 1."""
        return self.node("Reshape", name, [x, self.constant(f"{name}.shape", np.array(shape))], shape[1])

    def transpose(self, x: str, name: str, order: Sequence[int], channels: int) -> str:
        """Reorder the axes; axis 1 then has length ``channels``."""
        return self.node("Transpose", name, [x], channels, perm=list(order))

    def part(self, x: str, name: str, start: int, end: int, *, axis: int = 1) -> str:
        """Elements ``start`` to ``end``, exclusive, of an axis."""
        limits = [
            self.constant(f"{name}.{what}", np.array([value]))
            for what, value in (("start", start), ("end", end), ("axis", axis))
        ]
        return self.node("Slice", name, [x, *limits], end - start if axis == 1 else self._channels[x])

    def concat(self, tensors: Sequence[str], name: str) -> str:
        """Concatenation along the channels."""
        return self.node("Concat", name, tensors, sum(self._channels[x] for x in tensors), axis=1)

    def flatten(self, x: str, name: str, *, size: int = 1) -> str:
        """Flatten (N, C, size, size) to (N, C · size²)."""
        return self.node("Flatten", name, [x], self._channels[x] * size * size, axis=1)

    def linear(self, x: str, name: str, features: int, *, deviation: float | None = None, uniform: bool = False) -> str:
        """Fully connected layer with weights (output, input) of standard deviation ``deviation``.

        The default is He's: variance 2 / input features. The weights are normal, or ``uniform``.
        """
        inputs = self._channels[x]
        deviation = float(np.sqrt(2.0 / inputs)) if deviation is None else deviation
        weights = [
            self.draw(f"{name}.weight", (features, inputs), deviation, uniform=uniform),
            self.parameter(f"{name}.bias", np.zeros(features)),
        ]
        return self.node("Gemm", name, [x, *weights], features, transB=1)

    def dense(
        self,
        x: str,
        name: str,
        inputs: int,
        features: int,
        *,
        deviation: float,
        uniform: bool = False,
        bias: float = 0.0,
    ) -> str:
        """Fully connected layer along the last axis: MatMul and Add, with weights (input, output).

        The weights have standard deviation ``deviation``, normal or ``uniform``; the biases are
        normal with deviation ``bias``.
        """
        weight = self.draw(f"{name}.weight", (inputs, features), deviation, uniform=uniform)
        product = self.node("MatMul", f"{name}.product", [x, weight], self._channels[x])
        return self.node("Add", name, [product, self.draw(f"{name}.bias", (features,), bias)], self._channels[x])

    def classifier(self, logits: str, *, auxiliary: str | None = None, weight: float = 0.0) -> Network:
        """Finish the network, with these logits as output and mean softmax cross-entropy as loss.

        The cross-entropy of ``auxiliary`` logits, times ``weight``, is added to the loss.
        """
        losses = [(logits, "loss")] if auxiliary is None else [(logits, "loss.main"), (auxiliary, "loss.auxiliary")]
        for values, name in losses:
            self.node("SoftmaxCrossEntropyLoss", name, [values, self.label], 1, reduction="mean")
        if auxiliary is not None:
            self.node("Mul", "loss.weighted", ["loss.auxiliary", self.scalar("loss.weight", weight)], 1)
            self.node("Add", "loss", ["loss.main", "loss.weighted"], 1)
        label = helper.make_tensor_value_info(self.label, TensorProto.INT64, ["N"])
        model = self._model([self._input, label], {logits: ["N", self._channels[logits]], "loss": []})
        return Network(model, name=self.name, input=self.image, output=logits, label=self.label, loss="loss")

    def regressor(self, output: str, *shape: int) -> Network:
        """Finish the network, with this output and its mean squared error as loss.

        Parameters
        ----------
        output : str
        *shape : int
            Sizes of the output's axes after the batch.
        """
        model = self._model([self._input], {output: ["N", *shape]})
        return Network(model, name=self.name, input=self.image, output=output).with_squared_error([output])

    def _model(self, inputs: list, outputs: dict[str, list]) -> ModelProto:
        given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
        model = helper.make_model(
            helper.make_graph(self._nodes, self.name, inputs, given),
            opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="d5suite",
        )  # fmt: skip
        model.graph.initializer.extend(self._initializers)  # `make_graph` would copy them again
        return model


def _even_windows(given: int, size: int) -> tuple[int, int] | None:
    """Return kernel and stride of ``size`` equal windows over ``given`` pixels; None if unequal."""
    starts = [i * given // size for i in range(size)]
    kernels = {-(-(i + 1) * given // size) - start for i, start in enumerate(starts)}
    strides = {after - before for before, after in itertools.pairwise(starts)}
    return (kernels.pop(), strides.pop()) if len(kernels) == len(strides) == 1 and given >= size else None
