"""``d5suite compare``, ``ab`` and ``history`` lose no failure: what was wrong, what failed in both
runs, and files in which everything failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as XML

import jsonschema
import pytest

from d5suite.cli import main
from d5suite.report.comparison_formats import to_junit
from d5suite.report.pair_verdicts import Paired, compare_pairs
from d5suite.report.runs import Entry, Failed
from d5suite.report.schema import result_schema
from d5suite.report.thresholds import Thresholds
from d5suite.report.verdicts import summary
from d5suite.statistics.medians import summarize
from tests.report.test_history import judged, keep
from tests.report.test_verdicts import (
    QUIET,
    asv,
    base,
    compared,
    name_of,
    plain,
    record,
    reference,
    result,
    wide,
    write,
)

__all__ = ["base", "reference", "result", "wide"]  # fixtures


def failure(name: str, *, wrong: bool = False) -> dict[str, Any]:
    group, _, backend = name.rpartition(" ")
    return {"group": group, "backend": backend, "wrong": wrong, "message": "it broke\nlog"}


def make_wrong(result: dict[str, Any], number: int) -> None:
    check = record(result, number)["validation"]["checks"][0]
    check["error"] = 2 * check["tolerance"]


def without_time(result: dict[str, Any], *, wrong: bool = False) -> dict[str, Any]:
    """A file in which everything failed."""
    failures = [failure(name_of(result, n), wrong=wrong and not n) for n in range(len(result["benchmarks"]))]
    return {**result, "benchmarks": [], "d5suite": {"schema": "d5suite-1", "failures": failures}}


# Failed in both


def test_what_failed_in_both_runs_is_noted(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name_of(result, 0)
    del result["benchmarks"][0]
    result["d5suite"]["failures"] = [failure(name)]
    both = write(tmp_path / "both.json", result)
    assert main(["compare", str(both), str(both), *QUIET]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"note: failed in both: {name}: it broke 3 same (exit 0)" in text


def test_a_comparison_that_judged_nothing_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = [None] * 10
    failed = write(tmp_path / "a.json", asv({"b.time_x": [[None], [], "v", *empty], "b.time_y": [None]}))
    junit = tmp_path / "out.xml"
    assert main(["compare", str(failed), str(failed), "--junit", str(junit)]) == 6
    text = " ".join(capsys.readouterr().out.split())
    assert "failed in both: b.time_x: asv could not run it failed in both: b.time_y" in text
    assert text.endswith("no benchmark was judged (exit 6)")
    suite = XML.fromstring(junit.read_bytes())  # noqa: S314  ours
    assert (suite.get("tests"), suite.get("skipped")) == ("1", "1")
    assert "failed in both: b.time_x" in suite[0][0].attrib["message"]


def test_benchmarks_that_are_all_new_are_not_judged(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json", without_time(result))
    found = compared(capsys, old, base, code=6)
    assert {each["verdict"] for each in found.values()} == {"new"} and len(found) == 4


# Wrong answers need no base


def test_a_wrong_answer_is_told_though_the_runs_cannot_be_compared(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        record(result, number)["threads"] = 7
    make_wrong(result, 0)
    result["d5suite"]["failures"] = [failure("other/inference jax", wrong=True)]
    new, junit = write(tmp_path / "new.json", result), tmp_path / "out.xml"
    found = compared(capsys, base, new, *QUIET, "--junit", str(junit), code=3)
    assert {name: each["verdict"] for name, each in found.items()} == {
        name_of(result, 0): "invalid", "other/inference jax": "invalid",
    }  # fmt: skip
    assert XML.fromstring(junit.read_bytes()).get("errors") == "3"  # noqa: S314  with the difference; ours
    assert main(["compare", str(base), str(new)]) == 3
    assert "2 invalid, not comparable: threads: 2 ≠ 7 (exit 3)" in " ".join(capsys.readouterr().out.split())


def test_a_wrong_answer_is_told_though_a_history_is_of_another_machine(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path / "history", base)
    capsys.readouterr()
    for number in range(4):
        record(result, number)["environment"]["cpu"]["model"] = "Other"
    make_wrong(result, 1)
    found = judged(capsys, tmp_path / "history", write(tmp_path / "new.json", result), code=3)
    assert {name: each["verdict"] for name, each in found.items()} == {name_of(result, 1): "invalid"}


def test_a_wrong_answer_of_a_side_is_told_though_the_sides_cannot_be_compared() -> None:
    summary_of_times = summarize([1.0, 1.1, 1.2])
    one, other = (Entry("a/x y", summary_of_times, {"threads": n}) for n in "27")
    wrong = Entry("b/x y", summary_of_times, {"threads": "7"}, wrong=["error 3 of 1 accepted"])
    sides = [Paired("a/x y", one, other), Paired("b/x y", one, wrong), Paired("c/x y", one, Failed(True, "wrong"))]
    found = compare_pairs(("here", "env:A=1"), sides, Thresholds())
    assert [each.name for each in found.verdicts] == ["b/x y", "c/x y"] and found.exit == 3
    assert summary(found) == "2 invalid, not comparable: threads: 2 ≠ 7"
    assert compare_pairs(("here", "env:A=1"), sides[:1], Thresholds()).exit == 5
    assert b'errors="3"' in to_junit(found)


def test_a_wrong_failure_counts_though_there_is_a_result_of_its_name(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name_of(result, 0)
    result["d5suite"]["failures"] = [failure(name), failure(name, wrong=True), failure(name)]
    new = write(tmp_path / "new.json", result)
    found = compared(capsys, base, new, *QUIET, code=3)
    assert {each: found[each]["verdict"] for each in found if found[each]["verdict"] != "same"} == {name: "invalid"}
    assert found[name]["reasons"] == ["it broke"]
    compared(capsys, new, new, *QUIET, code=3)
    folder = tmp_path / "history"
    keep(folder, new, code=3)
    assert f"{name}: its answer was wrong: it broke" in capsys.readouterr().out
    (kept,) = folder.glob("*.json")
    assert {each["name"] for each in json.loads(kept.read_text())["benchmarks"]} == set(found) - {name}


# Files in which everything failed


@pytest.mark.parametrize("wrong", [False, True])
def test_a_run_in_which_all_failed_is_compared(
    wrong: bool, base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = without_time(result, wrong=wrong)
    jsonschema.validate(content, result_schema())
    new = write(tmp_path / "new.json", content)
    found = compared(capsys, base, new, code=3 if wrong else 4)
    assert [each["verdict"] for each in found.values()] == ["invalid" if wrong else "missing"] + ["missing"] * 3
    assert {each["reasons"][0] for each in found.values()} == {"it failed: it broke"}
    assert compared(capsys, new, new, code=3 if wrong else 6).keys() == ({name_of(result, 0)} if wrong else set())
    folder = tmp_path / "history"
    keep(folder, new, code=3 if wrong else 6)
    assert "nothing kept" in capsys.readouterr().out and not folder.exists()
    keep(folder, base)
    capsys.readouterr()
    assert len(judged(capsys, folder, new, code=3 if wrong else 4)) == 4


def test_ordinary_benchmarks_beside_hide_no_failure(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a run of pytest in which all of d5suite's failed, and other benchmarks did not."""
    content = {**without_time(result), "benchmarks": plain({"a": 1e-3})["benchmarks"]}
    found = compared(capsys, write(tmp_path / "base.json", plain({"a": 1e-3})), write(tmp_path / "new.json", content),
                     "--force", *QUIET, code=4)  # fmt: skip
    assert [each["verdict"] for each in found.values()] == ["same"] + ["missing"] * 4


