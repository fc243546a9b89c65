"""Two operators and an epoch of LeNet-5 in plain Keras, as its users write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.handwritten import Epoch, OperatorCall
from d5suite.backends.keras.baseline import native_sgd, place, steps, wait
from d5suite.network import Network
from d5suite.optimizers.settings import SGD


def operator_call(name: str, arrays: Sequence[np.ndarray], *, mode: str, device: str) -> OperatorCall:
    """See `benchmarks.handwritten`; compiled as Keras compiles a model's prediction."""
    with keras.device(place(mode, device)):
        # PyTorch compiles nothing: call a layer and a function, as in a Keras user's own loop.
        call: Any = {"Relu": layers.ReLU() if mode == "torch" else ops.relu, "Gemm": ops.matmul}[name]
        arguments = tuple(ops.convert_to_tensor(array) for array in arrays)
    if mode == "tensorflow":
        import tensorflow as tf

        native = call
        call = tf.function(lambda *inputs: native(*inputs), autograph=False)
    elif mode == "jax":
        import jax

        call = jax.jit(call)
    return OperatorCall(call, arguments, lambda last: wait(mode, device, last), ops.convert_to_numpy)


def lenet5(classes: int, data_format: str) -> Any:
    """Build LeNet-5 with tanh and average pooling, with layers named as the neutral parameters."""
    image = keras.Input((32, 32, 1) if data_format == "channels_last" else (1, 32, 32))
    x = layers.Conv2D(6, 5, data_format=data_format, activation="tanh", name="c1")(image)
    x = layers.AveragePooling2D(2, data_format=data_format)(x)
    x = layers.Conv2D(16, 5, data_format=data_format, activation="tanh", name="c3")(x)
    x = layers.AveragePooling2D(2, data_format=data_format)(x)
    x = layers.Conv2D(120, 5, data_format=data_format, activation="tanh", name="c5")(x)
    x = layers.Dense(84, activation="tanh", name="f6")(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(classes, name="output")(x))


def lenet5_epoch(network: Network, optimizer: SGD, *, mode: str, device: str) -> Epoch:
    """See `benchmarks.handwritten`; runs an epoch as ``fit`` does, without callbacks."""
    weights = network.initializers
    data_format = "channels_first" if mode == "torch" else "channels_last"
    with keras.device(place(mode, device)):
        model = lenet5(len(weights["output.bias"]), data_format)
        for name in ("c1", "c3", "c5", "f6", "output"):
            weight = weights[f"{name}.weight"]
            kernel = weight.transpose((2, 3, 1, 0) if weight.ndim == 4 else (1, 0))
            model.get_layer(name).set_weights([kernel, weights[f"{name}.bias"]])
        model.compile(native_sgd(optimizer), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)
        model.make_train_function()

    def epoch(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        means = []
        with keras.device(place(mode, device)):
            model.reset_metrics()
            run, give_back = steps(model, mode)
            for images, labels in batches:
                stored = images if data_format == "channels_first" else images.transpose(0, 2, 3, 1)
                # Keras takes nearly twice as long to convert a view of other strides, and int64.
                batch = (
                    ops.convert_to_tensor(np.ascontiguousarray(stored)),
                    ops.convert_to_tensor(labels.astype(np.int32)),
                )
                means.append(run(batch)["loss"])
            give_back()
        # Keras's loss is the mean over all steps so far.
        sums = [count * float(mean) for count, mean in enumerate(means, start=1)]
        return [now - before for before, now in zip([0.0, *sums], sums, strict=False)]

    return epoch
