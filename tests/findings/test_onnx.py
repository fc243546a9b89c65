"""Faults of ONNX's evaluator and shape inference, without d5suite: see docs/findings.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.defs import onnx_opset_version
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError, infer_shapes
from onnx.version_converter import convert_version

from tests.findings.mended import require

ORACLE = "d5suite/validate/oracle.py ({})"


def _evaluate(operator: str, *inputs: np.ndarray, **attributes: Any) -> np.ndarray:
    names = [f"x{index}" for index in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in zip(names, inputs, strict=True)
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)]
    graph = helper.make_graph([helper.make_node(operator, names, ["y"], **attributes)], operator, infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)])
    answers: Any = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    return answers[0]


def test_grouped_transposed_convolutions_are_rejected() -> None:
    x, w = np.ones((1, 4, 3, 3), np.float32), np.ones((4, 3, 2, 2), np.float32)
    try:
        y = _evaluate("ConvTranspose", x, w, group=2)
        broken = y.shape != (1, 6, 4, 4) or not np.array_equal(y[0, :, 1, 1], np.full(6, 8.0))
    except ValueError:  # of NumPy's reshape
        broken = True
    require(broken, "onnx", ORACLE.format("ConvTranspose"))


@pytest.mark.parametrize(
    ("operator", "exact"),
    [
        ("Erf", math.erf(0.7)),
        ("Gelu", 0.7 * (1 + math.erf(0.7 / math.sqrt(2))) / 2),
        ("HardSwish", 0.7 * (0.7 / 6 + 0.5)),
    ],
)
def test_a_float64_function_is_good_to_float32_only(operator: str, exact: float) -> None:
    (y,) = _evaluate(operator, np.array([0.7]))
    require(abs(y - exact) > 1e-12 * exact, "onnx", ORACLE.format(operator))


@pytest.mark.parametrize("operator", ["LogSoftmax", "SoftmaxCrossEntropyLoss"])
def test_the_logarithm_of_a_small_probability_is_infinite(operator: str) -> None:
    labels = [np.array([1])] if operator == "SoftmaxCrossEntropyLoss" else []
    with np.errstate(divide="ignore"):
        y = _evaluate(operator, np.array([[1000.0, 0.0]]), *labels)
    require(bool(np.isinf(y).any()), "onnx", ORACLE.format(operator))


def test_the_unequal_pads_of_a_maximum_are_confused() -> None:
    y = _evaluate("MaxPool", np.arange(4.0)[None, None], kernel_shape=[2], pads=[0, 1])
    require(y.tolist() != [[[1, 2, 3, 3]]], "onnx", ORACLE.format("MaxPool"))


def test_a_global_maximum_of_one_axis_fails() -> None:
    try:
        broken = _evaluate("GlobalMaxPool", np.ones((2, 3, 4), np.float32)).shape != (2, 3, 1)
    except np.exceptions.AxisError:
        broken = True
    require(broken, "onnx", ORACLE.format("GlobalMaxPool"))


def test_negative_padding_is_rejected() -> None:
    try:
        broken = not np.array_equal(_evaluate("Pad", np.arange(4.0), np.array([-1, 1])), [1, 2, 3, 0])
    except ValueError:  # of NumPy's pad
        broken = True
    require(broken, "onnx", ORACLE.format("Pad"))


def test_response_normalization_confuses_images_with_channels() -> None:
    x = np.ones((1, 3, 1, 1), np.float32)  # one image, three channels
    y = _evaluate("LRN", x, size=1, alpha=1.0, beta=1.0, bias=1.0)
    require(not np.allclose(y, 0.5), "onnx", ORACLE.format("LRN"))


def test_gathered_elements_may_not_be_fewer_than_the_data() -> None:
    try:
        y = _evaluate("GatherElements", np.arange(12.0).reshape(3, 4), np.array([[0, 1]]), axis=1)
        broken = y.tolist() != [[0.0, 1.0]]
    except ValueError:  # of PyTorch's stricter rule, which ONNX's specification does not have
        broken = True
    require(broken, "onnx", ORACLE.format("GatherElements"))


def test_elements_of_many_are_not_gathered() -> None:
    try:
        y = _evaluate("GatherElements", np.arange(80.0)[None], np.array([[70, 5]]), axis=1)
        broken = y.tolist() != [[70.0, 5.0]]
    except ValueError:  # of NumPy's choose
        broken = True
    require(broken, "onnx", "d5suite/network/folding.py (_answers)")


def _shape(operator: str, inputs: Sequence[TensorProto], **attributes: Any) -> list[Any]:
    node = helper.make_node(operator, [tensor.name for tensor in inputs], ["y"], **attributes)
    graph = helper.make_graph([node], operator, [], [helper.make_empty_tensor_value_info("y")], inputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx_opset_version())])
    (output,) = infer_shapes(model, strict_mode=True, data_prop=True).graph.output
    return [dimension.dim_value for dimension in output.type.tensor_type.shape.dim]


def test_no_shape_of_a_group_normalization_is_inferred() -> None:
    inputs = [
        numpy_helper.from_array(np.zeros(shape, np.float32), name)
        for name, shape in (("x", (2, 4, 3)), ("s", 4), ("b", 4))
    ]
    shape = _shape("GroupNormalization", inputs, num_groups=2)
    require(shape != [2, 4, 3], "onnx", "d5suite/network/normalise.py (_LIKE_INPUT)")


def test_mean_variance_normalization_without_axes_has_no_shape() -> None:
    try:
        shape = _shape("MeanVarianceNormalization", [numpy_helper.from_array(np.zeros((2, 4, 3, 3), np.float32), "x")])
    except InferenceError:  # of the function that it is expanded into, without the default axes
        shape = []
    require(shape != [2, 4, 3, 3], "onnx", "d5suite/network/normalise.py (_LIKE_INPUT)")


def test_the_length_of_a_range_in_16_bits_is_not_inferred() -> None:
    inputs = [
        helper.make_tensor(name, TensorProto.BFLOAT16, [], [value])
        for name, value in zip("abc", (3.0, 20.0, 4.0), strict=True)
    ]
    require(_shape("Range", inputs) != [5], "onnx", "d5suite/network/operation.py (Operation)")


def test_sampled_points_are_rounded_to_float32() -> None:
    x, grid = np.arange(3.0).reshape(1, 1, 1, 3), np.array([0.1, 0.0]).reshape(1, 1, 1, 2)
    y = _evaluate("GridSample", x, grid, align_corners=1).item()
    require(abs(y - 1.1) > 1e-12, "onnx", ORACLE.format("GridSample"))


def test_a_cubic_sample_beyond_the_border_is_that_at_the_border() -> None:
    x, grid = np.array([[[1.0, 2.0, 4.0]]]), np.array([[[1.25]]])  # a quarter of a cell beyond the last
    y = _evaluate("GridSample", x, grid, align_corners=1, mode="cubic", padding_mode="border").item()
    weight = np.polynomial.Polynomial([3, -6, 3.75, -0.75])(1.25)  # of 2; the other three cells are the last
    require(abs(y - (2 * weight + 4 * (1 - weight))) > 1e-3, "onnx", ORACLE.format("GridSample"))


def test_corners_are_aligned_before_the_size_is_rounded() -> None:
    x, scales = np.arange(4.0).reshape(1, 1, 4), np.array([1, 1, 0.6], np.float32)
    settings: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    y = _evaluate("Resize", x, np.zeros(0, np.float32), scales, **settings)
    require(not np.allclose(y, [[[0.0, 3.0]]]), "onnx", ORACLE.format("Resize"))


def test_the_norm_of_order_1_is_a_sum_with_signs() -> None:
    y = _evaluate("LpNormalization", np.array([[1.0, -3.0]]), p=1)
    require(not np.allclose(y, [[0.25, -0.75]]), "onnx", ORACLE.format("LpNormalization"))


def test_values_of_any_shape_are_propagated_as_vectors() -> None:
    axes = {"first": [1, 2], "second": [0, 2]}
    nodes = [helper.make_node("Unsqueeze", [name, f"{name}.axes"], [f"{name}.places"]) for name in axes]
    nodes.append(helper.make_node("Add", ["first.places", "second.places"], ["y"]))
    constants = [numpy_helper.from_array(np.arange(n), name) for n, name in zip((2, 3), axes, strict=True)]
    constants += [numpy_helper.from_array(np.array(value), f"{name}.axes") for name, value in axes.items()]
    graph = helper.make_graph(nodes, "places", [], [helper.make_empty_tensor_value_info("y")], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    try:
        infer_shapes(model, strict_mode=True, data_prop=True)
        broken = False
    except InferenceError:  # "Invalid rank for Add broadcasting: (2) vs (3)"
        broken = True
    require(broken, "onnx", "d5suite/network/normalise.py (infer)")


@pytest.mark.parametrize("operator", ["AveragePool", "LpPool", "MaxPool"])
def test_windows_behind_an_image_are_counted_before_operator_set_22(operator: str) -> None:
    node = helper.make_node(operator, ["x"], ["y"], kernel_shape=[2], strides=[3], ceil_mode=1)
    x = np.ones((1, 1, 6), np.float32)
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape), helper.make_empty_tensor_value_info("y")]
    model = helper.make_model(
        helper.make_graph([node], operator, ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 21)]
    )
    answers: Any = ReferenceEvaluator(model).run(None, {"x": x})
    assert answers[0].shape == (1, 1, 2)  # windows at 0 and 3; 6 is behind the image
    (output,) = infer_shapes(model, strict_mode=True).graph.output
    broken = output.type.tensor_type.shape.dim[2].dim_value != 2
    require(broken, "onnx", "d5suite/network/repairs.py (count_windows)")


def test_an_upsample_becomes_a_resize_with_other_coordinates() -> None:
    node = helper.make_node("Upsample", ["x", "scales"], ["y"], mode="linear")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 1, n]) for name, n in (("x", 2), ("y", 4))]
    scales = numpy_helper.from_array(np.array([1, 1, 1, 2], np.float32), "scales")
    graph = helper.make_graph([node], "upsample", infos[:1], infos[1:], [scales])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    converted = convert_version(model, 21)
    answers: Any = ReferenceEvaluator(converted).run(None, {"x": np.array([[[[0.0, 1.0]]]], np.float32)})
    broken = not np.allclose(answers[0], [[[[0, 0.5, 1, 1]]]])  # a place is its index over the scale
    require(broken, "onnx", "d5suite/network/repairs.py (repair_resizes)")


def test_an_old_hardmax_becomes_one_of_a_single_axis() -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 2, 2)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Hardmax", ["x"], ["y"], axis=1)], "hardmax", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    answers: Any = ReferenceEvaluator(convert_version(model, 21)).run(None, {"x": x})
    broken = not np.array_equal(answers[0], [[[0, 0], [0, 1]]])  # one of all values behind the first axis
    require(broken, "onnx", "d5suite/network/repairs.py (flatten_for_hardmax)")


def test_norms_of_windows_beyond_the_end_are_too_large() -> None:
    y = _evaluate("LpPool", np.ones((1, 1, 6)), kernel_shape=[3], strides=[2], ceil_mode=1, p=1)
    require(not np.allclose(y, [[[3, 3, 2]]]), "onnx", ORACLE.format("LpPool"))


def test_there_is_no_global_pooled_norm() -> None:
    try:
        _evaluate("GlobalLpPool", np.ones((1, 1, 3)))
        broken = False
    except NotImplementedError:
        broken = True
    require(broken, "onnx", ORACLE.format("GlobalLpPool"))


def test_a_short_time_transform_is_inferred_without_its_default() -> None:
    inputs = [
        numpy_helper.from_array(np.zeros((1, 16, 1), np.float32), "x"),
        numpy_helper.from_array(np.array(4), "step"),
        numpy_helper.from_array(np.ones(8, np.float32), "window"),
    ]
    require(_shape("STFT", inputs) != [1, 3, 5, 2], "onnx", "d5suite/network/normalise.py (infer)")


def test_no_shape_of_an_unpooled_image_is_inferred_from_the_one_given() -> None:
    inputs = [
        numpy_helper.from_array(np.zeros((1, 1, 3), np.float32), "x"),
        numpy_helper.from_array(np.array([[[1, 2, 5]]]), "indices"),
        numpy_helper.from_array(np.array([1, 1, 8]), "sizes"),
    ]
    shape = _shape("MaxUnpool", inputs, kernel_shape=[2], strides=[2])
    require(shape != [1, 1, 8], "onnx", "d5suite/network/normalise.py (infer)")


def test_functions_are_inlined_without_the_defaults_of_their_attributes() -> None:
    bent = helper.make_node("LeakyRelu", ["a"], ["b"])
    bent.attribute.append(AttributeProto(name="alpha", ref_attr_name="slope", type=AttributeProto.FLOAT))
    opsets, slope = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)], helper.make_attribute("slope", 0.5)
    function = helper.make_function("local", "Bent", ["a"], ["b"], [bent], opsets[:1], attribute_protos=[slope])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Bent", ["x"], ["y"], domain="local")], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=opsets, functions=[function])
    (node,) = inline_local_functions(model).graph.node
    require(not node.attribute, "onnx", "d5suite/network/normalise.py (_inlined)")
