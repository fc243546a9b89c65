"""Level 1 on MXNet: a network as Gluon blocks, differentiated by MXNet's autograd.

Inference and training are one `HybridBlock` each, whose `hybrid_forward` calls one native operator
per ONNX node. Gluon builds a cached graph of each block on its first call; in mode ``imperative``
the blocks run as they are. Both share one set of Gluon parameters. Imports MXNet, NumPy,
`d5suite.levels`, `d5suite.network` and the adapter's `runtime` and `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators import OPERATORS, Context
from d5suite.backends.mxnet.operators.context import stored_in_blocks
from d5suite.backends.mxnet.runtime import CONTEXTS, mx
from d5suite.levels import network as level
from d5suite.levels.attribution import labels, no_scope
from d5suite.levels.network import Arrays, Native
from d5suite.network import Network
from d5suite.network.nodes.schedule import by_name, check_statistics, schedule
from d5suite.network.operation import STATIC_INPUTS, is_floating


class Executor(level.Executor):
    """A network on MXNet.

    `forward_backward` returns MXNet's own gradient arrays: the next call or training step
    overwrites them.

    Attributes
    ----------
    weights : dict of str to gluon.Parameter
        Parameters and running statistics by neutral name. The latter have no gradient; MXNet
        updates them in the backward pass.
    unused_parameters : list of gluon.Parameter
        Parameters on which the loss does not depend.
    outdated : bool
        Whether weights may have changed since the last inference.
    blocks : list of gluon.HybridBlock
        The network in inference and, if it has a loss, in training.
    """

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        check_statistics(network)
        self._context = CONTEXTS[device]()
        self._dtype = "float64" if precision == "fp64" else "float32"
        self.weights = {
            name: self._weight(name, network.initializers[name], trained=name in network.parameters)
            for name in (*network.parameters, *network.statistics)
        }
        self._moving = self.outdated = False
        self._infer = self._block(network.outputs, training=False)
        self.blocks = [self._infer]
        self._inputs: list[str] = []
        self.unused_parameters: list[Any] = []
        if network.loss is not None:
            label, loss = network.require_loss()
            self._train = self._block([loss], training=True)
            self.blocks.append(self._train)
            self._inputs = [*network.inputs, label]
            used = set(self._train.weights)
            self._differentiable = any(name in used for name in network.parameters)
            self.unused_parameters = [self.weights[name] for name in network.parameters if name not in used]
        # Each training pass is seeded by a number drawn from MXNet's own seed and by its index.
        self._seed, self._passes, self._drops = 0, 0, self.drops
        if self._drops:
            self._seed = int(mx.nd.random.randint(0, 2**31 - 1, ctx=self._context).asscalar())

    def _weight(self, name: str, value: np.ndarray, *, trained: bool) -> Any:
        """Create a Gluon parameter with an initializer's value."""
        dtype = self._dtype if is_floating(value.dtype) else value.dtype.name
        weight = mx.gluon.Parameter(
            f"{self.network.name}_{name}",  # Gluon expects the block's name as prefix
            grad_req="write" if trained else "null",
            shape=value.shape,
            dtype=dtype,
            differentiable=trained,
        )
        weight.initialize(mx.init.Zero(), ctx=self._context)
        weight.set_data(self._array(value, dtype))
        return weight

    def _array(self, value: np.ndarray, dtype: str | None = None) -> Any:
        # `mx.nd.array` would use names that SciPy deprecates.
        return mx.nd.ndarray.array(value, ctx=self._context, dtype=dtype or self._dtype)

    def _block(self, outputs: Sequence[str], *, training: bool) -> _Graph:
        network = self.network
        blocks = stored_in_blocks(network) if training and self._dtype == "float32" else frozenset()
        context = Context.of_network(
            network, training=training, activations=self.precision, dtype=self._dtype, in_blocks=blocks
        )
        block = _Graph(network, outputs, context)
        kept = {name: self._weight(name, value, trained=False) for name, value in block.kept.items()}
        block.register({**self.weights, **kept})
        if self.mode in ("hybrid", "fused"):
            backend = "MKLDNN" if self.mode == "fused" and not training and self._dtype == "float32" else None
            block.hybridize(backend=backend, static_alloc=True, static_shape=True)
        elif self.mode == "stock":
            block.hybridize()
        return block

    def feed(self, arrays: Arrays) -> Native:
        self.check_feed(arrays)
        fed = {}
        for name, array in arrays.items():
            dtype = self.network.dtypes[name]
            value = np.atleast_1d(array)  # MXNet has no arrays without axes
            fed[name] = self._array(value, self._dtype if is_floating(dtype) else dtype.name)
        return fed

    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        fetched = {}
        for name, value in values.items():
            array = value.asnumpy().astype(self.array_type, copy=False)
            # MXNet has no arrays without axes.
            fetched[name] = array.reshape(()) if self.network.shapes.get(name) == () else array
        return fetched

    def parameters(self) -> dict[str, np.ndarray]:
        self._settle()
        return self.fetch({name: weight.data() for name, weight in self.weights.items()})

    def load_parameters(self, values: Arrays) -> None:
        self.check_parameters(values)
        self._settle()
        self.outdated = True
        for name, value in values.items():
            self.weights[name].set_data(self._array(value))

    def random_state(self) -> dict[str, np.ndarray]:
        return {"seed": np.array(self._seed), "passes": np.array(self._passes)} if self._drops else {}

    def load_random_state(self, values: Arrays) -> None:
        self.check_random_state(values)
        if values:
            self._seed, self._passes = int(values["seed"]), int(values["passes"])

    def _reseed(self) -> None:
        """Seed MXNet's generators for one pass, because their state cannot be read.

        MXNet seeds 1024 generators with consecutive numbers, so the seeds of two passes must lie
        far apart.
        """
        (number,) = np.random.SeedSequence([self._seed, self._passes]).generate_state(1)
        mx.random.seed(int(number) >> 1, ctx=self._context)
        self._passes += 1

    def _settle(self) -> None:
        """Wait until the running statistics are updated.

        MXNet's engine does not track that the backward pass of a cached graph writes them: read
        immediately, they were stale in 141 of 150 runs of a small network.
        """
        if self._moving:
            mx.nd.waitall()
            self._moving = False

    def forward(self, feed: Native) -> Native:
        self._settle()
        if self.outdated and self.mode == "fused":  # its kernels keep the weights of their first call
            self._infer._clear_cached_op()
        self.outdated = False
        found = self._infer(*[feed[name] for name in self.network.inputs])
        return dict(zip(self.network.outputs, found if isinstance(found, (list, tuple)) else [found], strict=True))

    def loss(self, feed: Native) -> Any:
        """Return the loss in training mode, recorded by autograd.

        Its backward pass updates the running statistics.
        """
        self.network.require_loss()
        self._moving = self.outdated = True
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
    """The nodes that some outputs need.

    Attributes
    ----------
    weights : list of str
        Names of the parameters and statistics that the nodes read, and of the arrays in `kept`.
    kept : dict of str to numpy.ndarray
        Further arrays: constants that operators take as arrays, and those of `Context.keep`.
    """

    def __init__(self, network: Network, outputs: Sequence[str], context: Context) -> None:
        super().__init__(prefix=f"{network.name}_")
        steps = schedule(network, outputs, training=context.training)
        self._inputs = [*network.inputs, *([network.require_loss()[0]] if context.training else [])]
        self._outputs = outputs
        self._numbers = {name: value.item() for name, value in context.constants.items() if value.ndim == 0}
        weights = {*network.parameters, *network.statistics}
        self.weights = [n for n in dict.fromkeys(n for step in steps for n in step.node.inputs) if n in weights]
        self._steps = []
        scopes = labels(network)
        self.kept: dict[str, np.ndarray] = {}
        for step in steps:
            node = step.node
            operator = OPERATORS[node.op_type](node, context)
            for index, name in enumerate(node.inputs):
                if context.constants.get(name, np.array(0)).ndim and index not in STATIC_INPUTS.get(node.op_type, ()):
                    self.kept[name] = context.constants[name]
            reads = (*node.inputs, *([_kept(node.name)] if node.name in context.kept else []))
            self._steps.append((operator, reads, node, step.dead, scopes[node.name]))
        self.kept.update((_kept(name), array) for name, array in context.kept.items())
        self.weights += self.kept

    def register(self, weights: dict[str, Any]) -> None:
        """Register the weights that the nodes read as this block's parameters."""
        for name in self.weights:
            self._reg_params[name] = weights[name]
            self.params._params[weights[name].name] = weights[name]

    def hybrid_forward(self, F: Any, *inputs: Any, **weights: Any) -> Any:
        """Run the nodes on arrays or, for tracing, on symbols."""
        values: dict[str, Any] = {**self._numbers, **weights, **dict(zip(self._inputs, inputs, strict=True))}
        named = mx.name.Prefix if F is mx.sym else no_scope
        for operator, reads, node, dead, scope in self._steps:
            with named(f"{scope}_"):
                values.update(by_name(node, operator(F, *[values.get(name) for name in reads])))
            for name in dead:
                del values[name]
        found = [values[name] for name in self._outputs]
        return found if len(found) > 1 else found[0]


def _kept(node: str) -> str:
    """Return the name of the array that `Context.keep` stores for a node."""
    return f"{node}/kept"
