"""``d5suite history`` and ``compare --history``: what is kept of many runs, and what they say."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.report.history import read
from d5suite.report.history_verdicts import compare_with_history
from d5suite.report.runs import Failed, read_run
from d5suite.report.thresholds import Thresholds
from tests.report.test_verdicts import asv, name_of, plain, record, reference, result, slow_down, wide, write

__all__ = ["reference", "result", "wide"]  # fixtures


def run_of(path: Path, day: int, medians: dict[str, float], *, cores: int = 2) -> Path:
    content = plain(medians, cores=cores) | {"datetime": f"2026-{1 + day // 28:02}-{1 + day % 28:02}T03:00:00+00:00"}
    for bench, median in zip(content["benchmarks"], medians.values(), strict=True):
        bench["stats"]["data"] = [median] * 5
    return write(path, content)


def keep(folder: Path, *results: Path, code: int = 0) -> None:
    assert main(["history", "add", str(folder), *map(str, results)]) == code


@pytest.fixture
def history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Twenty runs of two benchmarks that vary by 1%."""
    noise = random.Random(0)
    for day in range(20):
        figures = {name: median * noise.lognormvariate(0, 0.01) for name, median in (("a", 1e-3), ("b", 2.0))}
        keep(tmp_path / "history", run_of(tmp_path / "run.json", day, figures))
    capsys.readouterr()
    return tmp_path / "history"


def judged(capsys: pytest.CaptureFixture[str], history: Path, new: Path, *options: str, code: int) -> dict[str, Any]:
    assert main(["compare", str(new), "--history", str(history), "--json", "-", *options]) == code
    found = json.loads(capsys.readouterr().out)
    return {each["name"]: each for each in found["benchmarks"]}


