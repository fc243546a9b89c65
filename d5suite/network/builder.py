"""Write a `Network` layer by layer.

Every layer takes the name of its parameters, in the field's usual form (``layer1.0.conv1``), so that published weights
fit. Initial values depend only on the seed and the parameter's name. Imports ONNX and NumPy.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from d5suite.network.model import IR_VERSION, OPSET, Network


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
    """

    image = "image"
    label = "label"

    def __init__(self, name: str, *, seed: int = 0, image_size: int = 224, channels: int = 3) -> None:
        self.name = name
        self.seed = seed
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
        self._initializers.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add an initializer of its own dtype, such as int64 axes."""
        self._initializers.append(numpy_helper.from_array(value, name))
        return name

    def _normal(self, name: str, shape: tuple[int, ...], deviation: float) -> str:
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return self.parameter(name, generator.standard_normal(shape, dtype=np.float32) * np.float32(deviation))

    def conv(
        self,
        x: str,
        name: str,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
    ) -> str:
        """2-D convolution with He-normal weights: variance 2 / (kernel² · output channels / groups).

        He et al., "Delving deep into rectifiers" (ICCV 2015), the backward form that the published ResNets use.
        ``padding`` defaults to ``kernel // 2`` on every side.
        """
        inputs = self._channels[x]
        padding = kernel // 2 if padding is None else padding
        fan_out = kernel * kernel * channels // groups
        weights = [
            self._normal(f"{name}.weight", (channels, inputs // groups, kernel, kernel), float(np.sqrt(2.0 / fan_out)))
        ]
        if bias:
            weights.append(self.parameter(f"{name}.bias", np.zeros(channels)))
        return self.node(
            "Conv",
            name,
            [x, *weights],
            channels,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[padding] * 4,
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

    def tanh(self, x: str) -> str:
        """Hyperbolic tangent."""
        return self.node("Tanh", f"{x}.tanh", [x], self._channels[x])

    def average_pool(self, x: str, name: str, kernel: int, *, stride: int) -> str:
        """Mean over kernel × kernel windows without padding."""
        return self.node(
            "AveragePool", name, [x], self._channels[x], kernel_shape=[kernel, kernel], strides=[stride, stride]
        )

    def max_pool(self, x: str, name: str, kernel: int, *, stride: int, padding: int = 0) -> str:
        """Maximum over kernel × kernel windows."""
        return self.node(
            "MaxPool",
            name,
            [x],
            self._channels[x],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[padding] * 4,
        )

    def global_average_pool(self, x: str, name: str) -> str:
        """Mean over each channel's image: (N, C, H, W) to (N, C, 1, 1)."""
        return self.node("GlobalAveragePool", name, [x], self._channels[x])

    def add(self, x: str, y: str, name: str) -> str:
        """Element-wise sum."""
        return self.node("Add", name, [x, y], self._channels[x])

    def flatten(self, x: str, name: str) -> str:
        """(N, C, 1, 1) to (N, C)."""
        return self.node("Flatten", name, [x], self._channels[x], axis=1)

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

    def classifier(self, logits: str) -> Network:
        """Finish a network that ends in these logits, with mean softmax cross-entropy as its loss."""
        self.node("SoftmaxCrossEntropyLoss", "loss", [logits, self.label], 1, reduction="mean")
        graph = helper.make_graph(
            self._nodes,
            self.name,
            [self._input, helper.make_tensor_value_info(self.label, TensorProto.INT64, ["N"])],
            [
                helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["N", self._channels[logits]]),
                helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
            ],
            self._initializers,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="d5suite"
        )
        return Network(model, name=self.name, input=self.image, output=logits, label=self.label, loss="loss")
