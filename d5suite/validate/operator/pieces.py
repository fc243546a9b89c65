"""Large operations cut into pieces, and the whole assembled from the pieces' answers.

Images of a batch, rows and columns of a product, heads of attention and sequences of a batch are
independent. If an operation is cut along such an axis, its outputs and the gradients of the cut
inputs are concatenations of the pieces'; the gradient of a shared input is the sum over pieces.
Bands of a convolution's image overlap by a few rows, whose gradients are added. Steps of a
recurrence form a chain: a piece starts from the previous piece's final state and returns that
state's gradient. So one small float64 operator, once proved, computes the whole.

Imports NumPy, `d5suite.levels.operator` and `d5suite.network`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from d5suite.levels.operator import Operator
from d5suite.network.nodes.windows import Window, window
from d5suite.network.operation import Operation
from d5suite.network.work import multiply_accumulates

LIMITS = {
    "AveragePool": 2e4, "Conv": 2e8, "ConvTranspose": 2e7, "MaxPool": 1e5,
    "Attention": 1e9, "GRU": 2e9, "Gemm": 1e9, "LSTM": 2e9, "MatMul": 1e9,
}  # fmt: skip
"""`size` above which an operation is cut: about 0.1 s of ONNX's evaluator in float64 on one core.
The evaluator pools in a Python loop over windows and computes products with BLAS."""

OTHERS_LIMIT = 2e6
"""Limit for all other operators."""

GATHERING = 100
"""Cost of gathering one value of a window in the evaluator, in multiply-accumulates."""

_ELEMENTWISE = frozenset(
    {"Add", "Div", "Elu", "Exp", "Gelu", "HardSwish", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Sqrt", "Sub", "Sum",
     "Tanh"}
)  # fmt: skip

_ALONG_AN_AXIS = frozenset({"LayerNormalization", "LogSoftmax", "Softmax"})


class Bands(NamedTuple):
    """A convolution's window along an axis; bands of the first input overlap there.

    Attributes
    ----------
    outputs : int
        Number of window positions.
    stride, span : int
        Distance between positions, and length of the window.
    """

    outputs: int
    stride: int
    span: int

    def slice(self, pieces: int, at: int) -> slice:
        """Return the range of the padded axis that a piece needs."""
        places = self.outputs // pieces
        start = at * places * self.stride
        return slice(start, start + (places - 1) * self.stride + self.span)


PIECES_OF_A_RECURRENCE = 16
"""Most pieces of a GRU or LSTM, however large they are: every piece copies the weights and their
gradient again, and the evaluator's five passes over one piece take about as long as a kernel's pass
over all."""


@dataclass(frozen=True)
class Cut:
    """An axis along which an operation can be cut.

    Attributes
    ----------
    inputs, outputs : mapping of int to int
        By number of an input or output: the axis that is cut. Pieces share all other inputs.
    pieces : int
        Number of equal pieces, a divisor of every length along the axis.
    states : mapping of int to int
        For a recurrence's steps: by number of a state's input, the output of the previous piece
        from which it continues.
    reverse : bool
        Whether the last piece comes first.
    bands : Bands, optional
        For a convolution's image.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    pieces: int = 1
    states: Mapping[int, int] = field(default_factory=dict)
    reverse: bool = False
    bands: Bands | None = None


_IMAGES = Cut({0: 0}, {0: 0})
_CHANNELS = Cut({0: 1}, {0: 1})

AXES: Mapping[str, tuple[Cut, ...]] = {
    "Attention": (Cut(dict.fromkeys(range(3), 0), {0: 0}), Cut(dict.fromkeys(range(3), 1), {0: 1})),
    "AveragePool": (_IMAGES, _CHANNELS),
    "BatchNormalization": (Cut({0: 1, 1: 0, 2: 0, 3: 0, 4: 0}, {0: 1, 1: 0, 2: 0}),),
    "ConvTranspose": (_IMAGES, Cut({1: 1, 2: 0}, {0: 1})),
    "GlobalAveragePool": (_IMAGES, _CHANNELS),
    "GlobalMaxPool": (_IMAGES, _CHANNELS),
    "LRN": (_IMAGES,),
    "MaxPool": (_IMAGES, _CHANNELS),
}
"""Independent axes by operator; the axes of other operators depend on attributes or shapes."""


def size(operation: Operation) -> float:
    """Return the evaluator's cost: multiply-accumulates, elements of windows, or elements."""
    sizes = [math.prod(operation.shapes[name]) for name in (*operation.node.inputs, *operation.outputs) if name]
    if operation.node.op_type in ("AveragePool", "MaxPool"):
        windows = math.prod(operation.shapes[operation.outputs[0]])
        return float(windows * math.prod(operation.node.attributes["kernel_shape"]))
    return float(multiply_accumulates(operation) + GATHERING * gathered(operation) or max(sizes, default=0))


