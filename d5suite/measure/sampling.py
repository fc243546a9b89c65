"""Sampling: the first call apart, warm-up until nothing falls any more, then as many samples as the precision needs.

One sample is ``synchronize(); start = clock(); step(); synchronize(); end = clock()``: work queued before it is
finished before it starts, and work it queues is counted. The garbage collector is off while calls are timed. All
samples are kept; nothing is trimmed.

Imports the standard library and its neighbours in ``d5suite.measure``.
"""

from __future__ import annotations

import gc
import random
import statistics as stdlib_statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import repeat
from typing import Any, Literal, NamedTuple

from d5suite.errors import ConfigurationError
from d5suite.measure.clock import Clock, now
from d5suite.measure.statistics import count_outliers, drift, interval_ranks, median_interval, relative_half_width

Step = Callable[[], object]
Synchronize = Callable[[], None]
StopReason = Literal["precision", "time", "rounds"]

WARMUP_BLOCK_CALLS = 3
"""Warm-up is judged block by block; three calls are the fewest whose median survives one disturbed call."""

WARMUP_BLOCK_S = 0.05
"""A block of quick calls lasts this long: clock frequency and caches settle over milliseconds, not over calls."""

WARMUP_BLOCK_MAX_CALLS = 1000
"""More calls say nothing more about a block's median."""

WARMUP_TIME_FACTOR = 3.0
"""Automatic warm-up may take this many times ``max_time_s``: a sample taken too early costs more than the wait."""

WARMUP_FREE_CALLS = 3
"""The slowest so many calls do not count against the warm-up's time: a compiler may come more than once."""

STEADY_FALL = 0.05
"""Steady means that a block's median is at most this much below the one before it. Smaller falls drown in noise."""

STEADY_EXCESS = 2.0
"""A block that took this many times its calls' typical time holds a compilation or a disturbance: look again."""

DRIFT_P_VALUE = 0.001
"""Samples that still fall by more than `STEADY_FALL`, this significantly, were not taken in a steady state."""

KERNEL_SAMPLE_S = 5e-3
"""A sample of a kernel lasts at least so long, so that what happens between samples, such as threads going to sleep,
does not show in it: at 0.5 ms a product was reported 2.7% too long, at 5 ms 1% too short."""

KERNEL_MAX_ITERATIONS = 10_000
"""Most calls in one sample of a kernel."""

CHECK_GROWTH = 1.1
"""The precision is looked at each time the samples grew by this factor, so that looking stays cheap."""


