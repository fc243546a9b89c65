"""What else uses the machine is said at the start of a run, if it is much."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from d5suite.instruments import quiet
from d5suite.instruments.machine import Disturbance, snapshot
from d5suite.pytest_plugin import busy, stash
from d5suite.pytest_plugin.estimate import TimeEstimate
from d5suite.pytest_plugin.progress import PROGRESS


def told(found: Disturbance, monkeypatch: pytest.MonkeyPatch, took_s: float | None, wait_s: float | None) -> list[str]:
    """What a run of two threads says."""
    lines: list[str] = []
    reporter = SimpleNamespace(write_line=lambda line, **markup: lines.append(line))
    config: Any = SimpleNamespace(stash=pytest.Stash(), pluginmanager=SimpleNamespace(getplugin=lambda name: reporter))
    config.stash[stash.MACHINE] = snapshot()
    config.stash[stash.SETTINGS] = SimpleNamespace(threads=2, wait_quiet_s=wait_s)
    config.stash[PROGRESS] = SimpleNamespace(earlier_s=lambda: took_s)
    monkeypatch.setattr(quiet, "watch", lambda threads, since: found)
    busy.tell(config)
    return lines


WHY = ["other processes used 1.60 of 2 CPUs: stress (1.58)"]


@pytest.mark.parametrize(
    ("reasons", "details", "is_told"),
    [
        (WHY, {"others_on_our_cpus": 1.6}, True),
        (WHY, {"others_on_our_cpus": 0.15}, False),  # marked later, but it decides
        ([], {"others_on_our_cpus": 0.01}, False),
        (["the hypervisor took 30%"], {"steal_share": 0.3}, True),
        (["the CPU quota stopped it"], {"throttled_share": 0.3}, True),
    ],
)
def test_a_busy_machine_is_told(
    reasons: list[str], details: dict[str, Any], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Disturbance(bool(reasons), reasons, details)
    monkeypatch.setattr(quiet, "taken_share", lambda found, threads, cpus: real(found, 2, 2))
    lines = told(found, monkeypatch, 200.0, None)
    assert bool(lines) is is_told
    if is_told:
        assert lines[0] == f"d5suite: the machine is busy: {reasons[0]}" and "decide nothing" in lines[1]
        assert lines[2:] == [
            "d5suite: an earlier run took 3 min", "d5suite: to wait for a quiet machine first, give --wait-quiet"
        ]  # fmt: skip
        assert len(told(found, monkeypatch, None, 60.0)) == 2  # nothing is known, and it waits already


real = quiet.taken_share


def test_cpus_that_the_run_does_not_need_may_be_used_by_others() -> None:
    found = Disturbance(True, WHY, {"others_on_our_cpus": 6.5})
    assert real(found, 2, 8) == pytest.approx(0.25) and real(found, 1, 8) == 0 and real(found, 8, 8) > 0.8


def test_the_time_of_an_earlier_run_is_known_if_all_of_its_steps_are() -> None:
    jobs = {("case", "torch"): ["case/inference"]}
    known: dict[str, float] = {}
    estimate = TimeEstimate(jobs, known)
    assert estimate.earlier_s() is None
    steps = ["starting", *(f"{what} case/inference" for what in ("preparing", "validating", "measuring", "proving"))]
    for step in steps:
        estimate.begin(("case", "torch"), step)
    estimate.begin(("case", "torch"), "proving nothing")
    known = dict.fromkeys((f"case torch {step} " + " " * (step == "starting") for step in steps), 2.0)
    assert TimeEstimate(jobs, known).earlier_s() == pytest.approx(10.0)
    del known[next(iter(known))]
    assert TimeEstimate(jobs, known).earlier_s() is None