def gathered(operation: Operation) -> int:
    """Return the number of values in all windows of a convolution; 0 for other operators."""
    node = operation.node
    if node.op_type not in ("Conv", "ConvTranspose"):
        return 0
    filters = operation.shapes[node.inputs[1]][0]  # for ConvTranspose the channels, which its windows follow
    return multiply_accumulates(operation) * int(node.attributes["group"]) // max(filters, 1)


def is_large(operation: Operation) -> bool:
    """Tell whether to cut an operation, or differentiate along fewer directions, to save time."""
    return size(operation) > LIMITS.get(operation.node.op_type, OTHERS_LIMIT)


def independent(operation: Operation) -> list[Cut]:
    """Return the axes along which an operation can be cut, each with its most pieces."""
    node = operation.node
    shapes = [operation.shapes.get(name, ()) for name in node.inputs]
    given = [index for index, name in enumerate(node.inputs) if name]
    kind, a = node.op_type, node.attributes
    wanted = [index for index, name in enumerate(node.outputs) if name]
    found: list[Cut] = []
    if operation.custom is not None:
        return found
    if kind in ("GRU", "LSTM"):
        if 4 not in given:  # sequences of different lengths
            found = _recurrent(operation)
    elif kind == "Gemm":
        rows = Cut({0: 1 if a["transA"] else 0, **_aligned(shapes[2:], 0, operation, first=2)}, {0: 0})
        columns = Cut({1: 0 if a["transB"] else 1, **_aligned(shapes[2:], 1, operation, first=2)}, {0: 1})
        found = [rows, columns]
    elif kind == "Conv":
        found = [_IMAGES, *_bands(operation)]
    elif kind == "MatMul":
        if min(map(len, shapes)) > 1:
            rank = len(operation.shapes[operation.outputs[0]])
            found = [Cut(_aligned(shapes, axis, operation), {0: axis}) for axis in range(rank - 2)]
            found += [Cut({0: len(shapes[0]) - 2}, {0: rank - 2}), Cut({1: len(shapes[1]) - 1}, {0: rank - 1})]
    elif kind in _ELEMENTWISE | _ALONG_AN_AXIS:
        rank = len(operation.shapes[operation.outputs[0]])
        if rank and wanted == [0] and (kind in _ELEMENTWISE or a["axis"] % rank):
            found = [Cut(_aligned(shapes, 0, operation), {0: 0})]
    elif kind == "Attention":
        found = list(AXES[kind]) if len(given) == 3 and wanted == [0] and len(shapes[0]) == 4 else []
    elif kind == "MaxPool":
        found = list(AXES[kind]) if wanted == [0] else []  # the other output holds positions in the whole
    else:
        found = list(AXES.get(kind, ()))
        if kind == "ConvTranspose" and a["group"] > 1:
            found = [_IMAGES]
    return [made for cut in found if (made := _counted(operation, cut)).pieces > 1]


def _aligned(shapes: Sequence[tuple[int, ...]], axis: int, operation: Operation, first: int = 0) -> dict[int, int]:
    """Return inputs that extend along an output axis without broadcasting, and their axes."""
    output = operation.shapes[operation.outputs[0]]
    places = ((number, axis - len(output) + len(shape), shape) for number, shape in enumerate(shapes, first))
    return {number: place for number, place, shape in places if place >= 0 and shape[place] == output[axis] != 1}


def _bands(operation: Operation) -> list[Cut]:
    moving = _window(operation)
    cuts = []
    for axis, place in enumerate(zip(moving.outputs, moving.strides, moving.kernel, moving.dilations, strict=True), 2):
        n, stride, kernel, dilation = place
        cuts.append(Cut({0: axis}, {0: axis}, bands=Bands(n, stride, (kernel - 1) * dilation + 1)))
    return cuts


def _window(operation: Operation) -> Window:
    image, weight = (operation.shapes[name][2:] for name in operation.node.inputs[:2])
    return window(operation.node, image, weight)


def _recurrent(operation: Operation) -> list[Cut]:
    node = operation.node
    first = node.attributes["layout"] == 1
    states = range(5, 6 if node.op_type == "GRU" else 7)
    outputs = range(1, 2 if node.op_type == "GRU" else 3)
    axis = 0 if first else 1
    batch = Cut({0: axis, **dict.fromkeys(states, axis)}, {0: 0 if first else 2, **dict.fromkeys(outputs, axis)})
    steps = Cut(
        {0: 1 - axis}, {0: 1 - axis}, states=dict(zip(states, outputs, strict=True)),
        reverse=node.attributes["direction"] == "reverse",
    )  # fmt: skip
    return [batch] if node.attributes["direction"] == "bidirectional" else [batch, steps]


