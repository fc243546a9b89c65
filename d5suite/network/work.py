"""The cost of one operation from its shapes: floating-point operations and bytes per direction.

Counting rules
--------------
Matrix products, convolutions, attention and recurrences cost 2 operations per multiply-accumulate
and nothing else; their backward pass costs one product of the same size per differentiated factor.
Attention multiplies every query with every key, past keys included, even if a mask or causality
excludes the pair: many kernels compute it anyway, and the effect of a mask depends on its values.
PyTorch's FLOP counter does the same. A kernel that skips pairs may seem up to twice as fast. Other
operators cost `PER_ELEMENT` per element; their backward pass is not counted.

Bytes are compulsory traffic, as in Williams, Waterman and Patterson, "Roofline" (CACM 2009): what
any implementation must read and write at least once. Forward reads every input and writes every
output, but reads only the used elements of a table (`LOOKED_UP`). Backward reads the outputs'
gradients and the inputs that the gradient's formula needs (`BACKWARD_READS`,
`FROM_GRADIENTS_ALONE`), and writes the inputs' gradients in full. Additional data of a framework,
such as masks and statistics, and outputs that are views do not count.

May import `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from d5suite.network.graph import Node
from d5suite.network.nodes.equation import expand_equation
from d5suite.network.operation import Operation

PER_ELEMENT = {
    "Abs": 1, "Acos": 1, "Acosh": 1, "Add": 1, "And": 1, "ArgMax": 1, "ArgMin": 1, "Asin": 1, "Asinh": 1, "Atan": 1,
    "Atanh": 1, "AveragePool": 1, "BatchNormalization": 4, "BitShift": 1, "BitwiseAnd": 1, "BitwiseNot": 1,
    "BitwiseOr": 1, "BitwiseXor": 1, "Ceil": 1, "Clip": 2, "Col2Im": 1, "Cos": 1, "Cosh": 1, "CumSum": 1, "Div": 1,
    "Elu": 2, "Equal": 1, "Erf": 1, "Exp": 1, "Floor": 1, "Gelu": 5, "GlobalAveragePool": 1, "GlobalLpPool": 2,
    "GlobalMaxPool": 1, "Greater": 1, "GreaterOrEqual": 1, "GridSample": 8, "GroupNormalization": 7, "HardSigmoid": 4,
    "HardSwish": 4, "Hardmax": 1, "InstanceNormalization": 7, "IsInf": 1, "IsNaN": 1, "LRN": 6, "LayerNormalization": 7,
    "LeakyRelu": 1, "Less": 1, "LessOrEqual": 1, "Log": 1, "LogSoftmax": 4, "LpNormalization": 3, "LpPool": 2, "Max": 1,
    "MaxPool": 1, "Mean": 1, "Min": 1, "Mish": 5, "Mod": 1, "Mul": 1, "Neg": 1, "Not": 1, "Or": 1, "PRelu": 1, "Pow": 1,
    "RMSNormalization": 5, "Reciprocal": 1, "ReduceL1": 2, "ReduceL2": 2, "ReduceLogSumExp": 2, "ReduceMax": 1,
    "ReduceMean": 1, "ReduceMin": 1, "ReduceProd": 1, "ReduceSum": 1, "ReduceSumSquare": 2, "Relu": 1, "Resize": 8,
    "Round": 1, "Selu": 3, "Sigmoid": 3, "Sign": 1, "Sin": 1, "Sinh": 1, "Softmax": 5, "SoftmaxCrossEntropyLoss": 5,
    "Softplus": 3, "Softsign": 3, "Sqrt": 1, "Sub": 1, "Sum": 1, "Tan": 1, "Tanh": 1, "ThresholdedRelu": 1, "Xor": 1,
}  # fmt: skip
"""Operations per element of the largest input or output; an elementary function counts 1."""

LOOKED_UP = {"Gather": 0, "GatherElements": 0, "GatherND": 0}
"""By operator: the number of its table input, of which only the output's elements are read."""

FROM_GRADIENTS_ALONE = frozenset({
    "Add", "AveragePool", "Cast", "Col2Im", "Concat", "CumSum", "DFT", "DepthToSpace", "Dropout", "Expand", "Flatten",
    "GlobalAveragePool", "GlobalMaxPool", "Identity", "Max", "MaxPool", "Mean", "Min", "Neg", "Pad", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceSum", "Reshape", "Resize", "ReverseSequence", "Slice", "SpaceToDepth", "Split",
    "Squeeze", "Sub", "Sum", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze",
})  # fmt: skip
"""Operators whose gradient needs no input, because they are linear or select elements. A record of
the selection is smaller than a float per element and does not count."""

_OWN_INPUT = {0: (0,)}
_OTHER_FACTOR = {0: (1,), 1: (0,), 2: ()}
_NORMALISED = {0: (0, 1), 1: (0,), 2: ()}

