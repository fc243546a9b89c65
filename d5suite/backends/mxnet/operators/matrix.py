"""ONNX on MXNet: matrix products.

Imports NumPy, `d5suite.errors`, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators.context import Call, Context, Factory
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.matrix import read_einsum, read_gemm


def gemm(node: Node, context: Context) -> Call:
    plan = read_gemm(node, context)
    alpha, beta, biased = plan.alpha, plan.beta, plan.bias is not None
    if plan.plain and plan.trans_b and not plan.trans_a and plan.features is not None:
        return lambda F, x, weight, *bias: F.FullyConnected(
            x, weight, *(bias[:1] if biased else ()), num_hidden=plan.features, no_bias=not biased, flatten=False
        )

    def call(F: Any, x: Any, y: Any, z: Any = None) -> Any:
        product = F.dot(x, y, transpose_a=plan.trans_a, transpose_b=plan.trans_b)
        product = product if alpha == 1 else product * alpha
        if z is None:
            return product
        z = z if beta == 1 else z * beta
        return product + z if isinstance(z, float | int) else F.broadcast_add(product, z)

    return call


def mat_mul(node: Node, context: Context) -> Call:
    left, right = (context.shape(name) for name in node.inputs)
    if len(right) == 2 and len(left) >= 2:  # F.dot contracts the last axis with the first
        return lambda F, x, y: F.dot(x, y)
    batches_agree = all(a == b or None in (a, b) for a, b in zip(left[:-2], right[:-2], strict=False))
    if len(left) == len(right) >= 3 and batches_agree:
        return lambda F, x, y: F.linalg_gemm2(x, y)
    if min(len(left), len(right)) >= 2:  # np.matmul's gradient is wrong if it broadcasts a batch axis
        known = [tuple(size for size in shape if size is not None) for shape in (left, right)]
        if known != [tuple(left), tuple(right)]:
            raise NetworkError("a matrix product that broadcasts a batch axis needs known sizes", where=node.name)
        batch = np.broadcast_shapes(*(shape[:-2] for shape in known))
        wide = [(*batch, *shape[-2:]) for shape in known]
        padded = [(1,) * (len(batch) + 2 - len(shape)) + shape for shape in known]
        return lambda F, x, y: F.linalg_gemm2(
            F.broadcast_to(F.reshape(x, padded[0]), wide[0]), F.broadcast_to(F.reshape(y, padded[1]), wide[1])
        )
    return lambda F, x, y: F.np.matmul(x.as_np_ndarray(), y.as_np_ndarray()).as_nd_ndarray()


def einsum(node: Node, context: Context) -> Call:
    equation = read_einsum(node, context).equation
    return lambda F, *xs: F.np.einsum(equation, *[x.as_np_ndarray() for x in xs]).as_nd_ndarray()


OPERATORS: dict[str, Factory] = {
    "Einsum": einsum,
    "Gemm": gemm,
    "MatMul": mat_mul,
}
