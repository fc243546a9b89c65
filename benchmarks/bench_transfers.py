"""Orders of transfers in turn over links that cost something: TicTac's fixtures, networks.

Each rank is a process in a network namespace of its own, on a bridge, whose bandwidth the kernel
limits (``tc … tbf``): that needs root and iproute2. The settings take turns, step by step, in the
same processes and on the same links. Latency is what the kernel gives: ``netem`` is not needed.

``pytest benchmarks/bench_transfers.py`` prints for each fixture and scheme the ratio of a
setting's step to the scheme without an order, with its interval, and both variations; and the ratio
of steps across the barrier (``cross_barrier``) to steps that end with their update.
``D5SUITE_BENCH_FIXTURES=alexnet,vgg16,inception_v3,resnet50`` takes whole networks at small sizes,
and ``small`` takes seconds. What a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.backends import discover
from d5suite.distributed.communicators import open_communicator, problem
from d5suite.distributed.order import overtaken
from d5suite.distributed.order_tasks import parameter_order
from d5suite.distributed.schemes import make_scheme
from d5suite.instruments.threads import allowed_cpus
from d5suite.levels.backend import Backend
from d5suite.levels.distributed import Communicator
from d5suite.network.builder import Builder
from d5suite.network.model import Network
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.statistics.ratios import paired_ratio
from d5suite.testing.networks import random_batch

RANKS, BATCH = 2, 8
VARIABLES, WIDTH = 32, 724
"""Variables of the fixtures, and their rows and columns: 2 MiB of float32."""

SIZES = {"alexnet": 64, "vgg16": 63, "inception_v3": 96, "resnet50": 64}
RATE = os.environ.get("D5SUITE_BENCH_RATE", "2gbit")
WARM_UP, ROUNDS = 2, int(os.environ.get("D5SUITE_BENCH_ROUNDS", "15"))
FIXTURES = os.environ.get("D5SUITE_BENCH_FIXTURES", "deep,wide").split(",")
TIMEOUT_S = 900

SETTINGS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "parameter_server": [
        {},
        {"order": "framework"},
        {"order": "tic"},
        {"order": "backward"},
        {"order": "random:1"},
        {"order": "tic", "slice_bytes": 2**19},
        {"order": "tic", "slice_bytes": 2**19, "credit_bytes": 2**21},
    ],
    "all_reduce": [
        {},
        {"order": "framework"},
        {"order": "tic"},
        {"order": "tic", "bucket_bytes": 2**22},
        {"order": "backward"},
        {"order": "random:1"},
    ],
}


ACROSS: Sequence[Mapping[str, Any]] = (
    {"overlap": False},
    {},
    {"cross_barrier": True},
    {"cross_barrier": True, "bucket_bytes": 2**22},
)
"""Settings of all-reduce: with a barrier between steps and across it."""

HEAVY = {"vgg16"}
"""Networks of which two schemes at a time fit into memory: each setting beside its base."""

STEPS = 4
"""Steps of a turn across the barrier; the last one's update belongs to it."""


def deep(variables: int = VARIABLES, width: int = WIDTH) -> Network:
    """Build layers one behind the other with one variable of 2 MiB each, if not told otherwise."""
    b = Builder("deep", image_size=1, channels=width)
    x = b.flatten(b.image, "flatten")
    for number in range(variables):
        weight = b.draw(f"layer{number:02}.weight", (width, width), (2 / width) ** 0.5)
        x = b.relu(b.node("MatMul", f"layer{number:02}", [x, weight], width))
    return b.classifier(x)


def wide() -> Network:
    """Build one layer with 32 variables of 2 MiB each, whose products are added."""
    b = Builder("wide", image_size=1, channels=WIDTH)
    x = b.flatten(b.image, "flatten")
    products = []
    for number in range(VARIABLES):
        weight = b.draw(f"part{number:02}.weight", (WIDTH, WIDTH), (1 / WIDTH / VARIABLES) ** 0.5)
        products.append(b.node("MatMul", f"part{number:02}", [x, weight], WIDTH))
    return b.classifier(b.node("Sum", "sum", products, WIDTH))


def fixture(name: str) -> Network:
    if name in SIZES:
        return build(name, classes=10, image_size=SIZES[name])
    return {"deep": deep, "wide": wide, "small": lambda: deep(8, 256)}[name]()


def named(scheme: str, settings: Mapping[str, Any]) -> str:
    return ":".join([scheme, *(f"{key}={value}" for key, value in settings.items())])


