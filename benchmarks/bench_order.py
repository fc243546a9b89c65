"""Whether the order of the main table holds: in simulation, and in result files of repeated runs.

A simulated run has launches, in each of which two backends take turns in rounds that go there and
back. Each backend has a memory layout of its own in each launch (`LAUNCH_SD`), each run a state of
the machine that its launches share (`RUN_SD`), and
`benchmarks.bench_verdicts` has the noise of the machine, which hits whoever runs. *Covered* is how
often the interval holds the true ratio, *another run* how often it holds what a second run finds.
The table in docs/compare.md comes from::

    python -m benchmarks.bench_order

With result files of one command run several times, it shows how ratios and orders differ from run
to run::

    python -m benchmarks.bench_order run1.json run2.json run3.json
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_verdicts import KINDS, Random
from d5suite.report.contests import rounds_of
from d5suite.report.reading import load_results
from d5suite.statistics.ratios import Ratio
from d5suite.statistics.rounds import LAUNCH_SD, RUN_SD, ratio_of_rounds

ROUNDS, SAMPLES = 6, 5
"""Rounds of a launch, and samples of a turn."""

RATIO = 1.05
"""How many times as long the second backend truly takes."""


def simulated(
    random: Random, kind: str, launches: int, *, launch_sd: float = LAUNCH_SD, run_sd: float = RUN_SD,
    drift: float = 0.0,
) -> Ratio:  # fmt: skip
    """What a run says of two backends.

    Parameters
    ----------
    random : numpy.random.Generator
    kind : str
        Of the noise.
    launches : int
    launch_sd : float
        Standard deviation of the logarithm of the ratio from launch to launch.
    run_sd : float
        The same from run to run, of what all launches of a run share.
    drift : float
        How much slower the machine gets from round to round.
    """
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    shared = random.lognormal(0, run_sd)
    for _ in range(launches):
        noise = KINDS[kind](random, 2 * SAMPLES * ROUNDS).reshape(ROUNDS, 2, SAMPLES)
        noise = noise * (1 + drift * np.arange(2 * ROUNDS).reshape(ROUNDS, 2, 1) / 2)
        noise[1::2] = noise[1::2, ::-1]  # back
        layout = RATIO * shared * random.lognormal(0, launch_sd)
        medians = np.median(noise, axis=2) * [1, layout]
        for its, column in zip(times, medians.T, strict=True):
            its.append(column.tolist())
    return ratio_of_rounds(*times)


def coverage(random: Random, kind: str, launches: int, runs: int, **how: float) -> tuple[float, float]:
    """How often an interval holds the truth, and what another run finds."""
    found = [simulated(random, kind, launches, **how) for _ in range(runs)]
    truth = sum(each.low <= RATIO <= each.high for each in found)
    other = sum(each.low <= another.value <= each.high for each, another in itertools.pairwise(found))
    return truth / runs, other / (runs - 1)


def simulate(runs: int = 1000) -> None:
    """Print the table of docs/compare.md."""
    print("| noise | one launch: covered | another run | three: covered | another run | five: covered | another run |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for number, kind in enumerate(KINDS):
        random = np.random.default_rng(number)
        cells = [f"{share:.1%}" for launches in (1, 3, 5) for share in coverage(random, kind, launches, runs)]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


def repeated(paths: Sequence[Path]) -> None:
    """Print how ratios of two backends differ between runs: of medians, and of paired rounds."""
    ratios: dict[tuple[str, str, str], list[tuple[float, Ratio | None]]] = defaultdict(list)
    for path in paths:
        found = load_results(path)
        for one, other in itertools.combinations(sorted(found), 2):
            if one[:2] == other[:2]:
                ratios[one[0], one[2], other[2]].append(_both(found[one], found[other]))
    print("| measurement | backends | runs | medians: largest ÷ smallest ratio | rounds: same | sd | in each other's |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for (group, first, second), its in ratios.items():
        medians = [each for each, _ in its]
        paired = [each for _, each in its if each is not None]
        cells = ["–"] * 3
        if len(paired) > 1:
            logs = np.log([each.value for each in paired])
            pairs = list(itertools.permutations(paired, 2))
            held = sum(each.low <= another.value <= each.high for each, another in pairs)
            cells = [_spread([each.value for each in paired]), f"{np.std(logs, ddof=1):.3f}", f"{held}/{len(pairs)}"]
        print(f"| {group} | {second} ÷ {first} | {len(its)} | {_spread(medians)} | {' | '.join(cells)} |")


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, Ratio | None]:
    pairs = {each["group"] for each in one.get("turns", [])} & {each["group"] for each in other.get("turns", [])}
    return other["median_s"] / one["median_s"], ratio_of_rounds(rounds_of(one), rounds_of(other)) if pairs else None


def _spread(ratios: Sequence[float]) -> str:
    return f"{max(ratios) / min(ratios):.3f}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        repeated([Path(each) for each in sys.argv[1:]])
    else:
        simulate()
