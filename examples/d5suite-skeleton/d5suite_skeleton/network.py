"""Level 1 on NumPy: a loop over the nodes of a network."""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.errors import BackendError
from d5suite.levels import network as level
from d5suite.levels.network import Arrays, Native
from d5suite.network import Network
from d5suite.network.nodes.context import NodeContext
from d5suite.network.nodes.schedule import by_name, schedule
from d5suite_skeleton.operators import OPERATORS

TYPES: dict[str, Any] = {"fp32": np.float32, "fp64": np.float64}


class Executor(level.Executor):
    """A network on NumPy."""

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        self._tensors = {name: self._native(value) for name, value in network.initializers.items()}
        context = NodeContext.of_network(network, training=False, activations=precision)
        steps = schedule(network, network.outputs, training=False)
        self._steps = [(step, OPERATORS[step.node.op_type](step.node, context)) for step in steps]

    def _native(self, array: np.ndarray) -> np.ndarray:
        """Copy an array; floating-point numbers take the type of the precision."""
        return np.array(array, TYPES[self.precision] if np.asarray(array).dtype.kind == "f" else None)

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        return {name: self._native(array) for name, array in arrays.items()}

    def forward(self, feed: Native) -> Native:
        values: dict[str, Any] = {"": None, **self._tensors, **feed}
        for step, function in self._steps:
            result = function(*(values[name] for name in step.node.inputs))
            values.update(by_name(step.node, result))
            for name in step.dead:
                del values[name]
        return {name: values[name] for name in self.network.outputs}

    def forward_backward(self, feed: Native) -> Native:
        raise BackendError("NumPy does not differentiate", where=self.network.name)

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {name: np.array(value, TYPES[self.precision]) for name, value in values.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        return self.fetch({name: self._tensors[name] for name in (*self.network.parameters, *self.network.statistics)})

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        self._tensors.update({name: self._native(value) for name, value in values.items()})

    def synchronize(self) -> None:
        """Nothing to wait for: NumPy has computed a result when its call returns."""
