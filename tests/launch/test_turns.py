"""Workers that break the turn protocol, exceed a limit, or compute when they must not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from d5suite.instruments.settings import ALONE, BESIDE
from d5suite.job import Job
from d5suite.launch.base import Launch, Limits
from d5suite.launch.turns import TurnWorker, run_beside
from tests.conftest import wait_until

LIAR = """#!{python}
import json, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[sys.argv.index("--turns") + 1]))
say = lambda text: channel.sendall(text.encode())
hear = lambda: json.loads(channel.makefile().readline())
{code}
"""
LIARS_JOB = Job({}, "cpu", "fp32", threads=1, seed=0, cases=[])
READY = 'say(json.dumps({"ready": "a/b"}) + "\\n"); hear()\n'
LIARS = {
    "say('no JSON\\n')": "broke the turn protocol: it says",
    "say('[]\\n')": "broke the turn protocol: it says",
    "say('{\"samples_s\": []}\\n')": "it is not ready, but says",
    "say('x' * (2 << 20))": "its message is too long",
    READY + 'say(\'{"samples_s": [1.0], "took_s": 1}\\n\')': "instead of 2 positive samples",
    READY + 'say(\'{"samples_s": [1.0, -1.0], "took_s": 1}\\n\')': "instead of 2 positive samples",
    READY + 'say(\'{"samples_s": [1.0, NaN], "took_s": 1}\\n\')': "instead of 2 positive samples",
    READY + "say('{\"samples_s\": [1.0, 2.0]}\\n')": "instead of 2 positive samples",
    READY + "channel.close(); time.sleep(600)": "did not finish within 3 s",
    READY + "time.sleep(600)": "did not finish within 3 s",
    READY + "sys.exit(7)": "exited with status 7",
    READY + "hoard = b'x' * (300 << 20); time.sleep(600)": "over its limit of 0.20 GiB",
}
"""Code of a worker that breaks the turn protocol, and the message about it."""

ASK = 'say(json.dumps({"asks": "HOW"}) + "\\n"); assert hear() == {"go": "HOW"}\n'
LIARS_BESIDE = {
    READY: "did not ask to be alone when it was measured, and says",
    ASK.replace("HOW", ALONE) + ASK.replace("HOW", BESIDE) + READY: "did not ask to be alone when it was measured",
    ASK.replace("HOW", ALONE) * 2: "it is not ready, but says",
    ASK.replace("HOW", "first"): "it is not ready, but says",
    "time.sleep(600)": "did not finish within 3 s",
    "hoard = b'x' * (300 << 20); time.sleep(600)": "over its limit of 0.20 GiB",
}
"""The same of a worker that may run beside others."""


@pytest.mark.parametrize("code", LIARS)
def test_a_worker_that_breaks_the_turn_protocol_is_killed(code: str, tmp_path: Path) -> None:
    python, job = tmp_path / "python", tmp_path / "liar.job.json"
    python.write_text(LIAR.format(python=sys.executable, code=code))
    python.chmod(0o755)
    job.write_text("{}")
    seconds = 3.0 if "within 3 s" in LIARS[code] else 60.0  # Python starts in less, on a busy machine too
    limits = Limits(seconds, (200 << 20) if "hoard" in code else sys.maxsize)
    worker = TurnWorker(LIARS_JOB, job, Launch(limits, str(python)))
    ready = worker.ready()
    if READY in code:
        assert ready == "a/b"
        ready = worker.take(2)  # type: ignore[assignment]
    assert ready is None
    outcome = worker.end()
    assert not outcome.ok and LIARS[code] in outcome.reason


def _until_it_waits(worker: TurnWorker) -> str | None:
    """Let a worker run however it asks, until it waits for its first turn or ends."""
    while (ready := worker.ready()) == "":
        if worker.asks:
            worker.let()
        else:
            run_beside([worker])
    return ready


def _python(folder: Path, code: str) -> str:
    """Write an interpreter that runs this code, whatever it is given."""
    python = folder / "python"
    python.write_text(LIAR.format(python=sys.executable, code=code))
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("code", LIARS_BESIDE)
def test_a_worker_that_measures_beside_others_is_killed(code: str, tmp_path: Path) -> None:
    job = tmp_path / "liar.job.json"
    job.write_text("{}")
    seconds = 3.0 if "within 3 s" in LIARS_BESIDE[code] else 60.0
    limits = Limits(seconds, (200 << 20) if "hoard" in code else sys.maxsize)
    worker = TurnWorker(LIARS_JOB, job, Launch(limits, _python(tmp_path, code)), beside=True)
    assert _until_it_waits(worker) is None
    outcome = worker.end()
    assert not outcome.ok and LIARS_BESIDE[code] in outcome.reason


def test_a_paused_worker_computes_nothing(tmp_path: Path) -> None:
    job, seen = tmp_path / "counting.job.json", tmp_path / "seen"
    job.write_text("{}")
    count = f"""with open({str(seen)!r}, "w") as file:
    while True:
        print(1, file=file, flush=True)
