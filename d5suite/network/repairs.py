"""Repair what ONNX's version converter and exporters get wrong, and drop nodes without effect.

May import ONNX, NumPy and, from d5suite, `errors`, `network.folding` and `network.operators`.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from onnx import numpy_helper

from d5suite.errors import NetworkError
from d5suite.network import graph_edits as edits
from d5suite.network.folding import shapes_of
from d5suite.network.operators import REDUCTIONS


def flatten_for_hardmax(model: onnx.ModelProto) -> None:
    """Rewrite a Hardmax of an operator set before 13 as a Hardmax over rows.

    Before 13, Hardmax flattened all axes from ``axis`` on into one. ONNX's converter (1.23) ignores
    this difference.
    """

    def rewrite(node: onnx.NodeProto, write: edits.NodeWriter) -> bool:
        axis = edits.attributes_of(node).get("axis", 1)
        if not edits.is_operator(node, "Hardmax") or axis == -1:
            return False
        shape = write.node("Shape", node.input[0])
        rows = write.node("Flatten", node.input[0], axis=axis)
        hard = write.node("Hardmax", rows, name=node.name, axis=1)
        write.node("Reshape", hard, shape, output=node.output[0])
        return True

    edits.rewrite_nodes(model.graph, rewrite)


def write_group_norms(model: onnx.ModelProto) -> None:
    """Write a GroupNormalization of operator sets 18 to 20 as an InstanceNormalization.

    Scale and bias were per group; since 21 they are per channel. ONNX's checker refuses the old
    form.
    """

    def rewrite(node: onnx.NodeProto, write: edits.NodeWriter) -> bool:
        if not edits.is_operator(node, "GroupNormalization") or len(node.input) != 3:
            return False
        settings = {"num_groups": 0, "epsilon": 1e-5, **edits.attributes_of(node)}
        shape = write.node("Shape", node.input[0])
        groups = write.node("Reshape", node.input[0], write.constant(np.array([0, settings["num_groups"], -1])))
        inputs = (groups, *node.input[1:])
        normal = write.node("InstanceNormalization", *inputs, name=node.name, epsilon=settings["epsilon"])
        write.node("Reshape", normal, shape, output=node.output[0])
        return True

    edits.rewrite_nodes(model.graph, rewrite)


def end_training(model: onnx.ModelProto) -> None:
    """Switch nodes that were exported in training mode to inference.

    Backends choose the mode of a pass themselves, but onnxruntime obeys the file.
    """
    graph = model.graph
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    fixed = {tensor.name for tensor in graph.initializer}
    fixed.update(node.output[0] for node in graph.node if node.op_type == "Constant" and node.output)
    for index, node in enumerate(graph.node):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "BatchNormalization":
            used = [name for name in node.output[1:] if name in read]
            if used:
                raise NetworkError(
                    f"BatchNormalization: its statistics of the batch, {used[0]!r}, are read",
                    where=node.name or f"{node.op_type}_{index}",
                    hint="Export the network in evaluation mode.",
                )
            del node.output[1:]
            edits.remove_items(node.attribute, lambda attribute: attribute.name == "training_mode")
        elif node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] in fixed:
            del node.input[2]


def repair_resizes(model: onnx.ModelProto) -> None:
    """Set the modes that Upsample, and Resize before operator set 11, imply.

    ONNX's converter (1.23) does not set them. The input index is the output index over the scale,
    rounded down, or up if the image shrinks (node tests of Resize, operator set 10).
    """
    constants = constants_of(model)
    for node in model.graph.node:
        if node.op_type == "Resize" and not node.domain:
            scales = next((constants[name] for name in reversed(node.input) if name in constants), None)
            smaller = scales is not None and bool((numpy_helper.to_array(scales) < 1).any())
            rounding = "ceil" if smaller else "floor"
            edits.set_attributes(node, coordinate_transformation_mode="asymmetric", nearest_mode=rounding)


def repair_pixels(model: onnx.ModelProto) -> None:
    """Replace ``tf_half_pixel_for_nn``, removed in operator set 13, by equivalent modes.

    It rounds (i + 1/2) / scale down. That equals half pixels, (i + 1/2) / scale - 1/2, rounded to
    the nearest integer, ties up.
    """
    for node in model.graph.node:
        stated = {"mode": b"nearest", **edits.attributes_of(node)}
        wanted = {
            "coordinate_transformation_mode": b"tf_half_pixel_for_nn", "mode": b"nearest", "nearest_mode": b"floor",
        }  # fmt: skip
        if edits.is_operator(node, "Resize") and stated.items() >= wanted.items():
            edits.set_attributes(node, coordinate_transformation_mode="half_pixel", nearest_mode="round_prefer_ceil")


def repair_scales(model: onnx.ModelProto) -> bool:
    """Raise scales of Resize by one bit where ONNX's shape inference would round a size down.

    1.4444444 times 9 is 13 in float32, which exporters and onnxruntime use, but 12.9999996 in
    float64, which ONNX uses. Apply it to copies for inference only. Returns whether any was raised.
    """
    graph, shapes, constants, changed = model.graph, shapes_of(model), constants_of(model), False
    for node in graph.node:
        given = [*node.input, "", "", ""]
        if node.op_type != "Resize" or node.domain or given[2] not in constants or given[3]:
            continue
        scales = numpy_helper.to_array(constants[given[2]]).astype(np.float32)
        shape = shapes.get(given[0], ())
        axes = edits.attributes_of(node).get("axes", range(len(shape)))
        if len(scales) != len(axes) or not all(-len(shape) <= axis < len(shape) for axis in axes):
            continue
        sizes = np.array([shape[axis] or 1 for axis in axes], np.float32)
        short = np.floor(sizes.astype(np.float64) * scales) < np.floor(sizes * scales)
        if short.any():
            changed, name = True, f"{node.output[0]}.d5suite.scales{len(graph.initializer)}"
            raised = np.where(short, np.nextafter(scales, np.float32(np.inf)), scales)
            graph.initializer.append(edits.tensor_of(raised, name))
            node.input[2] = name
    return changed


def count_windows(model: onnx.ModelProto) -> None:
    """Raise the operator set to 22 where a pooling window may start in the padding after the image.

    No framework computes such windows, but before operator set 22 ONNX's shape inference (1.23)
    counts them. Otherwise 22 adds only types to 21.
    """
    for node in model.graph.node:
        a = edits.attributes_of(node)
        if not edits.is_operator(node, "AveragePool", "LpPool", "MaxPool") or not a.get("ceil_mode"):
            continue
        rank = len(a["kernel_shape"])
        ones, zeros = [1] * rank, [0] * 2 * rank
        reach = [(k - 1) * d + 1 for k, d in zip(a["kernel_shape"], a.get("dilations", ones), strict=False)]
        axes = zip(reach, a.get("strides", ones), a.get("pads", zeros)[rank:], strict=False)
        if any(stride > (1 if end else span) for span, stride, end in axes):
            for stated in model.opset_import:
                stated.version = max(stated.version, 0 if stated.domain else 22)


def constants_of(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return a model's constants by name: Constant nodes and initializers."""
    graph = model.graph
    found = {node.output[0]: a.t for node in graph.node for a in node.attribute if a.name == "value"}
    return found | {tensor.name: tensor for tensor in graph.initializer}


