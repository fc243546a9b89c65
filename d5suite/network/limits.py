"""Refuse models that expand to an excessive size, before anything is computed.

A few hundred bytes of ONNX can describe 2**60 nodes or values: functions that each call the next
twice, a chain of Concat, a Range, a long RNN. May import ONNX, NumPy and, from d5suite, `errors`,
`network.graph_edits` and `network.operators`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

import numpy as np
import onnx
from onnx import numpy_helper

from d5suite.errors import NetworkError
from d5suite.network.graph_edits import nodes_within
from d5suite.network.operators import FAMILIES

MOST_AXES = 32
"""Limit of a tensor's axes; NumPy has up to 64, and networks 6."""

MOST_NODES, MOST_NODE_BYTES, DEEPEST = 50_000, 1 << 30, 64
"""Limits of what a model's own functions add: nodes, their bytes, and functions within functions.
Large language models have some 10,000 nodes."""

MOST_STEPS = 5_000
"""Limit of the steps of all RNN nodes, which are unrolled into four nodes or more for each step."""

MOST_VALUES = 1 << 27
"""Limit of the values of a constant that is computed; the largest weight of ONNX's light networks,
which are filled when they are read, has 103 million."""

MOST_KEPT, MOST_FOLDED, PER_STORED = 200_000_000, 1 << 30, 8
"""Limits of the total number of values in computed constants: in those still read, and in all.
For each value that the file holds, `PER_STORED` more are allowed. VGG-19's weights, which ONNX's
light network leaves to be filled, have 144 million values."""

MOST_SLOW, MOST_PRODUCTS = 1 << 18, 1 << 30
"""Numbers of values, and of multiplications, beyond which a node is not folded: ONNX's reference
evaluator computes the operators of `_SLOW` in Python loops, a microsecond or more per value."""

MOST_LISTED = 1 << 20
"""Most values of all Concat and Range nodes together for which ONNX may propagate dimensions."""

_SLOW = frozenset({
    *FAMILIES["convolution"], *FAMILIES["normalization"], *FAMILIES["pooling"], *FAMILIES["sequence"],
    "AffineGrid", "DFT", "DeformConv", "Det", "Einsum", "GridSample", "MaxRoiPool", "MelWeightMatrix",
    "NonMaxSuppression", "RNN", "Resize", "RoiAlign", "STFT", "ScatterElements", "ScatterND", "Upsample",
})  # fmt: skip

_Key = tuple[str, str, str]
"""A function: its domain, name and overload."""

_TERM = r"[A-Za-z]*(?:\.\.\.[A-Za-z]*)?"
_EQUATION = re.compile(rf"{_TERM}(?:,{_TERM})*(?:->{_TERM})?")
"""Einsum's equation, without spaces (ONNX operator specification)."""


def check_growth(model: onnx.ModelProto) -> None:
    """Refuse a model on which ONNX's own code would exhaust time or memory.

    Raises
    ------
    NetworkError
        For a malformed equation of an Einsum, on which ONNX (1.23) loops forever; a tensor of more
        than `MOST_AXES` axes; and functions that call themselves or grow beyond `MOST_NODES`.
    """
    for node in (each for nodes in _bodies(model) for each in nodes_within(nodes)):
        if node.op_type == "Einsum" and node.domain in ("", "ai.onnx"):
            _check_equation(node)
        for attribute in node.attribute:
            for tensor in (attribute.t, *attribute.tensors):
                require_rank(len(tensor.dims), tensor.name or node.name)
    graph = model.graph
    for tensor in graph.initializer:
        require_rank(len(tensor.dims), tensor.name)
    for value in (*graph.input, *graph.output, *graph.value_info):
        require_rank(len(value.type.tensor_type.shape.dim), value.name)
    _check_functions(model)


def require_rank(rank: int, name: str) -> None:
    """Refuse a tensor of more than `MOST_AXES` axes."""
    if rank > MOST_AXES:
        raise NetworkError(f"tensor {name!r} has {rank:,} axes; d5suite reads up to {MOST_AXES}", where=name)


def _bodies(model: onnx.ModelProto) -> Iterator[Iterable[onnx.NodeProto]]:
    yield model.graph.node
    for function in model.functions:
        yield function.node


