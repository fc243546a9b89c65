"""A training step of ResNet-50 v1.5 written by hand in MXNet, to compare with the adapter's.

Gluon layers, a hybridized network, a `gluon.Trainer`. It shares only the import of MXNet in
`runtime` with the adapter. Imports MXNet, NumPy, `d5suite.errors` and `d5suite.levels.baseline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from d5suite.backends.mxnet.runtime import mx
from d5suite.errors import NetworkError
from d5suite.levels.baseline import Baseline

if TYPE_CHECKING:
    from d5suite.network import Network
    from d5suite.optimizers.settings import SGD

nn = mx.gluon.nn

EPSILON = float(np.float32(1e-5))
"""BatchNormalization's 1e-5 as the float32 of an ONNX file, so that both steps agree exactly."""

LAYERS = (3, 4, 6, 3)
"""Blocks of the four stages (He et al., CVPR 2016, table 1)."""


def hybridized(model: Any, optimizer: SGD, mode: str) -> Any:
    """Build cached graphs as the mode says, and return the trainer."""
    if mode in ("hybrid", "fused"):
        model.hybridize(static_alloc=True, static_shape=True)
    elif mode == "stock":
        model.hybridize()
    weights = [each for each in model.collect_params().values() if each.grad_req != "null"]
    together = mode == "stock" or weights[0].list_ctx()[0] != mx.cpu()
    return mx.gluon.Trainer(weights, native_sgd(optimizer, together=together), kvstore=None)


def native_sgd(settings: SGD, *, together: bool = False) -> Any:
    """Return MXNet's SGD."""
    numbers = {"learning_rate": settings.learning_rate, "momentum": settings.momentum}
    if settings.nesterov:
        return NAG(decay=settings.weight_decay, **numbers)
    kind = mx.optimizer.SGD if together else KernelSGD
    return kind(**numbers, wd=settings.weight_decay)


