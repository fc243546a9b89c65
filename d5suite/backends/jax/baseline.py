"""A training step of ResNet-50 v1.5 written by hand in JAX, to compare with the adapter's.

Pure functions of nested dicts, one jitted step that donates its arguments, Optax, images N, H, W,
C. It shares no code with the adapter. Imports JAX, Optax, NumPy, `d5suite.errors` and
`d5suite.levels.baseline`.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from d5suite.errors import NetworkError
from d5suite.levels.baseline import Baseline

if TYPE_CHECKING:
    from d5suite.network import Network
    from d5suite.optimizers.settings import SGD

STAGE_SIZES = (3, 4, 6, 3)

MOMENTUM = 0.9

EPSILON = float(np.float32(1e-5))
"""BatchNormalization's 1e-5 as the float32 of an ONNX file, so that both steps agree in float64."""

Tree = dict[str, Any]


def native_sgd(settings: SGD) -> optax.GradientTransformation:
    """Return Optax's SGD."""
    return optax.chain(
        optax.add_decayed_weights(settings.weight_decay),
        optax.sgd(settings.learning_rate, momentum=settings.momentum or None, nesterov=settings.nesterov),
    )


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, *, precision: Any) -> jax.Array:
    """Convolve (N, H, W, I) with (h, w, I, O) to (N, H', W', O), padded by half the kernel."""
    margin = kernel.shape[0] // 2
    return lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        [(margin, margin)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision,
    )


def batch_norm(x: jax.Array, p: Tree, s: Tree) -> tuple[jax.Array, Tree]:
    """Normalize by the batch in float32 or wider; return the updated running statistics too."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean, var = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    y = (wide - mean) * (lax.rsqrt(var + EPSILON) * p["scale"]) + p["bias"]
    moved = {"mean": MOMENTUM * s["mean"] + (1 - MOMENTUM) * mean, "var": MOMENTUM * s["var"] + (1 - MOMENTUM) * var}
    return y.astype(x.dtype), moved


def bottleneck(x: jax.Array, p: Tree, s: Tree, stride: int, *, precision: Any) -> tuple[jax.Array, Tree]:
    """1×1, 3×3 (strided, v1.5) and 1×1 convolution with a shortcut."""
    new: Tree = {}
    y, new["bn1"] = batch_norm(conv(x, p["conv1"], precision=precision), p["bn1"], s["bn1"])
    y, new["bn2"] = batch_norm(conv(jax.nn.relu(y), p["conv2"], stride, precision=precision), p["bn2"], s["bn2"])
    y, new["bn3"] = batch_norm(conv(jax.nn.relu(y), p["conv3"], precision=precision), p["bn3"], s["bn3"])
    if "shortcut" in p:
        x, new["norm"] = batch_norm(conv(x, p["shortcut"], stride, precision=precision), p["norm"], s["norm"])
    return jax.nn.relu(x + y), new


def resnet50(params: Tree, stats: Tree, x: jax.Array, *, precision: Any) -> tuple[jax.Array, Tree]:
    """Map (N, H, W, 3) to (N, classes); return the updated running statistics too."""
    new: Tree = {}
    x, new["bn1"] = batch_norm(conv(x, params["conv1"], 2, precision=precision), params["bn1"], stats["bn1"])
    x = lax.reduce_window(
        jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    )
    for stage, blocks in enumerate(STAGE_SIZES, start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            x, new[name] = bottleneck(x, params[name], stats[name], stride, precision=precision)
    x = x.mean((1, 2))
    return jnp.dot(x, params["fc"].astype(x.dtype), precision=precision) + params["bias"].astype(x.dtype), new


def _parameter_places() -> dict[str, tuple[str, ...]]:
    """Map each parameter name of a published checkpoint to its place in `resnet50`'s tree."""
    places: dict[str, tuple[str, ...]] = {"fc.weight": ("fc",), "fc.bias": ("bias",)}

    def add(inside: tuple[str, ...], prefix: str, conv: str, norm: str, own_conv: str, own_norm: str) -> None:
        places[f"{prefix}{conv}.weight"] = (*inside, own_conv)
        places[f"{prefix}{norm}.weight"] = (*inside, own_norm, "scale")
        places[f"{prefix}{norm}.bias"] = (*inside, own_norm, "bias")

    add((), "", "conv1", "bn1", "conv1", "bn1")
    for stage, blocks in enumerate(STAGE_SIZES, start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for i in (1, 2, 3):
                add((name,), f"{name}.", f"conv{i}", f"bn{i}", f"conv{i}", f"bn{i}")
            if block == 0:
                add((name,), f"{name}.", "downsample.0", "downsample.1", "shortcut", "norm")
    return places


def _put(tree: Tree, place: tuple[str, ...], value: Any) -> None:
    for key in place[:-1]:
        tree = tree.setdefault(key, {})
    tree[place[-1]] = value


def _get(tree: Tree, place: tuple[str, ...]) -> Any:
    return _get(tree[place[0]], place[1:]) if place else tree


INWARD = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
OUTWARD = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}
"""Axis orders from neutral layouts to JAX's usual ones, and back, by rank."""


