"""A single operator's workload: what does not fit into memory is refused before it is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from d5suite.errors import JobError
from d5suite.instruments.memory import MEMORY_LIMIT
from d5suite.network.operation import Operation
from d5suite.workloads.operator import require_memory

SCORES = Operation("Attention", dict.fromkeys("QKV", (1, 8, 200_000, 64)))


def test_what_lies_between_inputs_and_outputs_must_fit_into_memory() -> None:
    with pytest.raises(JobError, match=r"Q\[1, 8, 200000, 64\].* for intermediate values\), and .* are free"):
        require_memory(SCORES)


def test_a_size_beyond_the_job_s_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Operation("Relu", {"X": (1000, 1000)})
    require_memory(operation)
    monkeypatch.setenv(MEMORY_LIMIT, "10000000")
    with pytest.raises(JobError, match=r"needs 64,000,000 bytes .* free under the limit of --job-memory"):
        require_memory(operation)


def test_a_size_beyond_the_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-1, 90000'; echo '1, GPU-2, 7'; echo '2, GPU-3, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    operation = Operation("Relu", {"X": (1000, 1000)})
    for visible in ("0", "2", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        require_memory(operation, "cuda")
    for visible in ("1", "GPU-2,GPU-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        require_memory(operation, "cpu")
        with pytest.raises(JobError, match=r"and 7,340,032 are free in the GPU's memory"):
            require_memory(operation, "cuda")
