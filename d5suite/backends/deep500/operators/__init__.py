"""ONNX operators as deep500's NumPy operators, by family, and level 0 on them.

A factory has the name of its operator, such as ``conv_transpose``, or is an entry in the dict
``OPERATORS`` of its family's module.

A factory ``(node, context)`` reads a node's attributes once and returns a deep500 operator. Its
``forward`` takes the inputs that `operands` names; its ``backward`` returns their gradients. An
operator with several outputs returns a list: ONNX's outputs first and then, as in deep500's
BatchNormalization, the values that ``backward`` needs. deep500 0.2.0's own operator does the work
wherever it gives ONNX's result; a class or factory that replaces one says what is wrong there.
Imports the families beside it.
"""

from d5suite.backends.deep500.operators.context import Context, Factory, operands
from d5suite.backends.deep500.operators.elementwise import load_random_state, random_state, seed
from d5suite.backends.deep500.operators.operator import Operator
from d5suite.backends.deep500.operators.table import OPERATORS

__all__ = ["OPERATORS", "Context", "Factory", "Operator", "load_random_state", "operands", "random_state", "seed"]
