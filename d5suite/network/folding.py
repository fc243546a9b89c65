"""Fold nodes that depend on constants and known dimensions only.

May import ONNX, NumPy and `d5suite.errors`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from d5suite.errors import NetworkError
from d5suite.network.graph_edits import NodeWriter, attributes_of, remove_items, replace_items, tensor_of
from d5suite.network.limits import MOST_VALUES, Budget, takes_long

Shape = tuple[int | None, ...]
"""A tensor's dimensions; None where the size depends on the data (the batch)."""

NUMBER = ".d5suite.number"
"""Suffix of the scalar that is read from a scalar weight, stored as an array of length one."""

_COPIES_WEIGHTS = frozenset({"Identity", "Shape", "Size"})
"""Operators that read a weight's sizes, or copy an equal weight of another layer."""

_MOVES_WEIGHTS = frozenset({"Cast", "Concat", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
                            "Unsqueeze"})  # fmt: skip
"""Operators whose output holds every value of a weight at most once."""

_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                     "RandomUniformLike", "Dropout"})  # fmt: skip
"""Random operators, which are not folded."""


@np.errstate(all="ignore")  # log(0) is -inf, not an error
def fold(model: onnx.ModelProto, name: str, weights: set[str] | None = None, budget: Budget | None = None) -> bool:
    """Replace nodes that read only constants or known dimensions by their values; drop dead nodes.

    ONNX's reference evaluator computes the values. The names of values that come from ``weights``
    are added to ``weights``. Returns whether anything changed. Computed values count against the
    budget, by default the model's own.
    """
    budget = Budget(model) if budget is None else budget
    weights = set() if weights is None else weights
    graph = model.graph
    shapes = shapes_of(model)
    values = {t.name: t for t in graph.initializer}
    given = set(values)
    dimensions = _Dimensions(model)
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name_read in node.input:
            readers[name_read].append(node)
    unread = Counter(i for node in graph.node for i in node.input if i) + Counter(o.name for o in graph.output)
    kept = []
    for node in graph.node:
        inputs = [i for i in node.input if i]
        constant = not node.domain and node.op_type not in _RANDOM and all(i in values for i in inputs)
        if constant and node.op_type == "Expand" and node.input[0] in weights:
            spread = dimensions.per_sample(node, values)
            if spread:
                kept += spread
                continue
        moves = _keeps_weights(node, values, weights, readers, shapes)
        if constant and moves and _foldable(node, values, shapes, name, budget):
            arrays = {i: numpy_helper.to_array(values[i]) for i in inputs}
            for output, array in zip(node.output, _answers(node, arrays, name), strict=True):
                values[output] = tensor_of(array, output)
            if not weights.isdisjoint(inputs):
                weights.update(node.output)
            for read in inputs:
                unread[read] -= 1
                if not unread[read] and read not in given:
                    budget.give_back(math.prod(values.pop(read).dims))
        elif moves and (known := dimensions.follow(node, values)) is not None:
            values[node.output[0]] = tensor_of(known, node.output[0])
            if not weights.isdisjoint(inputs):
                weights.add(node.output[0])
        else:
            kept += dimensions.expand(node, values)
            if (shape := dimensions.reshape(node)) is not None:
                node.input[1] = f"{node.output[0]}.d5suite.shape"
                values[node.input[1]] = tensor_of(shape, node.input[1])
    used = {o.name for o in graph.output}
    for node in reversed(kept):
        if used.intersection(node.output):
            used.update(node.input)
    kept = [node for node in kept if used.intersection(node.output)]
    changed = len(kept) < len(graph.node) or bool(used & (set(values) - given))
    replace_items(graph.node, kept)
    remove_items(graph.input, lambda value: value.name in values)
    remove_items(graph.initializer, lambda tensor: tensor.name not in used)
    graph.initializer.extend(values[key] for key in values if key in used and key not in given)
    return changed


def _keeps_weights(
    node: onnx.NodeProto,
    values: Mapping[str, onnx.TensorProto],
    weights: set[str],
    readers: Mapping[str, Sequence[onnx.NodeProto]],
    shapes: Mapping[str, Shape],
) -> bool:
    """Return whether a node may be folded without changing what is trained.

    A node that computes with weights stays: its result would be a different weight. A node that
    moves a weight with further readers stays: the result would be a second weight. But a weight may
    be cut into disjoint parts, such as attention's projections.
    """
    if node.output[0].endswith(NUMBER):
        return False
    read = [i for i in node.input if i in weights and i in values]
    read = [i for i in read if math.prod(values[i].dims) > 1 or not values[i].dims]
    if not read or node.op_type in _COPIES_WEIGHTS:
        return True

    def size(other: onnx.NodeProto) -> float:
        if other.op_type not in ("Slice", "Split"):
            return math.inf
        return sum(math.prod(math.inf if n is None else n for n in shapes.get(y, (None,))) for y in other.output)

    parts = (len(readers[i]) == 1 or sum(map(size, readers[i])) <= math.prod(values[i].dims) for i in read)
    return node.op_type in _MOVES_WEIGHTS and all(parts)


