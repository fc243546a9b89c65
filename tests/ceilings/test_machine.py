"""``d5suite machine``: ways to a ceiling that agree or not, busy machines, and files left whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5suite.backends import discover, select
from d5suite.ceilings import jobs, machine, probe
from d5suite.ceilings.combine import combined, way_of
from d5suite.ceilings.machine import MachinePlan, measure_machine, run_probe, working_sets
from d5suite.cli import main
from d5suite.commands import machine as command
from d5suite.distributed.calls import BURST, PAUSE_S
from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import Roof, read_ceilings
from d5suite.models.communication import LogGP
from d5suite.statistics.messages import line_intervals


def way(name: str, seconds: float, *disturbed: str, what: str = "flops", **facts: Any) -> dict[str, Any]:
    """A way that takes so long for 1e9 operations."""
    own = {"what": what, "precision": "fp32", "threads": 1, "device": "cpu"} | facts
    return {**way_of(name, [name], 1e9, [1.2 * seconds, seconds, 1.1 * seconds], disturbed), **own}


@pytest.mark.parametrize(("seconds", "agrees"), [(1.04, True), (1.2, False)])
def test_two_ways_agree_within_5_percent_or_it_is_said(seconds: float, agrees: bool) -> None:
    ((found,), spoiled) = combined([way("NumPy", seconds), way("torch", 1.0)], "today")
    assert found["value"] == 1e9 and found["agrees"] is agrees and not spoiled
    assert ("NumPy agrees within" if agrees else "they do not agree") in found["source"]
    assert [each["way"] for each in found["ways"]] == ["torch", "NumPy"]


def test_a_single_way_is_not_called_confirmed() -> None:
    ((found,), _) = combined([way("NumPy", 1.0)], "today")
    assert found["agrees"] is None and "no independent way confirms it" in found["source"]
    twice = [way("NumPy", 1.0), {**way("NumPy", 1.01), "way": "another of NumPy"}]
    ((found,), _) = combined(twice, "today")
    assert found["agrees"] is None  # one library does not confirm itself


def test_what_was_disturbed_is_marked_and_not_kept() -> None:
    found, spoiled = combined([way("NumPy", 1.0), way("torch", 0.5, "a compiler ran")], "today")
    assert [each["value"] for each in found] == [1e9]  # not torch's 2e9
    assert [(each["way"], each["disturbed"]) for each in spoiled] == [("torch", ["a compiler ran"])]


def planned(monkeypatch: pytest.MonkeyPatch, *tries: list[dict[str, Any]]) -> MachinePlan:
    """A plan whose probe gives these ways, try by try."""
    left = list(tries)
    monkeypatch.setattr(machine, "run_probe", lambda request, folder: (left.pop(0), []))
    return MachinePlan([1], ["fp32"], [], kinds=["flops"])


def test_a_disturbed_way_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, [way("NumPy", 0.5, "a compiler ran")], [way("NumPy", 1.0)])
    found = measure_machine(plan, lambda what: None)
    assert [each["value"] for each in found["ceilings"]] == [1e9] and not found["not_kept"]


def test_a_busy_machine_gives_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(monkeypatch, *[[way("NumPy", 0.5, "a compiler ran")]] * 2)
    options = ["--threads", "1", "--backend", "none", "--only", "flops"]
    assert main(["machine", "-o", str(tmp_path / "m.json"), *options]) == 2
    text = capsys.readouterr().err
    assert "no ceiling was measured on a quiet machine" in text and "a compiler ran" in text
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_the_earlier_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(request: Any, folder: Path) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "run_probe", interrupted)
    path = tmp_path / "m.json"
    path.write_text("earlier")
    assert main(["machine", "-o", str(path), "--threads", "1", "--backend", "none", "--only", "flops"]) == 130
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-o", "no/such/m.json"], "m.json: the file cannot be written"),
        (["-o", "m.json", "--threads", "0"], "'0' is not a list of numbers"),
        (["-o", "m.json", "--threads", "4096"], "more than the"),
        (["-o", "m.json", "--precision", "fp31"], "there is no 'fp31'"),
        (["-o", "m.json", "--only", "speed"], "there is no 'speed'"),
        (["-o", "m.json", "--backend", "nothing"], "nothing"),
        (["-o", "m.json", "--storage", "no-folder"], "there is no such folder"),
    ],
)
def test_bad_options_end_before_anything_is_measured(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "measure_machine", lambda plan, tell: pytest.fail("it measured"))
    assert main(["machine", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_a_wrong_product_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"threads": 1, "seconds": 0.0, "product": 16, "precisions": ["fp32"]}
    (found,) = probe._products(asked)
    assert found["value"] > 0
    honest = np.matmul

    def wrong(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        honest(a, b, out=out)
        out[3, 4] += 1

    monkeypatch.setattr(np, "matmul", wrong)
    with pytest.raises(Exception, match="gave a wrong answer"):
        list(probe._products(asked))


def test_the_probe_measures_each_kind(tmp_path: Path) -> None:
    level = {"level": "L1", "capacity_bytes": 32768, "working_set_bytes": 16384}
    request = {
        "threads": 1, "seconds": 0.01, "product": 64, "precisions": ["fp32", "fp64", "bf16"], "levels": [level],
        "storage": {"folder": str(tmp_path), "bytes": 8 << 20},
    }  # fmt: skip
    ways, missing = run_probe(request, tmp_path)
    kinds = [(each["what"], each.get("precision") or each.get("level")) for each in ways]
    assert kinds[:2] == [("flops", "fp32"), ("flops", "fp64")] and ("bandwidth", "L1") in kinds
    assert ("storage", None) in kinds or any("storage" in each for each in missing)
    assert all(each["value"] >= each["median"] > 0 for each in ways)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".d5suite")]


def test_working_sets_fit_their_level_and_exceed_the_last_cache() -> None:
    levels, missing = working_sets(1)
    caches = [each for each in levels if each["level"] != "memory"]
    memory = [each for each in levels if each["level"] == "memory"]
    for each in caches:
        assert 0 < each["working_set_bytes"] <= each["capacity_bytes"]
    assert len(memory) + any("memory" in each for each in missing) == 1
    for each in memory:
        assert each["working_set_bytes"] >= 2 * max((cache["capacity_bytes"] for cache in caches), default=0)
    small, missing = working_sets(1, largest=1)
    assert not small and missing


def test_a_framework_measures_through_the_contract(tmp_path: Path) -> None:
    if discover()[0]["deep500"].problem() is not None:
        pytest.skip("deep500 is not installed")
    level = {"level": "L2", "capacity_bytes": 1 << 20, "working_set_bytes": 1 << 19}
    ways, missing = jobs.framework_ways(
        select("deep500"), device="cpu", precision="fp32", threads=1, product=64, levels=[level], seconds=0.01,
        memory_bytes=4 << 30, folder=tmp_path,
    )  # fmt: skip
    assert {each["what"] for each in ways} == {"flops", "bandwidth"} and not missing
    assert all(each["value"] > 0 and each["threads"] == 1 for each in ways)


def test_a_line_has_intervals_that_hold_it() -> None:
    rng = np.random.default_rng(0)
    times = {
        4.0**power: [(2e-6 + 4**power / 5e9) * factor for factor in rng.lognormal(0, 0.05, 40)]
        for power in range(1, 12)
    }
    line, alpha, beta = line_intervals(times, draws=50)
    assert alpha[0] <= line.alpha_s <= alpha[1] and beta[0] <= line.beta_s_per_byte <= beta[1]
    assert alpha[0] <= 2e-6 <= alpha[1] and alpha[1] - alpha[0] < 4e-7


@pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="Gloo comes with PyTorch")
@pytest.mark.slow
def test_a_ping_pong_of_two_ranks_has_latency_and_rate(tmp_path: Path) -> None:
    found, missing = jobs.transport_way(
        "gloo", device="cpu", threads=2, seconds=0.02, memory_bytes=4 << 30, folder=tmp_path
    )
    assert found is not None, missing
    low, high = found["alpha_interval_s"]
    assert 0 <= low <= found["alpha_s"] <= high < 0.1 and found["beta_s_per_byte"] >= 0
    assert all(low <= best <= high for best, low, high in found["loggp"].values())


def test_the_file_is_read_as_a_roof_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bandwidth: dict[str, Any] = {"what": "bandwidth", "precision": None, "level": "memory", "capacity_bytes": 0}
    planned(monkeypatch, [way("NumPy", 1.0), way("torch", 1.5), way("triad", 2.0, **bandwidth)])
    path = tmp_path / "m.json"
    assert main(["machine", "-o", str(path), "--threads", "1", "--backend", "none", "--only", "flops,bandwidth"]) == 0
    roof = read_ceilings(path).roof(device="cpu", precision="fp32", threads=1)
    assert isinstance(roof, Roof) and roof.flops_per_s == 1e9 and roof.levels[0].bytes_per_s == 5e8
    assert any("do not agree" in note for note in roof.notes)
    text = capsys.readouterr().out
    assert "33% below: no agreement" in text and "none" in text
    assert json.loads(path.read_text())["host"]["cpus"] > 0
    assert command.name_of({"what": "host_to_device"}) == "host to device"
    with pytest.raises(ConfigurationError):
        measure_machine(MachinePlan([1], ["fp32"], [], kinds=[]), lambda what: None)


def test_loggp_of_a_transport_has_intervals_that_hold_it() -> None:
    rng, true = np.random.default_rng(0), LogGP(2e-6, 3e-6, 5e-6, 1e-9)
    single = 2 * true.message_s(1)
    exact = single, single + (BURST - 1) * true.gap_s, single + (BURST - 1) * (PAUSE_S + true.overhead_s)
    samples = [(each * rng.lognormal(0, 0.002, 200)).tolist() for each in exact]
    found = jobs.loggp_intervals(*samples, beta=1e-9)
    for name, value in vars(true).items():
        best, low, high = found[name]
        assert low <= best <= high and best == pytest.approx(value, rel=0.1, abs=2e-7)
    entry = {
        "what": "transport", "transport": "gloo", "alpha_s": 1e-5, "alpha_interval_s": [1e-5, 1e-5], "loggp": found,
        "beta_s_per_byte": 1e-9, "beta_interval_s_per_byte": [1e-9, 1e-9],
    }  # fmt: skip
    assert ", o 1.99" in command.figure_of(entry) or ", o 2" in command.figure_of(entry)
