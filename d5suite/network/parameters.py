"""Distinguish a model's weights from constants of its code, and keep shared weights shared.

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

from d5suite.network.folding import NUMBER, shapes_of
from d5suite.network.graph_edits import NodeWriter, remove_items, rename_inputs, replace_items, rewrite_nodes

_FLOATS = (TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16)

_COMPUTED = "d5suite.computed"
"""Metadata key: the initializers that do not depend on a weight of the file, one name per line."""


def computed(model: onnx.ModelProto) -> frozenset[str]:
    """Return the initializers of a normalised model that are constants of its code."""
    return frozenset(name for each in model.metadata_props if each.key == _COMPUTED for name in each.value.split("\n"))


def weights_of(model: onnx.ModelProto) -> set[str]:
    """Return the names of weights: floating-point initializers, or constants in a file without any.

    `onnx.tools.replace_constants` replaces large weights by nodes that fill a shape, as in ONNX's
    light networks; the shape is named after the weight.
    """
    kinds, constants = _FLOATS, computed(model) | _exported_constants(model)
    named = _NUMBERS.get(model.producer_name, re.compile("(?!)"))
    signed = _signature(model)
    numbers = {name for name, kind in signed.items() if kind == _TRAINED}
    numbers |= {name for name, sources in _folded(model).items() if not numbers.isdisjoint(sources)}

    def trained(name: str) -> bool:
        return name in numbers if signed else bool(named.fullmatch(name))

    found = {
        t.name
        for t in model.graph.initializer
        if t.data_type in kinds and t.name not in constants and (t.dims or trained(t.name))
    }
    found.update(name for node in model.graph.node for name in node.output[:1] if f"{name}{_REPLACED}" in node.input)
    stated = [node for node in model.graph.node if node.op_type == "Constant" and node.output]
    tensors = ((node.output[0], a.t) for node in stated for a in node.attribute if a.name == "value")
    return found or {name for name, tensor in tensors if tensor.data_type in kinds and tensor.dims}


_REPLACED = "__SHAPE"
"""Suffix of the tensor that holds the shape of a replaced weight."""

_NUMBERS = {
    # constants are called onnx::Mul_39 and val_128, even if a tool has dropped the signature
    "pytorch": re.compile(r"(?!.*d5suite|_?val_\d+$|scalar_tensor)[A-Za-z_][\w.]*"),
    "tf2onnx": re.compile(r"(?!.*d5suite).*/ReadVariableOp(:\d+)?"),
}
"""Names of scalar initializers that are weights, by producer."""


def lift_numbers(model: onnx.ModelProto, weights: set[str]) -> None:
    """Store scalar weights as arrays of length one, because parameters are arrays."""
    graph = model.graph
    numbers = [tensor for tensor in graph.initializer if tensor.name in weights and not tensor.dims]
    rename_inputs(graph.node, {tensor.name: tensor.name + NUMBER for tensor in numbers})
    for tensor in numbers:
        tensor.dims.append(1)
    lifted = [onnx.helper.make_node("Squeeze", [t.name], [t.name + NUMBER], t.name + NUMBER) for t in numbers]
    replace_items(graph.node, [*lifted, *graph.node])


def _exported_constants(model: onnx.ModelProto) -> set[str]:
    """Return initializers that PyTorch's newer exporter does not derive from parameters.

    Its files hold the signature of the exported program, and the sources of folded initializers.
    """
    kinds = _signature(model)
    trained = {name for name, kind in kinds.items() if kind == _TRAINED}
    if not trained:
        return set()
    return {name for name, kind in kinds.items() if kind != _TRAINED} | {
        name for name, sources in _folded(model).items() if trained.isdisjoint(sources)
    }


def _folded(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Return the sources of initializers that PyTorch's newer exporter folded."""
    named = (*model.graph.value_info, *model.graph.initializer)
    return {each.name: _NAME.findall(p.value) for each in named for p in each.metadata_props if p.key == _FOLDED}


