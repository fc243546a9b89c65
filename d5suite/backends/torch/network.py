"""Level 1 on PyTorch: a network as a sequence of native calls, and its autograd.

Parameters are plain leaf tensors under their neutral names. Inference and training are one
`torch.fx.GraphModule` each. Its forward function calls one native function per ONNX node and drops
every tensor after its last use. Eager modes call it; mode ``compile`` passes it to `torch.compile`,
and ``cuda_graphs`` records its work.
Imports PyTorch, NumPy, `d5suite.levels`, `d5suite.network` and this adapter's `operators`.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.fx

from d5suite.backends.torch.graphs import Graphed
from d5suite.backends.torch.operators import CHANNELS_LAST, OPERATORS, Context, require_compiler
from d5suite.errors import NetworkError
from d5suite.levels import network as level
from d5suite.levels.network import GRADIENT_SCALE, Arrays, Native
from d5suite.network import Network, Node
from d5suite.network.nodes.schedule import check_statistics, is_rounded, schedule
from d5suite.network.operation import is_floating

_FRESH = frozenset({"Add", "BatchNormalization", "Concat", "Conv", "Gemm", "MatMul", "Mul", "Sub"})
"""Operators whose output may be overwritten: it is new memory, and no gradient reads it."""

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes a node's name and its native call, and returns the call to run instead."""

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of activations, and of weights where they are used, if not the parameters' own type."""


