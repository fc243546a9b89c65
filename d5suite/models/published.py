"""Steps that others have published, in a machine file: they calibrate what nobody can measure here.

Imports its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.models.machine import check_positive, read_content

KEY = "steps"
"""Where a machine file has them."""

MOST = 2**20


@dataclass(frozen=True)
class PublishedStep:
    """A training step on one device.

    Attributes
    ----------
    network : str
        Name of a network of the zoo.
    batch, image_size : int
    images_per_s : float
    source : str
    precision : str
    """

    network: str
    batch: int
    images_per_s: float
    source: str
    image_size: int = 224
    precision: str = "fp32"


def read_published(path: Path) -> list[PublishedStep]:
    """Return the published steps in a machine file; there may be none.

    Raises
    ------
    ConfigurationError
        If a step lacks a figure or a source, or has an unknown field.
    """
    content = read_content(path)
    entries = content.get(KEY, [])
    if not isinstance(entries, list):
        raise ConfigurationError("this must be a list of steps", where=f"{path}, {KEY}")
    return [_step(each, f"{path}, {KEY}.{number}") for number, each in enumerate(entries)]


def _step(entry: Any, where: str) -> PublishedStep:
    names = {each.name: each for each in fields(PublishedStep)}
    if not isinstance(entry, Mapping) or set(entry) - set(names):
        raise ConfigurationError(f"a step has {', '.join(names)}, and nothing else", where=where)
    for name, each in names.items():
        if name not in entry and each.default is MISSING:
            raise ConfigurationError(f"this step has no {name}", where=where)
    for name in ("network", "source", "precision"):
        if not isinstance(entry.get(name, "x"), str) or not entry.get(name, "x").strip():
            raise ConfigurationError("this must be text", where=f"{where}.{name}")
    check_positive(entry.get("images_per_s"), f"{where}.images_per_s")
    for name in ("batch", "image_size"):
        value = entry.get(name, 1)
        check_positive(value, f"{where}.{name}", kind=int)
        if value > MOST:
            raise ConfigurationError(f"{value} is too large", where=f"{where}.{name}")
    return PublishedStep(**entry)
