"""Sampling: the first call, warm-up, then samples until the median is precise enough.

One sample is ``synchronize(); start = clock(); step(); synchronize(); end = clock()``: earlier work
finishes before it starts, and the work it queues is included. The garbage collector is off while
calls are timed. All samples are kept; nothing is trimmed.

Imports the standard library, `d5suite.statistics` and its neighbours in ``d5suite.instruments``.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics as stdlib_statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal

from d5suite.errors import ConfigurationError
from d5suite.instruments.clock import Clock, now
from d5suite.instruments.events import EventLog
from d5suite.instruments.settings import SHARE_OF_LIMIT, TIME_LIMIT, InTurns, SamplingSettings, Turns
from d5suite.instruments.warmup import WARMUP_BLOCK_CALLS, still_falls, warm_up
from d5suite.statistics.intervals import count_outliers, drift, interval_ranks, median_interval, relative_half_width
from d5suite.statistics.ratios import ratios_of

Step = Callable[[], object]
Synchronize = Callable[[], None]
StopReason = Literal["precision", "time", "rounds"]

KERNEL_SAMPLE_S = 5e-3
"""Least duration of a kernel's sample, so that effects between samples, such as threads going to
sleep, hardly count: with 0.5 ms a matrix product seemed 2.7% too long, with 5 ms 1% too short."""

KERNEL_MAX_ITERATIONS = 10_000
"""Most calls per sample of a kernel."""

CHECK_GROWTH = 1.1
"""Growth of the number of samples between checks of the precision, to keep checking cheap."""

WAKE_S = 0.02
"""Least duration of the uncounted calls at the beginning of a turn: the caches still hold the other
worker's data, and threads are asleep."""


@dataclass(frozen=True)
class Samples:
    """The times of one measurement, in seconds and in order.

    Attributes
    ----------
    first_call_s : float
        The first call, including tracing and compilation.
    warmup_s : list of float
        The warm-up calls.
    samples_s : list of float
        All samples.
    steady : bool
        Whether warm-up ended because times stopped falling, and the samples do not fall.
    stopped_by : {"precision", "time", "rounds"}
        Why sampling ended: precise enough, out of time (with at least ``min_rounds``, or near the
        time limit of the process), or ``max_rounds``; in turns, as many as were asked for.
    confidence : float
        Requested confidence of the interval in `to_dict`.
    device_s : list of float
        The same samples on the device's own clock; empty if it was not asked.
    """

    first_call_s: float
    warmup_s: list[float]
    samples_s: list[float]
    steady: bool
    stopped_by: StopReason
    confidence: float = 0.95
    device_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median of the samples."""
        return stdlib_statistics.median(self.samples_s)

    @property
    def compile_s(self) -> float:
        """First call less the median: an estimate of tracing, compilation and first allocation."""
        return max(0.0, self.first_call_s - self.median_s)

    def to_dict(self) -> dict[str, Any]:
        """Return times, in seconds, and their statistics as JSON-able values.

        ``median_ci_confidence`` is the actual coverage of ``median_ci_s``, below the requested one
        if there are too few samples (see `d5suite.statistics.intervals.median_interval`).
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


def sample(
    step: Step,
    synchronize: Synchronize,
    settings: SamplingSettings,
    *,
    before_sample: Callable[[], None] | None = None,
    clock: Clock = now,
    calls: int = 1,
    events: EventLog | None = None,
    flush: Callable[[], object] | None = None,
) -> Samples:
    """Time a step: first call, warm-up, samples.

    Parameters
    ----------
    step : callable
        The work to time; may return before it finishes (asynchronous devices).
    synchronize : callable
        Returns when all queued work is done.
    settings : SamplingSettings
        When to stop.
    before_sample : callable, optional
        Called before each step, outside the timing, for example to feed the next batch.
    clock : callable
        Seconds, monotonic.
    calls : int
        Number of calls that a step makes: times that are handed over in turns are divided by it.
    events : EventLog, optional
        Receives each call's time on the device; samples taken in turns come without these times.
    flush : callable, optional
        Makes the L2 cache cold, last before each step, outside the timing, if ``settings`` say so.

    Returns
    -------
    Samples

    Raises
    ------
    ConfigurationError
        If turns end before any sample was taken, or ``flush`` is missing for a cold L2 cache.

    Notes
    -----
    Repeated checks of the interval's width reduce its final coverage slightly: 94.3% instead of 95%
    in 1500 simulated runs with log-normal noise.
    """
    call = _timed_call(step, synchronize, _made_cold(before_sample, flush, settings), clock, events)
    with quiet_interpreter(settings):
        first_call_s = call()
        _collect_before_warming_up()
        warmup_s, steady = warm_up(call, settings)
        if isinstance(settings, InTurns) and settings.turns is not None:
            lately = [*warmup_s, first_call_s] if len(warmup_s) < WARMUP_BLOCK_CALLS else warmup_s
            samples_s = _sample_in_turns(call, settings.turns, calls, clock, min(lately[-WARMUP_BLOCK_CALLS:]))
            return Samples(first_call_s, warmup_s, samples_s, steady, "rounds", settings.confidence)
        samples_s = []
        stopped_by = _take(lambda: samples_s.append(call()), lambda: [samples_s], settings, settings.max_time_s, clock)
    return Samples(
        first_call_s,
        warmup_s,
        samples_s,
        steady and not still_falls(samples_s),
        stopped_by,
        settings.confidence,
        [] if events is None else events.seconds[-len(samples_s) :],
    )