def _answers(node: onnx.NodeProto, arrays: Mapping[str, np.ndarray], name: str = "") -> list[np.ndarray]:
    """Return a node's outputs for constant inputs, by ONNX's reference evaluator.

    The evaluator's GatherElements (onnx 1.23) fails beyond 63 indices along the axis, and for a
    negative axis.
    """
    from onnx.reference import ReferenceEvaluator

    if node.op_type in ("Div", "Mod") and _divides_by_zero(arrays[node.input[1]]):
        raise NetworkError(f"{node.op_type} of constants divides integers by 0", where=node.name or node.output[0])
    try:
        if node.op_type == "GatherElements":
            return [gathered(*(arrays[i] for i in node.input), axis=node.attribute[0].i if node.attribute else 0)]
        return list(ReferenceEvaluator(node).run(None, dict(arrays)))
    except Exception as error:  # the evaluator raises whatever NumPy does
        raise NetworkError(
            f"{node.op_type} of constants cannot be computed: {str(error).splitlines()[0] if str(error) else error!r}",
            where=node.name or node.output[0] or name,
            hint="Try another opset, or another exporter.",
        ) from error


def _divides_by_zero(divisor: np.ndarray) -> bool:
    return divisor.dtype.kind in "iu" and not divisor.all()


_LONGEST = 1 << 20
"""Most values of a tensor that is followed because it holds dimensions."""


def _most_values(node: onnx.NodeProto, arrays: Mapping[str, np.ndarray]) -> int:
    """Return an upper bound on the number of values that a node of `_MOVES` or an Equal writes."""
    read = [arrays[i] for i in node.input if i]
    if node.op_type == "Concat":
        return sum(each.size for each in read)
    if node.op_type == "Gather":
        return read[0].size * read[1].size
    return math.prod(np.broadcast_shapes(*(each.shape for each in read))) if node.op_type in _MEET else read[0].size


def gathered(data: np.ndarray, indices: np.ndarray, *, axis: int) -> np.ndarray:
    """Compute GatherElements: for axis 1, ``output[i, j, k] = data[i, indices[i, j, k], k]``.

    The output has the shape of the indices, which may be shorter than the data on other axes (ONNX
    operator specification).
    """
    places: list[Any] = list(np.indices(indices.shape, sparse=True))
    places[axis] = indices
    return np.asarray(data[tuple(places)])


_MOVES = frozenset({"Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze",
                    "Where"})  # fmt: skip
"""Operators that rearrange dimensions without computing with them."""

_PLACES = frozenset({"Gather", "Reshape", "Slice", "Squeeze", "Unsqueeze"})
"""Operators of `_MOVES` whose further inputs are positions, sizes or axes."""

_MEET = frozenset({"Add", "And", "Div", "Equal", "Greater", "Less", "MatMul", "Mul", "Or", "Pow", "Sub", "Sum",
                   "Where"})  # fmt: skip
"""Operators that broadcast their inputs."""

_OPEN = -(1 << 40)
"""Marks the first open dimension; further ones get smaller numbers."""


