"""deep500 at level 0: variants beyond the kit's, and the bridge to deep500's own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5suite.backends import backend
from d5suite.backends.deep500 import BACKEND
from d5suite.errors import NetworkError
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.operation import Operation, Tensor
from d5suite.testing.cases import i64, values
from d5suite.testing.networks import random_batch
from d5suite.testing.operations import OPERATIONS
from d5suite.validate.check import Validation
from d5suite.validate.network.gradient import check_gradient_float64
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.norms import relative_l2
from d5suite.validate.operator.backward import check_backward, check_backward_float64
from d5suite.validate.operator.forward import check_forward
from d5suite.validate.operator.reference import reference

if BACKEND.problem():
    pytest.skip(BACKEND.problem() or "", allow_module_level=True)

operators = BACKEND.load("operators")
repairs = BACKEND.load("repairs")
bridge = BACKEND.load("bridge")
deep500, native = repairs.deep500, repairs.custom_op_python

QKV = {"Q": (2, 6, 32), "K": (2, 9, 16), "V": (2, 9, 12)}
PAST = {"mask": Tensor((6, 14)), "past_k": (2, 2, 5, 8), "past_v": (2, 2, 5, 6)}
BN = {"s": (4,), "b": (4,), "m": (4,), "v": Tensor((4,), low=0.5, high=2.0)}
LSTM = {"X": (2, 5, 8), "W": (2, 64, 8), "R": (2, 64, 16), "B": None, "lengths": None, "h": (2, 2, 16), "c": (2, 2, 16)}
GRU = {"X": (2, 5, 8), "W": (2, 48, 8), "R": (2, 48, 16), "B": (2, 96), "lengths": None, "h": (2, 2, 16)}
BOTH = {"hidden_size": 16, "direction": "bidirectional", "layout": 1}
SAME = {"auto_pad": "SAME_UPPER", "strides": [2, 2]}

VARIANTS = [
    Operation("LSTM", {**LSTM, "P": (2, 48)}, BOTH, name="peepholes", outputs=[True] * 3),
    Operation("LSTM", LSTM, BOTH, name="only the last state", outputs=[False, True]),
    Operation("GRU", GRU, BOTH, name="reset first", outputs=[True] * 2),
    Operation("GRU", GRU, {**BOTH, "linear_before_reset": 1}, name="reset last", outputs=[True] * 2),
    Operation("Attention", {**QKV, **PAST}, {"q_num_heads": 4, "kv_num_heads": 2, "softcap": 1.5}, name="past"),
    Operation("Attention", QKV, {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1}, name="causal, more keys"),
    Operation("ConvTranspose", {"X": (2, 4, 5, 6), "W": (4, 3, 3, 2), "B": (6,)}, {**SAME, "group": 2}, name="same"),
    Operation("ConvTranspose", {"X": (2, 4, 5, 6), "W": (4, 3, 2, 2)}, {"strides": [3, 2], "output_padding": [2, 1]}),
    Operation("LayerNormalization", {"X": (4, 3, 16), "s": (3, 1), "b": (16,)}, {"axis": -2}),
    Operation("BatchNormalization", {"X": (4, 4, 3, 2, 3), **BN}, name="inference"),
    Operation("BatchNormalization", {"X": (16, 4), **BN}, name="inference of vectors"),
    Operation("MaxPool", {"X": (2, 3, 7, 8)}, {"kernel_shape": [3, 2], "strides": [1, 2]}, outputs=[True] * 2),
    Operation("MaxPool", {"X": (2, 3, 7, 8)}, {"kernel_shape": [2, 2], "strides": [2, 2]}, outputs=[True] * 2),
    Operation("Gather", {"data": (4, 9, 3), "i": np.array([[0, 2], [-1, 2]])}, {"axis": -1}, name="repeated"),
    Operation("Gemm", {"A": (1, 5), "B": (3, 5), "C": (1, 3)}, {"transB": 1, "beta": 0.5}, name="a batch of one"),
    Operation("Gemm", {"A": (5, 4), "B": (3, 5), "C": (4, 1)}, {"transA": 1, "transB": 1, "alpha": 2.0}, name="column"),
    Operation("Gemm", {"A": (4, 5), "B": (5, 1), "C": ()}, name="one feature"),
    Operation("ReduceMax", {"X": (4, 5, 3), "a": i64(-1, 0)}, {"keepdims": 0}, name="two axes"),
    Operation("ReduceSum", {"X": (4, 5), "a": i64()}, {"noop_with_empty_axes": 1}, name="no axes"),
    Operation("SoftmaxCrossEntropyLoss", {"X": (4, 5, 3), "l": Tensor((4, 3), "int64", 0, 5), "w": (5,)},
              {"reduction": "sum", "ignore_index": 2}, name="weighted", outputs=[True] * 2),
    *(Operation("Pad", {"X": (3, 4, 5), "p": i64(0, 2, 1, 1, 0, 3)}, {"mode": mode}, name=mode)
      for mode in ("reflect", "edge", "wrap")),
]  # fmt: skip


def required(found: Any) -> None:
    Validation().require(found)


@pytest.mark.parametrize("operation", VARIANTS, ids=repr)
def test_a_further_variant(operation: Operation) -> None:
    exact = operation.with_precision("fp64")
    proved = BACKEND.operator(exact)
    known = reference(exact, 3, backward=True)
    required(check_forward(proved, known, 3).checks)
    required(check_backward_float64(proved, known, 3))
    single = BACKEND.operator(operation)
    required(check_forward(single, reference(operation, 3, backward=False), 3).checks)
    required(check_backward(single, proved, 3).checks)


@pytest.mark.parametrize("order", [0, 1])
def test_indices_of_a_padded_pool_lead_to_its_output(order: int) -> None:
    """ONNX's evaluator (1.23) gives indices outside their windows."""
    attributes = {"kernel_shape": [3, 2], "pads": [2, 0, 1, 1], "dilations": [2, 1], "storage_order": order}
    operation = Operation("MaxPool", {"X": (2, 3, 7, 8)}, attributes, outputs=[True] * 2)
    operator = BACKEND.operator(operation)
    inputs = operation.draw(0)
    y, indices = operator.fetch(operator.forward(*operator.feed(inputs)))
    (x,) = inputs
    assert x is not None
    planes = x.swapaxes(2, 3) if order else x
    np.testing.assert_array_equal(planes.reshape(-1)[indices], y)
    single = Operation("MaxPool", {"X": (2, 3, 7, 8)}, attributes)
    alone = BACKEND.operator(single)
    np.testing.assert_array_equal(alone.fetch(alone.forward(*alone.feed(inputs)))[0], y)


