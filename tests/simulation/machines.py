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
