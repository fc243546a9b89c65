"""Peak memory of the first calls of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d5suite.instruments.clock import now
from d5suite.instruments.memory import gpu_memory, peak_memory
from d5suite.passes.base import MISSING, Pass, PreparedStep

FURTHER_S, MOST_CALLS = 0.05, 8
"""Seconds after the first call in which further calls begin, and most further calls; there is
always at least one. A framework may take more memory once it knows a step. Several ranks make
exactly one further call, so that all make the same number."""


class Memory(Pass):
    """Peak memory of the device; of the process, if the device has no memory of its own.

    This pass makes the first call of the step, so it precedes all other passes. Nothing was proved
    or timed before: the peak belongs to preparing and running alone.
    """

    name = "memory"
    disturbs = False
    schema: ClassVar[Mapping[str, Any]] = {
        "description": "peak_bytes is measured; the others follow from the definition of network and optimizer; "
        "activations: forward outputs without reuse; alive: the most bytes of activations and their gradients at once",
        "properties": {
            "peak_bytes": {"type": "integer"},
            "baseline_bytes": {"type": "integer"},
            "parameters_bytes": {"type": "integer"},
            "gradients_bytes": {"type": "integer"},
            "optimizer_state_bytes": {"type": "integer"},
            "activations_bytes": {"type": "integer"},
            "alive_bytes": {"type": "integer"},
            "nvml": {
                "type": "object",
                "description": "on a GPU, what the driver counts: the context, libraries and what the allocator keeps, "
                "too; a lower bound",
                "properties": {
                    "peak_bytes": {"type": "integer"},
                    "baseline_bytes": {"type": "integer"},
                    "of": {"enum": ["this process", "the whole GPU"]},
                    "missing": MISSING,
                },
            },
        },
    }

    def problem(self, prepared: PreparedStep) -> str:
        """See `Pass.problem`."""
        return "" if prepared.measurement.takes_memory else prepared.measurement.without_memory

    def take(self, prepared: PreparedStep) -> dict[str, Any]:
        """See `Pass.take`; the step keeps the part, because the step's record may need it."""
        workload, step = prepared.workload, prepared.step
        runtime = workload.backend.load("runtime")
        device_peak = workload.device_peak()

        def first_calls() -> None:
            step.call_first()
            calls, end = 0, now() + FURTHER_S
            while not calls or (calls < MOST_CALLS and now() < end and workload.job.ranks == 1):
                step.run()
                step.synchronize()
                calls += 1

        with step:
            if device_peak is None:
                found = peak_memory(first_calls).to_dict()
            else:
                name = runtime.device_name(workload.job.device)
                measured, by_driver = gpu_memory(lambda: peak_memory(first_calls, device_peak), name)
                found = {**measured.to_dict(), "nvml": by_driver}
        step.memory = {**found, **step.memory_by_definition()}
        return dict(step.memory)

    @classmethod
    def record(cls, part: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pass.record`."""
        return {"peak_memory_bytes": part.get("peak_bytes"), "memory": part}
