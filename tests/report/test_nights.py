"""A history's verdicts on simulated nights: no false alarms, and steps are found in time."""

from __future__ import annotations

import pytest

from benchmarks.bench_history import NOISES, judged, night, noise, waited


@pytest.mark.parametrize(
    ("kind", "earlier", "nights"),
    [
        *((kind, 30, 12) for kind in ("wild", "bimodal")),
        *(pytest.param(kind, 30, 12, marks=pytest.mark.slow) for kind in ("quiet", "drifting back")),
        *(pytest.param(kind, 10, 60, marks=pytest.mark.slow) for kind in NOISES),
    ],
)
def test_nights_without_a_change_raise_no_alarm(kind: str, earlier: int, nights: int) -> None:
    """By Student's t alone, half of the nights with wild runs would."""
    assert [night(kind, earlier, seed) for seed in range(nights)].count("slower") == 0


@pytest.mark.parametrize("kind", NOISES)
def test_a_step_is_found_with_few_runs(kind: str) -> None:
    waits = sorted(waited(kind, 30, 1.1, seed) for seed in range(10))
    assert waits[5] <= 8 and waits[-2] <= 12
    assert waited("quiet", 30, 1.1, 0) == 3


def test_one_run_that_stands_out_is_to_be_measured_again() -> None:
    earlier = noise("quiet", 30, 0)
    found = judged(earlier, 1.5)
    assert (found.verdict, found.regressions) == ("uncertain", [])
    assert found.reasons[-1] == "one run may stand out by chance: measure again; 3 in a row, each added, decide"
    assert judged([*earlier, 1.5, 1.0], 1.5).verdict == "uncertain"
    found = judged([*earlier, 1.5, 1.4], 1.5)
    assert (found.verdict, found.regressions) == ("slower", ["time"])
    assert found.reasons[0].startswith("1.5") and "as the latest 3 runs agree" in found.reasons[0]
