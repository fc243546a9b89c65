"""What one operation costs: floating-point operations and bytes, forward and backward, counted from its shapes.

Counting rules
--------------
Matrix products, convolutions, attention and recurrences: 2 operations per multiply-accumulate and nothing else; their
backward pass takes one product of the same size per differentiated factor. Other operators cost what `PER_ELEMENT` says
per element, and their backward pass is not counted. Bytes are compulsory traffic, as in Williams, Waterman and
Patterson, "Roofline" (CACM 2009): every input read and every output written once; backward, inputs and gradients of
outputs read and gradients of inputs written.

Imports `d5suite.network.operation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from d5suite.network.operation import Operation

PER_ELEMENT = {
    "Add": 1, "AveragePool": 1, "BatchNormalization": 4, "Clip": 2, "Div": 1, "Elu": 2, "Exp": 1, "Gelu": 5,
    "GlobalAveragePool": 1, "GlobalMaxPool": 1, "HardSwish": 4, "LRN": 6, "LayerNormalization": 7, "LeakyRelu": 1,
    "LogSoftmax": 4, "MaxPool": 1, "Mul": 1, "ReduceMax": 1, "ReduceMean": 1, "ReduceSum": 1, "Relu": 1, "Sigmoid": 3,
    "Softmax": 5, "SoftmaxCrossEntropyLoss": 5, "Sqrt": 1, "Sub": 1, "Sum": 1, "Tanh": 1,
}  # fmt: skip
"""Operations per element of the largest input or, where that is larger, the output; an elementary function counts 1."""

_POOLS = ("AveragePool", "MaxPool")


@dataclass(frozen=True)
class Work:
    """The cost of one call.

    Attributes
    ----------
    flops : int
        Floating-point operations forward; 0 for an operator that only moves data.
    backward_flops : int or None
        The same backward; None where they are not counted.
    bytes, backward_bytes : int
        Compulsory traffic.
    terms, backward_terms : int
        The longest sum behind one element of an output, or of a gradient: what its rounding error grows with.
    steps : int
        How many roundings follow one another: the time steps of a recurrence, otherwise 1.
    """

    flops: int
    backward_flops: int | None
    bytes: int
    backward_bytes: int
    terms: int
    backward_terms: int
    steps: int


def work(operation: Operation) -> Work:
    """Count an operation."""
    node = operation.node
    inputs = [name for name in node.inputs if name]
    outputs = list(operation.outputs)
    gradients = [node.inputs[index] for index in operation.differentiable]
    heads = [node.outputs[index] for index in operation.differentiated]
    sizes = {name: math.prod(shape) for name, shape in operation.shapes.items()}
    largest = max((sizes[name] for name in (*inputs, *outputs)), default=1)
    macs = multiply_accumulates(operation)
    if macs:
        flops = 2 * macs
        both = node.op_type in ("Attention", "GRU", "LSTM")  # each of their products has two differentiated factors
        backward: int | None = flops * (2 if both else sum(index < 2 for index in operation.differentiable))
        terms = -(-macs // max(sizes[outputs[0]], 1))
        backward_terms = max((-(-macs // max(sizes[name], 1)) for name in gradients), default=1)
    else:
        flops = PER_ELEMENT.get(node.op_type, 0) * largest
        if node.op_type in _POOLS:
            flops = sizes[outputs[0]] * math.prod(node.attributes["kernel_shape"])
        backward = 0 if flops == 0 else None
        terms = max(-(-largest // max(sizes[outputs[0]], 1)), _normalised(operation))
        backward_terms = max([terms, *(-(-largest // max(sizes[name], 1)) for name in gradients)])
    return Work(
        flops=flops,
        backward_flops=backward,
        bytes=operation.nbytes([*inputs, *outputs]),
        backward_bytes=operation.nbytes([*inputs, *heads, *gradients]),
        terms=terms,
        backward_terms=backward_terms,
        steps=_steps(operation),
    )


def multiply_accumulates(operation: Operation) -> int:
    """Multiply-accumulates of the forward pass; 0 for operators that are no products."""
    node, shapes = operation.node, operation.shapes
    kind, a = node.op_type, node.attributes
    if kind not in ("Attention", "Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul"):
        return 0
    first, second = shapes[node.inputs[0]], shapes[node.inputs[1]]
    output = shapes[operation.outputs[0]]
    if kind == "Conv":
        return math.prod(output) * math.prod(second[1:])
    if kind == "ConvTranspose":
        return math.prod(first) * math.prod(second[1:])
    if kind in ("Gemm", "MatMul"):
        return math.prod(output) * first[0 if a.get("transA") else -1]
    if kind == "Attention":
        return _attention(operation)
    steps_times_batch = first[0] * first[1]
    return steps_times_batch * (math.prod(second) + math.prod(shapes[node.inputs[2]]))


def _attention(operation: Operation) -> int:
    node, shapes = operation.node, operation.shapes
    q, k, v = (shapes[name] for name in node.inputs[:3])
    if len(q) == 3:
        heads, kv_heads = node.attributes["q_num_heads"], node.attributes["kv_num_heads"]
        queries, keys, size, value_size = q[1], k[1], q[2] // heads, v[2] // kv_heads
    else:
        heads, queries, keys, size, value_size = q[1], q[2], k[2], q[3], v[3]
    return q[0] * heads * queries * keys * (size + value_size)


def _normalised(operation: Operation) -> int:
    """Values that one sum of a normalisation, a softmax or a window takes in."""
    node = operation.node
    shape = operation.shapes[node.inputs[0]]
    if node.op_type == "BatchNormalization":
        return math.prod(shape) // max(shape[1], 1)
    if node.op_type == "LayerNormalization":
        return math.prod(shape[node.attributes["axis"] % len(shape) :])
    if node.op_type in ("Softmax", "LogSoftmax"):
        return shape[node.attributes["axis"]]
    if node.op_type == "SoftmaxCrossEntropyLoss":
        return math.prod(shape)
    if node.op_type in _POOLS:
        return math.prod(node.attributes["kernel_shape"])
    if node.op_type == "Gather":
        return math.prod(operation.shapes[node.inputs[1]])
    return 1


def _steps(operation: Operation) -> int:
    if operation.node.op_type not in ("GRU", "LSTM"):
        return 1
    return operation.shapes[operation.node.inputs[0]][1 if operation.node.attributes["layout"] else 0]