def _signature(model: onnx.ModelProto) -> dict[str, str]:
    """Return the kinds of inputs and initializers in the signature of PyTorch's newer exporter."""
    stated = {each.key: each.value for each in (*model.metadata_props, *model.graph.metadata_props)}
    signed = next((value for key, value in stated.items() if key.endswith(_SIGNED)), "")
    return {name: kind for kind, name in _SIGNATURE.findall(signed)}


_TRAINED = "PARAMETER"
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
    remove_items(model.metadata_props, lambda each: each.key == _COMPUTED)
    if names:
        model.metadata_props.add(key=_COMPUTED, value="\n".join(names))


def tied_products(model: onnx.ModelProto, weights: set[str]) -> dict[str, str]:
    """Return, by output of a MatMul, the shared matrix that the MatMul reads transposed."""
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
    """Replace a weight that is the transpose of another by a Transpose node.

    PyTorch's exporters store a head that is tied to the embedding table as a second matrix, and a
    standardised kernel twice: for its mean and for its values.
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
    gone = {node.output[0] for node in turned}
    replace_items(graph.node, [*turned, *graph.node])
    remove_items(graph.initializer, lambda tensor: tensor.name in gone)
    weights.difference_update(gone)


def join_copies(model: onnx.ModelProto, weights: set[str]) -> None:
    """Join copies of a weight that nodes of the same layer read.

    PyTorch's older exporter stores equal initializers once, and writes an Identity for every
    further copy. The copies are one weight if a layer is called twice. They are several weights if
    different layers have equal initial values; then the readers belong to different layers.
    """
    graph = model.graph
    arrays = {t.name: numpy_helper.to_array(t) for t in graph.initializer if t.name in weights}
    outputs = {value.name for value in graph.output}
    copied = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Identity" and node.input[0] in arrays and node.output[0] not in outputs
    }
    layers: dict[str, str] = {}
    for node in graph.node:
        for name in node.input if node.output[0] not in copied else ():
            if copied.get(name, name) in arrays:
                layers.setdefault(name, _layer(node.name))
    firsts: dict[tuple[str, str], str] = {}
    same: dict[str, str] = {}
    for name in (*arrays, *copied):
        source = copied.get(name, name)
        if name in layers and _is_drawn(arrays[source]):
            same[name] = firsts.setdefault((source, layers[name]), name)
    rename_inputs(graph.node, same)


def _layer(name: str) -> str:
    """Return the path of a node's layer, without the number of a repeated call."""
    return "/".join(re.sub(r"_\d+$", "", part) for part in name.split("/")[:-1])


def _is_drawn(array: np.ndarray) -> bool:
    """Return whether equal copies are no coincidence, unlike initial ones, zeros or identities."""
    return _is_telling(array) if array.ndim > 1 else array.size > 1 and bool(np.ptp(array) > 0)


def _is_telling(array: np.ndarray) -> bool:
    """Return whether an equal transpose is no coincidence: not constant and not symmetric."""
    return array.size > 0 and bool(np.ptp(array) > 0) and not np.array_equal(array, np.swapaxes(array, -1, -2))


def share(model: onnx.ModelProto, tied: Mapping[str, str]) -> bool:
    """Let products read shared matrices directly; a folded transpose would be a second weight."""
    shapes, fixed = shapes_of(model), {tensor.name for tensor in model.graph.initializer}

    def rewrite(node: onnx.NodeProto, write: NodeWriter) -> bool:
        y = node.output[0]
        sizes = [-1 if size is None else size for size in shapes.get(y, ())]
        if tied.get(y) not in fixed or node.op_type != "MatMul" or len(sizes) < 2 or sizes.count(-1) > 1:
            return False
        rows = node.input[0]
        if len(sizes) == 2:
            write.node("Gemm", rows, tied[y], output=y, name=node.name, transB=1)
            return True
        rows = write.node("Reshape", rows, write.constant(np.array([-1, shapes[rows][-1] or -1])))
        product = write.node("Gemm", rows, tied[y], name=node.name, transB=1)
        write.node("Reshape", product, write.constant(np.array(sizes)), output=y)
        return True

    return rewrite_nodes(model.graph, rewrite)
