"""Any d5suite operator or executor as a deep500 one, for its tests, metrics and optimizers.

::

    from d5suite.backends import backend
    from d5suite.backends.deep500 import BridgedExecutor, BridgedOperator
    from d5suite.backends.deep500.bridge import deep500

    operation = Operation("Gemm", {"A": (4, 5), "B": (5, 3), "C": (3,)}, precision="fp64")
    bridged = BridgedOperator(backend("torch").operator(operation))
    deep500.test_op_gradient(bridged, bridged.draw(seed=0), metrics=[deep500.MaxError()])

    bridged = BridgedExecutor(backend("torch").executor(network))
    metrics = [deep500.MaxError()]
    deep500.test_executor_inference(bridged, {"image": images}, expected, metrics=metrics)

Import deep500 from here, as a plain import fails. Pass metrics to its tests: the default ones are
shared between calls and accumulate. Its gradient test takes float64 steps in every input: give it
float64 operations whose integer inputs are fixed. Imports deep500 (through `repairs`), NumPy,
`d5suite.errors`, `d5suite.levels` and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500.repairs import deep500
from d5suite.errors import NetworkError
from d5suite.levels.network import Executor
from d5suite.levels.operator import Operator
from d5suite.network.operation import is_floating

__all__ = ["BridgedExecutor", "BridgedNetwork", "BridgedOperator", "deep500"]


class BridgedOperator(deep500.CustomPythonOp):
    """A d5suite operator as a deep500 custom operator, with NumPy arrays in and out.

    Its inputs are the node's inputs that are neither omitted nor fixed, its outputs the node's
    wanted outputs. Every call copies arrays to the device and back, and the backward pass starts
    with a forward pass: times that deep500 measures include both.

    Parameters
    ----------
    operator : Operator
        An operator of any backend.
    """

    def __init__(self, operator: Operator) -> None:
        operation = operator.operation
        names = operation.node.inputs
        self.operator = operator
        self._positions = [i for i, name in enumerate(names) if name and name not in operation.constants]
        super().__init__(
            *(
                [deep500.TensorDescriptor(operation.dtypes[name].type, list(operation.shapes[name])) for name in those]
                for those in ([names[i] for i in self._positions], operation.outputs)
            )
        )

    def draw(self, seed: int) -> list[np.ndarray]:
        """Return random inputs for deep500's tests, by `Operation.draw`."""
        drawn = self.operator.operation.draw(seed)
        return [np.asarray(drawn[i]) for i in self._positions]

    def _feed(self, inputs: Sequence[np.ndarray]) -> Sequence[Any]:
        operation = self.operator.operation
        given = dict(zip(self._positions, inputs, strict=True))
        return self.operator.feed(
            [given.get(i, operation.constants.get(name)) for i, name in enumerate(operation.node.inputs)]
        )

    def forward(self, *inputs: np.ndarray) -> Any:
        """Return the output, or a list of several."""
        outputs = self.operator.fetch(self.operator.forward(*self._feed(inputs)))
        return outputs[0] if self.num_outputs == 1 else outputs

    def backward(
        self, grads: Sequence[np.ndarray], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the gradients of the first output for all inputs, then of the next, and so on.

        deep500's gradient test reads them in this order.

        Raises
        ------
        NetworkError
            If frameworks have no gradient for one of the inputs or outputs.
        """
        operator, operation = self.operator, self.operator.operation
        self._require_gradients()
        call = operator.backward(self._feed(fwd_inputs))
        found: list[np.ndarray] = []
        for chosen in range(self.num_outputs):
            heads = [g if i == chosen else np.zeros_like(g) for i, g in enumerate(grads)]
            gradients = operator.fetch_gradients(call(*operator.feed_gradients(heads)))
            by_input = dict(zip(operation.differentiable, gradients, strict=True))
            found += [by_input.get(i, np.zeros_like(x)) for i, x in zip(self._positions, fwd_inputs, strict=True)]
        return found

    def _require_gradients(self) -> None:
        operation = self.operator.operation
        names = operation.node.inputs
        inputs = [
            names[i] for i in self._positions if is_floating(operation.dtypes[names[i]])
            and i not in operation.differentiable
        ]  # fmt: skip
        if inputs:
            raise NetworkError(
                f"input {inputs[0]!r} has no gradient", where=operation.name, hint="Give it fixed values."
            )
        outputs = [name for i, name in enumerate(operation.node.outputs) if name and i not in operation.differentiated]
        if outputs:
            raise NetworkError(f"output {outputs[0]!r} has no gradient", where=operation.name)


class BridgedNetwork(deep500.Network):
    """An executor's parameters and last gradients, under deep500's names.

    Parameters
    ----------
    executor : Executor
        An executor of any backend.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor = executor
        self._gradients: dict[str, np.ndarray] = {}
        self._parameters: dict[str, np.ndarray] | None = None

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs in inference mode; other inputs, such as labels, are ignored."""
        executor = self.executor
        return executor.fetch(executor.forward(executor.feed({name: inputs[name] for name in executor.network.inputs})))

    def differentiate(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the loss and, as ``<parameter>_grad``, its gradients; update the statistics."""
        executor = self.executor
        network = executor.network
        label, loss = network.require_loss()
        feed = executor.feed({name: inputs[name] for name in (*network.inputs, label)})
        answer = executor.fetch(executor.forward_backward(feed))
        self._parameters = None
        self._gradients = {f"{name}_grad": answer[name] for name in network.parameters}
        return {loss: answer[loss], **self._gradients}

    def get_params(self) -> list[str]:
        """Return the parameters' names."""
        return list(self.executor.network.parameters)

    def gradient(self, y: str = "loss") -> list[tuple[str, str]]:
        """Return pairs of names, (parameter, gradient), whatever name ``y`` gives the loss."""
        if not self._gradients:
            raise NetworkError("nothing has been differentiated yet", where=self.executor.network.name)
        return [(name, f"{name}_grad") for name in self.executor.network.parameters]

    def fetch_tensors(self, names: Sequence[str]) -> list[np.ndarray]:
        """Return parameters, running statistics and gradients by name."""
        if self._parameters is None:
            self._parameters = self.executor.parameters()
        known = {**self._parameters, **self._gradients}
        missing = [name for name in names if name not in known]
        if missing:
            raise NetworkError(
                f"only parameters and gradients can be fetched, not {missing[0]!r}", where=self.executor.network.name
            )
        return [known[name] for name in names]

    def fetch_tensor(self, name: str) -> np.ndarray:
        """Return one tensor, as `fetch_tensors` does."""
        return self.fetch_tensors([name])[0]

    def feed_tensor(
        self, name: str, new_value: np.ndarray, device_option: object = None, is_param: bool = False
    ) -> None:
        """Overwrite a parameter or running statistic."""
        self.executor.load_parameters({name: new_value})
        if self._parameters is not None:
            self._parameters[name] = new_value

    def add_output(self, name: str) -> None:
        """Raise `NetworkError`: an executor's outputs are fixed when it is built."""
        raise NetworkError(f"the executor cannot give {name!r} besides its output", where=self.executor.network.name)

    def get_input_nodes(self) -> list[str]:
        """Return the names of the inputs and, if there is one, of the label input."""
        network = self.executor.network
        return [name for name in (*network.inputs, network.label) if name is not None]

    def get_output_nodes(self) -> list[str]:
        """Return the names of the outputs and, if there is one, of the loss."""
        network = self.executor.network
        return [name for name in (*network.outputs, network.loss) if name is not None]


class BridgedExecutor(deep500.GraphExecutor):
    """A d5suite executor as deep500's `GraphExecutor`.

    Parameters
    ----------
    executor : Executor
        An executor of any backend.
    events : sequence of deep500.ExecutorEvent
    batch_size : int
        Images per batch if deep500 draws inputs itself and the network takes any number.

    Attributes
    ----------
    network : BridgedNetwork
    model : deep500.ops.OnnxModel
        Inputs and outputs only: deep500's tests need no more, and it cannot read today's operators.
    """

    def __init__(self, executor: Executor, events: Sequence[Any] = (), *, batch_size: int = 1) -> None:
        super().__init__(BridgedNetwork(executor), list(events))
        self.model = _describe(executor, self.network, batch_size)

    def inference(self, input: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the network's output."""
        for event in self.events:
            event.before_executor(input)
        answer: dict[str, np.ndarray] = self.network.run(input)
        for event in self.events:
            event.after_inference(answer)
        return answer

    def inference_and_backprop(self, input: Mapping[str, np.ndarray], y: str = "loss") -> dict[str, np.ndarray]:
        """Return the loss, and every parameter's gradient as ``<parameter>_grad``."""
        network = self.network.executor.network
        if y != network.loss:
            raise NetworkError(f"only the loss {network.loss!r} can be differentiated, not {y!r}", where=network.name)
        for event in self.events:
            event.before_executor(input)
        answer: dict[str, np.ndarray] = self.network.differentiate(input)
        for event in self.events:
            event.after_backprop(answer)
        return answer


def _describe(executor: Executor, names: BridgedNetwork, batch_size: int) -> Any:
    ops = deep500.ops
    network = executor.network

    def info(name: str) -> Any:
        kind = ops.TensorDataType.FLOAT if network.dtypes[name].kind == "f" else ops.TensorDataType.INT64
        shape = [batch_size if n is None else n for n in network.shapes[name]]
        return ops.OnnxValueInfo(name, ops.OnnxTensorType(kind, ops.OnnxTensorShape(shape)), None)

    inputs, outputs = ([info(name) for name in those] for those in (names.get_input_nodes(), names.get_output_nodes()))
    return ops.OnnxModel(ops.OnnxGraph([], network.name, [], None, inputs, outputs, []), None)
