"""``d5suite compare`` and ``history`` on numbers that overflow, names that a terminal obeys, and
names that stand twice: one clear error, and never the code of a regression."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as XML

import pytest

from d5suite.cli import main
from d5suite.report.history import SCHEMA
from d5suite.report.runs import read_run
from tests.report.test_history import judged, keep, run_of
from tests.report.test_verdicts import (
    asv,
    base,
    compared,
    name_of,
    plain,
    plain_of,
    record,
    reference,
    result,
    wide,
    write,
)

__all__ = ["base", "reference", "result", "wide"]  # fixtures

EVIL = "\x1b[2J\x1b]0;x\x07\x00\u202e"


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("words", [["compare", "{}", "{}"], ["compare", "{}"], ["history", "add", "h", "{}"]])
def test_what_nobody_foresaw_is_no_regression(
    words: list[str], base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError(f"odd{EVIL}")

    monkeypatch.setattr("d5suite.report.reading.check_pair", broken)
    assert main([str(base) if word == "{}" else word for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("Traceback (most recent call last):\n") and "ZeroDivisionError: odd\\x1b" in shown.err
    assert shown.out == "" and is_harmless(shown.err)


def timed(q_75: float, repeat: float = 10) -> str:
    return asv({"b.time_x": [[1.0], [], "v", 1, 1.0, None, None, [0.9], [q_75], [1], [repeat]]})


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "a huge spread": (lambda: plain_of({"median": 1e-3, "iqr": 1e300, "rounds": 5}), "quartiles 1e+300 apart"),
    "a large spread": (lambda: plain_of({"median": 1e-3, "iqr": 1e80, "rounds": 5}), "quartiles 1e+80 apart"),
    "asv's huge spread": (lambda: timed(1e300), "quartiles 1e+300 apart"),
    "a median that overflows": (lambda: plain_of({"data": [1.7e308, 1.7e308]}), "sample 1.7e+308 is larger than"),
    "asv's median that overflows": (
        lambda: asv({"b.time_x": [[1.0], [], "v", *[None] * 8, [[1.7e308] * 2]]}), "sample 1.7e+308 is larger than",
    ),
    "asv's equal parameters": (
        lambda: asv({"b.time_x": [[1.0] * 8, [["x"] * 8], "v"]}), "results.b.time_x: b.time_x(x) occurs twice",
    ),
    "asv's parameters of one text": (
        lambda: asv({"b.time_x": [[None] * 2, [["1", 1]], "v"]}), "results.b.time_x: b.time_x(1) occurs twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_error(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, said = BAD[kind]
    bad = write(tmp_path / "bad.json", make())
    for words in (["compare", str(bad), str(bad), "--json", "-"], ["history", "add", str(tmp_path / "h"), str(bad)]):
        assert main(words) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith(f"error: {bad}, ")
        assert said in shown.err and "Traceback" not in shown.err


def test_a_fraction_of_a_repetition_is_no_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.json", timed(1.1, repeat=1.5))
    assert compared(capsys, path, path, code=6)["b.time_x"]["base"]["samples"] == 1


def test_an_error_beyond_all_numbers_is_null_in_the_json(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(result)["validation"]["checks"][0].update(error=1e300, tolerance=1e-300)
    found = compared(capsys, base, write(tmp_path / "new.json", result), code=3)[name_of(result, 0)]
    assert (found["verdict"], found["new"]["error"]) == ("invalid", None)


def test_little_memory_of_asv_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sized(size: float) -> Path:
        return write(tmp_path / f"{size:g}.json", asv({"b.mem_x": [[size], [], "v"]}))

    for before, after, code in ((100, 111, 0), (1e9, 1.2e9, 1), (10 << 20, 20 << 20, 0)):
        verdict = compared(capsys, sized(before), sized(after), code=code)["b.mem_x"]["verdict"]
        assert verdict == ("slower" if code else "same")
        folder = tmp_path / f"history{before:g}"
        for number in range(4):
            keep(folder, write(tmp_path / "x.json", sized(before).read_text() + " " * number))
        capsys.readouterr()
        found = judged(capsys, folder, sized(after), code=code)["b.mem_x"]
        assert found["verdict"] == verdict and found["regressions"] == ["memory"] * code
        assert "as long" not in str(found["reasons"])


# Histories


def history_file(**fields: Any) -> str:
    return json.dumps({"schema": SCHEMA, "date": "2026-01-01T00:00:00+00:00", "benchmarks": []} | fields)


BAD_RUNS = {
    "benchmarks": (history_file(benchmarks=3), "benchmarks is not a list"),
    "retired": (history_file(retired=3), "retired is not a list"),
    "a name twice": (history_file(benchmarks=[{"name": "a", "median": 1.0}] * 5), "benchmarks.1: a occurs twice"),
    "a huge median": (history_file(benchmarks=[{"name": "a", "median": 1.7e308}]), "sample 1.7e+308 is larger than"),
    "a deep one": (history_file(odd=json.loads("[" * 480 + "]" * 480)), "nested too deeply"),
}


@pytest.mark.parametrize("kind", BAD_RUNS)
def test_a_bad_run_of_a_history_is_one_error(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = BAD_RUNS[kind]
    new, folder = run_of(tmp_path / "new.json", 1, {"a": 1.0}), tmp_path / "history"
    keep(folder, new)
    write(folder / "bad.json", content)
    capsys.readouterr()
    assert main(["compare", str(new), "--history", str(folder)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"error: {folder}/bad.json")
    assert said in shown.err and "Traceback" not in shown.err


def test_one_name_under_several_conditions_is_several_benchmarks(tmp_path: Path) -> None:
    given = [{"name": "a", "median": 1.0, "conditions": {"threads": each}} for each in "12"]
    folder = tmp_path / "history"
    folder.mkdir()
    write(folder / "run.json", history_file(benchmarks=given))
    assert main(["history", "show", str(folder)]) == 0


def test_a_terminal_obeys_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"history{EVIL}".replace("\0", "")
    folder.mkdir()
    odd = {"name": f"a{EVIL}", "conditions": {f"x{EVIL}": f"y{EVIL}"}, "facts": {f"z{EVIL}": EVIL}}
    for number in range(14):
        bench = {**odd, "median": (1.0 if number < 7 else 2.0) + number / 1000}
        content = history_file(date=f"{EVIL}{number:02}", benchmarks=[bench])
        write(folder / f"{number:02}{EVIL}.json".replace("\0", ""), content)
    fresh = plain({"b": 5.0})
    fresh["benchmarks"][0]["fullname"] = f"a{EVIL}"
    new = write(tmp_path / f"new{EVIL}.json".replace("\0", ""), fresh)
    junit, markdown = tmp_path / "out.xml", tmp_path / "out.md"
    forms = ["--junit", str(junit), "--markdown", str(markdown)]
    for words, code in (
        (["history", "show", str(folder)], 0),
        (["compare", str(new), "--history", str(folder), *forms], 5),
        (["compare", str(new), "--history", str(folder), "--force", *forms], 6),
        (["history", "add", str(folder), str(new)], 0),
        (["history", "retire", str(folder), "*"], 0),
    ):
        assert main(words) == code
        text = "".join(capsys.readouterr())
        assert is_harmless(text) and "\\x1b[2J" in text
        if "--junit" in words:
            XML.fromstring(junit.read_bytes())  # noqa: S314  ours
            assert is_harmless(markdown.read_text().replace("\u200b", ""))


def test_a_terminal_obeys_no_path(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = base.with_name("\x1b[2J\x1b]0;x\x07.json")
    for words in (["compare", str(odd), str(base)], ["compare", str(base), "--history", str(odd)]):
        assert main(words) == 2
        assert "\\x1b[2J\\x1b]0;x\\x07.json: " in (said := capsys.readouterr().err) and is_harmless(said)
    odd.write_bytes(base.read_bytes())
    assert main(["compare", "--tables", str(base), str(odd)]) == 0
    assert is_harmless(capsys.readouterr().out)


def test_asvs_kinds_are_told_by_how_names_begin(tmp_path: Path) -> None:
    names = ("time_x", "TimeMe", "Timeraw_x", "peakmem_x", "MemAll", "track_y", "Timeless", "memory")
    run = read_run(write(tmp_path / "a.json", asv({f"b.{name}": [[1.0], [], "v"] for name in names})))
    assert {each.name: each.is_memory for each in run.entries} == {
        "b.time_x": False, "b.TimeMe": False, "b.Timeraw_x": False, "b.peakmem_x": True, "b.MemAll": True,
    }  # fmt: skip
    assert [each.partition(":")[0] for each in run.left_out] == ["b.track_y", "b.Timeless", "b.memory"]


def test_what_is_left_out_of_an_odd_path_is_named_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = asv({"b.time_x": [[1.0], [], "v"], "b.track_y": [[1.0], [], "v"]})
    path = write(tmp_path / "\x1b[2J.json", content)
    assert main(["compare", str(path), str(path)]) == 6
    text = capsys.readouterr().out
    assert "left out: b.track_y" in " ".join(text.split()) and is_harmless(text)
