"""Whether something is slower, faster or the same: `decide`, and the policies that call it.

- Pairs, of two sides that ran in turn: `decide_pairs`, confirmed by `d5suite.statistics.launches`.
- Two runs: `decide_runs`.
- A run and the history of earlier ones: `decide_history`.
- Figures without noise: `decide_exact`.

`d5suite.statistics.contests` ranks several backends. Imports its neighbours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from d5suite.statistics.history import Level, level_changes, level_of, next_run
from d5suite.statistics.medians import Summary, holm, rank_test, ratio_of_medians, separated, smallest_p
from d5suite.statistics.ratios import Ratio
from d5suite.statistics.sequential import fewest, median_bounds

ALPHA = 0.01
"""Probability, over all benchmarks of a comparison, of any wrong "slower" or "faster"."""

CONFIDENCE = 0.95
"""Confidence of each benchmark's interval."""

FEWEST_RUNS = 3
"""Fewest runs of a level needed to judge a new run."""

MEMORY_BYTES = 16 << 20
"""Bytes by which peak memory must change to count: allocators request chunks of this size."""

FIRST_CALL_S = 1.0
"""Seconds by which a first call must grow to count: shorter ones depend on the disk's cache."""

ERROR = 0.1
"""Fraction of its tolerance that an error must reach to count as a loss of accuracy."""


@dataclass(frozen=True)
class Threshold:
    """Thresholds beyond which a change of one benchmark counts.

    Attributes
    ----------
    effect : float
        Least relative change of a median that counts.
    between_runs : float
        Standard deviation of a median's logarithm between two runs of the same code. The default is
        that of a shared 2-core virtual machine, where four runs in a row differed by up to 1.8.
    memory : float
        Relative growth of peak memory that is a regression.
    first_call : float
        Ratio of first calls, new over base, that is a regression.
    accuracy : float
        Ratio of errors, new over base, that is a regression even within the tolerance.
    figure : float
        How many times worse a judged figure must be to be a regression; see
        `d5suite.statistics.figures`.
    """

    effect: float = 0.05
    between_runs: float = 0.15
    memory: float = 0.10
    first_call: float = 4.0
    accuracy: float = 10.0
    figure: float = 2.0


class Decision(NamedTuple):
    """Outcome of a comparison, and the evidence for it.

    Attributes
    ----------
    outcome : {"slower", "faster", "same", "uncertain"}
    ratio : Ratio or None
        New over base; None if there is too little to compare with.
    reasons : tuple of str
        Why, for people.
    p_value : float or None
        From the rank test of two runs, corrected for the number of benchmarks.
    finds : float
        Smallest ratio that would have been called slower, given the same noise; infinite if none
        would have been.
    """

    outcome: str
    ratio: Ratio | None
    reasons: tuple[str, ...] = ()
    p_value: float | None = None
    finds: float = math.inf

    @property
    def changed(self) -> bool:
        """Whether the outcome is slower or faster."""
        return self.outcome in ("slower", "faster")

    def barred(self, reasons: Sequence[str]) -> Decision:
        """Return this decision, or an uncertain one if there are reasons to decide nothing."""
        if not reasons:
            return self
        return self._replace(outcome="uncertain", reasons=tuple(reasons), finds=math.inf)


TIME, MEMORY = "as long", "as much memory"
"""What ratios compare, in words."""


def decide(
    ratio: Ratio,
    *,
    effect: float,
    least: float | None = None,
    corrected: Ratio | None = None,
    vetoes: Sequence[str] = (),
    bars: Sequence[str] = (),
    measure: str = TIME,
) -> Decision:
    """Decide from a ratio and its interval.

    Parameters
    ----------
    ratio : Ratio
        The outcome is "same" if its interval lies within ``effect`` of 1.
    effect : float
        Relative change that counts.
    least : float, optional
        Least relative change of the estimate to be called slower or faster; by default ``effect``.
    corrected : Ratio, optional
        The ratio with an interval corrected for the number of tests, which must exclude 1 for a
        change; by default ``ratio``.
    vetoes : sequence of str
        Reasons not to trust a change, such as a disturbed machine: they make it uncertain.
    bars : sequence of str
        Reasons to decide nothing at all, not even "same".
    measure : str
        What the ratio compares, in words.
    """
    if bars:
        return Decision("uncertain", ratio).barred(bars)
    smallest = 1 + (effect if least is None else least)
    decision = _decide(ratio, effect, smallest, corrected or ratio, vetoes, measure)
    if vetoes:
        no_change = tuple(f"no change would count: {each}" for each in vetoes)
        return decision._replace(reasons=no_change) if decision.outcome == "same" else decision
    return decision._replace(finds=_finds(corrected or ratio, smallest))


