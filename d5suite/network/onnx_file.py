"""Read an ONNX file, and refuse a model that no adapter could run, before anything is allocated.

A model is untrusted: it is parsed, checked and bounded, and never executed. May import ONNX, NumPy
and `d5suite.errors`.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from d5suite.errors import NetworkError, UnreadNetworkError

OLDEST_OPSET = 9
"""The oldest operator-set version accepted; from here on ONNX's version converter is complete."""


def read(path: Path) -> onnx.ModelProto:
    """Read an ``.onnx`` file and its external data.

    Raises
    ------
    NetworkError
        If it is missing or corrupt, or points outside its folder.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO would block
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NetworkError("this is not a regular file", where=str(path))
            model = onnx.load_model_from_string(file.read())
    except NetworkError:
        raise
    except OSError as error:
        raise NetworkError(f"cannot read the network: {error.strerror or error}", where=str(path)) from error
    except Exception as error:  # protobuf's decode errors share no public base class across versions
        raise NetworkError(
            "this is not an ONNX model, or it is cut short", where=str(path), hint=f"The parser reports: {error}"
        ) from error
    if not model.graph.node:
        raise NetworkError("this is not an ONNX model, or it has no nodes", where=str(path))
    _load_external_data(model, path)
    return model


def _load_external_data(model: onnx.ModelProto, path: Path) -> None:
    folder = path.parent.resolve()
    linked = path.resolve().parent  # a download cache links to one folder with all its files
    for tensor in (*_tensors(model.graph), *(t for f in model.functions for n in f.node for t in _tensors_of(n))):
        if not onnx.external_data_helper.uses_external_data(tensor):
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        target = folder / location
        _check_location(target, location, tensor.name, str(path))
        base = linked if target.is_symlink() and target.resolve().parent == linked else folder
        if target.is_symlink() and base == folder:
            raise NetworkError(
                f"the data file {location!r} of tensor {tensor.name!r} is a symbolic link, which may lead anywhere",
                where=str(path),
                hint="Copy the model and its data into one folder: cp -L.",
            )
        if not location or not target.resolve().is_relative_to(base):
            raise NetworkError(
                f"the data of tensor {tensor.name!r} lie outside the model's folder: {location!r}",
                where=str(path),
                hint="Put the model and its data into one folder.",
            )
        if not target.is_file():
            found = "not a regular file" if target.exists() else "missing"
            raise NetworkError(
                f"the data file {location!r} of tensor {tensor.name!r} is {found}",
                where=str(path),
                hint="Copy it beside the model; both are one export.",
            )
        needed, offset = _bytes(tensor), entries.get("offset", "0")
        stored = target.stat().st_size - int(offset) if offset.isdecimal() else -1
        if needed > stored:
            raise NetworkError(
                f"tensor {tensor.name!r} needs {needed:,} bytes, but {location!r} has {max(stored, 0):,} for it",
                where=str(path),
                hint="Is the data file cut short, or from another export?",
            )
        if "length" not in entries:  # onnx reads to the end of the file
            tensor.external_data.add(key="length", value=str(needed))
        for entry in tensor.external_data:
            if entry.key == "location" and base != folder:
                entry.value = target.resolve().name
        try:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(base))
        except Exception as error:  # onnx raises several unrelated types for bad offsets and lengths
            raise NetworkError(f"the model's external data cannot be read: {error}", where=str(path)) from error


def _check_location(target: Path, location: str, tensor: str, where: str) -> None:
    """Refuse a location that no file can have."""
    try:
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):  # the caller reports a missing file
        return
    except (OSError, ValueError) as error:
        raise NetworkError(
            f"the data of tensor {tensor!r} cannot lie at {location[:40]!r}...: {getattr(error, 'strerror', error)}",
            where=where,
            hint="Export the model again, with its data in one file beside it.",
        ) from None


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors stored in a graph and its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        yield from _tensors_of(node)


def _tensors_of(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        yield from (attribute.t, *attribute.tensors)
        for graph in (attribute.g, *attribute.graphs):
            yield from _tensors(graph)


def _bytes(tensor: onnx.TensorProto) -> int:
    """Return the least number of bytes of a tensor's data; types below one byte are packed."""
    try:
        size = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    except KeyError:
        size = 1
    return math.prod(tensor.dims) * size // (2 if size == 1 else 1)


