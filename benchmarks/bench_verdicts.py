"""How often verdicts are wrong, on simulated runs with the noise of real machines.

A suite is 24 benchmarks. Each kind of noise multiplies the times of both sides; what lasts longer
than a sample hits whichever side runs. Paired runs take blocks of ABBA or BAAB, a coin decides
which; two unpaired runs have times of their own and differ from run to run. The figures in
docs/compare.md are of::

    python -m benchmarks.bench_verdicts 200
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from d5suite.report.runs import Entry, Run
from d5suite.report.thresholds import Threshold, Thresholds
from d5suite.report.verdicts import ALPHA, compare_runs
from d5suite.statistics.changes import series_of
from d5suite.statistics.sequential import block_difference, decide

BENCHMARKS = 24
LETTER = 3
"""Samples of each letter of ABBA."""

BLOCKS = 60
"""The default budget."""

EFFECT = 0.01
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


def paired(random: Random, kind: str, slowdown: float, blocks: int = BLOCKS) -> Iterator[float]:
    """The differences of a benchmark's blocks, where b takes ``1 + slowdown`` times as long."""
    times = KINDS[kind](random, 4 * LETTER * blocks).reshape(blocks, 4, LETTER)
    for block in times:
        order = ORDERS[random.integers(2)]
        sides = {side: np.concatenate([block[i] for i in range(4) if order[i] == side]) for side in "AB"}
        yield block_difference(list(sides["A"]), list((1 + slowdown) * sides["B"]))


def paired_verdict(random: Random, kind: str, slowdown: float, blocks: int = BLOCKS) -> tuple[str, int]:
    """The verdict on one benchmark of a suite, which stops as soon as it is clear; blocks taken."""
    differences: list[float] = []
    verdict = "uncertain"
    for each in paired(random, kind, slowdown, blocks):
        differences.append(each)
        verdict = decide(differences, effect=EFFECT, alpha=ALPHA / BENCHMARKS).verdict
        if verdict != "uncertain":
            break
    return verdict, len(differences)


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
        What ``compare`` is told of it.
    samples : int
        Of each benchmark.
    """

    def run(slow: float) -> Run:
        entries = []
        for number in range(BENCHMARKS):
            factor = random.lognormal(0, between_runs) * (1 + slow if number == 0 else 1)
            entries.append(Entry(f"a/b {number}", series_of(list(factor * KINDS[kind](random, samples)))))
        return Run(Path("simulated"), "d5suite", entries, {})

    thresholds = Thresholds(Threshold(between_runs=assumed))
    return [each.verdict for each in compare_runs(run(0), run(slowdown), thresholds).verdicts]


def main(suites: int) -> None:
    """Print the table of docs/compare.md."""
    print(f"{suites} suites of {BENCHMARKS} benchmarks")
    print("| noise | paired: false alarms | 2% found | 5% found | blocks | unpaired: false alarms | 3x found |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for number, kind in enumerate(KINDS):
        random = np.random.default_rng(number)
        alarms = sum(
            any(paired_verdict(random, kind, 0)[0] in ("slower", "faster") for _ in range(BENCHMARKS))
            for _ in range(suites)
        )
        found = {
            slowdown: [paired_verdict(random, kind, slowdown) for _ in range(5 * suites)] for slowdown in (0.02, 0.05)
        }
        told = {
            slowdown: Counter(verdict for verdict, _ in each)["slower"] / len(each) for slowdown, each in found.items()
        }
        blocks = np.median([count for _, count in found[0.02]])
        runs = [unpaired_verdicts(random, kind, 2, between_runs=0.1, assumed=0.15) for _ in range(suites)]
        wrong = sum(bool({"slower", "faster"} & set(innocent)) for _, *innocent in runs)
        large = sum(first == "slower" for first, *_ in runs)
        print(
            f"| {kind} | {alarms}/{suites} | {told[0.02]:.1%} | {told[0.05]:.1%} | {blocks:.0f} | {wrong}/{suites} "
            f"| {large / suites:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