class Executor(level.Executor):
    """A network on PyTorch.

    Attributes
    ----------
    tensors : dict of str to torch.Tensor
        Every initializer by neutral name. Parameters require gradients; running statistics are
        updated in place.
    dtype, activations : torch.dtype
        Type of the parameters, and of activations and of weights where they are used.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        if mode == "compile":
            require_compiler()
        check_statistics(network)
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self.activations = _NARROW.get(precision, self.dtype)
        self.tensors = {name: self._native(value) for name, value in network.initializers.items()}
        self._parameters = [self.tensors[name].requires_grad_() for name in network.parameters]

        inference = self._plan(network.outputs, training=False)
        self._inference_weights: list[torch.Tensor] = []
        self._inference_sources = inference.weights
        self._infer = self._compiled(inference)
        self._training_names: list[str] = []
        if network.loss is not None:
            self._label, loss = network.require_loss()
            training = self._plan([loss], training=True)
            self._training_names = [name for name, _ in training.weights]
            self._training_weights = [self.tensors[name] for name in self._training_names]
            self._train = self._compiled(training)
        self._statistics = _Statistics(network, self.tensors)
        self._stale = True
        self.graphed = mode == "cuda_graphs"
        self._in_turn: Callable[..., tuple[torch.Tensor, ...]] | None = None
        self._before: Callable[[Iterable[str]], None] = lambda _: None
        self._forward: Callable[..., tuple[torch.Tensor, ...]] = self._inferred
        self._replayed: Graphed | None = None
        if self.graphed:
            self._forward = Graphed(self._inferred)
            self._replayed = Graphed(self._trained, [self.tensors[name] for name in network.statistics])

    def _plan(self, outputs: Sequence[str], *, training: bool, wrap: Wrap | None = None) -> _Plan:
        return _Plan(self, outputs, training=training, wrap=wrap)

    @contextlib.contextmanager
    def rebuilt(self, wrap: Wrap) -> Iterator[None]:
        """Within the context, run ``wrap(name, call)``'s result in place of each node's call."""
        network, infer = self.network, self._infer
        train = self._train if network.loss is not None else None
        self._infer = self._compiled(self._plan(network.outputs, training=False, wrap=wrap))
        if network.loss is not None:
            self._train = self._compiled(self._plan([network.loss], training=True, wrap=wrap))
        try:
            yield
        finally:
            self._infer = infer
            if train is not None:
                self._train = train

    def _compiled(self, plan: _Plan) -> Callable[..., tuple[torch.Tensor, ...]]:
        if self.mode != "compile":
            run: Callable[..., tuple[torch.Tensor, ...]] = plan.module.forward
            return run
        compiled: Callable[..., tuple[torch.Tensor, ...]] = torch.compile(plan.module, dynamic=False, fullgraph=True)
        return compiled

    @property
    def unused_parameters(self) -> list[torch.Tensor]:
        """The parameters that the loss does not depend on."""
        used = set(self._training_names)
        return [self.tensors[name] for name in self.network.parameters if name not in used]

    def _native(self, value: np.ndarray) -> torch.Tensor:
        """Return a copy of an initializer in the parameters' type and the mode's layout."""
        tensor = torch.tensor(value)
        return self._placed(tensor, self.dtype if tensor.is_floating_point() else tensor.dtype)

    def _placed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        layout = CHANNELS_LAST.get(tensor.ndim) if self.mode == "channels_last" else None
        return tensor.to(self.device, dtype, memory_format=layout or torch.contiguous_format)

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        fed = {}
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
            dtype = self.network.dtypes[name]
            fed[name] = self._placed(tensor, self.activations if is_floating(dtype) else getattr(torch, dtype.name))
            if fed[name].data_ptr() == tensor.data_ptr():
                # Copied by NumPy: PyTorch's threads would spin on cores that the loader needs.
                fed[name] = torch.from_numpy(np.array(array, order="C"))
        return fed

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        return {
            name: np.array(value.detach().to("cpu", self.dtype).numpy(), order="C") for name, value in values.items()
        }

    def parameters(self) -> dict[str, np.ndarray]:
        self._statistics.settle()
        return self.fetch({name: self.tensors[name] for name in (*self.network.parameters, *self.network.statistics)})

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        self._statistics.settle()
        with torch.no_grad():
            for name, value in values.items():
                self.tensors[name].copy_(torch.tensor(value))
        self._statistics.restart()
        self._stale = True

    def forward(self, feed: Native) -> Native:
        if self._stale:
            self._refresh()
        found = self._forward(*(feed[name] for name in self.network.inputs))
        if self.graphed:  # the next call overwrites them
            found = tuple(each.clone() for each in found)
        return dict(zip(self.network.outputs, found, strict=True))

    def _inferred(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            return self._infer(*self._inference_weights, *inputs)

    def _refresh(self) -> None:
        """Update in place what inference reads: running variances and rounded weights."""
        self._statistics.settle()
        with torch.inference_mode():
            if not self._inference_weights:
                self._inference_weights = [
                    self.tensors[name].to(self.activations) if rounded else self.tensors[name]
                    for name, rounded in self._inference_sources
                ]
            else:
                for (name, rounded), place in zip(self._inference_sources, self._inference_weights, strict=True):
                    if rounded:
                        place.copy_(self.tensors[name])
        self._stale = False

    def changed(self) -> None:
        """Note that a caller has overwritten parameters: inference reads copies of some."""
        self._stale = True

    def loss(self, feed: Native, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return the loss in training mode, with its autograd graph; update running statistics.

        ``weights`` replace the parameters of these names.
        """
        inputs = self._inputs(feed)
        own = self._training_weights
        used = own if weights is None else [weights.get(name, self.tensors[name]) for name in self._training_names]
        (loss,) = self._train(*used, *inputs)
        return loss

    def loss_in_turn(self, feed: Native, before: Callable[[Iterable[str]], None]) -> torch.Tensor:
        """Return `loss`, calling ``before`` with each node's parameters before the node runs.

        At the end, ``before`` is called with all parameters.
        """
        if self._in_turn is None:
            known = set(self.network.parameters)
            own = {node.name: [name for name in node.inputs if name in known] for node in self.network.nodes}

            def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
                def waits(*given: Any) -> Any:
                    self._before(own[name])
                    return call(*given)

                return waits if own.get(name) else call

            _, loss = self.network.require_loss()
            self._in_turn = self._plan([loss], training=True, wrap=wrap).module.forward
        self._before = before
        (found,) = self._in_turn(*self._training_weights, *self._inputs(feed))
        before(self.network.parameters)
        return found

    def _inputs(self, feed: Native) -> list[torch.Tensor]:
        """Return the inputs of a training pass, and note that it updates running statistics."""
        inputs = [feed[name] for name in (*self.network.inputs, self._label)]
        self._stale = True
        self._statistics.count(len(inputs[-1]))
        return inputs

    def forward_backward(self, feed: Native) -> Native:
        _, name = self.network.require_loss()
        if self._replayed is not None:
            loss, *gradients = self._replayed(*self._inputs(feed))
            loss = loss.clone()  # the next call overwrites it
        else:
            loss, *gradients = self._differentiated(self.loss(feed))
        return {name: loss, **dict(zip(self.network.parameters, gradients, strict=True))}

    def _differentiated(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a loss, detached from its graph, and its gradients."""
        scaled = loss * GRADIENT_SCALE if self.precision == "fp16" else loss
        gradients = torch.autograd.grad(scaled, self._parameters, materialize_grads=True) if self._parameters else ()
        if self.precision == "fp16" and gradients:
            gradients = torch._foreach_div(gradients, GRADIENT_SCALE)
        return loss.detach(), *gradients

    def _trained(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (loss,) = self._train(*self._training_weights, *inputs)
        return self._differentiated(loss)

    def random_state(self) -> dict[str, np.ndarray]:
        """Return the states of PyTorch's generators; compiled code draws its seeds from them."""
        if not self.drops:
            return {}
        states = {"cpu": torch.get_rng_state()}
        if self.device == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        return {name: state.numpy().copy() for name, state in states.items()}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        if "cpu" in values:
            torch.set_rng_state(torch.tensor(values["cpu"]))
        if "cuda" in values:
            torch.cuda.set_rng_state(torch.tensor(values["cuda"]))

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class _Plan:
    """The nodes that some outputs need, as a module of native calls.

    Attributes
    ----------
    weights : list of (str, bool)
        The module's first arguments: initializer names, and whether each is rounded to 16 bits. The
        inputs and, in training, the label follow. In training the module itself rounds, so that
        gradients reach the originals; in inference it takes rounded weights.
    module : torch.fx.GraphModule
    """

    def __init__(self, executor: Executor, outputs: Sequence[str], *, training: bool, wrap: Wrap | None = None) -> None:
        network, narrows = executor.network, executor.activations != executor.dtype
        nodes = [step.node for step in schedule(network, outputs, training=training)]
        context = Context.of_network(
            network, training=training, activations=executor.precision, device=executor.device, dtype=executor.dtype,
            overwrites=_overwrites(nodes, network, outputs),
        )  # fmt: skip
        graph = torch.fx.Graph()
        values: dict[tuple[str, bool], torch.fx.Node] = {}
        uses = [
            [(name, narrows and is_rounded(network, node, index)) for index, name in enumerate(node.inputs)]
            for node in nodes
        ]
        self.weights = list(dict.fromkeys(key for use in uses for key in use if key[0] in network.initializers))
        for index, key in enumerate(self.weights):
            values[key] = graph.placeholder(f"weight_{index}")
        for index, name in enumerate(network.inputs):
            values[name, False] = graph.placeholder(f"input_{index}")
        if training:
            values[network.require_loss()[0], False] = graph.placeholder("labels")
            for key in self.weights:
                if key[1]:
                    values[key] = graph.call_function(torch.Tensor.to, (values[key], executor.activations))
        for node, use in zip(nodes, uses, strict=True):
            arguments = tuple(values[key] if key[0] else None for key in use)
            call = OPERATORS[node.op_type](node, context)
            result = graph.call_function(call if wrap is None else wrap(node.name, call), arguments)
            if len(node.outputs) == 1:
                values[node.outputs[0], False] = result
                continue
            for index, name in enumerate(node.outputs):
                values[name, False] = graph.call_function(operator.getitem, (result, index))
        graph.output(tuple(values[name, False] for name in outputs))
        self.module = torch.fx.GraphModule(torch.nn.Module(), graph)


def _overwrites(nodes: Sequence[Node], network: Network, outputs: Sequence[str]) -> dict[str, int]:
    """Return which outputs overwrite which of their node's inputs.

    These are the places where a hand-written network has ``relu(inplace=True)`` and ``x += y``. It
    is safe if neither another node nor the gradient of the input's own node reads that input.
    """
    uses = Counter(name for node in nodes for name in node.inputs)
    producers = {node.outputs[0]: node for node in nodes}
    found = {}
    for node in nodes:
        if node.op_type not in ("Relu", "Add", "Sum") or len(node.inputs) > 2:
            continue
        for index, name in enumerate(node.inputs):
            fresh = name in producers and producers[name].op_type in _FRESH
            same_shape = network.shapes.get(name) == network.shapes.get(node.outputs[0])
            if fresh and same_shape and uses[name] == 1 and name not in outputs:
                found[node.outputs[0]] = index
                break
    return found


class _Statistics:
    """Running variances, corrected when they are read.

    PyTorch's kernel updates them with the batch's unbiased variance, ONNX with the biased one.
    After k steps from v0 with momentum m and n values per channel, the kernel holds ``m^k v0 + s n
    / (n - 1)`` and ONNX ``m^k v0 + s``; `settle` replaces the kernel's value by ONNX's. So a step
    runs the native kernel alone.
    """

    def __init__(self, network: Network, tensors: dict[str, torch.Tensor]) -> None:
        self._network = network
        nodes = network.nodes_for([network.loss] if network.loss else [])
        self._nodes = [node for node in nodes if node.op_type == "BatchNormalization"]
        names = [node.inputs[4] for node in self._nodes]
        if len(set(names)) < len(names):
            raise NetworkError("two BatchNormalization nodes share their running statistics", where=network.name)
        self._variances = [tensors[name] for name in names]
        self._batch = 0
        self._sizes: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Take the current variances as correct, and count steps from here."""
        self._steps = 0
        self._starts = [variance.clone() for variance in self._variances]

    def count(self, batch: int) -> None:
        """Count a training pass over a batch of this size.

        Raises
        ------
        NetworkError
            If a channel has fewer than two values, or their number is unknown.
        """
        if batch != self._batch:
            self.settle()
            self._batch, self._sizes = batch, [self._size(node, batch) for node in self._nodes]
        self._steps += 1

    def _size(self, node: Node, batch: int) -> int:
        first, _, *image = self._network.shapes[node.inputs[0]]
        size = (first or batch) * math.prod(n or 0 for n in image)
        if size < 2:
            raise NetworkError(
                f"BatchNormalization has {size or 'an unknown number of'} values per channel", where=node.name,
                hint="Training needs two or more: use a larger batch.",
            )  # fmt: skip
        return size

    def settle(self) -> None:
        """Correct the variances."""
        if not self._steps:
            return
        with torch.no_grad():
            for node, variance, start, n in zip(self._nodes, self._variances, self._starts, self._sizes, strict=True):
                decayed = start.double() * node.attributes["momentum"] ** self._steps
                variance.copy_(decayed + (variance.double() - decayed) * ((n - 1) / n))
        self.restart()
