"""Seconds of a step from its nodes: ceilings, how far a backend stays below them, and like nodes.

A node of class c takes flops / (e_f P) + bytes / (e_b B) + o: P is the ceiling of arithmetic, B
that of the smallest level that holds its bytes, e an efficiency, and o the time of a call. Kernels
differ by shape within a class, so measured nodes of like shape correct this: it is multiplied by
the geometric mean of their measured time over this formula. Nearer nodes count more. Without near
nodes the formula stays as it is (kernel regression on residuals: Nadaraya, "On estimating
regression", 1964).

Weights and their gradients come from the level that holds all of them: a step has pushed them out
of nearer ones. Convolutions are of three classes, because their kernels differ: 1 × 1 ones are
matrix products, grouped ones have short sums, all others read their input several times.

Nodes that ran as one have the sum of theirs, and are of the class of the one with most operations.
A step is its nodes times a factor, a gap after each node, the traffic of an update, and what
depends on nothing. Constants are fitted to measured layers, not negative. Imports its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from d5suite.models.ceilings import MemoryLevel, Roof
from d5suite.models.fitting import left_out_factor, nonnegative
from d5suite.models.roofline import level_of

CLASSES: Mapping[str, tuple[str, ...]] = {
    "convolution": ("Conv", "ConvTranspose"),
    "product": ("Attention", "Einsum", "Gemm", "MatMul"),
    "recurrence": ("GRU", "LSTM"),
    "normalization": (
        "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization",
        "LpNormalization", "RMSNormalization",
    ),
    "pool": ("AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"),
    "function": (
        "Elu", "Erf", "Exp", "Gelu", "Log", "LogSoftmax", "Mish", "Selu", "Sigmoid", "Softmax",
        "SoftmaxCrossEntropyLoss", "Softplus", "Tanh",
    ),
}  # fmt: skip
"""Classes of operators; all others are `ELSE`."""

ELSE = "other"

CHEAP = (ELSE, "function")
"""Classes that compilers fuse with others, and that take little time alone."""

POINTWISE, GROUPED = "1 × 1 convolution", "grouped convolution"
"""Classes of convolutions, which their shapes tell; the rest are of the class of their operator."""

BY_SHAPE = ("convolution", "product", POINTWISE, GROUPED)
"""Classes whose kernels are told apart by shapes, and not by operators."""

SHORT, REREAD = 64, 0.6
"""A grouped convolution has sums of fewer terms than `SHORT`, and each value of the input has a
place in fewer than `REREAD` of them: in one of g without groups."""

AMOUNTS = ("flops", "bytes", "calls")

LIKE = 1.0
"""Factors of two by which a node may differ from another one to be like it: the width of a normal
curve over operations, bytes, values written and places of an image."""

OTHER_OPERATOR = 4.0
"""Factors of two for which another operator of one class stands, where shapes say less."""

TREND = 0.03
"""Weight of the class's own efficiency, beside 1 of a measured node of the same shape."""

ALIKE = 0.05
"""How strongly the two efficiencies of a class are held alike. If their inverses differ by 1, that
counts as much as this relative error of all its nodes."""

NEAR_ONE = 0.02
"""How strongly a step is held to be as long as its nodes: error of a step that is as bad as being
off by all of it."""


def class_of(op_type: str) -> str:
    """Return the class of an operator."""
    return next((name for name, own in CLASSES.items() if op_type in own), ELSE)


class NodeWork(NamedTuple):
    """A node's counted work in one direction.

    Attributes
    ----------
    op_type, direction : str
    flops, bytes : float
    kind : str
        Its class, if shapes tell more than `class_of`.
    far_bytes : float
        Part of the bytes: weights, and their gradients.
    sums : float
        Values that products write.
    places : int
        Height times width of the image that a convolution writes.
    """

    op_type: str
    direction: str
    flops: float
    bytes: float
    kind: str = ""
    far_bytes: float = 0.0
    sums: float = 0.0
    places: int = 1

    @property
    def family(self) -> str:
        """Its class."""
        return self.kind or class_of(self.op_type)


