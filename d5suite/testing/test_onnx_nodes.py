"""ONNX's own node tests for the declared operators, through ONNX's backend test runner.

A backend with level 0 runs every node as a single operator. Another backend runs it as a network
with one float32 input; further inputs become initializers, and a loss takes labels of one axis.
Other nodes are outside levels 1 and 2, and are skipped with the reason. The kit's short form runs
one case per operator without level 0. With level 0 it runs one per family, because `test_level0`
and `test_operators` have every operator.
"""

from __future__ import annotations

import importlib
import pkgutil
import unittest
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.backend.base
import onnx.backend.test
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as node_tests
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

from d5suite.levels.contract import ContractError
from d5suite.network import Network
from d5suite.network.graph_edits import copy_of, replace_items
from d5suite.network.onnx_file import OLDEST_OPSET
from d5suite.network.operation import PRECISIONS, Operation
from d5suite.testing.networks import fed
from d5suite.testing.operations import REPRESENTATIVE
from d5suite.testing.subject import chosen

LOSS = "SoftmaxCrossEntropyLoss"

RANDOM = frozenset(f"test_training_dropout{kind}" for kind in ("", "_default", "_default_mask", "_mask"))
"""Cases with random expected output."""

CONTRARY = {
    **dict.fromkeys(
        ("test_resize_downsample_scales_cubic_align_corners", "test_resize_downsample_scales_linear_align_corners"),
        "corners aligned by the length before it is rounded: ONNX's text says the resized tensor's",
    ),
}
"""Cases that contradict ONNX's text, with what they expect instead."""

FIGURES = ("Not equal", "Mismatched", "Max ")
"""Lines of NumPy's report that are shown: the number and size of differences, not the arrays."""


class NodeNetwork(onnx.backend.base.BackendRep):
    """A node as a network, built when its inputs are known, because they become initializers."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the node's output."""
        model = copy_of(self.model)
        graph = model.graph
        names = [i.name for i in graph.input]
        loss = graph.node[0].op_type == LOSS
        inputs_fed = 2 if loss else 1
        fed_infos = (
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(names[:inputs_fed], inputs[:inputs_fed], strict=True)
        )
        replace_items(graph.input, fed_infos)
        graph.initializer.extend(
            numpy_helper.from_array(np.asarray(a), n)
            for n, a in zip(names[inputs_fed:], inputs[inputs_fed:], strict=True)
        )
        output = graph.output[0].name
        precision = "fp32" if "fp32" in chosen().backend.precisions else None
        if not loss:
            executor = chosen().executor(Network(model, input=names[0], output=output), precision)
            return (executor.fetch(executor.forward(executor.feed({names[0]: inputs[0]})))[output],)
        graph.node.append(helper.make_node("Identity", [names[0]], ["scores.same"], "same"))
        graph.output.append(helper.make_tensor_value_info("scores.same", TensorProto.FLOAT, inputs[0].shape))
        network = Network(model, input=names[0], output="scores.same", label=names[1], loss=output)
        executor = chosen().executor(network, precision)
        feed = fed(executor, (inputs[0], inputs[1].astype(np.int64)))
        return (executor.fetch(executor.forward_backward(feed))[output],)


class NodeOperator(onnx.backend.base.BackendRep):
    """A node as a single operator, built when its inputs are known, because some are static."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the node's outputs."""
        arrays = [np.asarray(a) for a in inputs]
        operation = Operation.from_model(self.model, arrays, self.model.graph.name)
        given = dict(zip((i.name for i in self.model.graph.input), arrays, strict=True))
        values = [{**operation.constants, **given}.get(name) for name in operation.node.inputs]
        subject = chosen()
        if lacking := subject.backend.lacks(operation):
            raise unittest.SkipTest(lacking)
        subject.configure()
        operator = subject.backend.operator(operation, mode=subject.mode, device=subject.device)
        return tuple(operator.fetch(operator.forward(*operator.feed(values))))


