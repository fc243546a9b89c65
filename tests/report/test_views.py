"""Answers that are views compute nothing: they are shown as such and compared with none."""

from __future__ import annotations

import copy
import csv
import html
import re
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from tests.report.pages import RESULTS, content, record, write

OPERATORS = RESULTS / "reference-2core-cpu-operators.json"


def transpositions() -> dict[str, Any]:
    """deep500's transposition is a view that takes 0.2 µs; the others copy in 181 µs or more."""
    found = content(OPERATORS)
    wanted = "data_movement.channels_last_b1/forward"
    found["benchmarks"] = [each for each in found["benchmarks"] if each["group"] == wanted]
    return found


def test_a_view_is_compared_with_none_in_table_page_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A transposed view was "fastest, clearly", 797 times."""
    file = write(tmp_path / "x.json", transpositions())
    assert main(["compare", "--tables", str(file)]) == 0
    table = capsys.readouterr().out
    ratios = dict(re.findall(r"^  (\w+) +[\d.]+ +(?:[\d.]+–[\d.]+ +)?([\w.]+)", table, re.MULTILINE))
    assert list(ratios) == ["jax", "mxnet", "torch", "keras", "tensorflow", "deep500"]
    assert (ratios["jax"], ratios["mxnet"], ratios["deep500"]) == ("1", "1.21", "view")
    assert "view: every answer is a view" in table
    assert main(["report", str(file), "-o", str(tmp_path / "x.html"), "--csv", str(tmp_path)]) == 0
    page = html.unescape((tmp_path / "x.html").read_text())
    headline = page.partition('class="headline">')[2].partition("</p>")[0]
    assert "1 of 1 are undecided" in headline and "jax in 1" in headline and "deep500" not in headline
    assert re.search(r'data-b="deep500"><a [^>]*>view</a>', page)
    assert "1 result only returns a view" in page
    with (tmp_path / "fastest.csv").open() as lines:
        (fastest,) = csv.DictReader(lines)
    assert (fastest["fastest"], fastest["close"]) == ("undecided", "jax mxnet torch")
    with (tmp_path / "results.csv").open() as lines:
        assert [each["times_fastest"] for each in csv.DictReader(lines)][-1] == "view"


def test_an_answer_that_is_a_view_in_part_competes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adding a bias: one gradient is the argument itself, the other is a sum."""
    found = content(OPERATORS)
    found["benchmarks"] = [each for each in found["benchmarks"] if each["group"] == "elementwise.bias_b1/backward"]
    assert any(record(each)["views"] and record(each)["work"]["bytes"] for each in found["benchmarks"])
    assert main(["compare", "--tables", str(write(tmp_path / "x.json", found))]) == 0
    assert "view" not in capsys.readouterr().out


def test_only_views_leave_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = transpositions()
    (view,) = [each for each in found["benchmarks"] if record(each)["views"]]
    other = copy.deepcopy(view)
    other |= {"param": other["param"].replace("deep500", "torch"), "fullname": "x"}
    record(other)["backend"]["name"] = "torch"
    file = write(tmp_path / "x.json", found | {"benchmarks": [view, other]})
    assert main(["compare", "--tables", str(file)]) == 0
    assert capsys.readouterr().out.count("  view  ") == 2
    assert main(["report", str(file), "-o", str(tmp_path / "x.html"), "--csv", str(tmp_path)]) == 0
    page = html.unescape((tmp_path / "x.html").read_text())
    assert "Nothing to compare" in page and "2 results only return a view" in page
