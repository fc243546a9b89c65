"""Confirmation of a change by new processes, at an error rate valid for any of their effects.

Two processes of one program differ by their memory layout and the placement of their threads, which
no number of samples averages out. If nothing has changed, which side of a launch is the slower one
is a fair coin. Each launch bets a part of what is held on the side that was slower before; what is
held exceeds 1 / alpha with a probability of at most alpha, however often one looks (Ville's
inequality; Shafer, "Testing by betting", JRSS A 184, 2021).

Imports NumPy and its neighbour.
"""

from __future__ import annotations

import math

import numpy as np

from d5suite.statistics.sequential import Decision

BET = 0.8
"""Share of the stake that is bet: nearly as quick as betting all, and survives one loss."""

LOSSES = 1
"""Launches that may contradict the others."""


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
    """Verdict of launches on one measurement. The first may raise a suspicion; others confirm it.

    Parameters
    ----------
    first : Decision
        Of the blocks of the first launch.
    effect : float
        Relative change to find: less than half of it does not count.
    """

    def __init__(self, first: Decision, effect: float) -> None:
        self._first, self._limit = first, math.log1p(effect)
        self._found: list[float] = []
        self._confirmed = False
        self.open = first.verdict in ("slower", "faster")
        """Whether another launch is needed."""

    def hear(self, ratio: float, alpha: float) -> None:
        """Take another launch.

        Parameters
        ----------
        ratio : float
            B's time over A's.
        alpha : float
            Probability that launches confirm a change if there is none.
        """
        self._found.append(math.log(ratio))
        towards = 1 if self._first.verdict == "slower" else -1
        lost = sum(each * towards <= 0 for each in self._found)
        held = (len(self._found) - lost) * math.log1p(BET) + lost * math.log1p(-BET)
        self._confirmed = held >= -math.log(alpha)
        self.open = not self._confirmed and lost <= LOSSES

    def decision(self) -> tuple[Decision, str]:
        """Return the verdict of all launches, and why it is uncertain.

        The ratio is the median of the launches that were to confirm, which were not chosen for what
        they say; the interval is their range.
        """
        first = self._first
        if not self._found:
            if not self.open:
                return first, ""
            doubt = f"{first.ratio:.3f} times as long, which no second launch of both sides has confirmed"
            return first._replace(verdict="uncertain"), doubt
        middle, low, high = float(np.median(self._found)), min(self._found), max(self._found)
        found = Decision(first.verdict, math.exp(middle), math.exp(low), math.exp(high))
        if self._confirmed and abs(middle) >= self._limit / 2:
            return found, ""
        if -self._limit <= low and high <= self._limit:
            return found._replace(verdict="same"), ""
        doubt = (
            f"{first.ratio:.3f} times as long, which later launches do not confirm: {found.low:.3f} to {found.high:.3f}"
        )
        return found._replace(verdict="uncertain"), doubt
