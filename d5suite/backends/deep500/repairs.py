"""deep500 0.2.0 with its faults repaired; the other modules import deep500 from here.

Each function repairs one fault and describes it. The rest of deep500 is unchanged: `operators`
replaces its wrong operators. Imports deep500 and NumPy.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import io
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_DISTRIBUTED = "deep500.frameworks.reference.distributed_optimizers"


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Provide what deep500's import needs, and undo it afterwards.

    deep500 imports ``Iterator`` from `collections`, which Python 3.10 removed. Its reference
    package imports its distributed optimizers, which fail without mpi4py: an empty module replaces
    them. mpi4py is hidden, so that importing deep500 never loads MPI, and deep500's printed warning
    is dropped.
    """
    stubs: dict[str, Any] = {"mpi4py": None}  # None makes an import fail
    if _DISTRIBUTED not in sys.modules:
        stubs[_DISTRIBUTED] = types.ModuleType(_DISTRIBUTED)
    kept = {name: sys.modules[name] for name in stubs if name in sys.modules}
    lacking = not hasattr(collections, "Iterator")
    sys.modules.update(stubs)
    if lacking:
        collections.Iterator = collections.abc.Iterator  # type: ignore[attr-defined]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if lacking:
            del collections.Iterator  # type: ignore[attr-defined]
        for name in stubs:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


with _importable():
    import deep500
    from deep500.frameworks.reference import optimizers, reference_network
    from deep500.frameworks.reference.custom_operators import custom_op_python
    from deep500.frameworks.reference.reference_graph_executor import ReferenceGraphExecutor
    from deep500.lv2.optimizer import ThreeStepOptimizer
    from deep500.utils import metrics
    from deep500.utils.onnx_interop import onnx_objects

__all__ = ["ReferenceGraphExecutor", "custom_op_python", "deep500", "metrics", "optimizers"]


def _numpy_names() -> None:
    """Provide ``np.string_``, which NumPy 2 removed, in the one module that reads it."""
    if not hasattr(np, "string_"):
        names = types.ModuleType("numpy")
        names.__dict__.update(np.__dict__, string_=np.bytes_)
        onnx_objects.np = names


def _silence() -> None:
    """Stop the reference network from printing two lines per operator and pass."""
    reference_network.print = lambda *_: None


_Pass = tuple[Any, Any, list[Any], list[Any]]
"""One call: the custom operator, its node, its inputs and all its outputs."""


def _forward(network: Any) -> list[_Pass]:
    """Run the nodes in order, and return each node's call.

    The original stored several outputs, as BatchNormalization has in training, as a list under the
    first output's name, and passed that list to the next operator. C++ operators are refused, as
    they corrupt memory.
    """
    passes = []
    nodes = network.graph.nodes
    before = getattr(network, "before_node", None)  # a caller's function, which changes variables between nodes
    for name in network.nodes_sorted_fwd:
        operator, node = nodes[name]["custom_op"], nodes[name]["operator"]
        if not isinstance(operator, deep500.CustomPythonOp):
            raise TypeError(f"node {name!r} is not a Python operator")
        if before is not None:
            before(node.input)
        inputs = [network.variables[key] for key in node.input]
        found = operator.forward(*inputs)
        outputs = [found] if operator.num_outputs == 1 else list(found)
        network.variables.update(zip(node.output, outputs, strict=False))  # deep500 names only the first
        passes.append((operator, node, inputs, outputs))
    return passes


