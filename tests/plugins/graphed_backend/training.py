"""PyTorch's trainer."""

from d5suite.backends.torch.training import Trainer

__all__ = ["Trainer"]
