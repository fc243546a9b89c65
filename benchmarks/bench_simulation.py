"""Simulated steps against real ones of 2 and more ranks on this machine.

The ranks of one run measure, in turn, messages between two of them, copies and sums of arrays, a
step by themselves, and a step of each scheme. All but the last make the simulation's inputs (α and
β, bytes per second, seconds of computing), and no step of a scheme does; those are what it is held
against. All share the machine's load, so that it cancels.

``pytest benchmarks/bench_simulation.py`` prints the errors; ``--benchmark-json`` keeps them in
``extra_info``. ``D5SUITE_BENCH_RANKS=2,4`` says how many ranks; more than cores share them. With
``D5SUITE_BENCH_RATE=500mbit``, each rank has a link of that bandwidth, as in
`benchmarks.bench_transfers`: then steps are long for what the links cost, and more ranks than cores
seldom wait for a core. As a script, one rank: ``python bench_simulation.py NETWORK MEETING RANK
SIZE``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.distributed.communicators import open_communicator, problem
from d5suite.distributed.schemes import make_scheme
from d5suite.instruments.threads import allowed_cpus
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.simulation import engine
from d5suite.simulation.platform import ComputeNode, Interconnect, machine_figures
from d5suite.simulation.simulate import Setup, simulate
from d5suite.simulation.step import from_network
from d5suite.simulation.what_if import scheme_settings
from d5suite.testing.networks import random_batch

sys.path.insert(0, str(Path(__file__).parents[1]))  # also if it is run as a script
from benchmarks.bench_transfers import lacking, links

BATCH, ROUNDS, WARM_UP = 8, int(os.environ.get("D5SUITE_BENCH_ROUNDS", "30")), 3
SIZES = {"resnet18": 64, "squeezenet1_1": 64}
RANKS = [int(each) for each in os.environ.get("D5SUITE_BENCH_RANKS", "2,4").split(",")]
MESSAGES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)
AGAIN = 20
"""Messages there and back for one figure of CPU time."""

SCHEMES = ("all_reduce:overlap=false", "all_reduce", "all_reduce:order=tic", "parameter_server", "gossip")
RATE = os.environ.get("D5SUITE_BENCH_RATE", "")
BURST = "128kb"
"""Bytes that a limited link takes at once: few, so that all messages have its rate."""

TIMEOUT_S = 240
LIMIT = 0.10
"""Largest relative error of a step's time."""


