"""Replace nodes that adapters lack by equivalent nodes, where ONNX defines no function for them.

May import ONNX and NumPy and, from d5suite, `errors`, `network.folding` and `network.limits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from d5suite.errors import NetworkError
from d5suite.network.folding import Shape, shapes_of
from d5suite.network.graph_edits import NodeWriter, attributes_of, rewrite_nodes, set_attributes
from d5suite.network.limits import MOST_STEPS, MOST_VALUES

_INTEGERS = frozenset(getattr(onnx.TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64))

_ACTIVATIONS = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh"}


def expand(model: onnx.ModelProto) -> bool:
    """Replace nodes that adapters lack: AffineGrid, RNN, Clip with computed bounds, and so on.

    Also cut pooling windows that exceed their image. The model's shapes must be inferred and its
    constants folded. Returns whether any node was replaced.
    """
    graph, shapes = model.graph, shapes_of(model)
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info)}
    fixed = {tensor.name: tensor for tensor in graph.initializer}
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    steps = 0

    def rewrite(node: onnx.NodeProto, write: NodeWriter) -> bool:
        nonlocal steps
        kind = "" if node.domain else node.op_type
        if kind == "BatchNormalization" and _has_computed_statistics(node, graph):
            _write_batch_norm(node, write, shapes)
        elif kind == "AffineGrid" and node.input[1] in fixed:
            _write_affine_grid(node, write, numpy_helper.to_array(fixed[node.input[1]]))
        elif kind == "Clip" and not fixed.keys() >= {name for name in node.input[1:] if name}:
            _write_clip(node, write)
        elif kind == "Pad" and _crops(node, fixed):
            _write_crop(node, write, fixed)
        elif kind == "ReduceMean" and types.get(node.input[0]) in _INTEGERS and None not in shapes[node.input[0]]:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(types[node.input[0]]))
            _write_integer_mean(node, write, shapes, dtype)
        elif kind == "RNN" and (plan := _Rnn.read(node, graph, shapes)) is not None:
            steps += plan.steps
            if steps > MOST_STEPS:
                raise NetworkError(
                    f"RNN: {steps:,} steps to unroll; d5suite unrolls up to {MOST_STEPS:,}",
                    where=node.name or next(filter(None, node.output), None),
                    hint="Take a shorter sequence: export the network anew, or state another size with --shape.",
                )
            plan.write(write)
        elif kind == "LayerNormalization" and read.intersection(node.output[1:]):
            _write_moments(node, write, len(shapes[node.input[0]]))
            graph.node.append(node)
        else:
            if kind in ("AveragePool", "MaxPool"):
                _fit_window(node, shapes)
            return False
        return True

    return rewrite_nodes(graph, rewrite)


def _fit_window(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> None:
    """Cut a pooling window to its image where ``ceil_mode`` admits a larger window.

    Some networks pool the whole image with a window as large as their number of channels.
    """
    settings, image = attributes_of(node), shapes.get(node.input[0], ())[2:]
    padded = any(settings.get("pads", [])) or settings.get("auto_pad", b"NOTSET") != b"NOTSET"
    kernel = settings["kernel_shape"]
    strides = settings.get("strides") or [1] * len(kernel)
    if not settings.get("ceil_mode") or padded or None in image or max(settings.get("dilations", [1])) > 1:
        return
    for axis, (k, n, stride) in enumerate(zip(kernel, image, strides, strict=True)):
        if n is not None and 0 < k - n < stride:
            kernel[axis] = n
    set_attributes(node, kernel_shape=kernel)


def _has_computed_statistics(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    given = {tensor.name for tensor in graph.initializer}
    return not given.issuperset(node.input[3:5]) and not attributes_of(node).get("training_mode")


def _write_batch_norm(node: onnx.NodeProto, write: NodeWriter, shapes: Mapping[str, Shape]) -> None:
    """Write y = scale (x - mean) / √(variance + ε) + bias.

    Exporters write a layer without running statistics as a node with computed statistics.
    """
    column = write.constant(np.array([-1, *[1] * (len(shapes[node.input[0]]) - 2)]))
    scale, bias, mean, variance = (write.node("Reshape", name, column) for name in node.input[1:5])
    epsilon = write.constant(np.float32(attributes_of(node).get("epsilon", 1e-5)))
    deviation = write.node("Sqrt", write.node("Add", variance, epsilon))
    normal = write.node("Div", write.node("Sub", node.input[0], mean), deviation)
    write.node("Add", write.node("Mul", normal, scale), bias, output=node.output[0])


def _write_moments(node: onnx.NodeProto, write: NodeWriter, rank: int) -> None:
    """Compute the second and third outputs of a LayerNormalization: mean and inverse deviation."""
    settings, x = attributes_of(node), node.input[0]
    axes = write.constant(np.arange(settings.get("axis", -1) % rank, rank))
    _, mean, inverse = [*node.output, "", ""][:3]
    del node.output[1:]
    mean = write.node("ReduceMean", x, axes, output=mean)
    if inverse:
        apart = write.node("Sub", x, mean)
        variance = write.node("ReduceMean", write.node("Mul", apart, apart), axes)
        epsilon = write.constant(np.float32(settings.get("epsilon", 1e-5)))
        write.node("Reciprocal", write.node("Sqrt", write.node("Add", variance, epsilon)), output=inverse)


def _write_affine_grid(node: onnx.NodeProto, write: NodeWriter, size: np.ndarray) -> None:
    """Write each point of a grid, (x, y, 1) or (x, y, z, 1), times the matrix theta.

    With ``align_corners`` the outermost points are -1 and 1, otherwise half a pixel inside. Points
    are integers times a scalar, because a tensor of fractions would count as a weight.
    """
    image = [int(n) for n in size[2:]]
    if math.prod(image) > MOST_VALUES:
        raise NetworkError(f"AffineGrid: a grid of {image} is too large", where=node.name or node.output[0])
    if attributes_of(node).get("align_corners"):
        spans = [max(n - 1, 1) for n in image]
        places = [2 * np.arange(n) - n + 1 for n in image]
    else:
        spans, places = image, [2 * np.arange(n) + 1 - n for n in image]
    whole = int(np.prod(spans))
    axes = np.meshgrid(*(place * (whole // span) for place, span in zip(places, spans, strict=True)), indexing="ij")
    points = np.stack([*(axis.ravel() for axis in reversed(axes)), np.full(axes[0].size, whole)], -1)
    numbers = write.node("Cast", write.constant(points), to=onnx.TensorProto.FLOAT)
    scaled = write.node("Mul", numbers, write.constant(np.float32(1 / whole)))
    grid = write.node("MatMul", scaled, write.node("Transpose", node.input[0], perm=[0, 2, 1]))
    write.node("Reshape", grid, write.constant(np.array([0, *image, len(image)])), output=node.output[0])


def _write_clip(node: onnx.NodeProto, write: NodeWriter) -> None:
    """Write min(max(x, low), high), because frameworks clip by constant bounds only."""
    x, low, high = [*node.input, "", ""][:3]
    if low:
        x = write.node("Max", x, low, output="" if high else node.output[0])
    if high:
        write.node("Min", x, high, output=node.output[0])


def _crops(node: onnx.NodeProto, fixed: Mapping[str, onnx.TensorProto]) -> bool:
    plain = attributes_of(node).get("mode", b"constant") == b"constant"
    return not plain and node.input[1] in fixed and bool((numpy_helper.to_array(fixed[node.input[1]]) < 0).any())


def _write_crop(node: onnx.NodeProto, write: NodeWriter, fixed: Mapping[str, onnx.TensorProto]) -> None:
    """Replace a Pad that both crops and repeats cells by a Slice and a Pad."""
    pads = numpy_helper.to_array(fixed[node.input[1]]).reshape(2, -1)
    axes = numpy_helper.to_array(fixed[node.input[3]]) if len(node.input) > 3 else np.arange(pads.shape[1])
    starts, ends = np.maximum(-pads[0], 0), np.where(pads[1] < 0, pads[1], np.iinfo(np.int64).max)
    cropped = write.node("Slice", node.input[0], *(write.constant(each) for each in (starts, ends, axes)))
    widths = write.constant(np.maximum(pads, 0).ravel())
    write.node("Pad", cropped, widths, *(["", node.input[3]] if len(node.input) > 3 else []), output=node.output[0],
               mode=attributes_of(node)["mode"])  # fmt: skip


def _write_integer_mean(node: onnx.NodeProto, write: NodeWriter, shapes: Mapping[str, Shape], dtype: np.dtype) -> None:
    """Write a mean of integers as a sum and an integer division; frameworks return fractions."""
    sizes = [math.prod(size or 0 for size in shapes[name]) for name in (node.input[0], node.output[0])]
    total = write.node("ReduceSum", *node.input, **attributes_of(node))
    count = write.constant(np.array(sizes[0] // max(sizes[1], 1), dtype))
    write.node("Div", total, count, output=node.output[0])


class _Rnn:
    """An RNN node, unrolled: h = f(x Wᵀ + h Rᵀ + Wb + Rb) (ONNX operator specification)."""

    def __init__(self, node: onnx.NodeProto, steps: int, activations: list[str]) -> None:
        settings = attributes_of(node)
        self._inputs = [*node.input, *[""] * 6][:6]
        self._outputs = [*node.output, ""][:2]
        self._steps, self._activations = steps, activations
        self._time, self._state_axis = (1, 1) if settings.get("layout") else (0, 0)
        self._reverse = settings.get("direction") == b"reverse"

    @classmethod
    def read(cls, node: onnx.NodeProto, graph: onnx.GraphProto, shapes: Mapping[str, Shape]) -> _Rnn | None:
        """Read an RNN node; return None for lengths, clipping and other unsupported variants."""
        settings = attributes_of(node)
        directions = 2 if settings.get("direction") == b"bidirectional" else 1
        names = [name.decode().lower() for name in settings.get("activations") or [b"tanh"] * directions]
        steps = shapes.get(node.input[0], (None, None))[1 if settings.get("layout") else 0]
        lengths = node.input[4] if len(node.input) > 4 else ""
        fixed = {tensor.name: tensor for tensor in graph.initializer}
        whole = not lengths or (lengths in fixed and bool((numpy_helper.to_array(fixed[lengths]) == steps).all()))
        odd = settings.get("clip") or settings.get("activation_alpha") or not set(names) <= set(_ACTIVATIONS)
        if steps is None or odd or not whole or len(names) != directions:
            return None
        return cls(node, steps, [_ACTIVATIONS[name] for name in names])

    @property
    def steps(self) -> int:
        """Number of time steps, summed over the directions."""
        return self._steps * len(self._activations)

    def write(self, write: NodeWriter) -> None:
        every, last = zip(*(self._direction(write, d) for d in range(len(self._activations))), strict=True)
        y, y_h = self._outputs
        if y:
            steps = [write.stack(list(states), self._state_axis) for states in zip(*every, strict=True)]
            write.stack(steps, self._time, output=y)
        if y_h:
            write.stack(list(last), self._state_axis, output=y_h)

    def _direction(self, write: NodeWriter, d: int) -> tuple[list[str], str]:
        """Return the states of all steps, and the final state."""
        x, w, r, b, _, start = self._inputs
        w, r = (write.node("Transpose", write.row(each, d, 0), perm=[1, 0]) for each in (w, r))
        given = write.node("MatMul", x, w)
        if b:
            halves = write.node("Reshape", write.row(b, d, 0), write.constant(np.array([2, -1])))
            given = write.node("Add", given, write.node("Add", *(write.row(halves, half, 0) for half in (0, 1))))
        h = write.row(start, d, self._state_axis) if start else ""
        states = {}
        order = reversed(range(self._steps)) if self._reverse or d == 1 else range(self._steps)
        for t in order:
            total = write.row(given, t, self._time)
            h = states[t] = write.node(
                self._activations[d], write.node("Add", total, write.node("MatMul", h, r)) if h else total
            )
        return [states[t] for t in range(self._steps)], h
