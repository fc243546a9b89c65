"""Level 1 on MXNet: a network as Gluon blocks, and MXNet's autograd.

Inference and training are one `HybridBlock` each, whose `hybrid_forward` calls one native operator per ONNX node; mode
``hybrid`` has Gluon make a cached graph of each at its first call, mode ``imperative`` runs them as they are. Both
share one set of Gluon parameters. Imports MXNet, NumPy and `d5suite.levels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators import OPERATORS, Context
from d5suite.backends.mxnet.runtime import CONTEXTS, mx
from d5suite.errors import NetworkError
from d5suite.levels import network as level
from d5suite.levels.network import Arrays, Native
from d5suite.network import Network


class Executor(level.Executor):
    """A network on MXNet.

    The gradients that `forward_backward` returns are MXNet's own arrays of gradients: the next call, and a training
    step, overwrite them.

    Attributes
    ----------
    weights : dict of str to gluon.Parameter
        Parameters and running statistics by neutral name; the latter have no gradient and are moved by MXNet in the
        backward pass.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        computed = [name for name in network.statistics if name not in network.initializers]
        if computed:
            raise NetworkError(f"running statistics must be initializers: {', '.join(computed)}", where=network.name)
        self._context = CONTEXTS[device]()
        self._dtype = "float64" if precision == "fp64" else "float32"
        self.weights = {
            name: self._weight(name, network.initializers[name], trained=name in network.parameters)
            for name in (*network.parameters, *network.statistics)
        }
        self._moving = False
        self._infer = self._block(network.output, training=False)
        self._inputs: list[str] = []
        self.unused_parameters: list[Any] = []
        if network.loss is not None:
            label, loss = network.require_loss()
            self._train = self._block(loss, training=True)
            self._inputs = [network.input, label]
            used = set(self._train.weights)
            self._differentiable = any(name in used for name in network.parameters)
            self.unused_parameters = [self.weights[name] for name in network.parameters if name not in used]
        # What seeds each training pass: a number that follows MXNet's own seed, and how many there were before.
        self._seed, self._passes, self._drops = 0, 0, self.drops
        if self._drops:
            self._seed = int(mx.nd.random.randint(0, 2**31 - 1, ctx=self._context).asscalar())

    def _weight(self, name: str, value: np.ndarray, *, trained: bool) -> Any:
        """A Gluon parameter with an initializer's value."""
        weight = mx.gluon.Parameter(
            f"{self.network.name}_{name}",  # with the block's name in front, as Gluon has it
            grad_req="write" if trained else "null",
            shape=value.shape,
            dtype=self._dtype,
            differentiable=trained,
        )
        weight.initialize(mx.init.Zero(), ctx=self._context)
        weight.set_data(self._array(value))
        return weight

    def _array(self, value: np.ndarray, dtype: str | None = None) -> Any:
        # Not `mx.nd.array`, which asks SciPy for names that it deprecates.
        return mx.nd.ndarray.array(value, ctx=self._context, dtype=dtype or self._dtype)

    def _block(self, output: str, *, training: bool) -> _Graph:
        network = self.network
        constants = {name: network.initializers[name] for name in network.constants}
        context = Context(network.shapes, constants, training, self._dtype)
        block = _Graph(network, output, context)
        kept = {_kept(node): self._weight(_kept(node), value, trained=False) for node, value in context.kept.items()}
        block.register({**self.weights, **kept})
        if self.mode == "hybrid":
            block.hybridize(static_alloc=True, static_shape=True)
        return block

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        fed = {}
        for name, array in arrays.items():
            fed[name] = self._array(array, self._dtype if name == self.network.input else "int64")
        return fed

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        dtype = np.float64 if self.precision == "fp64" else np.float32
        fetched = {}
        for name, value in values.items():
            array = value.asnumpy().astype(dtype, copy=False)
            # MXNet has no arrays without axes.
            fetched[name] = array.reshape(()) if self.network.shapes.get(name) == () else array
        return fetched

    def parameters(self) -> dict[str, np.ndarray]:
        self._settle()
        return self.fetch({name: weight.data() for name, weight in self.weights.items()})

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        self._settle()
        for name, value in values.items():
            self.weights[name].set_data(self._array(value))

    def random_state(self) -> dict[str, np.ndarray]:
        return {"seed": np.array(self._seed), "passes": np.array(self._passes)} if self._drops else {}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        if values:
            self._seed, self._passes = int(values["seed"]), int(values["passes"])

    # The measured paths.

    def _reseed(self) -> None:
        """Have this pass draw numbers of its own: MXNet's generators cannot be read, so they start anew with each.

        MXNet seeds 1024 generators with a number and its successors, so the numbers of two passes must lie far apart.
        """
        (number,) = np.random.SeedSequence([self._seed, self._passes]).generate_state(1)
        mx.random.seed(int(number) >> 1, ctx=self._context)
        self._passes += 1

    def _settle(self) -> None:
        """Wait for the running statistics.

        MXNet's engine does not know that the backward pass of a cached graph writes them: read at once, they were old
        in 141 of 150 runs of a small network.
        """
        if self._moving:
            mx.nd.waitall()
            self._moving = False

    def forward(self, feed: Native) -> Native:
        self._settle()
        return {self.network.output: self._infer(feed[self.network.input])}

    def loss(self, feed: Native) -> Any:
        """The loss in training mode, recorded by autograd; its backward pass moves the running statistics."""
        self.network.require_loss()
        self._moving = True
        if self._drops:
            self._reseed()
        with mx.autograd.record():
            return self._train(*[feed[name] for name in self._inputs])

    def forward_backward(self, feed: Native) -> Native:
        _, name = self.network.require_loss()
        loss = self.loss(feed)
        if self._differentiable:
            loss.backward()
        return {name: loss, **{name: self.weights[name].grad() for name in self.network.parameters}}

    def synchronize(self) -> None:
        mx.nd.waitall()


