"""The processor's name, for frameworks that report none. Imports the standard library only."""

from __future__ import annotations

import platform


def processor_name() -> str:
    """Return the processor's model name, from /proc/cpuinfo if it is there."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
