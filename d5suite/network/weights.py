"""The weights of a model: told apart from constants of its code; shared ones stay shared.

May import ONNX, NumPy and, from d5suite, `network.folding`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from d5suite.network.folding import shapes_of, tensor_of

_FLOATS = (TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16)

_COMPUTED = "d5suite.computed"
"""Key of a model's metadata: initializers that no weight of the file went into, a name a line."""


def computed(model: onnx.ModelProto) -> frozenset[str]:
    """Return initializers of a normalised model that are constants of its code, no weights."""
    return frozenset(name for each in model.metadata_props if each.key == _COMPUTED for name in each.value.split("\n"))


def weights_of(model: onnx.ModelProto) -> set[str]:
    """Return what may be weights: initializers, or the constants of a file without any."""
    kinds, constants = _FLOATS, computed(model) | _exported_constants(model)
    found = {t.name for t in model.graph.initializer if t.data_type in kinds and t.dims and t.name not in constants}
    stated = [node for node in model.graph.node if node.op_type == "Constant" and node.output]
    tensors = ((node.output[0], a.t) for node in stated for a in node.attribute if a.name == "value")
    return found or {name for name, tensor in tensors if tensor.data_type in kinds and tensor.dims}


def _exported_constants(model: onnx.ModelProto) -> set[str]:
    """Return initializers that PyTorch's newer exporter says are no parameters, nor made of any.

    A file of it has the signature of the exported program, and what an initializer was folded from.
    """
    stated = {each.key: each.value for each in (*model.metadata_props, *model.graph.metadata_props)}
    signed = next((value for key, value in stated.items() if key.endswith(_SIGNED)), "")
    kinds = {name: kind for kind, name in _SIGNATURE.findall(signed)}
    trained = {name for name, kind in kinds.items() if kind == "PARAMETER"}
    if not trained:
        return set()
    named = (*model.graph.value_info, *model.graph.initializer)
    folded = {each.name: p.value for each in named for p in each.metadata_props if p.key == _FOLDED}
    return {name for name, kind in kinds.items() if kind != "PARAMETER"} | {
        name for name, sources in folded.items() if trained.isdisjoint(_NAME.findall(sources))
    }


_SIGNED = ".export.ExportedProgram.graph_signature"
_SIGNATURE = re.compile(r"^\S+: ([A-Z_]+) target='([^']*)'", re.MULTILINE)
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_NAME = re.compile(r"'([^']*)'")


def mark_computed(model: onnx.ModelProto, weights: set[str]) -> None:
    """Record in a model which initializers are not weights; see `computed`."""
    names = [
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and tensor.dims and tensor.name not in weights
    ]
    for place in reversed(range(len(model.metadata_props))):
        if model.metadata_props[place].key == _COMPUTED:
            del model.metadata_props[place]
    if names:
        model.metadata_props.add(key=_COMPUTED, value="\n".join(names))


def tied_products(model: onnx.ModelProto, weights: set[str]) -> dict[str, str]:
    """Return the matrices that others read too, by the products that take them transposed."""
    graph = model.graph
    matrices = {t.name for t in graph.initializer if t.name in weights and len(t.dims) == 2}
    readers = Counter(name for node in graph.node for name in node.input)
    turned = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Transpose"
        and node.input[0] in matrices
        and readers[node.input[0]] > 1
        and all(list(a.ints) == [1, 0] for a in node.attribute)
    }
    return {n.output[0]: turned[n.input[1]] for n in graph.node if n.op_type == "MatMul" and n.input[1] in turned}


def turn_twins(model: onnx.ModelProto, weights: set[str]) -> None:
    """Make a weight that is another one's transpose a node that transposes it.

    PyTorch's exporters write a head that is tied to its table of embeddings as a second matrix, and
    a kernel that is standardised once for its mean and once for its values.
    """
    graph = model.graph
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    columns: dict[tuple[Any, ...], str] = {}  # the first column of the transpose is the first row
    turned: list[onnx.NodeProto] = []
    arrays = {t.name: numpy_helper.to_array(t) for t in graph.initializer if t.name in weights and len(t.dims) > 1}
    for name in sorted(arrays, key=lambda each: each not in tables):
        array, swapped = arrays[name], np.swapaxes(arrays[name], -1, -2)
        source = columns.get((swapped.shape, array[..., :1, :].tobytes()), "")
        if source and _is_telling(array) and np.array_equal(swapped, arrays[source]):
            order = [*range(array.ndim - 2), array.ndim - 1, array.ndim - 2]
            turned.append(onnx.helper.make_node("Transpose", [source], [name], f"{name}.d5suite", perm=order))
        else:
            columns.setdefault((array.shape, array[..., :1].tobytes()), name)
    if not turned:
        return
    nodes, gone = list(graph.node), {node.output[0] for node in turned}
    graph.ClearField("node")
    graph.node.extend([*turned, *nodes])
    for place in reversed(range(len(graph.initializer))):
        if graph.initializer[place].name in gone:
            del graph.initializer[place]
    weights.difference_update(gone)


def _is_telling(array: np.ndarray) -> bool:
    """Return whether an equal transpose is no accident: layers begin with ones or the identity."""
    return bool(np.ptp(array) > 0) and not np.array_equal(array, np.swapaxes(array, -1, -2))


def share(model: onnx.ModelProto, tied: Mapping[str, str]) -> bool:
    """Let products take shared matrices as they are: a folded transpose would be another weight."""
    graph, shapes = model.graph, shapes_of(model)
    fixed, nodes, changed = {tensor.name for tensor in graph.initializer}, list(graph.node), False
    graph.ClearField("node")
    for node in nodes:
        y = node.output[0]
        sizes = [-1 if size is None else size for size in shapes.get(y, ())]
        if tied.get(y) not in fixed or node.op_type != "MatMul" or len(sizes) < 2 or sizes.count(-1) > 1:
            graph.node.append(node)
            continue
        changed, make, x, product = True, onnx.helper.make_node, node.input[0], y
        if len(sizes) > 2:
            x, product = f"{y}.d5suite.rows", f"{y}.d5suite.product"
            wanted = {f"{x}.shape": [-1, shapes[node.input[0]][-1] or -1], f"{y}.d5suite.sizes": sizes}
            graph.initializer.extend(tensor_of(np.array(value, np.int64), name) for name, value in wanted.items())
            graph.node.append(make("Reshape", [node.input[0], f"{x}.shape"], [x], x))
        graph.node.append(make("Gemm", [x, tied[y]], [product], node.name, transB=1))
        if product != y:
            graph.node.append(make("Reshape", [product, f"{y}.d5suite.sizes"], [y], f"{y}.d5suite.reshape"))
    return changed
