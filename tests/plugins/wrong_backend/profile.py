"""PyTorch's layer times, with a mistake of the mode."""

from dataclasses import replace
from typing import Any

from d5suite.backends.torch import profile as right
from d5suite.levels.profile import Profile


def profile(executor: Any, *arguments: Any) -> Profile:
    found = right.profile(executor, *arguments)
    first, *others = found.layers
    if executor.mode == "misnamed":
        return replace(found, layers=(replace(first, nodes=("conv_of_another_network",)), *others))
    if executor.mode == "negative":
        return replace(found, layers=(replace(first, seconds=-1e-3), *others))
    return found
