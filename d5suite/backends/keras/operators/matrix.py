"""ONNX in Keras: matrix products. Imports Keras, `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

from keras import layers, ops

from d5suite.backends.keras.operators.context import Context, Function, in_float32, in_onnx
from d5suite.network import Node
from d5suite.network.nodes.layouts import identity
from d5suite.network.nodes.matrix import read_einsum, read_gemm


def gemm(node: Node, context: Context) -> Any:
    plan = read_gemm(node, context)
    alpha, beta, trans_a, trans_b = plan.alpha, plan.beta, plan.trans_a, plan.trans_b
    a, *weights = [name for name in node.inputs if name]
    if plan.plain and not trans_a and context.owned(*weights) and context.computed(a):
        settings = {"kernel_initializer": "zeros", **context.settings(node)}
        layer = layers.Dense(plan.features, use_bias=len(weights) > 1, **settings)
        y = layer(context.enter(node, 0, identity(2)))
        context.own_kernel(layer, weights, (1, 0) if trans_b else None)
        return y
    to_a, to_b = map(context.to_onnx, node.inputs[:2])
    # TensorFlow 2.21 fuses this addition into the product, and then fails on a bias of two axes.
    row = plan.bias == (1, plan.features)

    def run(x: Any, y: Any, z: Any = None) -> Any:
        x, y = to_a(x), to_b(y)
        product = ops.matmul(ops.transpose(x) if trans_a else x, ops.transpose(y) if trans_b else y)
        if alpha != 1:
            product = product * alpha
        if z is None or beta == 0:
            return product
        if row:
            z = ops.reshape(z, (-1,))
        return product + (z if beta == 1 else z * beta)

    return context.calculate(node, run)


def mat_mul(node: Node, context: Context) -> Any:
    first, second = map(context.to_onnx, node.inputs)
    return context.calculate(node, lambda x, y: ops.matmul(first(x), second(y)))


@in_onnx
def einsum(node: Node, context: Context) -> Function:
    equation = read_einsum(node, context).equation
    return lambda *xs: ops.einsum(equation, *xs)


@in_onnx
def det(node: Node, context: Context) -> Function:
    return lambda x: ops.cast(ops.det(in_float32(x)), x.dtype)
