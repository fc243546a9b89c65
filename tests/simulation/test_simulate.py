"""Simulated steps: closed forms, folded against whole, a second engine, many ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.algorithms.costs import cost
from d5suite.errors import ConfigurationError, D5Error
from d5suite.models.ceilings import MemoryLevel, Roof
from d5suite.network.zoo import build
from d5suite.simulation import engine, symmetry
from d5suite.simulation.noise import ComputeNoise, daly, expected, failures, lognormal, noisy, young
from d5suite.simulation.platform import ComputeNode, Interconnect, machine_figures, part_of_machine
from d5suite.simulation.programs import Op, OpKind
from d5suite.simulation.simulate import Setup, make_programs, node_of, simulate
from d5suite.simulation.step import ComputeStep, ComputeTask, from_layers, from_network
from d5suite.simulation.what_if import apply, scheme_settings
from tests.simulation.machines import machine, shared
from tests.simulation.second import play

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))

ALPHA, RATE = 1e-5, 1e9


def one_gradient(elements: int, compute_s: float = 0.0) -> ComputeStep:
    backward = (ComputeTask("b", "Conv", compute_s, ("w",)),)
    return ComputeStep("one", (ComputeTask("f", "Conv", compute_s),), backward, 0.0, {"w": (elements,)}, "made by hand")


def many_gradients(seed: int = 1) -> ComputeStep:
    draw = random.Random(seed)
    shapes = {f"w{i}": (draw.randint(1, 40_000),) for i in range(12)}
    backward = tuple(ComputeTask(f"b{i}", "Conv", draw.random() * 3e-4, (f"w{i}",)) for i in reversed(range(12)))
    return ComputeStep("many", (ComputeTask("f", "Gemm", 2e-4),), backward, 1e-4, shapes, "made by hand")


def setup(step: ComputeStep, ranks: int, algorithm: str = "ring", scheme: str = "all_reduce", **network: Any) -> Setup:
    return Setup(step, scheme_settings(scheme), algorithm, ranks, Interconnect(ALPHA, RATE, **network))


BUCKETS = "all_reduce:bucket_bytes=200000,first_bucket_bytes=40000"


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_closed_forms(ranks: int) -> None:
    nbytes, rounds = 4 * 2**16, int(math.log2(ranks))
    shared = 2 * nbytes * (ranks - 1) / ranks / RATE
    forms = {
        "ring": 2 * (ranks - 1) * ALPHA + shared,
        "halving_doubling": 2 * rounds * ALPHA + shared,
        "recursive_doubling": rounds * (ALPHA + nbytes / RATE),
        "tree": 2 * rounds * (ALPHA + nbytes / RATE),
        "parameter_server": 2 * (ALPHA + (ranks - 1) * nbytes / RATE),
    }
    for algorithm, seconds in forms.items():
        found = simulate(setup(one_gradient(2**16), ranks, algorithm), steps=1)
        assert found.step_s == pytest.approx(seconds, rel=1e-6), algorithm
        assert sum(found.path.values()) == pytest.approx(1) and found.path["computing"] == 0
    served = simulate(setup(one_gradient(2**16), ranks, scheme="parameter_server"), steps=1)  # takes one by one
    assert served.step_s == pytest.approx((ranks - 1) * (ALPHA + nbytes / RATE) + ALPHA + (ranks - 1) * nbytes / RATE,
                                          rel=1e-6)  # fmt: skip


def test_copies_and_sums_take_the_time_of_their_bytes() -> None:
    nbytes, moved = 4 * 2**16, 1e8
    message = nbytes / RATE
    for scheme, messages, times in (
        ("all_reduce", 2 * (ALPHA + message / 2), 3 / 2 + 2),  # half of it is added, all of it divided
        # Filled, cleared, added twice, divided; weights copied, filled and, by the worker, loaded.
        ("parameter_server", 2 * (ALPHA + message), 2 + 1 + 3 + 3 + 2 + 2 + 2 + 2),
    ):
        given = dataclasses.replace(setup(one_gradient(2**16), 2, scheme=scheme), node=ComputeNode(moved))
        found = simulate(given, steps=1)
        assert found.step_s == pytest.approx(messages + times * nbytes / moved, rel=1e-6), scheme
    staged = dataclasses.replace(setup(one_gradient(2**16), 2), node=ComputeNode(moved), staged=True, early=False)
    assert simulate(staged, steps=1).step_s == pytest.approx(message + 2 * ALPHA + 7.5 * nbytes / moved, rel=1e-6)
    many = dataclasses.replace(setup(many_gradients(), 6, "halving_doubling", BUCKETS), node=ComputeNode(1e9))
    folded, whole = simulate(many, steps=1), simulate(many, fold=False, steps=1)
    assert folded.kinds == 3 and folded.step_s == pytest.approx(whole.step_s, rel=0.01)


def test_what_a_core_does_it_does_one_after_the_other() -> None:
    nbytes = 4 * 2**16

    def step(cores: int, step: ComputeStep, ranks: int = 2, scheme: str = "all_reduce", **network: Any) -> float:
        node = ComputeNode(1e9 if "," in scheme else math.inf, 1, cores)
        given = setup(step, ranks, scheme=scheme, **network)
        return simulate(dataclasses.replace(given, node=node), fold=False, steps=1).step_s

    # An exchange: one core copies what it sends and what it receives.
    apart, together = step(2, one_gradient(2**16), busy_s_per_byte=1 / RATE), step(1, one_gradient(2**16),
                                                                                 busy_s_per_byte=1 / RATE)  # fmt: skip
    assert apart == pytest.approx(2 * ALPHA + nbytes / RATE, rel=1e-6)
    assert together == pytest.approx(2 * nbytes / RATE, rel=1e-6)
    # Of small messages, the work at both ends.
    assert step(2, one_gradient(8), busy_s=ALPHA) == pytest.approx(2 * ALPHA, rel=0.01)
    assert step(1, one_gradient(8), busy_s=ALPHA) == pytest.approx(4 * ALPHA, rel=0.01)
    # Four ranks of two cores compute twice as long.
    shared = step(2, one_gradient(8, 1e-3), 4, island=4)
    assert shared == pytest.approx(4e-3, rel=0.05) and step(4, one_gradient(8, 1e-3), 4, island=4) < 2.2e-3
    # Sums of a thread beside the backward pass.
    given = many_gradients()
    one, two, free = (step(cores, given, scheme=BUCKETS) for cores in (1, 2, 0))
    assert two == pytest.approx(free, rel=1e-6) and free < one
    assert one >= given.seconds + 7 / 2 * given.nbytes / 1e9


def test_ranks_that_compute_at_once_share_what_they_reach_together(tmp_path: Path) -> None:
    file = shared(tmp_path / "machine.json")
    roof, *_ = machine_figures(file, transport=None, threads=1)
    part, missing = part_of_machine(file, ranks=2, threads=1)
    assert part is not None and not missing
    tasks = (
        ComputeTask("memory", "Relu", 0.02, ("w",), 0.0, 1e8),
        ComputeTask("cache", "Relu", 1e-3, (), 0.0, 7e5),  # of two ranks too large for the cache
        ComputeTask("arithmetic", "Conv", 0.03, (), 1e9, 4e7),  # bytes that arithmetic hides
        ComputeTask("not counted", "?", 0.01),
    )
    step = ComputeStep("made by hand", tasks[1:], tasks[:1], 0.01, {"w": (10**6,)}, "made by hand")
    found = step.beside(roof, part)
    rest = 2 / 1.25e10
    longer = {each.label: each.seconds for each in (*found.forward, *found.backward)}
    assert longer == pytest.approx({
        "memory": 0.02 + 1e8 * (rest - 1e-10), "cache": 1e-3 + 7e5 * (rest - 1 / 4e10),
        "arithmetic": 0.03 + 1e9 * (2 / 1.6e11 - 1 / 1e11), "not counted": 0.01,
    })  # fmt: skip
    assert found.update_s == pytest.approx(0.01 + 5 * 4e6 * (rest - 1e-10))
    node = node_of(step, [roof, part], threads=1, cores=2)
    assert node == ComputeNode(1 / rest, 1, 2) and node_of(step, [roof], threads=1, cores=2).bytes_per_s == 1e10
    together = dataclasses.replace(setup(found, 2, island=2), node=dataclasses.replace(node, bytes_per_s=math.inf))
    sent = 4e6 / RATE  # and that is hidden by nothing: the only gradient comes last
    assert simulate(together, fold=False, steps=1).step_s == pytest.approx(found.seconds + sent, rel=0.01)


def test_what_nobody_shares_has_no_part(tmp_path: Path) -> None:
    both, one = shared(tmp_path / "both.json"), shared(tmp_path / "one.json", counts=(1,))
    assert part_of_machine(None, ranks=2, threads=1) == part_of_machine(both, ranks=1, threads=1) == (None, "")
    assert part_of_machine(machine(tmp_path / "device.json"), ranks=2, threads=1) == (None, "")
    for file, ranks, threads, wanted in ((one, 2, 1, "1,2"), (both, 2, 2, "2,4"), (both, 3, 1, "1,3")):
        part, missing = part_of_machine(file, ranks=ranks, threads=threads)
        assert part is None and f"d5suite machine --threads {wanted} -o" in missing
    wide, _ = part_of_machine(shared(tmp_path / "wide.json", counts=(1, 2, 4)), ranks=2, threads=2)
    assert wide is not None and wide.flops_per_s == pytest.approx(1e11 * 2.8 / 2)
    content = json.loads(both.read_text())
    content |= {name: {"value": 1e13, "source": "a device"} for name in ("peak_flops", "memory_bandwidth")}
    both.write_text(json.dumps(content))  # what computes is the device
    assert part_of_machine(both, ranks=2, threads=1) == (None, "")


def test_work_that_has_two_times_counts_once() -> None:
    network = build("lenet5", classes=10, image_size=32)
    graph = {node.name: {"op_type": node.op_type, "stage": "x", "flops": 10, "bytes": 100} for node in network.nodes}
    first, second, *others = graph
    groups = [[first], [first, second], *([each] for each in others)]
    times = [{"nodes": nodes, "direction": "forward", "seconds": 1e-3, "calls": 1} for nodes in groups]
    part = {"graph": graph, "times": times, "slowdown": 1.0, "plain_step_s": 1.0}
    step = from_layers(part, network, title="planted")
    assert sum(each.bytes for each in step.forward) == 100 * len(graph)
    assert sum(each.flops for each in step.forward) == 10 * len(graph)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("native", "hierarchical")])
def test_messages_are_those_of_the_algorithm(algorithm: str) -> None:
    made = make_programs(setup(one_gradient(1000), 6, algorithm), fold=False, steps=1)
    for rank, streams in enumerate(made.streams):
        sent = [op.nbytes for ops in streams for op in ops if op.kind == OpKind.ISEND]
        known = cost(algorithm, "all_reduce", rank=rank, size=6, length=1000, itemsize=4)
        assert known is not None and (len(sent), sum(sent)) == (known.messages_sent, known.bytes_sent)


@pytest.mark.parametrize("scheme", [BUCKETS, "model_averaging", "gossip"])
def test_a_folded_step_takes_exactly_as_long_as_the_whole_one(scheme: str) -> None:
    step = many_gradients()  # in segments of equal length, so that only what is alike is folded
    step = dataclasses.replace(step, parameters={name: (shape[0] // 960 * 960 + 960,) for name, shape in
                                                 step.parameters.items()})  # fmt: skip
    for algorithm, ranks, kinds, more in (
        ("ring", 2, 1, {}), ("ring", 5, 1, {}), ("ring", 20, 1, {}),
        ("halving_doubling", 8, 1, {}), ("halving_doubling", 12, 3, {}), ("halving_doubling", 20, 5, {}),
        ("recursive_doubling", 6, 3, {}), ("hierarchical", 12, 4, {"island": 4}),
    ):  # fmt: skip
        given = setup(step, ranks, algorithm, scheme, **more)
        folded, whole = simulate(given, steps=1), simulate(given, fold=False, steps=1)
        assert folded.kinds == (1 if scheme == "gossip" else kinds) and whole.kinds == whole.ranks == ranks
        assert folded.step_s == pytest.approx(whole.step_s, rel=1e-9), (algorithm, ranks)
        for share in ("computing", "communicating", "waiting"):
            assert getattr(folded, share) == pytest.approx(getattr(whole, share), abs=1e-6)


def test_unequal_segments_cost_a_folded_step_less_than_an_element_each() -> None:
    given = setup(many_gradients(), 12, "halving_doubling", BUCKETS)
    folded, whole = simulate(given, steps=1), simulate(given, fold=False, steps=1)
    assert folded.lengthened and 0 <= folded.step_s - whole.step_s < 8 * 2 * 8 * 4 / RATE


def test_ranks_that_are_not_alike_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {**symmetry.KINDS, "halving_doubling": lambda size, hosts: ([0] * size, 4)}
    monkeypatch.setattr(symmetry, "KINDS", planted)  # claims that all of 6 ranks are alike
    with pytest.raises(D5Error, match="ranks 0 and 5 are not alike"):
        simulate(setup(one_gradient(960), 6, "halving_doubling"))
    send = [[[Op(OpKind.ISEND, peer=0, nbytes=8), Op(OpKind.IRECV, peer=0, nbytes=4)]]]
    with pytest.raises(D5Error, match="do not meet their receives"):
        symmetry.check(send)


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_second_engine_agrees(ranks: int) -> None:
    pairs = [(BUCKETS, name) for name in ("ring", "halving_doubling", "tree", "parameter_server")]
    for scheme, algorithm in [*pairs, ("parameter_server", "ring"), ("gossip", "ring")]:
        if ranks == 64 and algorithm in ("ring", "parameter_server") and scheme == BUCKETS:
            continue  # covered at 16; SimPy takes long
        given = setup(many_gradients(), ranks, algorithm, scheme)
        made = make_programs(given, fold=False, steps=1)
        assert simulate(given, fold=False, steps=1).step_s == pytest.approx(play(made, given.network), rel=0.05)


def test_communicating_overlaps_the_backward_pass() -> None:
    hidden, bare = (
        simulate(dataclasses.replace(setup(many_gradients(), 4, scheme=BUCKETS), early=early))
        for early in (True, False)
    )
    assert hidden.step_s < 0.95 * bare.step_s and hidden.communicating < bare.communicating
    off = simulate(setup(many_gradients(), 4, scheme=BUCKETS + ",overlap=false"))
    assert off.step_s == pytest.approx(bare.step_s)


def test_every_topology_and_scheme_plays() -> None:
    step = many_gradients()
    plain = simulate(setup(step, 8, scheme=BUCKETS), fold=False).step_s
    times = {
        name: simulate(setup(step, 8, scheme=BUCKETS, topology=name, island=4, island_bytes_per_s=1e10)).step_s
        for name in ("fat-tree", "dragonfly", "nvlink")
    }
    assert times["fat-tree"] >= plain and times["dragonfly"] >= plain > times["nvlink"]
    for scheme in ("asynchronous", "stale_synchronous", "parameter_server:servers=2"):
        assert simulate(setup(step, 4, scheme=scheme)).step_s > step.seconds
    with pytest.raises(ConfigurationError, match="top_k is not simulated"):
        simulate(setup(step, 4, scheme="top_k"))


def test_an_asynchronous_server_takes_whoever_comes_first() -> None:
    step = one_gradient(100, 1e-3)
    slow = simulate(setup(step, 4, scheme="asynchronous"), [1, 1, 1, 10], steps=3)
    ends = [each[0]["end"][-1] for each in slow.played.times]
    assert ends[1] < 0.3 * ends[3] and ends[2] < 0.3 * ends[3]  # nobody waits for the slow one
    synchronous = simulate(setup(step, 4), [1, 1, 1, 10], steps=3)
    assert synchronous.step_s > 0.019 and synchronous.waiting > 0.6


def test_orders_are_those_of_the_schemes() -> None:
    network = build("lenet5", classes=10, image_size=32)
    roof = Roof(1e11, (MemoryLevel("memory", 0, 1e10),))
    given = setup(from_network(network, roof, batch=4, share=0.5, source="by hand"), 4)
    times = {}
    for scheme in ("all_reduce", "parameter_server", "parameter_server:servers=2"):
        for order in ("backward", "forward", "tic", "random:1"):
            other = apply(dataclasses.replace(given, settings=scheme_settings(scheme)), "order", order)
            found = simulate(other, fold=False, steps=1)
            times[scheme, order] = found.step_s
            sizes = [op.nbytes for ops in found.played.programs.streams[1] for op in ops if op.kind == OpKind.ISEND]
            assert sum(sizes) > 0.9 * network_bytes(network)
            told = [op for ops in found.played.programs.streams[1] for op in ops if op.label == "choose"]
            assert len(told) == (len(given.step.parameters) if scheme == "all_reduce" else 0)
            assert all(op.seconds == pytest.approx(2 * ALPHA) for op in told)  # four ranks: a tree of two levels
    # Of those that are ready the first one goes: no order gives up the overlap. Choices are told.
    bare = simulate(dataclasses.replace(apply(given, "order", "tic"), early=False), fold=False, steps=1).step_s
    for order in ("backward", "forward", "tic", "random:1"):
        assert times["all_reduce", order] == pytest.approx(times["all_reduce", "backward"], rel=0.03)
        assert times["all_reduce", order] < 0.97 * bare
    for order, hidden in (("nope", "no order"), ("tac:", "no order")):
        with pytest.raises(ConfigurationError, match=hidden):
            apply(given, "order", order)
    with pytest.raises(ConfigurationError, match="cannot honour order"):
        apply(dataclasses.replace(given, settings=scheme_settings("gossip")), "order", "tic")


def network_bytes(network: Any) -> int:
    return sum(4 * network.initializers[name].size for name in network.parameters)


def test_tasks_that_nothing_comes_between_are_one_for_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in (BUCKETS, "parameter_server"):
        given = setup(many_gradients(), 6, "tree", scheme)
        whole = simulate(given)
        monkeypatch.setattr("d5suite.simulation.simulate.MANY_RANKS", 1)
        short = simulate(given)
        monkeypatch.undo()
        assert short.step_s == pytest.approx(whole.step_s, rel=1e-9)
        assert len(short.played.ops[1][0]) < len(whole.played.ops[1][0])


def test_what_if() -> None:
    given = setup(many_gradients(), 8, scheme=BUCKETS)
    plain = simulate(given).step_s
    assert simulate(apply(given, "network", "2x")).step_s < plain
    assert simulate(apply(given, "operator:Gemm", "0.5")).step_s == pytest.approx(plain - 1e-4)
    assert simulate(apply(given, "ranks", "2x")).ranks == 16
    assert simulate(apply(given, "algorithm", "tree")).step_s > plain
    for name, value in (("network", "fast"), ("operator:Softmax", "2x"), ("ranks", "1.3x"), ("colour", "2x"),
                        ("scheme", "no_such"), ("topology", "torus"), ("network", "0x")):  # fmt: skip
        with pytest.raises(ConfigurationError) as error:
            apply(given, name, value)
        assert "\n" not in error.value.what


def test_noise_slows_a_step_down_as_its_slowest_rank_does() -> None:
    step = one_gradient(10, 1e-3)
    noise = ComputeNoise(np.array([1.0] * 9 + [2.0]), "planted")

    def run(factors: Any) -> float:
        if isinstance(factors, float):
            return simulate(apply(setup(step, 8), "compute", repr(factors))).step_s
        return simulate(setup(step, 8), factors, steps=1).step_s

    drawn = noisy(run, noise, 8)
    assert drawn.steps and 2e-3 <= drawn.median_s <= drawn.high_s < 5e-3

    def refuses(factors: Any) -> float:
        if not isinstance(factors, float):
            raise D5Error("too many")
        return run(factors)

    limit = noisy(refuses, noise, 8)
    assert limit.steps == 0 and limit.high_s == pytest.approx(drawn.high_s, rel=0.01)
    assert lognormal(0.1).slowest(10_000, 0.5) == pytest.approx(math.exp(0.1 * 3.81), rel=0.01)


def test_failures_agree_with_young_and_daly_and_with_drawn_runs() -> None:
    found = failures(1000, rank_mtbf_s=3.6e7, checkpoint_s=60, restart_s=120)
    assert found.mtbf_s == 3.6e4
    assert found.best_interval_s == pytest.approx(daly(60, 3.6e4), rel=1e-3)
    assert found.best_interval_s == pytest.approx(young(60, 3.6e4), rel=0.05)
    assert found.efficiency == pytest.approx(found.drawn, rel=0.01)
    worse = failures(1000, rank_mtbf_s=3.6e7, checkpoint_s=60, restart_s=120, interval_s=10_000)
    assert worse.efficiency < found.efficiency and worse.efficiency == pytest.approx(worse.drawn, rel=0.01)
    assert expected(100, 0, 0, 1e9) == pytest.approx(100, rel=1e-6)
    with pytest.raises(ConfigurationError, match="hardly ever"):
        failures(10_000, rank_mtbf_s=1e4, checkpoint_s=1e4, restart_s=1)


def test_too_many_messages_say_what_to_do() -> None:
    with pytest.raises(D5Error, match="messages a step") as error:
        simulate(setup(one_gradient(2**20), 3_000, topology="fat-tree"))
    assert error.value.hint and "Choose fewer ranks" in error.value.hint


def test_a_program_that_never_ends_is_told() -> None:
    made = make_programs(setup(one_gradient(8), 2), fold=False, steps=1)
    made.streams[0][0].append(Op(OpKind.IRECV, 1, 5, 8))
    made.streams[0][0].append(Op(OpKind.WAIT, ref=len(made.streams[0][0]) - 1))
    with pytest.raises(D5Error, match="wait for each other for ever"):
        engine.play(made, Interconnect(ALPHA, RATE))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [("all_reduce", "ring"), ("all_reduce", "halving_doubling"), ("parameter_server", "ring"), ("all_reduce", "tree")],
)
def test_ten_thousand_ranks_within_ten_seconds_and_four_gigabytes(scheme: str, algorithm: str) -> None:
    # In a process of its own: this one's peak memory is that of all tests before.
    code = f"from tests.simulation.test_simulate import ten_thousand; print(*ten_thousand({scheme!r}, {algorithm!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ranks, spent_s, peak_kib = (float(word) for word in done.stdout.split()[-3:])
    assert ranks == 10_000 and spent_s < 10
    assert peak_kib < 4 << 20


def ten_thousand(scheme: str, algorithm: str) -> tuple[int, float, int]:
    """Simulate 10,000 ranks; return their number, the CPU seconds, and the peak memory in KiB."""
    import resource

    simulate(setup(one_gradient(8), 2))  # compiles
    start = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    roof, network, source = machine_figures(None, transport=None, threads=1)
    step = from_network(build("resnet50"), roof, batch=32, share=0.5, source=source)
    found = simulate(Setup(step, scheme_settings(scheme), algorithm, 10_000, network))
    end = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = end[0] - start[0] + end[1].ru_utime - start[1].ru_utime + end[1].ru_stime - start[1].ru_stime
    # A program's ru_maxrss starts at the peak of the process that started it: VmHWM does not.
    own = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return found.ranks, spent, max(end[1].ru_maxrss, int(own))
