"""Confirmation of a change by new processes, at an error rate that holds however much they differ.

Two processes of one program differ by their memory layout and the placement of their threads, which
no number of samples averages out. If nothing has changed, both sides of a launch are equally likely
to be slower. Each launch bets a fraction of the stake on the side that was slower before. The stake
exceeds 1 / alpha with a probability of at most alpha, however often one looks (Ville's inequality;
Shafer, "Testing by betting", JRSS A 184, 2021).

Imports NumPy and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from d5suite.statistics.decisions import Decision, decide, half, of_pairs
from d5suite.statistics.intervals import interval_ranks
from d5suite.statistics.ratios import Ratio

BET = 0.8
"""Fraction of the stake that is bet: nearly as quick as betting all, and survives one loss."""

LOSSES = 1
"""Number of launches that may contradict the others."""


def launches_needed(alpha: float, losses: int = 0) -> int:
    """Return the launches needed to confirm a change, given `losses` contrary ones.

    Parameters
    ----------
    alpha : float
        In (0, 1).
    losses : int
    """
    return losses + math.ceil((-math.log(alpha) - losses * math.log1p(-BET)) / math.log1p(BET))


class Launches:
    """Decision from several launches. The first may find a change; others confirm it.

    Parameters
    ----------
    first : Decision
        Decision on the pairs of the first launch.
    effect : float
        Relative change to find: less than half of it does not count.
    """

    def __init__(self, first: Decision, effect: float) -> None:
        self._first, self._effect = first, effect
        self._ratios: list[Ratio] = []
        self._confirmed = False
        self.open = first.changed
        """Whether another launch is needed."""

    def add(self, launch: Decision, alpha: float) -> None:
        """Add another launch.

        Parameters
        ----------
        launch : Decision
            Only its ratio counts.
        alpha : float
            Probability that launches confirm a change if there is none.
        """
        assert launch.ratio is not None
        self._ratios.append(launch.ratio)
        slower = self._first.outcome == "slower"
        lost = sum(ratio.value <= 1 if slower else ratio.value >= 1 for ratio in self._ratios)
        held = (len(self._ratios) - lost) * math.log1p(BET) + lost * math.log1p(-BET)
        self._confirmed = held >= -math.log(alpha)
        self.open = not self._confirmed and lost <= LOSSES

    def _confirmable(self, middle: float, values: Sequence[float]) -> float:
        """Return the smallest slowdown that launches with the spread of these would confirm.

        All but `LOSSES` launches must be on one side of 1.
        """
        ordered = sorted(values if self._first.outcome == "slower" else [1 / each for each in values])
        lowest = ordered[min(LOSSES, len(ordered) - 1)]
        return (middle if self._first.outcome == "slower" else 1 / middle) / lowest

    def decision(self) -> Decision:
        """Return the decision of all launches.

        The ratio is the median of the later launches, because the first one was chosen for its
        outcome; the interval is their range.
        """
        first = self._first
        assert first.ratio is not None
        first_ratio = f"{first.ratio.value:.3f} times as long, which "
        if not self._ratios:
            reason = f"{first_ratio}no second launch of both sides has confirmed"
            return Decision("uncertain", first.ratio, (reason,), finds=first.finds) if self.open else first
        values = [ratio.value for ratio in self._ratios]
        middle = math.exp(float(np.median(np.log(values))))
        pairs = sum(ratio.n for ratio in (first.ratio, *self._ratios))
        ratio = Ratio(middle, min(values), max(values), interval_ranks(len(values)).confidence, "pairs", pairs)
        evidence = ratio._replace(low=middle, high=middle) if self._confirmed else ratio._replace(low=0, high=math.inf)
        decision = decide(ratio, effect=self._effect, least=half(self._effect), corrected=evidence)
        decision = decision._replace(finds=max(first.finds, self._confirmable(middle, values)))
        if decision.outcome == "uncertain":
            reason = f"{first_ratio}later launches do not confirm: {ratio.low:.3f} to {ratio.high:.3f}"
            return decision._replace(reasons=(reason,))
        return of_pairs(decision)
