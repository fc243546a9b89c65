"""Standard networks, one file per family; `build` builds them by name.

May import `d5suite.network` and `d5suite.errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from d5suite.errors import NetworkError
from d5suite.network.model import Network

_FAMILIES = (
    "lenet", "alexnet", "vgg", "googlenet", "inception", "resnet", "densenet", "mobilenet", "squeezenet", "shufflenet",
    "regnet", "efficientnet", "convnext", "vit",
)  # fmt: skip
"""The modules of this package, in the order of their networks."""

NETWORKS: dict[str, Callable[..., Network]] = {
    name: write for family in _FAMILIES for name, write in import_module(f"{__name__}.{family}").NETWORKS.items()
}
"""By name: a function ``(*, classes, image_size, seed) -> Network``."""


def name_in(recipe: str) -> str | None:
    """Return the network whose name, or else whose family's name, a recipe's name ends with.

    ``imagenet_resnet50`` ends with ``resnet50``, and ``digits_lenet`` with the family of
    ``lenet5``. None if there is no such network, or the family has several.
    """
    exact = max((name for name in NETWORKS if recipe.endswith(name)), key=len, default=None)
    family = [name for name in NETWORKS if recipe.endswith(f"_{name.rstrip('0123456789')}")]
    return exact or (family[0] if len(family) == 1 else None)


def build(name: str, *, classes: int = 1000, image_size: int = 224, seed: int = 0) -> Network:
    """Build a network of the zoo.

    Parameters
    ----------
    name : str
        A key of `NETWORKS`, such as ``"resnet50"``.
    classes : int
        Width of the output.
    image_size : int
        Height and width of the input in pixels.
    seed : int
        Seed of the initial weights.

    Raises
    ------
    NetworkError
        If the zoo has no such network, or it cannot take images of this size.
    """
    if name not in NETWORKS:
        raise NetworkError(
            f"the zoo has no network {name!r}", hint=f"It has: {', '.join(sorted(NETWORKS))}; or give an .onnx file."
        )
    return NETWORKS[name](classes=classes, image_size=image_size, seed=seed)
