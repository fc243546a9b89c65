"""Level 0: one ONNX node as a native operator of a framework.

An adapter's `operators` module has one factory per ONNX operator and a subclass of `Operator`. The
factories build both networks (levels 1 and 2) and single operators (level 0). NumPy arrays cross
the interface in the neutral layout; inside, an adapter uses its framework's layout.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import builtins
import importlib
import keyword
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.nodes.context import Packing
from d5suite.network.operation import STATIC_INPUTS, Operation, is_floating
from d5suite.network.operators import FAMILIES


def function_name(operator: str) -> str:
    """Return the name of an operator's factory, such as ``conv_transpose`` for ``ConvTranspose``.

    Python's own names get an underscore: ``slice_``, ``not_``.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", operator.replace("NaN", "Nan")).lower()
    return f"{name}_" if keyword.iskeyword(name) or hasattr(builtins, name) else name


def operator_table(package: str) -> dict[str, Any]:
    """Return the factories of an adapter's ``operators`` package by ONNX name.

    A family's module has an operator's factory in a dict ``OPERATORS``, or else as a function of
    the operator's name (`function_name`). An operator without either is left out.
    """
    found = {}
    for family, operators in FAMILIES.items():
        module = importlib.import_module(f"{package}.{family}")
        for operator in operators:
            factory = getattr(module, "OPERATORS", {}).get(operator) or getattr(module, function_name(operator), None)
            if factory is not None:
                found[operator] = factory
    return found


def after(reduction: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction over a function of each element, such as a sum of squares."""
    return lambda x, *how, **more: reduction(function(x), *how, **more)


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
    packing : mapping of str to Packing
        Inputs that the native callable takes in another form than ONNX's.
    """

    backend = ""
    packing: Mapping[str, Packing] = MappingProxyType({})
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
    def to_native(self, name: str, array: np.ndarray) -> Any:
        """Copy an array to the device, in the layout in which the framework takes this tensor."""

    @abstractmethod
    def to_neutral(self, name: str, value: Any) -> np.ndarray:
        """Copy a native tensor to NumPy, in ONNX's layout and type."""

    def feed(self, arrays: Sequence[np.ndarray | None]) -> Sequence[Any]:
        """Copy the node's inputs to the device, in the layout that `forward` and `backward` take.

        The caller may overwrite the arrays once this returns, and hold several feeds.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray or None
            One per input of the node, as from `Operation.draw`.
        """
        self.check_feed(arrays)
        fed = []
        for name, array in zip(self.operation.node.inputs, arrays, strict=True):
            if array is not None and name in self.packing:
                array = self.packing[name].pack(array)
            fed.append(None if array is None else self.to_native(name, array))
        return fed

    def feed_gradients(self, arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Copy gradients of `Operation.differentiated` to the device, for `backward`'s function."""
        names = [self.operation.node.outputs[index] for index in self.operation.differentiated]
        return [self.to_native(name, array) for name, array in zip(names, arrays, strict=True)]

    @abstractmethod
    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run and record the forward pass at these inputs, and return the native backward pass.

        The returned function maps native gradients of the outputs to native gradients of the inputs
        in `Operation.differentiable`, which keep their values until its next call. It can be called
        repeatedly, also while other such functions are held, and repeats no more of the forward
        pass than the framework's own backward pass does.
        """

    def fetch(self, outputs: Any) -> list[np.ndarray]:
        """Convert `forward`'s result to NumPy: the wanted outputs, in ONNX's layout and types."""
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        names = self.operation.node.outputs
        return [self.to_neutral(name, value) for name, value in zip(names, found, strict=False) if name]

    def fetch_gradients(self, gradients: Any) -> list[np.ndarray]:
        """Convert gradients to NumPy: an array for each of `Operation.differentiable`."""
        fetched = []
        for index, gradient in zip(self.operation.differentiable, gradients, strict=True):
            name = self.operation.node.inputs[index]
            array = self.to_neutral(name, gradient)
            fetched.append(self.packing[name].unpack(array) if name in self.packing else array)
        return fetched

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

        A view has the extent of its underlying memory, if the framework reports it. None, as here,
        if the framework reports no address, or if ``value`` is not a tensor.
        """
        return None

    def views(self, results: Any, arguments: Sequence[Any], *, backward: bool) -> list[str]:
        """Return the names of results that are views: of an argument, or of another result.

        A tensor whose memory is smaller than its elements repeats them by strides of zero, as a
        broadcast does, and counts as a view, too: most of it was never written.

        Parameters
        ----------
        results : object
            Returned by `forward`, or by `backward`'s function.
        arguments : sequence
            Its arguments.
        backward : bool
            Whether `backward`'s function returned them; they are then named by their inputs.
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
                overlaps = any(start < other + length and other < start + size for other, length in seen)
                if overlaps or size < self._least_bytes(name):
                    shared.append(name)
                seen.append(extent)
        return shared

    def _least_bytes(self, name: str) -> int:
        """Return the fewest bytes that hold a tensor; adapters may narrow integers."""
        dtype = self.operation.dtypes[name]
        each = dtype.itemsize if is_floating(dtype) else 1
        return 0 if name in self.packing else math.prod(self.operation.shapes[name]) * each
