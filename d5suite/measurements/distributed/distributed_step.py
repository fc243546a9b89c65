"""The training step of several ranks: forward, backward, communication and update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from d5suite.measurements.base import Step
from d5suite.measurements.distributed.checks import (
    equal_parameters,
    equal_traffic,
    first_losses,
    float64_losses,
    replica_update,
    scheme_rule,
)
from d5suite.measurements.distributed.efficiency import MeasurementOfRanks
from d5suite.measurements.distributed.facts import FACTS, SCALING
from d5suite.measurements.distributed.parts import SCHEMA as PARTS
from d5suite.measurements.distributed.proof import prove_scheme
from d5suite.measurements.distributed.steps import TRAFFIC, DistributedStep
from d5suite.measurements.tables import WORST_ERROR, Column, Table
from d5suite.measurements.training.training_step import prove_training
from d5suite.validate.check import Check
from d5suite.workloads.network import NetworkWorkload

STEPS = Table(
    (
        Column("median ms", "median_s", scale=1e3),
        Column("images/s", "throughput.value"),
        Column("comm", "distributed.parts.communicating_s", scale=1e3),
        Column("wait", "distributed.parts.waiting_s", scale=1e3, shown="wide"),
        Column("slowest", "distributed.straggler_ratio", "hundredths", shown="wide"),
        Column("scaling", "scaling", "efficiency"),
        WORST_ERROR,
    ),
    "comm, wait: ms of a step, mean of ranks; slowest: rank's computing over the median; scaling: images/s per "
    "rank over that of fewest ranks in the run, the efficiency",
    width=32,
)


class DistributedTraining(MeasurementOfRanks):
    """Forward, backward, communication and update, on all ranks."""

    name = "distributed_step"
    level = 3
    ranks_of = "training_step"
    takes_turns = False
    needs = ("gradient", "level 2", "level 3")
    takes_memory = True
    table = STEPS
    plot = "steps"
    checks_after = (equal_parameters, equal_traffic, scheme_rule, first_losses, replica_update, float64_losses)
    schema: ClassVar[dict[str, Any]] = {
        "required": ["distributed"],
        "properties": {
            "distributed": {
                "type": "object",
                "required": [
                    *("scheme", "settings", "communicator", "algorithm", "launcher", "trainers", "straggler_ratio"),
                    *("spread", "parts", "bytes_per_step", "ranks"),
                ],
                "properties": {
                    **FACTS,
                    "straggler_ratio": {
                        "type": ["number", "null"], "minimum": 1,
                        "description": "computing of the slowest rank over that of the median rank; null of a "
                        "framework's own scheme, whose parts are not known",
                    },
                    "spread": {
                        "type": "object",
                        "description": "over_steps: 5th to 95th percentile over the median; over_ranks: fastest to "
                        "slowest rank of a step over their median",
                        "additionalProperties": {"type": "number", "minimum": 0},
                    },
                    "parts": {
                        "anyOf": [PARTS, {"type": "null"}],
                        "description": "mean of the ranks that train; null of a framework's own scheme",
                    },
                    "ranks": {
                        "type": "array", "minItems": 1,
                        "description": "by rank; traffic is per step, and what a transport does by itself is not "
                        "counted as bytes and messages, but as opaque calls; null of a framework's own scheme",
                        "items": {
                            "type": "object",
                            "required": ["rank", "host", "median_s", *TRAFFIC],
                            "properties": {
                                "rank": {"type": "integer", "minimum": 0},
                                "host": {"type": "string"},
                                "cpus": {"type": "array", "items": {"type": "integer"}},
                                "median_s": {"type": ["number", "null"], "description": "null of a rank that serves"},
                                "peak_memory_bytes": {"type": ["integer", "null"]},
                                "parts": {"anyOf": [PARTS, {"type": "null"}]},
                                **{name: {"type": ["number", "null"], "minimum": 0} for name in TRAFFIC},
                            },
                        },
                    },
                },
            },
            "scaling": SCALING,
        },
    }  # fmt: skip

    def prepare(self, workload: NetworkWorkload) -> Step:
        return DistributedStep(workload)

    def prove(self, workload: NetworkWorkload, step: DistributedStep) -> Iterable[Check]:
        """Prove every rank's executor and trainer, then the scheme."""
        yield from prove_training(workload)
        yield from workload.once("distributed", lambda: prove_scheme(workload, step))
