"""The scheduling of the threads in which a transport reads and writes its connections.

Imports the standard library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

LOOPS = frozenset({"gloo_tcp_loop"})
"""Names of such threads: Gloo's, in any framework."""

_THREADS = Path("/proc/self/task")


def loops_give_way(hosts: Sequence[str], rank: int) -> None:
    """Keep this process's transport threads from preempting a computing thread, on Linux.

    Gloo's thread tries again and again to lock a connection. If it preempts the thread that holds
    the lock, nothing moves until the kernel's next tick, 1 to 4 ms later. With ``SCHED_BATCH``
    (sched(7)) it runs once the other thread waits or has used up its time slice.

    Where ranks share CPUs nothing changes: messages would wait for the other ranks' time slices.

    Parameters
    ----------
    hosts : sequence of str
        Hosts of the ranks.
    rank : int
        Rank of this process.
    """
    if hosts.count(hosts[rank]) > (os.cpu_count() or 1):
        return
    with contextlib.suppress(OSError):
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # it has ended, or the system forbids it
                if (thread / "comm").read_text().strip() in LOOPS:
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
