"""The right runtime, with a seed and a number of threads that can be wrong."""

import os
import sys

import torch

from d5suite.backends.torch import runtime
from d5suite.backends.torch.runtime import device_memory, device_name, device_problem, event_timer, l2_flush, versions

__all__ = ["configure", "device_memory", "device_name", "device_problem", "event_timer", "l2_flush", "versions"]


def configure(*, threads: int, seed: int, device: str) -> None:
    runtime.configure(threads=threads, seed=seed, device=device)
    modes = " ".join(sys.argv)
    if "wrong:threads" in modes:
        torch.set_num_threads(2 * threads)
    if "wrong:seedless" in modes:
        torch.manual_seed(int.from_bytes(os.urandom(4), "big"))


if "wrong:eventless" in " ".join(sys.argv):
    del event_timer
    __all__.remove("event_timer")
