"""How often verdicts are wrong, on simulated runs with the noise of real machines.

A suite is 24 benchmarks. Each kind of noise multiplies the times of both sides; what lasts longer
than a sample hits whichever side runs. Paired runs take blocks of ABBA or BAAB, a coin decides
which; each process has a memory layout that makes it faster or slower as long as it lives, and what
seems changed is measured by new processes. Two unpaired runs have times of their own and differ
from run to run. The figures in docs/compare.md come from::

    python -m benchmarks.bench_verdicts 40
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from d5suite.report.runs import BenchmarkRun, Entry
from d5suite.report.thresholds import PAIRED, Thresholds
from d5suite.report.verdicts import compare_runs
from d5suite.session.pairs import CONFIRMING_ALPHA, CONFIRMING_BLOCKS
from d5suite.statistics.decisions import ALPHA, Decision, Threshold, decide_pairs
from d5suite.statistics.launches import Launches
from d5suite.statistics.medians import summarize
from d5suite.statistics.sequential import block_difference

BENCHMARKS = 24
SLOT = 3
"""Samples of each letter of ABBA."""

BLOCKS = 60
"""The default budget."""

EFFECT = PAIRED.effect
ORDERS = ("ABBA", "BAAB")

Random = np.random.Generator


def quiet(random: Random, count: int) -> np.ndarray:
    """1% of noise, and one sample in 50 much longer."""
    return random.lognormal(0, 0.01, count) * np.where(random.random(count) < 0.02, 1.5, 1.0)


def steal(random: Random, count: int) -> np.ndarray:
    """Another machine takes the CPU in bursts of about ten samples."""
    return quiet(random, count) * np.where(_lasting(random, count, 0.03, 0.1), 1 + random.exponential(0.3, count), 1)


def neighbour(random: Random, count: int) -> np.ndarray:
    """A process beside it, for about 60 samples at a time, makes all a quarter slower."""
    return quiet(random, count) * np.where(_lasting(random, count, 1 / 60, 1 / 60), 1.25, 1)


def frequency(random: Random, count: int) -> np.ndarray:
    """The clock frequency steps about every 80 samples."""
    steps = np.cumsum(random.random(count) < 1 / 80)
    return quiet(random, count) * random.choice([1, 1.07, 1.15], count + 1)[steps]


def bimodal(random: Random, count: int) -> np.ndarray:
    """Three samples in ten take 12% longer."""
    return quiet(random, count) * np.where(random.random(count) < 0.3, 1.12, 1)


KINDS: Mapping[str, Callable[[Random, int], np.ndarray]] = {
    each.__name__: each for each in (quiet, steal, neighbour, frequency, bimodal)
}


def _lasting(random: Random, count: int, begins: float, ends: float) -> np.ndarray:
    """A state that begins and ends with these probabilities by sample."""
    draws, state, states = random.random(count), False, np.zeros(count, bool)
    for place, draw in enumerate(draws):
        state = draw >= ends if state else draw < begins
        states[place] = state
    return states


def same_layout(random: Random) -> float:
    """Every process of a program is as fast as the other."""
    return 0.0


def half_percent(random: Random) -> float:
    """Processes differ by 0.5% (standard deviation)."""
    return random.normal(0, 0.005)


def percent(random: Random) -> float:
    """Processes differ by 1% (standard deviation)."""
    return random.normal(0, 0.01)


def two_layouts(random: Random) -> float:
    """Every second process is 10% slower than the others."""
    return random.choice([0, np.log(1.1)])


LAYOUTS: Mapping[str, Callable[[Random], float]] = {
    each.__name__: each for each in (same_layout, half_percent, percent, two_layouts)
}
"""Logarithm of what a process's times are multiplied with."""


def one_launch(random: Random, kind: str, shift: float, blocks: int, alpha: float) -> tuple[Decision, int]:
    """The decision on one launch of both sides, which stops as soon as it is clear; blocks taken.

    Parameters
    ----------
    random : numpy.random.Generator
    kind : str
        The kind of noise.
    shift : float
        Logarithm of b's time over a's.
    blocks : int
        The largest number of blocks.
    alpha : float
    """
    times = KINDS[kind](random, 4 * SLOT * blocks).reshape(blocks, 4, SLOT)
    differences: list[float] = []
    for block in times:
        order = ORDERS[random.integers(2)]
        sides = {side: np.concatenate([block[i] for i in range(4) if order[i] == side]) for side in "AB"}
        differences.append(block_difference(list(sides["A"]), list(np.exp(shift) * sides["B"])))
        decision = decide_pairs(differences, effect=EFFECT, alpha=alpha)
        if decision.outcome != "uncertain":
            break
    return decision, len(differences)


