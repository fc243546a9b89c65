"""Results with planted layer times, rates and conditions, for readers that explain."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests.report.pages import content, record, settle, write

GRAPH = {
    "conv1": {
        "op_type": "Conv", "stage": "stem", "shape": [4, 8, 16, 16], "flops": 1_000_000_000,
        "backward_flops": 2_000_000_000, "bytes": 40_000_000, "backward_bytes": 80_000_000,
    },
    "bn1": {
        "op_type": "BatchNormalization", "stage": "stem", "shape": [4, 8, 16, 16], "flops": 1_000_000,
        "backward_flops": None, "bytes": 200_000_000, "backward_bytes": None,
    },
    "flatten": {
        "op_type": "Flatten", "stage": "head", "shape": [4, 8], "flops": None, "backward_flops": None, "bytes": None,
        "backward_bytes": None,
    },
}  # fmt: skip
"""A convolution of 25 FLOP per byte, a normalization that only moves, and a view."""


def layers(step_s: float = 0.1, *, conv: float = 0.61, bn: float = 0.22, optimizer: float = 0.1) -> dict[str, Any]:
    """Layer times of a training step with these parts in its operators and optimizer."""
    times = [
        {"nodes": ["conv1"], "direction": "forward", "seconds": conv * step_s / 3, "calls": 1},
        {"nodes": ["conv1"], "direction": "backward", "seconds": conv * step_s * 2 / 3, "calls": 1},
        {"nodes": ["bn1"], "direction": "forward", "seconds": bn * step_s, "calls": 1},
    ]
    return {
        "times": times,
        "graph": copy.deepcopy(GRAPH),
        "other": {"optimizer": optimizer * step_s},
        "steps": 3,
        "step_s": step_s,
        "plain_step_s": step_s,
        "slowdown": 1.0,
        "coverage": conv + bn,
        "left_over_s": (1 - conv - bn - optimizer) * step_s,
        "dropped": 0,
        "method": "planted",
        "notes": [],
    }


def bench(
    measurement: str = "training_step", *, threads: int = 1, batch: int = 4, step_s: float = 0.1,
    backend: str = "torch", part: dict[str, Any] | None = None, disturbed: str = "",
) -> dict[str, Any]:  # fmt: skip
    """One sound result of that many threads and images, with these layer times."""
    found = next(
        each
        for each in content()["benchmarks"]
        if each["group"] == f"imagenet_resnet50/{measurement}" and each["param"] == backend
    )
    found = copy.deepcopy(found)
    found["param"] = f"{backend}@threads={threads}+batch-size={batch}"
    found["fullname"] = f"test_planted.py::test[{measurement}-{found['param']}]"
    info = record(found)
    info |= {"threads": threads, "batch_size": batch}
    info["machine"] |= {"disturbed": bool(disturbed), "reasons": [disturbed] if disturbed else []}
    info["throughput"]["value"] = batch / step_s
    info.pop("layers", None)
    info.pop("turns", None)  # the rounds of other samples
    if part is not None:
        info["layers"] = part
    settle(found, [0.99 * step_s, step_s, 1.01 * step_s])
    return found


def result(path: Path, *benches: dict[str, Any]) -> Path:
    """Write a result file."""
    return write(path, content() | {"benchmarks": list(benches)})


def machine(path: Path, *, flops: float = 100e9, memory: float = 10e9, cache: float = 50e9, **host: Any) -> Path:
    """Write a machine file of the machine that made the results, for 1, 2 and 4 threads."""
    facts = record(content()["benchmarks"][0])["environment"]["cpu"]
    ceilings: list[dict[str, Any]] = []
    for threads in (1, 2, 4):
        facts_of = {"threads": threads, "device": "cpu", "source": "planted", "agrees": True}
        ceilings += [
            {"what": "flops", "precision": "fp32", "value": threads * flops, **facts_of},
            {"what": "bandwidth", "level": "L3", "capacity_bytes": 100_000_000, "value": cache, **facts_of},
            {"what": "bandwidth", "level": "memory", "capacity_bytes": 0, "value": memory, **facts_of},
        ]
    known = {"cpu": facts["model"], "cpus": facts["logical_cores"]} | host
    return write(path, {"schema": "d5suite-machine-1", "name": "planted", "host": known, "ceilings": ceilings})