@dataclass(frozen=True)
class SamplingSettings:
    """How many samples to take, and when to stop.

    The fields take the values of pytest-benchmark's options as they are:

    ================================= =====================================================================
    ``--benchmark-min-rounds``        ``min_rounds``: always honoured, whatever time it takes.
    ``--benchmark-max-time``          ``max_time_s``: no sample starts later than this after the first one,
                                      once ``min_rounds`` are taken.
    ``--benchmark-precision``         ``relative_precision``, where the option is given.
    ``--benchmark-warmup``            ``warmup``: ``auto`` warms up until steady; ``on`` warms up for
                                      ``max_time_s`` or ``warmup_iterations`` calls, whichever ends first,
                                      as pytest-benchmark does; ``off`` makes no call but the first.
    ``--benchmark-warmup-iterations`` ``warmup_iterations``: the most warm-up calls in any mode. Its default
                                      of 100000 is no limit in practice; a small number shortens ``auto``.
    ================================= =====================================================================

    pytest-benchmark turns its option's ``auto`` into False on CPython, the same as ``off``: who maps the options must
    tell the two apart by what the user typed. ``--benchmark-confidence`` belongs to pytest-benchmark's interval of the
    mean and has another default (0.99).

    Parameters
    ----------
    min_rounds : int
        Least number of samples, at least 1. Below 6 the 95% interval of the median is out of reach.
    max_time_s : float
        Time to spend on samples, in seconds of the clock, between them included.
    max_rounds : int
        Most samples to keep; at least ``min_rounds``.
    relative_precision : float
        Stop when the interval of the median lies within this fraction of the median on both sides.
    confidence : float
        Of that interval, in (0, 1).
    warmup : {"auto", "on", "off"}
        See above.
    warmup_iterations : int
        Most warm-up calls after the first call.

    Raises
    ------
    ConfigurationError
        If a value is out of its bounds.
    """

    min_rounds: int = 5
    max_time_s: float = 1.0
    max_rounds: int = 10_000
    relative_precision: float = 0.02
    confidence: float = 0.95
    warmup: Literal["auto", "on", "off"] = "auto"
    warmup_iterations: int = 100_000

    def __post_init__(self) -> None:
        for name, accepted, meaning in (
            ("min_rounds", _is_count(self.min_rounds, 1), "a whole number, at least 1"),
            ("max_rounds", _is_count(self.max_rounds, 1), "a whole number, at least 1"),
            ("max_time_s", _is_number(self.max_time_s) and 0 <= self.max_time_s < float("inf"), "seconds, 0 or more"),
            ("relative_precision", _is_number(self.relative_precision) and self.relative_precision >= 0, "0 or more"),
            ("confidence", _is_number(self.confidence) and 0 < self.confidence < 1, "between 0 and 1"),
            ("warmup", self.warmup in ("auto", "on", "off"), "'auto', 'on' or 'off'"),
            ("warmup_iterations", _is_count(self.warmup_iterations, 0), "a whole number, 0 or more"),
        ):
            if not accepted:
                raise ConfigurationError(
                    f"{getattr(self, name)!r} is not {meaning}",
                    where=f"sampling settings, {name}",
                    hint="Correct the job file or the --benchmark-* option it came from.",
                )
        if self.max_rounds < self.min_rounds:
            object.__setattr__(self, "max_rounds", self.min_rounds)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingSettings:
        """Read the settings from `to_dict`'s form; missing fields take their defaults.

        Raises
        ------
        ConfigurationError
            If a field is unknown or a value is out of its bounds.
        """
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigurationError(
                f"unknown: {', '.join(unknown)}", where="sampling settings", hint=f"Known are: {', '.join(known)}."
            )
        return cls(**values)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Samples:
    """The times of one measurement, all in seconds and in the order they were taken.

    Attributes
    ----------
    first_call_s : float
        The first call ever, tracing and compilation included.
    warmup_s : list of float
        The warm-up calls after it.
    samples_s : list of float
        The samples; all of them.
    steady : bool
        Whether warm-up ended because times stopped falling, and the samples do not fall either.
    stopped_by : {"precision", "time", "rounds"}
        Why sampling ended: precise enough, time spent (or ``min_rounds`` reached after that), or ``max_rounds``.
    confidence : float
        The confidence asked for, for the interval in `to_dict`.
    """

    first_call_s: float
    warmup_s: list[float]
    samples_s: list[float]
    steady: bool
    stopped_by: StopReason
    confidence: float = 0.95

    @property
    def median_s(self) -> float:
        """Median of the samples."""
        return stdlib_statistics.median(self.samples_s)

    @property
    def compile_s(self) -> float:
        """What the first call took beyond a steady one: an estimate of tracing, compilation and first allocation."""
        return max(0.0, self.first_call_s - self.median_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the times and what follows from them, as JSON-able values; times in seconds.

        ``median_ci_confidence`` is the coverage that ``median_ci_s`` reaches: below the confidence asked for when the
        samples are too few (see `d5suite.measure.statistics.median_interval`).
        """
        trend, outliers = drift(self.samples_s), count_outliers(self.samples_s)
        return {
            "first_call_s": self.first_call_s,
            "compile_s": self.compile_s,
            "warmup_s": list(self.warmup_s),
            "samples_s": list(self.samples_s),
            "steady": self.steady,
            "stopped_by": self.stopped_by,
            "median_s": self.median_s,
            "median_ci_s": list(median_interval(self.samples_s, self.confidence)),
            "median_ci_confidence": interval_ranks(len(self.samples_s), self.confidence).confidence,
            "drift": {"relative_change": trend.relative_change, "p_value": trend.p_value},
            "outliers": {"low": outliers.low, "high": outliers.high},
        }


class Ratio(NamedTuple):
    """The median of per-round ratios with its distribution-free 95% interval, over n rounds."""

    median: float
    ci95: tuple[float, float]
    n: int


def sample(
    step: Step,
    synchronize: Synchronize,
    settings: SamplingSettings,
    *,
    before_sample: Callable[[], None] | None = None,
    clock: Clock = now,
) -> Samples:
    """Time a step: first call, warm-up, samples.

    Parameters
    ----------
    step : callable
        The work to time. It may return before the work is done (asynchronous devices).
    synchronize : callable
        Returns when all work queued so far is done.
    settings : SamplingSettings
        When to stop.
    before_sample : callable, optional
        Called before every call of the step, outside the timing: feeds the next batch, for example.
    clock : callable
        Seconds, monotonic.

    Returns
    -------
    Samples

    Notes
    -----
    Looking at the interval's width repeatedly and stopping when it is narrow makes the final interval cover slightly
    less often than its confidence: 94.3% instead of 95% in 1500 simulated runs with log-normal noise.
    """
    call = _timed_call(step, synchronize, before_sample, clock)
    with _quiet_interpreter(settings):
        first_call_s = call()
        _collect_before_warming_up()
        warmup_s, steady = _warm_up(call, settings)
        samples_s: list[float] = []
        end = clock() + settings.max_time_s
        next_check = settings.min_rounds
        stopped_by: StopReason | None = None
        while stopped_by is None:
            samples_s.append(call())
            count = len(samples_s)
            if count < settings.min_rounds:
                continue
            if count >= next_check:
                next_check = int(count * CHECK_GROWTH) + 1
                if relative_half_width(samples_s, settings.confidence) <= settings.relative_precision:
                    stopped_by = "precision"
            if stopped_by is None:
                stopped_by = _out_of_budget(count, settings, clock() >= end)
    return Samples(
        first_call_s, warmup_s, samples_s, steady and not _still_falls(samples_s), stopped_by, settings.confidence
    )


def sample_kernel(
    call: Callable[..., object],
    arguments: tuple[Any, ...],
    synchronize: Callable[..., None],
    settings: SamplingSettings,
    *,
    clock: Clock = now,
) -> tuple[Samples, int]:
    """Time a native call that may be much shorter than reading the clock.

    One sample is a bare loop over the call, long enough to be timed, with one `synchronize` at its end, divided by the
    number of iterations. On an asynchronous device the calls of a loop overlap with their own issuing: what is timed is
    the rate at which calls complete.

    Parameters
    ----------
    call, arguments
        What is called: ``call(*arguments)``.
    synchronize : callable
        Returns when all calls so far are done; takes what the last one returned, or nothing if none is pending.
    settings, clock
        As in `sample`.

    Returns
    -------
    samples : Samples
        Times of one call.
    iterations : int
        Calls per sample.
    """
    synchronize()
    start = clock()
    synchronize(call(*arguments))
    first_call_s = clock() - start
    last: list[object] = []

    def loop(count: int) -> Step:
        def step() -> None:
            for _ in repeat(None, count - 1):
                call(*arguments)
            last.append(call(*arguments))

        return step

    def wait() -> None:
        synchronize(*last)
        last.clear()

    iterations = 1
    with _quiet_interpreter(settings):
        while iterations < KERNEL_MAX_ITERATIONS:
            took = _timed_call(loop(iterations), wait, None, clock)()
            if took >= KERNEL_SAMPLE_S:
                break
            iterations = min(KERNEL_MAX_ITERATIONS, max(2 * iterations, int(iterations * KERNEL_SAMPLE_S / took)))
    samples = sample(loop(iterations), wait, settings, clock=clock)
    each = replace(
        samples,
        first_call_s=first_call_s,
        warmup_s=[duration / iterations for duration in samples.warmup_s],
        samples_s=[duration / iterations for duration in samples.samples_s],
    )
    return each, iterations


def sample_alternating(
    steps: Mapping[str, Step],
    synchronizers: Mapping[str, Synchronize],
    settings: SamplingSettings,
    *,
    before_sample: Mapping[str, Callable[[], None]] | None = None,
    clock: Clock = now,
    seed: int = 0,
) -> dict[str, Samples]:
    """Time several steps in turn, so that what disturbs the machine disturbs them alike; for ratios.

    Each step has its first call and warm-up of its own. Then every round calls each step once, in an order drawn anew,
    so that none always runs in the wake of the same other. Sample i of one step belongs with sample i of the others:
    see `paired_ratio`.

    Parameters
    ----------
    steps, synchronizers : mapping of str to callable
        As in `sample`, by name; the same names in both.
    settings : SamplingSettings
        ``max_time_s`` is for each step: all together may take its multiple. Sampling stops early when the ratio of
        every step to the first is as precise as ``relative_precision`` asks.
    before_sample : mapping of str to callable, optional
        As in `sample`, for the names that need it.
    clock : callable
        Seconds, monotonic.
    seed : int
        Of the order within the rounds.

    Raises
    ------
    ConfigurationError
        If the names differ or there are none.
    """
    if not steps or set(steps) != set(synchronizers):
        raise ConfigurationError(
            f"steps {sorted(steps)} and synchronizers {sorted(synchronizers)} do not match",
            hint="Give one synchronizer for every step, under the same name.",
        )
    before = before_sample or {}
    calls = {name: _timed_call(steps[name], synchronizers[name], before.get(name), clock) for name in steps}
    order = list(steps)
    shuffle = random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in steps}
    reference = order[0]
    with _quiet_interpreter(settings):
        first = {name: calls[name]() for name in order}
        _collect_before_warming_up()
        warm = {name: _warm_up(calls[name], settings) for name in order}
        end = clock() + settings.max_time_s * len(steps)
        next_check = settings.min_rounds
        stopped_by: StopReason | None = None
        while stopped_by is None:
            shuffle(order)
            for name in order:
                times[name].append(calls[name]())
            count = len(times[reference])
            if count < settings.min_rounds:
                continue
            if count >= next_check:
                next_check = int(count * CHECK_GROWTH) + 1
                ratios = [_ratios(times[name], times[reference]) for name in times if name != reference]
                if all(
                    relative_half_width(series, settings.confidence) <= settings.relative_precision
                    for series in ratios or [times[reference]]
                ):
                    stopped_by = "precision"
            if stopped_by is None:
                stopped_by = _out_of_budget(count, settings, clock() >= end)
    return {
        name: Samples(
            first[name],
            warm[name][0],
            times[name],
            warm[name][1] and not _still_falls(times[name]),
            stopped_by,
            settings.confidence,
        )
        for name in steps
    }


def paired_ratio(a: Samples | Sequence[float], b: Samples | Sequence[float]) -> Ratio:
    """Tell how many times as long a takes as b, from rounds that ran both (see `sample_alternating`).

    The median of the ratios a[i] / b[i]; what slows a whole round down cancels. The interval is the one of
    `d5suite.measure.statistics.median_interval` on the ratios; below 6 rounds it is their range.

    Raises
    ------
    ConfigurationError
        If the two do not have the same number of samples, or none, or a time is zero.
    """
    over = a.samples_s if isinstance(a, Samples) else a
    under = b.samples_s if isinstance(b, Samples) else b
    if len(over) != len(under) or not len(over) or min(under) <= 0:
        raise ConfigurationError(
            f"no ratio of {len(over)} to {len(under)} samples",
            hint="Use the samples of one sample_alternating() run, of steps that take measurable time.",
        )
    ratios = _ratios(over, under)
    return Ratio(stdlib_statistics.median(ratios), median_interval(ratios), len(ratios))


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [x / y if y > 0 else float("inf") for x, y in zip(over, under, strict=True)]


def _timed_call(
    step: Step, synchronize: Synchronize, before_sample: Callable[[], None] | None, clock: Clock
) -> Callable[[], float]:
    """Make a function that calls the step once and returns its duration in seconds."""

    def call() -> float:
        if before_sample is not None:
            before_sample()
        synchronize()
        start = clock()
        step()
        synchronize()
        return clock() - start

    return call


@contextmanager
def _quiet_interpreter(settings: SamplingSettings) -> Iterator[None]:
    """Collect garbage, then keep the collector off; leave it as it was found."""
    interval_ranks(settings.min_rounds, settings.confidence)  # loads SciPy now and not between two samples
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _collect_before_warming_up() -> None:
    """Collect what first calls left behind.

    Not after the warm-up: a collection can take 0.2 s in one thread, and a pool that slept so long runs on one core for
    the next 40 ms (a 512 x 512 product took 2.7 ms instead of 1.5 ms).
    """
    gc.collect()


def _out_of_budget(count: int, settings: SamplingSettings, time_is_up: bool) -> StopReason | None:
    if count >= settings.max_rounds:
        return "rounds"
    return "time" if time_is_up else None


class _Block:
    """Consecutive warm-up calls that are judged together."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.total_s = 0.0

    def add(self, duration: float) -> None:
        self.times.append(duration)
        self.total_s += duration

    def is_full(self, max_time_s: float) -> bool:
        # Slow steps get smaller blocks: two of them should fit into the time for the samples.
        return (
            (len(self.times) >= WARMUP_BLOCK_CALLS and self.total_s >= WARMUP_BLOCK_S)
            or len(self.times) >= WARMUP_BLOCK_MAX_CALLS
            or self.total_s >= max_time_s / 2
        )

    def is_steady_after(self, earlier: _Block) -> bool:
        median, median_before = (stdlib_statistics.median_low(block.times) for block in (self, earlier))
        # The smaller of the two medians: a block of nothing but one recompilation must not look typical.
        typical = min(median, median_before)
        fell = median < (1 - STEADY_FALL) * median_before
        return not fell and self.total_s <= STEADY_EXCESS * typical * len(self.times)


def _warm_up(call: Callable[[], float], settings: SamplingSettings) -> tuple[list[float], bool]:
    """Call until times are steady or the budget is spent; the times, and whether they ended steady.

    Without warm-up calls there is nothing to judge, and the samples alone decide whether the state was steady.
    """
    if settings.warmup == "off" or settings.warmup_iterations == 0:
        return [], True
    times: list[float] = []
    blocks = [_Block()]
    free: list[float] = []
    spent = 0.0
    while len(times) < settings.warmup_iterations:
        duration = call()
        times.append(duration)
        blocks[-1].add(duration)
        spent += duration
        if settings.warmup == "on":
            if blocks[-1].is_full(settings.max_time_s):
                blocks.append(_Block())
            if spent >= settings.max_time_s:
                break
            continue
        free = sorted([*free, duration])[-WARMUP_FREE_CALLS:]
        if blocks[-1].is_full(settings.max_time_s):
            if len(blocks) > 1 and blocks[-1].is_steady_after(blocks[-2]):
                return times, True
            if spent - sum(free) >= WARMUP_TIME_FACTOR * settings.max_time_s:
                return times, False
            blocks.append(_Block())
    if not blocks[-1].times:
        blocks.pop()
    return times, len(blocks) > 1 and blocks[-1].is_steady_after(blocks[-2])


def _still_falls(samples_s: Sequence[float]) -> bool:
    trend = drift(samples_s)
    return trend.relative_change < -STEADY_FALL and trend.p_value < DRIFT_P_VALUE
