"""What was timed is proved: an adapter that goes wrong with time passes the proof before timing,
and its samples are set aside.

Workers run as processes do, all in one interpreter, so that the framework is imported once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest

from d5suite.backends import discover
from d5suite.network.builder import Builder
from d5suite.network.operation import Operation
from tests.conftest import made_once, run_several

pytestmark = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

NETWORK = ["inference", "gradient", "training_step"]
OPERATOR = ["forward", "backward"]
FETCHED = "work outside the clock, when"
OUTSIDE = "work outside the clock, when feeding or fetching"
REMEMBERED = "answers remembered instead of computed"

SAMPLING = {"max_time_s": 0.02, "min_rounds": 30, "warmup": "off"}

# By mode: what fails, with a part of its message; all else passes.
NETWORK_FAULTS: dict[str, dict[str, str]] = {
    "right": {},
    "replay3": {"inference": "output of batch 2, timed", "gradient": "loss of"},
    "replay8": {
        "inference": "output of batch 2, timed",
        "gradient": "loss of",
        "training_step": "a batch never fed before",
    },
    "replay20": {
        "inference": "output of batch 2, timed",
        "gradient": "loss of",
        "training_step": "a batch never fed before",
    },
    "timed": {"inference": "output of batch 2, timed", "gradient": "loss of", "training_step": "the first timed steps"},
    "cached": {"inference": "output of batch", "gradient": "loss of", "training_step": "updates left out"},
    "half": {"inference": "output of batch", "gradient": "loss of", "training_step": "a batch never fed before"},
    "remembers": {"inference": REMEMBERED, "gradient": REMEMBERED},
    "recognizes": {"inference": REMEMBERED, "gradient": REMEMBERED},
    "timed_update": {"training_step": "parameters after 2 timed steps"},
    "stops": {"training_step": "update by a batch never fed before"},
    "halts": {"training_step": "update by timed step"},
    "captures": {"training_step": "of timed step"},
    "alternates": {"training_step": "update by timed step"},
    "quarters": {"training_step": "of timed step"},
    "promises": dict.fromkeys(NETWORK, FETCHED),
    "promises20": dict.fromkeys(NETWORK, FETCHED),
    "looks_up": {"inference": OUTSIDE},
    "narrow": {"training_step": "held in 16 bits"},
    "late_rate": {"training_step": "update by a batch never fed before"},
    "overflows": {"training_step": "training diverged while it was timed: the optimizer's velocity/"},
}

DECAY_FAULTS: dict[str, dict[str, str]] = {
    "right": {},
    "undecayed": {"training_step": "decay of vectors left out by timed step"},
}
"""With weight decay."""

STATISTICS = ("frozen",)
"""Modes whose running statistics are wrong in float32 alone."""

DROPOUT_FAULTS: dict[str, dict[str, str]] = {
    "right": {},
    "replay8": {"gradient": "ignores its input", "training_step": "ignores its input"},
    "timed": {"training_step": "vs the same draws untimed"},
    "half": {"gradient": "vs before timing", "training_step": "vs the same draws untimed"},
}

LARGE_FAULTS: dict[str, dict[str, str]] = {
    "right": {},
    "few": {
        "gradient": "loss of forward and backward on a batch (few fp32) vs the batch in reverse",
        "training_step": "of a step on a batch (few fp32) vs the batch in reverse",
    },
    "timed_few": {"gradient": "loss of timed forward and backward on whole batch 1 (timed_few fp32) vs the batch in"},
}

ACCURACY = "time_to_accuracy"
ACCURACY_FAULTS: dict[str, dict[str, str]] = {
    "right": {},
    "replay8": {ACCURACY: "output at the trained weights"},
    "cached": {ACCURACY: "output at the trained weights"},
    "half": {ACCURACY: "output at the trained weights"},
    "hasty": {ACCURACY: "of 2 steps, back to back"},
    "stops": {ACCURACY: "update by a batch never fed before"},
}
"""The target is one that chance reaches."""

BREAKDOWN = "step_breakdown"
BREAKDOWN_FAULTS: dict[str, dict[str, str]] = {
    "right": {},
    "replay8": {BREAKDOWN: "output at the trained weights"},
    "timed_both": {BREAKDOWN: "last timed forward and backward"},
    "timed_forward": {BREAKDOWN: "last timed forward (timed_forward fp32) vs the same call untimed"},
    "timed_step": {BREAKDOWN: "losses of the first timed steps"},
    "cached": {BREAKDOWN: "output at the trained weights"},
    "cached_forward": {BREAKDOWN: "output at the trained weights"},
    "cached_both": {BREAKDOWN: "loss of a batch never fed before"},
    "half": {BREAKDOWN: "output at the trained weights"},
    "hasty": {BREAKDOWN: "of 2 steps, back to back"},
    "stops": {BREAKDOWN: "update by a batch never fed before"},
}

OPERATOR_FAULTS: dict[str, dict[str, str]] = {
    "right": {},
    **dict.fromkeys(
        ("replay3", "replay20", "timed", "cached", "half"), dict.fromkeys(OPERATOR, "of the last timed call")
    ),
    "promises": {"forward": FETCHED},
    "promises20": {"forward": FETCHED},
    "looks_up": {"forward": OUTSIDE},
    "remembers": dict.fromkeys(OPERATOR, REMEMBERED),
    "recognizes": dict.fromkeys(OPERATOR, REMEMBERED),
}


REPEATED: dict[str, tuple[str, ...]] = {
    "network": (
        "replay3", "replay20", "recognizes", "captures", "alternates", "promises20", "late_rate",
    ),
    "accuracy": ("replay8", "half", "stops"),
    "breakdown": ("replay8", "cached", "half", "hasty"),
    "operator": ("replay3", "replay20", "half", "promises20", "looks_up", "recognizes"),
}  # fmt: skip
"""Modes whose kind of mistake others stand for in a short run of the tests."""


def modes(kind: str, faults: Mapping[str, Any]) -> list[Any]:
    """Return the modes as parameters; those of `REPEATED` are slow."""
    repeated = REPEATED.get(kind, ())
    return [pytest.param(mode, marks=[pytest.mark.slow] * (mode in repeated)) for mode in faults]


def dropping_network() -> onnx.ModelProto:
    """A network with Dropout, without label and loss."""
    b = Builder("dropping", seed=0, image_size=32)
    x = b.flatten(b.global_average_pool(b.relu(b.conv(b.image, "conv", 32, 3, stride=2)), "pool"), "flatten")
    model = onnx.ModelProto()
    model.CopyFrom(b.classifier(b.linear(b.dropout(x, "drop"), "fc", 4)).model)
    del model.graph.node[-1], model.graph.output[-1], model.graph.input[-1]
    return model


def job(mode: str, case: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema": "d5suite-job-3",
        "backend": {"name": "stale", "mode": mode},
        "device": "cpu",
        "precision": "fp32",
        "threads": 1,
        "seed": 0,
        "loader_workers": 0,
        "passes": ["time"],
        "cases": [{"preset": "smoke", "sampling": SAMPLING, **case}],
    }


@pytest.fixture
def found(made: dict[str, Any], attempt: int) -> dict[str, Any]:
    """The worker's results by kind and mode; what a repeated test needs is made again."""
    results: dict[str, Any] = made["results"]
    return results if attempt == 1 else _Again(Path(made["folder"]))


