"""The pass ``layers``: a slow layer is found, and times that cannot be true are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from d5suite.backends import backend, discover
from d5suite.errors import BackendError
from d5suite.levels.attribution import Interval, Owner
from d5suite.levels.contract import ContractError
from d5suite.levels.onednn import Repeated, kernel_of, kernels_by_owner, kernels_by_time, kernels_of
from d5suite.levels.profile import Kernel, Kernels, LayerTime, Profile, check_profile, shared_seconds
from d5suite.network.layers import stages
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD
from d5suite.passes.base import PreparedStep, take
from d5suite.passes.layers import Layers, check_step, part_of
from d5suite.report.layers import LayerRow, comparisons, not_joined, not_told_apart, reorders
from d5suite.report.reading import load_results
from tests.conftest import made_once, plugin_environment
from tests.passes.test_from_outside import RECIPE

pytestmark = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

BACKENDS = ("onnxruntime", "wrong:slow", "wrong:misnamed")
"""``wrong:slow`` is PyTorch, with one layer that sleeps."""


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder, env=plugin_environment() | {"COLUMNS": "80"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(factory: pytest.TempPathFactory, backends: str, measurement: str, file: str) -> Path:
    """Return a folder with the recipe's results of a measurement."""

    def made() -> str:
        folder = factory.mktemp("layers")
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_small.py").write_text(RECIPE)
        _run(folder, "pytest", "-p", "no:cacheprovider", "-q", "test_small.py", "--jobs", "jobs", "--passes", "layers",
             "--backend", backends, "-k", measurement, "--benchmark-json", file)  # fmt: skip
        return str(folder)

    return Path(made_once(factory, f"layers-{measurement}", made))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured(tmp_path_factory, ",".join(BACKENDS), "inference", "inference.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured(tmp_path_factory, "torch", "training_step", "training.json")


@pytest.mark.slow
@pytest.mark.alone
def test_a_slow_layer_is_at_the_top_on_its_backend_only(result: Path) -> None:
    (found,) = comparisons(load_results(result / "inference.json"))
    assert found.title == "small/inference" and set(found.parts) == {"onnxruntime", "wrong:slow"}
    slow = max(found.rows, key=lambda row: row.difference)  # others are microseconds apart, on a quiet machine
    assert "c3" in slow.nodes and slow.direction == "forward"
    assert slow.seconds["wrong:slow"] >= 0.02
    assert max(slow.seconds, key=slow.seconds.__getitem__) == "wrong:slow" and slow.fastest < 0.02
    shown = _run(result, "d5suite.cli", "layers", "inference.json", "--top", "3", "--sort", "difference")
    first = shown[shown.index("\nnode") :].splitlines()[2]
    assert first.startswith("c3"), shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_fused_nodes_have_one_row(result: Path) -> None:
    (found,) = comparisons(load_results(result / "inference.json"))
    fused = [each["nodes"] for each in found.parts["onnxruntime"]["times"] if len(each["nodes"]) > 1]
    assert fused
    rows = {row.nodes: row for row in found.rows}
    for nodes in fused:
        own = [each for each in found.parts["wrong:slow"]["times"] if each["nodes"][0] in nodes]
        assert rows[tuple(nodes)].seconds["wrong:slow"] == pytest.approx(sum(each["seconds"] for each in own))


@pytest.mark.slow
def test_what_a_profile_says_wrongly_is_missing(result: Path) -> None:
    (found,) = comparisons(load_results(result / "inference.json"))
    why = "breaks clause 'profile.nodes' of the contract: the network has no node 'conv_of_another_network'"
    assert why in found.missing["wrong:misnamed"]
    assert "wrong:misnamed: no layer times:" in _run(result, "d5suite.cli", "layers", "inference.json")


GOOD = Profile(
    (LayerTime(("c1",), "forward", 1e-3), LayerTime(("c1",), "backward", 2e-3)), {"optimizer": 1e-3}, 4e-3, "-"
)


@pytest.mark.parametrize(
    ("layers", "other", "message"),
    [
        pytest.param((LayerTime(("c1", "x"), "forward", 0),), {}, "the network has no node 'x'", id="unknown"),
        pytest.param((LayerTime((), "forward", 0),), {}, "a time belongs to no node", id="nobody's"),
        pytest.param((LayerTime(("c1",), "sideways", 0),), {}, "'sideways' is no direction", id="direction"),
        pytest.param((LayerTime(("c1",), "forward", 0),) * 2, {}, "c1 has two times in the forward", id="twice"),
        pytest.param((LayerTime(("c1",), "forward", -1e-3),), {}, "node c1, forward, took -0.001 s", id="negative"),
        pytest.param((LayerTime(("c1",), "forward", float("nan")),), {}, "took nan s", id="nan"),
        pytest.param((), {"optimizer": -1e-3}, "optimizer took -0.001 s", id="negative other"),
        pytest.param(
            (LayerTime(("c1",), "forward", 3e-3),), {"optimizer": 1.3e-3},
            "the times add up to 4.3 ms, and the profiled step took 4 ms", id="too much",
        ),
    ],
)  # fmt: skip
def test_times_that_cannot_be_true_are_refused(
    layers: tuple[LayerTime, ...], other: dict[str, float], message: str
) -> None:
    network = build("lenet5", image_size=32, classes=10)
    check_profile("liar", GOOD, network)
    with pytest.raises(ContractError, match=re.escape(message)):
        check_profile("liar", replace(GOOD, layers=layers, other=other), network)


def test_a_time_is_the_median_of_three_profiles_with_their_range() -> None:
    def taken(c1: float, *others: LayerTime) -> Profile:
        return replace(GOOD, layers=(LayerTime(("c1",), "forward", c1), *others), step_seconds=c1 + 1e-3)

    part = part_of([taken(1e-3), taken(9e-3), taken(2e-3, LayerTime(("c2",), "forward", 1e-3))], 9, 3e-3, {})
    c1, c2 = part["times"]
    assert (c1["seconds"], c1["range"]) == (2e-3, [1e-3, 9e-3]) and (c2["seconds"], c2["range"]) == (0, [0, 1e-3])
    assert part["step_s"] == 3e-3 and part["coverage"] == pytest.approx(2 / 3) and part["slowdown"] == 1


def test_events_that_a_profiler_lost_are_counted_and_said() -> None:
    """Planted: two of three profiles have lost events."""
    part = part_of([replace(GOOD, dropped=lost) for lost in (0, 1200, 3)], 9, 3e-3, {})
    assert part["dropped"] == 1203
    assert part["notes"] == ["the profiler lost 1,203 events: times of some nodes are too short"]
    assert part_of([GOOD] * 3, 9, 3e-3, {})["notes"] == []


def test_a_backend_without_a_profile_says_why() -> None:
    given = replace(discover()[0]["torch"], absent={"profile": "it has none"})
    workload = SimpleNamespace(backend=given, job=SimpleNamespace(ranks=1))
    step = PreparedStep(workload, SimpleNamespace(takes_layers=True), None, None)  # type: ignore[arg-type]
    assert take(Layers(), step) == {"missing": "torch has no profile: it has none"}


def test_what_cannot_be_told_apart_is_said() -> None:
    """Planted: two layers whose profiles overlap, and one that is always longer."""

    def row(name: str, fast: tuple[float, float], slow: tuple[float, float]) -> LayerRow:
        ranges = {"a": fast, "b": slow}
        seconds = {backend: sum(each) / 2 for backend, each in ranges.items()}
        return LayerRow((name,), "forward", name, "Conv", "", seconds, ranges, None, None, {})

    rows = [row("long", (8, 9), (8.5, 10)), row("equal", (1, 1.2), (5, 7)), row("same", (1, 2), (4, 6))]
    assert [[each.label for each in group] for group in not_told_apart(rows)] == [["equal", "same"]]
    assert [each.tells_backends_apart for each in rows] == [False, True, True]


def test_a_profiled_step_is_as_long_as_the_steps_that_ran() -> None:
    check_step("honest", GOOD, [3.9e-3, 4.1e-3])
    for wrong in (replace(GOOD, step_seconds=0.4e-3), replace(GOOD, step_seconds=40e-3)):
        with pytest.raises(ContractError, match="is said to have taken"):
            check_step("liar", wrong, [3.9e-3, 4.1e-3])


@pytest.mark.parametrize("name", ["deep500", "torch"])
def test_a_training_step_is_divided_and_left_as_it_was(name: str, tmp_path: Path) -> None:
    network, given = build("lenet5", image_size=32, classes=10), backend(name)
    executor = given.executor(network)
    trainer = given.trainer(executor, SGD(learning_rate=0.01))
    rng = np.random.default_rng(0)
    feed = executor.feed(
        {"image": rng.standard_normal((4, 1, 32, 32)).astype(np.float32), "label": rng.integers(0, 10, 4)}
    )
    before = {key: value for key, value in vars(executor).items() if callable(value)}
    found = given.load("profile").profile(executor, lambda: trainer.step(feed), 2, tmp_path, trainer)
    check_profile(name, found, network)
    assert {key: value for key, value in vars(executor).items() if callable(value)} == before
    assert found.other["optimizer"] > 0
    assert ("deep500's graph" in found.other) == (name == "deep500")
    timed = {(layer.nodes, layer.direction): layer.calls for layer in found.layers}
    for direction in ("forward", "backward"):
        for node in network.nodes:
            if node.op_type != "Flatten":  # a view
                assert timed[(node.name,), direction] >= 1, (node.name, direction)


def test_nothing_is_labelled_unless_a_profile_is_taken() -> None:
    from torch.profiler import ProfilerActivity, profile

    network = build("lenet5", image_size=32, classes=10)
    executor = backend("torch").executor(network)
    feed = executor.feed({"image": np.zeros((2, 1, 32, 32), np.float32)})
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        executor.forward(feed)
    assert not [event for event in recorded.events() if event.name.startswith("d5suite")]


def test_a_training_step_has_both_directions_and_the_optimizer(trained: Path) -> None:
    (found,) = comparisons(load_results(trained / "training.json"))
    for part in found.parts.values():
        assert part["other"]["optimizer"] > 0
        assert 0.3 < part["coverage"] <= 1.05
        total = sum(each["seconds"] for each in part["times"]) + sum(part["other"].values()) + part["left_over_s"]
        assert total == pytest.approx(part["step_s"])
        assert part["plain_step_s"] > 0 and part["dropped"] == 0
    directions = {(row.nodes, row.direction) for row in found.rows}
    assert {(("c3",), "forward"), (("c3",), "backward"), (("loss",), "backward")} <= directions
    conv = next(row for row in found.rows if row.nodes == ("c3",) and row.direction == "forward")
    assert conv.flops == 2 * 8 * 16 * 10 * 10 * 6 * 5 * 5
    if any(each.get("kernels") for each in found.parts["torch"]["times"]):  # oneDNN is there
        assert conv.kernels["torch"]


def test_rows_are_written_and_shown_on_the_page(trained: Path) -> None:
    _run(trained, "d5suite.cli", "layers", "training.json", "--csv", "rows.csv", "--json", "rows.json")
    rows: list[Any] = json.loads((trained / "rows.json").read_text())[0]["rows"]
    lines = (trained / "rows.csv").read_text().splitlines()
    assert len(lines) == 1 + sum(len(row["seconds"]) for row in rows)
    assert lines[0].startswith(
        "case,measurement,nodes,operator,stage,direction,backend,seconds,least_seconds,most_seconds,"
    )
    _run(trained, "d5suite.cli", "report", "training.json", "-o", "page.html")
    page = (trained / "page.html").read_text()
    assert 'id="layers"' in page and "Conv, backward" in page


def test_a_result_without_layer_times_is_refused(trained: Path, tmp_path: Path) -> None:
    content = json.loads((trained / "training.json").read_text())
    for each in content["benchmarks"]:
        del each["extra_info"]["d5suite"]["layers"]
        del each["extra_info"]["d5suite"]["passes"]
    (tmp_path / "bare.json").write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "layers", str(tmp_path / "bare.json")],
        env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert "there are no layer times here" in done.stderr and "--passes layers" in done.stderr


