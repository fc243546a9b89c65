"""ONNX operators as native JAX calls, by family, and level 0 on JAX.

A factory has the name of its operator, such as ``conv_transpose``, or is an entry in the dict
``OPERATORS`` of its family's module.

A factory ``(node, context)`` reads a node's attributes once and returns a callable. The callable
takes the node's inputs in order, None for an omitted one, and returns the first output or, if the
node names more, a tuple of all. BatchNormalization in training mode always returns the running
statistics too. Inputs that the factory has read through `Context.constant` are passed and ignored.

Each tensor has a storage layout: the order in which its ONNX axes are stored. Images are fed as
N, H, W, C, for which XLA's convolutions are fastest on the CPU; on GPUs XLA chooses for itself.
Data are moved only where an operator needs another order. Imports the families beside it.
"""

from d5suite.backends.jax.operators.context import Context, Factory
from d5suite.backends.jax.operators.operator import Operator
from d5suite.backends.jax.operators.table import OPERATORS

__all__ = ["OPERATORS", "Context", "Factory", "Operator"]