def conv(channels: int, kernel: int, strides: int = 1) -> Any:
    """Return a convolution without bias, padded by half the kernel."""
    return nn.Conv2D(channels, kernel, strides=strides, padding=kernel // 2, use_bias=False)


def batch_norm() -> Any:
    """Return ResNet's batch normalization layer."""
    return nn.BatchNorm(epsilon=EPSILON)


class Bottleneck(mx.gluon.HybridBlock):
    """1×1, 3×3 (strided, v1.5) and 1×1 convolution with a shortcut."""

    def __init__(self, channels: int, strides: int, *, downsample: bool) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(conv(channels, 1), batch_norm(), nn.Activation("relu"))
            self.body.add(conv(channels, 3, strides), batch_norm(), nn.Activation("relu"))
            self.body.add(conv(channels * 4, 1), batch_norm())
            self.downsample = None
            if downsample:
                self.downsample = nn.HybridSequential()
                self.downsample.add(conv(channels * 4, 1, strides), batch_norm())

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Map (N, C, H, W) to (N, 4 channels, H / strides, W / strides)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.Activation(self.body(x) + shortcut, act_type="relu")

    def named(self) -> list[tuple[str, Any]]:
        """Return the layers with parameters, with their names in published checkpoints."""
        layers = [
            (name, self.body[i]) for i, name in enumerate(("conv1", "bn1", "", "conv2", "bn2", "", "conv3", "bn3"))
        ]
        if self.downsample is not None:
            layers += [("downsample.0", self.downsample[0]), ("downsample.1", self.downsample[1])]
        return [(name, layer) for name, layer in layers if name]


class ResNet50(mx.gluon.HybridBlock):
    """The network and its loss, so that one cached graph holds both."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(conv(64, 7, 2), batch_norm(), nn.Activation("relu"), nn.MaxPool2D(3, 2, 1))
            for stage, blocks in enumerate(LAYERS):
                for block in range(blocks):
                    strides = 2 if stage and not block else 1
                    self.features.add(Bottleneck(64 << stage, strides, downsample=not block))
            self.features.add(nn.GlobalAvgPool2D())
            self.output = nn.Dense(classes)
            self.criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F: Any, x: Any, labels: Any) -> Any:
        """Map images (N, 3, H, W) and labels (N,) to the mean loss."""
        return F.mean(self.criterion(self.output(self.features(x)), labels))

    def named(self) -> dict[str, Any]:
        """Return all Gluon parameters by their names in published checkpoints."""
        layers = [("conv1", self.features[0]), ("bn1", self.features[1]), ("fc", self.output)]
        blocks = iter(list(self.features)[4:-1])
        for stage, count in enumerate(LAYERS, start=1):
            for index in range(count):
                layers += [(f"layer{stage}.{index}.{name}", layer) for name, layer in next(blocks).named()]
        found = {}
        for name, layer in layers:
            if hasattr(layer, "gamma"):
                found[f"{name}.weight"], found[f"{name}.bias"] = layer.gamma, layer.beta
                found[f"{name}.running_mean"], found[f"{name}.running_var"] = layer.running_mean, layer.running_var
            else:
                found[f"{name}.weight"] = layer.weight
                if layer.bias is not None:
                    found[f"{name}.bias"] = layer.bias
        return found


class KernelSGD(mx.optimizer.SGD):
    """MXNet's SGD with a kernel for each array, faster than MXNet's kernel for four arrays."""

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)
        self.aggregate_num = 0

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        how = {"lr": self._get_lr(index), "wd": self._get_wd(index), "rescale_grad": self.rescale_grad}
        if state is None:
            mx.nd.sgd_update(weight, grad, out=weight, **how)
        else:
            mx.nd.sgd_mom_update(weight, grad, state, out=weight, momentum=self.momentum, **how)

    update = update_multi_precision


class NAG(mx.optimizer.NAG):
    """Nesterov momentum that decays the old weights; MXNet's kernel decays the new ones."""

    def __init__(self, *, decay: float, **settings: float) -> None:
        super().__init__(**settings)
        self.decay = decay

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        if self.decay:
            grad += self.decay * weight
        super().update_multi_precision(index, weight, grad, state)


def resnet50_training_step(
    network: Network,
    optimizer: SGD,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    mode: str,
    device: str,
    precision: str,
) -> Baseline:
    """Build the training step.

    Parameters
    ----------
    network : Network
        A ResNet-50 of the zoo: gives the number of classes and the initial weights.
    optimizer : SGD
    images, labels : numpy.ndarray
        The batch: float32 (N, 3, H, W) and int64 (N,).
    mode, device, precision : str
        As for the backend.

    Raises
    ------
    NetworkError
        If the network's parameters are not those of a ResNet-50.
    """
    weights = {name: network.initializers[name] for name in (*network.parameters, *network.statistics)}
    if "fc.bias" not in weights:
        raise NetworkError("not a ResNet-50 of the zoo: it has no fc.bias", where=network.name)
    context = mx.cpu() if device == "cpu" else mx.gpu()
    dtype = "float64" if precision == "fp64" else "float32"
    model = ResNet50(len(weights["fc.bias"]))
    model.cast(dtype)
    model.initialize(ctx=context)
    named = model.named()
    wrong = sorted(named.keys() ^ weights.keys())
    if wrong:
        raise NetworkError(f"not a ResNet-50 of the zoo: {', '.join(wrong[:5])}", where=network.name)
    for name, value in weights.items():
        named[name].set_data(mx.nd.ndarray.array(value, context, dtype))
    x, y = mx.nd.ndarray.array(images, context, dtype), mx.nd.ndarray.array(labels, context, dtype)
    trainer = hybridized(model, optimizer, mode)
    last: list[Any] = [None]

    def step() -> None:
        with mx.autograd.record():
            loss = model(x, y)
        loss.backward()
        trainer.step(1)
        last[0] = loss

    return Baseline(
        step=step,
        synchronize=mx.nd.waitall,
        loss=lambda: float(last[0].asscalar()),
        parameters=lambda: {name: named[name].data().asnumpy() for name in network.parameters},
    )
