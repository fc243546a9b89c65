"""A worker that proves beside others uses one thread, and has its whole budget back afterwards."""

from __future__ import annotations

import json
import socket
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from d5suite.backends import select
from d5suite.worker.turns import TurnChannel

BUDGET = 2


def blas_threads() -> set[int]:
    """Return the numbers of threads of all loaded BLAS libraries."""
    np.ones((2, 2)) @ np.ones((2, 2))
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def session(end: socket.socket) -> None:
    """Permit whatever the worker asks."""
    with end, end.makefile("rw") as lines:
        for line in lines:
            print(json.dumps({"go": json.loads(line)["asks"]}), file=lines, flush=True)


def test_a_proof_beside_others_has_one_thread_and_gives_the_budget_back() -> None:
    torch = pytest.importorskip("torch")
    runtime = select("torch").backend.load("runtime")
    ours, theirs = socket.socketpair()
    other = threading.Thread(target=session, args=(theirs,))
    other.start()
    before = torch.get_num_threads()
    try:
        with threadpool_limits(BUDGET):
            runtime.set_threads(BUDGET)
            channel = TurnChannel(ours.detach(), beside=True)
            channel.run("alone")
            with channel.proving(BUDGET, runtime.set_threads):
                assert blas_threads() == {1} and torch.get_num_threads() == 1
            assert blas_threads() == {BUDGET} and torch.get_num_threads() == BUDGET
    finally:
        runtime.set_threads(before)
        del channel
        other.join()


def test_a_proof_without_others_keeps_the_budget() -> None:
    ours, theirs = socket.socketpair()
    told: list[int] = []
    with theirs, threadpool_limits(BUDGET):
        channel = TurnChannel(ours.detach())
        with channel.proving(BUDGET, told.append):
            assert blas_threads() == {BUDGET}
    assert not told