def _finds(evidence: Ratio, smallest: float) -> float:
    """Return the smallest ratio whose interval, as wide as this one, would lie above 1."""
    return max(smallest, evidence.value / evidence.low) if evidence.low > 0 else math.inf


def _decide(
    ratio: Ratio, effect: float, smallest: float, evidence: Ratio, vetoes: Sequence[str], measure: str
) -> Decision:
    limit = 1 + effect
    changed = None
    if evidence.low > 1 and ratio.value >= smallest:
        changed = "slower"
    elif evidence.high < 1 and ratio.value <= 1 / smallest:
        changed = "faster"
    if changed and vetoes:
        return Decision("uncertain", ratio, tuple(vetoes))
    if changed:
        return Decision(changed, ratio, (f"{ratio.value:.2f} times {measure}",))
    if 1 / limit <= ratio.low and ratio.high <= limit:
        return Decision("same", ratio)
    return Decision("uncertain", ratio, (_why_uncertain(ratio, effect, smallest, evidence),))


def _why_uncertain(ratio: Ratio, effect: float, smallest: float, evidence: Ratio) -> str:
    """Say what is missing for a decision."""
    if not evidence.low > 0:
        return "one sample says nothing of its own noise" if ratio.method == "medians" else "there is no interval"
    counts = f"the {100 * effect:g}% that count"
    if not evidence.includes_one:
        return f"the change is less than {counts}, but may be more"
    if not 1 / smallest < ratio.value < smallest:
        noise = ratio.value / evidence.low - 1
        return f"{ratio.value:.3f} times may be chance: two runs may differ by {noise:.0%} without cause"
    return f"it may be the same, or have changed by more than {counts}"


def decide_pairs(differences: Sequence[float], *, effect: float, alpha: float) -> Decision:
    """Decide from pairs (blocks) so far; may be called after each one.

    Parameters
    ----------
    differences : sequence of float, shape (n,), n >= 1
        By block: logarithm of b's time over a's.
    effect : float
        Relative change to find: less than half of it does not count, and changes within it are
        "same".
    alpha : float
        Probability of any wrong "slower" or "faster", over all calls with ever more pairs.
    """
    ratio = Ratio.from_logs(
        statistics.median(differences), *median_bounds(differences, alpha), 1 - alpha, "pairs", len(differences)
    )
    return of_pairs(decide(ratio, effect=effect, least=half(effect)))


def half(effect: float) -> float:
    """Return half of a relative change, in logarithms."""
    return math.sqrt(1 + effect) - 1


def of_pairs(decision: Decision) -> Decision:
    """Add the number of pairs to the reasons of a decision."""
    assert decision.ratio is not None
    pairs = decision.ratio.n
    if decision.changed:
        return decision._replace(reasons=(f"{decision.ratio.value:.2f} times as long, in {pairs} pairs",))
    if decision.outcome == "uncertain":
        return decision._replace(reasons=(_why_pairs_are_too_few(decision.ratio, *decision.reasons),))
    return decision


def _why_pairs_are_too_few(ratio: Ratio, why: str) -> str:
    if ratio.low > 0:
        return f"{ratio.n} pairs do not decide it: {why}"
    needed = fewest(1 - ratio.confidence)
    return f"{ratio.n} pairs are too few for an interval: it needs {needed}; allow more pairs and more time"


