"""Level 1 on deep500: a network as two graphs of deep500's reference executor, for inference and for training.

deep500's own reader of ONNX files stops at operator set 8, so the graphs are built here, node by node, from
`OPERATORS`. Every tensor is a NumPy array. Imports deep500 (through `repairs`), NumPy and `d5suite.levels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.backends.deep500 import operators
from d5suite.backends.deep500.operators import OPERATORS, Context, operands
from d5suite.backends.deep500.repairs import ReferenceGraphExecutor, deep500
from d5suite.errors import NetworkError
from d5suite.levels import network as level
from d5suite.levels.network import Arrays, Native
from d5suite.network import Network


class Executor(level.Executor):
    """A network on deep500's reference executor.

    Attributes
    ----------
    inference : ReferenceGraphExecutor
        The graph of the output.
    training : ReferenceGraphExecutor or None
        The graph of the loss; its tensors are the valid ones where there is one.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        self._dtype = np.float64 if precision == "fp64" else np.float32
        _check_names(network)
        start = {name: np.array(value, self._type_of(value), order="C") for name, value in network.initializers.items()}
        self.inference = self._graph(network.output, start, training=False)
        self.training = self._graph(network.loss, start, training=True) if network.loss is not None else None
        self._tensors = (self.training or self.inference).network
        self._stale = False

    def _type_of(self, value: np.ndarray) -> Any:
        return self._dtype if value.dtype.kind == "f" else value.dtype

    def _graph(self, wanted: str, start: Arrays, *, training: bool) -> Any:
        """The nodes that one tensor needs, as deep500's executor takes them, with the values to start from."""
        network = self.network
        graph_executor = ReferenceGraphExecutor(None, deep500.CPUDevice(), events=[], use_python_ops=True)
        target = graph_executor.network
        for name, value in start.items():  # both graphs hold the same arrays, which are replaced and never written to
            target.feed_tensor(name, value, is_param=name in network.parameters)
        context = Context(
            network.shapes, network.initializers, training, self._dtype, vectorised=self.mode == "vectorised"
        )
        producers: dict[str, str] = {}
        known = {network.input, network.label, *network.initializers}
        for node in network.nodes_for([wanted]):
            operator, inputs, outputs = OPERATORS[node.op_type](node, context), operands(node), [node.outputs[0]]
            for name in inputs:
                if name not in known:
                    raise NetworkError(
                        f"tensor {name!r} is not a first output, and only those are computed", where=node.name
                    )
            known.update(outputs)
            if training and node.op_type == "BatchNormalization":
                outputs += node.inputs[3:5]  # running statistics are moved where they are
            record = deep500.ops.OnnxNode(inputs, outputs, node.name, node.op_type, "", {}, None)
            if training and wanted in outputs:
                target.losses[wanted] = (operator, record, node.name)
                continue
            target.graph.add_node(node.name, operator=record, attribute={}, custom_op=operator)
            target.graph.add_edges_from((producers[name], node.name) for name in inputs if name in producers)
            producers[outputs[0]] = node.name
        if wanted not in known:
            raise NetworkError(f"no node computes {wanted!r} as its first output", where=network.name)
        if not training:
            target.add_output(wanted)
        target.nodes_sorted_fwd = list(target.graph.nodes)
        target.nodes_sorted_bwd = target.nodes_sorted_fwd[::-1]
        target.built_graph = True
        return graph_executor

    # Weights and data, in and out.

    def feed(self, arrays: Arrays) -> Native:
        """An array that needs no conversion is not copied: it must stay unchanged while the feed is used."""
        self.check_feed(arrays)
        return {
            name: np.ascontiguousarray(array, self._dtype if name == self.network.input else np.int64)
            for name, array in arrays.items()
        }

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {name: np.array(value, self._dtype, order="C") for name, value in values.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        names = (*self.network.parameters, *self.network.statistics)
        return self.fetch(dict(zip(names, self._tensors.fetch_tensors(names), strict=True)))

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        for name, value in values.items():
            self._tensors.feed_tensor(name, np.array(value, self._dtype, order="C"))
        self._stale = True

    def random_state(self) -> dict[str, np.ndarray]:
        """The generator's, of which the process has one."""
        return {"generator": operators.random_state()} if self.drops else {}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        if "generator" in values:
            operators.load_random_state(values["generator"])

    # The measured paths; like any framework they say nothing of infinities.

    @np.errstate(all="ignore")
    def forward(self, feed: Native) -> Native:
        if self._stale:
            self._refresh()
        output: Native = self.inference.inference({self.network.input: feed[self.network.input]})
        return output

    def _refresh(self) -> None:
        """Let inference see what training or loading has changed."""
        names = (*self.network.parameters, *self.network.statistics)
        for name, value in zip(names, self._tensors.fetch_tensors(names), strict=True):
            self.inference.network.feed_tensor(name, value)
        self._stale = False

    def trained(self) -> Any:
        """The training graph's executor, whose parameters or running statistics the caller is about to change.

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
        answer = training.inference_and_backprop({name: feed[name] for name in (self.network.input, label)}, loss)
        names = dict(training.network.gradient(loss))
        gradients = training.network.fetch_tensors([names[name] for name in self.network.parameters])
        return {**answer, **dict(zip(self.network.parameters, gradients, strict=True))}

    def synchronize(self) -> None:
        """Nothing is ever pending."""


def _check_names(network: Network) -> None:
    """Raise `NetworkError` for tensors that could not be told apart, or statistics that could not be moved."""
    computed = [name for name in network.statistics if name not in network.initializers]
    if computed:
        raise NetworkError(f"running statistics must be initializers: {', '.join(computed)}", where=network.name)
    moved = [node.inputs[4] for node in network.nodes if node.op_type == "BatchNormalization"]
    if len(set(moved)) < len(moved):
        raise NetworkError("two BatchNormalization nodes share their running statistics", where=network.name)
    tensors = {name for node in network.nodes for name in (*node.inputs, *node.outputs)}
    clash = [f"{name}_grad" for name in tensors if f"{name}_grad" in tensors]
    if clash:
        raise NetworkError(f"deep500 calls a gradient by this tensor's name: {clash[0]!r}", where=network.name)
