"""Two clocks on one step, on a made-up device that works while the host goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from d5suite.errors import ConfigurationError
from d5suite.instruments.events import EventLog, TwoClocks
from d5suite.instruments.sampling import sample, sample_alternating, sample_kernel
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import check_waits

SETTINGS = SamplingSettings(min_rounds=7, max_rounds=7, max_time_s=1e9, warmup="off")
LAUNCH_S = 5e-6


class Device:
    """A host's clock, a queue of work, and events among the work."""

    def __init__(self) -> None:
        self.host_s = self.free_s = self.stream_s = 0.0
        self.waits = True
        self.script: Callable[[float], float] = lambda milliseconds: milliseconds
        self._marks = [0.0, 0.0]

    def clock(self) -> float:
        return self.host_s

    def launch(self, seconds: float) -> None:
        """Issue work: the host goes on, and the device begins when it is free."""
        self.host_s += LAUNCH_S
        self.free_s = max(self.free_s, self.host_s) + seconds

    def launch_elsewhere(self, seconds: float) -> None:
        """Issue work to another stream."""
        self.host_s += LAUNCH_S
        self.stream_s = max(self.stream_s, self.host_s) + seconds

    def synchronize(self, *_: object) -> None:
        self.host_s += 1e-6
        if self.waits:
            self.host_s = max(self.host_s, self.free_s, self.stream_s)

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, index: int) -> None:
        self.host_s += 1e-6
        self._marks[index] = self.free_s = max(self.free_s, self.host_s)

    def milliseconds(self) -> float:
        self.host_s = max(self.host_s, self._marks[1])
        return self.script(1e3 * (self._marks[1] - self._marks[0]))


def compared(device: Device, step: Callable[[], object]) -> TwoClocks:
    """Samples of a step on both clocks."""
    log = EventLog(device)
    samples = sample(step, device.synchronize, SETTINGS, clock=device.clock, events=log)
    assert len(samples.samples_s) == len(samples.device_s) == 7
    assert len(log.seconds) == 8  # the first call, too
    return TwoClocks(samples.samples_s, samples.device_s, log.overhead(device.synchronize, device.clock))


def test_both_clocks_agree_on_work_of_the_device() -> None:
    device = Device()
    found = compared(device, lambda: device.launch(2e-3))
    assert found.device_s == pytest.approx([2e-3] * 7, rel=0.01)
    assert found.host_s != found.device_s
    assert not found.warnings
    assert check_waits(found).passed
    told = found.to_dict()
    assert told["agree"] and told["trusted"] and told["samples_s"] == list(found.device_s)
    assert 0 < told["difference_s"] <= told["launch_overhead_s"] + found.slack_s


def test_many_short_launches_are_within_the_events() -> None:
    """A step that the host cannot issue fast enough: the device waits between the events, too."""
    device = Device()

    def step() -> None:
        for _ in range(100):
            device.launch(1e-7)

    assert compared(device, step).to_dict()["agree"]


@pytest.mark.parametrize("how", ["waiting", "another stream"])
def test_events_shorter_than_the_hosts_time_are_told(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    wait = device.synchronize

    def step() -> None:
        device.launch(1e-3)
        if how == "another stream":
            device.launch_elsewhere(3e-3)
        else:
            busy[0] = 2e-3

    def synchronize(*_: object) -> None:
        wait()
        device.host_s += busy[0]
        busy[0] = 0.0

    busy = [0.0]
    monkeypatch.setattr(device, "synchronize", synchronize)
    found = compared(device, step)
    (warning,) = found.warnings
    assert "events span 1" in warning and "of the host's 3" in warning and "another stream" in warning
    assert found.to_dict()["agree"] is False
    assert check_waits(found).passed


def test_an_adapter_that_does_not_wait_is_caught() -> None:
    device = Device()

    def step() -> None:
        device.launch(2e-3)

    device.waits = False
    check = check_waits(found := compared(device, step))
    assert not check.passed
    assert "after synchronize had returned" in check.finding
    assert found.to_dict()["agree"] is False
    device.waits = True
    assert check_waits(compared(device, step)).passed


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, -math.inf])
def test_an_event_clock_that_goes_wrong_is_told_and_not_believed(wrong: float) -> None:
    device = Device()
    turn = itertools.count()
    device.script = lambda milliseconds: wrong if next(turn) == 3 else milliseconds
    found = compared(device, lambda: device.launch(2e-3))
    assert found.warnings == ["the device's event clock went backwards in 1 of 7 samples"]
    told = found.to_dict()
    assert not told["trusted"] and "agree" not in told
    assert told["samples_s"][2] == (wrong / 1e3 if math.isfinite(wrong) else None)
    assert check_waits(found).passed  # which says nothing then


