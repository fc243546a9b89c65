"""The independent reference of a network: its own ONNX graph under ONNX's reference evaluator.

`NetworkOracle` answers in float64 for a small batch: output, loss, the running statistics after one
training pass, and the loss's derivative along any direction in parameter space. `inference` answers
for a batch of any size, with onnxruntime if it is installed. Imports ONNX and NumPy, and
onnxruntime lazily; no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from d5suite.errors import NetworkError
from d5suite.network import Network
from d5suite.network.normalise import without_weights
from d5suite.network.operation import is_floating
from d5suite.validate.oracle import evaluator

EVALUATOR = "onnxruntime"
"""The evaluator of `inferences`. As a backend, it is proved against ONNX's reference evaluator."""

_LARGE = 1 << 30
"""Bytes of weights above which they are fed to onnxruntime: its models have at most 2 GiB."""


class NetworkOracle:
    """A network in float64 under ONNX's reference evaluator; each call may set the weights.

    Parameters
    ----------
    network : Network
        Its Dropout nodes act as the identity, even in training mode.
    training : bool
        Whether BatchNormalization uses the batch's statistics, and the loss is computed.

    Raises
    ------
    NetworkError
        If ONNX's evaluator does not implement one of the operators.
    """

    def __init__(self, network: Network, *, training: bool) -> None:
        self.network = network
        self.training = training
        self.weights = {
            name: value.astype(np.float64) for name, value in network.initializers.items() if value.dtype.kind == "f"
        }
        self._statistics: dict[str, str] = {}
        others = [name for name in network.outputs if name != network.output]
        self.wanted = [network.loss] if training and network.loss else [network.output, *others]
        nodes = []
        opset = max(o.version for o in network.model.opset_import if o.domain in ("", "ai.onnx"))
        for node in network.nodes_for(self.wanted):
            known = onnx.defs.get_schema(node.op_type, opset).attributes  # newer defaults are not
            attributes = {key: value for key, value in node.attributes.items() if key in known and value != []}
            inputs, outputs = node.inputs, node.outputs
            if node.op_type == "BatchNormalization" and training:
                attributes["training_mode"] = 1
                outputs = (outputs[0], f"{node.name}.d5suite.mean", f"{node.name}.d5suite.variance")
                self._statistics.update(zip(inputs[3:5], outputs[1:], strict=True))
            if node.op_type == "Dropout":
                inputs, outputs = inputs[:1], outputs[:1]  # without a training flag ONNX's Dropout is the identity
            if node.op_type == "Cast" and is_floating(np.dtype(helper.tensor_dtype_to_np_dtype(attributes["to"]))):
                attributes["to"] = TensorProto.DOUBLE
            nodes.append(helper.make_node(node.op_type, inputs, outputs, node.name, **attributes))
        double = TensorProto.DOUBLE
        inputs_info = [helper.make_tensor_value_info(name, double, None) for name in self.weights]
        for name in (*network.inputs, *([network.label] if training and network.label else [])):
            kind = double if network.dtypes[name].kind == "f" else helper.np_dtype_to_tensor_dtype(network.dtypes[name])
            inputs_info.append(helper.make_tensor_value_info(name, kind, None))
        graph = helper.make_graph(
            nodes,
            "oracle",
            inputs_info,
            [helper.make_tensor_value_info(name, double, None) for name in (*self.wanted, *self._statistics.values())],
            [
                numpy_helper.from_array(value, name)
                for name, value in network.initializers.items()
                if value.dtype.kind != "f"
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        self._evaluator = evaluator(model, network.name)

    def run(
        self, images: np.ndarray, labels: np.ndarray | None = None, weights: Mapping[str, np.ndarray] | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Run one forward pass.

        Parameters
        ----------
        images : numpy.ndarray
            float32 or float64, (n, C, H, W).
        labels : numpy.ndarray, optional
            int64 (n,), or targets; needed in training mode.
        weights : mapping, optional
            float64 arrays that replace initializers of the same names.

        Returns
        -------
        answer : numpy.ndarray
            The loss (scalar) in training mode, else the output; float64.
        statistics : dict of str to numpy.ndarray
            In training mode, the running statistics after this pass.
        """
        answer, *others = self._run(images, labels, weights)
        return np.asarray(answer), dict(zip(self._statistics, others[len(self.wanted) - 1 :], strict=True))

    def outputs(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Return all outputs for a batch, in inference mode."""
        return dict(zip(self.wanted, map(np.asarray, self._run(images, None, None)), strict=True))

    def _run(
        self, images: np.ndarray, labels: np.ndarray | None, weights: Mapping[str, np.ndarray] | None
    ) -> Sequence[np.ndarray]:
        arrays = self.network.arrays(images)
        if self.training and self.network.label and labels is not None:
            arrays = {**arrays, self.network.label: labels}
        given = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in arrays.items()}
        feed = {**given, **self.weights, **(weights or {})}
        known = set(self._evaluator.input_names)
        return list(self._evaluator.run(None, {name: feed[name] for name in feed if name in known}))

    def derivative(
        self, images: np.ndarray, labels: np.ndarray, direction: Mapping[str, np.ndarray], step: float
    ) -> float:
        """Return the loss's derivative along a direction.

        It is the central difference (L(w + s d) - L(w - s d)) / 2 s.

        Parameters
        ----------
        images, labels : numpy.ndarray
            The batch, as in `run`.
        direction : mapping of str to numpy.ndarray
            d: float64, for any of the parameters.
        step : float
            s.
        """
        losses = []
        for sign in (1.0, -1.0):
            moved = {name: self.weights[name] + sign * step * d for name, d in direction.items()}
            losses.append(float(self.run(images, labels, moved)[0]))
        return (losses[0] - losses[1]) / (2 * step)


def outputs_as_written(network: Network, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of a file that d5suite does not read, from ONNX's reference evaluator.

    Raises
    ------
    NetworkError
        If the evaluator cannot run the file.
    """
    try:
        found = ReferenceEvaluator(network.model).run(list(network.outputs), network.arrays(images))
    except Exception as error:  # the evaluator raises whatever NumPy does
        raise NetworkError(
            f"nothing can prove the answer: ONNX's reference evaluator does not run the file: {error}",
            where=network.name,
        ) from error
    return dict(zip(network.outputs, map(np.asarray, found), strict=True))


def inference(network: Network, images: np.ndarray, *, threads: int) -> tuple[np.ndarray, str]:
    """Return the network's output in inference mode, from an evaluator that is not a backend.

    Parameters
    ----------
    network : Network
    images : numpy.ndarray
        float32 (N, C, H, W).
    threads : int
        Thread budget.

    Returns
    -------
    output : numpy.ndarray
        (N, classes).
    evaluator : str
        ``"onnxruntime"`` (float32), or ``"onnx.reference"`` (float64) if onnxruntime is not
        installed or cannot run the network.
    """
    (outputs,), evaluator = inferences(network, [images], threads=threads)
    return outputs[network.output], evaluator


def inferences(
    network: Network, batches: Sequence[np.ndarray], *, threads: int
) -> tuple[list[dict[str, np.ndarray]], str]:
    """Return all outputs for each of several batches, and the evaluator's name; see `inference`."""
    model, weights = network.model, {}
    if sum(value.nbytes for value in network.initializers.values()) > _LARGE:
        model = without_weights(model)
        weights = {value.name: network.initializers[value.name] for value in model.graph.input
                   if value.name in network.initializers}  # fmt: skip
    session = _session(model.SerializeToString(), threads)
    if session is None:
        return _slowly(network, batches)
    outputs = []
    for images in batches:
        feed = {**network.arrays(images), **weights}
        if network.label:
            shape = (len(images), *(n or 1 for n in network.shapes[network.label][1:]))
            feed[network.label] = np.zeros(shape, network.dtypes[network.label])
        try:
            found = session.run(list(network.outputs), feed)
        except Exception:  # its errors share no base class; it loads some nodes that it cannot run
            return _slowly(network, batches)
        outputs.append(dict(zip(network.outputs, found, strict=True)))
    return outputs, EVALUATOR


def _slowly(network: Network, batches: Sequence[np.ndarray]) -> tuple[list[dict[str, np.ndarray]], str]:
    oracle = NetworkOracle(network, training=False)
    return [oracle.outputs(images) for images in batches], "onnx.reference"


def _session(model: bytes | str, threads: int) -> Any:
    """Return an onnxruntime session of a model or file; None without onnxruntime or if it fails.

    Optimization is off: fusions have changed answers (docs/findings.md), and a batch of ResNet-50
    takes at most a third longer.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:  # its errors share no base class; a newer operator is one
        return None


def original(
    path: Path, network: Network, batch: np.ndarray, *, threads: int, given: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray] | None:
    """Return the outputs of a network's file as onnxruntime itself reads it.

    Parameters
    ----------
    path : Path
        The file from which ``network`` was read.
    network : Network
        Names inputs and outputs.
    batch : numpy.ndarray
        See `Network.arrays`.
    threads : int
        Thread budget.
    given : mapping of str to number, optional
        Values of the file's inputs that the network has as constants.

    Returns
    -------
    dict of str to numpy.ndarray, or None
        None if onnxruntime cannot run the file.
    """
    session = _session(str(path), threads)
    if session is None:
        return None
    arrays = network.arrays(batch)
    wide = {value.name for value in session.get_inputs() if value.type == "tensor(double)"}
    try:
        for value in session.get_inputs():
            if value.name not in arrays and given and value.name in given:
                shape = [size if isinstance(size, int) else 1 for size in value.shape]
                kind = value.type.removeprefix("tensor(").removesuffix(")")
                arrays[value.name] = np.full(shape, given[value.name], {"float": np.float32}.get(kind, kind))
        feed = {value.name: arrays[value.name] for value in session.get_inputs() if value.name in arrays}
        feed = {name: array.astype(np.float64) if name in wide else array for name, array in feed.items()}
        found = session.run(list(network.outputs), feed)
    except Exception:  # as above: it lacks a kernel, or the file wants another type
        return None
    return dict(zip(network.outputs, found, strict=True))