def _counted(operation: Operation, cut: Cut) -> Cut:
    names = {number: name for number, name in enumerate(operation.node.inputs) if name}
    if cut.bands is not None:
        return replace(cut, pieces=cut.bands.outputs)
    if any(names.get(number) in operation.constants for number in cut.inputs):
        return cut
    lengths = [operation.shapes[names[number]][axis] for number, axis in cut.inputs.items() if number in names]
    return replace(cut, pieces=math.gcd(*lengths))


@dataclass(frozen=True)
class Pieces:
    """An operation cut into equal pieces.

    Attributes
    ----------
    whole : Operation
    part : Operation
        One piece, in float64. For a recurrence's steps it has inputs and outputs for all states.
    cuts : tuple of Cut
        The cuts; a recurrence's steps come last.
    pads : tuple of (int, int)
        Zero padding of the first input by axis, added before cutting bands; empty without bands.
    """

    whole: Operation
    part: Operation
    cuts: tuple[Cut, ...]
    pads: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """Number of pieces."""
        return math.prod(cut.pieces for cut in self.cuts)

    def outputs(self, exact: Operator, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Return the whole operation's wanted outputs in float64, computed piece by piece.

        Parameters
        ----------
        exact : Operator
            Native operator for `part`.
        arrays : sequence of numpy.ndarray or None
            The whole operation's inputs.
        """
        arrays = self._padded(arrays)
        names = self.whole.node.outputs
        found = {i: np.zeros(self.whole.shapes[name]) for i, name in enumerate(names) if name}
        for chain in self._chains():
            for place, _, answer in self._forward(exact, arrays, chain):
                for number, result in found.items():
                    result[self._at(place, number, result.shape, outputs=True)] = answer[number]
        return list(found.values())

    def gradients(
        self, exact: Operator, arrays: Sequence[np.ndarray | None], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the gradients of the whole operation's differentiable inputs in float64.

        Parameters
        ----------
        exact : Operator
            Native operator for `part`.
        arrays : sequence of numpy.ndarray or None
            The whole operation's inputs.
        gradients : sequence of numpy.ndarray
            Gradients of the outputs in `Operation.differentiated`.
        """
        arrays = self._padded(arrays)
        part, states = self.part, self.cuts[-1].states
        above = dict(zip(self.whole.differentiated, gradients, strict=True))
        found = {}
        for number in self.whole.differentiable:
            array = arrays[number]
            assert array is not None  # an omitted input is not differentiable
            found[number] = np.zeros(array.shape)
        for chain in self._chains():
            steps = list(self._forward(exact, arrays, chain) if states else self._cut(arrays, chain))
            handed: dict[int, np.ndarray] = {}
            for place, values, _ in reversed(steps):
                heads = []
                for number in part.differentiated:
                    head = handed.get(number, np.zeros(part.shapes[part.node.outputs[number]]))
                    last_only = number in states.values()
                    if number in above and not (last_only and place != steps[-1][0]):
                        whole = above[number]
                        head = head + whole[self._at(place, number, whole.shape, outputs=True)].astype(np.float64)
                    heads.append(head)
                native = exact.backward(exact.feed(values))(*exact.feed_gradients(heads))
                answer = dict(zip(part.differentiable, exact.fetch_gradients(native), strict=True))
                for number, result in found.items():
                    if number not in states or place == steps[0][0]:
                        result[self._at(place, number, result.shape)] += answer[number]
                handed = {output: answer[number] for number, output in states.items()}
        if self.pads and 0 in found:
            shape = found[0].shape
            inside = tuple(slice(before, shape[axis] - after) for axis, (before, after) in enumerate(self.pads))
            found[0] = found[0][inside]
        return list(found.values())

    def _padded(self, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        first = arrays[0]
        return [np.pad(first, self.pads), *arrays[1:]] if self.pads and first is not None else list(arrays)

    def _chains(self) -> Iterator[list[tuple[int, ...]]]:
        """Yield chains: lists of the positions of consecutive pieces."""
        last = self.cuts[-1]
        if not last.states:
            yield from ([place] for place in itertools.product(*(range(cut.pieces) for cut in self.cuts)))
            return
        steps = range(last.pieces)[:: -1 if last.reverse else 1]
        for place in itertools.product(*(range(cut.pieces) for cut in self.cuts[:-1])):
            yield [(*place, step) for step in steps]

    def _cut(
        self, arrays: Sequence[np.ndarray | None], chain: list[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], list[np.ndarray | None], dict[int, np.ndarray]]]:
        """Yield a chain's positions with float64 inputs and initial states, without outputs."""
        names = self.part.node.inputs
        for place in chain:
            values: list[np.ndarray | None] = []
            for number, array in itertools.zip_longest(range(len(names)), arrays):
                if array is not None:
                    piece = array[self._at(place, number, array.shape)]
                    values.append(np.ascontiguousarray(piece, self.part.dtypes[names[number]]))
                else:
                    state = number in self.cuts[-1].states
                    values.append(np.zeros(self.part.shapes[names[number]]) if state else None)
            yield place, values, {}

    def _forward(
        self, exact: Operator, arrays: Sequence[np.ndarray | None], chain: list[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], list[np.ndarray | None], dict[int, np.ndarray]]]:
        """Yield a chain's positions with float64 inputs, states and outputs."""
        numbers = [number for number, name in enumerate(self.part.node.outputs) if name]
        answer: dict[int, np.ndarray] = {}
        for place, values, _ in self._cut(arrays, chain):
            for number, output in self.cuts[-1].states.items() if answer else ():
                values[number] = answer[output]
            answer = dict(zip(numbers, exact.fetch(exact.forward(*exact.feed(values))), strict=True))
            yield place, values, answer

    def _at(
        self, place: tuple[int, ...], number: int, shape: tuple[int, ...], *, outputs: bool = False
    ) -> tuple[slice, ...]:
        """Return the index of a piece in a tensor of the whole operation."""
        index = [slice(None)] * len(shape)
        for cut, at in zip(self.cuts, place, strict=True):
            axis = (cut.outputs if outputs else cut.inputs).get(number)
            if axis is not None and cut.bands is not None and not outputs:
                index[axis] = cut.bands.slice(cut.pieces, at)
            elif axis is not None:
                length = shape[axis] // cut.pieces
                index[axis] = slice(at * length, (at + 1) * length)
        return tuple(index)