class NodeBackend(onnx.backend.base.Backend):
    """The backend under test, for ONNX's test runner."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> onnx.backend.base.BackendRep:
        """Prepare a node, or skip it with the reason."""
        graph = model.graph
        if graph.name in CONTRARY:
            raise unittest.SkipTest(CONTRARY[graph.name])
        if not all(value.type.HasField("tensor_type") for value in (*graph.input, *graph.output)):
            raise unittest.SkipTest("sequences and optional values are not tensors")
        types = [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
        lacking = {dtype for dtype in map(helper.tensor_dtype_to_np_dtype, types) if not _is_number(np.dtype(dtype))}
        if lacking:
            raise unittest.SkipTest(f"no framework here computes with {', '.join(map(str, lacking))}")
        if 0 in chosen().backend.levels:
            if graph.name in RANDOM:
                raise unittest.SkipTest("the expected output is random")
            return NodeOperator(model)
        node = graph.node[0]
        version = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        first = graph.input[0].type
        if version < OLDEST_OPSET:
            raise unittest.SkipTest(f"opset {version}: d5suite reads opset {OLDEST_OPSET} and later")
        if not first.HasField("tensor_type") or first.tensor_type.elem_type != TensorProto.FLOAT:
            raise unittest.SkipTest("images are float32: the first input is of another type")
        if graph.output[0].type.tensor_type.elem_type != TensorProto.FLOAT:
            raise unittest.SkipTest("answers are float32: the output is of another type")
        if len(graph.output) > 1:
            raise unittest.SkipTest("only first outputs are computed, and the node has several")
        if node.op_type == "Dropout" and len(graph.input) > 2:
            raise unittest.SkipTest("a network's mode says whether Dropout drops, not an input")
        if node.op_type == LOSS:
            if "gradient" in chosen().backend.absent:
                raise unittest.SkipTest(f"no loss without a gradient: {chosen().backend.absent['gradient']}")
            if len(graph.input[1].type.tensor_type.shape.dim) != 1:
                raise unittest.SkipTest("labels have one axis, the batch")
            if any(a.name == "reduction" and a.s == b"none" for a in node.attribute):
                raise unittest.SkipTest("a loss is one number: reduction 'none' has none")
        return NodeNetwork(model)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Accept the device under test only."""
        return device == {"cpu": "CPU", "cuda": "CUDA"}[chosen().device]


class NodeTest(onnx.backend.test.BackendTest):
    """ONNX's test runner, for which a wrong answer is a `ContractError`."""

    @classmethod
    def assert_similar_outputs(
        cls,
        ref_outputs: Sequence[Any],
        outputs: Sequence[Any],
        rtol: float,
        atol: float,
        model_dir: str | None = None,
    ) -> None:
        """Compare as ONNX does, but accept two roundings of float16: processors differ by one.

        Also accept one rounding of the largest float32 value, for sums that cancel, as in a Fourier
        transform.
        """
        wide = [np.abs(each) for each in map(np.asarray, ref_outputs) if each.dtype == np.float32 and each.size]
        largest = max((float(np.max(each, initial=0, where=np.isfinite(each))) for each in wide), default=0.0)
        atol = max(atol, float(np.finfo(np.float32).eps) * largest)
        if any(np.asarray(output).dtype == np.float16 for output in ref_outputs):
            rtol = max(rtol, 2 * float(np.finfo(np.float16).eps))
        try:
            super().assert_similar_outputs(ref_outputs, outputs, rtol, atol, model_dir)
        except AssertionError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            figures = [line for line in lines if line.startswith(FIGURES)] or lines[:2]
            raise ContractError(chosen().backend.name, "operators.meaning", "; ".join(figures)) from error


def _is_number(dtype: np.dtype) -> bool:
    """Return whether a type is NumPy's own or bfloat16: not packed, float8 or text."""
    return (dtype.kind in "biuf" and dtype.isbuiltin == 1) or dtype in PRECISIONS.values()


def _made(kind: str) -> list[TestCase]:
    """Make ONNX's node tests; for a short run, only those that it may need.

    Making all takes four seconds: ONNX computes the answers in Python, element by element.
    """
    if kind != "node":
        return []
    if not chosen().short or 0 not in chosen().backend.levels:
        return load_model_tests(kind="node")
    for module in pkgutil.iter_modules(node_tests.__path__):
        source = Path(node_tests.__path__[0]) / f"{module.name}.py"
        if source.is_file() and any(f'"{operator}"' in source.read_text() for operator in REPRESENTATIVE):
            importlib.import_module(f"{node_tests.__name__}.{module.name}")
    return list(node_tests._NodeTestCases)


def _declared(cases: Sequence[TestCase]) -> dict[str, onnx.ModelProto]:
    """Return the models of the node tests whose operators are all declared, by name."""
    backend = chosen().backend
    operators = backend.operators | backend.single_operators
    return {
        f"{case.name}_{chosen().device}": case.model
        for case in cases
        if case.model is not None
        and (len(case.model.graph.node) == 1 or 0 not in backend.levels)
        and all(not node.domain and node.op_type in operators for node in case.model.graph.node)
    }


def _test_case() -> type:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases overflow on purpose
        models = _declared(_made("node"))
        with mock.patch("onnx.backend.test.runner.load_model_tests", _made):
            case = NodeTest(NodeBackend, __name__).test_cases["OnnxBackendNodeModelTest"]
    for name in [name for name in vars(case) if name.startswith("test_") and name not in models]:
        delattr(case, name)
    quick: dict[str, str] = {}  # the first float32 case of each operator, or of one in each family
    for name, model in models.items():
        kind = model.graph.node[0].op_type
        wanted = kind in REPRESENTATIVE or 0 not in chosen().backend.levels
        if wanted and model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT:
            quick.setdefault(kind, name)
    for name in models.keys() - set(quick.values()):
        pytest.mark.slow(getattr(case, name))
    return case


OnnxBackendNodeTest = _test_case()