def resnet50_trees(network: Network, dtype: Any) -> tuple[Tree, Tree]:
    """Return the initial parameters and running statistics of `resnet50` as NumPy arrays.

    Raises
    ------
    NetworkError
        If the network's parameters are not those of a ResNet-50.
    """
    places = _parameter_places()
    wrong = [*(places.keys() ^ {*network.parameters})]
    if wrong:
        raise NetworkError(f"not a ResNet-50 of the zoo: {', '.join(sorted(wrong)[:5])}", where=network.name)
    params: Tree = {}
    stats: Tree = {}
    for name, place in places.items():
        value = network.initializers[name]
        _put(params, place, np.array(value.transpose(INWARD[value.ndim]), dtype))
        if place[-1] == "scale":
            _put(stats, place[:-1], {"mean": np.zeros(len(value), dtype), "var": np.ones(len(value), dtype)})
    return params, stats


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
    """Build the training step.

    Parameters
    ----------
    network : Network
        A ResNet-50 of the zoo: gives the number of classes and the initial weights.
    optimizer : SGD
    images, labels : numpy.ndarray
        The batch: float32 (N, 3, H, W) and int64 (N,).
    mode, device, precision : str
        As for the backend.

    Raises
    ------
    NetworkError
        If the network's parameters are not those of a ResNet-50.
    """
    fp64 = precision == "fp64"
    dtype = np.float64 if fp64 else np.float32
    params, stats = resnet50_trees(network, dtype)
    native = jax.devices(device)[0]
    sgd = native_sgd(optimizer)
    # XLA's default for float32 is TF32 on GPUs.
    exact = lax.Precision.HIGHEST if device == "cuda" and precision not in ("bf16", "fp16") else None

    half = precision == "fp16"

    def loss_fn(params: Tree, stats: Tree, x: jax.Array, y: jax.Array, scale: Any) -> tuple[jax.Array, Any]:
        logits, stats = resnet50(params, stats, x, precision=exact)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(dtype), y)
        loss = losses.mean()
        return loss * scale if half else loss, (loss, stats)

    def train_step(
        params: Tree, stats: Tree, state: Any, x: jax.Array, y: jax.Array, scale: Any, kept: Any
    ) -> tuple[Any, ...]:
        (_, (loss, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, x, y, scale)
        if half:
            grads = jax.tree.map(lambda g: g / scale, grads)
        updates, moved = sgd.update(grads, state, params)
        updated = optax.apply_updates(params, updates)
        if half:  # halve the loss scale if a gradient is not finite; double it after 2000 updates
            finite = jnp.isfinite(optax.global_norm(grads))
            updated, moved = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (updated, moved), (params, state)
            )
            kept = jnp.where(finite, kept + 1, 0)
            scale = jnp.where(finite, jnp.where(kept == 2000, 2 * scale, scale), scale / 2)
            kept = jnp.where(kept == 2000, 0, kept)
        return updated, stats, moved, loss, scale, kept

    if mode != "eager":
        train_step = partial(jax.jit, donate_argnums=() if mode == "stock" else (0, 1, 2))(train_step)

    def scope() -> contextlib.AbstractContextManager[Any]:
        if not fp64:
            return contextlib.nullcontext()
        if hasattr(jax, "enable_x64"):
            return jax.enable_x64(True)
        return jax.experimental.enable_x64()

    narrow = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
    with scope():
        params, stats = jax.device_put((params, stats), native)
        state = jax.device_put(sgd.init(params), native)
        x = jnp.asarray(images.transpose(0, 2, 3, 1), narrow.get(precision, dtype))
        x, y = jax.device_put((x, jnp.asarray(labels.astype(np.int32))), native)
        scale, kept = jax.device_put((np.float32(2**15), np.int32(0)), native) if half else (None, None)
    last: jax.Array = x

    def step() -> None:
        nonlocal params, stats, state, last, scale, kept
        with scope():
            params, stats, state, last, scale, kept = train_step(params, stats, state, x, y, scale, kept)

    def parameters() -> dict[str, np.ndarray]:
        stored = {name: np.asarray(_get(params, place)) for name, place in _parameter_places().items()}
        return {name: np.array(value.transpose(OUTWARD[value.ndim]), order="C") for name, value in stored.items()}

    def synchronize() -> None:
        jax.block_until_ready((last, params, stats) if mode == "eager" else last)

    return Baseline(step=step, synchronize=synchronize, loss=lambda: float(last), parameters=parameters)
