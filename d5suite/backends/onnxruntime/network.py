"""Level 1 on ONNX Runtime: a session over the network's own ONNX graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from d5suite.backends.onnxruntime.runtime import session_options
from d5suite.errors import BackendError
from d5suite.levels import network as level
from d5suite.levels.network import Arrays, Native
from d5suite.network import Network
from d5suite.network.normalise import without_weights

_OPTIMIZATION = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
}

LARGE = 1 << 30
"""Bytes of weights above which they are fed: a session reads models of 2 GiB at most."""

NEWEST_FILE = 10
"""The newest ONNX file version that onnxruntime 1.20 reads; later versions add nothing needed."""


class Executor(level.Executor):
    """A network on ONNX Runtime."""

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        self._weights = {
            name: np.array(network.initializers[name]) for name in (*network.parameters, *network.statistics)
        }
        self._session: onnxruntime.InferenceSession | None = None  # created on demand
        self._fed: dict[str, onnxruntime.OrtValue] = {}  # weights of a large network

    def _inference_model(self) -> onnx.ModelProto:
        """Return the graph up to the outputs with the current weights, without loss and label."""
        network = self.network
        model = onnx.ModelProto()
        model.CopyFrom(network.model)
        model.ir_version = min(model.ir_version, NEWEST_FILE)
        graph = model.graph
        needed_nodes = network.nodes_for(network.outputs)
        needed = {name for node in needed_nodes for name in node.outputs if name}
        nodes = [node for node in graph.node if needed.intersection(node.output)]
        outputs = [output for output in graph.output if output.name in network.outputs]
        inputs = [value for value in graph.input if value.name != network.label]
        read = {name for node in needed_nodes for name in node.inputs}
        weights = [
            numpy_helper.from_array(self._weights[tensor.name], tensor.name) if tensor.name in self._weights else tensor
            for tensor in graph.initializer
            if tensor.name in read
        ]
        for field, values in (("node", nodes), ("output", outputs), ("input", inputs), ("initializer", weights)):
            kept = list(values)
            graph.ClearField(field)
            getattr(graph, field).extend(kept)
        return model

    @contextlib.contextmanager
    def profiled(self, prefix: Path, optimized: Path) -> Iterator[onnxruntime.InferenceSession]:
        """Within the context, run in a session that profiles itself.

        Parameters
        ----------
        prefix : Path
            How the profile's file name begins.
        optimized : Path
            Where the optimized graph is written.
        """
        options = session_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(prefix)
        options.optimized_model_filepath = str(optimized)
        own, fed = self._session, self._fed
        self._session = self._create_session(options)
        try:
            yield self._session
        finally:
            self._session, self._fed = own, fed

    def _create_session(self, options: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
        options = options or session_options()
        options.graph_optimization_level = _OPTIMIZATION[self.mode]
        model, copy = self._inference_model(), onnxruntime.OrtValue.ortvalue_from_numpy
        self._fed = {}
        if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGE:
            arrays = {tensor.name: tensor for tensor in model.graph.initializer}
            model = without_weights(model)
            self._fed = {
                value.name: copy(np.array(numpy_helper.to_array(arrays[value.name]), order="C"))
                for value in model.graph.input
                if value.name in arrays
            }
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        dtypes, copy = self.network.dtypes, onnxruntime.OrtValue.ortvalue_from_numpy
        return {name: copy(np.array(array, dtypes[name], order="C")) for name, array in arrays.items()}

    def forward(self, feed: Native) -> Native:
        if self._session is None:
            self._session = self._create_session()
        network = self.network
        given = {**{name: feed[name] for name in network.inputs}, **self._fed}
        try:
            found = self._session.run_with_ort_values(list(network.outputs), given)
        except Exception as error:  # its errors share no base class; it loads some nodes that it cannot run
            raise BackendError(f"onnxruntime cannot run this network: {error}", where=network.name) from error
        return dict(zip(network.outputs, found, strict=True))

    def forward_backward(self, feed: Native) -> Native:
        raise BackendError("onnxruntime does inference only", where=self.network.name)

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {name: np.array(value.numpy(), np.float32) for name, value in values.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in self._weights.items()}

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        self._weights.update({name: np.array(value, np.float32) for name, value in values.items()})
        self._session = None

    def synchronize(self) -> None:
        """Return at once: a session's run returns when it is done."""