def test_tables_say_what_failed(result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = write(tmp_path / "alone.json", without_time(result, wrong=True))
    assert main(["compare", str(alone)]) == 0
    lines = capsys.readouterr().out.splitlines()
    group, _, backend = name_of(result, 0).rpartition(" ")
    assert lines[:2] == ["failed, without a result:", f"  {group}, {backend}: wrong answer: it broke"]
    assert len(lines) == 5 and all(line.endswith(": it broke") for line in lines[1:])
    result["d5suite"]["failures"] = [failure("\x1b[2Jx/y jax")]
    some = write(tmp_path / "some.json", result)
    assert main(["compare", str(some)]) == 0
    text = capsys.readouterr().out
    assert "imagenet_resnet50  (" in text
    assert text.endswith("failed, without a result:\n  \\x1b[2Jx/y, jax: it broke\n")
    assert main(["compare", "--tables", str(some), str(alone)]) == 0
    assert f"  (2) {group}, {backend}: wrong answer: it broke" in capsys.readouterr().out


@pytest.mark.parametrize("failures", [3, [3], [{"group": "a"}], [{**failure("a/b c"), "message": 3}]])
def test_failures_of_a_wrong_form_are_one_error(
    failures: Any, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = without_time(result)
    content["d5suite"]["failures"] = failures
    path = write(tmp_path / "x.json", content)
    for more in ((), (str(path),)):
        assert main(["compare", str(path), *more]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith(f"error: {path}: this does not fit results/schema.json")