def node_work(facts: Mapping[str, Any], direction: str, width: int = 4) -> NodeWork:
    """Return a node's work.

    Parameters
    ----------
    facts : mapping
        ``op_type``, ``shape`` of the output, and ``flops``, ``bytes``, ``backward_flops`` and
        ``backward_bytes``, as a record's ``layers.graph`` has them.
    direction : {"forward", "backward"}
    width : int
        Bytes of a value.
    """
    forward = direction == "forward"
    prefix = "" if forward else "backward_"
    flops, size = (float(facts.get(f"{prefix}{what}") or 0) for what in ("flops", "bytes"))
    op_type = str(facts.get("op_type", ""))
    kind, shape = class_of(op_type), tuple(facts.get("shape") or ())
    outputs, operations = math.prod(shape), float(facts.get("flops") or 0)
    if kind not in ("convolution", "product") or len(shape) < 2 or not outputs or not operations:
        return NodeWork(op_type, direction, flops, size)
    terms = operations / (2 * outputs)
    weights = terms * shape[1 if kind == "convolution" else -1]
    read = max(0.0, float(facts.get("bytes") or 0) / width - weights - outputs)
    if kind == "convolution" and read:
        uses = outputs / shape[1] * terms / read  # of a value of the input, by one output channel
        if terms < SHORT and uses < REREAD:
            kind = GROUPED
        elif uses < REREAD + 1:
            kind = POINTWISE
    far = min(size, weights * width * (1 if forward else 2))
    sums = outputs if forward else read + weights
    return NodeWork(op_type, direction, flops, size, kind, far, sums, math.prod(shape[2:]))


class TimedNodes(NamedTuple):
    """Nodes that ran as one, and their seconds."""

    nodes: Sequence[NodeWork]
    seconds: float


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured.

    Attributes
    ----------
    network : str
    nodes : sequence of NodeWork
        All that run.
    timed : sequence of TimedNodes
        From the layer pass.
    updated_bytes : float
        Bytes of parameters that the step updates; 0 of inference.
    seconds : float
    roof : Roof
    """

    network: str
    nodes: Sequence[NodeWork]
    timed: Sequence[TimedNodes]
    updated_bytes: float
    seconds: float
    roof: Roof

    @property
    def far(self) -> MemoryLevel:
        """The level of its weights."""
        return far_level(self.nodes, self.roof)

    @property
    def updating(self) -> float:
        """Seconds in which memory moves the updated bytes once."""
        return self.updated_bytes / self.roof.levels[-1].bytes_per_s


Place = tuple[str, str, str]
"""A constant's class, direction, and what it counts."""


@dataclass(frozen=True)
class LikeNodes:
    """Measured nodes of one class and direction, beside what their class's constants give.

    Attributes
    ----------
    shapes : numpy.ndarray
        float64 (n, 4): see `_shape_of`.
    ratios : numpy.ndarray
        float64 (n,): logarithms of measured seconds over the class's.
    operators : numpy.ndarray
        str (n,)
    """

    shapes: np.ndarray
    ratios: np.ndarray
    operators: np.ndarray

    def factor(self, node: NodeWork) -> float:
        """Return how many times as long similar nodes took as the constants of the class say."""
        squares = ((self.shapes - _shape_of(node)) ** 2).sum(axis=1)
        if node.family not in BY_SHAPE:
            squares = squares + np.where(self.operators == node.op_type, 0.0, OTHER_OPERATOR**2)
        weights = np.exp(-squares / (2 * LIKE**2))
        return math.exp(float(weights @ self.ratios) / (float(weights.sum()) + TREND))


def _shape_of(node: NodeWork) -> tuple[float, ...]:
    """Return, in factors of two, what tells kernels apart."""
    sizes = node.flops, node.bytes, node.sums
    place = 2 * _twos(node.places) if node.family in BY_SHAPE else _twos(node.bytes)
    return (*map(_twos, sizes), place)


def _twos(value: float) -> float:
    return math.log2(max(value, 1.0))


