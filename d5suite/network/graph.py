"""`Graph` and `Node`: a validated, normalised ONNX graph and the facts about it.

Any ``.onnx`` model is brought into one form (`d5suite.network.normalise`), so that adapters see one
meaning per operator, with ONNX's default attributes filled in. May import ONNX, NumPy and, from
d5suite, `errors` and `network`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from d5suite.errors import NetworkError
from d5suite.network.folding import Shape as Shape
from d5suite.network.folding import shapes_of
from d5suite.network.normalise import normalised
from d5suite.network.parameters import computed

_SETTINGS = {"Resize": (1, 2)}
"""By operator: numbers of floating-point inputs that are settings: regions and scales."""

_MASKED = frozenset({"Add", "Attention", "Cast", "Concat", "Expand", "Gather", "Identity", "Max", "Min", "Mul",
                     "Reshape", "Slice", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where"})  # fmt: skip
"""Operators that may read a mask of minus infinity; all others read weights, which are finite."""

_STATISTICS_INPUTS = {"BatchNormalization": (3, 4)}


@dataclass(frozen=True)
class Node:
    """One operator of a network.

    Attributes
    ----------
    name : str
        Unique within the network.
    op_type : str
        The ONNX operator; ``domain::Op`` if its domain is not ONNX's own.
    inputs, outputs : tuple of str
        Tensor names; ``""`` for an omitted optional input or output.
    attributes : mapping
        Python values (int, float, str, list or NumPy array), ONNX's defaults filled in.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Graph:
    """A neural network in neutral form; `d5suite.network.Network` adds methods that rewrite it.

    Parameters
    ----------
    model : onnx.ModelProto
        A complete model; it is copied, checked and normalised.
    name : str, optional
        Name in reports; by default the graph's name.
    input, output : str, optional
        The main input, such as the images (N, C, H, W), and the output that a loss takes, such as
        (N, classes). By default the graph's first input and first output.
    label, loss : str, optional
        The label input, int64 (N,) or (N, classes), or targets in float32, and the scalar mean
        loss. Give both or neither; without them the network is for inference only.
    shapes : mapping, optional
        Dimensions by input, where the model leaves them open. Needed if the model computes with its
        batch size, other than in reshapes.

    Attributes
    ----------
    inputs, outputs : tuple of str
        All inputs but the label, and all outputs but the loss.

    Raises
    ------
    NetworkError
        If the model is invalid, or the names do not fit it.
    """

    as_written = False
    """Whether this is a file's network without conversion; see `d5suite.network.as_written`."""

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        name: str | None = None,
        input: str | None = None,
        output: str | None = None,
        label: str | None = None,
        loss: str | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.name = name or model.graph.name or "network"
        self.model = normalised(model, self.name, shapes)
        graph = self.model.graph
        self.initializers: dict[str, np.ndarray] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        inputs = [i.name for i in graph.input if i.name not in self.initializers]
        outputs = [o.name for o in graph.output]
        if (label is None) != (loss is None):
            raise NetworkError("give both a label and a loss, or neither", where=self.name)
        self.inputs = tuple(i for i in inputs if i != label)
        self.outputs = tuple(o for o in outputs if o != loss)
        self.input = input or self._first(self.inputs, "input")
        self.output = output or self._first(self.outputs, "output")
        self.label = label
        self.loss = loss
        for kind, wanted, known in (
            ("input", self.input, inputs),
            ("label", label, inputs),
            ("output", self.output, outputs),
            ("loss", loss, outputs),
        ):
            if wanted is not None and wanted not in known:
                raise NetworkError(
                    f"the network has no {kind} {wanted!r}",
                    where=self.name,
                    hint=f"It has: {', '.join(known) or 'none'}.",
                )
        self.nodes: tuple[Node, ...] = _without_unused_outputs(
            _named_apart([node_of(n, i) for i, n in enumerate(graph.node)]), outputs
        )
        self.shapes: dict[str, Shape] = shapes_of(self.model)
        self.dtypes: dict[str, np.dtype] = _dtypes_of(graph)
        self.statistics: tuple[str, ...] = tuple(
            dict.fromkeys(
                node.inputs[i]
                for node in self.nodes
                for i in _STATISTICS_INPUTS.get(node.op_type, ())
                if node.inputs[i]
            )
        )
        made = computed(self.model)
        constants = {n for n in self.initializers if n in made or self._changes_nothing(n)}
        fixed = {n.inputs[i] for n in self.nodes for i in _SETTINGS.get(n.op_type, ()) if i < len(n.inputs)}
        self.parameters: tuple[str, ...] = tuple(
            name
            for name, value in self.initializers.items()
            if value.dtype.kind == "f"
            and value.ndim > 0
            and name not in (*self.statistics, *fixed, *constants)
            and not self._masks(name, value)
        )

    def _masks(self, name: str, value: np.ndarray) -> bool:
        """Return whether a tensor is a mask: it has -infinity, and only `_MASKED` reads it."""
        if value.size == 1:
            return bool(np.isinf(value).all())
        if np.isnan(value).any() or not np.isneginf(value).any() or np.isposinf(value).any():
            return False
        return all(node.op_type in _MASKED for node in self.nodes if name in node.inputs)

    def _changes_nothing(self, name: str) -> bool:
        """Return whether a tensor is an exporter's neutral scale or bias, or a scatter's base.

        Exporters write GroupNormalization as a reshape and an InstanceNormalization, and some store
        the ones and zeros of the latter among the weights. The reshapes on both sides distinguish
        them from the scale and bias of a layer.
        """
        value = self.initializers[name]
        if not value.size or (value != value.flat[0]).any():
            return False
        readers = [(node, i) for node in self.nodes for i, each in enumerate(node.inputs) if each == name]
        places = {(node.op_type, i, value.flat[0]) for node, i in readers}
        if places <= {("InstanceNormalization", 1, 1.0), ("InstanceNormalization", 2, 0.0)}:
            around = [(n.inputs[0], n.outputs[0]) for n in self.nodes if n.op_type == "Reshape"]
            before, after = {y for _, y in around}, {x for x, _ in around}
            return all(node.inputs[0] in before and node.outputs[0] in after for node, _ in readers)
        return {(operator, i) for operator, i, _ in places} <= {("ScatterND", 0), ("ScatterElements", 0)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.nodes)} nodes, {len(self.parameters)} parameters)"

    def _first(self, names: Sequence[str], kind: str) -> str:
        if not names:
            raise NetworkError(f"the network has no {kind}", where=self.name)
        return names[0]

    @property
    def constants(self) -> tuple[str, ...]:
        """Initializers that are neither parameters nor statistics: shapes, axes, scalars."""
        weights = {*self.parameters, *self.statistics}
        return tuple(name for name in self.initializers if name not in weights)

    @property
    def batch_size(self) -> int | None:
        """The batch size that the graph fixes; None if any works."""
        return self.shapes[self.input][0] if self.batched else 1

    @property
    def batched(self) -> bool:
        """Whether the first axis of all inputs is the batch."""
        first = {self.shapes[name][:1] for name in self.inputs}
        return len(first) == 1 and first != {()}

    @property
    def has_targets(self) -> bool:
        """Whether the loss compares outputs with targets, which are floating-point numbers."""
        return self.label is not None and self.dtypes[self.label].kind == "f"

    def arrays(self, batch: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch's arrays by input.

        Parameters
        ----------
        batch : numpy.ndarray
            The only input; or a structured array along the batch, with one field per input. Inputs
            without a common first axis count as one sample.
        """
        if batch.dtype.names is None:
            return {self.input: batch}
        return {name: np.array(batch[name] if self.batched else batch[name][0], order="C") for name in self.inputs}

    def require_loss(self) -> tuple[str, str]:
        """Return the names of the label input and of the loss.

        Raises
        ------
        NetworkError
            If the network has no loss.
        """
        if self.label is None or self.loss is None:
            raise NetworkError(
                "the network has no loss, so it cannot be trained",
                where=self.name,
                hint="Network.with_classification_loss() adds one.",
            )
        return self.label, self.loss

    def nodes_for(self, outputs: Iterable[str]) -> tuple[Node, ...]:
        """Return the nodes that these outputs need, in execution order."""
        needed = set(outputs)
        chosen = []
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                chosen.append(node)
                needed.update(node.inputs)
        return tuple(reversed(chosen))


def node_of(node: onnx.NodeProto, index: int) -> Node:
    """Return a `Node` with ONNX's default attributes filled in."""
    domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}::"
    attributes: dict[str, Any] = {}
    if not domain and onnx.defs.has(node.op_type):
        for key, attribute in onnx.defs.get_schema(node.op_type).attributes.items():
            if attribute.default_value.name:
                attributes[key] = _attribute(attribute.default_value)
    attributes.update({a.name: _attribute(a) for a in node.attribute})
    return Node(
        node.name or f"{node.op_type}_{index}", domain + node.op_type, tuple(node.input), tuple(node.output), attributes
    )


def _dtypes_of(graph: onnx.GraphProto) -> dict[str, np.dtype]:
    """Return the types that a graph declares, by tensor."""
    found = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        found[value.name] = value.type.tensor_type.elem_type
    return {name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)) for name, kind in found.items() if kind}


def _named_apart(nodes: list[Node]) -> list[Node]:
    """Make node names unique: the generated name of a node without one may be taken."""
    taken: set[str] = set()
    apart = []
    for node in nodes:
        name = node.name
        while name in taken:
            name += "_"
        taken.add(name)
        apart.append(node if name == node.name else replace(node, name=name))
    return apart


def _without_unused_outputs(nodes: list[Node], wanted: Iterable[str]) -> tuple[Node, ...]:
    """Omit optional outputs that nothing reads, such as Dropout's mask."""
    read = {*wanted, *(name for node in nodes for name in node.inputs)}
    kept = []
    for node in nodes:
        outputs = [name if i == 0 or name in read else "" for i, name in enumerate(node.outputs)]
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
        kept.append(replace(node, outputs=tuple(outputs)))
    return tuple(kept)


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, int | float):
        return value
    return [v.decode(errors="replace") if isinstance(v, bytes) else v for v in value]