BACKWARD_READS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    # Functions of one tensor: the slope follows from the input, or from the equally large output.
    **dict.fromkeys(
        ("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Clip", "Cos", "Cosh", "Elu", "Erf", "Exp",
          "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "Mish",
          "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceProd", "ReduceSumSquare", "Relu", "Selu",
          "Sigmoid", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
          "ThresholdedRelu"), _OWN_INPUT,
    ),
    # Products: the gradient of a factor needs the other factor; that of an addend needs nothing.
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul"), _OTHER_FACTOR),
    "Div": {0: (1,), 1: (0, 1)},
    "PRelu": {0: (0, 1), 1: (0,)},
    "GridSample": {0: (1,), 1: (0, 1)},
    "Where": {1: (0,), 2: (0,)},
    "BatchNormalization": _NORMALISED,
    "GroupNormalization": _NORMALISED,
    "InstanceNormalization": _NORMALISED,
    "LayerNormalization": _NORMALISED,
    "RMSNormalization": _NORMALISED,
    # The table's gradient is written in full, zeros included; it needs the indices.
    "Gather": {0: (1,)},
    "GatherElements": {0: (1,)},
    "GatherND": {0: (1,)},
    "MaxUnpool": {0: (1,)},
    "STFT": {0: (2,), 2: (0,)},
    "ScatterElements": {0: (1,), 2: (1,)},
    "ScatterND": {0: (1,), 2: (1,)},
    "OneHot": {2: (0,)},
    "SoftmaxCrossEntropyLoss": {0: (0, 1, 2)},
}  # fmt: skip
"""By operator and input: the inputs that the gradient of this input needs, besides the outputs'
gradients. Operators in neither table need all inputs: attention, recurrences, custom operators."""

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Convolutions and matrix products."""

_POOLS = ("AveragePool", "LpPool", "MaxPool")


@dataclass(frozen=True)
class Work:
    """The cost of one call.

    Attributes
    ----------
    flops : int
        Floating-point operations forward; 0 for an operator that only moves data.
    backward_flops : int or None
        Floating-point operations backward; None if not counted.
    bytes, backward_bytes : int
        Compulsory traffic.
    terms, backward_terms : int
        The longest sum behind one element of an output or gradient; rounding errors grow with it.
    steps : int
        Consecutive roundings: the time steps of a recurrence, otherwise 1.
    """

    flops: int
    backward_flops: int | None
    bytes: int
    backward_bytes: int
    terms: int
    backward_terms: int
    steps: int


def work(operation: Operation) -> Work:
    """Count the cost of an operation."""
    node = operation.node
    inputs = [name for name in node.inputs if name]
    outputs = list(operation.outputs)
    gradients = [node.inputs[index] for index in operation.differentiable]
    sizes = {name: math.prod(shape) for name, shape in operation.shapes.items()}
    largest = max((sizes[name] for name in (*inputs, *outputs)), default=1)
    macs = multiply_accumulates(operation)
    if macs:
        flops = 2 * macs
        both = node.op_type in ("Attention", "GRU", "LSTM")  # both factors of their products are differentiated
        backward: int | None = flops * (2 if both else sum(index < 2 for index in operation.differentiable))
        terms = -(-macs // max(sizes[outputs[0]], 1))
        backward_terms = max((-(-macs // max(sizes[name], 1)) for name in gradients), default=1)
    else:
        flops = _of_transform(operation) or PER_ELEMENT.get(node.op_type, 0) * largest
        if node.op_type in _POOLS:
            flops = sizes[outputs[0]] * math.prod(node.attributes["kernel_shape"])
        backward = 0 if flops == 0 else None
        terms = max(-(-largest // max(sizes[outputs[0]], 1)), _normalised(operation))
        backward_terms = max([terms, *(-(-largest // max(sizes[name], 1)) for name in gradients)])
        if node.op_type in LOOKED_UP:  # only gradients of repeated indices are summed
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
    """Return the bytes that one call must move.

    Parameters
    ----------
    operation : Operation
    backward : bool
        Count the backward pass.
    views : collection of str
        Outputs that a framework returns as views, without moving data; for the backward pass, the
        inputs whose gradients it returns as views.
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
    heads = [node.outputs[index] for index in operation.differentiated]
    return operation.nbytes([*heads, *backward_reads(node, moved), *(node.inputs[index] for index in moved)])


def backward_reads(node: Node, moved: Sequence[int]) -> list[str]:
    """Return the inputs that the gradients of the inputs ``moved`` are computed from."""
    if node.op_type in FROM_GRADIENTS_ALONE:
        return []
    rules = BACKWARD_READS.get(node.op_type, {})
    needed = {each for index in moved for each in rules.get(index, range(len(node.inputs)))}
    return [name for index, name in enumerate(node.inputs) if name and index in needed]


def multiply_accumulates(operation: Operation) -> int:
    """Return the multiply-accumulates of the forward pass; 0 for operators without products."""
    return node_macs(operation.node, operation.shapes.__getitem__)


