"""Pictures of parts, of a training step and of ceilings: what they show, and where."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from d5suite.cli import main
from d5suite.measurements import discover
from d5suite.report.plots import PLOTS, Plotted, draw_plot
from tests.report.pages import content, named, record, write

PARTS = {"data_wait": 0.001, "host_to_device": 0.0, "forward": 0.02, "backward": 0.04, "update": 0.005, "other": 0.0}


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