def _check_equation(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.name == "equation" and not attribute.ref_attr_name:
            text = attribute.s.decode(errors="replace")
            if not _EQUATION.fullmatch(text.replace(" ", "")):
                raise NetworkError(
                    f"Einsum: {text[:60]!r} is not an equation such as 'ij,jk->ik'",
                    where=node.name or next(iter(node.output), ""),
                )


def _check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, or whose nodes and bytes grow beyond the limits."""
    functions = {(_own(each.domain), each.name, each.overload): each for each in model.functions}
    plain: dict[_Key, tuple[int, int]] = {}
    calls: dict[_Key, Counter[_Key]] = {}
    for key, function in functions.items():
        nodes = list(nodes_within(function.node))
        called = Counter(name for name in map(_called, nodes) if name in functions)
        plain[key], calls[key] = (len(nodes) - called.total(), function.ByteSize()), called
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise NetworkError(
            f"function {error.args[1][0][1]!r} calls itself",
            where=model.graph.name,
            hint="ONNX has no recursion; export the model without functions.",
        ) from error
    whole: dict[_Key, tuple[int, int, int]] = {}
    for key in order:
        inner = [(whole[name], times) for name, times in calls[key].items()]
        count, size = (plain[key][i] + sum(each[i] * times for each, times in inner) for i in (0, 1))
        whole[key] = count, size, 1 + max((each[2] for each, _ in inner), default=0)
    called = Counter(name for name in map(_called, nodes_within(model.graph.node)) if name in whole)
    count, size = (sum(whole[name][i] * times for name, times in called.items()) for i in (0, 1))
    depth = max((each[2] for each in whole.values()), default=0)
    if count > MOST_NODES or size > MOST_NODE_BYTES or depth > DEEPEST:
        raise NetworkError(
            f"its functions stand for {_rough(count)} nodes of {_rough(size)} bytes, {depth} within each other; "
            f"d5suite reads up to {MOST_NODES:,} nodes, {MOST_NODE_BYTES:,} bytes and {DEEPEST} within each other",
            where=model.graph.name,
            hint="Export a smaller model, or one without functions.",
        )


def _called(node: onnx.NodeProto) -> _Key:
    return _own(node.domain), node.op_type, node.overload


def _own(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _rough(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"{float(min(count, 10**300)):.0e}"


def propagates_much(model: onnx.ModelProto) -> bool:
    """Return whether ONNX's propagation of dimensions would make long lists of them.

    ONNX (1.23) lists the values of Concat and Range, where they may be sizes, without a limit.
    """
    lengths = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) < 2}
    numbers = {t.name: _number(t) for t in model.graph.initializer if lengths.get(t.name) == 1}
    listed = 0.0
    for node in model.graph.node:
        made = max([MOST_AXES, *(lengths.get(name, 0) for name in node.input)])
        if node.op_type == "Constant" and node.attribute:
            value = onnx.helper.get_attribute_value(node.attribute[0])
            value = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
            made = value.size
            if made == 1 and value.dtype.kind in "fiu":
                numbers[node.output[0]] = float(value.item())
        elif node.op_type == "Concat":
            made = sum(lengths.get(name, 0) for name in node.input)
            listed += made
        elif node.op_type == "Range" and numbers.keys() >= set(node.input):
            start, limit, delta = (numbers[name] for name in node.input)
            count = abs((limit - start) / delta) if delta else math.inf
            listed += count if math.isfinite(count) else math.inf
        lengths.update(dict.fromkeys(node.output, made))
    return listed > MOST_LISTED


def _number(tensor: onnx.TensorProto) -> float:
    return float(numpy_helper.to_array(tensor).item())


class Budget:
    """How many values may still be computed when a model is folded.

    Parameters
    ----------
    model : onnx.ModelProto
        The model as it was read.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        more = PER_STORED * sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
        self._room, self._work = MOST_KEPT + more, MOST_FOLDED + more

    def take(self, values: int, node: onnx.NodeProto) -> None:
        """Count the values of a node's outputs.

        Raises
        ------
        NetworkError
            If they exceed what is left of the budget.
        """
        self._room -= values
        self._work -= values
        if min(self._room, self._work) < 0:
            raise NetworkError(
                f"{node.op_type}: with it more values are computed from constants than d5suite folds",
                where=node.name or node.output[0],
                hint="Export the network for a smaller input, or without this node.",
            )

    def give_back(self, values: int) -> None:
        """Return to the budget values that nothing reads any more."""
        self._room += values


def takes_long(operator: str, read: Sequence[Sequence[int]], written: Sequence[Sequence[int | None]]) -> bool:
    """Return whether a node with inputs and outputs of these shapes takes more than a second."""
    values = sum(math.prod(shape) for shape in read)
    made = sum(math.prod(size or 0 for size in shape) for shape in written)
    if operator in ("Gemm", "MatMul"):
        depth = max(read[0], default=1) if operator == "Gemm" else math.prod(read[0][-1:])
        return made * depth > MOST_PRODUCTS
    return operator in _SLOW and values + made > MOST_SLOW
