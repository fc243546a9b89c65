"""Level 0: one ONNX node as a native operator of a framework.

An adapter's `operators` module has one factory per ONNX operator, from which both networks (levels
1 and 2) and single operators (level 0) are built, and a subclass of the `Operator` below. NumPy
arrays cross the interface in the neutral layout; inside, an adapter keeps its framework's.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.operation import STATIC_INPUTS, Operation


class Operator(ABC):
    """An ONNX node built for one mode and device of a framework.

    The constructor takes ``(operation, *, mode, device)``, already checked against the backend's
    declaration, and sets `forward`. The operation's tensor types are the native types. Matrix
    products in float32 do not use TF32; those in bfloat16 accumulate in float32.

    Attributes
    ----------
    operation : Operation
    mode, device : str
    backend : str
        Name of the backend, set by `Backend.operator`.
    forward : callable
        The native callable, unwrapped: from native inputs to the native output or, if the operation
        wants other outputs than its first, to a sequence of outputs, in which unwanted ones may be
        None. The work may still be pending on the device. It is deterministic, changes none of its
        inputs, and its result keeps its values for as long as the caller holds it.
    """

    backend = ""
    forward: Callable[..., Any]

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        self.operation = operation
        self.mode = mode
        self.device = device

    def check_feed(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Raise `NetworkError` unless each input has an array of the right shape and type."""
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
        """Copy the node's inputs to the device, in the layout that `forward` and `backward` take.

        The caller may overwrite the arrays once this returns, and hold several feeds.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray or None
            One per input of the node, as from `Operation.draw`.
        """

    @abstractmethod
    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Copy gradients of `Operation.differentiated` to the device, for `backward`'s function."""

    @abstractmethod
    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run and record the forward pass at these inputs, and return the native backward pass.

        The returned function maps native gradients of the outputs to native gradients of the inputs
        in `Operation.differentiable`, which keep their values until its next call. It can be called
        repeatedly, also while other such functions are held, and repeats no more of the forward
        pass than the framework's own backward pass does.
        """

    @abstractmethod
    def fetch(self, outputs: Any) -> list[np.ndarray]:
        """Convert `forward`'s result to NumPy: the wanted outputs, in ONNX's layout and types."""

    @abstractmethod
    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        """Convert gradients to NumPy: an array for each of `Operation.differentiable`."""

    @abstractmethod
    def synchronize(self, *results: Any) -> None:
        """Return only after all work issued on the device has finished.

        Parameters
        ----------
        *results
            The result of the last call of `forward` or of `backward`'s function, which some
            frameworks need in order to wait; nothing if no call is pending.
        """

    def extent(self, value: Any) -> tuple[int, int] | None:
        """Return the first address and the number of bytes of a native tensor's memory.

        For a view, those of the underlying memory if the framework reports them. None, as here, if
        the framework reports no address, or if ``value`` is not a tensor.
        """
        return None

    def views(self, results: Any, arguments: Sequence[Any], *, backward: bool) -> list[str]:
        """Return the names of results that are views of an argument or of another result.

        Parameters
        ----------
        results : object
            Returned by `forward`, or by `backward`'s function.
        arguments : sequence
            Its arguments.
        backward : bool
            Whether it was the latter; results are then named by their inputs.
        """
        operation, node = self.operation, self.operation.node
        found = list(results) if isinstance(results, list | tuple) else [results]
        if backward:
            # Some adapters return an entry for every input, others for those with a gradient only.
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
