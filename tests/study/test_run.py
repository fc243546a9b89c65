"""A study runs part by part; interrupted at any time, it goes on where it was."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from d5suite.cli import main
from d5suite.commands.study import machine_here
from d5suite.errors import ConfigurationError
from d5suite.study.declaration import read_study
from d5suite.study.run import StudyProgress, measure, plan, words_of
from d5suite.study.state import COMMIT, MachineRuns, RunState, read_state, sha256_of

STUDY = """
title = "Small"
budget = "{budget}"
[[question]]
ask = "Which?"
parts = ["quick"]
[part.quick]
title = "Quick"
share = 0.5
cost = "20s"
recipes = ["test_quick.py"]
[part.slow]
title = "Slow"
share = 0.5
cost = "{cost}"
recipes = ["test_slow.py"]
"""

QUICK = "def test_quick(benchmark):\n    benchmark.pedantic(sum, args=([1],), rounds=2)\n"

SLOW = """import pathlib, time
def test_slow(benchmark):
    if not pathlib.Path("go").exists():
        pathlib.Path("began").touch()
        time.sleep(120)
    benchmark.pedantic(sum, args=([1],), rounds=2)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of pytest-xdist, pytest-benchmark saves nothing."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a study of two runs, of which one waits for a file."""
    (tmp_path / "test_quick.py").write_text(QUICK)
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "study.toml").write_text(STUDY.format(budget="10m", cost="20s"))
    return tmp_path


def started(place: Path, *options: str, background: bool = False) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "d5suite.cli", "study", "study.toml", "-o", "out", "--machine", "here", *options]
    env = os.environ | {"PATH": ""}  # no browser prints what nobody reads
    as_shells_do = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if background else None
    return subprocess.Popen(
        words, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=as_shells_do
    )


