"""``d5suite advise`` on networks, and the benchmark of models, with results of planted times."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import models_of_results, published_convnets
from d5suite.cli import main
from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import read_ceilings
from d5suite.models.node_time import GROUPED, POINTWISE, NodeWork, node_work
from d5suite.models.published import read_published
from d5suite.network.held import held
from d5suite.network.layers import LayerFacts, layer_facts
from d5suite.network.model import Network
from d5suite.network.zoo import build
from d5suite.report import network_advice
from d5suite.report.network_advice import training_nodes
from d5suite.simulation import engine
from tests.report.planted import bench, machine, result
from tests.simulation.machines import machine as by_hand
from tests.simulation.machines import shared

NETWORKS = ("mobilenet_v2", "resnet18", "squeezenet1_1", "shufflenet_v2_x1_0")
PIXELS = 32
BASE, COPIES, CALL_S = 3 << 28, 4, 2e-6
"""Planted: the framework's base, how often it holds the parameters, and seconds of a call."""


@cache
def network_of(name: str) -> Network:
    return build(name, classes=10, image_size=PIXELS)


def seconds(work: NodeWork, far: float) -> float:
    """Planted: half of the ceiling of arithmetic, and all of the bandwidth."""
    near = (work.bytes - work.far_bytes) / (50e9 if work.bytes <= 100_000_000 else 10e9)
    return work.flops / 50e9 + near + work.far_bytes / far + CALL_S


def far_rate(works: Iterable[NodeWork]) -> float:
    """Bandwidth of the level that holds all weights."""
    return 50e9 if sum(each.far_bytes for each in works) <= 100_000_000 else 10e9


@cache
def planted(name: str, batch: int, disturbed: str = "") -> dict[str, Any]:
    """A result of a training step whose nodes take their planted seconds."""
    network = network_of(name)
    facts = layer_facts(network, batch_size=batch)
    graph = {
        node: {
            "op_type": each.op_type, "stage": "all", "shape": list(each.shape), "flops": each.flops,
            "backward_flops": each.backward_flops, "bytes": each.bytes, "backward_bytes": each.backward_bytes,
        }
        for node, each in facts.items()
    }  # fmt: skip
    works = [
        (node, node_work(vars(each), direction))
        for node, each in facts.items() if each.op_type not in ("Flatten", "Reshape")
        for direction in ("forward", "backward")
    ]  # fmt: skip
    works = [(node, work) for node, work in works if work.flops or work.bytes]
    far = far_rate(work for _, work in works)
    times: list[dict[str, Any]] = [
        {"nodes": [node], "direction": work.direction, "seconds": seconds(work, far), "calls": 1}
        for node, work in works
    ]  # fmt: skip
    step_s = sum(each["seconds"] for each in times)
    part = {
        "times": times, "graph": graph, "other": {}, "steps": 3, "step_s": step_s, "plain_step_s": step_s,
        "slowdown": 1.0, "coverage": 1.0, "left_over_s": 0.0, "dropped": 0, "method": "planted", "notes": [],
    }  # fmt: skip
    found = bench(batch=batch, step_s=step_s, part=part, disturbed=disturbed)
    counts, parameters = (
        held(network, batch_size=batch),
        4 * sum(network.initializers[each].size for each in network.parameters),
    )
    found["group"], info = f"imagenet_{name}/training_step", found["extra_info"]["d5suite"]
    found["fullname"] = f"test_{name}.py::test[{found['param']}]"
    info["recipe"] = f"imagenet_{name}"
    info["memory"] = {
        "peak_bytes": int(BASE + COPIES * parameters + counts.step), "baseline_bytes": BASE, "method": "VmHWM",
        "parameters_bytes": parameters, "gradients_bytes": parameters, "optimizer_state_bytes": parameters,
        "alive_bytes": counts.step,
    }  # fmt: skip
    info["peak_memory_bytes"] = info["memory"]["peak_bytes"]
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("planted")
    benches = [planted(name, batch) for name in NETWORKS for batch in (2, 8)]
    roof = machine(folder / "machine.json", memory_bytes=8 << 30)
    return result(folder / "out.json", *benches), roof


def advise(files: tuple[Path, Path], *options: str, network: str = "resnet18") -> int:
    out, roof = files
    given = ["--results", str(out), "--machine", str(roof), "--image-size", str(PIXELS)]
    return main(["advise", network, "--batch", "8", *given, *options])


