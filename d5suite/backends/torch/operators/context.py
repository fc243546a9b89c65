"""ONNX on PyTorch: what several families share.

Imports PyTorch, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from d5suite.errors import BackendError
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.elementwise import with_attributes

Function = Callable[..., torch.Tensor]
Factory = Callable[[Node, "Context"], Function]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format of images and convolution weights in mode ``channels_last``, by number of axes."""


@dataclass(kw_only=True)
class Context(NodeContext):
    """What a factory knows about its node and the network around it.

    Attributes
    ----------
    overwrites : mapping of str to int
        By output: the number of the input whose memory the node may reuse for it.
    device : str
        Device of tensors that a factory makes.
    dtype : torch.dtype
        Type of parameters and other constants.
    """

    overwrites: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def same(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Return the first input."""
    return x


def native(function: Function, *names: str, **renamed: str) -> Factory:
    """Return a factory for a function of a node's inputs as they are, and of some attributes.

    See `with_attributes` for the parameters.
    """
    return lambda node, context: with_attributes(function, node, *names, **renamed)


def in_float32(x: torch.Tensor) -> torch.Tensor:
    """Return 16-bit activations as float32; float64 stays."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def pad_argument(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return padding before and after, by axis, as `F.pad` takes it: last axis first."""
    return [n for pair in reversed(pairs) for n in pair]


def require_compiler() -> None:
    """Raise `BackendError` unless `torch.compile` will find a C++ compiler and Python's headers."""
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler) is None:
        raise BackendError(
            f"mode 'compile' needs a C++ compiler, and {compiler!r} is not found",
            hint="Install one (Debian: apt install g++), or name it in the environment variable CXX.",
        )
    if not header.exists():
        raise BackendError(
            "mode 'compile' needs Python's C headers", where=str(header), hint="Debian: apt install python3-dev."
        )