def test_maxima_of_the_same_size_share_the_gradient() -> None:
    operator = BACKEND.operator(Operation("ReduceMax", {"X": (2, 3), "a": i64(1)}, precision="fp64"))
    feed = operator.feed([np.array([[1.0, 4.0, 4.0], [2.0, 1.0, 0.0]]), i64(1)])
    (gradient,) = operator.fetch_gradients(operator.backward(feed)(*operator.feed_gradients([np.full((2, 1), 6.0)])))
    np.testing.assert_array_equal(gradient, [[0, 3, 3], [6, 0, 0]])


def test_dropout_is_differentiated_by_what_it_kept() -> None:
    """A later call's mask must not be used."""
    inputs = {"X": (40, 50), "r": np.array(0.25, np.float32), "t": np.array(True)}
    operation = Operation("Dropout", inputs, precision="fp64", outputs=[True] * 2)
    operator: Any = BACKEND.operator(operation)
    feed = operator.feed(operation.draw(0))
    call = operator.backward(feed)
    gradient = operator.fetch_gradients(call(*operator.feed_gradients([np.ones((40, 50))])))[0]
    other, kept = operator.fetch(operator.forward(*feed))
    np.testing.assert_array_equal(gradient, operator.fetch_gradients(call(1.0, 0))[0])
    assert 0.7 < kept.mean() < 0.8 and set(np.unique(gradient)) == {0, 1 / 0.75}
    np.testing.assert_allclose(other, np.where(kept, feed[0] / 0.75, 0), rtol=1e-15)
    assert not np.array_equal(gradient != 0, kept)


def test_the_measured_call_is_deep500s_own() -> None:
    operator: Any = BACKEND.operator(Operation("Add", {"A": (2, 3), "B": (3,)}))
    assert operator.forward == operator.native.forward
    assert type(operator.native) is native.AddOp
    image = {"X": (1, 2, 5, 5), "W": (2, 2, 3, 3)}
    looped: Any = BACKEND.operator(Operation("Conv", image), mode="reference")
    assert type(looped.native) is native.ConvOp


