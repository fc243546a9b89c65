"""The readers of ONNX nodes against ONNX's reference evaluator, shape inference, onnxruntime."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from d5suite.errors import NetworkError
from d5suite.network import Network, Node
from d5suite.network.nodes import layouts
from d5suite.network.nodes.attention import read_attention
from d5suite.network.nodes.context import NodeContext, has_input, select
from d5suite.network.nodes.elementwise import is_clip_fixed, read_clip, read_dropout
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss
from d5suite.network.nodes.matrix import read_gemm
from d5suite.network.nodes.normalization import read_layer_normalization, read_lrn
from d5suite.network.nodes.recurrent import CUDNN_GATES, read_recurrent
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.resize import read_resize
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps
from d5suite.network.nodes.schedule import by_name, is_rounded, schedule
from d5suite.network.nodes.shape import (
    read_axis,
    read_flatten,
    read_gather,
    read_pad,
    read_reshape,
    read_squeeze,
    read_stored_reshape,
    read_transpose,
    read_unsqueeze,
)
from d5suite.network.nodes.sliding import read_conv, read_conv_transpose, read_global_pool, read_pool
from d5suite.network.operation import Operation
from d5suite.network.zoo import build
from d5suite.validate.operator.oracle import OperatorOracle


def _operation(op: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any] | None = None, **more: Any) -> Any:
    return Operation(op, inputs, attributes or {}, precision="fp64", **more)


def _context(operation: Operation, **more: Any) -> NodeContext:
    return NodeContext(
        shapes=operation.shapes, constants=operation.constants, dtypes=operation.dtypes, single=True,
        non_negative=operation.non_negative, **more,
    )  # fmt: skip


def _run(operation: Operation) -> tuple[list[Any], list[np.ndarray]]:
    """Drawn inputs, and the reference's outputs."""
    drawn = operation.draw(0)
    return drawn, OperatorOracle(operation).run(drawn)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# Shapes.


@settings(deadline=None)
@given(
    st.data(),
    st.sampled_from(["constant", "edge", "reflect", "wrap"]),
    st.lists(st.integers(2, 4), min_size=1, max_size=3),
)
def test_pad_widths_and_rows_are_those_of_the_reference(data: st.DataObject, mode: str, shape: list[int]) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    widths = data.draw(st.lists(st.integers(0, 1), min_size=2 * len(axes), max_size=2 * len(axes)))
    operation = _operation(
        "Pad",
        {"x": tuple(shape), "pads": _ints(*widths), "value": np.array(2.5, np.float32), "axes": _ints(*axes)},
        {"mode": mode},
    )
    pad = read_pad(operation.node, _context(operation))
    (x, *_), (expected, *_) = _run(operation)
    if mode == "constant":
        found = np.pad(x, pad.widths, constant_values=pad.value)
    else:
        found = reduce(lambda y, item: np.take(y, item[1], item[0]), pad.rows(x.shape).items(), x)
    np.testing.assert_array_equal(found, expected)


def test_negative_padding_crops_unless_the_mode_repeats_the_image() -> None:
    operation = _operation("Pad", {"x": (4,), "pads": _ints(-1, 1)})
    pad = read_pad(operation.node, _context(operation))
    assert pad.widths == ((-1, 1),)
    assert pad.kept == (slice(1, None),) and pad.added == ((0, 1),)
    operation = _operation("Pad", {"x": (4,), "pads": _ints(-1, 1)}, {"mode": "reflect"})
    with pytest.raises(NetworkError, match="negative padding"):
        read_pad(operation.node, _context(operation))


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 0, 4), (0, 3), (3, 0)])
def test_flatten_has_the_sizes_of_shape_inference(shape: tuple[int, ...]) -> None:
    for axis in range(-len(shape), len(shape) + 1):
        operation = _operation("Flatten", {"x": shape}, {"axis": axis})
        sizes = read_flatten(operation.node, _context(operation))
        assert np.zeros(shape).reshape(sizes).shape == operation.shapes[operation.node.outputs[0]]


