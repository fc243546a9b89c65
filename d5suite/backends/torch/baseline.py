"""A training step of ResNet-50 v1.5 written by hand in PyTorch, to compare with the adapter's.

It shares no code with the adapter. Imports PyTorch, NumPy, `d5suite.errors` and
`d5suite.levels.baseline`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from d5suite.errors import NetworkError
from d5suite.levels.baseline import Baseline

if TYPE_CHECKING:
    from d5suite.network import Network
    from d5suite.optimizers.settings import SGD


EPSILON = float(np.float32(1e-5))
"""BatchNormalization's 1e-5 as float32, as in ONNX; with it both steps agree to the last bit."""


def called(model: nn.Module, mode: str, example: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the callable by which a mode runs a model on inputs like the example."""
    if mode == "compile":
        compiled: Callable[..., torch.Tensor] = torch.compile(model, dynamic=False)
        return compiled
    if mode == "cuda_graphs":
        graphed: Callable[..., torch.Tensor] = torch.cuda.make_graphed_callables(model, (example,))
        return graphed
    return model


def native_sgd(model: nn.Module, settings: SGD, *, fused: bool = True) -> torch.optim.SGD:
    """Return PyTorch's SGD for a model's parameters, by default with one fused kernel for all."""
    return torch.optim.SGD(
        model.parameters(),
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
        **({"fused": True} if fused else {}),
    )


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Return ResNet's batch normalization layer."""
    return nn.BatchNorm2d(channels, eps=EPSILON)


class Bottleneck(nn.Module):
    """1×1, 3×3 (with the stride, as in v1.5) and 1×1 convolution, and a shortcut."""

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, kernel_size=1, bias=False)
        self.bn1 = batch_norm(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = batch_norm(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, kernel_size=1, bias=False)
        self.bn3 = batch_norm(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, inplanes, H, W) to (N, 4 planes, H / stride, W / stride)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet of bottlenecks with the parameter names of published checkpoints."""

    def __init__(self, layers: tuple[int, int, int, int], num_classes: int) -> None:
        super().__init__()
        self.inplanes = 64
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = batch_norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(64, layers[0])
        self.layer2 = self._make_layer(128, layers[1], stride=2)
        self.layer3 = self._make_layer(256, layers[2], stride=2)
        self.layer4 = self._make_layer(512, layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * Bottleneck.expansion, num_classes)

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        outplanes = planes * Bottleneck.expansion
        downsample = nn.Sequential(
            nn.Conv2d(self.inplanes, outplanes, kernel_size=1, stride=stride, bias=False), batch_norm(outplanes)
        )
        layers = [Bottleneck(self.inplanes, planes, stride, downsample)]
        self.inplanes = outplanes
        layers += [Bottleneck(self.inplanes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, H, W) to (N, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


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
    """Build the step.

    Parameters
    ----------
    network : Network
        A ResNet-50 of the zoo: source of the number of classes and the initial weights.
    optimizer : SGD
    images, labels : numpy.ndarray
        The batch, float32 (N, 3, H, W) and int64 (N,).
    mode, device, precision : str
        As for the backend.

    Raises
    ------
    NetworkError
        If the network's parameters are not those of a ResNet-50.
    """
    weights = {name: torch.tensor(network.initializers[name]) for name in (*network.parameters, *network.statistics)}
    if "fc.bias" not in weights:
        raise NetworkError("not a ResNet-50 of the zoo: it has no fc.bias", where=network.name)
    model = ResNet((3, 4, 6, 3), num_classes=len(weights["fc.bias"]))
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise NetworkError(f"not a ResNet-50 of the zoo: {error}", where=network.name) from error
    wrong = [*unexpected, *(name for name in missing if not name.endswith("num_batches_tracked"))]
    if wrong:
        raise NetworkError(f"not a ResNet-50 of the zoo: {', '.join(wrong[:5])}", where=network.name)

    dtype = torch.float64 if precision == "fp64" else torch.float32
    memory_format = torch.channels_last if mode == "channels_last" else torch.contiguous_format
    model = model.to(device, dtype, memory_format=memory_format).train()
    x = torch.tensor(images).to(device, dtype, memory_format=memory_format)
    y = torch.tensor(labels).to(device)
    criterion = nn.CrossEntropyLoss()
    sgd = native_sgd(model, optimizer, fused=mode != "stock")
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    # A CUDA graph must record its casts, so autocast may not reuse earlier ones.
    with torch.autocast(device, dtype=narrow, cache_enabled=False) if narrow else contextlib.nullcontext():
        forward = called(model, mode, x)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**15, enabled=precision == "fp16")
    last = torch.zeros(())

    def step() -> None:
        nonlocal last
        sgd.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=narrow) if narrow else contextlib.nullcontext():
            loss = criterion(forward(x), y)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        last = loss.detach()

    def parameters() -> dict[str, np.ndarray]:
        return {name: value.detach().cpu().numpy().copy(order="C") for name, value in model.named_parameters()}

    return Baseline(
        step=step,
        synchronize=torch.cuda.synchronize if device == "cuda" else lambda: None,
        loss=lambda: float(last),
        parameters=parameters,
    )
