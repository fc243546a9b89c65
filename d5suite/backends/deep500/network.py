"""Level 1 on deep500: a network as two graphs of its reference executor, inference and training.

deep500's own ONNX reader stops at operator set 8, so the graphs are built here from `OPERATORS`.
Every tensor is a NumPy array. Imports deep500 (through `repairs`), NumPy, `d5suite.levels`,
`d5suite.network` and this adapter's `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500 import operators
from d5suite.backends.deep500.operators import OPERATORS, Context, operands
from d5suite.backends.deep500.repairs import ReferenceGraphExecutor, deep500
from d5suite.errors import NetworkError
from d5suite.levels import network as level
from d5suite.levels.network import Arrays, Native
from d5suite.network import Network
from d5suite.network.nodes.schedule import check_statistics, schedule
from d5suite.network.operation import is_floating


class Executor(level.Executor):
    """A network on deep500's reference executor.

    Attributes
    ----------
    inference : ReferenceGraphExecutor
        The graph of the output.
    training : ReferenceGraphExecutor or None
        The graph of the loss; None if the network has no loss. If there is one, it holds the
        current parameters and running statistics.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        _check_names(network)
        start = {
            name: np.array(value, self._type_of(value.dtype), order="C") for name, value in network.initializers.items()
        }
        self.inference = self._graph(network.outputs, start, training=False)
        self.training = self._graph([network.loss], start, training=True) if network.loss is not None else None
        self._tensors = (self.training or self.inference).network
        self._stale = False

    def _type_of(self, dtype: np.dtype) -> Any:
        return self.array_type if is_floating(dtype) else dtype

    def _graph(self, wanted: Sequence[str], start: Arrays, *, training: bool) -> Any:
        """Return deep500's executor of the nodes that compute ``wanted``, with initial values."""
        network = self.network
        graph_executor = ReferenceGraphExecutor(None, deep500.CPUDevice(), events=[], use_python_ops=True)
        target = graph_executor.network
        for name, value in start.items():  # graphs share these arrays: they never write to one, but replace it
            target.feed_tensor(name, value, is_param=name in network.parameters)
        vectorised = self.mode == "vectorised"
        context = Context.of_network(
            network, training=training, activations=self.precision, dtype=self.array_type, vectorised=vectorised
        )
        producers: dict[str, str] = {}
        for step in schedule(network, wanted, training=training):
            node, inputs, outputs = step.node, operands(step.node), list(step.node.outputs)
            operator = OPERATORS[node.op_type](node, context)
            if training and node.op_type == "BatchNormalization":
                outputs += node.inputs[3:5]  # running statistics are updated
            record = deep500.ops.OnnxNode(inputs, outputs, node.name, node.op_type, "", {}, None)
            if training and outputs[0] in wanted:
                target.losses[outputs[0]] = (operator, record, node.name)
                continue
            target.graph.add_node(node.name, operator=record, attribute={}, custom_op=operator)
            target.graph.add_edges_from((producers[name], node.name) for name in inputs if name in producers)
            producers.update((name, node.name) for name in node.outputs if name)
        for name in () if training else wanted:
            target.add_output(name)
        target.nodes_sorted_fwd = list(target.graph.nodes)
        target.nodes_sorted_bwd = target.nodes_sorted_fwd[::-1]
        target.built_graph = True
        return graph_executor

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        return {
            name: np.array(array, self._type_of(self.network.dtypes[name]), order="C") for name, array in arrays.items()
        }

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {name: np.array(value, self.array_type, order="C") for name, value in values.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        names = (*self.network.parameters, *self.network.statistics)
        return self.fetch(dict(zip(names, self._tensors.fetch_tensors(names), strict=True)))

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        for name, value in values.items():
            self._tensors.feed_tensor(name, np.array(value, self.array_type, order="C"))
        self._stale = True

    def random_state(self) -> dict[str, np.ndarray]:
        """Return the state of the process's generator."""
        return {"generator": operators.random_state()} if self.drops else {}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        if "generator" in values:
            operators.load_random_state(values["generator"])

    @np.errstate(all="ignore")  # frameworks do not warn about infinities
    def forward(self, feed: Native) -> Native:
        if self._stale:
            self._refresh()
        outputs: Native = self.inference.inference({name: feed[name] for name in self.network.inputs})
        return outputs

    def _refresh(self) -> None:
        """Copy changed parameters and statistics to the inference graph."""
        names = (*self.network.parameters, *self.network.statistics)
        for name, value in zip(names, self._tensors.fetch_tensors(names), strict=True):
            self.inference.network.feed_tensor(name, value)
        self._stale = False

    def trained(self) -> Any:
        """Return the training graph's executor for a caller that changes its parameters.

        Raises
        ------
        NetworkError
            If the network has no loss.
        """
        self.network.require_loss()
        self._stale = True
        return self.training

    @np.errstate(all="ignore")
    def forward_backward(self, feed: Native) -> Native:
        label, loss = self.network.require_loss()
        training = self.trained()
        answer = training.inference_and_backprop({name: feed[name] for name in (*self.network.inputs, label)}, loss)
        names = dict(training.network.gradient(loss))
        gradients = training.network.fetch_tensors([names[name] for name in self.network.parameters])
        return {**answer, **dict(zip(self.network.parameters, gradients, strict=True))}

    def synchronize(self) -> None:
        """Return at once: NumPy is synchronous."""


def _check_names(network: Network) -> None:
    """Raise `NetworkError` for ambiguous tensor names, or statistics that cannot be updated."""
    check_statistics(network)
    moved = [node.inputs[4] for node in network.nodes if node.op_type == "BatchNormalization"]
    if len(set(moved)) < len(moved):
        raise NetworkError("two BatchNormalization nodes share their running statistics", where=network.name)
    tensors = {name for node in network.nodes for name in (*node.inputs, *node.outputs)}
    clash = [f"{name}_grad" for name in tensors if f"{name}_grad" in tensors]
    if clash:
        raise NetworkError(f"deep500 calls a gradient by this tensor's name: {clash[0]!r}", where=network.name)
