"""ONNX operators as native PyTorch calls, by family, and level 0 on PyTorch.

A factory ``(node, context)`` reads a node's attributes once and returns a callable. The callable
takes the node's inputs in order, None for an omitted one, and returns the first output or, if
`Context.wanted` names more, a tuple of all. Inputs that the factory has read through
`Context.constant` are passed and ignored. Imports the families beside it.
"""

from d5suite.backends.torch.operators import (
    attention,
    convolution,
    elementwise,
    indexing,
    loss,
    matrix,
    normalization,
    pooling,
    recurrent,
    reduction,
    sampling,
    shape,
    signal,
)
from d5suite.backends.torch.operators.context import CHANNELS_LAST, Context, Factory, require_compiler
from d5suite.backends.torch.operators.single import Operator

OPERATORS: dict[str, Factory] = {
    **attention.OPERATORS,
    **convolution.OPERATORS,
    **elementwise.OPERATORS,
    **indexing.OPERATORS,
    **loss.OPERATORS,
    **matrix.OPERATORS,
    **normalization.OPERATORS,
    **pooling.OPERATORS,
    **recurrent.OPERATORS,
    **reduction.OPERATORS,
    **sampling.OPERATORS,
    **shape.OPERATORS,
    **signal.OPERATORS,
}
"""ONNX operator name to its factory; the keys are the backend's declared operators."""

__all__ = ["CHANNELS_LAST", "OPERATORS", "Context", "Factory", "Operator", "require_compiler"]
