"""Two operators and an epoch of LeNet-5 in plain JAX, as its users write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.handwritten import Epoch, OperatorCall
from d5suite.backends.jax.baseline import INWARD, Tree, native_sgd
from d5suite.network import Network
from d5suite.optimizers.settings import SGD


def operator_call(name: str, arrays: Sequence[np.ndarray], *, mode: str, device: str) -> OperatorCall:
    """See `benchmarks.handwritten`."""
    # XLA's default for float32 is TF32 on GPUs.
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST if device == "cuda" else None)
    call = {"Relu": jax.nn.relu, "Gemm": product}[name]
    return OperatorCall(
        call=call if mode == "eager" else jax.jit(call),
        arguments=tuple(jax.device_put(array, jax.devices(device)[0]) for array in arrays),
        synchronize=jax.block_until_ready,
        fetch=np.asarray,
    )


def lenet5(params: Tree, x: jax.Array, *, precision: Any) -> jax.Array:
    """LeNet-5 with tanh and average pooling: (N, 32, 32, 1) to (N, classes)."""

    def conv_tanh(x: jax.Array, name: str) -> jax.Array:
        y = lax.conv_general_dilated(
            x, params[name], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=precision
        )
        return jnp.tanh(y + params[f"{name}_bias"])

    def mean_pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4

    x = mean_pool(conv_tanh(x, "c1"))
    x = mean_pool(conv_tanh(x, "c3"))
    x = conv_tanh(x, "c5").reshape(len(x), -1)
    x = jnp.tanh(jnp.dot(x, params["f6"], precision=precision) + params["f6_bias"])
    return jnp.dot(x, params["output"], precision=precision) + params["output_bias"]


def lenet5_epoch(network: Network, optimizer: SGD, *, mode: str, device: str) -> Epoch:
    """See `benchmarks.handwritten`."""
    params: Tree = {}
    for name in ("c1", "c3", "c5", "f6", "output"):
        weight = network.initializers[f"{name}.weight"]
        params[name] = weight.transpose(INWARD[weight.ndim])
        params[f"{name}_bias"] = network.initializers[f"{name}.bias"]
    params = jax.device_put(params, jax.devices(device)[0])
    sgd = native_sgd(optimizer)
    state = jax.device_put(sgd.init(params), jax.devices(device)[0])
    exact = lax.Precision.HIGHEST if device == "cuda" else None

    def loss_fn(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = lenet5(params, x, precision=exact)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train_step(params: Tree, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = sgd.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    if mode != "eager":
        train_step = partial(jax.jit, donate_argnums=() if mode == "stock" else (0, 1))(train_step)

    def epoch(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        nonlocal params, state
        losses = []
        for images, labels in batches:
            params, state, loss = train_step(params, state, images.transpose(0, 2, 3, 1), labels.astype(np.int32))
            losses.append(loss)
        return [float(loss) for loss in losses]

    return epoch
