"""Mend what ONNX's version converter and exporters leave wrong.

May import ONNX, NumPy and, from d5suite, `network.folding` and `network.operators`.
"""

from __future__ import annotations

import onnx
from onnx import numpy_helper

from d5suite.network.folding import tensor_of
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


_SCALARS = frozenset({"CumSum", "Dropout"})
"""Operators whose second input is a scalar."""


_VECTORS = frozenset({"Squeeze", "Unsqueeze", *REDUCTIONS})
"""Operators whose second input is a vector."""
