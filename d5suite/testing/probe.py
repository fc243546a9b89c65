"""What can only be seen from outside of a process: random numbers from a seed, and how many threads work.

``python -m d5suite.testing.probe BACKEND[:MODE] DEVICE THREADS SEED`` prints one JSON object: ``losses`` of a network
with Dropout, and ``cpu_per_wall``, processor time over wall time of a heavy forward pass; null where the backend lacks
an operator, or the gradient, that the network needs.
"""

from __future__ import annotations

import json
import os
import sys
import time

from d5suite.backends import select
from d5suite.measure.threads import set_affinity, thread_environment
from d5suite.network import Network
from d5suite.testing.networks import dropping, heavy, random_batch

DURATION_S = 0.5


def main(arguments: list[str]) -> None:
    """Probe one backend."""
    name, device, threads, seed = arguments[0], arguments[1], int(arguments[2]), int(arguments[3])
    os.environ.update(thread_environment(threads))
    set_affinity(threads, [])
    selection = select(name)
    backend = selection.backend
    backend.load("runtime", selection.mode).configure(threads=threads, seed=seed, device=device)
    precision = "fp32" if "fp32" in backend.precisions else backend.precisions[0]
    found: dict[str, object] = {"losses": None, "cpu_per_wall": None}

    def has(network: Network) -> bool:
        return {node.op_type for node in network.nodes} <= backend.operators

    network = dropping()
    if "gradient" not in backend.absent and has(network):
        executor = backend.executor(network, mode=selection.mode, device=device, precision=precision)
        images, labels = random_batch(network)
        feed = executor.feed({"image": images, "label": labels})
        found["losses"] = [float(executor.fetch(executor.forward_backward(feed))["loss"]) for _ in range(3)]

    network = heavy()
    if has(network):
        # Threads beyond the affinity would not show as processor time, so it goes; the budget must hold itself.
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), range(os.cpu_count() or 1))
        executor = backend.executor(network, mode=selection.mode, device=device, precision=precision)
        images, _ = random_batch(network, 8)
        feed = executor.feed({"image": images})
        executor.fetch(executor.forward(feed))
        start, worked = time.perf_counter(), time.process_time()
        while time.perf_counter() - start < DURATION_S:
            executor.fetch(executor.forward(feed))  # which waits, even where synchronize does not
        found["cpu_per_wall"] = (time.process_time() - worked) / (time.perf_counter() - start)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
