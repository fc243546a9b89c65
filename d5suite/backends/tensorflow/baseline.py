"""A training step of ResNet-50 v1.5 written by hand in TensorFlow, to compare with the adapter's.

Variables, ``tf.nn`` layers, a gradient tape and one ``tf.function``, channels last, weights in
TensorFlow's own layouts. It shares no code with the adapter. Imports TensorFlow, NumPy and
`d5suite.levels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.levels.baseline import Baseline
from d5suite.network import Network
from d5suite.optimizers.settings import SGD

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of the four stages (He et al., CVPR 2016, table 1)."""

EPSILON = float(np.float32(1e-5))
"""1e-5 rounded to float32, as ONNX attributes are, so that float64 compares exactly."""


class NativeSGD(tf.Module):
    """SGD by TensorFlow's momentum kernel, or by assignments; adds weight decay to the gradient."""

    def __init__(self, variables: Sequence[Any], settings: SGD, *, kernel: bool = True) -> None:
        super().__init__()
        self.trained, self.settings, self.kernel = variables, settings, kernel
        self.velocities = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables if settings.momentum]

    def apply(self, gradients: Sequence[Any]) -> None:
        """Update every variable once."""
        rate, momentum, decay = self.settings.learning_rate, self.settings.momentum, self.settings.weight_decay
        for i, (variable, gradient) in enumerate(zip(self.trained, gradients, strict=True)):
            if decay:
                gradient = gradient + decay * variable
            if momentum and not self.kernel:
                velocity = self.velocities[i]
                velocity.assign(momentum * velocity + gradient)
                variable.assign_sub(rate * (gradient + momentum * velocity if self.settings.nesterov else velocity))
            elif momentum:
                tf.raw_ops.ResourceApplyMomentum(
                    var=variable.handle, accum=self.velocities[i].handle, lr=tf.constant(rate, variable.dtype),
                    grad=gradient, momentum=tf.constant(momentum, variable.dtype), use_nesterov=self.settings.nesterov,
                )  # fmt: skip
            else:
                variable.assign_sub(rate * gradient)


def place(device: str) -> str:
    """Return TensorFlow's name of a device."""
    return "/CPU:0" if device == "cpu" else "/GPU:0"


def synchronize(device: str) -> None:
    """Wait for the device; on the CPU, TensorFlow's functions return when they are done."""
    if device != "cpu":
        tf.test.experimental.sync_devices()


class BatchNorm(tf.Module):
    """Batch normalization with TensorFlow's running statistics (unbiased variance)."""

    def __init__(self, scale: np.ndarray, offset: np.ndarray) -> None:
        super().__init__()
        self.scale, self.offset = tf.Variable(scale), tf.Variable(offset)
        self.mean = tf.Variable(np.zeros_like(scale), trainable=False)
        self.variance = tf.Variable(np.ones_like(scale), trainable=False)

    def __call__(self, x: Any) -> Any:
        if x.dtype == tf.float64:  # the fused kernel takes float32 and shorter only
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.variance.assign(0.9 * self.variance + 0.1 * variance)
            return tf.nn.batch_normalization(x, mean, variance, self.offset, self.scale, EPSILON)
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            x, self.scale, self.offset, self.mean, self.variance, EPSILON, exponential_avg_factor=0.1
        )
        self.mean.assign(mean)
        self.variance.assign(variance)
        return y


class Convolution(tf.Module):
    """A convolution without bias, followed by batch normalization."""

    def __init__(self, weights: dict[str, np.ndarray], convolution: str, normalisation: str, stride: int = 1) -> None:
        super().__init__()
        weight = weights[f"{convolution}.weight"]
        self.kernel = tf.Variable(np.ascontiguousarray(weight.transpose(2, 3, 1, 0)))
        self.stride = stride
        margin = weight.shape[2] // 2
        # As in TensorFlow's own ResNets: at stride 2, "SAME" would pad one side more.
        self.margins = [[0, 0], [margin, margin], [margin, margin], [0, 0]] if margin and stride > 1 else None
        self.norm = BatchNorm(weights[f"{normalisation}.weight"], weights[f"{normalisation}.bias"])

    def __call__(self, x: Any) -> Any:
        padding = "SAME"
        if self.margins:
            x, padding = tf.pad(x, self.margins), "VALID"
        return self.norm(tf.nn.conv2d(x, tf.cast(self.kernel, x.dtype), self.stride, padding))


class Bottleneck(tf.Module):
    """1×1, 3×3 (with the stride) and 1×1 convolutions beside a shortcut."""

    def __init__(self, weights: dict[str, np.ndarray], name: str, stride: int) -> None:
        super().__init__()
        self.reduce = Convolution(weights, f"{name}.conv1", f"{name}.bn1")
        self.middle = Convolution(weights, f"{name}.conv2", f"{name}.bn2", stride)
        self.expand = Convolution(weights, f"{name}.conv3", f"{name}.bn3")
        self.shortcut = None
        if f"{name}.downsample.0.weight" in weights:
            self.shortcut = Convolution(weights, f"{name}.downsample.0", f"{name}.downsample.1", stride)

    def __call__(self, x: Any) -> Any:
        y = tf.nn.relu(self.reduce(x))
        y = tf.nn.relu(self.middle(y))
        return tf.nn.relu(self.expand(y) + (self.shortcut(x) if self.shortcut else x))


