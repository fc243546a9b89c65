"""A machine file, written by hand."""

from __future__ import annotations

import json
from pathlib import Path


def machine(path: Path, *, alpha: float = 3e-5, beta: float = 1e-9) -> Path:
    link = {"what": "transport", "transport": "gloo", "alpha_s": alpha, "beta_s_per_byte": beta, "source": "by hand"}
    flops = {"what": "flops", "precision": "fp32", "value": 1e11, "source": "by hand"}
    memory = {"what": "bandwidth", "level": "memory", "capacity_bytes": 0, "value": 1e10, "source": "by hand"}
    path.write_text(json.dumps({"schema": "d5suite-machine-1", "name": "by hand", "ceilings": [link, flops, memory]}))
    return path


def shared(path: Path, *, counts: tuple[int, ...] = (1, 2)) -> Path:
    """Write a machine whose second thread gains 60% in arithmetic, 100% in a cache, 25% in memory.

    The cache of two threads is as large as that of one.
    """
    machine(path)
    content = json.loads(path.read_text())
    content["ceilings"] = [each for each in content["ceilings"] if each["what"] == "transport"]
    for threads in counts:
        for what, value, gain, more in (
            ("flops", 1e11, 0.6, {"precision": "fp32"}),
            ("bandwidth", 4e10, 1.0, {"level": "L3", "capacity_bytes": 10**6}),
            ("bandwidth", 1e10, 0.25, {"level": "memory", "capacity_bytes": 0}),
        ):
            figures = {"value": value * (1 + gain * (threads - 1)), "threads": threads, "source": "by hand"}
            content["ceilings"].append({"what": what, **figures, **more})
    path.write_text(json.dumps(content))
    return path
