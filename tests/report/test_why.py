"""What a page explains: sentences, rooflines of a machine file, trajectories."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from d5suite.cli import main
from tests.report.planted import bench, layers, machine, result


def page_of(folder: Path, *options: str) -> str:
    target = folder / "page.html"
    assert main(["report", str(folder / "out.json"), "-o", str(target), *options]) == 0
    return target.read_text(encoding="utf-8")


def test_a_page_explains_and_draws_roofs_in_its_own_colours(tmp_path: Path) -> None:
    result(tmp_path / "out.json", *(bench(threads=n, step_s=0.1 * (0.4 + 0.6 / n), part=layers()) for n in (1, 2)))
    roof = machine(tmp_path / "machine.json")
    part = page_of(tmp_path, "--machine", str(roof)).partition('<section id="why"')[2].partition("</section>")[0]
    text = html.unescape(re.sub("<[^>]+>", " ", part))
    assert "61% of the step is in Conv, at" in text and "of the ceiling of arithmetic" in text
    assert "strong scaling" in text and "serial part 40%" in text
    assert 'title="layers.times, layers.step_s' in part
    assert "<svg" in part and "var(--ink)" in part and "#262626" not in part  # light and dark
    assert "FLOP per byte (counted)" in part


def test_without_a_machine_file_there_are_sentences_only(tmp_path: Path) -> None:
    result(tmp_path / "out.json", bench(part=layers()))
    part = page_of(tmp_path).partition('<section id="why"')[2].partition("</section>")[0]
    assert "61% of the step is in Conv" in part and "of the ceiling" not in part and "<svg" not in part


def test_a_page_with_nothing_to_explain_has_no_such_part(tmp_path: Path) -> None:
    result(tmp_path / "out.json", bench(part=layers(), disturbed="a compiler ran"))
    assert 'id="why"' not in page_of(tmp_path)


def test_another_machines_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result(tmp_path / "out.json", bench(part=layers()))
    roof = machine(tmp_path / "machine.json", cpu="another CPU")
    assert main(["report", str(tmp_path / "out.json"), "-o", str(tmp_path / "p.html"), "--machine", str(roof)]) == 2
    assert "another machine" in capsys.readouterr().err and not (tmp_path / "p.html").exists()
