"""Pictures of parts, of a training step and of ceilings: what they show, and where."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from d5suite.cli import main
from d5suite.measurements import discover
from d5suite.measurements.tables import Column
from d5suite.report.formats import figure as digits
from d5suite.report.page.svg import drawing, inline
from d5suite.report.parts import negative_parts
from d5suite.report.plots import PLOTS, Plotted, draw_plot
from tests.report.pages import content, named, record, write

PARTS = {"data_wait": 0.001, "host_to_device": 0.0, "forward": 0.02, "backward": 0.04, "update": 0.005, "other": 0.0}


def tips(figure: Figure) -> list[str]:
    with drawing():
        return re.findall(r'data-tip="([^"]*)"', inline(figure, "f0", "picture"))


def test_parts_of_a_step_are_stacked_in_milliseconds() -> None:
    figure = draw_plot("parts", "case/step_breakdown", [Plotted("torch", {"breakdown_s": PARTS}, {})])
    bars = [bar.get_width() for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert bars == pytest.approx([1e3 * each for each in PARTS.values()])
    legend = figure.axes[0].get_legend()
    assert legend is not None and legend.get_texts()[2].get_text() == "forward"


def test_ceilings_show_the_larger_part_and_gaps() -> None:
    shares = {"flops_per_s": 0.25, "bytes_per_s": 0.5}
    figure = draw_plot(
        "ceilings", "case",
        [
            Plotted("jax", {"fraction_of_ceiling": shares}, {}, "a/forward"),
            Plotted("torch", {"fraction_of_ceiling": {"flops_per_s": None, "bytes_per_s": 1.25}}, {}, "a/backward"),
        ],
    )  # fmt: skip
    assert [each.get_text() for each in figure.axes[0].texts] == ["50%", "–", "–", "125%"]


def test_a_bar_says_its_part_however_short_it_is() -> None:
    short = PARTS | {"data_wait": 1e-5}  # 0.01 ms, in a bar 0.62 thick
    figure = draw_plot("parts", "case/step_breakdown", [Plotted("torch", {"breakdown_s": short}, {})])
    told = [f"torch: {part.replace('_', ' ')}, {digits(1e3 * each)} ms" for part, each in short.items()]
    assert tips(figure) == told and told[0] == "torch: data wait, 0.01 ms"


def test_a_bar_of_several_ranks_says_its_row_and_part() -> None:
    parts = {"computing_s": 3e-4, "communicating_s": 1e-4, "waiting_s": None, "overlapped_s": 0.0}
    facts = {
        "backend": {"name": "torch", "mode": "eager"}, "ranks": 2, "median_s": 4e-4,
        "throughput": {"value": 1234.5, "unit": "images/s"}, "distributed": {"parts": parts},
    }  # fmt: skip
    told = tips(draw_plot("steps", "case", [Plotted("torch", facts, {})]))
    assert told[0] == "torch, 2 ranks: 1234 images/s"
    assert "torch, 2 ranks: computing, 0.3 ms" in told and "torch, 2 ranks: communicating, 0.1 ms" in told


def test_a_cell_names_its_ceiling() -> None:
    facts = {
        "fraction_of_ceiling": {"flops_per_s": 0.25, "bytes_per_s": 0.5},
        "ceiling": {"bytes_per_s": {"value": 12.5e9, "backend": "onnxruntime"}},
    }
    results = [Plotted("jax", facts, {}, "a/forward"), Plotted("torch", {}, {}, "a/forward")]
    cells = [
        "a/forward, jax: 50% of the ceiling of memory traffic, 12.5 GB/s with onnxruntime",
        "a/forward, torch: no ceiling is known",
    ]
    assert tips(draw_plot("ceilings", "case", results)) == 2 * cells  # those of the cells and of their texts


def test_they_are_on_pages_only(tmp_path: Path) -> None:
    results = content()
    results["d5suite"]["measurements"]["step_breakdown"] = discover()["step_breakdown"].describe()
    results["benchmarks"] = [each for each in results["benchmarks"] if record(each)["measurement"] == "training_step"]
    for bench in named(results, "case", "step_breakdown")["benchmarks"]:
        record(bench).update(measurement="step_breakdown", level=2, breakdown_s=PARTS, sum_over_step=1.0)
    path = write(tmp_path / "r.json", results)
    pictures = tmp_path / "png"
    assert main(["report", str(path), "-o", str(tmp_path / "r.html"), "--png", str(pictures)]) == 0
    assert {each.name for each in pictures.iterdir()} == {"case.overview.png", "case.step_breakdown.png"}
    assert all(PLOTS[kind].of_page for kind in ("parts", "ceilings"))


def test_a_negative_part_is_shown_left_of_zero_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was hidden behind the other parts."""
    parts = {**PARTS, "update": -0.0004}
    figure = draw_plot("parts", "case/step_breakdown", [Plotted("torch", {"breakdown_s": parts}, {})])
    bars = {each.get_label(): each.patches[0] for each in figure.axes[0].containers if isinstance(each, BarContainer)}
    assert bars["update"].get_x() == 0 and bars["update"].get_width() == pytest.approx(-0.4)
    assert all(each.get_x() >= 0 for each in bars.values())
    assert negative_parts({"breakdown_s": PARTS}) == []
    found = content()
    found["benchmarks"] = [each for each in found["benchmarks"] if each["group"].endswith("/training_step")]
    for bench in found["benchmarks"]:
        bench["group"] = "imagenet_resnet50/step_breakdown"
        record(bench).update(measurement="step_breakdown", level=2, breakdown_s=parts, sum_over_step=1.0)
        record(bench).pop("turns", None)
    path = write(tmp_path / "x.json", found)
    assert main(["compare", "--tables", str(path)]) == 0
    assert "update takes -0.4 ms: it is the difference of two medians" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(path), "-o", str(tmp_path / "x.html")]) == 0
    assert "update takes -0.4 ms" in (tmp_path / "x.html").read_text()


def test_names_are_whole_beside_the_parts_of_a_step_and_a_column_without_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer times are of other measurements; their empty column took the room of the names."""
    found = content()
    found["d5suite"]["measurements"]["step_breakdown"] = discover()["step_breakdown"].describe()
    found["benchmarks"] = [each for each in found["benchmarks"] if each["group"].endswith("/training_step")]
    column = asdict(Column("in nodes", "layers.coverage", "percent"))
    for bench in found["benchmarks"]:
        bench["group"] = "imagenet_resnet50/step_breakdown"
        passes = {"layers": {"columns": [column], "properties": {}}}
        record(bench).update(measurement="step_breakdown", level=2, breakdown_s=PARTS, sum_over_step=1.0, passes=passes)
        record(bench)["machine"]["disturbed"] = True
    path = write(tmp_path / "x.json", found)
    for columns, empty in ((80, False), (100, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["compare", "--tables", str(path)]) == 0
        table = capsys.readouterr().out.partition("parts of a step")[0]
        assert ("in nodes" in table) == empty
        assert "\nstep_breakdown " in table and "\n  torch* " in table and max(map(len, table.splitlines())) <= columns
