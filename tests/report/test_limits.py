"""What a comparison could have found, what it says where it cannot tell, and how runs are measured
to vary."""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as XML

import numpy as np
import pytest
from rich.console import Console

from d5suite.cli import main
from d5suite.commands import bisect
from d5suite.pytest_plugin.ab import Compared
from d5suite.report.comparison_formats import show_comparison, to_json, to_junit, to_markdown
from d5suite.report.history_verdicts import compare_with_history
from d5suite.report.pair_verdicts import Paired, compare_pairs
from d5suite.report.runs import BenchmarkRun, Entry, read_run
from d5suite.report.thresholds import PAIRED, Thresholds
from d5suite.report.verdicts import RunComparison, Verdict
from d5suite.statistics.decisions import Costs, Decision, decide_pairs
from d5suite.statistics.medians import ratio_of_medians, summarize
from d5suite.statistics.ratios import Ratio
from d5suite.statistics.spread import spreads_of
from tests.report.test_history import history, run_of
from tests.report.test_verdicts import (
    QUIET,
    base,
    compared,
    name_of,
    plain,
    record,
    reference,
    result,
    slow_down,
    wide,
    write,
)

__all__ = ["base", "history", "reference", "result", "wide"]  # fixtures


@pytest.mark.parametrize("options", [(), QUIET])
def test_the_smallest_slowdown_that_could_be_found_is_what_is_found(
    options: tuple[str, ...], base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gate that is too noisy to fail said nothing of that."""
    finds = compared(capsys, base, base, *options, code=0 if options else 6)[name_of(result, 0)]["finds"]
    assert (finds > 1.6) is not bool(options) and finds >= 1.05
    new = tmp_path / "new.json"
    slow_down(result, 0.98 * finds, 0)
    main(["compare", str(base), str(write(new, result)), *options, "--json", "-"])
    assert json.loads(capsys.readouterr().out)["benchmarks"][0]["verdict"] in ("same", "uncertain")
    slow_down(result, 1.03 / 0.98, 0)
    assert compared(capsys, base, write(new, result), *options, code=1)[name_of(result, 0)]["verdict"] == "slower"
    main(["compare", str(base), str(base), *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"what could be found: slowdowns from {finds:.2f} times as long"[:40] in shown and f" {finds:.2f} " in shown


def test_a_run_in_which_nothing_could_be_found_says_so(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(result)["machine"] = {"disturbed": True, "reasons": ["steal 2%"], "taken_share": 0.02}
    found = compared(capsys, base, new := write(tmp_path / "new.json", result), *QUIET, code=0)[name_of(result, 0)]
    assert (found["verdict"], found["finds"]) == ("same", None)
    assert found["reasons"] == ["no change would count: NEW was disturbed: steal 2%"]
    assert main(["compare", str(base), str(new), *QUIET]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"no slowdown could be found, however large: {name_of(result, 0)}" in shown


@pytest.mark.parametrize("share", [0.4, None])
def test_a_run_of_which_much_was_taken_is_not_even_the_same(
    share: float | None, base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a program that used most of the machine; None in files of earlier versions."""
    taken = {} if share is None else {"taken_share": share}
    record(result)["machine"] = {"disturbed": True, "reasons": ["others used 1.6 of 2 CPUs"], **taken}
    new = write(tmp_path / "new.json", result)
    for one, other, side in ((base, new, "NEW"), (new, base, "BASE")):
        found = compared(capsys, one, other, *QUIET, code=6)
        assert [each["verdict"] for each in found.values()].count("uncertain") == 1
        assert found[name_of(result, 0)]["reasons"] == [f"{side} was disturbed: others used 1.6 of 2 CPUs"]


def test_a_history_gives_the_reason_why_it_cannot_tell(history: Path, tmp_path: Path) -> None:
    """Of 0.959 with an interval of 0.95 to 0.97 it said that two runs may differ by 1%."""
    found = compare_with_history(history, read_run(run_of(tmp_path / "new.json", 20, {"a": 0.963e-3, "b": 2.0})),
                                 Thresholds())  # fmt: skip
    (odd,) = [each for each in found.verdicts if each.verdict == "uncertain"]
    assert odd.ratio is not None and 0.95 < odd.ratio.value < 0.97 and odd.ratio.high < 1
    (why,) = odd.reasons
    assert why.startswith(("the change is less than the 5% that count, but", "it may be the same, or have changed by"))
    assert odd.finds is not None and 1.05 <= odd.finds < 1.1


def paired(outcome: str, grown: float) -> RunComparison:
    """Two sides whose times are of an outcome, and whose memory grew."""
    ratio = Ratio(1.0, 0.97, 1.04, 0.99, "pairs", 60)
    a, b = (
        Entry("a/inference torch", summarize([1.0, 1.1, 0.9]), costs=Costs(size * 2**20, 1.0, 0.1))
        for size in (400, 400 * grown)
    )
    why = ("60 pairs do not decide it",) if outcome == "uncertain" else ()
    pair = Paired("a/inference torch", a, b, Decision(outcome, ratio, why, finds=1.04))
    return compare_pairs(("here", "here"), [pair], Thresholds(PAIRED))


@pytest.mark.parametrize("outcome", ["uncertain", "same", "faster"])
def test_two_sides_that_differ_in_memory_alone_are_named_for_it(outcome: str) -> None:
    """`ab` ended with 1 for memory and listed it under "uncertain"."""
    found = paired(outcome, 1.5)
    assert found.exit == 1
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    show_comparison(found, console)
    shown = " ".join(console.export_text().split())
    assert "worse: memory" in shown and "found: peak memory grew by 50%" in shown and "uncertain: peak" not in shown
    assert shown.endswith("1 worse, 1 with more memory (exit 1)")
    (suite,) = XML.fromstring(to_junit(found)).iter("testcase")  # noqa: S314  our own
    failure = suite.find("failure")
    assert failure is not None and failure.get("message", "").startswith("peak memory grew by 50%")
    assert "worse: memory" in to_markdown(found).replace("\\", "")
    (told,) = to_json(found)["benchmarks"]
    assert (told["verdict"], told["outcome"], told["regressions"]) == ("worse", outcome, ["memory"])
    assert paired(outcome, 1.0).exit == (6 if outcome == "uncertain" else 0)


def test_too_few_pairs_say_how_many_are_needed() -> None:
    """It was "uncertain, 0.00–inf"."""
    few = decide_pairs([0.3] * 3, effect=0.02, alpha=0.01)
    assert few.outcome == "uncertain" and few.finds == math.inf
    (why,) = few.reasons
    needed = int(why.partition("it needs ")[2].partition(";")[0])
    assert why.startswith("3 pairs are too few for an interval")
    for count, known in ((needed - 1, False), (needed, True)):
        found = decide_pairs([0.3] * count, effect=0.02, alpha=0.01)
        assert (found.ratio is not None and found.ratio.low > 0) is known


BISECTED = {
    "uncertain": ("whether new is slower than old is not decided: a/b torch", "allow more pairs", 6),
    "same": ("no benchmark takes longer at new than at old", "", 6),
    "missing": ("no time to follow: a/b torch", "", 4),
    "worse": ("slower only in something other than time: a/b torch", "", 1),
}


@pytest.mark.parametrize("verdict", BISECTED)
def test_bisect_says_what_it_knows_where_it_finds_nothing(
    verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After "uncertain 0.00–inf" it said that no benchmark is slower."""
    first, more, code = BISECTED[verdict]
    outcome = "same" if verdict in ("worse", "missing") else verdict
    decision = None if verdict == "missing" else Decision(outcome, Ratio(1.2, 0.0, math.inf, 0.99, "pairs", 3))
    old, new = (BenchmarkRun(Path(each), "side", [], {}) for each in ("old", "new"))
    worse = ["memory"] if verdict == "worse" else []
    found = RunComparison(old, new, [Verdict("a/b torch", verdict, decision=decision, regressions=worse)], {}, [])
    monkeypatch.setattr(bisect, "measure", lambda *given: Compared(found))
    monkeypatch.setattr(bisect, "benchmark_selection", lambda options: None)
    monkeypatch.setattr("d5suite.pytest_plugin.bisect.revisions", lambda *given: ["new"])
    assert bisect.run(argparse.Namespace(good="old", bad="new", repository=None)) == code
    said = capsys.readouterr().out
    assert first in said and more in said and "inf" not in said
    assert ("no benchmark" in said) is (verdict in ("same", "worse"))


def runs_of(tmp_path: Path, spreads: dict[str, float], count: int = 5, seed: int = 0) -> list[str]:
    """Files of repeated runs whose medians vary as they are told to."""
    noise, paths = random.Random(seed), []
    for number in range(count):
        medians = {name: 1e-3 * noise.lognormvariate(0, spread) for name, spread in spreads.items()}
        content = plain(medians)
        for bench, median in zip(content["benchmarks"], medians.values(), strict=True):
            bench["stats"]["data"] = [median * noise.lognormvariate(0, 0.002) for _ in range(15)]
        paths.append(str(write(tmp_path / f"run{number}.json", content)))
    return paths


def test_how_runs_vary_is_measured_and_the_option_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = runs_of(tmp_path, {**dict.fromkeys("abcdefgh", 0.01), "w[i]ld": 0.3})
    assert main(["compare", "--measure-between-runs", *paths]) == 0
    shown = capsys.readouterr().out
    option = shown.partition("use: ")[2].splitlines()[0].split()
    assert option[0] == "--between-runs" and 0.008 < float(option[1]) < 0.03
    rules = shown.partition("FILE.toml:\n")[2]
    (tmp_path / "noise.toml").write_text(rules)
    assert rules.count("match") == 1
    how = (*option, "--thresholds", str(tmp_path / "noise.toml"))
    found = compared(capsys, Path(paths[0]), Path(paths[1]), *how, code=6)
    assert found["test_x.py::w[i]ld"]["finds"] > 1.5 > 1.2 > found["test_x.py::a"]["finds"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (3, ["--tables"], "--tables makes no sense with --measure-between-runs"),
        (3, ["--between-runs", "0.1"], "--between-runs makes no sense with --measure-between-runs"),
        (2, [], "no benchmark has 3 sound runs"),
        (4, [], "cores: 2 ≠ 7"),
    ],
)
def test_runs_that_measure_no_variation_are_one_clear_error(
    names: int, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = runs_of(tmp_path, {"a": 0.01}, min(names, 3))
    if names > 3:
        paths.append(str(write(tmp_path / "other.json", plain({"a": 1e-3}, cores=7))))
    assert main(["compare", "--measure-between-runs", *paths, *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said


def test_an_interval_with_the_measured_variation_holds_another_run() -> None:
    """In 19 of 20; with the observed standard deviation of four runs it would not."""
    draw, held, naive = np.random.default_rng(1), 0, 0
    count = 300
    for _ in range(count):
        runs = [[summarize(draw.normal(1, 0.005, 10) * np.exp(draw.normal(0, 0.03))) for _ in range(6)]]
        *repeats, one, other = runs[0]
        spread = spreads_of([repeats]).each[0]
        truth = math.log(other.median / one.median)
        for use in (spread.between_runs, spread.observed):
            ratio = ratio_of_medians(one, other, between_runs=use, confidence=0.95)
            inside = abs(truth) <= math.log(ratio.high / ratio.value)
            held, naive = (held + inside, naive) if use == spread.between_runs else (held, naive + inside)
    assert held >= 0.93 * count > naive
