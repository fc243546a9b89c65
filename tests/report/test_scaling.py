"""Efficiencies over planted results, and pictures of steps and collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from d5suite.measurements.distributed.efficiency import add_efficiency
from d5suite.report.plots import Plotted, save_plot
from d5suite.report.scaling import draw_steps, size_text

PICTURE = b"\x89PNG\r\n"
PARTS = {"step_s": 0.01, "computing_s": 0.008, "communicating_s": 0.003, "waiting_s": None, "overlapped_s": 0.001}


def _result(ranks: int, speed: float, batch: int = 8, scheme: str = "all_reduce", **more: Any) -> dict[str, Any]:
    communicator = "gloo" if ranks > 1 else "local"
    return {
        "recipe": "r", "measurement": "distributed_step", "backend": {"name": "torch", "mode": "eager"},
        "device": "cpu", "precision": "fp32", "preset": "smoke", "seed": 0, "ranks": ranks, "threads": ranks,
        "batch_size": batch, "throughput": {"value": speed, "unit": "images/s"},
        "distributed": {"scheme": scheme, "settings": {}, "communicator": communicator, "parts": PARTS}, **more,
    }  # fmt: skip


@given(st.integers(2, 64), st.floats(1, 1e6), st.floats(0.01, 1.5), st.sampled_from(["weak", "strong"]))
def test_a_planted_efficiency_is_found(ranks: int, alone: float, efficiency: float, mode: str) -> None:
    batch = 64 * 8
    together = _result(ranks, alone * ranks * efficiency, batch if mode == "weak" else batch // ranks)
    baseline = _result(1, alone, batch if mode == "weak" else batch // ranks * ranks)
    add_efficiency([together, baseline])
    assert "scaling" not in baseline
    assert together["scaling"]["mode"] == mode
    assert together["scaling"]["efficiency"] == pytest.approx(efficiency)
    assert together["scaling"]["speed_up"] == pytest.approx(efficiency * ranks)
    assert together["scaling"]["baseline"] == {"ranks": 1, "throughput": alone}


@pytest.mark.parametrize(
    "other",
    [
        {"backend": {"name": "jax", "mode": "jit"}}, {"recipe": "s"}, {"precision": "bf16"}, {"preset": "full"},
        {"seed": 1}, {"threads": 2}, {"batch_size": 6},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_other_conditions_are_no_baseline(other: dict[str, Any]) -> None:
    together, alone = _result(2, 10.0), {**_result(1, 6.0), **other}
    add_efficiency([alone, together])
    assert "scaling" not in together


def test_the_baseline_is_of_the_same_scheme_if_there_is_one() -> None:
    alone = [_result(1, 5.0), _result(1, 6.0, scheme="gossip")]
    gossip, top_k = _result(2, 9.0, scheme="gossip"), _result(2, 9.0, scheme="top_k")
    add_efficiency([*alone, gossip, top_k])
    assert gossip["scaling"]["baseline"]["throughput"] == 6.0
    assert top_k["scaling"]["baseline"]["throughput"] == 5.0


def test_steps_and_collectives_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [_result(1, 5.0), _result(2, 9.0), _result(4, 12.0), _result(2, 8.0, scheme="gossip")]
    named = [Plotted(f"torch-{each['distributed']['scheme']}-{each['ranks']}", each, {}) for each in steps]
    sizes = [
        {"bytes": 4**n, "median_s": 1e-5 + 1e-9 * 4**n, "bus_bytes_per_s": 4**n / 1e-5} for n in range(1, 14)
    ]  # fmt: skip
    facts = {"sizes": sizes, "line": {"alpha_s": 1e-5, "beta_s_per_byte": 1e-9}}
    for kind, results in (("steps", named), ("collectives", [Plotted("mpi-2", facts, {})])):
        save_plot(kind, tmp_path / f"{kind}.png", f"case/{kind}", results)
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(PICTURE)


def test_sizes_are_written_in_binary_units() -> None:
    assert [size_text(size) for size in (4, 1024, 3 << 19, 1 << 30, 1 << 42)] == [
        "4 B", "1 KiB", "1.5 MiB", "1 GiB", "4096 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(("lines", "panels"), [(["gloo"], 1), (["all_reduce", "gossip"], 3)])
def test_backends_of_several_lines_have_a_panel_each_and_legends_cover_nothing(lines: list[str], panels: int) -> None:
    results = [
        (f"{name}-{line}", _result(ranks, 1.0))
        for name in ("torch", "mxnet", "jax")
        for line in lines
        for ranks in (1, 2)
    ]
    figure = draw_steps("r: steps", results)
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == 2 * panels
    assert len(figure.legends[0].get_texts()) == (3 if panels == 1 else len(lines))
    legends = [each.get_window_extent() for each in figure.legends]
    assert len(legends) == 2 and not legends[0].overlaps(legends[1])
    for axes in figure.axes:
        shown = axes.get_tightbbox()
        assert shown is not None and not any(shown.overlaps(each) for each in legends)