def measure(name: str, meeting: Path, rank: int, size: int) -> dict[str, Any]:
    """Return the seconds of messages by size, of arrays, of steps alone, and of each scheme's."""
    import torch

    torch.set_num_threads(1)
    cpus = sorted(allowed_cpus())
    os.sched_setaffinity(0, [cpus[rank % len(cpus)]])  # with several cores a rank's own threads hinder each other
    communicator = open_communicator("gloo", "ring", rank=rank, size=size, meeting=meeting)
    backend, network = discover()[0]["torch"], build(name, classes=10, image_size=SIZES[name])
    settings = {text: scheme_settings(text) for text in SCHEMES}
    schemes = {
        text: make_scheme(
            each.name, backend.replica(backend.trainer(backend.executor(network), SGD(2.0**-10))), communicator,
            **{key: value for key, value in each.to_dict().items() if key != "name"},
        )
        for text, each in settings.items()
    }  # fmt: skip
    alone = next(iter(schemes.values())).replica
    images, labels = random_batch(network, BATCH, seed=rank)
    feed = alone.trainer.executor.feed({"image": images, "label": labels})
    found: dict[str, list[float]] = {}

    def timed(what: str, call: Any, number: int, times: float = 1.0) -> None:
        communicator.barrier()
        start = time.perf_counter()
        call()
        if number >= WARM_UP:
            found.setdefault(what, []).append((time.perf_counter() - start) * times)

    def by_itself() -> None:
        alone.apply(alone.gradients(feed)[1])

    def there_and_back(array: np.ndarray) -> None:
        """Send between ranks 0 and 1; the others wait."""
        for sender in (0, 1):
            if rank == sender:
                communicator.send(array, 1 - sender, 7)
            elif rank == 1 - sender:
                communicator.receive(array, sender, 7)

    def worked(nbytes: int, again: int) -> None:
        """Note the CPU time of one end of a message; other ranks' waiting costs none."""
        start = time.process_time()
        for _ in range(again):
            there_and_back(given[nbytes])
        if number >= WARM_UP:
            found.setdefault(f"busy {nbytes}", []).append((time.process_time() - start) / (2 * again))

    given = {nbytes: np.zeros(nbytes // 4, np.float32) for nbytes in MESSAGES}
    one = np.zeros(sum(each.size for each in alone.weights().values()), np.float32)
    other = np.ones_like(one)
    for number in range(ROUNDS + WARM_UP):
        for nbytes, array in given.items():
            timed(f"message {nbytes}", lambda array=array: there_and_back(array), number, 0.5)
        communicator.barrier()
        worked(MESSAGES[0], AGAIN)
        communicator.barrier()
        worked(MESSAGES[-1], 1)
        timed("copy", lambda: np.copyto(one, other), number)
        timed("add", lambda: np.add(one, other, out=one), number)
        timed("alone", by_itself, number)
        for text, scheme in schemes.items():
            timed(text, lambda scheme=scheme: scheme.step(feed), number)
    communicator.close()
    return found


def run(name: str, size: int, folder: Path) -> dict[str, list[float]]:
    """Run the ranks, and return the slowest rank's seconds."""
    meeting = folder / f"{name}-{size}"
    meeting.mkdir()
    command = [sys.executable, str(Path(__file__).resolve()), name, str(meeting)]
    environment = {**os.environ, **({"GLOO_SOCKET_IFNAME": "eth0"} if RATE else {})}
    limited: contextlib.AbstractContextManager[list[str]] = (
        links(size, RATE, BURST) if RATE else contextlib.nullcontext([])
    )
    with limited as names:
        within = [["ip", "netns", "exec", each] for each in names] or [[]] * size
        ranks = [
            subprocess.Popen([*within[rank], *command, str(rank), str(size)], stdout=subprocess.PIPE, text=True,
                             cwd=Path.cwd(), env=environment)
            for rank in range(size)
        ]  # fmt: skip
        try:
            answers = [json.loads(each.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1]) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    return {what: [max(each) for each in zip(*(one[what] for one in answers), strict=True)] for what in answers[0]}


def inputs(name: str, size: int, measured: dict[str, list[float]]) -> Setup:
    """Return what is simulated, from what was measured without any scheme."""
    medians = {what: statistics.median(each) for what, each in measured.items()}
    cores = len(allowed_cpus())
    share = min(1.0, cores / size)  # of a core that each rank had
    # The slope of large messages: a limited link lets the first bytes of each pass at once.
    smallest, *_, large, largest = (medians[f"message {each}"] for each in MESSAGES)
    beta = (largest - large) / (MESSAGES[-1] - MESSAGES[-2])
    alpha = smallest - beta * MESSAGES[0]
    busy_s = medians[f"busy {MESSAGES[0]}"]
    # Within a machine a message is a copy: it keeps a core busy as long as it takes.
    per_byte = max(medians[f"busy {MESSAGES[-1]}"] - busy_s, 0.0) / MESSAGES[-1] if RATE else beta
    network = Interconnect(max(alpha, 1e-6), 1 / beta, island=size, busy_s=busy_s, busy_s_per_byte=per_byte)
    roof, _, _ = machine_figures(None, transport=None, threads=1)
    step = from_network(build(name, classes=10, image_size=SIZES[name]), roof, batch=BATCH, share=1.0, source="")
    step = step.scaled(medians["alone"] * share / step.seconds)
    moved = 5 * step.nbytes / ((medians["copy"] + medians["add"]) * share)
    return Setup(step, scheme_settings(SCHEMES[0]), "ring", size, network, node=ComputeNode(moved, 1, cores))


def errors(name: str, size: int, measured: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Simulate each scheme with what was measured, and hold it against the real steps."""
    setup = inputs(name, size, measured)
    bare = replace(setup, node=ComputeNode(), network=replace(setup.network, busy_s=0.0, busy_s_per_byte=0.0))
    found = {}
    for text in SCHEMES:
        simulated, without = (
            simulate(replace(each, settings=scheme_settings(text)), fold=False).step_s for each in (setup, bare)
        )
        real = statistics.median(measured[text])
        found[text] = {
            "simulated_s": simulated, "real_s": real, "error": simulated / real - 1, "error_bare": without / real - 1,
            "alone_s": statistics.median(measured["alone"]), "alpha_s": setup.network.latency_s,
            "beta_s_per_byte": 1 / setup.network.bytes_per_s, "bytes_per_s": setup.node.bytes_per_s,
            "busy_s": setup.network.busy_s,
        }  # fmt: skip
    return found


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", SIZES)
def test_simulated_against_real(
    benchmark: BenchmarkFixture, tmp_path: Path, name: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing := engine.problem() or problem("gloo") or (lacking() if RATE else None):
        pytest.skip(missing)
    measured = run(name, size, tmp_path)
    found = errors(name, size, measured)
    benchmark.extra_info.update(found, measured=measured)
    benchmark.pedantic(lambda: None)
    with capsys.disabled():
        first = next(iter(found.values()))
        print(
            f"\n{name}, {size} ranks on {len(allowed_cpus())} cores{RATE and ', ' + RATE}: "
            f"alone {1e3 * first['alone_s']:.4g} ms, α {1e6 * first['alpha_s']:.3g} µs, "
            f"busy {1e6 * first['busy_s']:.3g} µs, "
            f"1/β {1e-9 / first['beta_s_per_byte']:.3g} GB/s, arrays {1e-9 * first['bytes_per_s']:.3g} GB/s"
        )
        for text, each in found.items():
            print(f"  {text:26} simulated {1e3 * each['simulated_s']:8.4g} ms, real {1e3 * each['real_s']:8.4g} ms, "
                  f"{each['error']:+6.1%}; without arrays and cores {each['error_bare']:+6.1%}")  # fmt: skip
    worst = max(abs(each["error"]) for each in found.values())
    assert worst < LIMIT and math.isfinite(worst)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
