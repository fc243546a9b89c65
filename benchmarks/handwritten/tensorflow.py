"""Two operators and an epoch of LeNet-5 in plain TensorFlow, as its users write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.handwritten import Epoch, OperatorCall
from d5suite.backends.tensorflow.baseline import NativeSGD, place, synchronize
from d5suite.network import Network
from d5suite.optimizers.settings import SGD


def operator_call(name: str, arrays: Sequence[np.ndarray], *, mode: str, device: str) -> OperatorCall:
    """See `benchmarks.handwritten`."""
    calls: dict[str, Any] = {"Relu": lambda x: tf.nn.relu(x), "Gemm": lambda x, y: tf.matmul(x, y)}
    call = calls[name]
    if mode != "eager":
        call = tf.function(call, autograph=False, jit_compile=True if mode == "xla" else None)
    with tf.device(place(device)):
        arguments = tuple(tf.constant(array) for array in arrays)
    return OperatorCall(call, arguments, lambda _: synchronize(device), lambda output: np.asarray(output))


class LeNet5(tf.Module):
    """LeNet-5 with tanh and average pooling, on images N, 32, 32, 1."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        order = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
        self.weights = {
            name: tf.Variable(np.ascontiguousarray(value.transpose(order[value.ndim])))
            for name, value in weights.items()
        }

    def __call__(self, x: Any) -> Any:
        x = tf.nn.avg_pool2d(self.convolution(x, "c1"), 2, 2, "VALID")
        x = tf.nn.avg_pool2d(self.convolution(x, "c3"), 2, 2, "VALID")
        x = tf.reshape(self.convolution(x, "c5"), [-1, 120])
        return self.dense(tf.tanh(self.dense(x, "f6")), "output")

    def convolution(self, x: Any, name: str) -> Any:
        """Return tanh of a convolution with bias."""
        y = tf.nn.conv2d(x, self.weights[f"{name}.weight"], 1, "VALID")
        return tf.tanh(tf.nn.bias_add(y, self.weights[f"{name}.bias"]))

    def dense(self, x: Any, name: str) -> Any:
        """Return a matrix product plus bias."""
        return tf.nn.bias_add(tf.matmul(x, self.weights[f"{name}.weight"]), self.weights[f"{name}.bias"])


def lenet5_epoch(network: Network, optimizer: SGD, *, mode: str, device: str) -> Epoch:
    """See `benchmarks.handwritten`."""
    with tf.device(place(device)):
        model = LeNet5({name: network.initializers[name] for name in network.parameters})
        variables = model.trainable_variables
        sgd = NativeSGD(variables, optimizer, kernel=mode != "stock")

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        sgd.apply(tape.gradient(loss, variables))
        return loss

    if mode != "eager":
        train = tf.function(train, autograph=False, jit_compile=True if mode == "xla" else None)

    def epoch(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        losses = []
        with tf.device(place(device)):
            for images, labels in batches:
                losses.append(train(tf.constant(images.transpose(0, 2, 3, 1)), tf.constant(labels)))
        return [float(loss) for loss in losses]

    return epoch
