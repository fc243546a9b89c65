"""ONNX operators as deep500's NumPy operators, by family, and level 0 on them.

A factory ``(node, context)`` reads a node's attributes once and returns a deep500 operator. Its
``forward`` takes the inputs that `operands` names; its ``backward`` returns their gradients. An
operator with several outputs returns a list: ONNX's first and then, as in deep500's
BatchNormalization, values that its ``backward`` needs. deep500 0.2.0's own operator does the work
wherever its result is ONNX's; each class or factory that replaces one says what is wrong with it.
Imports the families beside it.
"""

from d5suite.backends.deep500.operators import (
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
from d5suite.backends.deep500.operators.context import Context, Factory, operands
from d5suite.backends.deep500.operators.elementwise import load_random_state, random_state, seed
from d5suite.backends.deep500.operators.single import Operator

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

__all__ = ["OPERATORS", "Context", "Factory", "Operator", "load_random_state", "operands", "random_state", "seed"]