def sample_kernel(
    call: Callable[..., object],
    arguments: tuple[Any, ...],
    synchronize: Callable[..., None],
    settings: SamplingSettings,
    *,
    others: Sequence[tuple[Any, ...]] = (),
    keep: Callable[[int, Any], None] | None = None,
    clock: Clock = now,
    events: EventLog | None = None,
    flush: Callable[[], object] | None = None,
) -> tuple[Samples, int]:
    """Time a native call that may be much shorter than a clock reading.

    One sample is a bare loop over the call with one `synchronize` at its end, divided by the number
    of iterations. On an asynchronous device a call runs while later calls are issued, so the sample
    is the inverse of the rate at which calls complete.

    Parameters
    ----------
    call, arguments
        The kernel is ``call(*arguments)``.
    synchronize : callable
        Returns when all calls are done; takes the last call's result, or nothing if none is
        pending.
    settings, clock, events, flush
        As in `sample`. With a cold cache a sample is one call: the next would find the cache warm.
    others : sequence of tuple
        Further arguments, with which samples take turns.
    keep : callable, optional
        Receives the index of the arguments and the result of the last sample's last call; then the
        same of one more, untimed sample for each of the other arguments. It must copy what it needs
        at once: a later call may overwrite the result.

    Returns
    -------
    samples : Samples
        Times per call.
    iterations : int
        Calls per sample.
    """
    synchronize()
    start = clock()
    synchronize(call(*arguments))
    first_call_s = clock() - start
    last: list[object] = []
    result: list[object] = []
    every = [arguments, *others]
    turn = 0

    def take_turns() -> None:
        nonlocal turn
        turn = (turn + 1) % len(every)

    def loop(count: int) -> Step:
        def step() -> None:
            given = every[turn]
            for _ in repeat(None, count - 1):
                call(*given)
            last.append(call(*given))

        return step

    def wait() -> None:
        synchronize(*last)
        if last and keep is not None:
            result[:] = last  # frees the previous result, as clearing would
        last.clear()

    iterations = 1
    with quiet_interpreter(settings):
        while iterations < KERNEL_MAX_ITERATIONS and not settings.l2_cold:
            took = _timed_call(loop(iterations), wait, take_turns, clock)()
            if took >= KERNEL_SAMPLE_S:
                break
            iterations = min(KERNEL_MAX_ITERATIONS, max(2 * iterations, int(iterations * KERNEL_SAMPLE_S / took)))
    samples = sample(
        loop(iterations),
        wait,
        settings,
        before_sample=take_turns,
        clock=clock,
        calls=iterations,
        events=events,
        flush=flush,
    )
    if keep is not None:
        keep(turn, result[0])
        for _ in others:
            _timed_call(loop(iterations), wait, take_turns, clock)()
            keep(turn, result[0])
    each = replace(
        samples,
        first_call_s=first_call_s,
        warmup_s=[duration / iterations for duration in samples.warmup_s],
        samples_s=[duration / iterations for duration in samples.samples_s],
        device_s=[duration / iterations for duration in samples.device_s],
    )
    return each, iterations


