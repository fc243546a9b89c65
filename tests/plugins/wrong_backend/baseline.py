"""PyTorch's hand-written code, for the cost of neutrality."""

from d5suite.backends.torch.baseline import lenet5_epoch, operator_call, resnet50_training_step

__all__ = ["lenet5_epoch", "operator_call", "resnet50_training_step"]