def joined(name: str, meeting: Path, rank: int, ranks: int) -> tuple[Communicator, Backend, Network]:
    """Join the other ranks, on one core; also return PyTorch's adapter and the network."""
    import torch

    torch.set_num_threads(1)
    cpus = sorted(allowed_cpus())
    os.sched_setaffinity(0, [cpus[rank % len(cpus)]])
    communicator = open_communicator("gloo", rank=rank, size=ranks, meeting=meeting)
    return communicator, discover()[0]["torch"], fixture(name)


def slowest_s(communicator: Communicator, seconds: float) -> float:
    """Return the slowest rank's seconds. Collective."""
    took = np.zeros(communicator.size)
    took[communicator.rank] = seconds
    communicator.all_reduce(took)
    return float(took.max())


def measure(name: str, meeting: Path, rank: int, ranks: int, *only: str) -> dict[str, Any]:
    """Return the slowest rank's seconds by setting, and the number of orders of arrival."""
    communicator, backend, network = joined(name, meeting, rank, ranks)
    trainer = backend.trainer(backend.executor(network), SGD(2.0**-10, momentum=0.9))
    images, labels = random_batch(network, BATCH, seed=rank)
    feed = trainer.executor.feed({"image": images, "label": labels})
    schemes = {
        named(scheme, settings): make_scheme(scheme, backend.replica(trainer), communicator, **settings)
        for scheme, own in SETTINGS.items()
        for settings in own
        if not only or named(scheme, settings) in only
    }
    times: dict[str, list[float]] = {each: [] for each in schemes}
    for turn in range(WARM_UP + ROUNDS):
        for each in list(schemes) if turn % 2 else reversed(schemes):
            communicator.barrier()
            start = time.perf_counter()
            schemes[each].step(feed)
            times[each].append(slowest_s(communicator, time.perf_counter() - start))
    arrived = {
        each: max((len(orders) for orders in scheme.arrivals.values()), default=None)
        for each, scheme in schemes.items()
    }
    for each, scheme in schemes.items():  # the order was kept
        order = getattr(scheme.settings, "order", "")
        if order and order != "framework":
            asked = parameter_order(order, network)
            if scheme.chooses:
                assert rank or (scheme.choices and not any(overtaken(own, asked) for own in scheme.choices)), each
            else:
                assert all(set(found) == {asked} for found in scheme.arrivals.values()), each
    communicator.close()
    return {"times": {each: own[WARM_UP:] for each, own in times.items()}, "arrived": arrived}


