"""Figures that a measurement or a pass asks to be judged: ``d5suite compare`` and a history do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.errors import ConfigurationError, ValidationError
from d5suite.measurements.network.inference import Inference
from d5suite.measurements.tables import Column
from d5suite.report.pair_verdicts import Paired, compare_pairs, side_of
from d5suite.report.schema import check_record
from d5suite.report.thresholds import PAIRED, Thresholds
from d5suite.statistics.decisions import Decision
from d5suite.statistics.figures import Figure, worsening
from d5suite.statistics.ratios import Ratio
from tests.report.test_verdicts import (
    QUIET,
    compared,
    name_of,
    record,
    reference,
    result,
    slow_down,
    wide,
    write,
)

__all__ = ["reference", "result", "wide"]  # fixtures


def with_figures(result: dict[str, Any], p99_s: float | None, hits: float = 0.5) -> dict[str, Any]:
    """Results with two figures of a pass from outside: one better low, one better high."""
    columns = [
        {"heading": "p99 ms", "value": "tail.p99_s", "scale": 1e3, "better": "lower", "least": 1e-4},
        {"heading": "hits", "value": "tail.hits", "better": "higher"},
        {"heading": "faults", "value": "tail.faults"},  # shown, not judged
    ]
    for bench in result["benchmarks"]:
        info = bench["extra_info"]["d5suite"]
        info["passes"] = {"tail": {"columns": columns, "properties": {}}}
        info["tail"] = {"missing": "no tail"} if p99_s is None else {"p99_s": p99_s, "hits": hits, "faults": 1 / hits}
        info["machine"] = {"disturbed": False, "reasons": [], "taken_share": 0.0}
    return result


CHANGES: dict[str, tuple[float | None, float, list[str], int]] = {
    "as before": (0.01, 0.5, [], 0),
    "50 times larger": (0.5, 0.5, ["p99 ms"], 1),
    "less than twice": (0.019, 0.5, [], 0),
    "much better": (0.0001, 5.0, [], 0),
    "fewer hits": (0.01, 0.2, ["hits"], 1),
    "no hits": (0.01, 1e-300, ["hits"], 1),
    "both": (0.5, 0.2, ["p99 ms", "hits"], 1),
    "not taken": (None, 0.5, [], 6),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_figure_that_became_worse_is_a_regression(
    change: str, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 99th percentile made 50 times larger passed."""
    p99_s, hits, regressions, code = CHANGES[change]
    base = write(tmp_path / "base.json", with_figures(result, 0.01))
    new = write(tmp_path / "new.json", with_figures(result, p99_s, hits))
    found = compared(capsys, base, new, *QUIET, code=code)[name_of(result, 0)]
    assert found["regressions"] == regressions
    assert (found["verdict"], found["outcome"]) == ({0: "same", 1: "worse", 6: "uncertain"}[code], "same")
    if change == "50 times larger":
        assert found["reasons"] == ["p99 ms became 50 times worse: 0.5 instead of 0.01 (lower is better)"]
        assert (found["base"]["figures"], found["new"]["figures"]["p99 ms"]) == ({"p99 ms": 0.01, "hits": 0.5}, 0.5)
        assert main(["compare", str(base), str(new), *QUIET]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert "worse: p99 ms" in said and "4 worse, 4 with a worse p99 ms (exit 1)" in said
        lax = write(tmp_path / "lax.toml", "[default]\nfigure = 60\n")
        compared(capsys, base, new, *QUIET, "--thresholds", str(lax), code=0)
    if code == 6:
        assert found["reasons"][0] == "NEW has no p99 ms, which is to be judged"


def test_a_slower_benchmark_names_its_figures_too(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path / "base.json", with_figures(result, 0.01))
    slow_down(result, 2, 0)
    found = compared(capsys, base, write(tmp_path / "new.json", with_figures(result, 0.1)), *QUIET, code=1)
    assert found[name_of(result, 0)]["verdict"] == "slower"
    assert found[name_of(result, 0)]["regressions"] == ["time", "p99 ms"]


def test_a_disturbed_figure_convicts_nobody_and_passes_nobody(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path / "base.json", with_figures(result, 0.01))
    with_figures(result, 0.5)
    record(result)["machine"] = {"disturbed": True, "reasons": ["steal 2%"], "taken_share": 0.02}
    for number in (1, 2, 3):
        record(result, number)["tail"]["p99_s"] = 0.01
    found = compared(capsys, base, write(tmp_path / "new.json", result), *QUIET, code=6)[name_of(result, 0)]
    assert (found["verdict"], found["regressions"]) == ("uncertain", [])
    assert found["reasons"][0].endswith("but the machine was disturbed")


def test_a_history_judges_figures(result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "history"
    for day in range(4):
        content = with_figures(result, 0.01 * (1 + day / 100)) | {"datetime": f"2026-01-0{1 + day}T03:00:00+00:00"}
        assert main(["history", "add", str(folder), str(write(tmp_path / "run.json", content))]) == 0
    capsys.readouterr()
    for p99_s, code in ((0.012, 0), (0.5, 1)):
        content = with_figures(result, p99_s) | {"datetime": "2026-01-09T03:00:00+00:00"}
        new = write(tmp_path / "new.json", content)
        assert main(["compare", str(new), "--history", str(folder), "--json", "-"]) == code
        found = json.loads(capsys.readouterr().out)["benchmarks"]
        assert {tuple(each["regressions"]) for each in found} == {("p99 ms",) if code else ()}


@pytest.mark.parametrize(
    ("value", "said"),
    [(-1.0, "is to be judged, but is -1.0"), (True, "is to be judged, but is True"), ("much", "cannot be shown"),
     ([1.0], "cannot be shown")],
)  # fmt: skip
def test_what_is_no_figure_is_one_clear_error(
    value: object, said: str, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_figures(result, 0.01)
    record(result)["tail"]["p99_s"] = value
    file = write(tmp_path / "odd.json", result)
    assert main(["compare", str(file), str(file)]) == 2
    assert f"tail.p99_s {said}" in capsys.readouterr().err


def test_a_figure_that_cannot_be_judged_is_refused_when_it_is_measured(result: dict[str, Any]) -> None:
    check_record(record(with_figures(result, 0.01)), Inference)
    with pytest.raises(ValidationError, match=r"tail\.p99_s is to be judged, but is -1"):
        check_record(record(with_figures(result, -1.0)), Inference)


def test_two_sides_in_turn_are_judged_by_their_figures_too(result: dict[str, Any]) -> None:
    sides = []
    for p99_s in (0.01, 0.5):
        bench = with_figures(result, p99_s)["benchmarks"][0]
        sides.append(side_of("a/inference torch", record(result), bench["stats"]["data"], Inference.table))
    a, b = sides
    same = Decision("same", Ratio(1.0, 0.99, 1.01, 0.99, "pairs", 20))
    found = compare_pairs(("here", "here"), [Paired("a/inference torch", a, b, same)], Thresholds(PAIRED))
    assert [(each.verdict, each.regressions) for each in found.verdicts] == [("worse", ["p99 ms"])] and found.exit == 1


def test_a_direction_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="better is 'less'"):
        Column("p99", "p99_s", better="less")


@pytest.mark.parametrize(
    ("base", "new", "factor"),
    [(0.0, 0.0, 1.0), (0.0, 1.0, float("inf")), (0.0, 0.5, 1.0), (2.0, 6.0, 3.0), (6.0, 2.0, 1 / 3)],
)
def test_from_nothing_only_what_counts_is_worse(base: float, new: float, factor: float) -> None:
    assert worsening(Figure(base, "lower", 0.5), Figure(new, "lower", 0.5)) == pytest.approx(factor)
