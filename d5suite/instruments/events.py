"""Two clocks on one step: the host's, and the device's own events.

Events are recorded before and after each step, between the two readings of the host's clock. They
are read after the host's clock has stopped. Both series are kept. An idle device reaches the first
event at once, so both clocks show the same time, except for the launch overhead: the time of an
empty step on the host, measured as the 95th percentile of `EMPTY` empty steps.

If the device's time is shorter by more than that, some of the step runs on the host or on another
stream. If it is longer than the host's, the host's clock stopped too early.

Imports the standard library and its neighbours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from d5suite.instruments.clock import Clock, now

EMPTY = 100
"""Empty steps that measure the launch overhead."""

RESOLUTION_S = 1e-6
"""Two steps of an event's clock ("a resolution of around 0.5 microseconds", CUDA Runtime API,
cudaEventElapsedTime)."""

SLACK = 0.01
"""Largest difference of the clocks besides the overhead, as a fraction of the step: half the
precision to which medians are sampled. Quartz clocks differ by less than a part in 1,000."""


class Timer(Protocol):
    """A pair of events: `d5suite.levels.device.EventTimer`."""

    def start(self) -> None:
        """Record the first event."""

    def stop(self) -> None:
        """Record the second event."""

    def milliseconds(self) -> float:
        """Wait for the second event, and return the time between the two."""


class EventLog:
    """The device's times of all calls of a step.

    Parameters
    ----------
    timer : Timer

    Attributes
    ----------
    seconds : list of float
        In the order of the calls, as the device reports them, unchecked.
    """

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.seconds: list[float] = []

    def call(self, step: Callable[[], object], synchronize: Callable[[], None], clock: Clock = now) -> float:
        """Call a step between two events; return the host's seconds, its waiting included."""
        timer = self.timer
        start = clock()
        timer.start()
        step()
        timer.stop()
        synchronize()
        took = clock() - start
        self.seconds.append(timer.milliseconds() / 1e3)
        return took

    def overhead(self, synchronize: Callable[[], None], clock: Clock = now) -> float:
        """Return the host's seconds for an empty step: recording, launching and waiting."""
        seconds = self.seconds
        self.seconds = []
        synchronize()
        times = sorted(self.call(lambda: None, synchronize, clock) for _ in range(EMPTY))
        self.seconds = seconds
        return times[math.ceil(0.95 * EMPTY) - 1]


@dataclass(frozen=True)
class TwoClocks:
    """The same samples on both clocks, in seconds.

    Attributes
    ----------
    host_s, device_s : sequence of float
    overhead_s : float
        Launch overhead of a sample, divided by its number of calls, as the samples are.
    """

    host_s: Sequence[float]
    device_s: Sequence[float]
    overhead_s: float

    @property
    def trusted(self) -> bool:
        """Whether the device's clock is monotonic."""
        return bool(self.device_s) and all(math.isfinite(each) and each >= 0 for each in self.device_s)

    @property
    def difference_s(self) -> float:
        """Excess of the host's time over the device's: the median over the samples."""
        return statistics.median(host - device for host, device in zip(self.host_s, self.device_s, strict=True))

    @property
    def slack_s(self) -> float:
        """Accepted difference of the two clocks beyond the launch overhead."""
        return RESOLUTION_S + SLACK * statistics.median(self.host_s)

    @property
    def early_s(self) -> float:
        """Time from the host's stop to the device's; 0 if the host waited for the device."""
        return max(0.0, -self.difference_s) if self.trusted else 0.0

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt one of the clocks."""
        if not self.trusted:
            wrong = sum(not (math.isfinite(each) and each >= 0) for each in self.device_s)
            return [f"the device's event clock went backwards in {wrong} of {len(self.device_s)} samples"]
        if self.difference_s <= self.overhead_s + self.slack_s:
            return []
        host, device = statistics.median(self.host_s), statistics.median(self.device_s)
        return [
            f"the device's events span {device * 1e3:.4g} ms of the host's {host * 1e3:.4g} ms, where launching takes "
            f"{self.overhead_s * 1e3:.2g} ms: the host works while it waits, or the device on another stream"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the device's samples, and how both clocks compare, as JSON-able values."""
        found: dict[str, Any] = {
            "samples_s": [each if math.isfinite(each) else None for each in self.device_s],
            "launch_overhead_s": self.overhead_s,
            "trusted": self.trusted,
        }
        if self.trusted:
            found |= {
                "median_s": statistics.median(self.device_s),
                "difference_s": self.difference_s,
                "agree": not self.warnings and self.early_s <= self.slack_s,
            }
        return found
