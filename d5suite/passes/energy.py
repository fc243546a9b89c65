"""Energy of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d5suite.instruments.energy import EnergyError, meter_of
from d5suite.passes.base import Pass, PassError, PreparedStep


class Energy(Pass):
    """Joules per step and per item, of the whole GPU or of all CPU packages."""

    name = "energy"
    schema: ClassVar[Mapping[str, Any]] = {
        "description": "of a step, in a pass of its own: what the whole GPU, or all CPU packages, used meanwhile, idle "
        "or not",
        "properties": {
            "joules_per_step": {"type": "number", "minimum": 0},
            "joules_per_item": {"type": "number", "minimum": 0, "description": "an item is what throughput counts"},
            "error_j": {"type": "number", "minimum": 0, "description": "by how much joules_per_step may be off"},
            "steps": {"type": "integer", "minimum": 1},
            "seconds": {"type": "number", "exclusiveMinimum": 0},
            "mean_power_w": {"type": "number", "minimum": 0},
            "method": {"enum": ["counter", "sampled power"]},
            "of": {"type": "string"},
        },
    }

    def problem(self, prepared: PreparedStep) -> str:
        """See `Pass.problem`."""
        if not prepared.measurement.takes_energy:
            return prepared.measurement.without_energy
        return "not taken of several ranks" if prepared.workload.job.ranks > 1 else ""

    def take(self, prepared: PreparedStep) -> dict[str, Any]:
        """See `Pass.take`."""
        workload, step = prepared.workload, prepared.step
        device = workload.job.device

        def once() -> None:
            step.next_input()
            step.run()
            step.synchronize()

        try:
            meter = meter_of(device, workload.backend.load("runtime").device_name(device), workload.sensors())
            with step:
                found = meter.measure(once)
        except EnergyError as error:
            raise PassError(str(error)) from error
        return {**found.to_dict(), "joules_per_item": found.joules_per_step / step.items}
