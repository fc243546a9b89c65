"""Level 0: one ONNX node as a native operator of a framework.

An adapter's `operators` module has a factory for each ONNX operator, from which networks (levels 1 and 2) and single
operators (level 0) are built alike, and a class ``Operator``, which is the `Operator` below. Arrays cross the interface
as NumPy arrays in the neutral form; inside, an adapter keeps its framework's layout.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.levels.recurrent import Packing
from d5suite.network import Node
from d5suite.network.model import Shape
from d5suite.network.operation import STATIC_INPUTS, Operation


class Operator(ABC):
    """One ONNX node, built for one mode and device of a framework.

    A constructor takes ``(operation, *, mode, device)``, already checked against the backend's declaration, and sets
    `forward`. The types of the operation's tensors are the native types: there is no precision beside them. Matrix
    products of float32 are not shortened (no TF32), and those of bfloat16 add up in float32.

    Attributes
    ----------
    operation : Operation
    mode, device : str
    backend : str
        The name of the backend that made it, set by `Backend.operator`.
    forward : callable
        The native call itself, with nothing of d5suite around it: from native inputs to the native output or, if the
        operation wants other outputs than its first, to a sequence of those it wants, which may have None for the
        others. The work may still be pending on the device. Calling it twice gives the same answer: it changes none of
        its inputs.
    """

    backend = ""
    forward: Callable[..., Any]

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        self.operation = operation
        self.mode = mode
        self.device = device

    def check_feed(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Raise `NetworkError` unless there is one array of the right shape and type for each input."""
        operation = self.operation
        names = operation.node.inputs
        if len(arrays) != len(names):
            raise NetworkError(f"{len(arrays)} arrays for {len(names)} inputs", where=operation.name)
        for name, array in zip(names, arrays, strict=True):
            if (array is None) != (not name):
                raise NetworkError(
                    f"input {name!r} must {'have' if name else 'not have'} a value", where=operation.name
                )
            if array is not None and (array.shape != operation.shapes[name] or array.dtype != operation.dtypes[name]):
                raise NetworkError(
                    f"input {name!r} is {array.dtype} of shape {array.shape}, not {operation.dtypes[name]} of shape "
                    f"{operation.shapes[name]}", where=operation.name,
                )  # fmt: skip

    @abstractmethod
    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        """Put the node's inputs on the device, in the native layout: what `forward` and `backward` take.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray or None
            One for each of the node's inputs, as `Operation.draw` gives them.
        """

    @abstractmethod
    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Put gradients of the outputs in `Operation.differentiated` on the device, for `backward`'s callable."""

    @abstractmethod
    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The native backward pass at these inputs.

        The forward pass is run and recorded here, once; the callable goes from native gradients of the outputs to
        native gradients of the inputs in `Operation.differentiable`, any number of times, and does no forward pass that
        the framework's own backward pass would not do.
        """

    @abstractmethod
    def fetch(self, outputs: Any) -> list[np.ndarray]:
        """Bring what `forward` gave back to NumPy: the wanted outputs, in ONNX's layout and their own types."""

    @abstractmethod
    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        """Bring what `backward`'s callable gave back to NumPy: an array for each of `Operation.differentiable`."""

    @abstractmethod
    def synchronize(self, *results: Any) -> None:
        """Return only when all work issued so far on the device has finished.

        Parameters
        ----------
        *results
            What the last call returned, of `forward` or of `backward`'s callable; nothing where no call was made since
            the device last stood still. Some frameworks can wait for a result only, and a call that remembered its own
            would be more than the native call.
        """

    def extent(self, value: Any) -> tuple[int, int] | None:
        """Where a native tensor lies in its device's memory: the first address and the number of bytes.

        That of the whole memory that the tensor is a view of, where the framework tells that. Results that lie in their
        arguments' memory are views, for which nothing was moved. None, as here, if the framework does not tell, or if
        ``value`` is no tensor.
        """
        return None

    def views(self, results: Any, arguments: Sequence[Any], *, backward: bool) -> list[str]:
        """The outputs, or inputs by their gradients, that a native call gave without moving anything.

        They lie in the memory of an argument or of another result, as far as `extent` tells.

        Parameters
        ----------
        results : object
            What `forward`, or `backward`'s callable, returned.
        arguments : sequence
            What that was given.
        backward : bool
            Which of the two it was.
        """
        operation, node = self.operation, self.operation.node
        found = list(results) if isinstance(results, list | tuple) else [results]
        if backward:
            # Some adapters give a place to every input that is fed, others to those alone that have a gradient.
            names = [node.inputs[index] for index in operation.differentiable]
            fed = [n for i, n in enumerate(node.inputs) if n and i not in STATIC_INPUTS.get(node.op_type, ())]
            names = fed if len(found) == len(fed) else names
        else:
            names = list(node.outputs if len(found) >= len(node.outputs) else operation.outputs)
        seen = [extent for value in arguments if (extent := self.extent(value)) is not None]
        shared = []
        for name, value in zip(names, found, strict=False):
            extent = self.extent(value) if name else None
            if extent is not None:
                start, size = extent
                if any(start < other + length and other < start + size for other, length in seen):
                    shared.append(name)
                seen.append(extent)
        return shared


class NodeContext:
    """The part of a factory's context that is the same in every adapter; the adapter's own class holds the fields.

    Attributes
    ----------
    shapes : mapping of str to tuple
        ONNX shape of every tensor whose rank is known.
    constants : mapping of str to numpy.ndarray
        Values of the inputs that are fixed: shapes, axes, bounds.
    dtypes : mapping of str to numpy.dtype
        ONNX type of every tensor; only at level 0.
    non_negative : set of str
        Inputs whose values are known to be 0 or more; only at level 0.
    packing : dict of str to Packing
        Weights that a factory wants in a form of its own, other than an order of their axes; only at level 0.
    """

    shapes: Mapping[str, Shape]
    constants: Mapping[str, np.ndarray]
    dtypes: Mapping[str, np.dtype]
    non_negative: frozenset[str]
    packing: dict[str, Packing]

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
