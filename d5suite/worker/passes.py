"""Passes: what the worker does with a prepared step. Each runs the same step; none rebuilds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from d5suite.errors import JobError
from d5suite.instruments.energy import EnergyError, meter_of
from d5suite.instruments.events import EventLog, TwoClocks
from d5suite.instruments.machine import disturbance, snapshot
from d5suite.instruments.memory import gpu_memory, peak_memory
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import Measured
from d5suite.measurements.base import Measurement, Step, check_waits
from d5suite.validate.check import Check
from d5suite.workloads.base import Workload


def take_memory(workload: Workload, step: Step) -> dict[str, Any]:
    """Measure peak memory over the first two calls, of the device if it has its own.

    Nothing has been proved or timed yet, so that only preparing precedes it.
    """
    device_peak = workload.backend.load("runtime").device_memory(workload.job.device)

    def twice() -> None:
        step.call_first()
        step.run()
        step.synchronize()

    with step:
        if device_peak is None:
            found = peak_memory(twice).to_dict()
        else:
            name = workload.backend.load("runtime").device_name(workload.job.device)
            measured, by_driver = gpu_memory(lambda: peak_memory(twice, device_peak), name)
            found = {**measured.to_dict(), "nvml": by_driver}
        step.memory = {**found, **step.memory_by_definition()}
    return dict(step.memory)


def take_energy(workload: Workload, measurement: Measurement, step: Step) -> dict[str, Any]:
    """Measure the energy of a step, in a separate pass before timing; or ``missing``, and why."""
    if not measurement.takes_energy:
        return {"missing": measurement.without_energy}
    if workload.job.ranks > 1:
        return {"missing": "not taken of several ranks"}
    device = workload.job.device

    def once() -> None:
        step.next_input()
        step.run()
        step.synchronize()

    try:
        name = workload.backend.load("runtime").device_name(device)
        meter = meter_of(device, name, workload.sensors())
        with step:
            found = meter.measure(once)
    except EnergyError as error:
        return {"missing": str(error)}
    return {**found.to_dict(), "joules_per_item": found.joules_per_step / step.items}


def take_time(
    workload: Workload,
    measurement: Measurement,
    step: Step,
    settings: SamplingSettings,
    memory: dict[str, Any],
    prove: Callable[[Samples, Iterable[Check]], None],
) -> Measured:
    """Sample the step, with the machine's state before and after, and prove what was timed.

    Parameters
    ----------
    workload : Workload
    measurement : Measurement
    step : Step
    settings : SamplingSettings
    memory : dict
        Of `take_memory`.
    prove : callable
        Proves what was timed, once the step no longer runs and before anything is made of it; takes
        the samples, and checks of them to begin with.
    """
    gpu = workload.job.device != "cpu"
    energy = take_energy(workload, measurement, step)
    timer, no_events = workload.event_timer()
    step.events = None if timer is None else EventLog(timer)
    flush, no_flush = workload.l2_flush() if settings.l2_cold else (None, "")
    if settings.l2_cold and (flush is None or not measurement.takes_cold):
        raise JobError(f"the L2 cache is not made cold: {no_flush or f'{measurement.name} samples in its own way'}")
    step.flush = flush
    sensors = workload.sensors()
    with step:
        before = snapshot(gpu=gpu, sensors=sensors)
        samples = step.time(settings)
        after = snapshot(gpu=gpu, sensors=sensors)
        found = disturbance(before, after, own_pids=[os.getppid()], threads=workload.job.threads)
        clocks = _two_clocks(step, samples)
    step.flush = None  # its buffer must not count in the next measurement
    prove(samples, [] if clocks is None else [check_waits(clocks)])
    extra = {**step.record(samples), "energy": energy}
    if clocks is not None:
        extra |= {"device_events": clocks.to_dict(), "warnings": [*extra.get("warnings", []), *clocks.warnings]}
    if flush is not None:
        extra["l2_cold"] = {"cache_bytes": flush.cache_bytes, "buffer_bytes": flush.buffer_bytes}
    if gpu and clocks is None:
        extra["device_events"] = {"missing": no_events or "this measurement takes its samples in its own way"}
    return Measured(
        level=measurement.level,
        samples=samples.to_dict(),  # type: ignore[arg-type]
        items=step.items,
        macs=step.macs,
        extra=extra,
        series=step.series(),
        machine=found.to_dict(),
        memory=memory,
    )


def _two_clocks(step: Step, samples: Samples) -> TwoClocks | None:
    """Return the samples on both clocks; None if the step did not use the device's."""
    if step.events is None or not samples.device_s:
        return None
    overhead_s = step.events.overhead(step.synchronize) / step.calls_per_sample
    return TwoClocks(samples.samples_s, samples.device_s, overhead_s)
