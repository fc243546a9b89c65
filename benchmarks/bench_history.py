"""How often a history's verdicts are wrong, and how soon a step is found, on simulated nights.

A suite is 24 benchmarks; each night gives one figure of each. docs/compare.md has figures, and of
how many nights; an argument says how many::

    python -m benchmarks.bench_history 100
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import Counter

from d5suite.report.history import HistoryPoint
from d5suite.report.history_verdicts import verdict_on
from d5suite.report.runs import Entry
from d5suite.report.verdicts import Verdict
from d5suite.statistics.decisions import Threshold
from d5suite.statistics.medians import Summary

BENCHMARKS = 24
NOISES = ("quiet", "wild", "bimodal", "drifting back")
LONGEST = 20
"""Nights after which a step counts as not found."""


def noise(kind: str, count: int, seed: int | str) -> list[float]:
    """Factors by which runs of one level differ."""
    generator, last, found = random.Random(f"{kind} {seed}"), 0.0, []
    for _ in range(count):
        each = generator.gauss(0, 0.01)
        if kind == "wild" and generator.random() < 0.08:
            each += generator.expovariate(3)
        elif kind == "bimodal" and generator.random() < 0.3:
            each += 0.06
        elif kind == "drifting back":
            last = each = 0.4 * last + 2 * each
        found.append(math.exp(each))
    return found


def judged(earlier: list[float], new: float) -> Verdict:
    """Judge a run of a benchmark among the others of its suite."""
    points = [HistoryPoint(f"{day:04}", f"run {day}", _entry(figure)) for day, figure in enumerate(earlier)]
    return verdict_on(points, _entry(new), Threshold(), BENCHMARKS)


def _entry(figure: float) -> Entry:
    return Entry("benchmark", Summary(figure, math.inf, 1))


def night(kind: str, earlier: int, seed: int) -> str:
    """Return the most serious verdict on a night's suite in which nothing changed."""
    runs = [noise(kind, earlier + 1, f"{seed} {number}") for number in range(BENCHMARKS)]
    verdicts = {judged(each[:-1], each[-1]).verdict for each in runs}
    return next((each for each in ("slower", "uncertain", "faster") if each in verdicts), "same")


def waited(kind: str, earlier: int, factor: float, seed: int) -> int:
    """Return with how many runs a step is found; each is added to the history."""
    runs = noise(kind, earlier + LONGEST, f"{seed} step")
    runs[earlier:] = [factor * each for each in runs[earlier:]]
    found = (nights for nights in range(1, LONGEST + 1)
             if judged(runs[: earlier + nights - 1], runs[earlier + nights - 1]).verdict == "slower")  # fmt: skip
    return next(found, LONGEST + 1)


def main(count: int) -> None:
    """Print the table of the documentation."""
    for earlier in (10, 30, 60):
        for kind in NOISES:
            nights = Counter(night(kind, earlier, seed) for seed in range(count))
            cells = [f"{nights['slower']}/{count}", f"{nights['uncertain']}/{count}"]
            for factor in (1.1, 2.0):
                waits = sorted(waited(kind, earlier, factor, seed) for seed in range(count // 2))
                cells.append(f"{statistics.median_high(waits)} ({waits[math.ceil(0.9 * len(waits)) - 1]})")
            print(f"| {earlier} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
