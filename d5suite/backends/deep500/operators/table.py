"""The operators of all families on deep500, by ONNX name. Imports the families beside it."""

from d5suite.backends.deep500.operators.context import Factory
from d5suite.levels.operator import operator_table

OPERATORS: dict[str, Factory] = operator_table("d5suite.backends.deep500.operators")