@dataclass(frozen=True)
class NodeTimes:
    """A fitted model of one backend, measurement and number of threads.

    Attributes
    ----------
    constants : mapping of Place to float
        For flops and bytes: 1 / efficiency. For calls: seconds.
    scale : float
        Seconds of a step per second of its nodes.
    update : float
        Passes over the updated bytes.
    fixed_s : float
    factor : float
        Nine in ten of the networks that were left out were within this factor, either way.
    seen : frozenset of str
        Operators of measured nodes.
    timed : frozenset of (str, str)
        Classes and directions of measured nodes. A class without constants ran as one with others
        wherever it was measured, whose constants hold its time. Alone it counts as nothing, so that
        only cheap classes (`CHEAP`) are known by this.
    gap_s : float
        Seconds after each node.
    like : mapping of (str, str) to LikeNodes
        By class and direction.
    """

    constants: Mapping[Place, float]
    scale: float
    update: float
    fixed_s: float
    factor: float = math.inf
    seen: frozenset[str] = frozenset()
    timed: frozenset[tuple[str, str]] = frozenset()
    gap_s: float = 0.0
    like: Mapping[tuple[str, str], LikeNodes] = field(default_factory=dict)

    def nodes_s(self, nodes: Iterable[NodeWork], roof: Roof, far: MemoryLevel | None = None) -> float:
        """Return the seconds of nodes, one after the other.

        Parameters
        ----------
        nodes : iterable of NodeWork
        roof : Roof
        far : MemoryLevel, optional
            Level that holds the weights of the whole step; by default, of these nodes.
        """
        own = tuple(nodes)
        far = far or far_level(own, roof)
        return sum(self._node_s(each, roof, far) for each in own)

    def _node_s(self, node: NodeWork, roof: Roof, far: MemoryLevel) -> float:
        place = node.family, node.direction
        seconds = sum(
            self.constants.get((*place, what), 0.0) * each for what, each in _amounts(node, roof, far).items()
        )
        return seconds * self.like[place].factor(node) if seconds and place in self.like else seconds

    def seconds(self, nodes: Sequence[NodeWork], updated_bytes: float, roof: Roof) -> float:
        """Return the seconds of a step."""
        moved = updated_bytes / roof.levels[-1].bytes_per_s
        return self.scale * self.nodes_s(nodes, roof) + self.gap_s * len(nodes) + self.update * moved + self.fixed_s

    def unknown(self, nodes: Iterable[NodeWork]) -> list[str]:
        """Return the operators behind which no measurement stands.

        Of class `ELSE`, which only moves data, any operator stands for all.
        """
        known = {place[:2] for place in self.constants} | {place for place in self.timed if place[0] in CHEAP}
        return sorted(
            {
                each.kind if each.kind in (POINTWISE, GROUPED) else each.op_type
                for each in nodes
                if (each.family, each.direction) not in known or (each.family != ELSE and each.op_type not in self.seen)
            }
        )

    def efficiency(self, name: str, direction: str) -> float | None:
        """Return the part of the ceiling of arithmetic that a class reaches, if that bounds it."""
        constant = self.constants.get((name, direction, "flops"), 0.0)
        return 1 / constant if constant else None


def far_level(nodes: Iterable[NodeWork], roof: Roof) -> MemoryLevel:
    """Return the smallest level that holds all weights of some nodes."""
    return level_of(sum(each.far_bytes for each in nodes), roof)


def _amounts(node: NodeWork, roof: Roof, far: MemoryLevel) -> dict[str, float]:
    near = (node.bytes - node.far_bytes) / level_of(node.bytes, roof).bytes_per_s
    ideal = (node.flops / roof.flops_per_s, near + node.far_bytes / far.bytes_per_s, 1.0)
    return dict(zip(AMOUNTS, ideal, strict=True))


