"""Probe a backend in a fresh process: the random numbers of a seed, and the number of busy threads.

``python -m d5suite.testing.probe BACKEND[:MODE] DEVICE THREADS SEED [losses]`` prints one JSON
object: the ``precision``; the ``losses`` of a network with Dropout; and ``windows`` of time in
heavy forward passes and ``gradient_windows`` in heavy backward passes, with the processors that the
process and its children used and wanted, and the ratio of their running time to that of their
busiest thread. Losses or windows are null if the backend lacks what they need, and windows with the
argument ``losses``.
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

LEAST = 0.05
"""Processors that must have been used for one thread's part to count."""

Window = Sequence[float]
"""Processors used and wanted, on average; and time run by all threads over that by the busiest."""


def verdict(windows: Sequence[Window]) -> bool | None:
    """Return True if windows prove that one thread works, False if more do, else None.

    If one thread did nearly all of the work, this proves it, however little the machine gave it.
    """
    telling = [wanted for used, wanted, *_ in windows if used >= GIVEN]
    alone = any(used >= LEAST and parts <= WORKING for used, _, *rest in windows for parts in rest)
    if alone or any(wanted <= WORKING for wanted in telling):
        return True
    demands = telling if len(telling) > 1 else [wanted for _, wanted, *_ in windows]
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
    found: dict[str, object] = dict.fromkeys(("losses", "windows", "gradient_windows")) | {"precision": precision}

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
        batch = random_batch(network, 8)
        feed = executor.feed({"image": batch[0]})
        found["windows"] = _windows(lambda: executor.fetch(executor.forward(feed)))  # fetch waits; synchronize may not
        if "gradient" not in backend.absent:
            whole = fed(executor, batch)
            found["gradient_windows"] = _windows(lambda: executor.fetch(executor.forward_backward(whole)))
    print(json.dumps(found))


def _windows(work: Callable[[], Any]) -> list[Window]:
    work()
    windows: list[Window] = []
    while len(windows) < WINDOWS and verdict(windows) is None:
        windows.append(_window(work))
    return windows


def _window(work: Callable[[], Any]) -> Window:
    start, (ran, waited), threads = time.perf_counter(), _times(), _by_thread()
    while time.perf_counter() - start < DURATION_S:
        work()
    now, wall = _times(), time.perf_counter() - start
    used = (now[0] - ran) / wall
    window = (used, used + (now[1] - waited) / wall)
    own = [each - threads.get(thread, 0.0) for thread, each in _by_thread().items()]
    busiest = max(own, default=0.0)
    return (*window, max(now[0] - ran, sum(own)) / busiest) if busiest > 0 else window


def _by_thread() -> dict[str, float]:
    """Return the seconds that each thread of this process and its children has run (Linux)."""
    found = {}
    for process in _family():
        for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                found[path.parent.name] = int(path.read_text().split()[0]) / 1e9
    return found


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
