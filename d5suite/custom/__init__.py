"""Custom operators: one C++ source or two Python functions, run as a native operator of every framework.

`d5suite.network.custom` describes one; `build` compiles C++ and CUDA sources, once for each content; `interface` is the
C interface for Python. What a framework needs around the source is in that backend's ``custom`` module. Imports
`d5suite.network` and `d5suite.errors`.
"""

from d5suite.custom.build import CompileError, Glue, compile_library, compile_operator, compiler_problem
from d5suite.network.custom import CustomOperator

__all__ = ["CompileError", "CustomOperator", "Glue", "compile_library", "compile_operator", "compiler_problem"]
