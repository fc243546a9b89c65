"""PyTorch's runtime."""

from d5suite.backends.torch.runtime import (
    configure,
    device_memory,
    device_name,
    device_problem,
    event_timer,
    l2_flush,
    versions,
)

__all__ = ["configure", "device_memory", "device_name", "device_problem", "event_timer", "l2_flush", "versions"]