class _Dimensions:
    """Values of tensors that hold dimensions; numbers up to `_OPEN` mark open dimensions.

    Parameters
    ----------
    model : onnx.ModelProto
        With inferred shapes.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._types = {t.name: t.data_type for t in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input if value.name not in self._types]
        self._shapes: dict[str, list[int]] = {t.name: list(t.dims) for t in model.graph.initializer}
        self._values: dict[str, np.ndarray] = {}
        symbols: dict[str, int] = {}
        for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
            if value.type.tensor_type.HasField("shape"):
                self._types[value.name] = value.type.tensor_type.elem_type
                self._shapes[value.name] = [
                    d.dim_value
                    if d.HasField("dim_value")
                    else symbols.setdefault(d.dim_param or f"{value.name}[{axis}]", _OPEN - len(symbols))
                    for axis, d in enumerate(value.type.tensor_type.shape.dim)
                ]
        self._identify(model)

    def _identify(self, model: onnx.ModelProto) -> None:
        """Unify the marks of equal open dimensions.

        ONNX gives an open dimension a new name after a Reshape, and where two tensors broadcast. A
        multiple of a dimension keeps a mark of its own.
        """
        multiples: dict[int, tuple[int, Fraction]] = {}
        first: dict[tuple[int, Fraction], int] = {}

        def same(mark: int, as_one: int, factor: Fraction) -> None:
            if mark not in multiples:
                base, times = multiples.get(as_one, (as_one, Fraction(1)))
                multiples[mark] = base, times * factor
                first.setdefault(multiples[mark], base if times * factor == 1 else mark)

        for node in model.graph.node:
            outputs = self._shapes.get(node.output[0], [])
            inputs = [self._shapes.get(name, []) for name in node.input if name]
            if node.op_type in ("Flatten", "Reshape"):
                marks = [[size for size in shape if size <= _OPEN] for shape in (inputs[0], outputs)]
                known = [math.prod(size for size in shape if size > _OPEN) for shape in (inputs[0], outputs)]
                if [len(each) for each in marks] == [1, 1] and all(known):
                    same(marks[1][0], marks[0][0], Fraction(known[0], known[1]))
            elif node.op_type in _MEET:
                for axis in range(-len(outputs), -2 if node.op_type == "MatMul" else 0):
                    met = {shape[axis] for shape in inputs if len(shape) >= -axis} - {1, outputs[axis]}
                    if len(met) == 1 and max(outputs[axis], *met) <= _OPEN:
                        same(outputs[axis], met.pop(), Fraction(1))
            outputs[:] = [first[multiples[size]] if size in multiples else size for size in outputs]

    def follow(self, node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> np.ndarray | None:
        """Record the dimensions that a node computes; return them if none is open."""
        if node.op_type == "Shape" and node.input[0] in self._shapes:
            bounds = attributes_of(node)
            found = np.array(self._shapes[node.input[0]][bounds.get("start", 0) : bounds.get("end")], np.int64)
        elif node.op_type == "Size" and min(self._shapes.get(node.input[0], [_OPEN]), default=1) > _OPEN:
            found = np.array(math.prod(self._shapes[node.input[0]]), np.int64)
        elif node.op_type in (*_MOVES, "Equal") and all(i in self._values or i in constants for i in node.input if i):
            arrays = {
                i: self._values[i] if i in self._values else numpy_helper.to_array(constants[i])
                for i in node.input
                if i
            }
            if _most_values(node, arrays) > _LONGEST:
                return None
            marked = any(i in self._values and (self._values[i] <= _OPEN).any() for i in arrays)
            if marked:  # the marks need 64 bits
                arrays = {
                    i: array.astype(np.int64) if array.dtype == np.int32 else array for i, array in arrays.items()
                }
            if marked and node.op_type == "Cast":
                if node.attribute[0].i not in (TensorProto.INT32, TensorProto.INT64):
                    return None
                node = onnx.helper.make_node("Identity", node.input, node.output)
            if node.op_type == "Equal":
                one, other = arrays[node.input[0]], arrays[node.input[1]]
                low, high = np.minimum(one, other), np.maximum(one, other)
                if ((low <= _OPEN) & (low != high) & ((high >= 0) | (high <= _OPEN))).any():
                    return None  # an open dimension may equal any number
            places = (self._values[i] for i in node.input[1:] if i in self._values)
            if node.op_type in _PLACES and any((place <= _OPEN).any() for place in places):
                return None  # a mark is not a position or size
            found = np.asarray(_answers(node, arrays)[0])
        else:
            return None
        if found.dtype in (np.int32, np.int64, np.bool_):  # a cast to a float would round the marks
            self._values[node.output[0]] = found
        if not (found > _OPEN).all():
            return None
        narrow = found.dtype == np.int64 and self._types.get(node.output[0]) == TensorProto.INT32
        return found.astype(np.int32) if narrow else found

    def reshape(self, node: onnx.NodeProto) -> np.ndarray | None:
        """Return a Reshape's target shape, with -1 for its one open dimension.

        None for any other node, and for a Reshape without exactly one open dimension.
        """
        if node.op_type != "Reshape" or node.input[1] not in self._values:
            return None
        wanted = self._values[node.input[1]]
        open_ones = wanted[wanted <= _OPEN]
        source = self._shapes.get(node.input[0], [])
        if len(open_ones) != 1 or (wanted == 0).any():
            return None
        rest = [size for size in source if size != open_ones[0]]
        if (wanted == -1).any():
            if len(rest) != len(source) - 1 or any(size <= _OPEN for size in rest):
                return None
            others = math.prod(int(size) for size in wanted if size > 0)
            wanted = np.where(wanted == -1, math.prod(rest) // max(others, 1), wanted)
        return np.where(wanted <= _OPEN, -1, wanted)

    def per_sample(self, node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
        """Return nodes that replace an Expand of a weight to the known batch, as for an open batch.

        Folding the Expand would make a separate weight for every sample. The list is empty for any
        other Expand.
        """
        x, wanted = node.input[0], numpy_helper.to_array(constants[node.input[1]])
        have = [1] * (len(wanted) - len(self._shapes.get(x, []))) + list(self._shapes.get(x, []))
        grown = [axis for axis, (n, want) in enumerate(zip(have, wanted, strict=False)) if want not in (1, n)]
        source = next((i for i in self._inputs if self._shapes.get(i, [])[:1] == list(wanted[:1])), "")
        if grown != [0] or len(have) != len(wanted) or not source or x not in self._types:
            return []
        mark, name, size = _OPEN - len(constants) - (1 << 20), f"{node.output[0]}.d5suite.open", self._shapes[source][0]
        self._values[name] = np.array([mark, *wanted[1:]])
        self._shapes[source][0] = mark
        made = self.expand(onnx.helper.make_node("Expand", [x, name], [node.output[0]]), constants)
        self._shapes[source][0] = size
        return made if len(made) > 1 else []

    def expand(self, node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
        """Replace an Expand to an open dimension by a sum with zeros of that size.

        The zeros are computed from an input of the network: they say whether its first elements
        exceed infinity.
        Other nodes are returned unchanged.
        """
        if node.op_type != "Expand" or node.input[1] not in self._values or node.input[0] not in self._types:
            return [node]
        x, y, wanted = node.input[0], node.output[0], self._values[node.input[1]]
        rank = max(len(wanted), len(self._shapes[x]))
        sizes = [[1] * (rank - len(shape)) + list(shape) for shape in (self._shapes[x], wanted)]
        places = [axis for axis, (have, want) in enumerate(zip(*sizes, strict=True)) if want <= _OPEN and have != want]
        if len(places) > 1 or any(sizes[0][axis] != 1 for axis in places):
            return [node]
        part = onnx.GraphProto()
        write = NodeWriter(part, y)
        fixed = write.constant(np.array([1 if size <= _OPEN else size for size in sizes[1]], np.int64))
        if not places:
            write.node("Expand", x, fixed, output=y)
        else:
            mark, kind = sizes[1][places[0]], self._types[x]
            row = next((i for i in self._inputs if mark in self._shapes.get(i, [])), "")
            if not row:
                return [node]
            shape = self._shapes[row]
            others = np.array([a for a in range(len(shape)) if a != shape.index(mark)], np.int64)
            if len(others):
                axes = write.constant(others)
                row = write.node("Slice", row, write.constant(others * 0), write.constant(others * 0 + 1), axes)
                row = write.node("Squeeze", row, axes)
            row = write.node("Cast", row, to=TensorProto.FLOAT)
            row = write.node("Greater", row, write.constant(np.float32(np.inf)))
            if rank > 1:
                added = np.array([a for a in range(rank) if a != places[0]], np.int64)
                row = write.node("Unsqueeze", row, write.constant(added))
            whole = write.node("Expand", x, fixed)
            if kind == TensorProto.BOOL:
                write.node("Or", whole, row, output=y)
            else:
                write.node("Add", whole, write.node("Cast", row, to=kind), output=y)
        constants.update({tensor.name: tensor for tensor in part.initializer})
        return list(part.node)


_BOUNDED = frozenset({"Compress", "Constant", "NonZero", "Unique"})
"""Operators whose output is at most as large as the input or the file."""


def _foldable(
    node: onnx.NodeProto,
    values: Mapping[str, onnx.TensorProto],
    shapes: Mapping[str, Shape],
    name: str,
    budget: Budget,
) -> bool:
    """Return whether a constant is folded: its size is known, and it is computed quickly.

    Refuse a constant that is too large.
    """
    read = [tuple(values[i].dims) for i in node.input if i]
    most = max([MOST_VALUES, *(2 * math.prod(shape) for shape in read)])
    stated = [shapes.get(output, (None,)) for output in node.output if output]
    if node.op_type == "ConstantOfShape":
        stated = [tuple(int(size) for size in numpy_helper.to_array(values[node.input[0]]))]
    for shape in stated:
        sizes = [0 if size is None else size for size in shape]
        if any(size < 0 for size in sizes) or math.prod(sizes) > most:
            raise NetworkError(
                f"{node.op_type} would make a constant of shape {sizes}",
                where=node.name or name,
                hint="Export the network for a smaller input, or without this node.",
            )
    bounded = node.op_type in _BOUNDED
    if not (bounded or all(None not in shape for shape in stated)) or takes_long(node.op_type, read, stated):
        return False
    made: Sequence[Shape] = read if bounded else stated
    budget.take(sum(math.prod(size or 0 for size in shape) for shape in made), node)
    return True


def shapes_of(model: onnx.ModelProto) -> dict[str, Shape]:
    """Return the shapes that a model declares, by tensor."""
    shapes: dict[str, Shape] = {t.name: tuple(t.dims) for t in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        if value.type.tensor_type.HasField("shape"):
            shapes[value.name] = tuple(
                d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim
            )
    return shapes
