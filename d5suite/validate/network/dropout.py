"""What Dropout means, tested without equal draws: its masks are read off gradients.

No two frameworks draw the same values, so a network with Dropout is proved as its twin without it.
Here a small network shows each mask: of ``Dropout(image + shift) * scale``, the gradient of
``scale`` is what Dropout let through, and the gradient of ``shift`` is the backward pass's mask.

Imports the contract, NumPy and ONNX; no framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from d5suite.levels.network import Arrays, Executor
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.graph_edits import copy_of
from d5suite.validate.check import Check
from d5suite.validate.norms import UNIT_ROUNDOFF

SHAPE = (16, 3, 8, 8)
"""Images, channels, rows and columns of a batch."""

SCALE = 2.0**-24
"""Initial ``scale``: so small that the two scores are equal, and the gradients known, to 1e-5."""

KNOWN = 1e-4
"""Accepted relative error of a kept value, in addition to roundings of its type."""

DEVIATIONS = 8.0
"""Accepted standard deviations of a share. A right Dropout exceeds them once in 10^15; neighbouring
pairs share values, which makes the deviation up to 1.5 times larger."""


def masking_network(ratio: float) -> Network:
    """Build the network whose gradients show the masks of a Dropout with this ratio."""
    b = Builder("masking", image_size=SHAPE[-1])
    x = b.node("Add", "shifted", [b.image, b.parameter("shift", np.zeros(SHAPE))], SHAPE[1])
    x = b.node("Mul", "scaled", [b.dropout(x, "drop", ratio=ratio), b.parameter("scale", np.full(SHAPE, SCALE))], 3)
    signs = _signs()
    weight, bias = b.parameter("weight", np.stack([signs, -signs])), b.parameter("bias", np.zeros(2))
    x = b.node("Gemm", "scores", [b.flatten(x, "flat", size=SHAPE[-1]), weight, bias], 2, transB=1)
    model = copy_of(b.classifier(x).model)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = SHAPE[0]
    return Network(model, name="masking", input=b.image, output=x, label=b.label, loss="loss")


def masking_batch() -> dict[str, np.ndarray]:
    """Return the batch of `masking_network`: images between 1 and 2, and labels."""
    generator = np.random.default_rng(0xD5)
    images = (1 + generator.random(SHAPE)).astype(np.float32)
    return {"image": images, "label": np.arange(SHAPE[0]) % 2}


def _signs() -> np.ndarray:
    return np.random.default_rng(0xD0).choice([-1.0, 1.0], SHAPE[1] * SHAPE[2] * SHAPE[3])


class Masks(NamedTuple):
    """What Dropout did in several calls.

    Attributes
    ----------
    passed, returned : numpy.ndarray
        (calls, N, C, H, W): the values that it let through, and its factor in the backward pass.
    """

    passed: np.ndarray
    returned: np.ndarray


def masks_of(gradients: Sequence[Arrays]) -> Masks:
    """Read the masks off gradients of `masking_network`'s ``scale`` and ``shift``."""
    heads = np.where(np.arange(SHAPE[0]) % 2, 1.0, -1.0)[:, None] * _signs() / SHAPE[0]
    heads = heads.reshape(SHAPE)
    passed, returned = (
        np.stack([each[name].astype(np.float64) / heads for each in gradients]) for name in ("scale", "shift")
    )
    return Masks(passed, returned / SCALE)


def masks_of_passes(executor: Executor, calls: int) -> Masks:
    """Run `masking_network` forward and backward this many times, and read the masks."""
    feed = executor.feed(masking_batch())
    names = ("scale", "shift")
    found: list[Arrays] = []
    for _ in range(calls):
        native = executor.forward_backward(feed)
        found.append(executor.fetch({name: native[name] for name in names}))
    return masks_of(found)


def check_masks(name: str, found: Masks, ratio: float, precision: str) -> list[Check]:
    """Check the masks of several calls against Dropout's meaning.

    Parameters
    ----------
    name : str
        What made the calls, in words.
    found : Masks
    ratio : float
        The fraction that is dropped.
    precision : str
        Precision of the calls.
    """
    images, kept = masking_batch()["image"], found.passed != 0
    calls = len(kept)
    limit = KNOWN + 4 * UNIT_ROUNDOFF[precision]
    factors = np.where(kept, found.passed / images, 1 / (1 - ratio))
    scaling = float(np.abs(factors * (1 - ratio) - 1).max())
    backward = float(np.abs(found.returned * (1 - ratio) - kept).max())
    same = ratio**2 + (1 - ratio) ** 2
    checks = [
        _share(f"share of zeros of Dropout, {name}", 1 - kept.mean(), ratio, kept.size),
        Check(f"kept values of Dropout over x / (1 - {ratio:g}), {name}", scaling, limit),
        Check(f"mask of Dropout's gradient vs its forward pass, {name}", backward, limit),
        Check(f"masks of Dropout that come again within {calls} calls, {name}",
              float(calls - len({each.tobytes() for each in kept})), 0.0),
    ]  # fmt: skip
    for axis, what in enumerate(("calls", "images", "channels", "rows", "columns")):
        one, other = np.take(kept, range(1, kept.shape[axis]), axis), np.take(kept, range(kept.shape[axis] - 1), axis)
        if one.size:
            agree = float((one == other).mean())
            checks.append(_share(f"agreement of Dropout's masks of neighbouring {what}, {name}", agree, same, one.size))
    return checks


def _share(name: str, found: float, expected: float, draws: int) -> Check:
    """Compare a share of draws with its expectation."""
    deviation = np.sqrt(expected * (1 - expected) / draws)
    return Check(name, abs(found - expected), DEVIATIONS * float(deviation), f"{found:.4g}, {expected:.4g} expected")