def test_the_launch_overhead_is_that_of_empty_steps() -> None:
    device = Device()
    log = EventLog(device)
    log.seconds = [1.0]
    assert log.overhead(device.synchronize, device.clock) == pytest.approx(3e-6)
    assert log.seconds == [1.0]
    slow = itertools.count()

    def sometimes(*_: object) -> None:
        device.host_s += 1e-3 if next(slow) % 50 == 7 else 1e-6

    assert log.overhead(sometimes, device.clock) == pytest.approx(3e-6)  # two of a hundred do not count


def test_the_calls_of_a_kernel_are_divided_on_both_clocks() -> None:
    device = Device()
    log = EventLog(device)
    samples, iterations = sample_kernel(
        lambda: device.launch(2e-4), (), device.synchronize, SETTINGS, clock=device.clock, events=log
    )
    assert iterations > 10
    assert samples.device_s == pytest.approx([2e-4] * 7, rel=0.03)
    overhead_s = log.overhead(device.synchronize, device.clock) / iterations
    assert not TwoClocks(samples.samples_s, samples.device_s, overhead_s).warnings


def test_a_cold_cache_is_made_last_before_each_call_and_off_the_clock() -> None:
    device = Device()
    told: list[str] = []

    def flush() -> None:
        told.append("flush")
        device.launch(1e-2)  # still pending when it returns

    def step() -> None:
        told.append("step")
        device.launch(2e-3)

    cold = replace(SETTINGS, l2_cold=True)
    log = EventLog(device)
    samples = sample(
        step, device.synchronize, cold, before_sample=lambda: told.append("feed"), clock=device.clock, events=log,
        flush=flush,
    )  # fmt: skip
    assert told == ["feed", "flush", "step"] * 8
    assert samples.samples_s == pytest.approx([2e-3] * 7, rel=0.01)
    assert samples.device_s == pytest.approx([2e-3] * 7, rel=0.01)


def test_a_kernel_is_called_once_a_sample_where_the_cache_is_cold() -> None:
    device = Device()
    calls, flushes = itertools.count(), itertools.count()

    def call() -> None:
        next(calls)
        device.launch(2e-5)

    _, iterations = sample_kernel(
        call, (), device.synchronize, replace(SETTINGS, l2_cold=True),
        clock=device.clock, flush=lambda: next(flushes),
    )  # fmt: skip
    assert iterations == 1
    assert next(calls) == 1 + next(flushes)  # the very first call comes before all samples


def test_a_cache_that_nothing_makes_cold_is_an_error() -> None:
    device = Device()
    cold = replace(SETTINGS, l2_cold=True)
    for take in (
        lambda: sample(device.synchronize, device.synchronize, cold),
        lambda: sample_kernel(device.synchronize, (), device.synchronize, cold),
        lambda: sample_alternating({"a": device.synchronize}, {"a": device.synchronize}, cold),
    ):
        with pytest.raises(ConfigurationError, match="the L2 cache cannot be flushed here"):
            take()
    samples = sample(lambda: device.launch(1e-3), device.synchronize, SETTINGS, clock=device.clock, flush=lambda: 1 / 0)
    assert len(samples.samples_s) == 7  # not asked for, not flushed


def test_without_events_nothing_is_asked() -> None:
    device: Any = Device()
    device.start = None
    samples = sample(lambda: device.launch(1e-3), device.synchronize, SETTINGS, clock=device.clock)
    assert samples.device_s == []
