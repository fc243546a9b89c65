"""The costs of delays in traces made by hand, to the tick."""

from __future__ import annotations

import pytest

from d5suite.traces.analysis import analyse
from d5suite.traces.events import CollectiveOp, Trace
from tests.traces.made import call, collective, recv, send, trace_of

Costs = list[tuple[int, str, float, float]]


def costs(trace: Trace) -> Costs:
    """Rank, region, direct and indirect cost."""
    names = [each.name for each in trace.regions]
    return [
        (each.location, names[each.region], round(each.direct, 6), round(each.indirect, 6))
        for each in analyse(trace).delays.delays
    ]


def test_a_late_rank_pays_for_the_region_in_which_it_was_slower() -> None:
    # Both meet at 100. Rank 1 then needs 300 in conv1, rank 0 only 120, and waits from 220 to 400.
    trace = trace_of(
        *(
            [
                *collective("MPI_Barrier", CollectiveOp.BARRIER, 0, 100, sent=0, received=0),
                *call("conv1", 100, until),
                *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, until, 420),
            ]
            for until in (220, 400)
        )
    )
    found = analyse(trace).delays
    assert costs(trace) == [(1, "conv1", 180, 0)]
    ((wait, direct, indirect, propagates),) = found.waits
    assert (wait.location, wait.ticks, direct, indirect, propagates) == (0, 180, 180, 0, False)
    assert found.unexplained == 0


def test_two_regions_share_the_cost_and_what_both_did_costs_nothing() -> None:
    # Rank 1 is slower by 100 in step and by 50 in conv1, faster by 30 in MPI_Test: it is 120 late.
    trace = trace_of(
        [*call("step", 0, 100), *call("conv1", 100, 200), *call("MPI_Test", 200, 230),
         *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 230, 360)],
        [*call("step", 0, 200), *call("conv1", 200, 350),
         *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 350, 360)],
    )  # fmt: skip
    assert costs(trace) == [(1, "step", 80, 0), (1, "conv1", 40, 0)]


def chain() -> Trace:
    """Rank 0 is slow; rank 1 waits for it, sends late, and rank 2 waits for rank 1."""
    return trace_of(
        [*call("conv1", 0, 500), *call("MPI_Send", 500, 510, send(501, to=1))],
        [*call("conv1", 0, 100), *call("MPI_Recv", 100, 512, recv(511, of=0)),
         *call("MPI_Send", 512, 520, send(513, to=2))],
        [*call("conv1", 0, 100), *call("MPI_Recv", 100, 522, recv(521, of=1))],
    )  # fmt: skip


def test_a_wait_that_propagates_hands_its_cost_on() -> None:
    trace = chain()
    first, second = sorted(analyse(trace).delays.waits, key=lambda each: each.wait.location)
    # Rank 1 waits 400 for conv1 of rank 0; rank 2 waits 412: 400 for rank 1's waiting, and 12 for
    # what is left of rank 1's receive.
    assert (first.wait.ticks, first.direct, first.indirect, first.propagates) == (400, 400, 0, True)
    assert second.wait.ticks == 412 and not second.propagates
    assert (round(second.direct, 6), round(second.indirect, 6)) == (12, 400)
    found = {(rank, region): (direct, indirect) for rank, region, direct, indirect in costs(trace)}
    assert found[0, "conv1"] == (400, 400)
    assert found[1, "MPI_Recv"] == (12, 0)
    assert round(sum(map(sum, found.values())), 6) == 812  # all waiting has its cause


def test_waiting_by_cause_is_in_the_analysis() -> None:
    waiting = analyse(chain()).to_dict()["waiting_s"]
    assert {name: round(each * 1e9, 6) for name, each in waiting.items()} == {
        "direct": 412, "indirect": 400, "unexplained": 0, "propagating": 400, "terminal": 412,
    }  # fmt: skip


def test_a_wait_without_a_delay_is_not_explained_by_guess() -> None:
    # The sender was not slower than the receiver in anything: its clock began later.
    trace = trace_of(
        [*call("conv1", 300, 400), *call("MPI_Send", 400, 410, send(401, to=1))],
        [*call("conv1", 0, 100), *call("MPI_Recv", 100, 420, recv(415, of=0))],
    )
    assert not costs(trace) and analyse(trace).delays.unexplained == 300


@pytest.mark.parametrize("late", [0, 1])
def test_only_what_was_done_since_both_met_counts(late: int) -> None:
    ranks = []
    for rank in range(2):
        slow = 50 if rank == late else 0
        ranks.append(
            [
                *call("step", 0, 900 if rank != late else 100),  # long before the ranks meet
                *collective(
                    "MPI_Barrier", CollectiveOp.BARRIER, 900 if rank != late else 100, 1000, sent=0, received=0
                ),
                *call("conv1", 1000, 1100 + slow),
                *collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 1100 + slow, 1160),
            ]
        )
    other = 1 - late
    assert costs(trace_of(*ranks)) == [(other, "step", 800, 0), (late, "conv1", 50, 0)]