"""
    limits = Limits(60.0, sys.maxsize)
    worker = TurnWorker(LIARS_JOB, job, Launch(limits, _python(tmp_path, count)), beside=True)
    try:
        wait_until(lambda: worker.ready() == "" and seen.exists() and seen.stat().st_size > 0, "its first lines")
        worker.pause()
        before = seen.stat().st_size
        time.sleep(0.1)
        assert psutil.Process(worker.processes[0].pid).status() == psutil.STATUS_STOPPED
        assert seen.stat().st_size == before
        worker.resume()
        wait_until(lambda: seen.stat().st_size > before, "more lines")
    finally:
        assert not worker.end().ok


def test_a_worker_whose_threads_spin_after_their_turn_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d5suite.launch.turns.REST_S", 60.0)
    python, job, rested = tmp_path / "python", tmp_path / "spinner.job.json", tmp_path / "rested"
    code = f"""{READY}say('{{"samples_s": [1.0], "took_s": 1}}\\n')
end = time.monotonic() + 0.1
while time.monotonic() < end: pass
open({str(rested)!r}, "w").close()
time.sleep(600)
"""
    python.write_text(LIAR.format(python=sys.executable, code=code))
    python.chmod(0o755)
    job.write_text("{}")
    worker = TurnWorker(LIARS_JOB, job, Launch(Limits(60.0, sys.maxsize), str(python)))
    try:
        assert worker.ready() == "a/b" and worker.take(1) == [1.0]
        worker.rest()
        assert rested.exists()
    finally:
        worker.end()


def test_threads_that_spin_for_ever_are_stopped_between_turns(tmp_path: Path) -> None:
    """As with ``OMP_WAIT_POLICY=active``: they would take a core from every other worker."""
    python, job = tmp_path / "python", tmp_path / "spinner.job.json"
    answer = "say(json.dumps({'samples_s': [SAMPLE], 'took_s': 1}) + chr(10))\n"
    spin = "import threading\nthreading.Thread(target=lambda: sum(0 for _ in iter(int, 1)), daemon=True).start()\n"
    code = READY + spin + answer.replace("SAMPLE", "1.0") + "hear()\n" + answer.replace("SAMPLE", "2.0") + "hear()\n"
    python.write_text(LIAR.format(python=sys.executable, code=code))
    python.chmod(0o755)
    job.write_text("{}")
    worker = TurnWorker(LIARS_JOB, job, Launch(Limits(60.0, sys.maxsize), str(python)))
    try:
        assert worker.ready() == "a/b" and worker.take(1) == [1.0]
        worker.rest()
        process = psutil.Process(worker.processes[0].pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")
        assert worker.take(1) == [2.0]
    finally:
        worker.end()
    assert not psutil.pid_exists(process.pid)