def test_times_of_threads_are_divided_among_those_that_run() -> None:
    events = [(0.0, 4.0, "a"), (1.0, 3.0, "b"), (2.0, 3.0, "b"), (6.0, 7.0, "a"), (7.0, 7.0, "c")]
    assert shared_seconds(events) == pytest.approx({"a": 4.0, "b": 1.0})


def test_stages_are_parts_of_names_of_at_most_half_the_nodes() -> None:
    names = ["stem", *(f"encoder.layers.{block}.{part}" for block in range(3) for part in "abc"), "head"]
    assert set(stages(names).values()) == {"stem", "head", *(f"encoder.layers.{block}" for block in range(3))}


LINES = """onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2
d5suite mark forward conv
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32::blocked:abcd::f0 dst:f32::blocked:Acdb16a::f0,attr-scratchpad:user,,16x3x3x3,0.5
onednn_verbose,v1,primitive,exec,cpu,convolution,brgconv:avx512_core,forward_training,src:f32:a:blocked:acdb::f0 wei:f32:a:blocked:Acdb16a::f0 bia:undef::undef::: dst:f32:a:blocked:acdb::f0,attr-scratchpad:user,alg:convolution_direct,mb8_ic3oc16,2
d5suite mark
dnnl_verbose,exec,cpu,convolution,jit:avx512_common,forward_inference,src_f32::blocked:abcd:f0 wei_f32::blocked:Acdb16a:f0 dst_f32::blocked:aBcd16b:f0,,alg:convolution_direct,mb8_ic3oc16,0.25
dnnl_verbose,exec,cpu,convolution,jit:avx512_common,forward_inference,src_f32::blocked:abcd:f0 wei_f32::blocked:Acdb16a:f0 dst_f32::blocked:aBcd16b:f0,,alg:convolution_direct,mb8_ic3oc16,0.25
onednn_verbose,v1,primitive,exec,cpu,convolution,cut off
"""  # noqa: E501  lines as oneDNN writes them


