"""Mend what ONNX's version converter and exporters leave wrong, and drop what does nothing.

May import ONNX, NumPy and, from d5suite, `network.folding` and `network.operators`.
"""

from __future__ import annotations

import onnx
from onnx import numpy_helper

from d5suite.network.folding import shapes_of, tensor_of
from d5suite.network.operators import REDUCTIONS


def flatten_for_hardmax(model: onnx.ModelProto) -> None:
    """Write a Hardmax before operator set 13 as one of rows; ONNX's converter (1.23) does not.

    It took all axes from its own one on for a single one.
    """
    graph, nodes = model.graph, list(model.graph.node)
    graph.ClearField("node")
    for node in nodes:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        if node.op_type != "Hardmax" or node.domain or axis == -1:
            graph.node.append(node)
            continue
        x, y, make = node.input[0], node.output[0], onnx.helper.make_node
        shape, rows, hard = (f"{y}.d5suite.{kind}" for kind in ("sizes", "rows", "hard"))
        graph.node.extend(
            [
                make("Shape", [x], [shape], shape),
                make("Flatten", [x], [rows], rows, axis=axis),
                make("Hardmax", [rows], [hard], node.name, axis=1),
                make("Reshape", [hard, shape], [y], f"{y}.d5suite.unflattened"),
            ]
        )


def mend_resizes(model: onnx.ModelProto) -> None:
    """Say what Upsample, and Resize before operator set 11, mean; ONNX's converter (1.23) does not.

    A point's place is its index over the scale, rounded down (Resize, operator set 10).
    """
    meaning = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    for node in model.graph.node:
        if node.op_type == "Resize" and not node.domain:
            kept = [attribute for attribute in node.attribute if attribute.name not in meaning]
            node.ClearField("attribute")
            node.attribute.extend([*kept, *(onnx.helper.make_attribute(*pair) for pair in meaning.items())])


def mend_ranks(model: onnx.ModelProto) -> None:
    """Make scalars of vectors of one, and the reverse, where ONNX wants the other.

    The version converter leaves Dropout's ratio as a vector, PyTorch's older exporter CumSum's
    axis, and its newer one writes axes as scalars. onnxruntime accepts all of them.
    """
    graph = model.graph
    constants = {node.output[0]: a.t for node in graph.node for a in node.attribute if a.name == "value"}
    constants |= {tensor.name: tensor for tensor in graph.initializer}
    wrong = {"scalar": (_SCALARS, [1]), "vector": (_VECTORS, [])}
    added: set[str] = set()
    for node in graph.node:
        for kind, (operators, dimensions) in wrong.items():
            tensor = constants.get(node.input[1]) if len(node.input) > 1 and node.op_type in operators else None
            if tensor is not None and list(tensor.dims) == dimensions:
                name = f"{node.input[1]}.d5suite.{kind}"
                if name not in added:
                    array = numpy_helper.to_array(tensor).reshape(() if kind == "scalar" else (1,))
                    graph.initializer.append(tensor_of(array, name))
                added.add(name)
                node.input[1] = name


def drop_casts(model: onnx.ModelProto) -> None:
    """Write a cast to the type that a tensor has, as widening leaves them, as Identity."""
    types = {t.name: t.data_type for t in model.graph.initializer}
    types |= {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.value_info)}
    for node in model.graph.node:
        if node.op_type == "Cast" and types.get(node.input[0]) in [a.i for a in node.attribute if a.name == "to"]:
            node.op_type = "Identity"
            node.ClearField("attribute")


def drop_zero_states(model: onnx.ModelProto) -> None:
    """Drop initial states of zero, which equal omitted ones: they are not parameters."""
    values = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        for index in (5, 6) if node.op_type in ("GRU", "LSTM", "RNN") and not node.domain else ():
            name = node.input[index] if index < len(node.input) else ""
            if name in values and not numpy_helper.to_array(values[name]).any():
                node.input[index] = ""
    _drop_unused_initializers(model)


def _drop_unused_initializers(model: onnx.ModelProto) -> None:
    used = {name for node in model.graph.node for name in node.input} | {o.name for o in model.graph.output}
    for place in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[place].name not in used:
            del model.graph.initializer[place]


def drop_empty_parts(model: onnx.ModelProto) -> None:
    """Leave out empty inputs of Concat, such as channels that a rotation does not turn."""
    graph, shapes = model.graph, shapes_of(model)
    for node in graph.node:
        filled = [name for name in node.input if 0 not in shapes.get(name, ())]
        if node.op_type == "Concat" and not node.domain and 0 < len(filled) < len(node.input):
            node.ClearField("input")
            node.input.extend(filled)
    used = {output.name for output in graph.output}
    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        if used.isdisjoint(node.output) and any(0 in shapes.get(name, ()) for name in node.output):
            del graph.node[place]
        else:
            used.update(node.input)
    _drop_unused_initializers(model)


_SCALARS = frozenset({"CumSum", "Dropout"})
"""Operators whose second input is a scalar."""


_VECTORS = frozenset({"Squeeze", "Unsqueeze", *REDUCTIONS})
"""Operators whose second input is a vector."""
