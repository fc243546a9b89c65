"""A training step of ResNet-50 v1.5 written by hand in Keras, to compare with the adapter's.

A functional model of layers, ``compile``, and the train function that ``fit`` calls for every
batch. It shares no code with the adapter. (`keras.applications.ResNet50` is another network: v1,
with biased convolutions.) Imports Keras, its backend late, NumPy and `d5suite.levels`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.errors import NetworkError
from d5suite.levels.baseline import Baseline
from d5suite.network import Network
from d5suite.optimizers.settings import SGD

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and stride of the four stages (He et al., CVPR 2016, table 1)."""

EPSILON = float(np.float32(1e-5))
"""1e-5 rounded to float32, as ONNX attributes are, so that float64 compares exactly."""

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16", "fp64": "float64"}


def native_sgd(settings: SGD) -> Any:
    """Return Keras's optimizer with these settings."""
    return coupled_sgd(
        settings.weight_decay,
        learning_rate=settings.learning_rate,
        momentum=float(settings.momentum),
        nesterov=settings.nesterov,
    )


def place(mode: str, device: str) -> str:
    """Return Keras's name of a device."""
    return "gpu:0" if device == "cuda" else "cpu" if mode == "torch" else "cpu:0"


def wait(mode: str, device: str, last: Any) -> None:
    """Wait for a result, and on a GPU for everything before it."""
    if mode == "jax":
        import jax

        jax.block_until_ready(last)
    elif device == "cuda" and mode == "torch":
        import torch

        torch.cuda.synchronize()
    elif device == "cuda":
        import tensorflow as tf

        tf.test.experimental.sync_devices()


def coupled_sgd(decay: float, **settings: Any) -> Any:
    """Return Keras's SGD with weight decay in the gradient, not in the loss."""
    native = type(keras.optimizers.SGD())  # on PyTorch, a subclass that updates all variables at once

    class CoupledSGD(native):  # type: ignore[misc, valid-type]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            variables = self._trainable_variables if trainable_variables is None else trainable_variables
            return super().apply([g + decay * v for g, v in zip(grads, variables, strict=True)], trainable_variables)

    return (CoupledSGD if decay else native)(**settings)