def opset(model: onnx.ModelProto, name: str) -> int:
    """Return the operator-set version of a model; refuse several, too old, and unknown versions."""
    versions = {o.version for o in model.opset_import if o.domain in ("", "ai.onnx")} or {0}
    least, newest, newest_file = min(versions), onnx.defs.onnx_opset_version(), int(onnx.IR_VERSION)
    if len(versions) > 1:
        raise NetworkError(f"it names several opsets: {', '.join(map(str, sorted(versions)))}", where=name)
    if not least and (others := sorted({o.domain for o in model.opset_import} - {"", "ai.onnx"})):
        raise NetworkError(
            f"it has only operators of {', '.join(others)}, none of ONNX itself: d5suite reads neural networks",
            where=name,
        )
    if least < OLDEST_OPSET:
        raise NetworkError(
            f"opset {least} is too old; d5suite reads opset {OLDEST_OPSET} and later",
            where=name,
            hint="Export the model again with a newer opset.",
        )
    for what, found, known in (("opset", least, newest), ("ir_version", model.ir_version, newest_file)):
        if found > known:
            raise NetworkError(
                f"{what} {found} is newer than the installed onnx {onnx.__version__} supports: up to {known}",
                where=name,
                hint="Export the model again with an older one, or install a newer onnx.",
            )
    return least


def check_graph(model: onnx.ModelProto) -> None:
    """Refuse duplicate names of tensors, attributes out of range, and unsorted nodes."""
    _check_names(model.graph)
    _check_attributes(model.graph)
    _check_order(model.graph)


def _check_names(graph: onnx.GraphProto) -> None:
    """Refuse a name that two tensors, inputs or outputs share."""
    for what, names in (
        ("outputs of nodes are", [o for n in graph.node for o in n.output if o]),
        ("initializers are", [t.name for t in graph.initializer]),
        ("inputs of the graph are", [i.name for i in graph.input]),
        ("outputs of the graph are", [o.name for o in graph.output]),
    ):
        seen: set[str] = set()
        for each in names:
            if each in seen:
                raise NetworkError(f"two {what} called {each!r}", where=each, hint="Give each a name of its own.")
            seen.add(each)
    taken = {*(t.name for t in graph.initializer), *(i.name for i in graph.input)}
    for index, node in enumerate(graph.node):
        for each in taken.intersection(node.output):
            raise NetworkError(
                f"{node.op_type} writes {each!r}, which is an input or an initializer",
                where=node.name or f"{node.op_type}_{index}",
                hint="Give each a name of its own.",
            )


def _check_order(graph: onnx.GraphProto) -> None:
    """Refuse a node that reads a tensor before it is computed."""
    there = {"", *(t.name for t in graph.initializer), *(v.name for v in graph.input)}
    there.update(t.values.name for t in graph.sparse_initializer)
    for index, node in enumerate(graph.node):
        for name in node.input:
            if name not in there:
                later = any(name in other.output for other in graph.node)
                raise NetworkError(
                    f"{node.op_type} reads {name!r}, which {'only a later node' if later else 'nothing'} provides",
                    where=node.name or f"{node.op_type}_{index}",
                    hint="The graph has a cycle, or its nodes are not sorted."
                    if later
                    else "Is the file cut short, or was a node removed?",
                )
        there.update(node.output)


MOST = (1 << 31) - 1
"""The largest size: products of two fit into 64 bits, and ONNX reads an axis in 32."""

_WITHIN = {
    **dict.fromkeys(("dilations", "group", "hidden_size", "kernel_shape", "output_shape", "strides"), (1, MOST)),
    **dict.fromkeys(("output_padding", "pads"), (0, MOST)),
    **dict.fromkeys(("axes", "axis", "perm"), (-MOST, MOST)),
    **dict.fromkeys(("allowzero", "ceil_mode", "count_include_pad", "keepdims", "noop_with_empty_axes"), (0, 1)),
    **dict.fromkeys(("storage_order", "training_mode", "transA", "transB"), (0, 1)),
    "size": (1, 1 << 16),
}
"""Ranges of attributes; beyond them ONNX's shape inference divides by zero or overflows."""


