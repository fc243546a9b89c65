"""PyTorch's runtime on the CPU, which plays a GPU with a clock and a memory of its own."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from d5suite.backends.torch import runtime as right
from d5suite.backends.torch.runtime import versions
from d5suite.levels import device as level

__all__ = ["configure", "device_memory", "device_name", "device_problem", "event_timer", "l2_flush", "versions"]

SPANS = {"agrees": 1.0, "short": 0.5, "hasty": 2.0, "backwards": -1.0}
"""By mode, after which the job file is named: how much of the host's time the events span."""


def configure(*, threads: int, seed: int, device: str) -> None:
    right.configure(threads=threads, seed=seed, device="cpu")


def device_problem(device: str) -> str | None:
    return None


def device_name(device: str) -> str:
    return "Scripted GPU"


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]]:
    return (lambda: None), (lambda: 1 << 20)


class EventTimer(level.EventTimer):
    def __init__(self) -> None:
        self._span = next((span for mode, span in SPANS.items() if mode in Path(sys.argv[-1]).name), 1.0)
        self._start = self._stop = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._stop = time.perf_counter()

    def milliseconds(self) -> float:
        return 1e3 * self._span * (self._stop - self._start)


def event_timer(device: str) -> EventTimer:
    return EventTimer()


class L2Flush(level.L2Flush):
    cache_bytes = 1 << 20

    def __call__(self) -> None:
        print("flushed")


def l2_flush(device: str) -> L2Flush:
    return L2Flush()
