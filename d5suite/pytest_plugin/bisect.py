"""``d5suite bisect``: the revision of d5suite, or of a backend, that made a benchmark slower.

Like ``git bisect run``, driven by `d5suite.pytest_plugin.ab`: each revision is measured in turn
with the good one. What cannot be measured, or is not clear, is skipped for a neighbour.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from rich.console import Console

from d5suite.errors import ConfigurationError
from d5suite.pytest_plugin.ab import asking, measure
from d5suite.report.announcing import show_comparison
from d5suite.report.verdicts import Comparison, Exit, Verdict
from d5suite.session.sides import installed_from, revisions, subject

Measure = Callable[[str, str, str | None], Comparison]
"""Compares two revisions; of one benchmark, by its name, or of all."""


@dataclass(frozen=True)
class Culprit:
    """The first slow revision, if any.

    Attributes
    ----------
    benchmark : str
        Which became slower.
    ratio : float
        Of the bad revision over the good one.
    revisions : list of str
        The first slower one; several if those between could not be told apart.
    steps : list of (str, str)
        Revisions that were measured, with their verdicts.
    """

    benchmark: str
    ratio: float
    revisions: list[str]
    steps: list[tuple[str, str]] = field(default_factory=list)


def find_culprit(
    good: str, bad: str, measure: Measure, tell: Callable[[str], None], repository: Path | None = None
) -> Culprit | Comparison:
    """Find the first revision that is slower than the good one.

    Parameters
    ----------
    good, bad : str
        Revisions; the good one is an ancestor of the bad one.
    measure : callable
    tell : callable
        Receives what is found.
    repository : Path, optional
        Whose revisions; the current folder's by default.

    Returns
    -------
    Culprit or Comparison
        The comparison of good and bad, if it shows no benchmark that is slower.

    Raises
    ------
    ConfigurationError
        If there is no revision between them, or one cannot be measured at all.
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


def run_bisect(options: argparse.Namespace) -> int:
    """Carry out ``d5suite bisect``; return its exit code."""
    asked = asking(options)
    repository: Path | None = options.repository

    @cache
    def spec(revision: str) -> str:
        return f"rev:{revision}" if repository is None else installed_from(repository, revision)

    def measured(good: str, revision: str, only: str | None) -> Comparison:
        found = measure(options, (spec(good), spec(revision)), asked, only)
        if found.interrupted:
            raise KeyboardInterrupt
        return found.comparison

    found = find_culprit(options.good, options.bad, measured, _tell, repository)
    if isinstance(found, Comparison):
        show_comparison(found, Console(markup=False))
        print(f"no benchmark is slower at {options.bad} than at {options.good}")
        return int(found.exit or Exit.TOO_NOISY)
    several = len(found.revisions) > 1
    print(f"{found.benchmark} takes {found.ratio:.3f} times as long since{' one of' * several}")
    for each in found.revisions:
        print(f"  {subject(each, repository)}")
    return int(Exit.TOO_NOISY if several else Exit.NOTHING_WRONG)


def _tell(what: str) -> None:
    print(f"d5suite bisect: {what}", flush=True)


def _ratio(verdict: Verdict) -> float:
    return verdict.change.ratio if verdict.change is not None else 1.0


def _verdict(measure: Measure, good: str, revision: str, name: str) -> str:
    try:
        verdicts = measure(good, revision, name).verdicts
    except ConfigurationError as error:  # this revision cannot be made
        return error.what
    return verdicts[0].verdict if verdicts else "not comparable"