def measure_across(name: str, meeting: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Return the slowest rank's seconds per step by setting, in turns of some steps and their end.

    What crosses the barrier has a trainer of its own: its last update is due while others take
    turns.
    """
    communicator, backend, network = joined(name, meeting, rank, ranks)
    crossing = [each for each in ACROSS if "cross_barrier" in each]
    trainers = [
        backend.trainer(backend.executor(network), SGD(2.0**-10, momentum=0.9)) for _ in range(1 + len(crossing))
    ]
    images, labels = random_batch(network, BATCH, seed=rank)
    feed = trainers[0].executor.feed({"image": images, "label": labels})
    schemes = {
        named("all_reduce", own): make_scheme(
            "all_reduce", backend.replica(trainers[1 + crossing.index(own) if own in crossing else 0]), communicator,
            **own,
        )
        for own in ACROSS
    }  # fmt: skip
    times: dict[str, list[float]] = {each: [] for each in schemes}
    for turn in range(1 + ROUNDS):
        for each in list(schemes) if turn % 2 else reversed(schemes):
            communicator.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                schemes[each].step(feed)
            schemes[each].settle()
            times[each].append(slowest_s(communicator, (time.perf_counter() - start) / STEPS))
    alone: list[float] = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        trainers[0].executor.forward(feed)
        trainers[0].executor.synchronize()
        alone.append(time.perf_counter() - start)
    communicator.close()
    return {
        "times": {each: own[1:] for each, own in times.items()},
        "arrived": dict.fromkeys(schemes),
        "forward_s": statistics.median(alone[1:]),
    }


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process as an exception does, so that all is cleaned up."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def remove(tag: str) -> None:
    """Remove the namespaces and the bridge of a run."""
    for each in Path("/var/run/netns").glob(f"{tag}n*"):
        subprocess.run(["ip", "netns", "del", each.name], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", f"{tag}b"], capture_output=True, check=False)


def remove_what_dead_runs_left() -> None:
    """Remove the namespaces of runs whose process is gone: it was killed."""
    for tag in {each.name.partition("n")[0] for each in Path("/var/run/netns").glob("d5*n*")}:
        if tag[2:].isdecimal() and not Path("/proc", str(int(tag[2:]))).exists():
            remove(tag)


@contextlib.contextmanager
def links(ranks: int, rate: str, burst: str = "1mb") -> Iterator[list[str]]:
    """Make a namespace for each rank, on a bridge, with limited bandwidth; remove it afterwards."""
    remove_what_dead_runs_left()
    tag = f"d5{os.getpid()}"
    names = [f"{tag}n{rank}" for rank in range(ranks)]
    with ended_by_signals():
        try:
            _run("ip", "link", "add", f"{tag}b", "type", "bridge")
            _run("ip", "link", "set", f"{tag}b", "up")
            for rank, name in enumerate(names):
                _run("ip", "netns", "add", name)
                _run("ip", "link", "add", f"{tag}v{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
                _run("ip", "link", "set", f"{tag}v{rank}", "master", f"{tag}b", "up")
                _run("ip", "-n", name, "addr", "add", f"10.213.{os.getpid() % 250}.{rank + 1}/24", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
                _run("tc", "qdisc", "add", "dev", f"{tag}v{rank}", *limit)
            yield names
        finally:
            for rank, name in enumerate(names):  # with its namespace, a link would go only later
                subprocess.run(["ip", "link", "del", f"{tag}v{rank}"], capture_output=True, check=False)
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            remove(tag)


def lacking() -> str | None:
    """Return why links cannot be limited here, or None."""
    if problem("gloo"):
        return "gloo comes with PyTorch"
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need root, ip and tc"
    try:
        with links(1, RATE):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


def measured(name: str, meeting: Path, ranks: int, *options: str) -> dict[str, Any]:
    """Start the ranks and return rank 0's figures."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(root)}
    with links(ranks, RATE) as names:
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name_of, sys.executable, "-W", "ignore", __file__, name, str(meeting),
                 str(rank), str(ranks), *options], env=environment, stdout=subprocess.PIPE, text=True,
            )
            for rank, name_of in enumerate(names)
        ]  # fmt: skip
        try:
            said = [each.communicate(timeout=TIMEOUT_S)[0] for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()
    assert not any(each.returncode for each in started)
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def in_pairs(name: str, folder: Path) -> dict[str, Any]:
    """Launch each setting with its base alone; the base's times are those of its launch."""
    found: dict[str, Any] = {"times": {}, "arrived": {}, "bases": {}}
    for scheme, (base, *others) in SETTINGS.items():
        for settings in others:
            pair = named(scheme, base), named(scheme, settings)
            meeting = folder / f"{len(found['times'])}"
            meeting.mkdir()
            own = measured(name, meeting, RANKS, *pair)
            for what in ("times", "arrived"):
                found[what].update(own[what])
            found["bases"][pair[1]] = own["times"][pair[0]]
    return found


def table(found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each setting's step over the scheme's as it comes, and both variations."""
    for name, own in found["times"].items():
        base = found.get("bases", {}).get(name) or found["times"][name.partition(":")[0]]
        ratio = paired_ratio(own, base)
        yield (
            name,
            {
                "median_ms": 1e3 * statistics.median(own),
                "ratio": ratio.value,
                "low": ratio.interval[0],
                "high": ratio.interval[1],
                "variation": statistics.pstdev(own) / statistics.fmean(own),
                "arrival_orders": found["arrived"][name] or 0,
            },
        )


WAYS: Mapping[str, Callable[[str, Path], dict[str, Any]]] = {
    "orders": lambda name, folder: in_pairs(name, folder) if name in HEAVY else measured(name, folder, RANKS),
    "across": lambda name, folder: measured(name, folder, RANKS, "across"),
}


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("way", WAYS)
def test_transfers_in_turn(
    way: str, name: str, tmp_path: Path, benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    if why := lacking():
        pytest.skip(why)
    found: dict[str, Any] = {}
    benchmark.pedantic(lambda: found.update(WAYS[way](name, tmp_path)), rounds=1)
    what = name
    if way == "across":
        benchmark.extra_info.update(forward_s=found["forward_s"])
        what += f" across the barrier, forward pass {1e3 * found['forward_s']:.1f} ms"
    with capsys.disabled():
        tell(what, found, benchmark)


def tell(what: str, found: Mapping[str, Any], benchmark: BenchmarkFixture) -> None:
    """Print the rows, and keep them."""
    rows = dict(table(found))
    benchmark.extra_info.update(rate=RATE, rows=rows, times=found["times"])
    print(f"\n{what}, {RANKS} ranks, {RATE}, {ROUNDS} rounds")
    for each, row in rows.items():
        print(
            f"  {each:64} {row['median_ms']:8.1f} ms  {row['ratio']:.3f} ({row['low']:.3f}–{row['high']:.3f})  "
            f"variation {row['variation']:.3f}  arrival orders {row['arrival_orders']:g}"
        )


if __name__ == "__main__":
    where = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    print(json.dumps(measure_across(*where) if sys.argv[5:] == ["across"] else measure(*where, *sys.argv[5:])))
