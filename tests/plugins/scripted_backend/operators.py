"""PyTorch's operators, on the CPU."""

from d5suite.backends.torch import operators as right
from d5suite.backends.torch.operators import OPERATORS
from d5suite.network.operation import Operation

__all__ = ["OPERATORS", "Operator"]


class Operator(right.Operator):
    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device="cpu")
