"""The samples of a step, and the state of the machine before and after them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from d5suite.errors import JobError
from d5suite.instruments.events import EventLog, TwoClocks
from d5suite.instruments.gpus import unused_by
from d5suite.instruments.machine import disturbance, snapshot
from d5suite.instruments.memory import free_heap_bytes, watch_peak
from d5suite.instruments.sampling import Samples
from d5suite.measurements.base import Step, check_waits
from d5suite.passes.base import Pass, PreparedStep
from d5suite.validate.check import Check

LATER_BYTES = 256 * 2**20
"""Bytes by which memory may grow beyond the first calls while samples are taken, or half the memory
of the first calls if that is more: pools grow, and no garbage is collected."""


class Time(Pass):
    """Samples on the host's clock and, where the backend has one, on the device's.

    Attributes
    ----------
    samples : Samples
        The samples, once they are taken.
    clocks : TwoClocks or None
        The samples on both clocks; None if the step did not use the device's clock.
    grown, expected : int
        Bytes by which the peak memory grew while samples were taken, and bytes by which it may
        grow; both 0 if they are not known.
    unused : str or None
        Why the driver knows of no computation on the GPU; empty if there was a computation, None if
        the driver was not asked.
    """

    name = "time"
    disturbs = False
    samples: Samples
    clocks: TwoClocks | None
    grown = expected = 0
    unused: str | None = None

    def take(self, prepared: PreparedStep) -> dict[str, Any]:
        """Sample the step.

        Raises
        ------
        JobError
            If the settings ask for a cold L2 cache, and the cache cannot be made cold.
        """
        workload, measurement, step, settings = prepared
        on_gpu = workload.job.device != "cpu"
        timer, no_events = workload.event_timer()
        step.events = None if timer is None else EventLog(timer)
        flush, no_flush = workload.l2_flush() if settings.l2_cold else (None, "")
        if settings.l2_cold and (flush is None or not measurement.takes_cold):
            raise JobError(f"the L2 cache is not made cold: {no_flush or f'{measurement.name} samples in its own way'}")
        step.flush = flush
        sensors = workload.sensors()
        with step:
            step.begin()  # loads weights, for which some frameworks copy them
            before = snapshot(gpu=on_gpu, sensors=sensors)
            known = {"peak_bytes", "baseline_bytes"} <= step.memory.keys()
            device_peak = workload.device_peak()
            grown = watch_peak(device_peak) if known else None
            heap = 0 if device_peak else free_heap_bytes()  # may become resident again without being taken anew
            self.samples = step.time(settings)
            if grown is not None:
                first = step.memory["peak_bytes"] - step.memory["baseline_bytes"]
                self.grown, self.expected = grown(), first + max(LATER_BYTES, first // 2) + step.kept_bytes() + heap
            after = snapshot(gpu=on_gpu, sensors=sensors)
            machine = disturbance(before, after, own_pids=[os.getppid()], threads=workload.job.threads)
            self.clocks = _both_clocks(step, self.samples)
            if measurement.takes_cold and workload.gpus_before:  # its calls compute on the device
                self.unused = unused_by(os.getpid(), workload.gpus_before, after.gpus)
        step.flush = None  # its buffer must not count in the next measurement
        part: dict[str, Any] = {"samples": self.samples.to_dict(), "machine": machine.to_dict()}
        if self.clocks is not None:
            part |= {"device_events": self.clocks.to_dict(), "warnings": list(self.clocks.warnings)}
        elif on_gpu:
            part["device_events"] = {"missing": no_events or "this measurement takes its samples in its own way"}
        if flush is not None:
            part["l2_cold"] = {"cache_bytes": flush.cache_bytes, "buffer_bytes": flush.buffer_bytes}
        return part

    def check(self) -> Iterator[Check]:
        """Check that the clocks agree, the device was used, and memory grew as expected at most."""
        if self.clocks is not None:
            yield check_waits(self.clocks)
        if self.unused is not None:
            yield Check("a GPU that nothing was computed on", float(bool(self.unused)), 0.0, self.unused)
        if self.expected:
            text = f"{self.grown / 2**20:.0f} MiB more while timed, {self.expected / 2**20:.0f} MiB expected at most"
            more = float(self.grown > self.expected)
            yield Check("memory taken after the first calls, whose peak is recorded", more, 0.0, text)

    @classmethod
    def record(cls, part: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pass.record`."""
        samples, machine = part["samples"], part["machine"]
        gpus = machine.get("details", {}).get("gpus")
        return {
            "median_s": samples["median_s"],
            "median_ci95": samples["median_ci_s"],
            "median_ci_confidence": samples["median_ci_confidence"],
            "first_call_s": samples["first_call_s"],
            "compile_s": samples["compile_s"],
            "warmup_calls": len(samples["warmup_s"]),
            "steady": samples["steady"],
            "stopped_by": samples["stopped_by"],
            "machine": {
                "disturbed": machine["disturbed"],
                "reasons": machine["reasons"],
                "taken_share": machine["details"]["taken_share"],
                **({"gpus": gpus} if gpus else {}),
            },
            **{key: part[key] for key in ("device_events", "l2_cold", "proof_after_s") if key in part},
        }

    @classmethod
    def properties(cls) -> dict[str, Any]:
        """Return nothing: these keys are in every record, and in the fixed part of the schema."""
        return {}


def _both_clocks(step: Step, samples: Samples) -> TwoClocks | None:
    """Return the samples on both clocks; None if the step did not use the device's clock."""
    if step.events is None or not samples.device_s:
        return None
    overhead_s = step.events.overhead(step.synchronize) / step.calls_per_sample
    return TwoClocks(samples.samples_s, samples.device_s, overhead_s)