def decide_runs(
    pairs: Sequence[tuple[Summary, Summary]], thresholds: Sequence[Threshold], vetoes: Sequence[Sequence[str]],
    bars: Sequence[Sequence[str]] = (),
) -> list[Decision]:  # fmt: skip
    """Decide on the benchmarks of two runs.

    Parameters
    ----------
    pairs : sequence of (Summary, Summary)
        Base and new, by benchmark.
    thresholds : sequence of Threshold
        By benchmark.
    vetoes, bars : sequence of sequences of str
        See `decide`, by benchmark.
    """
    p_values = [rank_test(base, new) for base, new in pairs]
    adjusted = iter(holm([p for p in p_values if p is not None]))
    corrected = [None if p is None else next(adjusted) for p in p_values]
    return [
        _decide_run(base, new, threshold, p_value, len(pairs), *reasons)
        for (base, new), threshold, p_value, *reasons in zip(
            pairs, thresholds, corrected, vetoes, bars or [()] * len(pairs), strict=True
        )
    ]


def _decide_run(
    base: Summary, new: Summary, threshold: Threshold, p_value: float | None, tests: int, vetoes: Sequence[str],
    bars: Sequence[str],
) -> Decision:  # fmt: skip
    ratio, corrected = (
        ratio_of_medians(base, new, between_runs=threshold.between_runs, confidence=confidence)
        for confidence in (CONFIDENCE, 1 - ALPHA / tests)
    )
    decision = decide(ratio, effect=threshold.effect, corrected=corrected, vetoes=vetoes, bars=bars)
    if decision.changed and p_value is not None and p_value > ALPHA:
        # Few samples cannot reach the corrected level; then the two sides must be separated.
        too_few = tests * smallest_p(base, new) > ALPHA
        if not (too_few and separated(base, new)):
            why = f"samples of both sides overlap (rank test, corrected: p = {p_value:.2g})"
            decision = decision._replace(outcome="uncertain", reasons=(why,))
    return decision._replace(p_value=p_value)


def decide_exact(base: float, new: float, *, effect: float, least: float, measure: str) -> Decision:
    """Decide on two figures without noise, which must also differ by at least ``least``."""
    value = new / base
    ratio = Ratio(value, value, value, 1.0, "exact", 1)
    found = decide(ratio, effect=effect, measure=measure)
    return found if abs(new - base) >= least else Decision("same", ratio, finds=max(1 + least / base, found.finds))


def current_level(figures: Sequence[float], threshold: Threshold, tests: int = 1) -> tuple[int, Level]:
    """Return the index of the run with which a benchmark's latest level began, and that level.

    Parameters
    ----------
    figures : sequence of float, shape (n,)
        One figure of each run, in order of time.
    threshold : Threshold
    tests : int
        Number of benchmarks that are judged together.
    """
    changes = level_changes(figures, effect=threshold.effect, alpha=ALPHA / tests)
    since = changes[-1].place if changes else 0
    return since, level_of(figures[since:])


