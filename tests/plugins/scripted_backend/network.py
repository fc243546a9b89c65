"""PyTorch's executor, on the CPU."""

from d5suite.backends.torch import network as right
from d5suite.network import Network


class Executor(right.Executor):
    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device="cpu", precision=precision)
