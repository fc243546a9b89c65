"""The independent reference: the network's own ONNX graph, run by ONNX's reference evaluator in float64.

`Oracle` answers for a small batch: output, loss, the running statistics after one training pass, and the loss's change
along any direction in parameter space. `inference` answers for a batch of any size, through onnxruntime where that is
installed. No code of any framework takes part. Imports ONNX, NumPy and onnxruntime, late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Network


class Oracle:
    """A network in float64 under ONNX's reference evaluator, its weights given at each call.

    Parameters
    ----------
    network : Network
        Its Dropout nodes act as the identity, in training mode too.
    training : bool
        Whether BatchNormalization uses the batch's statistics, and the loss is computed.

    Raises
    ------
    NetworkError
        If ONNX's evaluator does not implement one of the operators.
    """

    def __init__(self, network: Network, *, training: bool) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        self.network = network
        self.training = training
        self.weights = {
            name: value.astype(np.float64) for name, value in network.initializers.items() if value.dtype.kind == "f"
        }
        self._statistics: dict[str, str] = {}
        wanted = network.loss if training and network.loss else network.output
        nodes = []
        for node in network.nodes_for([wanted]):
            attributes = {key: value for key, value in node.attributes.items() if value != []}
            inputs, outputs = node.inputs, node.outputs
            if node.op_type == "BatchNormalization" and training:
                attributes["training_mode"] = 1
                outputs = (outputs[0], f"{node.name}.d5suite.mean", f"{node.name}.d5suite.variance")
                self._statistics.update(zip(inputs[3:5], outputs[1:], strict=True))
            if node.op_type == "Dropout":
                inputs, outputs = inputs[:1], outputs[:1]  # without a training flag ONNX's Dropout is the identity
            nodes.append(onnx.helper.make_node(node.op_type, inputs, outputs, node.name, **attributes))
        double = onnx.TensorProto.DOUBLE
        inputs_info = [
            onnx.helper.make_tensor_value_info(name, double, None) for name in (network.input, *self.weights)
        ]
        if training and network.label:
            inputs_info.append(onnx.helper.make_tensor_value_info(network.label, onnx.TensorProto.INT64, None))
        graph = onnx.helper.make_graph(
            nodes,
            "oracle",
            inputs_info,
            [onnx.helper.make_tensor_value_info(name, double, None) for name in (wanted, *self._statistics.values())],
            [
                onnx.numpy_helper.from_array(value, name)
                for name, value in network.initializers.items()
                if value.dtype.kind != "f"
            ],
        )
        opset = max(o.version for o in network.model.opset_import if o.domain in ("", "ai.onnx"))
        try:
            self._evaluator = ReferenceEvaluator(
                onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)]),
                new_ops=corrected_operators(),
            )
        except NotImplementedError as error:
            raise NetworkError(f"ONNX's reference evaluator cannot run it: {error}", where=network.name) from error

    def run(
        self, images: np.ndarray, labels: np.ndarray | None = None, weights: Mapping[str, np.ndarray] | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """One forward pass.

        Parameters
        ----------
        images : numpy.ndarray
            float32 or float64, (n, C, H, W).
        labels : numpy.ndarray, optional
            int64 (n,); needed in training mode.
        weights : mapping, optional
            float64 arrays that replace initializers of the same names.

        Returns
        -------
        answer : numpy.ndarray
            The loss (scalar) in training mode, else the output; float64.
        statistics : dict of str to numpy.ndarray
            In training mode, the running statistics after this pass.
        """
        feed = {self.network.input: images.astype(np.float64), **self.weights, **(weights or {})}
        if self.training and self.network.label and labels is not None:
            feed[self.network.label] = labels
        known = set(self._evaluator.input_names)
        answer, *statistics = self._evaluator.run(None, {name: value for name, value in feed.items() if name in known})
        return np.asarray(answer), dict(zip(self._statistics, statistics, strict=True))

    def derivative(
        self, images: np.ndarray, labels: np.ndarray, direction: Mapping[str, np.ndarray], step: float
    ) -> float:
        """The loss's derivative along a direction, by the central difference (L(w + s d) - L(w - s d)) / 2 s.

        Parameters
        ----------
        images, labels : numpy.ndarray
            The batch, as in `run`.
        direction : mapping of str to numpy.ndarray
            float64, for any of the parameters.
        step : float
            s.
        """
        ahead, behind = (
            float(
                self.run(images, labels, {name: self.weights[name] + sign * step * d for name, d in direction.items()})[
                    0
                ]
            )
            for sign in (1.0, -1.0)
        )
        return (ahead - behind) / (2 * step)


def corrected_operators() -> list[type]:
    """Operators in place of those that ONNX's reference evaluator has wrong."""
    return [_local_response_normalisation(), _grouped_transposed_convolution(), *_in_double_precision()]


