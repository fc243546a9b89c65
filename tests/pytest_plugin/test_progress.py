"""What a run shows on a terminal while it measures, and how it estimates the time left."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from d5suite.pytest_plugin.estimate import TimeEstimate
from d5suite.pytest_plugin.live import clock, left
from tests.conftest import Run, plugin_environment

CHOSEN = ("--backend", "faulty,onnxruntime", "-k", "inference")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _on_terminal(folder: Path, *arguments: str, columns: int = 80) -> str:
    """Run pytest on a pseudo-terminal; return everything that it writes there."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=plugin_environment() | {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"},
        stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    written = b""
    try:
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            written += part
    finally:
        assert process.wait(300) == 0, written.decode()
        os.close(master)
    return written.decode()


def test_a_terminal_shows_what_runs_and_provisional_medians(recipe_folder: Path, imagenet_tree: Path) -> None:
    written = _on_terminal(recipe_folder, str(recipe_folder), *CHOSEN, "--imagenet", str(imagenet_tree))
    live, _, end = written.partition("= d5suite =")
    lines = [CODES.sub("", line).rstrip() for line in re.split(r"[\r\n]+", live)]
    running = [line for line in lines if re.search(r" \d+:\d\d(, about \d+ (s|min) left)?$", line)]
    # Which phases are seen depends on how fast the machine is.
    assert any(re.search(r"faulty \(1 of 2\): [a-z]+", line) for line in running)
    assert any("inference: 2 backends take turns, round " in line for line in running)
    assert any(" left" in line for line in running)
    headings = [
        place for place, line in enumerate(lines) if line.split() == ["proved,", "provisional", "ms", "inference"]
    ]
    first = [line.split() for line in lines[headings[0] + 1 : headings[0] + 3]]
    assert first[0][0] == "faulty" and first[0][1].startswith("~")  # proved; only its warm-up is known
    assert any(re.fullmatch(r"    onnxruntime +[\d.]+", line) for line in lines)  # after a round
    assert all(len(line) <= 80 for line in running)
    assert "provisional" not in end and "err/tol" in end  # they leave no trace below the table
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is there


@pytest.mark.slow
def test_a_pipe_gets_rows_at_the_end_only(run_pytest: Run, recipe_folder: Path) -> None:
    done = run_pytest(str(recipe_folder), *CHOSEN)
    assert done.returncode == 0, done.stdout
    assert "provisional" not in done.stdout + done.stderr and "\x1b" not in done.stdout
    assert re.search(r"\n  onnxruntime +inference +[\d.]+ ", done.stdout)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: time[0])
    return time


def test_the_time_left_follows_from_what_this_run_and_earlier_ones_took(now: list[float]) -> None:
    jobs = {("case", "a"): ["case/x"], ("case", "b"): ["case/x"]}
    known: dict[str, float] = {}

    def run(left: TimeEstimate) -> list[float]:
        found = [left.left_s()]
        for job in jobs:
            for phase, took in [("starting the framework", 4), ("preparing case/x", 1), ("taking peak memory", 1),
                                ("validating case/x", 20), ("measuring case/x", 1)]:  # fmt: skip
                left.begin(job, phase)
                now[0] += took
            found.append(left.left_s())
        left.begin(("case", ""), "turns at case/x")
        now[0] += 10
        for job in jobs:
            left.begin(job, "proving what was timed of case/x")
            now[0] += 2
        for job in jobs:
            left.end(job)
        return [*found, left.left_s()]

    guessed = run(TimeEstimate(jobs, known))
    assert guessed[0] == pytest.approx(2 * (6 + 3 + 9 + 1 + 1.5) + 5)
    assert guessed[1] == pytest.approx(4 + 2 + 20 + 1 + 2 * 1.5 + 5)  # the other backend is expected to take as long
    assert run(TimeEstimate(jobs, known))[0] == pytest.approx(2 * (4 + 2 + 20 + 1) + 10 + 2 + 2 - 0.5, abs=1)
    assert TimeEstimate(jobs, known, "another size").left_s() == guessed[0]


def test_durations_are_written_for_people() -> None:
    assert [clock(0), clock(61.9), clock(3600)] == ["0:00", "1:01", "60:00"]
    assert [left(0), left(-3), left(2), left(31), left(89), left(100)] == [
        "", "", ", about 5 s left", ", about 30 s left", ", about 90 s left", ", about 2 min left",
    ]  # fmt: skip
