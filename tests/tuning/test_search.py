"""The search on simulated costs, where the best candidate is known by trying all of them."""

from __future__ import annotations

import math
import random

import pytest

from d5suite.levels.knobs import TuningKnob
from d5suite.tuning.search import BudgetSpentError, Search, TrialOutcome
from d5suite.tuning.space import Candidate, Space

NOISE = 0.005
"""Standard deviation of a trial's value."""


def knobs_of(*counts: int) -> list[TuningKnob]:
    return [TuningKnob(f"k{n}", tuple(map(str, range(count))), "a test") for n, count in enumerate(counts)]


class Simulated:
    """Logarithms of costs: of each value, of pairs of values, and a few that fail or are wrong."""

    def __init__(self, space: Space, seed: int, *, spread: float = 0.12, pairs: int = 3) -> None:
        self.space, self.draw = space, random.Random(seed)
        self.costs = {
            (knob.name, value): self.draw.gauss(0, spread) * (value != knob.default)
            for knob in space.knobs for value in knob.values
        }  # fmt: skip
        self.pairs: dict[tuple[str, str, str, str], float] = {}
        for _ in range(pairs):
            one, other = self.draw.sample(space.knobs, 2)
            self.pairs[one.name, one.values[-1], other.name, other.values[-1]] = self.draw.gauss(0, spread)
        broken = self.draw.choice(space.knobs)
        self.broken = (broken.name, broken.values[-1])
        self.trials = 0

    def true(self, candidate: Candidate) -> float:
        values = dict(zip(self.space.places, candidate, strict=True))
        if values[self.broken[0]] == self.broken[1]:
            return math.inf
        cost = sum(self.costs[each] for each in values.items())
        return cost + sum(
            cost for (a, x, b, y), cost in self.pairs.items() if values[a] == x and values[b] == y
        )  # fmt: skip

    def __call__(self, candidate: Candidate, bar: float) -> TrialOutcome:
        self.trials += 1
        true = self.true(candidate)
        if true == math.inf:
            return TrialOutcome(self.draw.choice(["failed", "wrong"]), reason="planted")
        value = true + self.draw.gauss(0, NOISE)
        return TrialOutcome("pruned" if value > bar + 0.05 else "measured", value)


@pytest.mark.parametrize("counts", [(4, 3, 3, 2, 2, 2), (8, 5, 4, 3), (2,) * 9, (10, 10, 10)], ids=str)
def test_it_comes_within_2_percent_of_the_best_with_a_tenth_of_the_candidates(counts: tuple[int, ...]) -> None:
    space, found = Space(tuple(knobs_of(*counts))), 0
    for seed in range(10):
        costs = Simulated(space, seed)
        best = min(map(costs.true, space.candidates()))
        course = Search(space, costs, limit=space.size() // 10 - 6, seed=seed).run()
        assert len(course.candidates) <= space.size() / 10 and costs.trials <= space.size() / 10
        found += costs.true(course.best) - best < math.log(1.02)
    assert found >= 9


def test_it_comes_back_from_a_bad_start() -> None:
    """The default is 20 times as slow as it could be: one knob alone costs a factor of 15."""
    space, found = Space(tuple(knobs_of(5, 4, 4, 3, 2))), 0
    for seed in range(10):
        costs = Simulated(space, seed)
        costs.costs |= {("k0", str(value)): -math.log(15) + value * 0.05 for value in range(1, 5)}
        costs.broken = ("k4", "1")
        best = min(map(costs.true, space.candidates()))
        course = Search(space, costs, limit=space.size() // 10 - 6, seed=seed).run()
        found += costs.true(course.best) - best < math.log(1.02)
    assert found >= 9


class Planted:
    """One value makes it 1.5 times as fast; others do nothing, but one slows and one crashes."""

    def __init__(self, space: Space, seed: int) -> None:
        self.space, self.draw = space, random.Random(seed)
        knobs = self.draw.sample(space.knobs, 3)
        self.planted, self.slow, self.broken = ((each.name, self.draw.choice(each.values[1:])) for each in knobs)

    def __call__(self, candidate: Candidate, bar: float) -> TrialOutcome:
        chosen = set(zip(self.space.places, candidate, strict=True))
        if self.broken in chosen:
            return TrialOutcome("failed", reason="planted")
        value = -math.log(1.5) * (self.planted in chosen) + math.log(1.3) * (self.slow in chosen)
        return TrialOutcome("measured", value + self.draw.gauss(0, NOISE))


@pytest.mark.parametrize("counts", [(10, 10, 10, 10), (2,) * 13, (4,) * 7], ids=str)
def test_a_planted_knob_is_found_within_20_candidates_of_10000(counts: tuple[int, ...]) -> None:
    space = Space(tuple(knobs_of(*counts)))
    assert space.size() > 8000
    for seed in range(10):
        measure = Planted(space, seed)
        course = Search(space, measure, limit=20, seed=seed, again=0).run()
        assert len(course.candidates) <= 20
        assert measure.planted in set(zip(space.places, course.best, strict=True)), f"seed {seed}"


def test_one_that_is_wrong_or_fails_is_never_the_best() -> None:
    space = Space(tuple(knobs_of(6, 6)))

    def measure(candidate: Candidate, bar: float) -> TrialOutcome:
        if candidate[0] == "5":
            return TrialOutcome("wrong", -1.0, "planted")
        return TrialOutcome("failed") if candidate[1] == "5" else TrialOutcome("measured", -0.1 * (candidate[0] == "3"))

    course = Search(space, measure, limit=36).run()
    assert len(course.candidates) == 36
    assert course.best == ("3", "0")  # of equal ones, the one with the fewest changes


def test_the_same_seed_makes_the_same_trials() -> None:
    space = Space(tuple(knobs_of(4, 4, 4, 4)))
    first, second = (Search(space, Simulated(space, 3), limit=40, seed=7).run() for _ in range(2))
    assert [each[0] for each in first.trials] == [each[0] for each in second.trials]


def test_a_spent_budget_ends_it_with_the_best_so_far() -> None:
    space = Space(tuple(knobs_of(4, 4, 4)))
    left = iter(range(5))

    def measure(candidate: Candidate, bar: float) -> TrialOutcome:
        if next(left, None) is None:
            raise BudgetSpentError
        return TrialOutcome("measured", -0.2 * (candidate[0] == "2"))

    course = Search(space, measure, limit=30).run()
    assert len(course.trials) == 5 and course.best == ("2", "0", "0")


def test_proposals_come_first_and_a_slow_one_ends_early() -> None:
    space = Space(tuple(knobs_of(3, 3)))
    bars: list[float] = []

    def measure(candidate: Candidate, bar: float) -> TrialOutcome:
        bars.append(bar)
        return TrialOutcome("measured", {"2": -0.3, "1": 0.5, "0": 0.0}[candidate[0]])

    course = Search(space, measure, limit=9, proposals=[("2", "0")], again=0).run()
    assert [each[0] for each in course.trials[:2]] == [("0", "0"), ("2", "0")]
    assert bars[0] == math.inf and bars[2] == -0.3
