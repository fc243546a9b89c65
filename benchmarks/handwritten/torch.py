"""Two operators and an epoch of LeNet-5 in plain PyTorch, as its users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.handwritten import Epoch, OperatorCall
from d5suite.backends.torch.baseline import called, native_sgd
from d5suite.network import Network
from d5suite.optimizers.settings import SGD


def operator_call(name: str, arrays: Sequence[np.ndarray], *, mode: str, device: str) -> OperatorCall:
    """See `benchmarks.handwritten`."""
    call: Callable[..., Any] = {"Relu": torch.relu, "Gemm": torch.mm}[name]
    return OperatorCall(
        call=torch.compile(call, dynamic=False) if mode == "compile" else call,
        arguments=tuple(torch.tensor(array, device=device) for array in arrays),
        synchronize=lambda _: torch.cuda.synchronize() if device == "cuda" else None,
        fetch=lambda output: output.cpu().numpy(),
    )


class LeNet5(nn.Module):
    """LeNet-5 with tanh and average pooling."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(1, 6, kernel_size=5)
        self.c3 = nn.Conv2d(6, 16, kernel_size=5)
        self.c5 = nn.Conv2d(16, 120, kernel_size=5)
        self.f6 = nn.Linear(120, 84)
        self.output = nn.Linear(84, num_classes)
        self.pool = nn.AvgPool2d(kernel_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 1, 32, 32) to (N, num_classes)."""
        x = self.pool(torch.tanh(self.c1(x)))
        x = self.pool(torch.tanh(self.c3(x)))
        x = torch.flatten(torch.tanh(self.c5(x)), 1)
        return self.output(torch.tanh(self.f6(x)))


def lenet5_epoch(network: Network, optimizer: SGD, *, mode: str, device: str) -> Epoch:
    """See `benchmarks.handwritten`."""
    weights = {name: torch.tensor(network.initializers[name]) for name in network.parameters}
    model = LeNet5(num_classes=len(weights["output.bias"]))
    model.load_state_dict(weights)
    memory_format = torch.channels_last if mode == "channels_last" else torch.contiguous_format
    model = model.to(device, memory_format=memory_format).train()
    criterion = nn.CrossEntropyLoss()
    sgd = native_sgd(model, optimizer, fused=mode != "stock")
    forward: Callable[..., torch.Tensor] | None = None

    def epoch(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        nonlocal forward
        losses = []
        for images, labels in batches:
            x = torch.from_numpy(images).to(device, memory_format=memory_format)
            forward = forward or called(model, mode, x)
            y = torch.from_numpy(labels).to(device)
            sgd.zero_grad(set_to_none=True)
            loss = criterion(forward(x), y)
            loss.backward()
            sgd.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    return epoch