def test_flatten_with_an_unknown_batch_infers_it() -> None:
    node = Node("n", "Flatten", ("x",), ("y",), {"axis": 1})
    assert read_flatten(node, NodeContext(shapes={"x": (None, 3, 4)}, constants={})) == (-1, 12)
    with pytest.raises(NetworkError, match="Flatten of shape"):
        read_flatten(node, NodeContext(shapes={"x": (None, 3, None)}, constants={}))


@pytest.mark.parametrize(
    ("shape", "wanted", "allowzero"),
    [((2, 6), (3, -1), 0), ((2, 6), (0, -1, 3), 0), ((2, 3), (0, 0, 1), 0), ((0, 4), (4, 0), 1), ((2, 0), (0, 0), 0)],
)
def test_reshape_has_the_sizes_of_shape_inference(shape: Any, wanted: Any, allowzero: int) -> None:
    operation = _operation("Reshape", {"x": shape, "shape": _ints(*wanted)}, {"allowzero": allowzero})
    sizes = read_reshape(operation.node, _context(operation)).sizes
    assert np.zeros(shape).reshape(sizes).shape == operation.shapes[operation.node.outputs[0]]


def _reshape(shape: Any, wanted: Any, output: Any) -> Any:
    node = Node("n", "Reshape", ("x", "s"), ("y",), {"allowzero": 0})
    return read_reshape(node, NodeContext(shapes={"x": shape, "y": output}, constants={"s": _ints(*wanted)}))


def test_reshape_with_an_unknown_batch_infers_it_and_nothing_else() -> None:
    assert _reshape((None, 6), (0, 2, -1), (None, 2, 3)).sizes == (-1, 2, 3)
    assert _reshape((None, 6), (0, 6), (None, 6)).sizes == (-1, 6)
    with pytest.raises(NetworkError, match="Reshape of shape"):
        _reshape((None, None), (0, 0, 1), (None, None, 1))


def test_reshape_knows_channels_split_into_groups_and_merged_again() -> None:
    split = _reshape((None, 6, 5, 5), (0, 2, 3, 5, 5), (None, 2, 3, 5, 5))
    assert split.splits and not split.merges
    merged = _reshape((None, 2, 3, 5, 5), (0, 6, 5, 5), (None, 6, 5, 5))
    assert merged.merges and not merged.splits
    other = _reshape((None, 6, 5, 5), (0, 6, 5, 1, 5), (None, 6, 5, 1, 5))
    assert not other.splits and not other.merges


def test_axes_are_sorted_and_not_negative() -> None:
    squeeze = _operation("Squeeze", {"x": (1, 2, 1, 1), "axes": _ints(-1, 0)})
    assert read_squeeze(squeeze.node, _context(squeeze)) == (0, 3)
    every = _operation("Squeeze", {"x": (1, 2, 1, 1)})
    assert read_squeeze(every.node, _context(every)) == (0, 2, 3)
    unsqueeze = _operation("Unsqueeze", {"x": (2,), "axes": _ints(-1, 0)})
    assert read_unsqueeze(unsqueeze.node, _context(unsqueeze)) == (0, 2)
    concat = _operation("Concat", {"a": (2, 3), "b": (2, 3)}, {"axis": -1})
    assert read_axis(concat.node, _context(concat)) == 1


def test_transpose_reverses_without_a_permutation() -> None:
    plain, given = _operation("Transpose", {"x": (2, 3, 4)}), _operation("Transpose", {"x": (2, 3)}, {"perm": [0, 1]})
    assert read_transpose(plain.node, _context(plain)) == (2, 1, 0)
    assert read_transpose(given.node, _context(given)) == (0, 1)


def test_gather_of_rows_by_indices_that_do_not_count_from_the_end_is_an_embedding() -> None:
    node = Node("n", "Gather", ("x", "i"), ("y",), {"axis": -2})
    shapes = {"x": (5, 3), "i": (4,)}
    careful = read_gather(node, NodeContext(shapes=shapes, constants={}))
    assert (careful.axis, careful.size, careful.wraps, careful.is_embedding) == (0, 5, True, False)
    assert read_gather(node, NodeContext(shapes=shapes, constants={}, non_negative=frozenset("i"))).is_embedding


