"""Probe a backend in a fresh process: the random numbers of a seed, and the number of busy threads.

``python -m d5suite.testing.probe BACKEND[:MODE] DEVICE THREADS SEED [losses]`` prints one JSON
object: the ``precision``; the ``losses`` of a network with Dropout; and ``windows`` of time in
heavy forward passes, with the processors that the process and its children used and wanted. Losses
or windows are null if the backend lacks what they need, and windows with the argument ``losses``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from d5suite.backends import select
from d5suite.instruments.threads import set_affinity, thread_environment
from d5suite.network import Network
from d5suite.testing.networks import dropping, fed, heavy, loss_of, random_batch

DURATION_S = 0.5
WINDOWS = 6

WORKING = 1.25
"""Accepted number of working threads with a budget of 1; a second thread makes it 2."""

GIVEN = 0.9
"""Processors that a process must get for its threads to be counted: two threads that share less
than one processor look like one thread."""

LOSSES = "losses"
"""Argument for the losses only."""

Window = Sequence[float]
"""Processors used and wanted, on average."""


def verdict(windows: Sequence[Window]) -> bool | None:
    """Return True if windows prove that one thread works, False if more do, else None."""
    telling = [wanted for used, wanted in windows if used >= GIVEN]
    if any(wanted <= WORKING for wanted in telling):
        return True
    demands = telling if len(telling) > 1 else [wanted for _, wanted in windows]
    return False if len(demands) > 1 and min(demands) > WORKING else None


def main(arguments: list[str]) -> None:
    """Probe one backend."""
    name, device, *numbers = arguments[:4]
    threads, seed = map(int, numbers)
    os.environ.update(thread_environment(threads))
    set_affinity(threads, [])
    selection = select(name)
    backend = selection.backend
    backend.load("runtime", selection.mode).configure(threads=threads, seed=seed, device=device)
    precision = "fp32" if "fp32" in backend.precisions else backend.precisions[0]
    found: dict[str, object] = {"precision": precision, "losses": None, "windows": None}

    def has(network: Network) -> bool:
        return {node.op_type for node in network.nodes} <= backend.operators

    network = dropping()
    if "gradient" not in backend.absent and has(network):
        executor = backend.executor(network, mode=selection.mode, device=device, precision=precision)
        feed = fed(executor, random_batch(network))
        found["losses"] = [loss_of(executor, executor.forward_backward(feed)) for _ in range(3)]

    network = heavy()
    if LOSSES not in arguments[4:] and has(network):
        # Lift the affinity, which would hide further threads: the budget itself must limit them.
        for process in _family():
            with suppress(OSError):
                for thread in os.listdir(f"/proc/{process.pid}/task"):
                    os.sched_setaffinity(int(thread), range(os.cpu_count() or 1))
        executor = backend.executor(network, mode=selection.mode, device=device, precision=precision)
        images, _ = random_batch(network, 8)
        feed = executor.feed({"image": images})
        work = lambda: executor.fetch(executor.forward(feed))  # noqa: E731  which waits; synchronize may not
        work()
        windows: list[Window] = []
        while len(windows) < WINDOWS and verdict(windows) is None:
            windows.append(_window(work))
        found["windows"] = windows
    print(json.dumps(found))


def _window(work: Callable[[], Any]) -> Window:
    start, (ran, waited) = time.perf_counter(), _times()
    while time.perf_counter() - start < DURATION_S:
        work()
    now, wall = _times(), time.perf_counter() - start
    used = (now[0] - ran) / wall
    return used, used + (now[1] - waited) / wall


def _family() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _times() -> tuple[float, float]:
    """Return the seconds that this process and its children ran, and waited for a processor."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran, waited = time.process_time() + ended.ru_utime + ended.ru_stime, 0.0
    for process in _family():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid():
                ran += sum(process.cpu_times()[:4])
            for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                waited += int(path.read_text().split()[1]) / 1e9
    return ran, waited


if __name__ == "__main__":
    main(sys.argv[1:])