def fit_once(points: Sequence[MeasuredStep]) -> NodeTimes:
    """Fit the constants; the model does not know how far it may be trusted.

    A node's squared error counts by 1 / its seconds, so that long ones decide and short ones speak.
    What a step takes besides its nodes is fitted to steps with the nodes' measured times and with
    their predicted ones, so that an error of a class is not taken for it.
    """
    groups: dict[tuple[str, str], list[tuple[NodeWork, list[float], float, float]]] = {}
    for point in points:
        far = point.far
        for timed in point.timed:
            main = max(timed.nodes, key=lambda each: (each.flops, each.bytes))
            amounts = [_amounts(each, point.roof, far) for each in timed.nodes]
            ideal = [sum(each[what] for each in amounts) for what in AMOUNTS]
            row = main, ideal, timed.seconds, 1 / math.sqrt(timed.seconds * point.seconds)
            groups.setdefault((main.family, main.direction), []).append(row)
    constants: dict[Place, float] = {}
    like = {}
    for place, own in groups.items():
        _, ideals, took, weights = zip(*own, strict=True)
        held = ALIKE * math.sqrt(sum((seconds * weight) ** 2 for _, _, seconds, weight in own))
        found = nonnegative([*ideals, (1.0, -1.0, 0.0)], [*took, 0.0], [*weights, held])
        constants |= {(*place, what): float(each) for what, each in zip(AMOUNTS, found, strict=True)}
        like[place] = _like([(main, float(found @ ideal), seconds) for main, ideal, seconds, _ in own])
    model = NodeTimes(constants, 1.0, 0.0, 0.0, like=like)
    steps = [
        (nodes_s, float(len(each.nodes)), each.updating, 1.0)
        for each in points
        for nodes_s in (model.nodes_s(each.nodes, each.roof), sum(timed.seconds for timed in each.timed))
    ]
    own_s = [each.seconds for each in points for _ in range(2)]
    scale, gap, update, fixed = map(
        float,
        nonnegative([*steps, (1.0, 0.0, 0.0, 0.0)], [*own_s, 1.0], [*(1 / each for each in own_s), NEAR_ONE]),
    )
    measured = [node for each in points for timed in each.timed for node in timed.nodes]
    seen = frozenset(node.op_type for node in measured)
    places = frozenset((node.family, node.direction) for node in measured)
    return NodeTimes(constants, scale, update, fixed, seen=seen, timed=places, gap_s=gap, like=like)


def _like(rows: Sequence[tuple[NodeWork, float, float]]) -> LikeNodes:
    """Return nodes with the seconds that their class's constants give, and those that they took."""
    kept = [(node, given, took) for node, given, took in rows if given > 0]
    return LikeNodes(
        np.array([_shape_of(node) for node, *_ in kept]).reshape(-1, 4),
        np.array([math.log(took / given) for _, given, took in kept]),
        np.array([node.op_type for node, *_ in kept]),
    )


def fit_steps(points: Sequence[MeasuredStep]) -> NodeTimes:
    """Fit four constants to steps whose nodes nobody has timed, such as published ones.

    They are the efficiencies of convolutions, of other products and of the traffic of all other
    nodes, and the time of a call.
    """
    places = [_coarse(node) for point in points for node in point.nodes]
    names = sorted({name for name, _ in places})

    def row(point: MeasuredStep) -> list[float]:
        found = dict.fromkeys(names, 0.0)
        for node in point.nodes:
            name, what = _coarse(node)
            found[name] += _amounts(node, point.roof, point.roof.levels[-1])[what]
        return [*(found[name] for name in names), float(len(point.nodes))]

    seconds = [max(each.seconds - each.updating, each.seconds / 2) for each in points]
    *values, gap = map(float, nonnegative(list(map(row, points)), seconds, [1 / each for each in seconds]))
    known = dict(zip(names, values, strict=True))
    constants = {
        (node.family, node.direction, what): known[name]
        for point in points
        for node in point.nodes
        for name, what in [_coarse(node)]
    }
    seen = frozenset(node.op_type for each in points for node in each.nodes)
    return NodeTimes(constants, 1.0, 1.0, 0.0, seen=seen, gap_s=gap)


def _coarse(node: NodeWork) -> tuple[str, str]:
    """Return the constant of `fit_steps` that a node has, and what it counts."""
    if node.family in ("convolution", GROUPED):
        return node.family, "flops"
    return ("product", "flops") if node.family in ("product", POINTWISE) else (ELSE, "bytes")


def predicted_s(model: NodeTimes, point: MeasuredStep) -> float | None:
    """Return the seconds that a model gives a measured step; None of operators it has not seen."""
    if model.unknown(point.nodes):
        return None
    return model.seconds(point.nodes, point.updated_bytes, point.roof)


def fit_node_times(
    points: Sequence[MeasuredStep], fit: Callable[[Sequence[MeasuredStep]], NodeTimes] = fit_once
) -> NodeTimes:
    """Fit a model, and find out how far it may be trusted by leaving out each network.

    Parameters
    ----------
    points : sequence of MeasuredStep
    fit : callable
        `fit_once` or `fit_steps`.

    Raises
    ------
    ConfigurationError
        With fewer than `d5suite.models.fitting.FEWEST_NETWORKS` networks, or if none of them has
        the operators of the others.
    """
    factor = left_out_factor(points, fit, predicted_s, lambda each: each.seconds, "times")
    return replace(fit(points), factor=factor)
