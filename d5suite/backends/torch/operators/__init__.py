"""ONNX operators as native PyTorch calls, by family, and level 0 on PyTorch.

A factory has the name of its operator, such as ``conv_transpose``, or is an entry in the dict
``OPERATORS`` of its family's module.

A factory ``(node, context)`` reads a node's attributes once and returns a callable. The callable
takes the node's inputs in order, None for an omitted one, and returns the first output or, if
`Context.wanted` names more, a tuple of all. Inputs that the factory has read through
`Context.constant` are passed and ignored. Imports the families beside it.
"""

from d5suite.backends.torch.operators.context import CHANNELS_LAST, Context, Factory, require_compiler
from d5suite.backends.torch.operators.operator import Operator
from d5suite.backends.torch.operators.table import OPERATORS

__all__ = ["CHANNELS_LAST", "OPERATORS", "Context", "Factory", "Operator", "require_compiler"]