def clear_domains(model: onnx.ModelProto) -> None:
    """Write the domain of ONNX's own operators as ``""``; "ai.onnx" is its other name."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            node.domain = "" if node.domain == "ai.onnx" else node.domain
    for stated in (model.opset_import, *(function.opset_import for function in model.functions)):
        own = [each.version for each in stated if each.domain in ("", "ai.onnx")]
        rest = [(each.domain, each.version) for each in stated if each.domain not in ("", "ai.onnx")]
        edits.replace_items(stated, (onnx.helper.make_opsetid(*each) for each in [*(("", v) for v in own[:1]), *rest]))


def repair_ranks(model: onnx.ModelProto) -> None:
    """Turn vectors of length one into scalars, and scalars into vectors, where ONNX requires it.

    The version converter leaves Dropout's ratio as a vector, and so does PyTorch's older exporter
    with CumSum's axis; its newer exporter writes axes as scalars. onnxruntime accepts all of these.
    """
    graph = model.graph
    constants = constants_of(model)
    wrong = {"scalar": (_SCALARS, [1]), "vector": (_VECTORS, [])}
    added: set[str] = set()
    for node in graph.node:
        for kind, (operators, dimensions) in wrong.items():
            place = operators.get(node.op_type, len(node.input))
            tensor = constants.get(node.input[place]) if place < len(node.input) else None
            if tensor is not None and list(tensor.dims) == dimensions:
                name = f"{node.input[place]}.d5suite.{kind}"
                if name not in added:
                    array = numpy_helper.to_array(tensor).reshape(() if kind == "scalar" else (1,))
                    graph.initializer.append(edits.tensor_of(array, name))
                added.add(name)
                node.input[place] = name


def name_nodes_apart(model: onnx.ModelProto) -> None:
    """Rename nodes whose name another node has; ONNX only recommends unique names."""
    taken = {node.name for node in model.graph.node}
    seen: set[str] = set()
    for node in model.graph.node:
        if node.name and node.name in seen:
            numbers = itertools.count(2)
            node.name = next(name for n in numbers if (name := f"{node.name}.{n}") not in taken)
            taken.add(node.name)
        seen.add(node.name)


def drop_casts(model: onnx.ModelProto) -> None:
    """Replace casts without effect by Identity; widening to float32 leaves such casts."""
    types = {t.name: t.data_type for t in model.graph.initializer}
    types |= {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.value_info)}
    for node in model.graph.node:
        if edits.IN_FLOAT32 in node.name:
            continue
        if node.op_type == "Cast" and types.get(node.input[0]) in [a.i for a in node.attribute if a.name == "to"]:
            node.op_type = "Identity"
            node.ClearField("attribute")


def drop_zero_states(model: onnx.ModelProto) -> None:
    """Drop initial states of zero, the default: otherwise they would count as parameters.

    Raises
    ------
    NetworkError
        If a state has another width than the recurrence.
    """
    values = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        for index in (5, 6) if node.op_type in ("GRU", "LSTM", "RNN") and not node.domain else ():
            name = node.input[index] if index < len(node.input) else ""
            if name in values and not numpy_helper.to_array(values[name]).any():
                shape, width = tuple(values[name].dims), edits.attributes_of(node).get("hidden_size")
                if len(shape) != 3 or width not in (None, shape[2]):
                    raise NetworkError(
                        f"{node.op_type}: initial state {name!r} has shape {list(shape)}, but hidden_size is {width}",
                        where=node.name,
                    )
                node.input[index] = ""
    _drop_unused_initializers(model)


def _drop_unused_initializers(model: onnx.ModelProto) -> None:
    used = {name for node in model.graph.node for name in node.input} | {o.name for o in model.graph.output}
    edits.remove_items(model.graph.initializer, lambda tensor: tensor.name not in used)


def drop_empty_parts(model: onnx.ModelProto) -> None:
    """Drop empty inputs of Concat, such as the channels that a rotary embedding leaves alone."""
    graph, shapes = model.graph, shapes_of(model)
    for node in graph.node:
        filled = [name for name in node.input if 0 not in shapes.get(name, ())]
        if node.op_type == "Concat" and not node.domain and 0 < len(filled) < len(node.input):
            edits.replace_items(node.input, filled)
    used = {output.name for output in graph.output}
    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        if used.isdisjoint(node.output) and any(0 in shapes.get(name, ()) for name in node.output):
            del graph.node[place]
        else:
            used.update(node.input)
    _drop_unused_initializers(model)


_SCALARS = {"CumSum": 1, "Dropout": 1, "Pad": 2}
"""Operators with an input that must be a scalar, and the input's number."""


_VECTORS = dict.fromkeys(("Squeeze", "Unsqueeze", *REDUCTIONS), 1)
"""Operators with an input that must be a vector, and the input's number."""
