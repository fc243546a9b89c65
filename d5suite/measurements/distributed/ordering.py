"""The order of a result's transfers: how it was kept, what it gains, and how much steps differ."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from d5suite.distributed.gathering import gather
from d5suite.distributed.order import efficiency, overtaken, potential
from d5suite.distributed.order_tasks import parameter_order
from d5suite.distributed.schemes.common import TRANSFERS
from d5suite.levels.distributed import Scheme
from d5suite.levels.network import Executor
from d5suite.measurements.schemas import integer, mapping, number, or_null, text
from d5suite.validate.check import Check

SCHEMA = mapping(
    {
        "order": or_null(text("of transfers, such as tic; null: tensors are not sent one by one")),
        "slice_bytes": or_null(integer("the most bytes of a transfer; null: tensors are whole", minimum=1)),
        "credit_bytes": or_null(integer("the most bytes on their way; null: without a limit", minimum=1)),
        "arrival_orders": or_null(
            integer("distinct orders in which transfers arrived over steps, the most of all streams", minimum=1)
        ),
        "efficiency": or_null(
            number("E, ordering efficiency: the part of what can overlap that does, mean of ranks; null: nothing can")
        ),
        "potential": number("S, speed-up potential: what perfect overlap gains over none, mean of ranks", minimum=0),
        "step_variance_s2": number("of the samples", minimum=0),
    },
    description="the order of transfers (TicTac, MLSys 2019), in the steps that give the parts",
)


def ordering(scheme: Scheme, parts: Sequence[Mapping[str, Any]], samples_s: Sequence[float]) -> dict[str, Any]:
    """Return the facts of `SCHEMA`. Collective.

    Parameters
    ----------
    scheme : Scheme
        This rank's scheme.
    parts : sequence of mapping
        Parts of the step, by training rank. The two resources are the rank's cores and links.
    samples_s : sequence of float
    """
    own = max((len(orders) for orders in scheme.arrivals.values()), default=0)
    busy = [(each["computing_s"], each["communicating_s"] + (each["waiting_s"] or 0.0)) for each in parts]
    found = [efficiency(each["step_s"], both) for each, both in zip(parts, busy, strict=True)]
    known = [each for each in found if each is not None]
    return {
        **{name: getattr(scheme.settings, name, None) or None for name in TRANSFERS},
        "arrival_orders": max(gather(scheme.communicator, own)) or None,
        "efficiency": statistics.fmean(known) if known else None,
        "potential": statistics.fmean(map(potential, busy)),
        "step_variance_s2": statistics.pvariance(samples_s),
    }


def kept_order(scheme: Scheme, executor: Executor) -> Iterator[Check]:
    """Compare the orders in which transfers arrived with the requested order.

    A scheme may ignore the request: its answers are right in any order. The framework's own order
    may differ from step to step. A scheme that chooses among the transfers that are ready keeps the
    order if it always chooses the first one; all ranks then send in the same order. Collective.
    """
    order = getattr(scheme.settings, "order", "")
    if not order or order == "framework" or scheme.communicator.size == 1:
        return
    asked = parameter_order(order, executor.network)
    wrong = {}
    for stream, orders in scheme.arrivals.items():
        came = {name for each in orders for name in each}
        right = tuple(name for name in asked if name in came)
        wrong[stream] = sum(count for each, count in orders.items() if each != right)
    found = gather(scheme.communicator, wrong)
    silent = [f"nothing at rank {rank}" for rank, each in enumerate(found) if not each]
    if scheme.chooses:
        sent = gather(scheme.communicator, hash_of(scheme.arrivals))
        differ = [f"rank {rank} sent otherwise than rank 0" for rank, each in enumerate(sent) if each != sent[0]]
        steps = gather(scheme.communicator, [sum(overtaken(each, asked) > 0 for each in scheme.choices),
                                             len(scheme.choices)])[0]  # fmt: skip
        silent += [] if steps[1] else ["no choice at rank 0"]
        late = [f"rank 0 chose another in {steps[0]} of {steps[1]} steps"] * (steps[0] > 0)
        yield Check(
            f"steps in which a transfer that was ready was sent in another order than {order}",
            float(steps[0] + len(differ) + len(silent)), 0.0, ", ".join(late + differ + silent),
        )  # fmt: skip
        return
    late = [f"{stream} at rank {rank}" for rank, each in enumerate(found) for stream, count in each.items() if count]
    steps = sum(count for each in found for count in each.values()) + len(silent)
    yield Check(
        f"steps whose transfers arrived in another order than {order}", float(steps), 0.0, ", ".join(late + silent)
    )


def hash_of(arrivals: Mapping[str, Counter[tuple[str, ...]]]) -> str:
    """Return a digest of orders of arrival and of the number of steps of each."""
    known = sorted((stream, sorted(orders.items())) for stream, orders in arrivals.items())
    return hashlib.sha256(repr(known).encode()).hexdigest()
