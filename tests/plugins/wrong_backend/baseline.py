"""PyTorch's hand-written code, for the cost of neutrality."""

from d5suite.backends.torch.baseline import resnet50_training_step

__all__ = ["resnet50_training_step"]