def test_a_network_is_predicted_from_others(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert advise(files, "--json") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    plain = next(
        each for each in plans if each["plan"] == {"data": 1, "batch": 8, "micro_batch": 8, "recompute": False,
                                                   "sharding": 0, "pipeline": 1}
    )  # fmt: skip
    nodes = training_nodes(build("resnet18", image_size=PIXELS), 8, 4)
    truth = sum(seconds(each, far_rate(nodes)) for each in nodes)
    assert plain["time_s"]["total"] == pytest.approx(truth, rel=0.05)
    counts = held(build("resnet18", image_size=PIXELS), batch_size=8)
    assert plain["memory_bytes"] == pytest.approx(BASE + COPIES * 4 * counts.parameters + counts.step, rel=0.05)
    assert plain["interval_s"][0] < plain["time_s"]["total"] < plain["interval_s"][1]


def test_the_table_says_what_bounds_and_what_is_assumed(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise(files) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "only plans on one are known" in text or "1 device" in text
    assert "The first: computing is" in text and "The order rests most on" in text


@pytest.mark.parametrize(
    ("network", "options", "said"),
    [
        ("vit_b_16", (), "no measurement stands behind"),
        ("resnet18", ("--backend", "jax"), "no result is a training step that a model can be fitted to"),
        ("resnet18", ("--nodes", "2"), "nothing of the network between nodes"),
        ("resnet18", ("--image-size", "0"), "--image-size is 0"),
        ("no_such_network", (), "the zoo has no network"),
    ],
)
def test_it_says_no_where_it_does_not_know(
    files: tuple[Path, Path], network: str, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise(files, *options, network=network) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_too_few_networks_give_no_model(
    tmp_path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    few = result(tmp_path / "few.json", planted("mobilenet_v2", 2), planted("squeezenet1_1", 2))
    assert advise((few, files[1])) == 2
    assert "2 measured networks are too few" in capsys.readouterr().err
    disturbed = result(tmp_path / "disturbed.json", *(planted(name, 2, "a compiler ran") for name in NETWORKS))
    assert advise((disturbed, files[1])) == 2
    assert "disturbed: a compiler ran" in capsys.readouterr().err


def test_results_of_another_machine_and_operators_without_a_count_give_no_advice(
    tmp_path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = machine(tmp_path / "foreign.json", cpu="another CPU", memory_bytes=8 << 30)
    assert advise((files[0], foreign)) == 2
    assert "the CPU of the machine file is another CPU" in capsys.readouterr().err

    def uncounted(network: Network, **options: Any) -> dict[str, LayerFacts]:
        found = layer_facts(network, **options)
        first = next(name for name, each in found.items() if each.op_type == "Conv")
        return found | {first: replace(found[first], flops=None, bytes=None)}

    monkeypatch.setattr(network_advice, "layer_facts", uncounted)
    assert advise(files) == 2
    assert "has no count, because Conv has none here" in " ".join(capsys.readouterr().err.split())


def test_the_benchmark_judges_on_networks_left_out(files: tuple[Path, Path]) -> None:
    out, roof = files
    found, missing = models_of_results.lines([out], roof)
    rows = {line.what: line for line in found}
    for name in ("peak memory, torch, training_step", "step, torch, training_step"):
        assert len(rows[name].errors) == 2 * len(NETWORKS)
        assert models_of_results.figures(rows[name].errors)[1] < 0.05
    assert any("message lines" in each for each in missing)


def test_a_network_of_other_times_is_seen(tmp_path: Path, files: tuple[Path, Path]) -> None:
    benches = [json.loads(json.dumps(planted(name, batch))) for name in NETWORKS for batch in (2, 8)]
    for each in benches[:2]:
        each["stats"]["data"] = [2 * value for value in each["stats"]["data"]]
        each["stats"]["median"] *= 2
        info = each["extra_info"]["d5suite"]
        info["median_s"] *= 2
        info["median_ci95"] = [2 * value for value in info["median_ci95"]]
        info["throughput"]["value"] /= 2
    wrong = result(tmp_path / "wrong.json", *benches)
    points = models_of_results.all_points([wrong], read_ceilings(files[1]), disturbed=False)
    found, _ = models_of_results.network_lines(points)
    rows = {each.what: each for each in found}
    assert models_of_results.figures(rows["step, torch, training_step"].errors)[3] > 0.3


def test_messages_ranks_and_loading_are_judged_by_what_their_models_have_not_seen() -> None:
    """Planted: α = 10 µs and β = 1 ns, a step of one rank, and a loader slower than a step."""

    def record(measurement: str, recipe: str = "case", **more: Any) -> dict[str, Any]:
        backend = {"name": "torch", "mode": "eager"}
        return {"measurement": measurement, "recipe": recipe, "backend": backend, "threads": 1, "ranks": 2, **more}

    def sizes(messages: int, share: float) -> list[dict[str, Any]]:
        return [
            {"bytes": n, "median_s": messages * 1e-5 + share * n * 1e-9,
             "traffic": {"messages_sent": messages, "bytes_sent": share * n}}
            for n in (4**power for power in range(1, 12))
        ]  # fmt: skip

    collective = {"communicator": "gloo", "algorithm": "native"}
    played = record("collectives", "ping_pong", sizes=sizes(2, 2.0), **collective)
    ring = record("collectives", "all_reduce", sizes=sizes(2, 1.0), communicator="gloo", algorithm="ring")
    reduced = record("collectives", "all_reduce", sizes=sizes(2, 1.0), **collective)
    lines = list(models_of_results.message_lines([played, ring, reduced]))
    assert {line.what for line in lines} >= {"ring, from ping-pong, large sizes", "ring, from ping-pong, small sizes"}
    assert all(models_of_results.figures(line.errors)[3] < 1e-3 for line in lines)
    told: dict[str, Any] = {"scheme": "all_reduce", "communicator": "gloo", "ranks": [{"payload_bytes": 10**6}]}
    one = record("distributed_step", batch_size=4, median_s=0.1, distributed=told) | {"ranks": 1}
    two = record("distributed_step", batch_size=4, median_s=0.1 + 2e-5 + 1e-3, distributed=told) | {"threads": 2}
    (line,) = models_of_results.rank_lines([reduced, one, two])
    assert models_of_results.figures(line.errors)[3] < 1e-3
    place: dict[str, Any] = {"batch_size": 4, "environment": {"cpu": {"allowed_cpus": [0, 1]}}}
    fed = [
        record("training_step", median_s=0.1, **place), record("step_breakdown", median_s=0.2, **place),
        record("input_pipeline", throughput={"value": 20.0}, loader_workers=1, **place), played,
    ]  # fmt: skip
    (line,) = models_of_results.loading_lines(fed)
    assert line.errors == pytest.approx([0.0]) and "bounds 1 of 1" in line.what


@pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))
def test_steps_of_ranks_are_judged_by_a_simulation_of_one_rank(tmp_path: Path) -> None:
    file = shared(tmp_path / "machine.json")

    def record(ranks: int, median_s: float) -> dict[str, Any]:
        told = {"scheme": "all_reduce", "settings": {"name": "all_reduce"}, "communicator": "gloo",
                "algorithm": "native", "ranks": [{"cpus": [rank]} for rank in range(ranks)]}  # fmt: skip
        return {"measurement": "distributed_step", "recipe": "digits_lenet", "threads": ranks, "ranks": ranks,
                "backend": {"name": "torch", "mode": "eager"}, "batch_size": 4, "image_size": 32, "classes": 10,
                "median_s": median_s, "distributed": told}  # fmt: skip

    one = record(1, 0.01)
    right = models_of_results.simulated_s(one, record(2, 1.0), file)
    bare = models_of_results.simulated_s(one, record(2, 1.0), by_hand(tmp_path / "device.json"))
    assert 0.01 < bare < 0.99 * right
    for median_s, error in ((right, 0.0), (2 * right, -0.5)):
        launches = [record(2, median_s), record(2, 0.9 * median_s), record(2, 3.0)]
        (line,), missing = models_of_results.simulated_lines([one, *launches], file)
        assert line.errors == pytest.approx([error]) and line.what.endswith("simulated, all_reduce") and not missing
    lost, other, apart = record(2, 1.0), record(2, 1.0), record(2, 1.0)
    lost["distributed"]["settings"] = {"name": "top_k"}
    other["distributed"]["communicator"] = "mpi"
    apart["distributed"]["ranks"] = [{"host": "a"}, {"host": "b"}]
    found, missing = models_of_results.simulated_lines([one, lost, other, apart], file)
    assert not found and [each.partition(": ")[2][:20] for each in missing] == [
        "the scheme top_k is ",
        "the machine file has",
    ]
    old = shared(tmp_path / "old.json", counts=(1,))
    assert "no ceilings for 2 threads" in models_of_results.simulated_lines([one, record(2, 1.0)], old)[1][0]


def test_a_folder_of_results_is_judged_with_its_own_ceilings(tmp_path: Path, files: tuple[Path, Path]) -> None:
    (tmp_path / "networks.json").write_text(files[0].read_text())
    (tmp_path / "machine.json").write_text(files[1].read_text())
    (tmp_path / "state.json").write_text("{}")
    found, roof = models_of_results.result_files(tmp_path)
    assert [each.name for each in found] == ["networks.json"] and roof == tmp_path / "machine.json"
    points = models_of_results.all_points(found, read_ceilings(files[1]), disturbed=False)
    errors = {(each.name, each.direction): each for each in models_of_results.class_errors(points)}
    assert all(ratio == pytest.approx(1, rel=0.1) for ratio in errors["convolution", "backward"].networks.values())
    assert sum(each.share for each in errors.values()) == pytest.approx(1)
    packed = tmp_path / "networks.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "networks.json").read_bytes()))
    (tmp_path / "networks.json").unlink()
    assert models_of_results.result_files(tmp_path)[0] == [packed]
    packed.unlink()
    with pytest.raises(ConfigurationError, match="this folder holds no results"):
        models_of_results.result_files(tmp_path)


def test_launches_tell_how_well_any_model_can_do() -> None:
    data = [1.8, 1.8, 1.9, 2.0, 2.2, 2.2]
    one = {
        "measurement": "inference", "median_s": 2.0, "data": data, "place": "",
        "turns": [{"rounds": [2, 1, 1]}, {"rounds": [2]}],
    }  # fmt: skip
    (line,) = models_of_results.launch_lines([one, one | {"turns": [{"rounds": [6]}]}])
    assert line.errors == pytest.approx([-0.05, 0.1])


def test_what_the_profiler_adds_to_each_call_is_taken_off(tmp_path: Path, files: tuple[Path, Path]) -> None:
    """Planted: each call takes 5 µs more while it is profiled."""
    added = 5e-6
    benches = [json.loads(json.dumps(planted(name, 8))) for name in NETWORKS]
    for each in benches:
        part = each["extra_info"]["d5suite"]["layers"]
        for one in part["times"]:
            one["seconds"] += added
        part["step_s"] += added * len(part["times"])
        part["slowdown"] = part["step_s"] / part["plain_step_s"]
    slowed = result(tmp_path / "slowed.json", *benches)
    honest = result(tmp_path / "honest.json", *(planted(name, 8) for name in NETWORKS))
    ceilings = read_ceilings(files[1])
    (found,), (true,) = (
        models_of_results.all_points([each], ceilings, disturbed=False).steps.values() for each in (slowed, honest)
    )
    for one, other in zip(found, true, strict=True):
        assert [each.seconds for each in one.timed] == pytest.approx([each.seconds for each in other.timed], rel=1e-6)


def test_a_machine_file_with_published_steps_gives_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted: products at half of the ceiling, other traffic at memory's, 1 µs a call."""

    def planted_s(works: list[NodeWork]) -> float:
        products = [each for each in works if each.family in ("convolution", "product", POINTWISE, GROUPED)]
        moved = sum(each.bytes for each in works if each not in products)
        return sum(each.flops for each in products) / 5e12 + moved / 5e11 + 1e-6 * len(works)

    steps = []
    for name in ("mobilenet_v2", "shufflenet_v2_x1_0", "squeezenet1_1"):
        network = build(name, image_size=64)
        for batch in (32, 64):
            updated = 20 * sum(network.initializers[each].size for each in network.parameters)
            seconds = planted_s(training_nodes(network, batch, 4)) + updated / 5e11
            steps.append({"network": name, "image_size": 64, "batch": batch, "images_per_s": batch / seconds,
                          "source": "planted"})  # fmt: skip
    path = tmp_path / "machine.json"
    text = {name: {"value": value, "source": "x"} for name, value in (
        ("devices_per_node", 4), ("memory_bytes", 2**34), ("memory_bandwidth", 5e11), ("link_bandwidth", 1e10),
    )}  # fmt: skip
    peak = {"what": "flops", "precision": "fp32", "device": "cuda", "value": 1e13, "source": "x"}
    path.write_text(
        json.dumps({"schema": "d5suite-machine-1", "name": "x", "ceilings": [peak], "steps": steps, **text})
    )
    given = ["advise", "squeezenet1_0", "--machine", str(path), "--image-size", "64", "--batch", "64"]
    assert main([*given, "--json"]) == 0
    plans = {tuple(each["plan"].values()): each for each in json.loads(capsys.readouterr().out)["plans"]}
    network = build("squeezenet1_0", image_size=64)
    found, cut = plans[4, 64, 16, False, 0, 1], plans[1, 64, 16, False, 0, 4]
    assert found["time_s"]["computing"] == pytest.approx(planted_s(training_nodes(network, 16, 4)), rel=0.02)
    assert found["most_memory_bytes"] is None and cut["memory_bytes"] < found["memory_bytes"]
    assert cut["time_s"]["bubble"] > 0.5 * cut["time_s"]["computing"]  # 4 passes through 4 stages: 3 / 4 at least
    assert main(given) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "published steps" in said and "memory is counted, without the framework's own" in said
    assert "Tensor parallelism is not ranked" in said and "times what the gradients of replicas take" in said


def test_published_rates_are_those_of_their_file() -> None:
    """The table itself takes a minute: benchmarks/bench_models.py."""
    rates = published_convnets.rates("p100-dgx1")
    assert len(rates) == 36 and {each.network for each in rates if each.devices == 1 and each.batch == 512} == {
        "alexnet"
    }
    given = read_published(published_convnets.MACHINES / "p100-dgx1.json")
    assert {(each.network, each.batch, each.images_per_s) for each in given} == {
        (each.network, each.batch, each.images_per_s) for each in rates if each.devices == 1
    }
