"""The sampling loop: what it counts, when warm-up ends, when it stops. All on a clock that the
tests move."""

from __future__ import annotations

import gc
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d5suite.errors import ConfigurationError
from d5suite.instruments.clock import measure_clock
from d5suite.instruments.sampling import Samples, sample, sample_alternating
from d5suite.instruments.settings import TIME_LIMIT, SamplingSettings
from d5suite.statistics.ratios import Ratio, paired_ratio


class FakeMachine:
    """A clock that moves only when work is done, and a queue of work that runs when someone
    synchronizes."""

    def __init__(self) -> None:
        self.time = 0.0
        self.queued = 0.0

    def clock(self) -> float:
        return self.time

    def synchronize(self) -> None:
        self.time += self.queued
        self.queued = 0.0

    def step_taking(self, durations: Iterable[float]) -> Callable[[], None]:
        series: Iterator[float] = iter(durations)

        def step() -> None:
            self.time += next(series)

        return step


def durations(*start: float, then: float | Iterable[float]) -> Iterator[float]:
    return itertools.chain(start, itertools.repeat(then) if isinstance(then, float) else then)


def noisy(typical: float, spread: float, seed: int = 1) -> Iterator[float]:
    draw = random.Random(seed)
    while True:
        yield typical * (1 + spread * draw.expovariate(1))


def run(machine: FakeMachine, series: Iterable[float], **settings: Any) -> Samples:
    return sample(machine.step_taking(series), machine.synchronize, SamplingSettings(**settings), clock=machine.clock)


def test_the_first_call_is_reported_apart() -> None:
    result = run(FakeMachine(), durations(30.0, then=0.125))
    assert result.first_call_s == 30.0
    assert result.compile_s == pytest.approx(30.0 - 0.125)
    assert 30.0 not in result.warmup_s + result.samples_s
    assert result.steady


def test_a_first_call_faster_than_the_rest_means_no_compilation() -> None:
    assert run(FakeMachine(), durations(0.05, then=0.125)).compile_s == 0.0


@pytest.mark.parametrize("typical", [0.0005, 0.125, 2.0])
@pytest.mark.parametrize("start", [(30.0, 40.0), (30.0, 40.0, 35.0), (30.0, 40.0, 35.0, 20.0)])
def test_compilations_after_the_first_call_are_warm_up(typical: float, start: tuple[float, ...]) -> None:
    check_warm_up_swallows(start, typical)


@pytest.mark.parametrize("typical", [0.0005, 0.125])
def test_a_compilation_after_steady_calls_is_warm_up(typical: float) -> None:
    check_warm_up_swallows((1.0, typical, typical, 50.0), typical)


def check_warm_up_swallows(start: tuple[float, ...], typical: float) -> None:
    result = run(FakeMachine(), durations(*start, then=typical))
    assert result.warmup_s[: len(start) - 1] == pytest.approx(start[1:])
    assert result.samples_s == pytest.approx([typical] * len(result.samples_s))
    assert result.steady


def test_warm_up_lasts_until_times_stop_falling() -> None:
    falling = [0.01 * (1 + 10 * 0.9**call) for call in range(120)]
    result = run(FakeMachine(), durations(1.0, *falling, then=0.01))
    assert result.steady
    assert max(result.samples_s) < 0.0115
    assert len(result.warmup_s) < 120


def test_times_that_never_stop_falling_are_not_called_steady_and_warm_up_ends() -> None:
    result = run(FakeMachine(), durations(1.0, then=(0.5 * 0.9**call for call in itertools.count())), max_rounds=50)
    assert not result.steady
    assert sum(result.warmup_s) < 10


def test_slow_drift_that_warm_up_missed_shows_in_the_samples() -> None:
    settings: dict[str, Any] = {"warmup": "off", "relative_precision": 0.0, "max_time_s": 1e9, "max_rounds": 60}
    assert not run(FakeMachine(), durations(1.0, then=(0.99**call for call in itertools.count())), **settings).steady
    assert run(FakeMachine(), durations(1.0, then=noisy(1.0, 0.1)), **settings).steady


@pytest.mark.parametrize("seed", range(20))
def test_noise_neither_prolongs_warm_up_for_long_nor_ends_it_early(seed: int) -> None:
    result = run(FakeMachine(), durations(5.0, 4.0, then=noisy(0.125, 0.1, seed)))
    assert result.steady
    assert 6 <= len(result.warmup_s) <= 30
    assert 4.0 not in result.samples_s


def test_recompiling_for_ever_ends_in_bounded_time() -> None:
    result = run(FakeMachine(), itertools.cycle([1.0, 50.0]))
    assert sum(result.warmup_s) < 500
    assert not result.steady


def test_a_slow_step_is_not_warmed_up_for_long() -> None:
    result = run(FakeMachine(), durations(60.0, then=20.0))
    assert len(result.warmup_s) == 2
    assert len(result.samples_s) == 5