class _Again(dict[str, Any]):
    """Results that are made when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Any:
        self.update(_run([name], self.folder))
        return self[name]


@pytest.fixture(scope="module")
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_onnx: Path, imagenet_tree: Path
) -> dict[str, Any]:
    """All results, and the folder of their jobs; slow tests have theirs only if one is to run."""
    chosen = [each for each in request.session.items if isinstance(each, pytest.Function)]
    every = any(each.module is request.module and each.get_closest_marker("slow") for each in chosen)
    results: dict[str, Any] = made_once(
        tmp_path_factory, "timed", lambda: _results(tmp_path_factory, small_onnx, imagenet_tree, every=every)
    )
    return results


def _results(
    tmp_path_factory: pytest.TempPathFactory, small_onnx: Path, imagenet_tree: Path, *, every: bool
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("jobs")
    network: dict[str, Any] = {
        "kind": "network",
        "name": "small",
        "measurements": NETWORK,
        "network": {"onnx": str(small_onnx), "classes": 4, "image_size": 32},
        "dataset": {"kind": "imagenet", "root": str(imagenet_tree)},
        "batch_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.125, "momentum": 0.5},
        "validation_steps": 3,
        "reference": str(folder / "small.h5"),
    }
    softmax = Operation("Softmax", {"X": (400, 1000)}, {}, name="softmax")
    operator = {"kind": "operation", "name": "softmax", "measurements": OPERATOR, "operation": softmax.to_dict()}
    jobs = {f"operator-{mode}": job(mode, operator) for mode in OPERATOR_FAULTS}
    jobs |= {f"network-{mode}": job(mode, network) for mode in NETWORK_FAULTS}
    onnx.save(dropping_network(), folder / "dropping.onnx")
    measured = {"measurements": NETWORK[1:]}
    dropping = network | measured | {"network": {**network["network"], "onnx": str(folder / "dropping.onnx")}}
    jobs |= {f"dropout-{mode}": job(mode, dropping | {"reference": None}) for mode in DROPOUT_FAULTS}
    large = network | measured | {"batch_size": 16, "validation_steps": 2, "reference": None}
    jobs |= {f"large-{mode}": job(mode, large) for mode in LARGE_FAULTS}
    decayed = {"measurements": ["training_step"], "optimizer": {**network["optimizer"], "weight_decay": 2**-10}}
    jobs |= {f"decay-{mode}": job(mode, network | decayed) for mode in DECAY_FAULTS}
    trained = {
        "measurements": [ACCURACY],
        "training": {
            "target": 0.0, "metric": "top-1 accuracy", "epochs": 8, "runs": 1, "accumulate": 1,
            "schedule": {"name": "cosine", "epochs": 8, "warmup_epochs": 0.0, "warmup_start": 0.0, "final": 0.0},
        },
    }  # fmt: skip
    jobs |= {f"accuracy-{mode}": job(mode, network | trained | {"batch_size": 2}) for mode in ACCURACY_FAULTS}
    parts: dict[str, Any] = network | {"measurements": [BREAKDOWN]}
    parts["sampling"] = SAMPLING | {"min_rounds": 20}  # of three parts each, for which images are read
    jobs |= {f"breakdown-{mode}": job(mode, parts) for mode in BREAKDOWN_FAULTS}
    jobs |= {mode: job(mode, network) for mode in ("unwaited", *STATISTICS)}
    jobs["network-replay3"]["cases"][0]["measurements"] = NETWORK[:2]  # its training fails before it is timed
    if not every:
        jobs = {name: each for name, each in jobs.items() if not _is_repeated(name)}
    for name, content in jobs.items():
        (folder / f"{name}.job.json").write_text(json.dumps(content))
    return {"folder": str(folder), "results": _run(list(jobs), folder)}


def _run(names: Sequence[str], folder: Path) -> dict[str, Any]:
    run_several([["d5suite.worker", str(folder / f"{name}.job.json")] for name in names], folder)
    return {name: json.loads((folder / f"{name}.result.json").read_text()) for name in names}


def _is_repeated(name: str) -> bool:
    kind, _, mode = name.partition("-")
    return mode in REPEATED.get(kind, ())


def require(result: Any, case: str, wrong: Mapping[str, str], measurements: list[str]) -> None:
    assert result["status"] == "done", result["error"]
    right = [name for name in measurements if name not in wrong]
    assert set(result["measurements"]) == {f"{case}/{name}" for name in right}, result["failures"]
    assert set(result["failures"]) == set(result["kept"]) == {f"{case}/{name}" for name in wrong}
    for name, message in wrong.items():
        failure = result["failures"][f"{case}/{name}"]
        assert failure["type"] == "ValidationError", failure
        samples = result["kept"][f"{case}/{name}"]["samples"]["samples_s"]
        counted = samples if "diverged" in message else f"{len(samples)} samples" in failure["message"]
        assert message in failure["message"] and counted, failure


@pytest.mark.parametrize("mode", modes("network", NETWORK_FAULTS))
def test_a_network_that_goes_wrong_while_timed_is_no_result(found: dict[str, Any], mode: str) -> None:
    require(found[f"network-{mode}"], "small", NETWORK_FAULTS[mode], NETWORK[:2] if mode == "replay3" else NETWORK)


def test_updates_that_must_be_waited_for_are_not_timed(found: dict[str, Any]) -> None:
    assert set(found["unwaited"]["measurements"]) == {f"small/{name}" for name in NETWORK[:2]}
    assert not found["unwaited"]["kept"]
    assert "losses of 3 steps, unwaited fp32 vs" in found["unwaited"]["failures"]["small/training_step"]["message"]


@pytest.mark.parametrize("mode", STATISTICS)
def test_running_statistics_are_proved_in_the_timed_precision(found: dict[str, Any], mode: str) -> None:
    failures = found[mode]["failures"]
    assert set(failures) == {f"small/{name}" for name in NETWORK[1:]} and not found[mode]["kept"]
    for failure in failures.values():
        assert f"running statistics ({mode} fp32) vs" in failure["message"], failure


@pytest.mark.parametrize("mode", DROPOUT_FAULTS)
def test_a_network_with_dropout_that_goes_wrong_while_timed_is_no_result(found: dict[str, Any], mode: str) -> None:
    require(found[f"dropout-{mode}"], "small", DROPOUT_FAULTS[mode], NETWORK[1:])


@pytest.mark.parametrize("mode", LARGE_FAULTS)
def test_a_network_that_takes_part_of_a_large_batch_is_no_result(found: dict[str, Any], mode: str) -> None:
    require(found[f"large-{mode}"], "small", LARGE_FAULTS[mode], NETWORK[1:])


@pytest.mark.parametrize("mode", DECAY_FAULTS)
def test_weight_decay_that_leaves_out_vectors_is_no_result(found: dict[str, Any], mode: str) -> None:
    require(found[f"decay-{mode}"], "small", DECAY_FAULTS[mode], ["training_step"])


@pytest.mark.parametrize("mode", modes("accuracy", ACCURACY_FAULTS))
def test_a_training_that_goes_wrong_on_its_way_has_no_time_to_accuracy(found: dict[str, Any], mode: str) -> None:
    require(found[f"accuracy-{mode}"], "small", ACCURACY_FAULTS[mode], [ACCURACY])


@pytest.mark.parametrize("mode", modes("breakdown", BREAKDOWN_FAULTS))
def test_a_part_of_a_step_that_goes_wrong_while_timed_is_no_result(found: dict[str, Any], mode: str) -> None:
    require(found[f"breakdown-{mode}"], "small", BREAKDOWN_FAULTS[mode], [BREAKDOWN])


@pytest.mark.parametrize("mode", modes("operator", OPERATOR_FAULTS))
def test_an_operator_that_goes_wrong_while_timed_is_no_result(found: dict[str, Any], mode: str) -> None:
    require(found[f"operator-{mode}"], "softmax", OPERATOR_FAULTS[mode], OPERATOR)


def test_repeatability_counts_a_timed_answer(found: dict[str, Any]) -> None:
    extra = found["operator-right"]["measurements"]["softmax/forward"]["extra"]
    assert extra["repeatability"]["identical"] and extra["repeatability"]["reruns"] >= 2