@pytest.mark.parametrize("axes", [None, (), (0,), (-1, 0)])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("noop", [0, 1])
def test_reductions_are_those_of_the_reference(axes: tuple[int, ...] | None, keep: int, noop: int) -> None:
    inputs = {"x": (2, 3, 4)} | ({} if axes is None else {"axes": _ints(*axes)})
    operation = _operation("ReduceSum", inputs, {"keepdims": keep, "noop_with_empty_axes": noop})
    plan = read_reduce(operation.node, _context(operation))
    (x, *_), (expected, *_) = _run(operation)
    found = x if plan is None else x.sum(plan.axes, keepdims=plan.keep)
    np.testing.assert_allclose(found, expected)
    if plan is not None:
        layout = plan.layout((0, 2, 1))
        stored = x.transpose(0, 2, 1).sum(tuple((0, 2, 1).index(a) for a in plan.axes), keepdims=plan.keep)
        np.testing.assert_allclose(stored, expected.transpose(layout))


def test_a_reduction_over_an_axis_of_size_0_is_empty() -> None:
    operation = _operation("ReduceMax", {"x": (2, 0), "axes": _ints(1)})
    plan = read_reduce(operation.node, _context(operation))
    assert plan is not None and plan.empty


# Element by element, matrices.


def test_clip_has_its_bounds_and_dropout_its_ratio() -> None:
    clip = _operation("Clip", {"x": (2,), "min": np.array(-1, np.float32), "max": None})
    assert read_clip(clip.node, _context(clip)) == (-1, None)
    assert is_clip_fixed(clip.node, _context(clip))
    assert not is_clip_fixed(clip.node, NodeContext(shapes={}, constants={}))
    dropout = _operation("Dropout", {"x": (2,), "ratio": np.array(0.25, np.float32)})
    assert read_dropout(dropout.node, _context(dropout)) == 0.25
    assert read_dropout(Node("n", "Dropout", ("x",), ("y",)), NodeContext(shapes={}, constants={})) == 0.5


@pytest.mark.parametrize(
    ("bias", "attributes", "plain"),
    [
        (None, {}, True), ((5,), {"transB": 1}, True), ((1, 5), {}, False), ((1,), {}, False),
        ((5,), {"beta": 0.5}, False), (None, {"alpha": 2.0}, False),
    ],
)  # fmt: skip
def test_a_gemm_is_plain_if_a_dense_layer_is_all_of_it(bias: Any, attributes: Any, plain: bool) -> None:
    shape = (5, 3) if attributes.get("transB") else (3, 5)
    operation = _operation("Gemm", {"A": (2, 3), "B": shape} | ({"C": bias} if bias else {}), attributes)
    found = read_gemm(operation.node, _context(operation))
    assert (found.features, found.bias, found.plain) == (5, bias, plain)


# Windows.

_PAIRS = [(0, 0), (1, 0), (0, 1), (1, 1)]


@st.composite
def _pools(draw: st.DrawFn, op: str) -> Operation:
    rank = draw(st.integers(1, 2))
    sides = st.lists(st.integers(0, 1), min_size=rank, max_size=rank)
    attributes = {
        "kernel_shape": draw(st.lists(st.integers(2, 3), min_size=rank, max_size=rank)),
        "strides": draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)),
        "dilations": draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank)),
        "ceil_mode": draw(st.integers(0, 1)),
        "pads": draw(sides) + draw(sides),
    }
    if op == "AveragePool":
        attributes["count_include_pad"] = draw(st.integers(0, 1))
    image = draw(st.lists(st.integers(5, 8), min_size=rank, max_size=rank))
    return _operation(op, {"x": (1, 2, *image)}, attributes)


def _tapped(x: np.ndarray, w: Any, value: float) -> list[np.ndarray]:
    padded = np.pad(x, [(0, 0), (0, 0), *w.pads], constant_values=value)
    return [padded[(..., *tap)] for tap in w.taps()]


