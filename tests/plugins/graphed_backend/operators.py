"""PyTorch's operators."""

from d5suite.backends.torch.operators import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator"]
