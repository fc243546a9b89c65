"""ONNX operators as layers of a functional Keras model, one file per family, and Level 0 in Keras.

A factory has the name of its operator, such as ``conv_transpose``, or is an entry in the dict
``OPERATORS`` of its family's module.

A factory ``(node, context)`` calls the matching Keras layer on the symbolic tensors of the node's
inputs and returns the symbolic output, or a tuple where several are wanted. Where Keras has no such
layer, `Calculation` wraps a function of `keras.ops`; at level 0 the factory returns the function
itself.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are kept in
the data format that Keras's backend is fastest in. Each factory records the layout of its output;
data move only where a layer needs another order.
"""

from d5suite.backends.keras.operators.context import Calculation, Context, require_backend
from d5suite.backends.keras.operators.operator import Operator
from d5suite.backends.keras.operators.table import OPERATORS

__all__ = ["OPERATORS", "Calculation", "Context", "Operator", "require_backend"]