def test_verbose_lines_of_old_and_new_onednn_are_read() -> None:
    found = kernels_by_owner(LINES.splitlines())
    reorder, convolution = found["forward conv"]
    assert reorder.reorder and reorder.seconds == pytest.approx(5e-4) and reorder.layouts == "src:abcd dst:Acdb16a"
    assert (convolution.primitive, convolution.implementation) == ("convolution", "brgconv:avx512_core")
    assert convolution.layouts == "src:acdb wei:Acdb16a dst:acdb" and not convolution.reorder
    (twice,) = found[""]
    assert twice.calls == 2 and twice.seconds == pytest.approx(5e-4)
    assert twice.layouts == "src:abcd wei:Acdb16a dst:aBcd16b"
    assert kernel_of("onednn_verbose,v1,info,cpu,isa:Intel AVX-512") is None


def test_a_mark_may_follow_what_it_marks() -> None:
    lines = [line.replace("d5suite mark forward conv", "d5suite mark forward norm") for line in LINES.splitlines()]
    found = kernels_by_owner([*lines[2:4], "d5suite mark forward conv", *lines[5:7], "d5suite mark forward pool",
                              lines[2]], marks_follow=True)  # fmt: skip
    assert {owner: [each.primitive for each in own] for owner, own in found.items()} == {
        "forward conv": ["reorder", "convolution"], "forward pool": ["convolution"], "": ["reorder"],
    }  # fmt: skip