def until(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if path.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    assert path.exists()


def test_interrupted_within_a_run_and_resumed(place: Path) -> None:
    process = started(place)
    until(place / "began", process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "--resume" in said
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children)
    state = read_state(place / "out" / "raw" / "here")
    assert [(name, run.state) for name, run in state.runs.items()] == [("quick", "done"), ("slow", "half")]
    quick = state.result("quick").stat().st_mtime_ns

    again = started(place)
    _, complaint = again.communicate(timeout=300)
    assert again.returncode == 2
    assert "Go on with --resume" in complaint

    (place / "go").touch()
    process = started(place, "--resume")
    said, complaint = process.communicate(timeout=300)
    state = read_state(place / "out" / "raw" / "here")
    assert {run.state for run in state.runs.values()} == {"done"}
    assert state.result("quick").stat().st_mtime_ns == quick  # it is kept
    assert "slow done" in said
    assert "quick done" not in said
    assert not complaint.strip()  # in a pipe there is no line that changes


def test_interrupted_in_the_background_where_shells_ignore_ctrl_c(place: Path) -> None:
    process = started(place, "--only", "slow", background=True)
    until(place / "began", process)
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert read_state(place / "out" / "raw" / "here").runs["slow"].state == "half"


def test_killed_at_once_and_resumed(place: Path) -> None:
    process = started(place, "--only", "slow")
    until(place / "began", process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=300)
    assert not psutil.wait_procs(children, timeout=30)[1]  # its run ends, too
    assert read_state(place / "out" / "raw" / "here").runs["slow"].state == "half"
    (place / "go").touch()
    process = started(place, "--resume", "--only", "slow")
    process.communicate(timeout=300)
    assert read_state(place / "out" / "raw" / "here").runs["slow"].state == "done"


def test_the_budget_cuts_off_a_run_and_leaves_out_what_would_not_fit(place: Path) -> None:
    (place / "study.toml").write_text(STUDY.format(budget="6s", cost="4s").replace('cost = "20s"', 'cost = "1s"'))
    began = time.monotonic()
    process = started(place)
    said, _ = process.communicate(timeout=300)
    assert time.monotonic() - began < 50
    runs = read_state(place / "out" / "raw" / "here").runs
    assert runs["quick"].state in ("done", "half")
    assert runs["slow"].state in ("half", "left out")
    assert "budget" in runs["slow"].why
    assert process.returncode in (0, 1, 2)
    assert "slow" in said


def test_a_changed_command_or_result_is_run_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    study = read_study(place / "study.toml")
    state = read_state(place / "out" / "raw" / "here")
    first = plan(study, state)[0]
    state.folder.mkdir(parents=True)
    state.result("quick").write_text("{}")
    state.runs["quick"] = RunState(first.command, "quick", "done", seconds=7.0, sha256=sha256_of(state.result("quick")))
    state.save()
    kept = plan(study, read_state(state.folder))[0]
    assert (kept.kept, kept.seconds, kept.source) == (True, 7.0, "earlier run")
    state.result("quick").write_text('{"damaged": 1}')
    assert not plan(study, read_state(state.folder))[0].kept
    state.result("quick").write_text("{}")
    changed = (place / "study.toml").read_text().replace('"test_quick.py"]', '"test_quick.py"]\nseed = 1')
    (place / "study.toml").write_text(changed)
    again = plan(read_study(place / "study.toml"), read_state(state.folder))[0]
    assert (again.kept, again.source) == (False, "stated")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": "other", "runs": {}}', '{"format": "d5suite-study-1", "runs": {"quick": {}}}',
     '{"format": "d5suite-study-1", "runs": {"../x": {}}}'],
)  # fmt: skip
def test_a_damaged_state_is_one_clear_error(
    place: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    folder = place / "out" / "raw" / "here"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(content)
    assert main(["study", "study.toml", "--resume", "-o", "out", "--machine", "here"]) == 2
    said = capsys.readouterr().err
    assert "state.json" in said
    assert "Remove it" in said


def test_two_cannot_run_one_study_at_once(place: Path) -> None:
    process = started(place, "--only", "slow")
    until(place / "began", process)
    other = started(place, "--resume", "--only", "slow")
    _, complaint = other.communicate(timeout=300)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert other.returncode == 2
    assert "another process runs this study here" in complaint
    assert process.returncode == 130


def test_a_run_without_a_result_says_why(place: Path) -> None:
    (place / "test_slow.py").write_text("import no_such_module\n")
    process = started(place, "--only", "slow")
    process.communicate(timeout=300)
    run = json.loads((place / "out" / "raw" / "here" / "state.json").read_text())["runs"]["slow"]
    assert run["state"] == "failed"
    assert "no_such_module" in run["why"]


@pytest.fixture
def finished(place: Path, monkeypatch: pytest.MonkeyPatch) -> MachineRuns:
    """The state of a machine that has measured the quick part, by an older d5suite."""
    monkeypatch.chdir(place)
    state = MachineRuns(Path("out/raw/here"))
    state.folder.mkdir(parents=True)
    (place / "out" / "study.toml").write_text((place / "study.toml").read_text())
    state.result("quick").write_text('{"benchmarks": []}')
    state.runs["quick"] = RunState(
        plan(read_study(place / "study.toml"), state)[0].command, "quick", "done", seconds=0.5,
        sha256=sha256_of(state.result("quick")), made_on={**machine_here(), "host": "old"},
        made_with={COMMIT: "0123456789ab", "torch": "0.1"},
    )  # fmt: skip
    state.save()
    return state


def test_measured_again_the_earlier_result_stays_until_the_new_one_is_finished(
    finished: MachineRuns, place: Path
) -> None:
    (place / "test_quick.py").write_text(SLOW.replace("slow", "quick"))
    (finished.folder / "quick.h5").write_bytes(b"series of the earlier run")
    study, before = read_study(place / "study.toml"), finished.result("quick").read_bytes()

    def measured(*, again: bool, budget_s: float) -> MachineRuns:
        state = read_state(finished.folder)
        planned = plan(study, state, only="quick", again=again)
        assert not planned[0].kept
        told: list[StudyProgress] = []
        measure(study, state, planned, budget_s=budget_s, tell=told.append, made_on={}, made_with={COMMIT: "new"})
        assert told[-1].ended is not None
        return read_state(finished.folder)

    state = measured(again=True, budget_s=1.5)  # it waits for a file, and the budget ends
    assert state.result("quick").read_bytes() == before
    assert (state.runs["quick"].state, state.runs["quick"].again) == ("done", True)
    assert "this is the earlier result" in state.runs["quick"].why
    assert state.runs["quick"].made_with[COMMIT] == "0123456789ab"
    assert (state.folder / "quick.h5").exists()

    (place / "go").touch()
    state = measured(again=False, budget_s=60)  # as --resume does
    assert state.result("quick").read_bytes() != before
    assert (state.runs["quick"].state, state.runs["quick"].again) == ("done", False)
    assert state.runs["quick"].made_with == {COMMIT: "new"}
    assert state.is_kept("quick", state.runs["quick"].command)
    left = sorted(each.name for each in state.folder.iterdir())
    assert left == [".lock", "quick.json", "quick.log", "state.json"]  # nothing of the earlier run
    assert not (state.job_files / ".again").exists()
    assert ".again" not in (state.folder / "quick.log").read_text()  # paths are those of the new place


def test_what_has_changed_since_a_run_is_told_before_others_run(
    finished: MachineRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "study.toml", "--resume", "--plan", "-o", "out"]
    assert main([*words, "--machine", "here"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"quick +finished", said)
    assert re.search(r"commit was 0123456789ab for quick, and is .*; measure again: --again PART", said)
    assert re.search(r"host was old for quick, and is ", said)
    assert "CPU was" not in said
    assert main([*words[:-3], "--again", "slo", "--plan", "-o", "out", "--machine", "here"]) == 2
    assert "there is no part 'slo'" in capsys.readouterr().err


def test_another_machine_is_not_taken_for_the_one_that_measured(
    finished: MachineRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "study.toml", "--resume", "--plan", "-o", "out"]
    assert main(words) == 2  # this host is not called so
    said = capsys.readouterr().err
    assert "the results here are of here, and this host is called" in said
    assert "--machine here" in said
    finished.runs["quick"].made_on["CPU"] = "Another CPU"
    finished.save()
    assert main([*words, "--machine", "here"]) == 2
    assert "here was another machine when quick was measured: CPU was Another CPU" in capsys.readouterr().err
    assert main([*words, "--machine", "other"]) == 0


def test_a_run_that_reads_others_comes_last_and_again_after_them(finished: MachineRuns, place: Path) -> None:
    text = (place / "study.toml").read_text()
    reader = '\n[part.reader]\ntitle = "Reader"\nshare = 0.0001\ncost = "1s"\n'
    reader += 'command = ["crossover", "{raw}/quick.json", "--json", "{out}"]\n'
    text = text.replace("share = 0.5", "share = 0.4").replace("[part.quick]", reader + "[part.quick]")
    (place / "study.toml").write_text(text)
    study, state = read_study(place / "study.toml"), read_state(finished.folder)
    assert [run.name for run in study.runs] == ["quick", "slow", "reader"]
    command = plan(study, state)[2].command
    assert command == "d5suite crossover raw/here/quick.json --json raw/here/reader.json"
    state.result("reader").write_text("{}")
    quick = sha256_of(state.result("quick"))
    state.runs["reader"] = RunState(command, "reader", "done", sha256=sha256_of(state.result("reader")))
    state.runs["reader"].inputs = {"quick": quick}
    assert [each.kept for each in plan(study, state)] == [True, False, True]
    assert [each.kept for each in plan(study, state, again=True, only="quick")] == [False]
    state.runs["quick"].again = True
    assert [each.kept for each in plan(study, state)] == [False, False, False]
    state.runs["quick"].again = False
    packed = state.folder / "quick.json.gz"
    packed.write_bytes(gzip.compress(state.result("quick").read_bytes()))
    (state.folder / "quick.json").unlink()
    assert [each.kept for each in plan(study, state)] == [True, False, True]
    assert words_of(study.parts["reader"].runs[0], state, Path("out"))[2] == "out/raw/here/quick.json.gz"
    packed.write_bytes(gzip.compress(b"other"))
    assert [each.kept for each in plan(study, state)] == [False, False, False]
    (place / "study.toml").write_text(text.replace("{raw}/quick", "{raw}/quack"))
    with pytest.raises(ConfigurationError, match="reads the result of 'quack'"):
        read_study(place / "study.toml")