class _Graph(mx.gluon.HybridBlock):
    """The nodes that one output needs.

    Attributes
    ----------
    weights : list of str
        The names of the parameters and statistics they read.
    """

    def __init__(self, network: Network, output: str, context: Context) -> None:
        super().__init__(prefix=f"{network.name}_")
        nodes = network.nodes_for([output])
        self._inputs = [network.input, *([network.require_loss()[0]] if context.training else [])]
        self._output = output
        self._numbers = {name: value.item() for name, value in context.constants.items() if value.ndim == 0}
        weights = {*network.parameters, *network.statistics}
        self.weights = [n for n in dict.fromkeys(n for node in nodes for n in node.inputs) if n in weights]
        known = {"", *self._inputs, *network.initializers}
        last_use = {name: index for index, node in enumerate(nodes) for name in node.inputs}
        self._steps = []
        for index, node in enumerate(nodes):
            operator = OPERATORS[node.op_type](node, context)
            for name in node.inputs:
                if name not in known:
                    raise NetworkError(
                        f"tensor {name!r} is not a first output, and only those are computed", where=node.name
                    )
            known.add(node.outputs[0])
            reads = (*node.inputs, *([_kept(node.name)] if node.name in context.kept else []))
            dead = [name for name in dict.fromkeys(node.inputs) if last_use[name] == index and name not in ("", output)]
            self._steps.append((operator, reads, node.outputs[0], dead))
        if output not in known:
            raise NetworkError(f"no node computes {output!r} as its first output", where=network.name)
        self.weights += [_kept(name) for name in context.kept]

    def register(self, weights: dict[str, Any]) -> None:
        """Make those of the weights that the nodes read this block's own."""
        for name in self.weights:
            self._reg_params[name] = weights[name]
            self.params._params[weights[name].name] = weights[name]

    def hybrid_forward(self, F: Any, *inputs: Any, **weights: Any) -> Any:
        """Run the nodes on arrays or, to be traced, on symbols."""
        values: dict[str, Any] = {**self._numbers, **weights, **dict(zip(self._inputs, inputs, strict=True))}
        for operator, reads, result, dead in self._steps:
            values[result] = operator(F, *[values.get(name) for name in reads])
            for name in dead:
                values.pop(name, None)
        return values[self._output]


def _kept(node: str) -> str:
    """The name of the array that a node's operator keeps."""
    return f"{node}/kept"
