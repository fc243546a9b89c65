"""Who is fastest of several that compete, by how much, and who cannot be told from whom.

Imports its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from d5suite.statistics.decisions import CONFIDENCE
from d5suite.statistics.medians import ratio_of_medians, summarize
from d5suite.statistics.ratios import Ratio
from d5suite.statistics.rounds import ratio_of_rounds


class Competitor(NamedTuple):
    """Times of one competitor.

    Attributes
    ----------
    samples : sequence of float
        Seconds per item, so that results of different sizes compare; empty if there are rounds.
    rounds : sequence of sequences of float
        By launch, the median time of each round; empty if it did not take turns with all others.
    """

    samples: Sequence[float]
    rounds: Sequence[Sequence[float]] = ()


class Ranking:
    """Competitors in order, by their rounds if all of them took turns.

    Parameters
    ----------
    competitors : sequence of Competitor
        At least one.
    between_runs : float
        Standard deviation of a median's logarithm from process to process. It counts for those
        that took no turns: each ran in a process of its own.

    Attributes
    ----------
    order : list of int
        Places of the competitors, the fastest first.
    """

    def __init__(self, competitors: Sequence[Competitor], between_runs: float) -> None:
        self._between_runs, places = between_runs, range(len(competitors))
        self._ratios: dict[tuple[int, int], Ratio] = {}
        self._rounds = [each.rounds for each in competitors] if all(each.rounds for each in competitors) else []
        self._summaries = [] if self._rounds else [summarize(each.samples) for each in competitors]
        if self._rounds:  # medians of ratios do not multiply: the fastest is the one that others beat least
            fastest = max(places, key=lambda one: min(self.ratio(one, other).value for other in places))
            self.order = sorted(places, key=lambda one: (one != fastest, self.ratio(fastest, one).value))
        else:
            self.order = sorted(places, key=lambda one: self._summaries[one].median)

    def ratio(self, a: int, b: int) -> Ratio:
        """Return how many times as long the competitor at place b takes as the one at place a."""
        if (a, b) in self._ratios:
            return self._ratios[a, b]
        if self._rounds:
            ratio = ratio_of_rounds(self._rounds[a], self._rounds[b])
        else:
            sides = self._summaries[a], self._summaries[b]
            ratio = ratio_of_medians(*sides, between_runs=self._between_runs, confidence=CONFIDENCE)
        self._ratios[a, b] = ratio
        return ratio

    def is_tie(self, a: int, b: int) -> bool:
        """Return whether either competitor may be the faster one.

        Whatever else forbids a verdict on two competitors belongs here: it makes them a tie.
        """
        return self.ratio(a, b).includes_one