def resnet50(image_size: int, classes: int, data_format: str, dtype: str) -> Any:
    """Build ResNet-50 v1.5: each block's 3×3 convolution has the stride."""
    axis = -1 if data_format == "channels_last" else 1

    def convolution(x: Any, name: str, norm: str, filters: int, kernel: int, stride: int = 1) -> Any:
        padding = "same" if stride == 1 else "valid"
        if stride > 1 and kernel > 1:
            x = layers.ZeroPadding2D(kernel // 2, data_format=data_format)(x)
        x = layers.Conv2D(
            filters, kernel, stride, padding, data_format, use_bias=False, kernel_initializer="zeros", name=name
        )(x)
        return layers.BatchNormalization(axis, momentum=0.9, epsilon=EPSILON, name=norm)(x)

    def bottleneck(x: Any, name: str, width: int, stride: int, *, first: bool) -> Any:
        y = layers.ReLU()(convolution(x, f"{name}_conv1", f"{name}_bn1", width, 1))
        y = layers.ReLU()(convolution(y, f"{name}_conv2", f"{name}_bn2", width, 3, stride))
        y = convolution(y, f"{name}_conv3", f"{name}_bn3", 4 * width, 1)
        if first:
            x = convolution(x, f"{name}_downsample_0", f"{name}_downsample_1", 4 * width, 1, stride)
        return layers.ReLU()(layers.Add()([y, x]))

    shape = (image_size, image_size, 3) if axis == -1 else (3, image_size, image_size)
    image = keras.Input(shape, dtype=dtype)
    x = layers.ReLU()(convolution(image, "conv1", "bn1", 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, data_format=data_format)(layers.ZeroPadding2D(1, data_format=data_format)(x))
    for stage, (width, repeats, stride) in enumerate(STAGES, start=1):
        for block in range(repeats):
            x = bottleneck(x, f"layer{stage}_{block}", width, stride if block == 0 else 1, first=block == 0)
    x = layers.Dense(classes, kernel_initializer="zeros", name="fc")(layers.GlobalAveragePooling2D(data_format)(x))
    if dtype in ("bfloat16", "float16"):
        x = layers.Activation("linear", dtype="float32")(x)
    return keras.Model(image, x)


def variables_by_name(model: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return variables by torchvision name, each with the transposition to ONNX's layout."""
    found: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for layer in model.layers:
        base, *rest = layer.name.split("_")
        name = ".".join([base, *rest])
        if isinstance(layer, layers.Conv2D):
            found[f"{name}.weight"] = layer.kernel, (3, 2, 0, 1)
        elif isinstance(layer, layers.Dense):
            found[f"{name}.weight"], found[f"{name}.bias"] = (layer.kernel, (1, 0)), (layer.bias, (0,))
        elif isinstance(layer, layers.BatchNormalization):
            found[f"{name}.weight"], found[f"{name}.bias"] = (layer.gamma, (0,)), (layer.beta, (0,))
            found[f"{name}.running_mean"] = layer.moving_mean, (0,)
            found[f"{name}.running_var"] = layer.moving_variance, (0,)
    return found


@contextlib.contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """Within the context, set Keras's global types for a precision."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64" if precision == "fp64" else "float32")
    keras.config.set_dtype_policy(POLICIES[precision])
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


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
        As for this backend's executor. On PyTorch and JAX, Keras computes part of ``fp64`` in
        float32.

    Raises
    ------
    NetworkError
        If the network's parameters are not those of a ResNet-50.
    """
    weights = {name: network.initializers[name] for name in (*network.parameters, *network.statistics)}
    if "fc.bias" not in weights:
        raise NetworkError("not a ResNet-50 of the zoo: it has no fc.bias", where=network.name)
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}[precision]
    data_format = "channels_first" if mode == "torch" else "channels_last"
    device_name = place(mode, device)

    def scope() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(keras.device(device_name))
        if mode == "jax" and precision == "fp64":
            import jax

            stack.enter_context(jax.enable_x64(True))
        stack.enter_context(default_dtype(precision))
        return stack

    with scope():
        model = resnet50(images.shape[-1], len(weights["fc.bias"]), data_format, dtype)
        named = variables_by_name(model)
        wrong = sorted(set(named) ^ set(weights))
        if wrong:
            raise NetworkError(f"not a ResNet-50 of the zoo: {', '.join(wrong[:5])}", where=network.name)
        for name, (variable, order) in named.items():
            variable.assign(weights[name].transpose(np.argsort(order)))
        model.compile(native_sgd(optimizer), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)  # in fp16, this is Keras's wrapper that scales the loss
        model.make_train_function()
        stored = images if data_format == "channels_first" else images.transpose(0, 2, 3, 1)
        batch = (
            ops.convert_to_tensor(np.array(stored, order="C"), dtype=dtype),
            ops.convert_to_tensor(labels.astype(np.int32)),
        )
        run, give_back = steps(model, mode)
    means: list[Any] = [0.0, 0.0]
    count = 0

    def step() -> None:
        nonlocal count
        if precision == "fp64":
            with scope():
                logs = run(batch)
        else:
            with keras.device(device_name):
                logs = run(batch)
        means[:] = means[1], logs["loss"]
        count += 1

    def loss() -> float:
        # Keras's loss is the mean over all steps so far.
        before, now = (float(ops.convert_to_numpy(mean)) for mean in means)
        return count * now - (count - 1) * before

    def parameters() -> dict[str, np.ndarray]:
        give_back()
        return {
            name: np.array(ops.convert_to_numpy(ops.stop_gradient(variable)).transpose(order), order="C")
            for name, (variable, order) in named.items()
            if name in network.parameters
        }

    return Baseline(step=step, synchronize=lambda: wait(mode, device, means), loss=loss, parameters=parameters)


def steps(model: Any, mode: str) -> tuple[Callable[[Any], Any], Callable[[], None]]:
    """Return two functions: run a step as ``fit`` does, and copy its state to the variables."""
    if mode != "jax":
        return lambda batch: model.train_function([batch]), lambda: None
    groups = [
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    ]
    state = tuple([variable.value for variable in group] for group in groups)

    def run(batch: Any) -> Any:
        nonlocal state
        logs, state = model.train_function(state, iter([batch]))
        return logs

    def give_back() -> None:
        for group, values in zip(groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    return run, give_back
