"""pytest that waits to be told: nothing but that is different."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
def test_right():
    pass

def test_wrong():
    assert 1 + 1 == 3
"""


@pytest.mark.parametrize("told", [True, False])
def test_it_runs_once_told_to_and_not_for_nobody(tmp_path: Path, told: bool) -> None:
    """Ctrl-C is for the process that tells it."""
    (tmp_path / "test_sums.py").write_text(TESTS)
    reads, writes = os.pipe()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "d5suite.pytest_plugin.preload", str(reads), "-p", "no:cacheprovider", "-q",
             "--junitxml=found.xml", "test_sums.py"],
            cwd=tmp_path, pass_fds=[reads], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(reads)
    process.send_signal(signal.SIGINT)
    if told:
        os.write(writes, b"\n")
    os.close(writes)
    said, _ = process.communicate(timeout=300)
    if told:
        assert process.returncode == 1 and "1 failed, 1 passed" in said and "Warning" not in said
    else:
        assert process.returncode == 0 and said == ""
    assert (tmp_path / "found.xml").exists() == told
