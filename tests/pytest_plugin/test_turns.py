"""Backends of a recipe take turns, as a user runs it: what is recorded and shown, what a crash and
a wrong answer cost, and the options."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run

CHOSEN = ("-k", "inference", "--threads", "1", "--benchmark-json", "out.json")


def records(folder: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((folder / "out.json").read_text())
    return {each["param"]: {**each["extra_info"]["d5suite"], "data": each["stats"]["data"]}
            for each in content["benchmarks"]}  # fmt: skip


def test_backends_take_turns_and_a_crash_and_a_wrong_answer_cost_their_own(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path
) -> None:
    """One dies when it is timed; the answers of one were right before and are wrong afterwards."""
    backends = "faulty,faulty:segfault,stale:replay20,onnxruntime"
    done = run_pytest(str(recipe_folder), "--backend", backends, *CHOSEN)
    assert done.returncode == 1, done.stdout
    found = records(tmp_path)
    assert list(found) == ["faulty", "onnxruntime"]
    for name, other in (("faulty", "onnxruntime"), ("onnxruntime", "faulty")):
        (turns,) = found[name]["turns"]
        assert sum(turns["rounds"]) == len(found[name]["data"]) and len(turns["rounds"]) >= 6
        assert other in turns["beside"] and "faulty:segfault" not in turns["beside"]
    assert found["faulty"]["turns"][0]["group"] == found["onnxruntime"]["turns"][0]["group"]
    assert "× fastest: time divided by the fastest backend's" in done.stdout
    (failed,) = [each for each in done.stdout.splitlines() if "samples (median" in each][:1]
    assert "set aside" in failed
    missed = {each["backend"]: each["wrong"] for each in json.loads((tmp_path / "out.json").read_text())["d5suite"]
              ["failures"]}  # fmt: skip
    assert missed == {"faulty:segfault": False, "stale:replay20": True}


@pytest.mark.parametrize(
    ("backends", "options", "launches"),
    [
        pytest.param("faulty,onnxruntime", ["--one-by-one"], 0, marks=pytest.mark.slow),
        ("faulty", ["--launches", "2", "--benchmark-max-time=0", "--benchmark-min-rounds=3"], 2),
    ],
)
def test_options_switch_turns_off_and_set_launches(
    backends: str, options: list[str], launches: int, run_pytest: Run, recipe_folder: Path, tmp_path: Path
) -> None:
    done = run_pytest(str(recipe_folder), "--backend", backends, *CHOSEN, *options)
    assert done.returncode == 0, done.stdout
    for each in records(tmp_path).values():
        assert len(each.get("turns", ())) == launches
        assert not launches or (len(each["data"]) == 3 * launches and each["peak_memory_bytes"] > 0)


@pytest.mark.alone  # among other tests it cannot tell whose load it is
def test_a_machine_that_does_not_become_quiet_is_marked(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, spinning: None
) -> None:
    done = run_pytest(str(recipe_folder), "--backend", "faulty", *CHOSEN, "--wait-quiet=0")
    assert done.returncode == 0, done.stdout
    (found,) = records(tmp_path).values()
    (said,) = [each for each in found["warnings"] if "was not quiet after 0 s of --wait-quiet" in each]
    assert "other processes used" in said
    # and it was told before anything was measured, with what uses it
    told = done.stdout.partition("d5suite: the machine is busy: ")[2].splitlines()[0]
    assert "other processes used" in told and "python" in told
    named = done.stdout.partition("these processes use most of it: ")[2].splitlines()[0]
    assert named.split()[0].isdigit() and "python" in named
    assert done.stdout.index("the machine is busy") < done.stdout.index("images/s")


SPIN = """
import os
if not os.fork():
    os.setsid()
    os.nice(19)
    os.write(1, b"%d" % os.getpid())
    os.close(1)
    while True:
        pass
"""


@pytest.fixture
def spinning() -> Iterator[None]:
    """Processes that take what is left of every CPU, and are no relatives, which count as own."""
    pids = [
        int(subprocess.run([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(os.cpu_count() or 1)
    ]
    yield
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--one-by-one", "--launches", "2"], "--launches is for workers that take turns"),
        (["--launches", "0"], "--launches is 0; it must be at least 1"),
        (["--wait-quiet=-1"], "--wait-quiet is -1.0; it must be at least 0"),
        (["--wait-quiet", "recipes"], "'recipes' is not a number of seconds: write --wait-quiet=SECONDS"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_error(
    options: list[str], said: str, run_pytest: Run, recipe_folder: Path
) -> None:
    done = run_pytest(str(recipe_folder), "--backend", "faulty", *options)
    assert done.returncode == 4 and said in done.stderr
