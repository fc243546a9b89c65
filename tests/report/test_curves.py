"""The picture of training to accuracy: numbers of its logarithmic axis that can be read."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from d5suite.report.curves import Curve, draw_curves, save_figure

pytest.importorskip("matplotlib")

RANGES = [
    (0.05, 0.06), (0.3, 0.9), (1, 9), (1.5, 14), (2, 30), (0.9, 95), (3, 900), (0.01, 4000), (1e-5, 1e6), (100, 101),
    (1234.5, 9876.5), (86400, 200000), (7, 7), (9.99, 10.01), (1e-9, 2e-9), (40, 400_000),
]  # fmt: skip


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_the_numbers_of_the_logarithmic_axis_do_not_overlap(low: float, high: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    run = ([low * (high / low) ** (i / 9) for i in range(10)], [i / 10 for i in range(10)])
    figure = draw_curves("title", "top-1 accuracy", 0.8, [Curve("torch", [run, run]), Curve("jax", [run])])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    left, right = axes.get_xlim()
    labels = [
        tick.label1
        for ticks in (axes.xaxis.get_major_ticks(), axes.xaxis.get_minor_ticks())
        for tick in ticks
        if tick.label1.get_visible() and tick.label1.get_text() and left <= tick.get_loc() <= right
    ]
    boxes = sorted((label.get_window_extent(canvas.get_renderer()) for label in labels), key=lambda box: box.x0)
    assert len(boxes) >= 2
    for one, next_one in itertools.pairwise(boxes):
        assert one.x1 + 3 <= next_one.x0, [label.get_text() for label in labels]


@pytest.mark.parametrize("curves", [[], [Curve("torch", [])], [Curve("torch", [([], [])])], [Curve("t", [([0], [1])])]])
def test_curves_without_points_are_a_picture_all_the_same(curves: list[Curve], tmp_path: Path) -> None:
    save_figure(tmp_path / "x.png", draw_curves("title", "top-1 accuracy", 0.8, curves))
    assert (tmp_path / "x.png").stat().st_size