def decide_history(
    figures: Sequence[float], new: float, labels: Sequence[str], threshold: Threshold, *,
    tests: int = 1, vetoes: Sequence[str] = (), bars: Sequence[str] = (), memory: bool = False,
) -> Decision:  # fmt: skip
    """Decide on one more run of a benchmark.

    The run is compared with the runs since the level last changed. A run that stands out is
    uncertain until enough runs in a row agree. A change of level that began with an earlier run,
    but that only this run makes visible, counts, too: so a slow drift is found.

    Parameters
    ----------
    figures : sequence of float, shape (n,)
        One figure of each earlier run, in order of time.
    new : float
        The figure of this run.
    labels : sequence of str
        Date and name of each earlier run; the first ten characters are the day.
    threshold : Threshold
    tests : int
        Number of benchmarks that are judged together.
    vetoes, bars : sequence of str
        See `decide`.
    memory : bool
        Whether the figures are bytes, which hardly vary: one run is enough.
    """
    measure = MEMORY if memory else TIME
    before = level_changes(figures, effect=threshold.effect, alpha=ALPHA / tests)
    since, level = current_level(figures, threshold, tests)
    compared = f"{level.runs} runs since {labels[since][:10]}"
    if level.runs < FEWEST_RUNS:
        return Decision("uncertain", None, (f"only {compared} to compare with; {FEWEST_RUNS} are needed",))
    ratio, corrected = (next_run(level, new, confidence) for confidence in (CONFIDENCE, 1 - ALPHA / tests))
    if memory and abs(new - level.median) < MEMORY_BYTES:
        return Decision("same", ratio)
    how: dict[str, Any] = {"effect": threshold.effect, "vetoes": vetoes, "bars": bars, "measure": measure}
    decision, vetoes = decide(ratio, corrected=corrected, **how), [*vetoes, *bars]
    finds = decision.finds
    if not vetoes and (agreed := _agreed([*figures[since:], new], threshold.effect, tests)):
        outcome, runs, agreed_ratio = agreed
        reason = f"{agreed_ratio:.2f} times {measure}, as the latest {runs} runs agree"
        decision = Decision(outcome, ratio, (reason, f"than {compared}"), finds=finds)
    elif decision.changed:
        decision = decision._replace(reasons=(*decision.reasons, f"than {compared}"))
        if not memory:
            reasons = (*decision.reasons, _runs_needed(level.runs, tests))
            decision = Decision("uncertain", ratio, reasons, finds=finds)
    after = [] if vetoes else level_changes([*figures, new], effect=threshold.effect, alpha=ALPHA / tests)
    if len(after) > len(before) and decision.outcome != "slower":  # later runs may shift the other changes slightly
        place, change = after[-1]
        reason = f"{change:.2f} times {measure} since {labels[place]}"
        outcome = "slower" if change > 1 else "faster"
        decision = Decision(outcome, ratio, (*decision.reasons, reason), finds=finds)
    return decision


def _agreed(figures: Sequence[float], effect: float, tests: int) -> tuple[str, int, float] | None:
    """Return the outcome on which the latest runs agree, their number and ratio; None without one.

    They agree if all of them lie above, or all below, the earlier runs. Of n runs of one level, the
    latest k are the largest with a probability of 1 / C(n, k), whatever the noise.
    """
    for runs in range(1, len(figures) // 2 + 1):
        before, latest = figures[:-runs], figures[-runs:]
        ratio = statistics.median(latest) / statistics.median(before)
        apart = min(latest) > max(before) or max(latest) < min(before)
        if apart and max(ratio, 1 / ratio) >= 1 + effect and _is_certain(len(figures), runs, tests):
            return "slower" if ratio > 1 else "faster", runs, ratio
    return None


def _is_certain(count: int, runs: int, tests: int) -> bool:
    return ALPHA * math.comb(count, runs) >= tests


def _runs_needed(earlier: int, tests: int) -> str:
    """Say how many runs in a row show that a run which stands out is no outlier."""
    needed = next((runs for runs in range(1, earlier + 1) if _is_certain(earlier + runs, runs, tests)), None)
    if needed is None:
        return f"one run may stand out by chance, and {earlier} earlier ones are too few to tell: measure again"
    return f"one run may stand out by chance: measure again; {needed} in a row, each added, decide"


class Costs(NamedTuple):
    """What a benchmark costs beside its time.

    Attributes
    ----------
    memory_bytes, first_call_s, error : float or None
        Peak memory, the first call, and the largest error as a fraction of its tolerance; None if
        unknown.
    """

    memory_bytes: float | None = None
    first_call_s: float | None = None
    error: float | None = None


def grown(base: Costs, new: Costs, threshold: Threshold, *, disturbed: bool) -> list[str]:
    """Return which costs beside time are regressions: ``memory``, ``first call``, ``accuracy``.

    First calls of a disturbed run do not count.
    """
    costs = []
    if base.memory_bytes and new.memory_bytes and new.memory_bytes - base.memory_bytes >= MEMORY_BYTES:
        costs += ["memory"] * (new.memory_bytes / base.memory_bytes - 1 > threshold.memory)
    one, other = base.first_call_s, new.first_call_s
    if one and other and not disturbed and other - one >= FIRST_CALL_S and other / one > threshold.first_call:
        costs.append("first call")
    if base.error is not None and new.error is not None and new.error >= max(ERROR, threshold.accuracy * base.error):
        costs.append("accuracy")
    return costs
