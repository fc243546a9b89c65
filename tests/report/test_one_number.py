"""One fact has one number: all places that state a ratio of two times state the same."""

from __future__ import annotations

import copy
import csv
import html
import io
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from d5suite.cli import main
from d5suite.report.comparison_formats import show_comparison, to_markdown
from d5suite.report.formats import times
from d5suite.report.pair_verdicts import Paired, compare_pairs
from d5suite.report.runs import Entry
from d5suite.report.thresholds import PAIRED, Thresholds
from d5suite.statistics.decisions import Decision
from d5suite.statistics.medians import summarize
from d5suite.statistics.ratios import Ratio
from tests.report.pages import SMOKE, content, record, settle, write

ROUNDS = {
    "jax": [1.0, 1.0, 1.0, 1.6, 1.6, 1.6, 1.7],
    "tensorflow": [1.3, 1.3, 1.3, 2.08, 2.08, 1.62, 1.71],
    "torch": [1.4, 1.4, 1.4, 1.41, 1.42, 2.3, 2.4],
}
"""Times of rounds: of medians torch follows jax, and in rounds in turn tensorflow does."""


def in_turn() -> dict[str, Any]:
    """A file of backends that took turns, whose ratio in rounds is not that of their medians."""
    found = content()
    (few,) = [b for b in found["benchmarks"] if b["group"] == "imagenet_resnet50/inference" and b["param"] == "torch"]
    found["benchmarks"] = []
    for name, rounds in ROUNDS.items():
        bench = copy.deepcopy(few)
        settle(bench, [each / 50 for each in rounds for _ in range(2)])
        bench |= {"param": name, "name": f"test_inference[{name}]", "fullname": f"a.py::test_inference[{name}]"}
        info = record(bench)
        info["backend"]["name"] = name
        info["throughput"]["value"] = info["batch_size"] / info["median_s"]
        info["turns"] = [{"group": "a", "beside": [each for each in ROUNDS if each != name], "rounds": [2] * 7}]
        found["benchmarks"].append(bench)
    return found


def expected(name: str) -> float:
    """The median of the ratios in rounds, without the drift between the two orders."""
    ratios = [b / a for a, b in zip(ROUNDS["jax"], ROUNDS[name], strict=True)]
    return statistics.median(ratios)


def test_every_place_of_a_file_states_the_same_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lead was 1.25, and the grid said 1.47; one runner-up was TensorFlow, the other torch."""
    monkeypatch.setenv("COLUMNS", "120")
    file, out, tables = write(tmp_path / "x.json", in_turn()), tmp_path / "x.html", tmp_path / "csv"
    assert main(["compare", "--tables", str(file)]) == 0
    terminal = dict(re.findall(r"^  (\w+) +[\d.]+ +[\d.–]+ +([\d.]+)", capsys.readouterr().out, re.MULTILINE))
    assert list(terminal) == ["jax", "tensorflow", "torch"] and terminal["jax"] == "1"
    medians = {name: statistics.median(rounds) for name, rounds in ROUNDS.items()}
    assert medians["torch"] < medians["tensorflow"]  # so the order by medians is another one
    assert main(["report", str(file), "-o", str(out), "--csv", str(tables)]) == 0
    page = html.unescape(out.read_text())
    grid = re.search(r'<table class="grid">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    cells = re.findall(r'data-b="(\w+)"><a [^>]*>([\d.?]+)</a>', grid[1] if grid else "")
    row = r'<tr id="r-[^>]*data-b="(\w+)".*?</tr>'
    rows = {each[1]: re.findall(r'<td class="n"[^>]*>(.*?)</td>', each[0])[1] for each in re.finditer(row, page)}
    tips = dict(re.findall(r'data-tip="inference, (\w+): [^"]*?([\d.]+) times the fastest', page))
    csv_ratios = {each["backend"]: float(each["times_fastest"]) for each in _csv(tables / "results.csv")}
    for name in ("tensorflow", "torch"):
        stated = {"terminal": terminal[name], "grid": dict(cells)[name], "row": rows[name], "tip": tips[name]}
        stated["csv"] = times(csv_ratios[name])
        assert len(set(stated.values())) == 1, stated
        assert float(terminal[name]) == pytest.approx(expected(name), rel=0.02)
        assert float(terminal[name]) != pytest.approx(medians[name] / medians["jax"], rel=0.05)
    assert (dict(cells)["jax"], rows["jax"]) == ("1.00", "1")
    (lead,) = re.findall(r'<td class="n">([\d.]+)× <span class="soft">\(', page)
    (fastest,) = _csv(tables / "fastest.csv")
    assert fastest["fastest"] == "undecided" and fastest["close"].split()[:2] == ["jax", "tensorflow"]
    assert lead == times(float(fastest["ratio"])) == terminal["tensorflow"]
    over = page.partition('<table class="leads">')[2].partition("</tbody>")[0].rpartition("<td>")[2]
    assert "tensorflow" in over or "too close" in over
    assert list(rows) == ["jax", "tensorflow", "torch"], "rows stand in the order of their ratios"


def test_backends_that_took_no_turns_together_are_compared_by_medians_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One fastest backend of a measurement, not one of each group that took turns."""
    found = in_turn()
    other = record(found["benchmarks"][-1])
    other["turns"][0] |= {"group": "b", "beside": []}
    file = write(tmp_path / "x.json", found)
    assert main(["compare", "--tables", str(file)]) == 0
    table = capsys.readouterr().out
    terminal = dict(re.findall(r"^  (\w+) +[\d.]+ +(?:[\d.]+–[\d.]+ +)?([\d.]+)", table, re.MULTILINE))
    medians = {name: statistics.median(rounds) for name, rounds in ROUNDS.items()}
    by_medians = {name: times(medians[name] / medians["torch"]) for name in ("torch", "jax", "tensorflow")}
    assert terminal == {**by_medians, "torch": "1"}
    assert main(["report", str(file), "-o", str(tmp_path / "x.html"), "--csv", str(tmp_path)]) == 0
    stated = {each["backend"]: times(float(each["times_fastest"])) for each in _csv(tmp_path / "results.csv")}
    assert {**stated, "torch": "1"} == terminal


def test_the_reference_states_one_number_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--tables", str(SMOKE)]) == 0
    terminal = re.findall(r"^  (\w+)\*? +[\d.]+ +(?:[\d.]+–[\d.]+ +)?([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    assert main(["report", str(SMOKE), "-o", str(tmp_path / "x.html"), "--csv", str(tmp_path)]) == 0
    lines = [each for each in _csv(tmp_path / "results.csv") if each["times_fastest"]]
    by_csv = [(each["backend"], times(float(each["times_fastest"]))) for each in lines]
    assert len(by_csv) == 15
    known = {each for each in terminal if "." in each[1]}
    assert {each for each in by_csv if each[1] != "1.00"} <= known


def test_the_ratio_of_pairs_is_named_beside_medians_whose_ratio_is_another() -> None:
    """`ab` showed two medians and a ratio that was not theirs."""
    a, b = (Entry("a/inference torch", summarize([median, median, median])) for median in (1.0, 1.02))
    pair = Paired("a/inference torch", a, b, Decision("slower", Ratio(1.08, 1.06, 1.1, 0.99, "pairs", 60)))
    found = compare_pairs(("here", "here"), [pair], Thresholds(PAIRED))
    console = Console(record=True, width=120, file=io.StringIO())
    show_comparison(found, console)
    shown = " ".join(console.export_text().split())
    for text in (shown, to_markdown(found)):
        assert "1.080" in text and "B ÷ A: of pairs measured in turn, so it is not the ratio of these medians" in text


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
