"""Delays planted in traces made by hand are found to the tick, and nothing else is."""

from __future__ import annotations

import pytest

from d5suite.traces.events import CollectiveOp, Trace
from d5suite.traces.waits import wait_states
from tests.traces.made import (
    Row,
    call,
    collective,
    irecv,
    irecv_request,
    isend,
    isend_complete,
    recv,
    send,
    trace_of,
)

Found = list[tuple[str, int, int, int, int]]


def found(trace: Trace) -> Found:
    """Pattern, who, from, until, for whom."""
    return [(each.pattern, each.location, each.begin, each.end, each.cause) for each in wait_states(trace).waits]


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        # The receive is called at 100, the send at 340: 240 ticks.
        ((340, 350), (100, 360), [("late sender", 1, 100, 340, 0)]),
        # A buffered send that ends before the receive begins: nobody waits.
        ((100, 150), (300, 310), []),
        # A send that stays until the receive is called: 200 ticks, and not the rest of the call.
        ((100, 320), (300, 330), [("late receiver", 0, 100, 300, 1)]),
        # By clocks that differ the receive ends before the send is called: its own time counts.
        ((400, 410), (100, 360), [("late sender", 1, 100, 360, 0)]),
        ((100, 110), (100, 110), []),
    ],
)
def test_blocking_messages(sender: tuple[int, int], receiver: tuple[int, int], expected: Found) -> None:
    trace = trace_of(
        call("MPI_Send", *sender, send(sender[0] + 1, to=1)), call("MPI_Recv", *receiver, recv(receiver[1] - 1, of=0))
    )
    assert found(trace) == expected


def test_a_message_waits_where_it_is_completed_not_where_it_is_requested() -> None:
    sender = [
        *call("MPI_Isend", 500, 510, isend(505, 1, request=7)),
        *call("MPI_Wait", 600, 610, isend_complete(609, 7)),
    ]
    receiver = [
        *call("MPI_Irecv", 100, 110, irecv_request(105, request=3)),
        *call("MPI_Wait", 200, 520, irecv(519, of=0, request=3)),
    ]
    assert found(trace_of(sender, receiver)) == [("late sender", 1, 200, 500, 0)]


def test_a_send_that_is_completed_before_its_receive_is_requested_waits() -> None:
    sender = [
        *call("MPI_Isend", 100, 110, isend(105, 1, request=7)),
        *call("MPI_Wait", 150, 620, isend_complete(619, 7)),
    ]
    receiver = [
        *call("MPI_Irecv", 600, 605, irecv_request(601, request=3)),
        *call("MPI_Wait", 610, 630, irecv(629, of=0, request=3)),
    ]
    assert found(trace_of(sender, receiver)) == [("late receiver", 0, 150, 600, 1)]


def test_of_several_messages_the_latest_sender_counts() -> None:
    receiver = [
        *call("MPI_Irecv", 10, 11, irecv_request(10, request=1)),
        *call("MPI_Irecv", 12, 13, irecv_request(12, request=2)),
        *call("MPI_Waitall", 20, 320, irecv(319, of=1, request=1), irecv(319, of=2, request=2)),
    ]
    early, late = (call("MPI_Send", at, at + 5, send(at + 1, to=0)) for at in (100, 300))
    assert found(trace_of(receiver, early, late)) == [("late sender", 0, 20, 300, 2)]


def test_a_call_that_only_asks_does_not_wait() -> None:
    receiver = [
        *call("MPI_Irecv", 10, 11, irecv_request(10, request=1)),
        *call("MPI_Test", 20, 320, irecv(319, of=0, request=1)),
    ]
    assert found(trace_of(call("MPI_Send", 300, 310, send(301, to=1)), receiver)) == []


