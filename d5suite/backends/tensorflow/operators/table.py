"""The operators of all families on TensorFlow, by ONNX name.

Imports the families beside it.
"""

from d5suite.backends.tensorflow.operators.context import Factory
from d5suite.levels.operator import operator_table

OPERATORS: dict[str, Factory] = operator_table("d5suite.backends.tensorflow.operators")
