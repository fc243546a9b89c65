"""The training step of several ranks: forward, backward, communication and update."""

from __future__ import annotations

from collections.abc import Iterable

from d5suite.measurements.base import Step
from d5suite.measurements.distributed import checks
from d5suite.measurements.distributed.efficiency import MeasurementOfRanks
from d5suite.measurements.distributed.facts import FACTS, SCALING
from d5suite.measurements.distributed.ordering import SCHEMA as ORDERING
from d5suite.measurements.distributed.parts import SCHEMA as PARTS
from d5suite.measurements.distributed.placement import SCHEMA as PLACEMENT
from d5suite.measurements.distributed.proof import prove_scheme
from d5suite.measurements.distributed.steps import TRAFFIC, DistributedStep
from d5suite.measurements.schemas import array, by_name, integer, mapping, number, or_null, record, text
from d5suite.measurements.tables import WORST_ERROR, Column, Table
from d5suite.measurements.training.training_step import prove_training
from d5suite.validate.check import Check
from d5suite.workloads.network import NetworkWorkload

STEPS = Table(
    (
        Column("median ms", "median_s", scale=1e3),
        Column("images/s", "throughput.value"),
        Column("comm", "distributed.parts.communicating_s", scale=1e3),
        Column("wait", "distributed.parts.waiting_s", scale=1e3),
        Column("slowest", "distributed", "slowest rank", shown="wide"),
        Column("scaling", "scaling", "efficiency"),
        WORST_ERROR,
    ),
    "comm, wait: ms of a step, mean of ranks; slowest: its computing over the mean of the other ranks, and which "
    "rank; scaling: images/s per rank over that of fewest ranks in the run, the efficiency",
    width=16,
)


_PARTS_OR_NULL = {"anyOf": [PARTS, {"type": "null"}]}

DISTRIBUTED = mapping(
    {
        **FACTS,
        "straggler_ratio": or_null(
            number(
                "computing of the slowest rank over the mean of the others; null of a framework's own scheme, whose "
                "parts are not known",
                minimum=1,
            )
        ),
        "slowest_rank": or_null(integer("the rank that computes longest", minimum=0)),
        "spread": by_name(
            number(minimum=0),
            "over_steps: 5th to 95th percentile over the median; over_ranks: fastest to slowest rank of a step over "
            "their median",
        ),
        "ordering": ORDERING,
        "parts": {**_PARTS_OR_NULL, "description": "mean of the ranks that train; null of a framework's own scheme"},
        "ranks": array(
            mapping(
                {
                    "rank": integer(minimum=0),
                    "host": text(),
                    "cpus": array(integer()),
                    "median_s": or_null(number("null of a rank that serves")),
                    "peak_memory_bytes": or_null(integer()),
                    "parts": _PARTS_OR_NULL,
                    **{name: or_null(number(minimum=0)) for name in TRAFFIC},
                },
                optional=["cpus", "peak_memory_bytes", "parts"],
            ),
            "by rank; traffic is per step, and what a transport does by itself is not counted as bytes and messages, "
            "but as opaque calls; null of a framework's own scheme",
            minItems=1,
        ),
    },
    optional=["native", "synchronous", "oversubscribed", "slowest_rank", "ordering"],
    description="how ranks worked together",
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
    checks_after = (
        checks.equal_parameters,
        checks.equal_traffic,
        checks.declared_bytes,
        checks.order_of_transfers,
        checks.scheme_rule,
        checks.first_losses,
        checks.replica_update,
        checks.float64_losses,
    )
    schema = record(
        {"distributed": DISTRIBUTED, "scaling": SCALING, "placement": PLACEMENT}, optional=["scaling", "placement"]
    )

    def prepare(self, workload: NetworkWorkload) -> Step:
        return DistributedStep(workload)

    def prove(self, workload: NetworkWorkload, step: DistributedStep) -> Iterable[Check]:
        """Prove every rank's executor and trainer, then the scheme."""
        yield from prove_training(workload)
        yield from workload.once("distributed", lambda: prove_scheme(workload, step))
