"""``d5suite crossover`` on planted times: what the model predicts, it finds again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.distributed import calls
from d5suite.errors import ConfigurationError
from d5suite.models.algorithms import ALGORITHMS, algorithm_s
from d5suite.models.communication import Link
from d5suite.report.console import Console
from d5suite.report.crossover import BURST, crossovers, draw, errors, studies, tables
from d5suite.report.page.svg import to_svg
from tests.report.planted import bench, result

LINK, SIZES = Link(2e-5, 1e-9), (2**10, 2**16, 2**20)
GAP_S = 4e-6


def planted(slower: Mapping[str, float], *, ping_pong: bool = True, burst: bool = False) -> dict[Any, dict[str, Any]]:
    """Make records as the model predicts them, some algorithms slower."""
    found: dict[Any, dict[str, Any]] = {}
    for ranks in (2, 4):
        for name in (*ALGORITHMS, "native"):
            model = name if name in ALGORITHMS else "ring"
            sizes = [
                {"bytes": each, "median_s": slower.get(name, 1.0) * algorithm_s(model, ranks, each, LINK)}
                for each in SIZES
            ]
            key = "all_reduce/collectives", (("ranks", str(ranks)),), f"gloo:{name}"
            found[key] = {"sizes": sizes, "algorithm": name, "ranks": ranks}
        if ping_pong:
            line = {"alpha_s": 2 * LINK.alpha_s, "beta_s_per_byte": 2 * LINK.beta_s_per_byte * (1 if ranks == 2 else 9)}
            key = "ping_pong/collectives", (("ranks", str(ranks)),), "gloo"
            found[key] = {"line": line, "sizes": played(1e-4), "algorithm": "native", "ranks": ranks}
        if burst:
            key = "ping_burst/collectives", (("ranks", str(ranks)),), "gloo"
            times = played(1e-4 + (BURST - 1) * GAP_S * (1 if ranks == 2 else 9))
            found[key] = {"line": {}, "sizes": times, "algorithm": "native", "ranks": ranks}
    return {key: {"measurement": "collectives", "communicator": "gloo", **each} for key, each in found.items()}


def played(seconds: float) -> list[dict[str, float]]:
    """Make the sizes of a call between two ranks."""
    return [{"bytes": 256, "median_s": 1.0}, {"bytes": 4, "median_s": seconds}]


def test_the_gap_of_a_burst_counts_where_messages_reach_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert BURST == calls.BURST
    (study,) = studies(planted({}, burst=True))
    assert study.link.gap_s == pytest.approx(GAP_S)
    first = {
        each["servers"]: each["crossover_ranks"] for each in crossovers(study, SIZES[:1], [64], 1024)
        if each["against"] == "any"
    }  # fmt: skip
    assert all(each is not None for each in first.values())
    Console(width=200).print(tables(study, SIZES, [1], 1024)[0])
    Console(width=200).print(tables(studies(planted({}))[0], SIZES, [1], 1024)[0])
    said = capsys.readouterr().out
    assert "g 4 µs" in said and "g unknown" in said


def test_a_study_is_read_from_the_messages_of_fewest_ranks_and_all_sums() -> None:
    (study,) = studies(planted({"ring": 1.5}))
    assert study.link == LINK and study.sizes == list(SIZES)
    off = errors(study)
    assert off["ring"] == pytest.approx([1.5] * 6) and off["tree"] == pytest.approx([1.0] * 6) and "native" not in off
    one = study.seconds("tree", 4, SIZES[1], 1)
    assert one == pytest.approx(algorithm_s("tree", 4, SIZES[1], LINK))
    assert study.seconds("tree", 4, SIZES[1], 64) == pytest.approx(64 * algorithm_s("tree", 4, SIZES[0], LINK))
    assert study.seconds("tree", 4, SIZES[1], 3) is None


def test_crossovers_differ_by_servers_and_tensors() -> None:
    (study,) = studies(planted({}))
    found = {
        (each["bytes"], each["tensors"], each["against"], each["servers"]): each["crossover_ranks"]
        for each in crossovers(study, SIZES, [1, 64], 1024)
    }
    assert found[SIZES[2], 1, "ring", "parameter_server"] == 2
    assert found[SIZES[2], 1, "ring", "parameter_server_4"] > 4
    assert found[SIZES[0], 1, "ring", "parameter_server"] is None  # messages count, not bytes


def test_tables_and_picture_hold_what_was_measured() -> None:
    (study,) = studies(planted({}))
    shown = tables(study, SIZES, [1, 64], 1024)
    assert [each.row_count for each in shown] == [12, len(ALGORITHMS), 2 * len(ALGORITHMS) + 2]
    drawn = to_svg(draw(study, SIZES, [1, 64], 1024)).decode()
    assert "halving doubling" in drawn and "1 MiB in 64 tensors" in drawn


def test_a_file_without_the_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="messages between two ranks"):
        studies(planted({}, ping_pong=False))
    path = str(result(tmp_path / "out.json", bench()))
    assert main(["crossover", path]) == 2 and main(["crossover", path, "--tensors", "0"]) == 2
    said = capsys.readouterr().err
    assert "collectives/test_ping_pong.py" in said and "'0' is no list of whole numbers above 0" in said