def paired_verdicts(
    random: Random, kind: str, slowdowns: Sequence[float], layout: str = "same_layout"
) -> list[tuple[str, int, int]]:
    """The verdicts on benchmarks that run in turn; blocks and launches that each has taken.

    Parameters
    ----------
    random : numpy.random.Generator
    kind : str
        The kind of noise.
    slowdowns : sequence of float
        By benchmark, of a suite of 24.
    layout : str
        How processes differ.
    """

    def shift(slowdown: float) -> float:
        return np.log1p(slowdown) + LAYOUTS[layout](random) - LAYOUTS[layout](random)

    first = [one_launch(random, kind, shift(each), BLOCKS, ALPHA / BENCHMARKS) for each in slowdowns]
    courses = [Launches(decision, EFFECT) for decision, _ in first]
    suspects = sum(each.open for each in courses)
    found = []
    for launches, slowdown, (_, blocks) in zip(courses, slowdowns, first, strict=True):
        count = 1
        while launches.open:
            decision, more = one_launch(random, kind, shift(slowdown), CONFIRMING_BLOCKS, CONFIRMING_ALPHA)
            launches.add(decision, ALPHA / suspects)
            blocks, count = blocks + more, count + 1
        found.append((launches.decision().outcome, blocks, count))
    return found


def unpaired_verdicts(
    random: Random, kind: str, slowdown: float, *, between_runs: float, assumed: float, samples: int = 10
) -> list[str]:
    """The verdicts of ``compare`` on a suite whose first benchmark is slowed down.

    Parameters
    ----------
    random : numpy.random.Generator
    kind : str
    slowdown : float
    between_runs : float
        How runs differ: standard deviation of a median's logarithm.
    assumed : float
        What ``compare`` assumes about it.
    samples : int
        Of each benchmark.
    """

    def run(slow: float) -> BenchmarkRun:
        entries = []
        for number in range(BENCHMARKS):
            factor = random.lognormal(0, between_runs) * (1 + slow if number == 0 else 1)
            entries.append(Entry(f"a/b {number}", summarize(list(factor * KINDS[kind](random, samples)))))
        return BenchmarkRun(Path("simulated"), "d5suite", entries, {})

    thresholds = Thresholds(Threshold(between_runs=assumed))
    return [each.verdict for each in compare_runs(run(0), run(slowdown), thresholds).verdicts]


def _changed(verdict: str) -> bool:
    return verdict in ("slower", "faster")


def main(suites: int) -> None:
    """Print the tables of docs/compare.md."""
    print(f"{suites} suites of {BENCHMARKS} benchmarks, {5 * suites} benchmarks that are slower")
    print("| noise | processes | false alarms | 2% found | 5% found | blocks at 2% | launches at 2% |")
    print("|---|---|--:|--:|--:|--:|--:|")
    cases = [(kind, "half_percent") for kind in KINDS] + [
        ("quiet", layout) for layout in LAYOUTS if layout != "half_percent"
    ]
    for number, (kind, layout) in enumerate(cases):
        random = np.random.default_rng(number)
        alarms = sum(
            any(_changed(verdict) for verdict, *_ in paired_verdicts(random, kind, [0] * BENCHMARKS, layout))
            for _ in range(suites)
        )
        found = {  # one of a suite: what is found does not depend on the others
            slowdown: [paired_verdicts(random, kind, [slowdown], layout)[0] for _ in range(5 * suites)]
            for slowdown in (0.02, 0.05)
        }
        told = {
            slowdown: Counter(verdict for verdict, *_ in each)["slower"] / len(each) for slowdown, each in found.items()
        }
        blocks, launches = (np.median([each[place] for each in found[0.02]]) for place in (1, 2))
        print(f"| {kind} | {layout.replace('_', ' ')} | {alarms}/{suites} | {told[0.02]:.1%} | {told[0.05]:.1%} "
              f"| {blocks:.0f} | {launches:.0f} |", flush=True)  # fmt: skip
    print("| noise | two runs: false alarms | 3x found |")
    print("|---|--:|--:|")
    for number, kind in enumerate(KINDS):
        random = np.random.default_rng(number)
        runs = [unpaired_verdicts(random, kind, 2, between_runs=0.1, assumed=0.15) for _ in range(suites)]
        wrong = sum(bool({"slower", "faster"} & set(innocent)) for _, *innocent in runs)
        large = sum(first == "slower" for first, *_ in runs)
        print(f"| {kind} | {wrong}/{suites} | {large / suites:.1%} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
