"""The conditions stand beside the verdict, on the page as in the heading of a table."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from d5suite.cli import main
from tests.report.pages import RANKS, SMOKE


def beside_the_verdict(page: str) -> str:
    """The text between the page's verdict and its first figures."""
    found = html.unescape(page).partition('class="headline">')[2].partition('<ul class="summary">')[0]
    assert '<p class="conditions">' in found
    return found.partition('<p class="conditions">')[2]


def test_the_page_says_at_which_size_and_precision_a_backend_is_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manager read that MXNet wins ResNet-50, and not that it does at 64 px."""
    assert main(["report", str(SMOKE), "-o", str(tmp_path / "x.html")]) == 0
    told = beside_the_verdict((tmp_path / "x.html").read_text())
    assert "smoke, 64 px, batch 8, fp32, 2 threads, cpu, drawn imagenet" in told
    assert "(AMD EPYC)" in told
    assert main(["compare", "--tables", str(SMOKE)]) == 0
    heading = " ".join(capsys.readouterr().out.partition("─")[0].split())
    assert heading.partition("(")[2].partition(")")[0] in " ".join(told.split())


def test_conditions_that_differ_are_told_of_each_case(tmp_path: Path) -> None:
    assert main(["report", str(SMOKE), str(RANKS), "-o", str(tmp_path / "x.html")]) == 0
    told = beside_the_verdict((tmp_path / "x.html").read_text()).split("<br>")[1:]
    assert told[0].startswith("imagenet_resnet50: smoke, 64 px, batch 8") and "fp32" in told[1]
    assert told[1].startswith("digits_lenet: ") and "1 thread per rank" in told[1]
