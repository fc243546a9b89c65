"""A made-up nvidia-ml-py: answers of the kinds and units that NVML documents, and its refusals.

No GPU gave them: they follow NVIDIA's reference and the source of nvidia-ml-py 13.615. Put this
folder on the path, or the module into ``sys.modules``.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {3: "Not Supported", 6: "Not Found", 9: "Driver Not Loaded", 15: "GPU is lost"}[self.value]


NOT_SUPPORTED, NOT_FOUND, NO_DRIVER, LOST = (NVMLError(number) for number in (3, 6, 9, 15))

GPU: dict[str, Any] = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": "GPU-11111111-2222-3333-4444-555555555555",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, used=3 * 2**30, free=77 * 2**30),
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 2619},
    "nvmlDeviceGetApplicationsClock": {1: 1980, 2: 2619},
    "nvmlDeviceGetClockInfo": {1: 1755, 2: 2619},
    "nvmlDeviceGetTemperature": {0: 41},
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceIsMigDeviceHandle": 0,
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": NOT_SUPPORTED,
    "nvmlDeviceGetTotalEnergyConsumption": lambda: round(300e3 * time.monotonic()),
    "nvmlDeviceGetPowerUsage": 300_000,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetComputeRunningProcesses": (
        [] if "FAKE_NVML_IDLE" in os.environ else [SimpleNamespace(pid=os.getpid(), usedGpuMemory=2 * 2**30)]
    ),
    "nvmlDeviceGetViolationStatus": {
        policy: SimpleNamespace(referenceTime=1_000_000, violationTime=2_000_000_000) for policy in (0, 1, 2, 3, 5)
    },
}
"""By function: an answer, by its argument if it takes one; an error to raise; or a callable."""

gpus: list[dict[str, Any]] = [dict(GPU)]
parts: dict[str, dict[str, Any]] = {}
"""Instances of divided GPUs, by UUID."""
system: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlSystemGetDriverVersion": "570.86.10",
    "nvmlSystemGetCudaDriverVersion_v2": 12080,
}


def nvmlDeviceGetCount() -> int:
    return len(gpus)


def nvmlDeviceGetHandleByIndex(number: int) -> dict[str, Any]:
    if isinstance(gpus[number].get("handle"), NVMLError):
        raise gpus[number]["handle"]
    return gpus[number]


def nvmlDeviceGetHandleByUUID(uuid: str) -> dict[str, Any]:
    if uuid not in parts:
        raise NOT_FOUND
    return parts[uuid]


def _answer(found: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(found, NVMLError):
        raise found
    if callable(found):
        return found(*arguments)
    return found[arguments[0]] if arguments else found


def __getattr__(name: str) -> Any:
    if name in system:
        return lambda *arguments: _answer(system[name], arguments)
    if name in GPU or any(name in gpu for gpu in gpus):
        return lambda gpu, *arguments: _answer(gpu.get(name, NOT_SUPPORTED), arguments)
    raise AttributeError(name)