class ResNet50(tf.Module):
    """ResNet-50 v1.5 on images N, H, W, C."""

    def __init__(self, weights: dict[str, np.ndarray], *, xla: bool) -> None:
        super().__init__()
        self.xla = xla
        self.stem = Convolution(weights, "conv1", "bn1", 2)
        self.blocks = [
            Bottleneck(weights, f"layer{stage}.{index}", stride if index == 0 else 1)
            for stage, (_, repeats, stride) in enumerate(STAGES, start=1)
            for index in range(repeats)
        ]
        self.dense = tf.Variable(np.ascontiguousarray(weights["fc.weight"].T))
        self.bias = tf.Variable(weights["fc.bias"])

    def __call__(self, x: Any) -> Any:
        x = tf.nn.relu(self.stem(x))
        margins = [[0, 0], [1, 1], [1, 1], [0, 0]]
        if self.xla:  # XLA has no pooling with explicit padding
            x = tf.nn.max_pool2d(tf.pad(x, margins, constant_values=tf.cast(-math.inf, x.dtype)), 3, 2, "VALID")
        else:
            x = tf.nn.max_pool2d(x, 3, 2, margins)
        for block in self.blocks:
            x = block(x)
        x = tf.reduce_mean(x, [1, 2])
        return tf.nn.bias_add(tf.matmul(x, tf.cast(self.dense, x.dtype)), tf.cast(self.bias, x.dtype))

    def named(self) -> dict[str, tf.Variable]:
        """Return the trained variables by torchvision name."""
        names = {"fc.weight": self.dense, "fc.bias": self.bias}

        def add(layer: Convolution, convolution: str, normalisation: str) -> None:
            names[f"{convolution}.weight"] = layer.kernel
            names[f"{normalisation}.weight"], names[f"{normalisation}.bias"] = layer.norm.scale, layer.norm.offset

        add(self.stem, "conv1", "bn1")
        places = [f"layer{stage}.{i}" for stage, (_, repeats, _) in enumerate(STAGES, start=1) for i in range(repeats)]
        for place, block in zip(places, self.blocks, strict=True):
            add(block.reduce, f"{place}.conv1", f"{place}.bn1")
            add(block.middle, f"{place}.conv2", f"{place}.bn2")
            add(block.expand, f"{place}.conv3", f"{place}.bn3")
            if block.shortcut:
                add(block.shortcut, f"{place}.downsample.0", f"{place}.downsample.1")
        return names


def resnet50_training_step(
    network: Network,
    optimizer: SGD,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    mode: str,
    device: str,
    precision: str,
) -> Baseline:
    """Build the step on one fixed batch, starting from the network's initializers.

    Parameters
    ----------
    network : Network
        The zoo's ``resnet50``, which gives the initial weights.
    optimizer : SGD
    images : numpy.ndarray
        float32 (N, 3, H, W).
    labels : numpy.ndarray
        int64 (N,).
    mode, device, precision : str
        As for this backend's executor.

    Returns
    -------
    Baseline
    """
    array = np.float64 if precision == "fp64" else np.float32
    activation = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16, "fp64": tf.float64}[precision]
    with tf.device(place(device)):
        weights = {name: network.initializers[name].astype(array) for name in network.parameters}
        model = ResNet50(weights, xla=mode == "xla")
        variables = model.trainable_variables
        sgd = NativeSGD(variables, optimizer, kernel=mode != "stock")
        # In float16 the loss is scaled by as much as keeps the gradients finite.
        scale = tf.Variable(2.0**15 if precision == "fp16" else 1.0, trainable=False, dtype=tf.float32)
        streak = tf.Variable(0, trainable=False)
        batch = tf.constant(np.ascontiguousarray(images.transpose(0, 2, 3, 1)), activation)
        classes = tf.constant(labels)

    def grow() -> None:
        doubled = streak.assign_add(1) == 2000
        scale.assign(tf.where(doubled, 2 * scale, scale))
        streak.assign(tf.where(doubled, 0, streak))

    def shrink() -> None:
        scale.assign(scale / 2)
        streak.assign(0)

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(x), array)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
            scaled = loss * scale if precision == "fp16" else loss
        gradients = tape.gradient(scaled, variables)
        if precision == "fp16":
            gradients = [gradient / scale for gradient in gradients]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
            tf.cond(finite, lambda: sgd.apply(gradients), lambda: None)
            tf.cond(finite, grow, shrink)
        else:
            sgd.apply(gradients)
        return loss

    if mode != "eager":
        train = tf.function(train, autograph=False, jit_compile=True if mode == "xla" else None)
    last: list[Any] = [None]

    def step() -> None:
        last[0] = train(batch, classes)

    def parameters() -> dict[str, np.ndarray]:
        stored = {name: variable.numpy() for name, variable in model.named().items()}
        order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}
        return {name: np.ascontiguousarray(value.transpose(order[value.ndim])) for name, value in stored.items()}

    return Baseline(
        step=step, synchronize=lambda: synchronize(device), loss=lambda: float(last[0]), parameters=parameters
    )