def test_sampling_stops_when_precise_enough() -> None:
    result = run(FakeMachine(), itertools.repeat(0.001))
    assert result.stopped_by == "precision"
    assert len(result.samples_s) == 6  # the fewest with a 95% interval of the median


def test_more_noise_takes_more_samples() -> None:
    def count(spread: float) -> int:
        result = run(FakeMachine(), noisy(0.001, spread), max_time_s=1e6, warmup="off")
        assert result.stopped_by == "precision"
        return len(result.samples_s)

    assert count(0.01) < count(0.3) < count(1.0)


def test_sampling_stops_when_the_time_is_spent() -> None:
    result = run(FakeMachine(), noisy(0.1, 1.0), max_time_s=2.0)
    assert result.stopped_by == "time"
    assert 2.0 <= sum(result.samples_s) < 2.0 + max(result.samples_s)


def test_min_rounds_are_taken_whatever_the_time() -> None:
    result = run(FakeMachine(), itertools.repeat(10.0), min_rounds=9, max_time_s=0.5)
    assert len(result.samples_s) == 9
    assert run(FakeMachine(), itertools.repeat(0.001), min_rounds=40).stopped_by == "precision"
    assert len(run(FakeMachine(), itertools.repeat(0.001), min_rounds=40).samples_s) == 40


def test_max_rounds_bound_the_samples_unless_min_rounds_ask_for_more() -> None:
    result = run(FakeMachine(), noisy(0.001, 1.0), max_rounds=12, relative_precision=0.0)
    assert (len(result.samples_s), result.stopped_by) == (12, "rounds")
    assert len(run(FakeMachine(), noisy(0.001, 1.0), max_rounds=2, min_rounds=7).samples_s) == 7


def test_warmup_on_fills_the_time_or_the_calls_and_off_makes_none() -> None:
    assert len(run(FakeMachine(), itertools.repeat(0.125), warmup="on", max_time_s=2.0).warmup_s) == 16
    assert len(run(FakeMachine(), itertools.repeat(0.125), warmup="on", warmup_iterations=3).warmup_s) == 3
    assert len(run(FakeMachine(), itertools.repeat(0.125), warmup_iterations=2).warmup_s) == 2
    assert run(FakeMachine(), itertools.repeat(0.125), warmup="off").warmup_s == []


