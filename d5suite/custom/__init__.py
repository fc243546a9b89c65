"""Custom operators: one C++ source or two Python functions, run as a native operator of every framework.

`CustomOperator` describes one; `build` compiles C++ and CUDA sources, once for each content. What a framework needs
around the source is in that backend's ``custom`` module. Imports ONNX, NumPy and `d5suite.errors`.
"""

from d5suite.custom.build import Glue, compile_library
from d5suite.custom.description import CustomOperator, load

__all__ = ["CustomOperator", "Glue", "compile_library", "load"]