def _inference(self: Any, input_dict: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace `ReferenceNetwork.inference`, with `_forward`."""
    self.setup()
    self.variables.update(input_dict)
    _forward(self)
    return {name: self.variables[name] for name in self.output_names}


def _inference_and_backprop(self: Any, input_dict: Mapping[str, np.ndarray], y: str = "loss") -> dict[str, np.ndarray]:
    """Replace `ReferenceNetwork.inference_and_backprop`.

    The original ran the loss on the inputs of the last node, gave gradients only to the loss's
    first input, overwrote the gradient of a tensor with several readers, and never cleared
    gradients. Here gradients start empty, add up, have their tensor's type, and are zero for
    parameters that the loss does not depend on.
    """
    self.setup()
    self.variables.update(input_dict)
    passes = _forward(self)
    operator, node, _ = self.losses[y]
    inputs = [self.variables[key] for key in node.input]
    loss = operator.forward(*inputs)
    self.variables[y] = loss
    passes.append((operator, types.SimpleNamespace(input=node.input, output=[y]), inputs, [loss]))

    gradients: dict[str, np.ndarray] = {y: np.ones_like(loss)}
    for operator, node, inputs, outputs in reversed(passes):
        if gradients.keys().isdisjoint(node.output):
            continue  # the loss does not depend on it
        above = [gradients.get(name, 0) for name in node.output]
        above += [0] * (operator.num_outputs - len(above))  # for outputs that no node reads
        for name, value, gradient in zip(node.input, inputs, operator.backward(above, inputs, outputs), strict=True):
            if value.dtype.kind == "f":
                total = gradients[name] + gradient if name in gradients else gradient
                gradients[name] = np.asarray(total, value.dtype)
    for name in self.get_params():
        gradients.setdefault(name, np.zeros_like(self.params[name]))
    self.gradients = gradients
    self.variables.update((f"{name}_grad", gradient) for name, gradient in gradients.items())
    pairs = [(name, f"{name}_grad") for name in self.get_params()]
    self.grad_names = {y: pairs, "loss": pairs}  # optimizers ask for "loss", whatever its name
    return {y: loss}


def _get_params(self: Any) -> list[str]:
    """Replace `ReferenceNetwork.get_params`, which listed data and activations too."""
    return [name for name, value in self.params.items() if value.dtype.kind == "f"]


def _network() -> None:
    """Repair inference, backpropagation and `get_params`; `gradient` no longer raises."""
    network = reference_network.ReferenceNetwork
    network.inference = _inference
    network.inference_and_backprop = _inference_and_backprop
    network.get_params = _get_params


def _adam() -> None:
    """Repair Adam.

    Its second moment decayed with beta1, and its step count stayed 0, so that it divided by zero.
    """

    def update_rule(self: Any, grad: np.ndarray, old_param: np.ndarray, param_name: str) -> np.ndarray:
        first = self.beta1 * self.get_first_momentum(param_name) + (1 - self.beta1) * grad
        second = self.beta2 * self.get_second_momentum(param_name) + (1 - self.beta2) * grad**2
        self.first_momentum[param_name], self.second_momentum[param_name] = first, second
        corrected_first = first / (1 - self.beta1**self.t)
        corrected_second = second / (1 - self.beta2**self.t)
        return old_param - self.lr * corrected_first / np.sqrt(corrected_second + self.epsilon)

    optimizers.AdamOptimizer.update_rule = update_rule
    optimizers.AdamOptimizer.step = ThreeStepOptimizer.step  # which calls new_input


def _adagrad() -> None:
    """Repair AdaGrad.

    Its rule had a name that nothing calls, summed whole norms, and made parameters float64.
    """

    def update_rule(self: Any, grad: np.ndarray, old_param: np.ndarray, param_name: str) -> np.ndarray:
        self.squares[param_name] = self.squares.get(param_name, np.zeros_like(grad)) + grad**2
        return old_param - self.lr / (self.eps + np.sqrt(self.squares[param_name])) * grad

    optimizers.AdaGradOptimizer.update_rule = update_rule


def _variance() -> None:
    """Repair `VarHeatmap`, which took the variance of the first run alone: 0."""

    def measure(self: Any, inputs: Any, outputs: Any, reference_outputs: Any) -> list[np.ndarray]:
        return [np.var(np.stack(runs), axis=0) for runs in zip(*self._results, strict=True)]

    metrics.VarHeatmap.measure = measure


for _repair in (_numpy_names, _silence, _network, _adam, _adagrad, _variance):
    _repair()
