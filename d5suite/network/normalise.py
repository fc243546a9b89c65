"""Bring an ONNX model into the one form that adapters read.

That form has operator set `OPSET` or later, weights in float32, constants folded into initializers,
and all shapes inferred. May import ONNX, NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper, shape_inference

from d5suite.errors import NetworkError
from d5suite.network import graph_edits as edits
from d5suite.network import limits, parameters, repairs
from d5suite.network.conditionals import without_conditionals
from d5suite.network.expansions import expand
from d5suite.network.folding import Shape, fold, shapes_of
from d5suite.network.onnx_file import MOST, check_data, check_graph, check_kinds, opset

OPSET = 21
"""The ONNX operator-set version that networks are converted to."""

IR_VERSION = 10
"""The ONNX file version that belongs to `OPSET` (ONNX's release table)."""

_SMALL = 1024
"""Initializers of up to this many values may be sizes or axes; longer ones are weights."""

_PASSES = 50
"""Limit of rounds of inference and folding; each resolves one link of a chain of shapes."""


def normalised(model: onnx.ModelProto, name: str, shapes: Mapping[str, Sequence[int]] | None = None) -> onnx.ModelProto:
    """Return a checked, converted, folded copy of a model with all shapes.

    Parameters
    ----------
    model : onnx.ModelProto
    name : str
        Network name for error messages.
    shapes : mapping, optional
        Dimensions by input, where the model leaves them open.

    Raises
    ------
    NetworkError
        If the model is too old, too new, invalid or ambiguous, has control flow, or does not fit
        ``shapes``.
    """
    version = opset(model, name)
    try:
        limits.check_growth(model)
        check_graph(model)
        check_kinds(model, conditionals=True)
        check_data(model)
        given, model = model, without_weights(model)
        repairs.clear_domains(model)
        repairs.name_nodes_apart(model)
        model.ir_version = max(model.ir_version, IR_VERSION)  # older ones want initializers among the inputs
        if model.functions:  # before the conversion, which drops them
            _check_model(model, shapes or {})
            model = _inlined(model)
            check_kinds(model, conditionals=True)
        model = without_conditionals(model, partial(_constants, name=name, shapes=shapes or {}))
        check_kinds(model)
        repairs.end_training(model)
        repairs.repair_pixels(model)
        if 18 <= version < 21:
            repairs.write_group_norms(model)
        _check_model(model, shapes or {})
        model = _converted(model, version)
        model = _expand_operators(model)
        _restore_weights(model, given)
        weights, budget = parameters.weights_of(given), limits.Budget(given)
        _widen(model)
        _name_first_outputs(model)
        _set_shapes(model, name, shapes or {})
        repairs.repair_ranks(model)
        parameters.join_copies(model, weights)
        parameters.turn_twins(model, weights)
        tied = parameters.tied_products(model, weights)
        _fold_all(model, name, weights, budget)
        if parameters.share(model, tied):
            _infer_shapes(model)
            fold(model, name, weights, budget)
        repairs.drop_casts(model)
        repairs.drop_zero_states(model)
        if expand(model):
            _infer_shapes(model)
        _split_into_slices(model, weights, budget)
        repairs.drop_empty_parts(model)
        _separate_statistics(model)
        _compute_outputs(model, weights)
        parameters.lift_numbers(model, weights)
        _stamp(model)
        repairs.count_windows(model)
        parameters.mark_computed(model, weights)
        return model
    except NetworkError:
        raise
    except Exception as error:  # onnx raises errors of any type
        lines = [line.strip() for line in str(error).splitlines() if line.strip()][:3]  # a later line names the node
        what = " ".join(lines) or type(error).__name__
        if shapes and _is_normal(given, name):
            stated = ", ".join(f"{key} {'x'.join(map(str, shape))}" for key, shape in shapes.items())
            raise NetworkError(
                f"the network does not take these shapes: {stated}: {what}", where=name, hint="Give other shapes."
            ) from error
        raise NetworkError(
            f"the model is not valid ONNX: {what}", where=name, hint="Try another opset, or another exporter."
        ) from error


def _is_normal(model: onnx.ModelProto, name: str) -> bool:
    """Return whether a model is valid without the shapes that a user gave."""
    try:
        normalised(model, name)
    except NetworkError:
        return False
    return True


def _converted(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    if version < OPSET:
        from onnx import version_converter

        if version < 13:
            repairs.flatten_for_hardmax(model)
        model = version_converter.convert_version(model, OPSET)
        if version < 11:
            repairs.repair_resizes(model)
    return model


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inline the model's own functions, with the defaults of attributes that a call omits."""
    from onnx import inliner

    defaults = {(function.domain, function.name): function.attribute_proto for function in model.functions}
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:  # ONNX (1.23) inlines functions without these defaults
            edits.state_defaults(node, defaults.get((node.domain, node.op_type), ()))
    return inliner.inline_local_functions(model, convert_version=True)


def _fold_all(model: onnx.ModelProto, name: str, weights: set[str] | None, budget: limits.Budget) -> None:
    for _ in range(_PASSES):
        _infer_shapes(model)
        if not fold(model, name, weights, budget):
            break


def _constants(model: onnx.ModelProto, name: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, onnx.TensorProto]:
    """Fold a part of a model and return the remaining constants; see `without_conditionals`."""
    inputs = {value.name for value in model.graph.input}
    given, model = model, without_weights(model)
    model = _converted(model, opset(model, name))
    _restore_weights(model, given)
    model.ir_version = max(model.ir_version, IR_VERSION)
    _set_shapes(model, name, {key: shape for key, shape in shapes.items() if key in inputs})
    repairs.repair_ranks(model)
    _fold_all(model, name, None, limits.Budget(given))
    return {tensor.name: tensor for tensor in model.graph.initializer}


_EXPANDED = frozenset(
    {
        "CastLike",
        "Celu",
        "MeanVarianceNormalization",
        "ReduceLogSum",
        "RotaryEmbedding",
        "Shrink",
        "Swish",
    }
)
"""Operators that no framework has; ONNX defines them as functions of other operators."""


def _expand_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace the operators of `_EXPANDED` by the functions that define them in ONNX."""
    found = {node.op_type for node in model.graph.node if not node.domain and node.op_type in _EXPANDED}
    if not found:
        return model
    from onnx import inliner

    version = opset(model, model.graph.name)
    for node in model.graph.node:
        if node.op_type in found and not node.domain:  # ONNX (1.23) expands them without defaults
            known = onnx.defs.get_schema(node.op_type, version).attributes
            edits.state_defaults(node, (attribute.default_value for attribute in known.values()))
    typed = {value.name for value in (*model.graph.input, *model.graph.value_info)}
    model.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in model.graph.initializer
        if t.name not in typed
    )
    return inliner.inline_selected_functions(model, [("", name) for name in _EXPANDED], inline_schema_functions=True)


def _check_model(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Run ONNX's checker. It requires a shape of every input and output; exporters omit some."""
    graph = model.graph
    unstated = [v.type.tensor_type for v in (*graph.input, *graph.output) if not v.type.tensor_type.HasField("shape")]
    for value in graph.input:
        if not value.type.tensor_type.HasField("shape") and value.name not in shapes:
            raise NetworkError(
                f"the file states no shape of input {value.name!r}",
                where=value.name,
                hint=f"Give it: --shape {value.name}=1x3x224x224, or shapes= in Python.",
            )
    for kind in unstated:
        kind.shape.SetInParent()
    onnx.checker.check_model(model)
    for kind in unstated:
        kind.ClearField("shape")
    for value in graph.input:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_value < 0:  # some exporters write an open dimension as -1
                dimension.ClearField("dim_value")


def _set_shapes(model: onnx.ModelProto, name: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Fix the dimensions of inputs; clear the shapes, which were inferred for open dimensions."""
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    for key, wanted in shapes.items():
        if key not in inputs:
            raise NetworkError(f"the network has no input {key!r}", where=name, hint=f"It has: {', '.join(inputs)}.")
        dimensions = inputs[key].shape.dim
        given = [d.dim_value or None for d in dimensions]  # some exporters write an open one as 0
        if not inputs[key].HasField("shape"):
            given = [None] * len(wanted)
            dimensions.extend(onnx.TensorShapeProto.Dimension() for _ in wanted)
        if len(wanted) != len(given) or any(g not in (None, w) for g, w in zip(given, wanted, strict=True)):
            raise NetworkError(
                f"input {key!r} has shape {given}, not {list(wanted)}", where=name, hint="None stands for any size."
            )
        if any(not 0 < size <= MOST for size in wanted):
            raise NetworkError(f"input {key!r} cannot have shape {list(wanted)}", where=name)
        for dimension, size in zip(dimensions, wanted, strict=True):
            dimension.dim_value = size
    forget_shapes(model)  # they are outdated if the batch was opened after the export


def forget_shapes(model: onnx.ModelProto) -> None:
    """Clear the shapes of all tensors that nodes write; shape inference sets them again."""
    graph = model.graph
    graph.ClearField("value_info")
    fixed = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    for value in graph.output:
        if value.name not in fixed:
            value.type.tensor_type.ClearField("shape")


def shapes_at(model: onnx.ModelProto, name: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    """Return the shapes of a normalised model's tensors for inputs of these shapes.

    The result is empty if ONNX's shape inference refuses the inputs' shapes.
    """
    light = without_weights(model)
    try:
        _set_shapes(light, name, shapes)
        return shapes_of(infer(light))
    except Exception:  # onnx raises errors of any type
        return {}


def _compute_outputs(model: onnx.ModelProto, weights: set[str]) -> None:
    """Let an Identity write each constant output, because adapters take outputs from nodes."""
    graph = model.graph
    fixed = {tensor.name: tensor for tensor in graph.initializer}
    for value in graph.output:
        tensor = fixed.get(value.name)
        if tensor is None:
            continue
        tensor.name = f"{value.name}.d5suite.value"
        if value.name in weights:
            weights.add(tensor.name)
        edits.rename_inputs(graph.node, {value.name: tensor.name})
        graph.node.append(onnx.helper.make_node("Identity", [tensor.name], [value.name], f"{value.name}.d5suite"))


def _stamp(model: onnx.ModelProto) -> None:
    """Set the oldest equivalent operator set from `OPSET` on, because onnxruntime lags behind."""
    version, least = opset(model, model.graph.name), OPSET
    for node in model.graph.node:
        if not node.domain and onnx.defs.has(node.op_type):
            least = max(least, onnx.defs.get_schema(node.op_type, version).since_version)
    for stated in model.opset_import:
        if stated.domain in ("", "ai.onnx"):
            stated.version = min(version, least)


def _is_weight(tensor: onnx.TensorProto) -> bool:
    return math.prod(tensor.dims) > _SMALL


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with weights as inputs: ONNX's tools copy models, and only up to 2 GiB."""
    graph = model.graph
    light = onnx.helper.make_model(
        onnx.GraphProto(
            name=graph.name,
            node=graph.node,
            input=graph.input,
            output=graph.output,
            value_info=graph.value_info,
            initializer=[t for t in graph.initializer if not _is_weight(t)],
        ),
        ir_version=model.ir_version,
        opset_imports=model.opset_import,
        functions=model.functions,
    )
    inputs = {value.name for value in graph.input}
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in graph.initializer
        if _is_weight(t) and t.name not in inputs
    )
    return light


def _restore_weights(model: onnx.ModelProto, given: onnx.ModelProto) -> None:
    """Restore the weights of the original model, ``given``, in their order."""
    kept = {t.name: onnx.TensorProto.FromString(t.SerializeToString()) for t in model.graph.initializer}
    model.graph.ClearField("initializer")
    for tensor in given.graph.initializer:
        if _is_weight(tensor):
            model.graph.initializer.append(tensor)
        elif tensor.name in kept:
            model.graph.initializer.append(kept.pop(tensor.name))
    model.graph.initializer.extend(kept.values())
    names = {t.name for t in model.graph.initializer}
    edits.remove_items(model.graph.input, lambda value: value.name in names)


def _infer_shapes(model: onnx.ModelProto) -> None:
    light = without_weights(model)
    forget_shapes(light)
    inferred = infer(light).graph
    for field_name in ("value_info", "output"):
        edits.replace_items(getattr(model.graph, field_name), getattr(inferred, field_name))


_LIKE_INPUT = frozenset({"GroupNormalization", "MeanVarianceNormalization"})
"""Operators without shape inference in ONNX (1.23); the output has the first input's shape."""


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """Infer the shapes of a model without weights; replace nodes that ONNX has no inference for."""
    repairs.count_windows(model)
    for node in model.graph.node:
        if node.op_type in _LIKE_INPUT and not node.domain:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
        if node.op_type == "STFT" and not node.domain and not node.attribute:
            node.attribute.append(
                onnx.helper.make_attribute("onesided", 1)
            )  # ONNX (1.23) infers as if the default were 0
        if node.op_type == "MaxUnpool" and not node.domain and len(node.input) > 2:
            node.op_type = "Resize"  # ONNX (1.23) infers no shape from output_shape, but from Resize's sizes
            edits.replace_items(node.input, (node.input[0], "", "", node.input[2]))
            del node.attribute[:]
    found = _inferred(model)
    while repairs.repair_scales(found):
        forget_shapes(found)
        found = _inferred(found)
    return found


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    propagates = not limits.propagates_much(model)
    try:
        return shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=propagates)
    except shape_inference.InferenceError:  # ONNX (1.23) propagates scalars as vectors, which fails in sums
        return shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


_WIDER = dict.fromkeys((TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.FLOAT16), TensorProto.FLOAT)
"""The neutral form is float32; the job chooses the precision of a run."""


def _widen(model: onnx.ModelProto) -> None:
    """Convert 16-bit and float64 tensors to float32."""
    graph = model.graph

    def widened(tensor: onnx.TensorProto) -> None:
        if tensor.data_type in _WIDER:
            array = numpy_helper.to_array(tensor)
            if tensor.data_type == TensorProto.DOUBLE:  # a mask of the least float64 must stay finite
                bound = float(np.finfo(np.float32).max)
                array = np.where(np.isfinite(array), np.clip(array, -bound, bound), array)
            tensor.CopyFrom(edits.tensor_of(array.astype(np.float32), tensor.name))

    for tensor in graph.initializer:
        widened(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        kind.elem_type = _WIDER.get(kind.elem_type, kind.elem_type)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype", "output_dtype", "stash_type"):
                attribute.i = _WIDER.get(attribute.i, attribute.i)
            if attribute.HasField("t"):
                widened(attribute.t)


def _name_first_outputs(model: onnx.ModelProto) -> None:
    """Name omitted first outputs, because nodes are identified by them."""
    for index, node in enumerate(model.graph.node):
        if node.output and not node.output[0]:
            node.output[0] = f"{node.name or node.op_type}.d5suite.first.{index}"


def _split_into_slices(model: onnx.ModelProto, weights: set[str], budget: limits.Budget) -> None:
    """Replace every part of a Split, and a Gather at one constant index, by a Slice.

    Adapters compute one output per node; the frameworks read the same rows either way.
    """
    graph, shapes = model.graph, shapes_of(model)
    constants = {t.name: t for t in graph.initializer if math.prod(t.dims) == 1}

    def rewrite(node: onnx.NodeProto, write: edits.NodeWriter) -> bool:
        x, axis = next(iter(node.input), ""), edits.attributes_of(node).get("axis", 0)
        if edits.is_operator(node, "Split"):
            sizes = [shapes[output][axis] if output in shapes else None for output in node.output]
            if None in sizes:
                return False
            ends = np.cumsum([0, *(n or 0 for n in sizes)])
            for output, start, stop in zip(node.output, ends[:-1], ends[1:], strict=True):
                write.cut(x, axis, start, stop, output=output)
            return True
        index = constants.get(node.input[1]) if edits.is_operator(node, "Gather") else None
        size = shapes[x][axis] if index is not None and x in shapes else None
        if index is None or size is None or len(index.dims) > 1:
            return False
        row = int(numpy_helper.to_array(index).item())
        if not -size <= row < size:
            raise NetworkError(f"Gather: index {row} of {size}", where=node.name or node.output[0])
        row %= size
        write.cut(x, axis, row, row + 1, squeeze=not index.dims, output=node.output[0])
        return True

    if edits.rewrite_nodes(graph, rewrite):
        _infer_shapes(model)
        fold(model, graph.name, weights, budget)


def _separate_statistics(model: onnx.ModelProto) -> None:
    """Give every BatchNormalization its own running statistics.

    Exporters store equal initializers once, so untrained layers seem to share statistics and
    scales.
    """
    graph = model.graph
    uses = Counter(name for node in graph.node for name in node.input)
    values = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type != "BatchNormalization":
            continue
        for index in (3, 4):
            name = node.input[index]
            if uses[name] > 1 and name in values:
                uses[name] -= 1
                node.input[index] = f"{name}.d5suite.{node.output[0]}.{index}"
                graph.initializer.append(edits.tensor_of(numpy_helper.to_array(values[name]), node.input[index]))
