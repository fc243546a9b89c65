"""Which competitor is fastest, by how much, and which competitors cannot be told apart.

Imports its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from d5suite.statistics.decisions import CONFIDENCE
from d5suite.statistics.medians import Summary, ratio_of_medians, summarize
from d5suite.statistics.ratios import Ratio
from d5suite.statistics.rounds import ratio_of_rounds


class Competitor(NamedTuple):
    """Times of one competitor.

    Attributes
    ----------
    samples : sequence of float
        Seconds per item, so that results of different sizes compare.
    rounds : sequence of sequences of float
        Median time of each round, by launch; empty if the competitor took no turns.
    veto : str
        Why its times decide nothing; empty if they may.
    turns : tuple of str
        Group in which the competitor took turns, by launch; empty if it took no turns.
    """

    samples: Sequence[float]
    rounds: Sequence[Sequence[float]] = ()
    veto: str = ""
    turns: tuple[str, ...] = ()


class Ranking:
    """A ranking of competitors by speed.

    Two that took turns with each other are compared by their rounds; any others by their medians.

    Parameters
    ----------
    competitors : sequence of Competitor
        At least one.
    between_runs : float
        Standard deviation of a median's logarithm from process to process. Used for competitors
        that took no turns with each other: each ran in its own process.

    Attributes
    ----------
    order : list of int
        Places of the competitors, the fastest first.
    """

    def __init__(self, competitors: Sequence[Competitor], between_runs: float) -> None:
        self._between_runs, self._competitors, places = between_runs, competitors, range(len(competitors))
        self._vetoes = [each.veto for each in competitors]
        self._ratios: dict[tuple[int, int], Ratio] = {}
        self._summaries: dict[int, Summary] = {}
        groups = [each.turns for each in competitors if each.turns]
        if len(set(groups)) < len(groups):  # ratios of rounds do not multiply: the fastest is the least beaten one
            fastest = max(places, key=lambda one: min(self.ratio(one, other).value for other in places))
            self.order = sorted(places, key=lambda one: (one != fastest, self.ratio(fastest, one).value))
        else:
            self.order = sorted(places, key=lambda one: self._summary(one).median)

    def ratio(self, a: int, b: int) -> Ratio:
        """Return how many times as long the competitor at place b takes as the one at place a."""
        if (a, b) in self._ratios:
            return self._ratios[a, b]
        one, other = self._competitors[a], self._competitors[b]
        if one.turns and one.turns == other.turns:
            ratio = ratio_of_rounds(one.rounds, other.rounds)
        else:
            sides = self._summary(a), self._summary(b)
            ratio = ratio_of_medians(*sides, between_runs=self._between_runs, confidence=CONFIDENCE)
        self._ratios[a, b] = ratio
        return ratio

    def _summary(self, place: int) -> Summary:
        if place not in self._summaries:
            self._summaries[place] = summarize(self._competitors[place].samples)
        return self._summaries[place]

    def is_tie(self, a: int, b: int) -> bool:
        """Return whether it is open which of the two is faster, or a veto forbids an answer."""
        return bool(self._vetoes[a] or self._vetoes[b]) or self.ratio(a, b).includes_one


UNDECIDED_SHARE = 0.1
"""Share of a run's CPU time that something else may take before its times decide nothing. Taking
turns cancels a disturbance only in part: beside a program that used 1.6 of 2 CPUs, a lead of 54.8
(28.7 to 171) was measured, although the other backend leads by 1.7."""


def veto_of(machine: Mapping[str, Any]) -> str:
    """Return why times taken on a disturbed machine decide nothing; empty if they may.

    Parameters
    ----------
    machine : mapping
        ``machine`` of a record. Without a ``taken_share`` any disturbance is a reason.
    """
    if not machine.get("disturbed") or machine.get("taken_share", 1.0) <= UNDECIDED_SHARE:
        return ""
    return "; ".join(map(str, machine.get("reasons", ()))) or "the machine was disturbed"