def _grouped_transposed_convolution() -> type:
    """ONNX's ConvTranspose group by group; the evaluator's own (onnx 1.23) refuses most grouped ones."""
    from onnx.reference.ops.op_conv_transpose import ConvTranspose as Official

    class ConvTranspose(Official):
        op_domain = ""

        def _run(self, x: Any, w: Any, b: Any = None, **settings: Any) -> Any:  # type: ignore[override]
            groups = settings.pop("group", None) or 1
            if groups == 1:
                return super()._run(x, w, b, group=1, **settings)
            parts = [
                super(ConvTranspose, self)._run(image, weight, None, group=1, **settings)[0]
                for image, weight in zip(np.split(x, groups, 1), np.split(w, groups, 0), strict=True)
            ]
            y = np.concatenate(parts, 1)
            return (y if b is None else y + b.reshape(-1, *[1] * (y.ndim - 2)),)

    return ConvTranspose


def _in_double_precision() -> list[type]:
    """Gelu and HardSwish with constants in float64; the evaluator's own (onnx 1.23) are good to float32 only.

    Gelu(x) = x Φ(x), or x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))); HardSwish(x) = x max(0, min(1, x/6 + 1/2)) (ONNX
    operator specification).
    """
    from onnx.reference.op_run import OpRun
    from scipy.special import erf

    class Gelu(OpRun):
        op_domain = ""

        def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
            if approximate == "tanh":
                return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
            return (x / 2 * (1 + erf(x / np.sqrt(2))),)

    class HardSwish(OpRun):
        op_domain = ""

        def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
            return (x * np.clip(x / 6 + 0.5, 0, 1),)

    return [Gelu, HardSwish]


def _local_response_normalisation() -> type:
    """ONNX's LRN; the evaluator's own (onnx 1.23) loops over as many channels as the batch has images.

    y = x / (bias + alpha / size · Σ x²)^beta, the sum over the channels from c - ⌊(size - 1) / 2⌋ to
    c + ⌈(size - 1) / 2⌉ (ONNX operator specification).
    """
    from onnx.reference.op_run import OpRun

    class LRN(OpRun):
        op_domain = ""

        def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> tuple[np.ndarray]:
            channels = x.shape[1]
            before, after = (size - 1) // 2, size // 2
            squares = np.pad(x**2, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
            total = sum(squares[:, offset : offset + channels] for offset in range(size))
            return (x / (bias + alpha / size * total) ** beta,)

    return LRN


def inference(network: Network, images: np.ndarray, *, threads: int) -> tuple[np.ndarray, str]:
    """The network's output in inference mode, from an evaluator that is none of the backends.

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
        Its name: onnxruntime (float32), or ONNX's reference evaluator (float64) where that is not installed.
    """
    try:
        import onnxruntime
    except ImportError:
        return Oracle(network, training=False).run(images)[0], "onnx.reference"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        network.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {network.input: images}
    if network.label:
        feed[network.label] = np.zeros((len(images), *(n or 1 for n in network.shapes[network.label][1:])), np.int64)
    return session.run([network.output], feed)[0], "onnxruntime"
