"""Workers that break the turn protocol, exceed a limit in their turn, or spin after it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from d5suite.job import Job
from d5suite.launch.base import Launch, Limits
from d5suite.launch.turns import TurnWorker

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
