"""Custom operators: one C++ source or two Python functions, native in every framework.

`d5suite.network.custom` describes an operator; `build` compiles and caches C++ and CUDA sources;
`interface` is the C interface in Python. A backend's ``custom`` module holds the backend's glue
code. May import, from d5suite, `network`, `files` and `errors`.
"""

from d5suite.custom.build import (
    DEFINITIONS,
    CompileError,
    Glue,
    compile_library,
    compile_operator,
    compiler_problem,
)
from d5suite.network.custom import CustomOperator

__all__ = [
    "DEFINITIONS",
    "CompileError",
    "CustomOperator",
    "Glue",
    "compile_library",
    "compile_operator",
    "compiler_problem",
]
