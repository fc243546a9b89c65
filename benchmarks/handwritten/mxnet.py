"""Two operators and an epoch of LeNet-5 in plain MXNet, as its users write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.handwritten import Epoch, OperatorCall
from d5suite.backends.mxnet.baseline import hybridized, nn
from d5suite.backends.mxnet.runtime import mx
from d5suite.network import Network
from d5suite.optimizers.settings import SGD


def operator_call(name: str, arrays: Sequence[np.ndarray], *, mode: str, device: str) -> OperatorCall:
    """See `benchmarks.handwritten`; ``hybrid`` calls the cached graph that a Gluon block would."""
    context = mx.cpu() if device == "cpu" else mx.gpu()
    if mode != "imperative":
        x, y = mx.sym.var("x"), mx.sym.var("y")
        # Gluon's layer uses this kernel; `relu` is a different one.
        graph = mx.sym.Activation(x, act_type="relu") if name == "Relu" else mx.sym.dot(x, y)
        call = mx.nd.CachedOp(graph, () if mode == "stock" else (("static_alloc", True), ("static_shape", True)))
    else:
        call = partial(mx.nd.Activation, act_type="relu") if name == "Relu" else mx.nd.dot
    return OperatorCall(
        call=call,
        arguments=tuple(mx.nd.ndarray.array(array, context, array.dtype) for array in arrays),
        synchronize=lambda _: mx.nd.waitall(),
        fetch=lambda output: output.asnumpy(),
    )


class LeNet5(mx.gluon.HybridBlock):
    """LeNet-5 with tanh and average pooling, and its loss, so that one cached graph holds both."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        with self.name_scope():
            self.c1 = nn.Conv2D(6, 5, activation="tanh")
            self.c3 = nn.Conv2D(16, 5, activation="tanh")
            self.c5 = nn.Conv2D(120, 5, activation="tanh")
            self.f6 = nn.Dense(84, activation="tanh")
            self.output = nn.Dense(classes)
            self.pool = nn.AvgPool2D(2)
            self.criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F: Any, x: Any, labels: Any) -> Any:
        """(N, 1, 32, 32) and (N,) to the mean loss."""
        x = self.c5(self.pool(self.c3(self.pool(self.c1(x)))))
        return F.mean(self.criterion(self.output(self.f6(x)), labels))


def lenet5_epoch(network: Network, optimizer: SGD, *, mode: str, device: str) -> Epoch:
    """See `benchmarks.handwritten`."""
    context = mx.cpu() if device == "cpu" else mx.gpu()
    model = LeNet5(len(network.initializers["output.bias"]))
    model.initialize(ctx=context)
    for name in network.parameters:
        layer, _, kind = name.partition(".")
        getattr(getattr(model, layer), kind).set_data(mx.nd.ndarray.array(network.initializers[name], context))
    trainer = hybridized(model, optimizer, mode)

    def epoch(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        losses = []
        for images, labels in batches:
            x, y = mx.nd.ndarray.array(images, context), mx.nd.ndarray.array(labels, context)
            with mx.autograd.record():
                loss = model(x, y)
            loss.backward()
            trainer.step(1)
            losses.append(loss)
        return [float(loss.asscalar()) for loss in losses]

    return epoch