def test_a_kernel_belongs_to_what_ran_at_its_time_and_is_never_joined_by_guess() -> None:
    """Planted: a kernel while two nodes run, and one while none does."""

    def line(milliseconds: float, took: float, primitive: str) -> str:
        layouts = "src:f32::blocked:abcd::f0 dst:f32::blocked:acdb::f0"
        return f"onednn_verbose,v1,{milliseconds:.6f},primitive,exec,cpu,{primitive},jit,undef,{layouts},,,2x3,{took}"

    at = 1_795_769_000_000.0
    told = [line(at + 1, 0.5, "convolution"), line(at + 3, 1, "pooling"), line(at + 20, 1, "eltwise"),
            line(at + 7, 1, "reorder"), line(at + 7, 1, "reorder")]  # fmt: skip
    spans: dict[str, list[tuple[float, float]]] = {"a": [(0, 2), (6.5, 9)], "b": [(3.2, 6), (3.1, 5)], "c": [(3, 4)]}
    intervals = [Interval((at + s) * 1e6, (at + e) * 1e6, what) for what, each in spans.items() for s, e in each]
    found = kernels_by_time(told, intervals)
    assert {what: [(each.primitive, each.calls) for each in own] for what, own in found.items()} == {
        "a": [("convolution", 1), ("reorder", 2)], "": [("pooling", 1), ("eltwise", 1)],
    }  # fmt: skip
    network = build("lenet5", image_size=32, classes=10)
    first = network.nodes[0].name
    kernels = kernels_of(network, found, {"a": Owner((0,), backward=True)})
    assert list(kernels.of) == [((first,), "backward")]
    part = part_of([replace(GOOD, layers=(LayerTime((first,), "backward", 1e-3),))], 1, 3e-3, {}, kernels)
    (time,) = part["times"]
    assert time["reorders"] == 2 and time["reorder_s"] == pytest.approx(2e-3)
    assert [each["primitive"] for each in part["kernels_apart"]] == ["pooling", "eltwise"]
    assert reorders(part) == pytest.approx((2, 2e-3)) and not_joined(part) == "1 pooling 1 ms, 1 eltwise 1 ms"
    others = Kernels({(("fc9",), "forward"): (Kernel("reorder", "jit", reorder=True, seconds=1e-3),)})
    assert reorders(part_of([GOOD], 1, 3e-3, {}, others)) == (1, 1e-3)  # of nodes without a time


def test_a_process_that_fails_leaves_the_kernels_unknown(tmp_path: Path) -> None:
    asked = Repeated(build("lenet5", image_size=32, classes=10), "graph", "fp32", 1, False, {})
    with pytest.raises(BackendError, match=r"oneDNN's kernels are not known: .*No module named"):
        asked.lines("d5suite.no_such_module", tmp_path)