def _pooled(operation: Operation, x: np.ndarray) -> np.ndarray:
    """Pool by the definition; ONNX's evaluator fails on some ceil modes and pads."""
    a, image = operation.node.attributes, x.shape[2:]
    ends = a["pads"][len(image) :]
    y = np.empty(operation.shapes[operation.node.outputs[0]])
    for place in np.ndindex(y.shape[2:]):
        seen, count = [], 0
        for cell in np.ndindex(*a["kernel_shape"]):
            at = [
                p * s + c * d - b
                for p, s, c, d, b in zip(place, a["strides"], cell, a["dilations"], a["pads"], strict=False)
            ]
            inside = all(0 <= i < n for i, n in zip(at, image, strict=True))
            if inside:
                seen.append(x[(..., *at)])
            padding = all(i < n + e for i, n, e in zip(at, image, ends, strict=True))
            count += inside or bool(a.get("count_include_pad") and padding)
        y[(..., *place)] = sum(seen) / max(count, 1) if operation.node.op_type == "AveragePool" else np.max(seen, 0)
    return y


@settings(deadline=None)
@given(_pools("AveragePool"))
def test_average_pooling_by_taps_and_counts_is_the_definition(operation: Operation) -> None:
    w = read_pool(operation.node, _context(operation))
    (x,) = operation.draw(0)
    assert x is not None
    include = bool(operation.node.attributes["count_include_pad"])
    total, expected = sum(_tapped(x, w, 0.0)), _pooled(operation, x)
    np.testing.assert_allclose(total / w.counts(include_pad=include), expected, atol=1e-12)
    mean = total / np.prod(w.kernel)
    np.testing.assert_allclose(mean * w.divisor_correction(include_pad=include), expected, atol=1e-12)


@settings(deadline=None)
@given(_pools("MaxPool"))
def test_max_pooling_by_taps_is_the_definition(operation: Operation) -> None:
    w = read_pool(operation.node, _context(operation))
    (x,) = operation.draw(0)
    assert x is not None
    np.testing.assert_array_equal(reduce(np.maximum, _tapped(x, w, -np.inf)), _pooled(operation, x))


def test_a_window_that_sees_only_padding_counts_one_cell() -> None:
    node = Node("n", "AveragePool", ("x",), ("y",), {"kernel_shape": [2], "pads": [3, 0], "strides": [1]})
    w = read_pool(node, NodeContext(shapes={"x": (1, 1, 4)}, constants={}))
    assert w.counts(include_pad=False).tolist() == [1, 1, 1, 2, 2, 2]
    assert np.isfinite(w.divisor_correction(include_pad=False)).all()


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2))
def test_a_window_is_same_exactly_where_auto_pad_makes_it(size: int, kernel: int, stride: int, dilation: int) -> None:
    context = NodeContext(shapes={"x": (1, 1, size), "w": (1, 1, kernel)}, constants={})
    settings = {"strides": [stride], "dilations": [dilation]}
    w = read_conv(Node("n", "Conv", ("x", "w"), ("y",), {**settings, "auto_pad": "SAME_UPPER"}), context)
    assert w.same
    begin, end = w.pads_begin[0], w.pads_end[0] + 1
    assert not read_conv(Node("n", "Conv", ("x", "w"), ("y",), {**settings, "pads": [begin, end]}), context).same


@pytest.mark.parametrize("order", [0, 1])
def test_cell_strides_number_the_cells_of_a_plane(order: int) -> None:
    operation = _operation("MaxPool", {"x": (1, 1, 3, 4)}, {"kernel_shape": [1, 1]})
    strides = read_pool(operation.node, _context(operation)).cell_strides(column_major=bool(order))
    expected = np.arange(12).reshape(3, 4, order="F" if order else "C")
    numbers = [[row * strides[0] + column * strides[1] for column in range(4)] for row in range(3)]
    np.testing.assert_array_equal(expected, numbers)


