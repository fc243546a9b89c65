"""Workers that prove beside each other, as processes: nobody computes while one is measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from d5suite.job import Job
from d5suite.launch.base import Launch, Limits
from d5suite.launch.turns import TurnWorker
from d5suite.session.turns import TurnJob, TurnScheduler

NAMES = ("first", "second", "third")

WORKER = """#!{python}
import json, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[sys.argv.index("--turns") + 1]))
lines, times = channel.makefile("rw"), {{}}

def say(message):
    print(json.dumps(message), file=lines, flush=True)

def compute(phase, seconds):
    "Compute for so many seconds of the CPU, and note when."
    times[phase], end = [], time.process_time() + seconds
    while time.process_time() < end:
        times[phase].append(time.monotonic())
        until = time.process_time() + 1e-3
        while time.process_time() < until:
            pass

def ask(how):
    say({{"asks": how}})
    assert json.loads(lines.readline()) == {{"go": how}}

compute("import", 0.3)
ask("alone")
compute("prepare", 0.2)
ask("beside")
compute("prove", 1.0)
ask("alone")
compute("warm up", 0.1)
say({{"ready": "a/b"}})
while "end" not in (message := json.loads(lines.readline())):
    say({{"samples_s": [1.0] * message["take"], "took_s": 1.0}})
json.dump(times, open({times!r}, "w"))
"""
"""A worker that asks as it must, and notes when it computes."""

Times = Mapping[str, Mapping[str, list[float]]]


class Pairs(TurnScheduler):
    """Two prove at once; each takes one sample."""

    def may_prepare(self, name: str, proving: Collection[str]) -> bool:
        return len(proving) < 2

    def take(self, key: str, workers: Mapping[str, TurnWorker]) -> Mapping[str, str]:
        assert set(workers) == set(NAMES) and all(worker.take(1) == [1.0] for worker in workers.values())
        return {}


def run(folder: Path) -> Times:
    """Run three workers; by worker and phase, when it computed."""

    def job(name: str) -> TurnJob:
        python, path, times = folder / name, folder / f"{name}.job.json", folder / f"{name}.times"
        python.write_text(WORKER.format(python=sys.executable, times=str(times)))
        python.chmod(0o755)
        path.write_text("{}")
        nothing = Job({}, "cpu", "fp32", threads=1, seed=0, cases=[])
        worker = TurnWorker(nothing, path, Launch(Limits(300.0, sys.maxsize), str(python)), beside=True)
        with contextlib.closing(worker):
            while (key := worker.ready()) is not None:
                yield key, worker

    scheduler = Pairs(["a/b"])
    scheduler.run({name: job(name) for name in NAMES})
    assert not scheduler.errors
    return {name: json.loads((folder / f"{name}.times").read_text()) for name in NAMES}


def disturbed(times: Times) -> list[str]:
    """Return in which measured phases another worker computed."""
    found = []
    for one, other in itertools.permutations(NAMES, 2):
        for phase in ("prepare", "warm up"):
            start, *_, end = times[one][phase]
            if any(start < each < end for computed in times[other].values() for each in computed):
                found.append(f"{other} computed while {one} was to {phase}")
    return found


def test_nobody_computes_while_another_is_measured(tmp_path: Path) -> None:
    times = run(tmp_path)
    assert not disturbed(times)
    proofs = [times[name]["prove"] for name in NAMES]
    assert any(a[0] < b[0] < a[-1] or b[0] < a[0] < b[-1] for a, b in itertools.combinations(proofs, 2))  # at once
    for earlier, later in itertools.pairwise(NAMES):
        start, *_, end = times[earlier]["prove"]
        assert any(start < each < end for each in times[later]["import"])  # no core idles


def test_a_worker_that_is_not_stopped_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnWorker, "pause", lambda self: None)
    assert disturbed(run(tmp_path))