def test_requests_are_matched_in_the_order_in_which_they_were_posted() -> None:
    """Completions may come in another order than requests, and a request's number comes again."""
    sender = [
        *call("MPI_Send", 50, 55, send(51, to=1)),
        *call("MPI_Send", 400, 405, send(401, to=1)),
        *call("MPI_Send", 900, 905, send(901, to=1)),
    ]
    receiver = [
        *call("MPI_Irecv", 10, 11, irecv_request(10, request=1)),
        *call("MPI_Irecv", 12, 13, irecv_request(12, request=2)),
        *call("MPI_Wait", 300, 410, irecv(409, of=0, request=2)),
        *call("MPI_Wait", 420, 430, irecv(429, of=0, request=1)),
        *call("MPI_Irecv", 440, 441, irecv_request(440, request=1)),
        *call("MPI_Wait", 600, 910, irecv(909, of=0, request=1)),
    ]
    assert found(trace_of(sender, receiver)) == [
        ("late sender", 1, 300, 400, 0),
        ("late sender", 1, 600, 900, 0),
    ]


def test_tags_and_peers_keep_messages_apart() -> None:
    receiver = [
        *call("MPI_Recv", 10, 110, recv(109, of=1, tag=5)),
        *call("MPI_Recv", 200, 210, recv(209, of=1, tag=4)),
    ]
    sender = [*call("MPI_Send", 20, 25, send(21, to=0, tag=4)), *call("MPI_Send", 100, 105, send(101, to=0, tag=5))]
    assert found(trace_of(receiver, sender)) == [("late sender", 0, 10, 100, 1)]


def ranks(name: str, operation: CollectiveOp, *times: tuple[int, int], **options: int) -> Trace:
    return trace_of(*(collective(name, operation, enter, leave, **options) for enter, leave in times))


def test_all_wait_for_the_last_one() -> None:
    trace = ranks("MPI_Allreduce", CollectiveOp.ALLREDUCE, (100, 410), (200, 411), (400, 412))
    assert found(trace) == [
        ("wait at N x N", 0, 100, 400, 2),
        ("wait at N x N", 1, 200, 400, 2),
        ("N x N completion", 1, 410, 411, -1),
        ("N x N completion", 2, 410, 412, -1),
    ]


def test_a_barrier() -> None:
    trace = ranks("MPI_Barrier", CollectiveOp.BARRIER, (100, 410), (400, 415), sent=0, received=0)
    assert found(trace) == [("wait at barrier", 0, 100, 400, 1), ("barrier completion", 1, 410, 415, -1)]


def test_who_gets_nothing_does_not_wait_and_who_sends_nothing_is_not_awaited() -> None:
    gets_nothing = collective("MPI_Allreduce", CollectiveOp.ALLGATHERV, 10, 310, received=0)
    sends_nothing = collective("MPI_Allreduce", CollectiveOp.ALLGATHERV, 305, 310, sent=0)
    usual = [collective("MPI_Allreduce", CollectiveOp.ALLGATHERV, enter, 310) for enter in (50, 300)]
    trace = trace_of(gets_nothing, sends_nothing, *usual)
    assert found(trace) == [("wait at N x N", 2, 50, 300, 3)]


def test_a_broadcast_waits_for_its_root_only() -> None:
    trace = ranks("MPI_Bcast", CollectiveOp.BCAST, (100, 310), (300, 305), (900, 905), root=1)
    assert found(trace) == [("late broadcast", 0, 100, 300, 1)]


def test_the_root_of_a_reduction_waits_for_the_first_other_rank() -> None:
    trace = ranks("MPI_Reduce", CollectiveOp.REDUCE, (100, 900), (600, 610), (300, 310), root=0)
    assert found(trace) == [("early reduce", 0, 100, 300, 2)]


def test_a_prefix_waits_for_ranks_below() -> None:
    trace = ranks("MPI_Scan", CollectiveOp.SCAN, (200, 210), (100, 215), (150, 220))
    assert found(trace) == [("early scan", 1, 100, 200, 0), ("early scan", 2, 150, 200, 0)]


def test_what_has_no_other_end_is_counted_and_left_out() -> None:
    killed: list[Row] = call("MPI_Barrier", 5, 50)[:1]
    rest = [*call("MPI_Recv", 10, 20, recv(19, of=0)), *collective("MPI_Barrier", CollectiveOp.BARRIER, 30, 40)]
    states = wait_states(trace_of(killed, rest))
    assert (states.unmatched, states.incomplete, states.messages, states.collectives) == (1, 1, 0, 0)
    assert states.waits == []
    assert states.calls[0].unfinished == 1