@settings(deadline=None)
@given(st.integers(3, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from(_PAIRS), st.integers(0, 1))
def test_a_transposed_window_is_the_gradient_of_its_convolution(
    size: int, kernel: int, stride: int, pads: tuple[int, int], extra: int
) -> None:
    extra = min(extra, stride - 1)
    attributes = {"strides": [stride], "pads": list(pads), "output_padding": [extra]}
    operation = _operation("ConvTranspose", {"x": (1, 1, size), "w": (1, 1, kernel)}, attributes)
    w = read_conv_transpose(operation.node, _context(operation))
    (x, weight), (expected,) = _run(operation)
    assert w.outputs == expected.shape[2:]
    padded = np.zeros((1, 1, w.outputs[0] + sum(pads)))
    for tap, factor in zip(w.convolution.taps(), weight[0, 0], strict=True):
        where: Any = (..., *tap)
        padded[where] += factor * x
    np.testing.assert_allclose(padded[..., pads[0] : padded.shape[2] - pads[1]], expected, atol=1e-12)
    full = np.zeros((size - 1) * stride + w.spans[0])
    assert len(full) - w.pads_begin[0] + w.tail[0] == w.outputs[0]


def test_four_spatial_axes_are_refused() -> None:
    context = NodeContext(shapes={"x": (1, 1, 2, 2, 2, 2)}, constants={})
    with pytest.raises(NetworkError, match="4 spatial dimensions"):
        read_global_pool(Node("n", "GlobalMaxPool", ("x",), ("y",)), context)
    assert (
        read_global_pool(Node("n", "GlobalMaxPool", ("x",), ("y",)), NodeContext(shapes={"x": (1, 1, 2)}, constants={}))
        == 1
    )


# Resized and sampled images.


def _run_onnxruntime(operation: Operation, drawn: list[Any]) -> np.ndarray:
    """onnxruntime's answer, as the operator's node says it: nothing is optimized."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        operation.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    fed = {value.name for value in session.get_inputs()}
    given = zip(operation.node.inputs, drawn, strict=True)
    answers: list[np.ndarray] = session.run(None, {name: array for name, array in given if name in fed})
    return answers[0]


@pytest.mark.parametrize("scale", [1.7, 0.6, 0.2])
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_aligned_corners_are_those_of_the_whole_number_of_cells(mode: str, scale: float) -> None:
    operation = Operation(
        "Resize", {"x": (2, 3, 8, 9), "roi": None, "scales": np.array([1, 1, scale, scale], np.float32)},
        {"mode": mode, "coordinate_transformation_mode": "align_corners"},
    )  # fmt: skip
    drawn = operation.draw(0)
    plan = read_resize(operation.node, _context(operation))
    y = drawn[0]
    assert y is not None and plan.aligned
    for axis, rows in plan.rows.items():
        y = y.take(rows, axis)
    for axis, matrix in plan.weights.items():
        y = np.moveaxis(np.tensordot(y, matrix, ([axis], [1])), -1, axis)
    np.testing.assert_allclose(y, _run_onnxruntime(operation, drawn), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(y, OperatorOracle(operation).run(drawn)[0], rtol=1e-12, atol=1e-12)


_NUMPY = SamplingFunctions(np.floor, np.rint, np.abs, np.clip, lambda x: x.astype(np.int64))


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_points_beyond_an_image_have_the_samples_of_pytorch_and_onnxruntime(
    mode: str, padding: str, aligned: int
) -> None:
    operation = Operation(
        "GridSample", {"x": (2, 3, 5, 4), "grid": (2, 6, 7, 2)},
        {"mode": mode, "padding_mode": padding, "align_corners": aligned},
    )  # fmt: skip
    drawn = operation.draw(0)
    x, grid = drawn
    assert x is not None and grid is not None
    plan = read_grid_sample(operation.node, _context(operation))
    points = np.moveaxis(grid.astype(np.float64).reshape(2, -1, 2), -1, 0)
    flat = x.reshape(2, 3, -1)
    y = sum(
        np.take_along_axis(flat, tap.cell[:, None], 2) * tap.weight[:, None]
        for tap in taps(plan, _NUMPY, list(points))
    ).reshape(2, 3, 6, 7)  # fmt: skip
    torch = pytest.importorskip("torch")
    named = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    sampled = torch.nn.functional.grid_sample(*map(torch.tensor, drawn), named, padding, align_corners=bool(aligned))
    np.testing.assert_allclose(y, sampled, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(y, _run_onnxruntime(operation, drawn), rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(y, OperatorOracle(operation).run(drawn)[0], rtol=1e-12, atol=1e-12)


# Normalization and losses.


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_channels_of_an_lrn_are_those_of_the_reference(size: int) -> None:
    operation = _operation("LRN", {"x": (1, 6, 2)}, {"size": size, "alpha": 0.5, "beta": 0.75, "bias": 2.0})
    lrn = read_lrn(operation.node)
    (x,), (expected,) = _run(operation)
    padded = np.pad(x**2, [(0, 0), (lrn.before, lrn.after), (0, 0)])
    squares = sum(padded[:, i : i + 6] for i in range(lrn.size))
    np.testing.assert_allclose(x / (lrn.bias + lrn.alpha / lrn.size * squares) ** lrn.beta, expected)


def test_layer_normalization_knows_its_axes_and_whether_weights_are_broadcast() -> None:
    full = _operation("LayerNormalization", {"x": (2, 3, 4), "scale": (3, 4)}, {"axis": -2})
    found = read_layer_normalization(full.node, _context(full))
    assert (found.axes, found.sizes, found.full) == ((1, 2), (3, 4), True)
    broadcast = _operation("LayerNormalization", {"x": (2, 3, 4), "scale": (4,)}, {"axis": 1})
    assert not read_layer_normalization(broadcast.node, _context(broadcast)).full


def test_a_loss_has_its_reduction_label_weights_and_outputs() -> None:
    operation = _operation(
        "SoftmaxCrossEntropyLoss", {"x": (2, 3), "labels": _ints(0, 2), "weight": (3,)},
        {"reduction": "sum", "ignore_index": 2}, outputs=(True, True),
    )  # fmt: skip
    found = read_softmax_cross_entropy_loss(operation.node, _context(operation))
    assert (found.reduction, found.ignored, found.weighted, found.logged) == ("sum", 2, True, True)
    first = replace(operation.node, outputs=operation.node.outputs[:1])  # as networks want of it
    assert not read_softmax_cross_entropy_loss(first, _context(operation)).logged


# Sequences.


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_lengths_of_sequences_that_are_computed_or_fed_are_refused(kind: str) -> None:
    node = Node("cell", kind, ("x", "w", "r", "", "lengths"), ("y",), {"hidden_size": 2, "layout": 0, "direction": ""})
    shapes = {"x": (5, 2, 3), "w": (1, 8, 3), "r": (1, 8, 2), "lengths": (2,)}
    fixed = {"lengths": np.array([5, 5])}
    assert read_recurrent(node, NodeContext(shapes=shapes, constants=fixed)).steps == 5
    with pytest.raises(NetworkError, match=f"cell: {kind} with lengths of sequences that are not known"):
        read_recurrent(node, NodeContext(shapes=shapes, constants={}))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packings_of_gates_there_and_back_are_the_same(kind: str) -> None:
    gates = 4 if kind == "LSTM" else 3
    inputs = {"x": (5, 2, 3), "w": (1, gates * 2, 3), "r": (1, gates * 2, 2), "b": (1, 2 * gates * 2)}
    operation = _operation(kind, inputs, {"hidden_size": 2}, outputs=(True, False))
    plan = read_recurrent(operation.node, _context(operation))
    assert (plan.batch, plan.steps, plan.hidden, plan.wanted[:2]) == (2, 5, 2, (True, False))
    assert plan.has_kernel is (kind == "LSTM")
    order = CUDNN_GATES[kind]
    _, w, _, b = operation.draw(0)
    packing, bias = plan.gates(order), plan.bias_gates(order)
    assert w is not None and b is not None
    np.testing.assert_array_equal(packing.unpack(packing.pack(w)), w)
    np.testing.assert_array_equal(bias.unpack(bias.pack(b)), b)
    forget_or_reset = {"LSTM": ("f", 2), "GRU": ("r", 1)}[kind]
    place = order.index(forget_or_reset[0])
    np.testing.assert_array_equal(packing.pack(w)[0, 2 * place :][:2], w[0, 2 * forget_or_reset[1] :][:2])


def test_attention_groups_its_query_heads() -> None:
    shapes = {"q": (1, 4, 2, 3), "k": (1, 2, 2, 3), "v": (1, 2, 2, 3)}
    operation = _operation("Attention", shapes, {"is_causal": 1})
    plan = read_attention(operation.node, _context(operation))
    assert (plan.groups, plan.causal, plan.plain) == (2, True, True)
    assert plan.bias is not None
    np.testing.assert_array_equal(np.isfinite(plan.bias), np.tri(2, dtype=bool))


# Layouts and outputs.


@pytest.mark.parametrize("wanted", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 4), (1, 3, 1), (None, 1, 4)])
def test_a_conversion_brings_stored_data_into_the_wanted_layout(wanted: Any, shape: Any) -> None:
    context = layouts.LayoutContext(shapes={"x": shape}, constants={}, layouts={"x": (0, 2, 1)})
    x = np.random.default_rng(0).random([n or 5 for n in shape])
    move = context.conversion("x", wanted)
    if move is None:
        assert wanted == (0, 2, 1)
        return
    stored = x.transpose(0, 2, 1)
    np.testing.assert_array_equal(stored.transpose(move.order), x.transpose(wanted))
    if move.reshape is not None:
        np.testing.assert_array_equal(stored.reshape(move.reshape), x.transpose(wanted))


def test_operands_of_fewer_axes_get_leading_ones_in_the_layout_of_the_others() -> None:
    context = layouts.LayoutContext(
        shapes={"x": (2, 3, 4), "v": (4,), "y": (2, 3, 4)}, constants={}, layouts={"x": (0, 2, 1)}
    )
    wanted = context.broadcast_layouts(Node("n", "Add", ("x", "v"), ("y",)))
    assert wanted == [(0, 2, 1), (0, 2, 1)] and context.layouts["y"] == (0, 2, 1)
    move = context.conversion("v", (0, 2, 1))
    assert move is not None and move.added == 2
    np.testing.assert_array_equal(np.arange(4)[None, None].transpose(move.order), np.arange(4).reshape(1, 4, 1))


def test_layouts_of_images_kernels_and_groups() -> None:
    assert layouts.channels_last(4) == (0, 2, 3, 1)
    assert layouts.channels_last(1) == layouts.identity(1) == (0,)
    assert layouts.kernel_last(4) == (2, 3, 1, 0)
    assert layouts.grouped_channels_last(5) == (0, 3, 4, 1, 2)
    assert layouts.without((0, 2, 3, 1), (1, 2)) == (0, 1)
    assert layouts.arrange((0, 2, 3, 1), ("h", "w"), "-") == ("-", "h", "w", "-")


def test_an_axis_that_joins_an_open_batch_is_no_group_of_channels() -> None:
    """Video networks join a clip's pictures with the batch: (N, 6, 3, H, W) to (6 N, 3, H, W)."""
    assert not layouts.splits_channels((None, 3, 12, 12), (None, 6, 3, 12, 12))
    assert layouts.splits_channels((None, 18, 12, 12), (None, 6, 3, 12, 12))


@pytest.mark.parametrize(
    ("layout", "target", "entered", "sizes"),
    [
        ((0, 2, 3, 1), (2, 2, 3, 5, 4), (0, 2, 3, 1), (2, 5, 4, 2, 3)),
        ((0, 1, 2, 3), (2, 2, 3, 5, 4), (0, 1, 2, 3), (2, 2, 3, 5, 4)),
        ((0, 2, 3, 1), (2, 30, 4), (0, 1, 2, 3), (2, 30, 4)),
    ],
)
def test_channels_stored_last_are_split_where_they_are(layout: Any, target: Any, entered: Any, sizes: Any) -> None:
    operation = _operation("Reshape", {"x": (2, 6, 5, 4), "shape": _ints(*target)})
    node, name = operation.node, operation.node.inputs[0]
    context = layouts.LayoutContext.of_operation(operation, layouts={name: layout})
    assert read_stored_reshape(node, context) == (entered, sizes)
    x = np.arange(240).reshape(2, 6, 5, 4)
    stored = x.transpose(entered).reshape(sizes)
    np.testing.assert_array_equal(stored, x.reshape(target).transpose(context.layout(node.outputs[0])))
    if len(sizes) == 5:  # and merged again
        back = _operation("Reshape", {"x": target, "shape": _ints(2, 6, 5, 4)})
        context = layouts.LayoutContext.of_operation(
            back, layouts={back.node.inputs[0]: context.layout(node.outputs[0])}
        )
        given, merged = read_stored_reshape(back.node, context)
        assert given == context.layout(back.node.inputs[0])
        np.testing.assert_array_equal(stored.reshape(merged), x.transpose(layout))


def test_outputs_are_selected_by_name() -> None:
    node = Node("n", "LSTM", ("x", ""), ("y", "", "cells"))
    assert NodeContext(shapes={}, constants={}).wanted(node) == (True, False, True)
    assert by_name(node, (1, None, 3)) == {"y": 1, "cells": 3}
    assert by_name(replace(node, outputs=("y",)), 1) == {"y": 1}
    assert select((1, 2), (True, False)) == 1
    assert select((1, 2, 3), (True, False, True)) == (1, None, 3)
    assert has_input(node, 0) and not has_input(node, 1) and not has_input(node, 2)


def test_a_context_is_of_an_operation_or_of_a_network() -> None:
    operation = Operation("Dropout", {"x": (2, 3), "ratio": np.array(0.5, np.float32), "training": np.array(True)})
    context = NodeContext.of_operation(operation)
    assert (context.single, context.training) == (True, True)
    assert read_dropout(operation.node, context) == 0.5
    network = build("lenet5", image_size=32)
    context = layouts.LayoutContext.of_network(network, training=False, layouts={"x": (1, 0)})
    assert (context.single, context.training, context.layouts) == (False, False, {"x": (1, 0)})
    assert set(context.constants) == set(network.constants)


def test_parameters_are_stored_by_what_reads_them() -> None:
    network = build("lenet5", image_size=32)
    found = layouts.weight_layouts(network)
    assert {len(layout): layout for layout in found.values()} == {4: (2, 3, 1, 0), 2: (1, 0)}
    assert set(found) == {name for name in network.parameters if name.endswith("weight")}
    assert set(layouts.weight_layouts(network, kernels=())) == {"f6.weight", "output.weight"}


def test_16_bits_round_weights_and_not_those_of_normalization() -> None:
    network = build("resnet18", image_size=32)
    rounded = {
        node.inputs[index]
        for node in network.nodes
        for index in range(len(node.inputs))
        if is_rounded(network, node, index)
    }
    assert rounded == {name for name in network.parameters if ".bn" not in name and "downsample.1" not in name} - {
        "bn1.weight", "bn1.bias",
    }  # fmt: skip


def test_a_schedule_frees_each_tensor_after_its_last_use() -> None:
    network = build("lenet5", image_size=32)
    for wanted, training in ((network.output, False), (network.loss, True)):
        steps = schedule(network, wanted or "", training=training)
        assert [step.node.outputs[0] for step in steps][-1] == wanted
        alive = {"", network.input, *network.initializers, *([network.label] if training else [])}
        for step in steps:
            assert {*step.node.inputs} <= alive
            alive = (alive | {*step.node.outputs}) - {*step.dead}
        assert alive == {"", wanted, *network.initializers}


def test_a_schedule_refuses_further_outputs() -> None:
    dropped = helper.make_node("Dropout", ["image"], ["dropped", "mask"], "drop")
    flat = helper.make_node("Flatten", ["mask"], ["flat"], "flat")
    graph = helper.make_graph(
        [dropped, flat],
        "further",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("flat", TensorProto.BOOL, [1, 48])],
    )
    network = Network(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    with pytest.raises(NetworkError, match="'mask' is not a first output of Dropout"):
        schedule(network, "flat", training=False)
    with pytest.raises(NetworkError, match="no node computes 'mask' as its first output"):
        schedule(network, "mask", training=False)