def test_queued_work_counts_for_the_step_that_queued_it_and_for_no_other() -> None:
    machine = FakeMachine()
    calls: list[str] = []

    def feed() -> None:
        calls.append("feed")
        machine.queued += 7.0

    def step() -> None:
        calls.append("step")
        machine.queued += 0.25

    result = sample(step, machine.synchronize, SamplingSettings(), before_sample=feed, clock=machine.clock)
    assert {result.first_call_s, *result.warmup_s, *result.samples_s} == {0.25}
    assert calls == ["feed", "step"] * (len(calls) // 2)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_is_off_while_sampling_and_left_as_found(enabled: bool, fails: bool) -> None:
    machine, seen = FakeMachine(), []

    def step() -> None:
        machine.time += 0.125
        seen.append(gc.isenabled())
        if fails and len(seen) == 9:
            raise RuntimeError("the step failed")

    (gc.enable if enabled else gc.disable)()
    try:
        try:
            sample(step, machine.synchronize, SamplingSettings(), clock=machine.clock)
        except RuntimeError:
            assert fails
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert not any(seen)


def test_the_record_is_strict_json_with_every_time() -> None:
    result = run(FakeMachine(), durations(3.0, 2.0, then=noisy(0.01, 0.2)))
    record = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert record["samples_s"] == result.samples_s
    assert record["warmup_s"] == result.warmup_s
    assert record["median_ci_s"][0] <= record["median_s"] <= record["median_ci_s"][1]
    assert record["median_ci_confidence"] >= 0.95


def test_few_samples_admit_that_their_interval_covers_less() -> None:
    record = run(FakeMachine(), noisy(10.0, 0.1)).to_dict()
    assert len(record["samples_s"]) == 5
    assert record["median_ci_s"] == [min(record["samples_s"]), max(record["samples_s"])]
    assert record["median_ci_confidence"] == pytest.approx(0.9375)


def alternating(
    machine: FakeMachine, slow: Iterable[float], fast: Iterable[float], log: list[str], **settings: Any
) -> dict[str, Samples]:
    def logged(name: str, step: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            log.append(name)
            step()

        return call

    steps = {"slow": logged("slow", machine.step_taking(slow)), "fast": logged("fast", machine.step_taking(fast))}
    both = dict.fromkeys(steps, machine.synchronize)
    return sample_alternating(steps, both, SamplingSettings(**settings), clock=machine.clock)


def test_alternating_rounds_call_each_step_once_in_changing_order() -> None:
    log: list[str] = []
    result = alternating(FakeMachine(), noisy(0.1, 0.5), noisy(0.1, 0.5), log, warmup="off", min_rounds=30)
    rounds = [tuple(log[start : start + 2]) for start in range(2, len(log), 2)]
    assert {len(each.samples_s) for each in result.values()} == {len(rounds)}
    assert set(rounds) == {("slow", "fast"), ("fast", "slow")}


def test_a_paired_ratio_cancels_what_slows_both() -> None:
    disturbed = [1.0 + (3.0 if number % 7 < 3 else 0.0) for number in range(1000)]
    result = alternating(FakeMachine(), (2.0 * each for each in disturbed), iter(disturbed), [], max_time_s=100.0)
    ratio = paired_ratio(result["slow"].samples_s, result["fast"].samples_s)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.interval == pytest.approx((2.0, 2.0))
    assert ratio.n == len(result["slow"].samples_s) == 6
    assert result["slow"].stopped_by == "precision"


def test_alternating_a_single_step_judges_its_own_precision() -> None:
    machine = FakeMachine()
    result = sample_alternating(
        {"only": machine.step_taking(noisy(0.001, 0.3))}, {"only": machine.synchronize},
        SamplingSettings(max_time_s=1e6), clock=machine.clock,
    )  # fmt: skip
    assert len(result["only"].samples_s) > 6


@pytest.mark.parametrize(
    ("interval", "said"), [((0.9, 1.01), "kept"), ((0.9, 1.2), "undecided"), ((1.05, 1.2), "exceeded")]
)
def test_a_limit_inside_the_interval_is_undecided(interval: tuple[float, float], said: str) -> None:
    assert Ratio(1.0, *interval, 0.95, "samples", 9).against(1.02) == said


def test_ratios_and_alternation_refuse_what_does_not_belong_together() -> None:
    with pytest.raises(ConfigurationError):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ConfigurationError):
        paired_ratio([1.0], [0.0])
    with pytest.raises(ConfigurationError):
        sample_alternating({"a": lambda: None}, {"b": lambda: None}, SamplingSettings())
    with pytest.raises(ConfigurationError):
        sample_alternating({}, {}, SamplingSettings())


@given(
    st.builds(
        SamplingSettings,
        min_rounds=st.integers(1, 100),
        max_time_s=st.floats(0, 1e6),
        max_rounds=st.integers(1, 10_000),
        relative_precision=st.floats(0, 1),
        confidence=st.floats(0.5, 0.999),
        warmup=st.sampled_from(["auto", "on", "off"]),
        warmup_iterations=st.integers(0, 10**6),
    )
)
def test_settings_survive_json(settings: SamplingSettings) -> None:
    assert SamplingSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_rounds": 0}, {"min_rounds": 2.5}, {"min_rounds": True}, {"max_time_s": -1}, {"max_time_s": float("nan")},
        {"max_time_s": float("inf")}, {"max_time_s": "1"}, {"confidence": 1.0}, {"relative_precision": -0.1},
        {"warmup": "perhaps"}, {"warmup_iterations": -1}, {"rounds": 5},
    ],
)  # fmt: skip
def test_wrong_settings_name_the_setting(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        SamplingSettings.from_dict(wrong)


def test_the_clock_resolves_more_than_it_costs_a_microsecond_step() -> None:
    properties = measure_clock()
    assert 0 < properties.resolution_s <= 1e-3
    assert properties.read_cost_s > 0
    ticks = itertools.count(0.0, 0.5)
    coarse = measure_clock(lambda: next(ticks), readings=10, repeats=2)
    assert (coarse.resolution_s, coarse.read_cost_s) == (0.5, 0.5)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import d5suite.statistics.intervals\n"
        "from d5suite.instruments import clock, sampling, memory, environment, machine, quiet, threads\n"
        "heavy = {'torch', 'tensorflow', 'jax', 'keras', 'mxnet', 'onnx', 'scipy', 'psutil', 'cv2'}\n"
        "ours = ('d5suite.errors', 'd5suite.instruments', 'd5suite.statistics')\n"
        "others = [n for n in sys.modules if n.startswith('d5suite.') and not n.startswith(ours)]\n"
        "print(sorted(heavy & set(sys.modules)), others)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[] []"


@pytest.mark.parametrize("alternating", [False, True])
def test_samples_end_in_time_for_the_proof(monkeypatch: pytest.MonkeyPatch, alternating: bool) -> None:
    """However many are asked for: a worker that reaches its time limit loses them."""
    settings = SamplingSettings(min_rounds=100_000, warmup="off")
    monkeypatch.setenv(TIME_LIMIT, "0.001")
    if alternating:
        found = sample_alternating({"a": lambda: None}, {"a": lambda: None}, settings)["a"]
    else:
        found = sample(lambda: None, lambda: None, settings)
    assert len(found.samples_s) == 1 and found.stopped_by == "time"


def test_more_rounds_than_a_result_can_hold_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1000000000000 is not a whole number from 1 to 1,000,000"):
        SamplingSettings(min_rounds=10**12)
