"""Passes: what the worker does with a prepared step. Each runs the same step; none rebuilds it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from d5suite.instruments.machine import disturbance, snapshot
from d5suite.instruments.memory import peak_memory
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import Measured
from d5suite.measurements.base import Measurement, Step
from d5suite.workloads.base import Workload


def take_memory(workload: Workload, step: Step) -> dict[str, Any]:
    """Peak memory over the first two calls, of the device if it has its own, else of this process.

    Nothing has been proved or timed yet, so that only preparing precedes it.
    """
    device_peak = workload.backend.load("runtime").device_memory(workload.job.device)

    def twice() -> None:
        step.call_first()
        step.run()
        step.synchronize()

    with step:
        step.memory = {**peak_memory(twice, device_peak).to_dict(), **step.memory_by_definition()}
    return dict(step.memory)


def take_time(
    workload: Workload,
    measurement: Measurement,
    step: Step,
    settings: SamplingSettings,
    memory: dict[str, Any],
    prove: Callable[[Samples], None],
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
        Proves what was timed, once the step no longer runs and before anything is made of it.
    """
    gpu = workload.job.device != "cpu"
    with step:
        before = snapshot(gpu=gpu)
        samples = step.time(settings)
        found = disturbance(before, snapshot(gpu=gpu), own_pids=[os.getppid()], threads=workload.job.threads)
    prove(samples)
    return Measured(
        level=measurement.level,
        samples=samples.to_dict(),  # type: ignore[arg-type]
        items=step.items,
        macs=step.macs,
        extra=step.record(samples),
        series=step.series(),
        machine=found.to_dict(),
        memory=memory,
    )