def sample_alternating(
    steps: Mapping[str, Step],
    synchronizers: Mapping[str, Synchronize],
    settings: SamplingSettings,
    *,
    before_sample: Mapping[str, Callable[[], None]] | None = None,
    clock: Clock = now,
) -> dict[str, Samples]:
    """Time several steps in turn, so that disturbances affect them alike; for ratios.

    Each step has its own first call and warm-up. Every round then calls each step once, in a new
    random order, so that no step always follows the same other step. Sample i of one step pairs
    with sample i of the others: see `d5suite.statistics.ratios.paired_ratio`.

    Parameters
    ----------
    steps, synchronizers : mapping of str to callable
        As in `sample`, by name.
    settings : SamplingSettings
        ``max_time_s`` is per step. Sampling stops early when the ratio of every step to the first
        reaches ``relative_precision``.
    before_sample : mapping of str to callable, optional
        As in `sample`, by name; not every step needs one.
    clock : callable
        Seconds, monotonic.

    Raises
    ------
    ConfigurationError
        If the names differ, there is no step, or the settings ask for turns with another worker or
        for a cold L2 cache.
    """
    if isinstance(settings, InTurns):
        raise ConfigurationError("a comparison step cannot take turns")
    _made_cold(None, None, settings)
    if not steps or set(steps) != set(synchronizers):
        raise ConfigurationError(
            f"steps {sorted(steps)} and synchronizers {sorted(synchronizers)} do not match",
            hint="Give one synchronizer per step, under the same name.",
        )
    before = before_sample or {}
    calls = {name: _timed_call(steps[name], synchronizers[name], before.get(name), clock) for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in steps}
    reference = order[0]
    with quiet_interpreter(settings):
        first = {name: calls[name]() for name in order}
        _collect_before_warming_up()
        warm = {name: warm_up(calls[name], settings) for name in order}

        def take() -> None:
            shuffle(order)
            for name in order:
                times[name].append(calls[name]())

        def series() -> list[list[float]]:
            others = [ratios_of(times[name], times[reference]) for name in times if name != reference]
            return others or [times[reference]]

        stopped_by = _take(take, series, settings, settings.max_time_s * len(steps), clock)
    return {
        name: Samples(
            first[name],
            warm[name][0],
            times[name],
            warm[name][1] and not still_falls(times[name]),
            stopped_by,
            settings.confidence,
        )
        for name in steps
    }


def _take(
    take: Callable[[], object],
    series: Callable[[], Sequence[Sequence[float]]],
    settings: SamplingSettings,
    max_time_s: float,
    clock: Clock,
) -> StopReason:
    """Take samples until all series are precise enough, or the budget is spent; return why."""
    end = clock() + max_time_s
    last, next_check = last_start(clock), settings.min_rounds
    count = 0
    while True:
        take()
        count += 1
        if count < settings.min_rounds and clock() < last:
            continue
        if count >= next_check:
            next_check = int(count * CHECK_GROWTH) + 1
            if all(relative_half_width(each, settings.confidence) <= settings.relative_precision for each in series()):
                return "precision"
        if count >= settings.max_rounds:
            return "rounds"
        if clock() >= min(end, last):
            return "time"


def _sample_in_turns(call: Callable[[], float], turns: Turns, calls: int, clock: Clock, sample_s: float) -> list[float]:
    samples_s: list[float] = []
    while (turn := turns.wait(sample_s)) is not None:
        if turn.wakes:
            end = clock() + WAKE_S
            call()
            while clock() < end:
                call()
        block = [call() for _ in range(turn.samples)]
        samples_s += block
        sample_s = sum(block) / turn.samples
        turns.give([each / calls for each in block], sum(block))
    if not samples_s:
        raise ConfigurationError("turns ended before any sample was taken")
    return samples_s


def _made_cold(
    before_sample: Callable[[], None] | None, flush: Callable[[], object] | None, settings: SamplingSettings
) -> Callable[[], None] | None:
    """Return the work before a step: it flushes the L2 cache last."""
    if not settings.l2_cold:
        return before_sample
    if flush is None:
        raise ConfigurationError("the L2 cache cannot be flushed here", where="sampling settings, l2_cold")

    def before() -> None:
        if before_sample is not None:
            before_sample()
        flush()

    return before


def _timed_call(
    step: Step,
    synchronize: Synchronize,
    before_sample: Callable[[], None] | None,
    clock: Clock,
    events: EventLog | None = None,
) -> Callable[[], float]:
    """Return a function that calls the step once and returns its duration in seconds."""

    def call() -> float:
        if before_sample is not None:
            before_sample()
        synchronize()
        if events is not None:
            return events.call(step, synchronize, clock)
        start = clock()
        step()
        synchronize()
        return clock() - start

    return call


@contextmanager
def quiet_interpreter(settings: SamplingSettings) -> Iterator[None]:
    """Collect garbage, disable the collector, and restore it afterwards."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _collect_before_warming_up() -> None:
    """Collect the garbage of first calls, before the warm-up.

    After the warm-up it would disturb the samples: a collection can take 0.2 s in one thread, and
    the thread pool, asleep meanwhile, then runs on one core for 40 ms (a 512 x 512 product took
    2.7 ms instead of 1.5 ms).
    """
    gc.collect()


def last_start(clock: Clock) -> float:
    """Return when the last sample may start, by the clock, to leave time for the proof.

    The time limit is in the environment (`TIME_LIMIT`), and counts from the start of this process.
    Infinite without a limit.
    """
    limit = os.environ.get(TIME_LIMIT)
    if not limit:
        return math.inf
    import psutil

    return clock() + SHARE_OF_LIMIT * float(limit) - (time.time() - psutil.Process().create_time())
