"""What the operator factories of an adapter know of a node's surroundings.

Level 0 will measure single operators; levels 1 and 2 build networks of the same ones. Imports NumPy, `d5suite.errors`
and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.model import Shape


class NodeContext:
    """The part of a factory's context that is the same in every adapter; the adapter's own class holds the fields.

    Attributes
    ----------
    shapes : mapping of str to tuple
        ONNX shape of every tensor whose rank is known.
    constants : mapping of str to numpy.ndarray
        Values of the inputs that are fixed: shapes, axes, bounds.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]

    def shape(self, name: str) -> Shape:
        """ONNX shape of a tensor.

        Raises
        ------
        NetworkError
            If not even its rank is known.
        """
        if name not in self.shapes:
            raise NetworkError("the rank of this tensor is not known", where=name)
        return self.shapes[name]

    def rank(self, name: str) -> int:
        """Number of axes."""
        return len(self.shape(name))

    def constant(self, node: Node, index: int) -> np.ndarray | None:
        """Value of a fixed input, None where it is omitted.

        Raises
        ------
        NetworkError
            If it is computed when the network runs.
        """
        if index >= len(node.inputs) or not node.inputs[index]:
            return None
        if node.inputs[index] not in self.constants:
            raise NetworkError(
                f"input {index} of {node.op_type} must be a constant", where=node.name, hint="Export with fixed shapes."
            )
        return self.constants[node.inputs[index]]