def test_right_gradients_are_those_that_deep500_works_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """deep500's ``backward`` runs in every case of exactly these operators."""
    ran: list[str] = []
    for name in vars(native):
        if name.endswith("Op"):
            kind: Any = getattr(native, name)

            def backward(self: Any, *arguments: Any, name: str = name, original: Any = kind.backward) -> Any:
                ran.append(name)
                return original(self, *arguments)

            monkeypatch.setattr(kind, "backward", backward)
    own: dict[str, bool] = {}
    for operation in [*OPERATIONS, *VARIANTS]:
        if not operation.differentiable:
            continue
        exact = operation.with_precision("fp64")
        operator = BACKEND.operator(exact)
        call, heads = operator.backward(operator.feed(exact.draw(0))), exact.draw_gradients(0)
        ran.clear()
        call(*operator.feed_gradients(heads))
        own[operation.node.op_type] = own.get(operation.node.op_type, True) and bool(ran)
    whole = {name for name, always in own.items() if always}
    # deep500's Softmax is that of ONNX 12: it is right only because the adapter moves the axis.
    assert whole - {"Softmax"} == BACKEND.right_gradients


def further() -> Network:
    """Return a network of the operators beyond the zoo's, in one chain to a loss."""
    b = Builder("further", image_size=6)
    x = b.conv(b.image, "conv", 4, 3, bias=True)
    weight, bias = b.parameter("scale", values(4, 1, 1, seed=1)), b.parameter("shift", values(4, 6, 6, seed=2))
    x = b.node("LayerNormalization", "normal", [x, weight, bias], 4, axis=1)
    x = b.node("Add", "both", [b.node("Gelu", "gelu", [x], 4), b.node("Elu", "elu", [x], 4)], 4)
    kernel = b.parameter("kernel", values(4, 3, 2, 2, seed=3))
    x = b.node("ConvTranspose", "up", [b.node("HardSwish", "swish", [x], 4), kernel], 3, strides=[2, 2])
    height, width = b.constant("height", i64(2)), b.constant("width", i64(-1))
    x = b.node("ReduceMax", "largest", [b.node("Exp", "exp", [b.tanh(x)], 3), height], 3, keepdims=0)
    x = b.node("Sqrt", "root", [b.node("ReduceMean", "mean", [x, width], 3)], 3)
    x = b.node("ReduceSum", "sum", [x, width], 3, keepdims=0)
    return b.classifier(b.linear(x, "fc", 3))


def test_the_further_operators_work_in_a_network() -> None:
    network = further()
    images, labels = random_batch(network, 4)
    executor = BACKEND.executor(network, precision="fp64")
    expected, _ = NetworkOracle(network, training=False).run(images)
    found = executor.fetch(executor.forward(executor.feed({"image": images})))["fc"]
    assert relative_l2(found, expected) < 1e-13
    required(check_gradient_float64(executor, images, labels))


# The bridge: other backends' operators as operators of deep500.


def bridged(name: str, operation: Operation) -> Any:
    problem = backend(name).problem()
    if problem:
        pytest.skip(problem)
    if 0 not in backend(name).levels:
        pytest.skip(f"{name} has no level 0")
    return bridge.BridgedOperator(backend(name).operator(operation))


def gemm(**options: Any) -> Operation:
    return Operation("Gemm", {"A": (4, 5), "B": (3, 5), "C": (3,)}, {"transB": 1}, precision="fp64", **options)


def metrics() -> list[Any]:
    return [deep500.L2Error(), deep500.MaxError(), deep500.WallclockTime(reruns=3, avg_over=1)]


@pytest.mark.parametrize("name", ["torch", "jax", "deep500"])
def test_deep500s_tests_judge_another_backends_operator(name: str) -> None:
    rectified = Operation("Relu", {"X": (4, 6)}, precision="fp64")
    for operation in (gemm(), rectified):
        operator = bridged(name, operation)
        inputs = operator.draw(1)
        expected = inputs[0] @ inputs[1].T + inputs[2] if operation.name == "Gemm" else np.maximum(inputs[0], 0)
        distance, largest, times = deep500.test_op_forward(operator, inputs, [expected], metrics())
        assert largest <= distance < 1e-14 and len(times) == 3 and min(times) > 0
        distances, errors, times = deep500.test_op_gradient(operator, inputs, metrics=metrics())
        assert len(distances) == len(errors) == len(inputs) and max(distances) < 1e-8
        assert len(times) == 3 and min(times) > 0