def in_pieces(operation: Operation) -> Pieces | None:
    """Cut a large operation into pieces small enough for ONNX's evaluator, if possible.

    A recurrence is cut along its steps first, other operations along their first axis. None if the
    operation is small or cannot be cut.
    """
    axes = independent(operation) if is_large(operation) else []
    if not axes:
        return None
    needed = size(operation) / LIMITS.get(operation.node.op_type, OTHERS_LIMIT)
    if axes[-1].states:
        needed = min(needed, PIECES_OF_A_RECURRENCE)
    divisors = [[n for n in range(1, axis.pieces + 1) if axis.pieces % n == 0] for axis in axes]
    enough = [counts for counts in itertools.product(*divisors) if math.prod(counts) >= needed]
    chosen = min(enough, key=lambda counts: counts if axes[-1].states else counts[::-1], default=None)
    if chosen is None:
        chosen = tuple(axis.pieces for axis in axes)
    banded = any(n > 1 and axis.bands for axis, n in zip(axes, chosen, strict=True))
    cuts = tuple(
        replace(axis, pieces=n)
        for axis, n in zip(axes, chosen, strict=True)
        if n > 1 or axis.states or (banded and axis.bands)
    )
    pads: tuple[tuple[int, int], ...] = ()
    if banded:
        moving = _window(operation)
        pads = ((0, 0), (0, 0), *zip(moving.pads_begin, moving.pads_end, strict=True))
    return Pieces(operation, _part(operation, cuts), cuts, pads)


def _part(operation: Operation, cuts: Sequence[Cut]) -> Operation:
    """Return one piece, in float64."""
    content = operation.with_precision("fp32").to_dict()
    inputs = list(content["inputs"].items())
    states = cuts[-1].states
    if any(made.bands for made in cuts):
        content["attributes"] = {k: v for k, v in content["attributes"].items() if k not in ("auto_pad", "pads")}
    if states:
        inputs += [(f"omitted {number}", None) for number in range(len(inputs), max(states) + 1)]
        weight, x = (operation.shapes[name] for name in (operation.node.inputs[2], operation.node.inputs[0]))
        first = operation.node.attributes["layout"] == 1
        shape = (x[0], weight[0], weight[2]) if first else (weight[0], x[1], weight[2])
        for number in states:
            if inputs[number][1] is None:
                inputs[number] = (f"state {number}", {"shape": shape, "kind": "float", "low": None, "high": None,
                                                      "scale": 1.0})  # fmt: skip
        content["outputs"] = [True] * (1 + len(states))
    for number, (key, value) in enumerate(inputs):
        if value is not None and "values" not in value:
            lengths = list(value["shape"])
            for made in cuts:
                if number in made.inputs and made.bands is not None:
                    band = made.bands.slice(made.pieces, 0)
                    lengths[made.inputs[number]] = band.stop
                elif number in made.inputs:
                    lengths[made.inputs[number]] //= made.pieces
            inputs[number] = (key, {**value, "shape": lengths})
    return Operation.from_dict({**content, "inputs": dict(inputs)}, precision="fp64")
