"""The operators of all families on JAX, by ONNX name. Imports the families beside it."""

from d5suite.backends.jax.operators import (
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
from d5suite.backends.jax.operators.context import Factory

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
