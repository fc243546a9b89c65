"""Find the first revision that made a benchmark slower, for ``d5suite bisect``.

As ``git bisect run`` does, but each revision is measured in turn with the good one. Where one
cannot be measured, or has no clear verdict, its neighbour is measured instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.report.verdicts import RunComparison, Verdict
from d5suite.session.tools import revisions

Measure = Callable[[str, str, str | None], RunComparison]
"""Compares two revisions: one benchmark, given by name, or all if the name is None."""


@dataclass(frozen=True)
class Culprit:
    """The first slow revision, if any.

    Attributes
    ----------
    benchmark : str
        Name of the benchmark that became slower.
    ratio : float
        Time of the bad revision divided by the time of the good one.
    revisions : list of str
        The first slower one; several if those just before it have no clear verdict.
    steps : list of (str, str)
        Revisions that were measured, with their verdicts.
    """

    benchmark: str
    ratio: float
    revisions: list[str]
    steps: list[tuple[str, str]] = field(default_factory=list)


def find_culprit(
    good: str, bad: str, measure: Measure, tell: Callable[[str], None], repository: Path | None = None
) -> Culprit | RunComparison:
    """Find the first revision that is slower than the good one.

    Parameters
    ----------
    good, bad : str
        Revisions; the good one is an ancestor of the bad one.
    measure : callable
    tell : callable
        Receives each finding, as text.
    repository : Path, optional
        Git repository of the revisions; by default that of the current folder.

    Returns
    -------
    Culprit or RunComparison
        The comparison of good and bad, if it shows no benchmark that is slower.

    Raises
    ------
    ConfigurationError
        If there is no revision between them, or one of the two cannot be measured.
    """
    between = revisions(good, bad, repository)
    whole = measure(good, bad, None)
    slower = [each for each in whole.verdicts if each.verdict == "slower"]
    if not slower:
        return whole
    worst = max(slower, key=_ratio)
    found = Culprit(worst.name, _ratio(worst), [])
    tell(f"{worst.name} takes {found.ratio:.3f} times as long, since one of {len(between)} revisions")
    low, high = -1, len(between) - 1  # the last one known to be good, the first one known to be slower
    skipped: set[int] = set()
    while True:
        left = [place for place in range(low + 1, high) if place not in skipped]
        if not left:
            break
        middle = min(left, key=lambda place: abs(2 * place - low - high))
        verdict = _verdict(measure, good, between[middle], worst.name)
        found.steps.append((between[middle], verdict))
        tell(f"{between[middle][:12]}: {verdict}")
        if verdict == "slower":
            high = middle
        elif verdict in ("same", "faster"):
            low = middle
        else:
            skipped.add(middle)
    return replace(found, revisions=between[low + 1 : high + 1])


def _ratio(verdict: Verdict) -> float:
    return verdict.ratio.value if verdict.ratio is not None else 1.0


def _verdict(measure: Measure, good: str, revision: str, name: str) -> str:
    try:
        verdicts = measure(good, revision, name).verdicts
    except ConfigurationError as error:  # this revision cannot be made
        return error.what
    if not verdicts:
        return "not comparable"
    found = verdicts[0]
    return found.decision.outcome if found.decision is not None else found.verdict
