"""New processes that confirm a change, or not: their error rate, and what they find."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import bench_verdicts
from d5suite.statistics.decisions import Decision
from d5suite.statistics.launches import LOSSES, Launches, launches_needed
from d5suite.statistics.ratios import Ratio


def decision(outcome: str, value: float, low: float = 0.0, high: float = math.inf) -> Decision:
    """The decision from ten pairs of one launch."""
    return Decision(outcome, Ratio(value, low, high, 0.99, "pairs", 10))


SLOWER = decision("slower", 1.1, 1.05, 1.2)


def heard(ratios: list[float], alpha: float, first: Decision = SLOWER) -> Launches:
    """Launches that are taken until no more is needed."""
    launches = Launches(first, effect=0.02)
    for each in ratios:
        if launches.open:
            launches.add(decision("uncertain", each), alpha)
    return launches


def test_a_change_is_confirmed_by_as_many_launches_as_are_needed_and_no_fewer() -> None:
    for alpha in (0.01, 0.01 / 24):
        for losses in (0, LOSSES):
            needed = launches_needed(alpha, losses)
            ratios = [0.9] * losses + [1.1] * (needed - losses)
            assert heard(ratios[:-1], alpha).open
            found = heard(ratios, alpha)
            assert not found.open and found.decision().outcome == "slower"
            mirrored = heard([1 / each for each in ratios], alpha, decision("faster", 1 / 1.1, 0.8, 0.95))
            assert mirrored.decision().outcome == "faster"
    assert launches_needed(0.01) == 8


def test_what_does_not_count_is_confirmed_as_the_same() -> None:
    found = heard([1.005] * 8, 0.01).decision()
    assert (found.outcome, found.reasons) == ("same", ())
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(1.005) and found.ratio.n == 90


def test_launches_say_which_slowdown_they_could_have_confirmed() -> None:
    """One may contradict. Where two do, a slowdown as large as the observed one was too small."""
    calm = heard([1.05, 1.051, 1.049, 1.05, 1.05, 1.05, 1.05, 1.05], 0.01, SLOWER._replace(finds=1.02)).decision()
    assert calm.outcome == "slower" and calm.finds < 1.05  # limited by the first launch
    torn = heard([1.08, 0.97, 1.1, 1.06, 0.98], 0.01, SLOWER._replace(finds=1.02)).decision()
    assert torn.outcome == "uncertain" and torn.ratio is not None
    assert torn.finds == pytest.approx(1.06 / 0.98) and torn.finds > torn.ratio.value


@pytest.mark.parametrize("layout", [(0.0, 0.1), (-0.3, 0.0, 0.3), (0.0, 0.0, 0.0, 1.0)])
def test_processes_of_few_layouts_confirm_nothing_more_often_than_said(layout: tuple[float, ...]) -> None:
    """A test that trusts in normal noise confirms three equal differences in a row at once."""
    random, alpha, suites = np.random.default_rng(3), 0.05, 3000
    confirmed = equal = 0
    for _ in range(suites):
        launches = Launches(SLOWER, effect=0.02)
        shifts = []
        while launches.open:
            shifts.append(random.choice(layout) - random.choice(layout))
            launches.add(decision("uncertain", math.exp(shifts[-1] + random.normal(0, 1e-4))), alpha)
        confirmed += launches.decision().outcome == "slower"
        equal += shifts[0] > 0 and len(set(shifts[:2])) == 1
    assert confirmed <= (alpha + 3 * math.sqrt(alpha / suites)) * suites
    assert equal > confirmed  # two launches that agree are no proof


@pytest.mark.parametrize("layout", bench_verdicts.LAYOUTS)
def test_suites_of_equal_sides_raise_no_alarm_whatever_processes_do(layout: str) -> None:
    random = np.random.default_rng(11)
    verdicts = bench_verdicts.paired_verdicts(random, "quiet", [0] * bench_verdicts.BENCHMARKS, layout)
    assert not {"slower", "faster"} & {verdict for verdict, *_ in verdicts}


def test_two_percent_are_found_where_processes_differ_by_half_a_percent() -> None:
    random = np.random.default_rng(5)
    found = [bench_verdicts.paired_verdicts(random, "quiet", [0.02], "half_percent")[0][0] for _ in range(40)]
    assert found.count("slower") >= 32
    assert not found.count("faster")
