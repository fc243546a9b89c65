"""What one operation costs: floating-point operations and bytes, forward and backward, counted from its shapes.

Counting rules
--------------
Matrix products, convolutions, attention and recurrences: 2 operations per multiply-accumulate and nothing else; their
backward pass takes one product of the same size per differentiated factor. Attention multiplies every query with every
key, past ones included, also where a mask or causality leaves some out: many kernels compute those too, and what a
mask leaves out is a matter of its values; PyTorch's FLOP counter does the same. A kernel that skips them may
seem up to twice as fast. Other operators cost what `PER_ELEMENT` says per element, and their backward pass is not
counted.

Bytes are compulsory traffic, as in Williams, Waterman and Patterson, "Roofline" (CACM 2009): what any implementation
has to read and write at least once. Forward, every input is read and every output written, but of a table only what is
looked up (`LOOKED_UP`). Backward, the gradients of outputs are read and the gradients of inputs written, whole, and
with them are read the inputs that the gradient's formula needs (`BACKWARD_READS`, `FROM_GRADIENTS_ALONE`). What a
framework keeps besides, such as masks and statistics, is not counted, and neither is an answer that is a view.

Imports `d5suite.network.operation`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from d5suite.network.operation import Operation

PER_ELEMENT = {
    "Add": 1, "AveragePool": 1, "BatchNormalization": 4, "Clip": 2, "Div": 1, "Elu": 2, "Exp": 1, "Gelu": 5,
    "GlobalAveragePool": 1, "GlobalMaxPool": 1, "HardSwish": 4, "LRN": 6, "LayerNormalization": 7, "LeakyRelu": 1,
    "LogSoftmax": 4, "MaxPool": 1, "Mul": 1, "ReduceMax": 1, "ReduceMean": 1, "ReduceSum": 1, "Relu": 1, "Sigmoid": 3,
    "Softmax": 5, "SoftmaxCrossEntropyLoss": 5, "Sqrt": 1, "Sub": 1, "Sum": 1, "Tanh": 1,
}  # fmt: skip
"""Operations per element of the largest input or, where that is larger, the output; an elementary function counts 1."""

LOOKED_UP = {"Gather": 0}
"""Operators that read of this input only the elements that become output."""

FROM_GRADIENTS_ALONE = frozenset({
    "Add", "AveragePool", "Concat", "Dropout", "Flatten", "GlobalAveragePool", "GlobalMaxPool", "Identity", "MaxPool",
    "Pad", "ReduceMax", "ReduceMean", "ReduceSum", "Reshape", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose gradient needs no input: they are linear in it, or choose elements; what was chosen, or dropped, is
kept in less than a float an element, which is not counted."""

_OWN_INPUT = {0: (0,)}
_OTHER_FACTOR = {0: (1,), 1: (0,), 2: ()}
_NORMALISED = {0: (0, 1), 1: (0,), 2: ()}

BACKWARD_READS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    # A function of one tensor: its slope follows from the input, or from the output, which is as large.
    **dict.fromkeys(
        ("Clip", "Elu", "Exp", "Gelu", "HardSwish", "LeakyRelu", "LogSoftmax", "Relu", "Sigmoid", "Softmax", "Sqrt",
         "Tanh"), _OWN_INPUT,
    ),
    # A product: each factor's gradient takes the other factor; an addend's takes nothing.
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul"), _OTHER_FACTOR),
    "Div": {0: (1,), 1: (0, 1)},
    "BatchNormalization": _NORMALISED,
    "LayerNormalization": _NORMALISED,
    # The table's gradient is written whole, zeros included; what is added where follows from the indices.
    "Gather": {0: (1,)},
    "SoftmaxCrossEntropyLoss": {0: (0, 1, 2)},
}  # fmt: skip
"""By operator and input: the inputs that the gradient of that input is computed from, beside the gradients of outputs.
Of an operator neither here nor in `FROM_GRADIENTS_ALONE`, all inputs are: attention, recurrences, custom operators."""

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
        if node.op_type in LOOKED_UP:  # nothing is added up but the gradients of an element that is looked up often
            terms, backward_terms = 1, sizes[node.inputs[1]]
    return Work(
        flops=flops,
        backward_flops=backward,
        bytes=traffic(operation),
        backward_bytes=traffic(operation, backward=True),
        terms=terms,
        backward_terms=backward_terms,
        steps=_steps(operation),
    )


def traffic(operation: Operation, *, backward: bool = False, views: Collection[str] = ()) -> int:
    """Bytes that one call has to move.

    Parameters
    ----------
    operation : Operation
    backward : bool
        Whether the backward pass is meant.
    views : collection of str
        Outputs, or inputs whose gradients, a framework gives as views of what it was given, so that nothing is moved.
    """
    node = operation.node
    if not backward:
        written = [name for name in operation.outputs if name not in views]
        if not written:
            return 0
        table = LOOKED_UP.get(node.op_type)
        read = [name for index, name in enumerate(node.inputs) if name and index != table]
        looked_up = [] if table is None else [min(operation.nbytes([node.inputs[table]]), operation.nbytes(written))]
        return operation.nbytes([*read, *written]) + sum(looked_up)
    moved = [index for index in operation.differentiable if node.inputs[index] not in views]
    if not moved:
        return 0
    needed: set[int] = set()
    if node.op_type not in FROM_GRADIENTS_ALONE:
        everything = tuple(range(len(node.inputs)))
        rules = BACKWARD_READS.get(node.op_type, {})
        needed.update(*(rules.get(index, everything) for index in moved))
    heads = [node.outputs[index] for index in operation.differentiated]
    inputs = [name for index, name in enumerate(node.inputs) if name and index in needed]
    return operation.nbytes([*heads, *inputs, *(node.inputs[index] for index in moved)])


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
    past = shapes[node.inputs[4]][2] if len(node.inputs) > 4 and node.inputs[4] else 0
    return q[0] * heads * queries * (past + keys) * (size + value_size)


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
    return 1


def _steps(operation: Operation) -> int:
    if operation.node.op_type not in ("GRU", "LSTM"):
        return 1
    return operation.shapes[operation.node.inputs[0]][1 if operation.node.attributes["layout"] else 0]
