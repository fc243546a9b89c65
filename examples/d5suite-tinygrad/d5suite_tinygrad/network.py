"""Level 1 on tinygrad: a network as a function of tensors, captured with TinyJit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit

from d5suite.levels import network as level
from d5suite.levels.network import Arrays, Native
from d5suite.network import Network
from d5suite.network.nodes.schedule import ScheduledNode, check_statistics, schedule
from d5suite_tinygrad.operators import OPERATORS, TYPES, Context, native, neutral

Plan = list[tuple[ScheduledNode, Callable[..., Any]]]
"""The nodes to run in order, each with its native function."""


class Replayed:
    """A function of tensors that TinyJit captures once per tuple of shapes.

    What is replayed writes into the memory of the call before, so each answer is copied out of it:
    it stays what it is for as long as the caller holds it.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], mode: str) -> None:
        self._function, self._captures = function, mode == "jit"
        self._jits: dict[Any, Callable[..., Sequence[Tensor]]] = {}

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if not self._captures:
            return self._function(*inputs)
        key = tuple(x.shape for x in inputs)
        if key not in self._jits:
            self._jits[key] = TinyJit(self._function)
        answers = [y.clone() for y in self._jits[key](*inputs)]
        Tensor.realize(*answers)
        return answers


class Executor(level.Executor):
    """A network on tinygrad.

    Attributes
    ----------
    tensors : dict of str to Tensor
        Parameters and running statistics by name; they stay where they are in memory, since a
        captured pass refers to it.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        check_statistics(network)
        self.dtype = TYPES[precision]
        self.tensors = {
            name: native(value, self.dtype if value.dtype.kind == "f" else None)
            for name, value in network.initializers.items()
        }
        self._inference = self._plan(network.output, training=False)
        self._infer = Replayed(self._forward, mode)
        if network.loss is not None:
            self._training = self._plan(network.loss, training=True)
            self._differentiate = Replayed(self._forward_backward, mode)

    def _plan(self, wanted: str, *, training: bool) -> Plan:
        """Return the nodes that a tensor needs, each with its native function."""
        network = self.network
        context = Context.of_network(network, training=training, dtype=self.dtype)
        steps = schedule(network, wanted, training=training)
        return [(step, OPERATORS[step.node.op_type](step.node, context)) for step in steps]

    def _run(self, plan: Plan, fed: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the last node's output, lazily, and the new running statistics by name."""
        values: dict[str, Any] = {**self.tensors, **fed, "": None}
        moved = {}
        for step, function in plan:
            node = step.node
            answer = function(*(values[name] for name in node.inputs))
            if isinstance(answer, tuple):
                answer, *statistics = answer
                moved.update(zip(node.inputs[3:5], statistics, strict=True))
            values[node.outputs[0]] = answer
        return answer, moved

    def _forward(self, images: Tensor) -> list[Tensor]:
        output, _ = self._run(self._inference, {self.network.input: images})
        return [output.clone().realize()]

    def differentiate(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Return the loss, the gradient of every parameter and the new statistics, all lazily."""
        network = self.network
        label, _ = network.require_loss()
        loss, moved = self._run(self._training, {network.input: images, label: labels})
        used = {name for step, _ in self._training for name in step.node.inputs}
        sources = [name for name in network.parameters if name in used]
        found = (
            dict(zip(sources, loss.gradient(*(self.tensors[name] for name in sources)), strict=True)) if sources else {}
        )
        zeros = {name: Tensor.zeros_like(self.tensors[name]) for name in network.parameters if name not in used}
        return loss, [{**found, **zeros}[name] for name in network.parameters], moved

    def _forward_backward(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        loss, gradients, moved = self.differentiate(images, labels)
        answers = [y.clone() for y in (loss, *gradients)]
        self.overwrite(answers, moved)
        return answers

    def overwrite(self, answers: Sequence[Tensor], new: dict[str, Tensor]) -> None:
        """Compute answers and new values, then overwrite the named tensors in their own memory."""
        values = {name: value.cast(self.tensors[name].dtype).clone() for name, value in new.items()}
        Tensor.realize(*answers, *values.values())
        for name, value in values.items():
            self.tensors[name].assign(value)
        if values:
            Tensor.realize(*(self.tensors[name] for name in values))

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        return {name: native(a, self.dtype if name == self.network.input else None) for name, a in arrays.items()}

    def forward(self, feed: Native) -> Native:
        (output,) = self._infer(feed[self.network.input])
        return {self.network.output: output}

    def forward_backward(self, feed: Native) -> Native:
        label, loss = self.network.require_loss()
        answers = self._differentiate(feed[self.network.input], feed[label])
        return dict(zip((loss, *self.network.parameters), answers, strict=True))

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        dtype = np.float64 if self.precision == "fp64" else np.float32
        return {name: neutral(value, dtype) for name, value in values.items()}

    def parameters(self) -> dict[str, np.ndarray]:
        return self.fetch({name: self.tensors[name] for name in (*self.network.parameters, *self.network.statistics)})

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        for name, value in values.items():
            self.tensors[name].assign(native(value, self.dtype)).realize()

    def random_state(self) -> dict[str, np.ndarray]:
        """Return how many numbers tinygrad's generator has drawn; its seed is the process's."""
        return {"counter": neutral(_counter(), np.uint32)} if self.drops else {}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        if values:
            _counter().assign(native(values["counter"])).realize()

    def synchronize(self) -> None:
        Device[Device.DEFAULT].synchronize()


def _counter() -> Tensor:
    return Tensor._device_rng_counters[Device.DEFAULT]