def test_a_run_is_held_to_how_much_runs_vary(history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.json"
    found = judged(capsys, history, run_of(new, 20, {"a": 1.005e-3, "b": 2.0}), code=0)
    assert {each["verdict"] for each in found.values()} == {"same"}
    found = judged(capsys, history, run_of(new, 20, {"a": 1.1e-3, "b": 1.8}), code=6)
    assert {each["verdict"] for each in found.values()} == {"uncertain"}
    low, high = found["test_x.py::a"]["interval"]
    assert 1.05 < low < 1.1 < high < 1.15
    keep(history, new)
    capsys.readouterr()
    found = judged(capsys, history, run_of(new, 21, {"a": 1.11e-3, "b": 1.79}), code=1)
    assert [each["verdict"] for each in found.values()] == ["slower", "faster"]
    assert found["test_x.py::a"]["reasons"][1:] == ["than 21 runs since 2026-01-01"]


def test_a_run_that_is_in_the_history_is_judged_by_the_others(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = run_of(tmp_path / "new.json", 20, {"a": 1.1e-3, "b": 2.0})
    before = judged(capsys, history, new, code=6)
    keep(history, new)
    capsys.readouterr()
    assert judged(capsys, history, new, code=6) == before
    main(["compare", str(new), "--history", str(history)])
    assert "the history holds this run; it is judged by the others" in capsys.readouterr().out


def test_a_run_out_of_its_time_is_told(history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.json"
    for date, words, said in (
        ("0001-01-01T00:00:00+14:00", ["history", "add", str(history), str(new)], "its date is 0001-01-01"),
        ("9999-12-31T23:59:59-14:00", ["compare", str(new), "--history", str(history)], "its date is 9999-12-31"),
        ("2999-01-01T00:00:00", ["history", "add", str(history), str(new)], "lies in the future"),
    ):
        write(new, plain({"a": 1e-3, "b": 2.0}) | {"datetime": date})
        assert main(words) == 2
        assert said in capsys.readouterr().err
    write(new, plain({"a": 1e-3, "b": 2.0}) | {"datetime": "2019-01-01T00:00:00"})
    assert main(["compare", str(new), "--history", str(history)]) == 0
    told = "this run, of 2019-01-01T00:00:00+00:00, is older than the history's latest, of 2026-01-20T03:00:00+00:00"
    assert told in capsys.readouterr().out


def test_a_benchmark_that_is_missing_new_or_from_another_machine_is_told(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = run_of(tmp_path / "new.json", 20, {"a": 1e-3, "c": 1.0})
    found = judged(capsys, history, new, code=4)
    assert {name[-1]: each["verdict"] for name, each in found.items()} == {"a": "same", "b": "missing", "c": "new"}
    judged(capsys, history, run_of(new, 20, {"a": 1e-3, "b": 2.0}, cores=4), code=5)
    judged(capsys, history, new, "--force", code=0)


def test_what_is_gone_is_missing_on_the_next_nights_too(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A night whose failures were told must not become what the next one is held to."""
    new = tmp_path / "new.json"
    found = judged(capsys, history, run_of(new, 20, {"c": 1.0}), code=4)  # none is left
    assert sorted(each["verdict"] for each in found.values()) == ["missing", "missing", "new"]
    for day in range(20, 23):
        run_of(new, day, {"a": 1e-3, "c": 1.0})
        found = judged(capsys, history, new, code=4)
        assert found["test_x.py::b"]["verdict"] == "missing"
        keep(history, new)
        capsys.readouterr()
    assert main(["history", "retire", str(history), "*::b"]) == 0
    assert capsys.readouterr().out == "retired: test_x.py::b\n"
    run_of(new, 23, {"a": 1e-3, "c": 1.0})
    assert "test_x.py::b" not in judged(capsys, history, new, code=0)
    assert main(["history", "retire", str(history), "nothing*"]) == 2
    assert "no benchmark's name fits 'nothing*'" in capsys.readouterr().err


def test_what_failed_in_every_run_is_missing(history: Path, tmp_path: Path) -> None:
    new = read_run(run_of(tmp_path / "new.json", 20, {"a": 1e-3, "b": 2.0}))
    new.failed["other torch"] = Failed(False, "died of SIGSEGV")
    found = compare_with_history(history, new, Thresholds())
    assert found.exit == 4
    assert found.verdicts[-1].reasons == ["it failed: died of SIGSEGV"]


def test_few_runs_decide_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in range(2):
        keep(tmp_path / "history", run_of(tmp_path / "run.json", day, {"a": 1.0}))
    capsys.readouterr()
    found = judged(capsys, tmp_path / "history", run_of(tmp_path / "new.json", 3, {"a": 5.0}), code=6)
    assert found["test_x.py::a"]["reasons"] == ["only 2 runs since 2026-01-01 to compare with; 3 are needed"]


def test_a_step_is_dated_to_its_run_and_later_runs_are_held_to_the_new_level(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = random.Random(1)
    for day in range(20, 32):
        figures = {"a": 1.2e-3 * noise.lognormvariate(0, 0.01), "b": 2.0 * noise.lognormvariate(0, 0.01)}
        keep(history, run_of(tmp_path / "run.json", day, figures))
    capsys.readouterr()
    assert main(["history", "show", str(history)]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "test_x" in line}
    assert "×1.19 since 2026-01-21 (2026-01-21T030000-" in rows["test_x.py::a"]
    assert "since" not in rows["test_x.py::b"]
    new = tmp_path / "new.json"
    found = judged(capsys, history, run_of(new, 40, {"a": 1.2e-3, "b": 2.0}), code=0)
    assert found["test_x.py::a"]["base"]["samples"] == 12


def test_a_slow_drift_is_an_alarm_though_no_run_stands_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise, alarms = random.Random(2), []
    for day in range(48):
        new = run_of(tmp_path / "new.json", day, {"a": 1.004**day * noise.lognormvariate(0, 0.02)})
        if day > 7 and main(["compare", str(new), "--history", str(tmp_path / "history"), "--json", "-"]) == 1:
            (found,) = json.loads(capsys.readouterr().out)["benchmarks"]
            alarms.append(found["reasons"][-1])
        keep(tmp_path / "history", new)
        capsys.readouterr()
    assert 1 <= len(alarms) <= 8 and any("times as long since 2026-" in each for each in alarms)


def test_many_runs_of_one_level_hardly_ever_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise, alarms = random.Random(3), 0
    for day in range(50):
        figures = {name: noise.lognormvariate(0, 0.03) for name in "abc"}
        new = run_of(tmp_path / "new.json", day, figures)
        if day > 2:
            alarms += main(["compare", str(new), "--history", str(tmp_path / "history"), "--json", "-"]) == 1
        keep(tmp_path / "history", new)
        capsys.readouterr()
    assert alarms == 0


def test_what_is_wrong_failed_or_disturbed_is_not_kept(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, new = tmp_path / "history", tmp_path / "new.json"
    record(result)["machine"] = {"disturbed": True, "reasons": ["steal 20%"]}
    check = record(result, 1)["validation"]["checks"][0]
    check["error"] = 2 * check["tolerance"]
    result["d5suite"]["failures"] = [{"group": "x/y", "backend": "jax", "wrong": False, "message": "died\nlog"}]
    keep(folder, write(new, result), code=3)
    said = capsys.readouterr().out
    assert "2 benchmarks kept" in said
    for reason in ("disturbed: steal 20%", "its answer was wrong: ", "x/y jax: it failed: died\n"):
        assert reason in said
    (kept,) = folder.glob("*.json")
    assert len(json.loads(kept.read_text())["benchmarks"]) == 2
    for number in range(4):
        record(result, number)["machine"] = {"disturbed": True, "reasons": ["steal 20%"]}
    check["error"] = 0.0
    record(result, 1)["machine"] = {"disturbed": False, "reasons": []}
    record(result, 1)["warnings"] = ["the machine was not quiet after 300 s of --wait-quiet: load 3.1"]
    record(result, 2)["machine"] = {"disturbed": False, "reasons": []}
    record(result, 2)["warnings"] = ["node b is slow: its ranks compute 1.30 times as long as its peers'"]
    keep(folder, write(new, result), code=6)
    said = capsys.readouterr().out
    assert "disturbed: the machine was not quiet" in said and "disturbed: node b is slow" in said
    record(result, 1)["warnings"] = ["more threads than CPUs"]
    assert list(folder.glob("*.json")) == [kept]
    keep(tmp_path / "other", write(new, result))
    assert f"note: {name_of(result, 1)}: more threads than CPUs" in capsys.readouterr().out


def test_a_result_is_kept_once_and_is_the_same_in_the_history(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, new = tmp_path / "history", write(tmp_path / "new.json", result)
    keep(folder, new)
    keep(folder, new)
    assert "were kept before" in capsys.readouterr().out and len(list(folder.glob("*"))) == 1
    for number in range(3):
        slow_down(result, 1.001, 0)
        result["datetime"] = f"2026-01-0{number + 1}T00:00:00"
        keep(folder, write(new, result))
    capsys.readouterr()
    assert {each["verdict"] for each in judged(capsys, folder, new, code=0).values()} == {"same"}
    record(result)["peak_memory_bytes"] *= 2
    assert judged(capsys, folder, write(new, result), code=1)


def test_memory_that_grew_is_dated_told_and_then_the_level(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, new = tmp_path / "history", tmp_path / "new.json"
    own = record(result)
    before, codes = own["peak_memory_bytes"] or 1 << 30, []
    for day in range(20):
        own["peak_memory_bytes"] = (before if day < 10 else 2 * before) + day * 4096
        result["datetime"] = f"2026-02-{day + 1:02}T00:00:00"
        write(new, result)
        if day:
            codes.append(main(["compare", str(new), "--history", str(folder), "--json", str(tmp_path / "told.json")]))
            told = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
            reasons = next(each["reasons"] for each in told if each["name"] == name_of(result, 0))
            if day == 12:
                assert any("peak memory grew by 100%" in each and "since 2026-02-11 (" in each for each in reasons)
        keep(folder, new)
    assert set(codes[3:9]) == {0} and codes[9:12] == [1, 1, 1] and set(codes[-3:]) == {0}
    capsys.readouterr()
    assert main(["history", "show", str(folder), "-k", name_of(result, 0)]) == 0
    assert "memory ×2.00 since 2026-02-11" in capsys.readouterr().out.replace("\n", " ")


def test_runs_of_asv_stand_in_the_order_of_their_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, new = tmp_path / "history", tmp_path / "new.json"
    for day in (3, 1, 2):
        date = 1_700_000_000_000 + day * 86_400_000
        content = json.loads(asv({"b.time_x": [[float(day)], [], "v"]})) | {"date": date}
        keep(folder, write(new, content))
        os.utime(new, (1_600_000_000, 1_600_000_000))
        keep(folder, new)
    assert capsys.readouterr().out.count("were kept before") == 3
    (points,) = read(folder).values()
    assert [(each.date[:10], each.entry.summary.median) for each in points] == [
        ("2023-11-15", 1.0), ("2023-11-16", 2.0), ("2023-11-17", 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a run of a history"),
        ('{"schema": "d5suite-history-1", "benchmarks": [{"name": "a", "median": -1}]}', "is not a positive number"),
        ('{"schema": "d5suite-history-1", "benchmarks": [{"name": "a", "median": 1, "error": "x"}]}', "error is 'x'"),
        ('{"schema": "d5suite-history-1", "benchmarks": [{"name": "a", "median": 1, "facts": [1]}]}', "is not a table"),
        ('{"schema": "d5suite-history-1", "benchmarks": [3]}', "this benchmark has no name"),
    ],
)
def test_a_bad_file_in_the_folder_is_one_error(
    history: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (history / "2026-09-09.json").write_text(content)
    assert main(["history", "show", str(history)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert said in line and "2026-09-09.json" in line


def test_what_makes_no_sense_is_one_error(history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = str(run_of(tmp_path / "new.json", 20, {"a": 1.0}))
    for words, said in (
        (["compare", new, new, "--history", str(history)], "--history is for one file"),
        (["compare", new, "--history", str(history), "--between-runs", "0.1"], "--history is for one file"),
        (["compare", new, "--history", str(tmp_path / "none")], "there is no such folder"),
        (["history", "show", str(history), "-k", "zzz"], "no benchmark's name fits 'zzz'"),
        (["history", "add", new, new], "the run cannot be kept"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_a_name_with_brackets_retires_that_benchmark_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "history"
    keep(folder, run_of(tmp_path / "x.json", 1, {"a[10-x]": 1.0, "a1": 1.0}))
    capsys.readouterr()
    for words in (["show", str(folder), "-k", "test_x.py::a[10-x]"], ["retire", str(folder), "test_x.py::a[10-x]"]):
        assert main(["history", *words]) == 0
        shown = capsys.readouterr().out
        assert "test_x.py::a[10-x]" in shown and "test_x.py::a1" not in shown
