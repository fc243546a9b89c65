"""ONNX operators as native MXNet calls, by family, and level 0 on MXNet.

A factory has the name of its operator, such as ``conv_transpose``, or is an entry in the dict
``OPERATORS`` of its family's module.

A factory ``(node, context)`` reads a node's attributes once and returns a callable ``(F,
*inputs)``. ``F`` is ``mx.nd`` (arrays, at once) or ``mx.sym`` (symbols, for a graph). The callable
returns the first output or, if `Context.wanted` names more, a tuple with None for unwanted ones.
An input is an array or symbol, a number for a fixed scalar, or None for an omitted input and for
one that the factory reads through `Context.constant`; an array given to `Context.keep` comes last.
Imports the families beside it.
"""

from d5suite.backends.mxnet.operators.context import Context, Factory
from d5suite.backends.mxnet.operators.operator import Operator
from d5suite.backends.mxnet.operators.table import OPERATORS

__all__ = ["OPERATORS", "Context", "Factory", "Operator"]