def test_deep500s_tests_report_a_wrong_operator() -> None:
    class Wrong(bridge.BridgedOperator):  # type: ignore[name-defined]
        def backward(self, *arguments: Any) -> list[np.ndarray]:
            return [1.125 * gradient for gradient in super().backward(*arguments)]

    operator = Wrong(BACKEND.operator(gemm()))
    inputs = operator.draw(1)
    (error,) = deep500.test_op_forward(operator, inputs, [np.zeros((4, 3))], [deep500.MaxError()])
    assert error > 1
    (errors,) = deep500.test_op_gradient(operator, inputs, metrics=[deep500.MaxError()])
    assert min(errors) > 1e-2


@pytest.mark.parametrize("name", ["torch", "deep500"])
def test_several_outputs_and_omitted_inputs_cross_the_bridge(name: str) -> None:
    inputs = {"X": (3, 2, 3), "W": (1, 16, 3), "R": (1, 16, 4), "B": None, "lengths": None, "h": (1, 2, 4)}
    inputs["c"] = (1, 2, 4)
    lstm = Operation("LSTM", inputs, {"hidden_size": 4}, precision="fp64", outputs=[True] * 3)
    operator = bridged(name, lstm)
    assert (operator.num_inputs, operator.num_outputs) == (5, 3)
    results = deep500.test_op_gradient(operator, operator.draw(2), metrics=[deep500.MaxError()])
    assert [len(errors) for errors in results] == [5, 5, 5]
    assert max(max(errors) for errors in results) < 1e-8


@pytest.mark.parametrize("name", ["torch", "deep500"])
def test_a_loss_with_fixed_labels_crosses_the_bridge(name: str) -> None:
    """deep500's gradient test draws no gradient of a scalar."""
    loss = Operation("SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": i64(0, 4, 2, 2, 1, 3)}, precision="fp64")
    operator = bridged(name, loss)
    assert operator.num_inputs == 1
    (errors,) = deep500.test_op_gradient(operator, operator.draw(2), [np.array(2.0)], metrics=[deep500.MaxError()])
    assert max(errors) < 1e-8


def test_labels_that_flow_get_zeros() -> None:
    loss = Operation("SoftmaxCrossEntropyLoss", {"X": (6, 5), "l": Tensor((6,), "int64", 0, 5)}, precision="fp64")
    operator = bridge.BridgedOperator(BACKEND.operator(loss))
    inputs = operator.draw(2)
    by_scores, by_labels = operator.backward([np.array(1.0)], inputs, [operator.forward(*inputs)])
    assert by_scores.any() and by_labels.dtype == np.int64 and not by_labels.any()


def test_what_has_no_gradient_is_refused() -> None:
    statistics = {name: Tensor((4,), low=0.5, high=2.0) for name in "sbmv"}
    operation = Operation("BatchNormalization", {"X": (3, 4), **statistics}, precision="fp64")
    operator = bridge.BridgedOperator(BACKEND.operator(operation))
    inputs = operator.draw(0)
    assert operator.forward(*inputs).shape == (3, 4)
    with pytest.raises(NetworkError, match="fixed values"):
        deep500.test_op_gradient(operator, inputs, metrics=[])
    fixed = {**statistics, "m": np.zeros(4, np.float32), "v": np.ones(4, np.float32)}
    operation = Operation("BatchNormalization", {"X": (3, 4), **fixed}, precision="fp64")
    operator = bridge.BridgedOperator(BACKEND.operator(operation))
    (errors,) = deep500.test_op_gradient(operator, operator.draw(0), metrics=[deep500.MaxError()])
    assert len(errors) == 3 and max(errors) < 1e-8
    shown = Operation("LayerNormalization", {"X": (3, 4), "s": (4,)}, precision="fp64", outputs=[True, True])
    operator = bridge.BridgedOperator(BACKEND.operator(shown))
    with pytest.raises(NetworkError, match="output"):
        deep500.test_op_gradient(operator, operator.draw(0), metrics=[])


def test_repeatability_is_measured(tmp_path: Path) -> None:
    """Uses deep500's `VarHeatmap`, whose variance was always 0."""
    pytest.importorskip("matplotlib")
    dropped = {"X": (6, 5), "r": np.array(0.5, np.float32), "t": np.array(True)}
    for operation, steady in ((gemm(), True), (Operation("Dropout", dropped), False)):
        operator = bridge.BridgedOperator(BACKEND.operator(operation))
        metric = repairs.metrics.VarHeatmap(str(tmp_path / operation.name), reruns=4)
        inputs = operator.draw(1)
        output = operator.forward(*inputs)
        ((variance,),) = deep500.test_op_forward(operator, inputs, [output], [metric])
        assert variance.shape == output.shape
        assert bool(variance.any()) is not steady
        assert (tmp_path / f"{operation.name}.png").exists()
