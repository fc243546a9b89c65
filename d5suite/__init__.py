"""d5suite: one description of a deep-learning workload, measured natively on every framework.

Importing this package imports no framework; names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d5suite.backends import backend as backend
    from d5suite.cases.problem import Problem as Problem
    from d5suite.cases.problem import Problems as Problems
    from d5suite.cases.recipe import Recipe as Recipe
    from d5suite.network import Network as Network
    from d5suite.network.custom import CustomOperator as CustomOperator
    from d5suite.network.operation import Operation as Operation
    from d5suite.optimizers.settings import SGD as SGD

__version__ = "0.2.0"

_LAZY = {
    "CustomOperator": "d5suite.network.custom",
    "Network": "d5suite.network",
    "Operation": "d5suite.network.operation",
    "Problem": "d5suite.cases.problem",
    "Problems": "d5suite.cases.problem",
    "Recipe": "d5suite.cases.recipe",
    "SGD": "d5suite.optimizers.settings",
    "backend": "d5suite.backends",
}

__all__ = [
    "SGD",
    "CustomOperator",
    "Network",
    "Operation",
    "Problem",
    "Problems",
    "Recipe",
    "__version__",
    "backend",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'd5suite' has no attribute {name!r}")
