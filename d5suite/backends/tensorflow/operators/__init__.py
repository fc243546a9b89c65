"""ONNX operators as native TensorFlow code, one file per family, and Level 0 in TensorFlow.

A factory has the name of its operator, such as ``conv_transpose``, or is an entry in the dict
``OPERATORS`` of its family's module.

A factory ``(node, context)`` resolves a node's attributes once and returns a callable on native
tensors. The callable returns the node's first output or, if the node names others, a tuple of all
with None for those without a name.

Every tensor has a storage layout: the order in which its ONNX axes are stored. Images are kept in
the layout that the device's kernels are fastest in (usually N, H, W, C). Each factory records the
layout of its output; data move only where a kernel needs another order.
"""

from d5suite.backends.tensorflow.operators.context import Context
from d5suite.backends.tensorflow.operators.operator import Operator
from d5suite.backends.tensorflow.operators.table import OPERATORS

__all__ = ["OPERATORS", "Context", "Operator"]