def _check_attributes(graph: onnx.GraphProto) -> None:
    """Refuse attributes beyond `_WITHIN`."""
    for index, node in enumerate(graph.node):
        for attribute in node.attribute if node.domain in ("", "ai.onnx") else ():
            least, most = _WITHIN.get(attribute.name, (-(1 << 63), 1 << 63))
            if node.op_type == "Pad":  # an attribute before opset 11; negative pads crop
                least = -MOST
            for value in [attribute.i] if attribute.type == attribute.INT else attribute.ints:
                if not least <= value <= most:
                    raise NetworkError(
                        f"{node.op_type}: {attribute.name} has {value}, not a number from {least} to {most}",
                        where=node.name or f"{node.op_type}_{index}",
                    )


_UNFIT = {
    "control flow is": (
        ("If", "Loop", "Scan"),
        "Export the model without loops, and without conditionals on data; or state the shapes.",
    ),
    "quantised networks are": (
        ("DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear", "*Integer", "QLinear*"),
        "Export the network before its quantisation, in float32 or float16.",
    ),
    "sequences and optional values are": (
        ("Sequence*", "ConcatFromSequence", "SplitToSequence", "Optional*"),
        "Export the network so that its tensors have names of their own, as inputs and outputs.",
    ),
}
"""Unsupported kinds of networks: the operators that mark them, and a hint."""


_NUMBERS = frozenset(
    {
        TensorProto.UNDEFINED, TensorProto.BFLOAT16, TensorProto.BOOL, TensorProto.DOUBLE, TensorProto.FLOAT,
        TensorProto.FLOAT16, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
        TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    }
)  # fmt: skip
"""Accepted tensor types; UNDEFINED is a type that the file does not state."""


def _check_type(kind: int, what: str, name: str) -> None:
    if kind not in _NUMBERS:
        raise NetworkError(
            f"{what} {name!r} is of type {TensorProto.DataType.Name(kind)}, which most frameworks do not compute with",
            where=name,
            hint="Export the network before its quantisation, in float32 or float16.",
        )


def check_kinds(model: onnx.ModelProto, *, conditionals: bool = False) -> None:
    """Refuse operators and types that no adapter supports; the error names the node or tensor.

    With ``conditionals``, accept If nodes, which may be resolved later.
    """
    graph = model.graph
    for index, node in enumerate(graph.node):
        where = node.name or f"{node.op_type}_{index}"
        if conditionals and node.op_type == "If":
            continue
        nested = any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute)
        for what, (operators, hint) in _UNFIT.items():
            if any(fnmatchcase(node.op_type, pattern) for pattern in operators) or (nested and "flow" in what):
                kind = NetworkError if "quantised" in what else UnreadNetworkError
                raise kind(f"{what} not supported: node {where!r} is {node.op_type}", where=where, hint=hint)
        for attribute in node.attribute:
            if attribute.name == "to" and node.op_type == "Cast":
                _check_type(attribute.i, "node", where)
            elif attribute.type == attribute.TENSOR:
                _check_type(attribute.t.data_type, "a constant of node", where)
    for weight in graph.initializer:
        _check_type(weight.data_type, "initializer", weight.name)
    for tensor in graph.sparse_initializer:
        raise NetworkError(
            "sparse initializers are not supported", where=tensor.values.name, hint="Export the weights as dense ones."
        )
    for value in (*graph.input, *graph.output):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type" or value.type.tensor_type.elem_type == TensorProto.STRING:
            found = "strings" if kind == "tensor_type" else str(kind or "nothing").removesuffix("_type")
            raise NetworkError(
                f"{value.name!r} is not a tensor of numbers but {found}",
                where=value.name,
                hint="Leave out what comes before and after the network's tensors.",
            )
        _check_type(value.type.tensor_type.elem_type, "tensor", value.name)


def check_data(model: onnx.ModelProto) -> None:
    """Refuse an initializer or a constant whose data do not fit its shape and type."""
    stated = [("constant", n.name or n.output[0], t) for n in model.graph.node for t in _tensors_of(n)]
    for what, name, tensor in [("initializer", t.name, t) for t in model.graph.initializer] + stated:
        if not tensor.data_type:
            continue
        try:
            numpy_helper.to_array(tensor)
        except (TypeError, ValueError) as error:
            raise NetworkError(f"this {what}'s data do not fit its shape and type: {error}", where=name) from error
