"""A network exactly as its file states it, for backends that read files that d5suite cannot.

Nothing is converted or folded, and there are no parameters and no loss. May import ONNX, NumPy and,
from d5suite, `errors` and `network`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from d5suite.errors import NetworkError
from d5suite.network.given_inputs import Given, fix_inputs
from d5suite.network.graph import Node, Shape, node_of
from d5suite.network.graph_edits import read_within
from d5suite.network.model import Network
from d5suite.network.onnx_file import read


class WrittenNetwork(Network):
    """An ONNX file that is checked but not converted; see the module.

    Parameters
    ----------
    model : onnx.ModelProto
        The model with all its data; it is not copied.
    name : str
        Name in reports.
    shapes : mapping of str to sequence of int
        Dimensions by input, where the model leaves them open.

    Raises
    ------
    NetworkError
        If the model is not valid ONNX, or lacks numeric inputs or outputs.
    """

    as_written = True

    def __init__(self, model: onnx.ModelProto, *, name: str, shapes: Mapping[str, Sequence[int]]) -> None:
        try:
            onnx.checker.check_model(model)
        except Exception as error:  # onnx raises errors of any type
            raise NetworkError(f"the model is not valid ONNX: {str(error).splitlines()[0]}", where=name) from error
        graph, stored = model.graph, {tensor.name for tensor in model.graph.initializer}
        self.name, self.model = name, model
        self.initializers: dict[str, np.ndarray] = {}
        self.parameters, self.statistics, self.label, self.loss = (), (), None, None
        inputs = [value for value in graph.input if value.name not in stored]
        outputs = [value for value in graph.output if _is_of_numbers(value)]
        for value in inputs:
            if not _is_of_numbers(value):
                raise NetworkError(f"input {value.name!r} is not a tensor of numbers", where=name)
        self.inputs, self.outputs = tuple(v.name for v in inputs), tuple(v.name for v in outputs)
        self.input, self.output = self._first(self.inputs, "input"), self._first(self.outputs, "output")
        kinds = {value.name: _type(value).elem_type for value in (*inputs, *outputs)}
        self.dtypes = {name: np.dtype(helper.tensor_dtype_to_np_dtype(kind)) for name, kind in kinds.items()}
        self.shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        for value in (*inputs, *outputs):
            dims = tuple(dim.dim_value or None for dim in _type(value).shape.dim)
            stated = tuple(shapes.get(value.name, ()))
            fits = len(stated) == len(dims) and all(d in (None, s) for d, s in zip(dims, stated, strict=True))
            if stated and dims and not fits:
                raise NetworkError(f"input {value.name!r} has shape {list(dims)}, not {list(stated)}", where=name)
            self.shapes[value.name] = stated or dims
        self.nodes = tuple(_node(node, index) for index, node in enumerate(graph.node))

    def at_generic_point(self) -> Network:
        """Return the network itself, which has no parameters."""
        return self

    def with_weights(self, values: dict[str, np.ndarray]) -> Network:
        """Return the network itself, which has no parameters."""
        return self

    def without_dropout(self) -> Network:
        """Return the network itself, which is for inference."""
        return self


def load_as_written(
    path: str | Path, *, shapes: Mapping[str, Sequence[int]], given: Mapping[str, Given] | None = None
) -> WrittenNetwork:
    """Read a file for a backend that reads files itself; see `Network.load`."""
    model = read(Path(path))
    fixed = fix_inputs(model, shapes, given) if given else {}
    network = WrittenNetwork(model, name=Path(path).stem, shapes=shapes)
    network.fixed = tuple(fixed)
    return network


def _type(value: onnx.ValueInfoProto) -> onnx.TypeProto.Tensor:
    return value.type.tensor_type


def _is_of_numbers(value: onnx.ValueInfoProto) -> bool:
    if value.type.WhichOneof("value") != "tensor_type":
        return False
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(_type(value).elem_type)).kind in "biuf"
    except KeyError:
        return False


def _node(node: onnx.NodeProto, index: int) -> Node:
    """Return a node whose inputs include all tensors that its subgraphs read."""
    name, read_here = node.name or f"{node.op_type}_{index}", tuple(dict.fromkeys(read_within(node)))
    if any(attribute.type in (attribute.GRAPH, attribute.GRAPHS) for attribute in node.attribute):
        return Node(name, node.op_type, read_here, tuple(node.output))
    return node_of(node, index)