def node_macs(node: Node, shape: Callable[[str], Sequence[int]]) -> int:
    """Count the multiply-accumulates of a node; 0 for operators without products.

    Parameters
    ----------
    node : Node
    shape : callable
        Returns the shape of an input or output of the node.
    """
    if node.op_type == "Attention":
        return _attention(node, shape)
    if node.op_type == "Einsum":
        return _einsum(node, shape)
    if node.op_type not in (*PRODUCTS, "GRU", "LSTM"):
        return 0
    first, second = shape(node.inputs[0]), shape(node.inputs[1])
    if node.op_type == "Conv":
        return math.prod(shape(node.outputs[0])) * math.prod(second[1:])
    if node.op_type == "ConvTranspose":
        return math.prod(first) * math.prod(second[1:])
    if node.op_type in PRODUCTS:
        return math.prod(shape(node.outputs[0])) * first[0 if node.attributes.get("transA") else -1]
    steps_times_batch = first[0] * first[1]
    return steps_times_batch * (math.prod(second) + math.prod(shape(node.inputs[2])))


def _einsum(node: Node, shape: Callable[[str], Sequence[int]]) -> int:
    shapes = [shape(name) for name in node.inputs]
    terms = expand_equation(node.attributes["equation"], [len(each) for each in shapes]).inputs
    if len(terms) < 2:
        return 0
    sizes = {a: n for term, each in zip(terms, shapes, strict=True) for a, n in zip(term, each, strict=True)}
    return math.prod(sizes.values()) * (len(terms) - 1)


def _attention(node: Node, shape: Callable[[str], Sequence[int]]) -> int:
    q, k, v = (shape(name) for name in node.inputs[:3])
    if len(q) == 3:
        heads, kv_heads = node.attributes["q_num_heads"], node.attributes["kv_num_heads"]
        queries, keys, size, value_size = q[1], k[1], q[2] // heads, v[2] // kv_heads
    else:
        heads, queries, keys, size, value_size = q[1], q[2], k[2], q[3], v[3]
    past = shape(node.inputs[4])[2] if len(node.inputs) > 4 and node.inputs[4] else 0
    return q[0] * heads * queries * (past + keys) * (size + value_size)


def _of_transform(operation: Operation) -> int:
    """Return the operations of a Fourier transform or determinant; 0 for other operators.

    n complex numbers take 5 n log2 n operations, real ones half (the convention of FFTW's
    benchmarks, "Speed of FFTs"); an LU decomposition of n rows 2/3 n^3 (Golub and Van Loan,
    "Matrix computations", 3.2).
    """
    node, length = operation.node, _transformed(operation)
    if node.op_type == "Det":
        return math.prod(operation.shapes[node.inputs[0]][:-2]) * 2 * length**3 // 3
    if not length:
        return 0
    given, found = operation.shapes[node.inputs[0]], operation.shapes[node.outputs[0]]
    parts = max(given[-1], 1 if node.attributes.get("onesided") else found[-1])
    count = math.prod(given[:-1]) // max(given[_axis(operation)], 1) if node.op_type == "DFT" else math.prod(found[:2])
    return round(count * length * math.log2(max(length, 2)) * 5 * parts / 2)


def _axis(operation: Operation) -> int:
    """Return the axis of a DFT."""
    node = operation.node
    axis = operation.constants.get(node.inputs[2]) if len(node.inputs) > 2 else None
    return -2 if axis is None else int(axis.item())


def _transformed(operation: Operation) -> int:
    """Return how many inputs a result of a transform or determinant depends on; 0 for the rest."""
    node = operation.node
    if node.op_type == "Det":
        return operation.shapes[node.inputs[0]][-1]
    if node.op_type == "DFT":
        return max(operation.shapes[name][_axis(operation)] for name in (node.inputs[0], node.outputs[0]))
    if node.op_type != "STFT":
        return 0
    bins = operation.shapes[node.outputs[0]][2]
    return 2 * (bins - 1) if node.attributes["onesided"] else bins


def _normalised(operation: Operation) -> int:
    """Return the terms in one sum of a normalisation, softmax or window."""
    node = operation.node
    shape = operation.shapes[node.inputs[0]]
    if node.op_type == "BatchNormalization":
        return math.prod(shape) // max(shape[1], 1)
    if node.op_type == "InstanceNormalization":
        return math.prod(shape[2:])
    if node.op_type == "GroupNormalization":
        return math.prod(shape[1:]) // node.attributes["num_groups"]
    if node.op_type in ("LayerNormalization", "RMSNormalization"):
        return math.prod(shape[node.attributes["axis"] % len(shape) :])
    if node.op_type in ("LogSoftmax", "LpNormalization", "Softmax"):
        return shape[node.attributes["axis"]]
    if node.op_type == "SoftmaxCrossEntropyLoss":
        return math.prod(shape)
    if node.op_type in _POOLS:
        return math.prod(node.attributes["kernel_shape"])
    return max(_transformed(operation), 1)


def _steps(operation: Operation) -> int:
    if operation.node.op_type not in ("GRU", "LSTM"):
        return 1
    return operation.shapes[operation.node.inputs[0]][1 if operation.node.attributes["layout"] else 0]
