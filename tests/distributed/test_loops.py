"""Gloo's threads give way where each rank has cores of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from d5suite.distributed.communicators import problem
from d5suite.distributed.loops import loops_give_way


def policies() -> dict[int, int]:
    """Return the scheduling policy of each of Gloo's threads in this process."""
    threads = [each for each in Path("/proc/self/task").iterdir() if (each / "comm").read_text() == "gloo_tcp_loop\n"]
    return {int(each.name): os.sched_getscheduler(int(each.name)) for each in threads}


@pytest.mark.skipif(problem("gloo") is not None, reason="Gloo is not installed")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_threads_of_gloo_give_way_unless_ranks_share_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from d5suite.distributed.communicators import gloo

    called: list[tuple[tuple[str, ...], int]] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(gloo, "loops_give_way", lambda hosts, rank: called.append((tuple(hosts), rank)))
    before = policies()
    communicator = gloo.GlooCommunicator("ring", 0, 1, tmp_path, 30.0, hosts=["here"])
    try:
        assert called == [(("here",), 0)]
        until = time.monotonic() + 30
        while not (own := policies().keys() - before.keys()) and time.monotonic() < until:
            os.sched_yield()  # a thread that connects to nobody gets its name later
        assert own
        loops_give_way(["here", "here"], 0)
        assert {policies()[thread] for thread in own} == {os.SCHED_OTHER}
        loops_give_way(["here", "there"], 0)
        assert {policies()[thread] for thread in own} == {os.SCHED_BATCH}
    finally:
        communicator.close()
