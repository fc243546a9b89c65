"""Spaces of knobs: conditions, contradictions, and what a candidate sets."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from d5suite.backends import discover
from d5suite.errors import ConfigurationError
from d5suite.instruments.environment import VARIABLES
from d5suite.job import Distributed, Ranks
from d5suite.levels.knobs import MODE, TuningKnob, flag_knob, variable_knob
from d5suite.session.results import Wanted
from d5suite.tuning.common import common_knobs, loader_knobs, rank_knobs
from d5suite.tuning.profiles import space_of
from d5suite.tuning.space import Change, Space
from d5suite.tuning.trials import with_ranks

A = TuningKnob("a", ("0", "1"), "a test", variable="A")
B = variable_knob("B", ("x", "y"), "a test", a=("1",))
C = variable_knob("C", ("z",), "a test", B=("x",))


def test_a_knob_without_an_effect_has_its_default() -> None:
    space = Space((A, B, C))
    assert space.default == ("0", "", "")
    assert space.complete({"B": "x", "C": "z"}) == space.default
    assert space.complete({"a": "1", "B": "x", "C": "z"}) == ("1", "x", "z")
    assert space.changed(("1", "x", "z"), a="0") == space.default
    assert space.size() == len(list(space.candidates())) == 1 + 4
    assert list(space.moves(("1", "", ""))) == [("0", "", ""), ("1", "x", ""), ("1", "y", "")]


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ((A, A), "two knobs of this name"),
        ((TuningKnob("a", ("0",), ""),), "two values or more"),
        ((TuningKnob("a", ("0", "0"), ""),), "two values or more, all different"),
        ((B, A), "depends on 'a', which is not before it"),
        ((A, variable_knob("B", ("x",), "", a=("2",))), "depends on a being '2', which never is"),
        ((A, B, variable_knob("D", ("z",), "", a=("0",), B=("x",))), "conditions contradict each other"),
    ],
)
def test_a_contradiction_is_named(knobs: tuple[TuningKnob, ...], what: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(what)):
        Space(knobs)


def test_an_unknown_knob_or_value_is_refused() -> None:
    space = Space((A, B))
    with pytest.raises(ConfigurationError, match="there is no knob 'b'"):
        space.complete({"b": "x"})
    with pytest.raises(ConfigurationError, match="a has no value '2'"):
        space.complete({"a": "2"})


def test_knobs_of_one_variable_are_joined_with_the_users() -> None:
    flags = [flag_knob(name, "FLAGS", {"on": f"--{name}=1"}, "a test") for name in ("one", "two")]
    threads = TuningKnob("threads", ("2", "1"), "a test")
    batch = TuningKnob("batch_size", ("8", "16"), "a test")
    space = Space((TuningKnob(MODE, ("m", "n"), "a test"), *flags, threads, batch))
    assert space.change(space.default, {"FLAGS": "--mine"}) == Change()
    found = space.change(("n", "on", "on", "1", "16"), {"FLAGS": "--mine"})
    assert (found.mode, found.settings) == ("n", {"threads": 1, "batch_size": 16})
    assert found.environment == {"FLAGS": "--mine --one=1 --two=1"}
    assert found.items == pytest.approx(0.6931, abs=1e-3)


def test_libraries_are_knobs_where_they_are(tmp_path: Path) -> None:
    names = [each.name for each in common_knobs(2, 2, [tmp_path])]
    assert "allocator" not in names and "openmp" not in names
    for name in ("libjemalloc.so.2", "libiomp5.so"):
        (tmp_path / name).touch()
    found = {each.name: each for each in common_knobs(2, 4, [tmp_path])}
    assert found["threads"].values == ("2", "4", "1")
    assert found["allocator"].texts == {"jemalloc": str(tmp_path / "libjemalloc.so.2")}
    assert found["MALLOC_CONF"].when == {"allocator": ("jemalloc",)}
    space = Space(tuple(found.values()))
    both = space.change(space.complete({"allocator": "jemalloc", "openmp": "intel"}), {})
    assert both.environment["LD_PRELOAD"] == f"{tmp_path / 'libjemalloc.so.2'}:{tmp_path / 'libiomp5.so'}"


@pytest.mark.parametrize("name", ["torch", "tensorflow", "keras", "mxnet", "jax", "deep500", "onnxruntime"])
def test_each_backend_says_what_can_be_tuned(name: str) -> None:
    backend = discover()[0][name]
    for knob in backend.knobs():
        assert len(knob.source) > 10, knob.name
        if knob.variable:  # a result must show it
            assert knob.variable in VARIABLES | set(backend.variables), f"{knob.variable} is not recorded"
        elif knob.name == MODE:
            assert set(knob.values) <= set(backend.modes) and knob.default == backend.default_mode
    assert space_of(backend, threads=2).size() > 1


def test_loaders_and_ranks_have_knobs_of_their_own() -> None:
    workers, ahead = loader_knobs(2, 4)
    assert workers.values == ("2", "1", "4") and ahead.variable == "D5SUITE_PREFETCH"
    ranks = Ranks(2, Distributed(communicator="gloo", launcher="process"))
    found = {each.name: each for each in rank_knobs(ranks, discover()[0]["torch"])}
    schemes = found["scheme"].values
    assert schemes[0] == "all_reduce" and "all_reduce:bucket_bytes=4194304" in schemes
    assert "parameter_server" in schemes and not {"gossip", "top_k", "asynchronous"} & set(schemes)
    assert {"ddp", "ddp:static_graph=true", "ddp:bucket_mib=100.0"} <= set(schemes)
    assert "ddp" not in found["algorithm"].when["scheme"] and "ring" in found["algorithm"].values
    names = [each.name for each in (*found.values(), workers, ahead)]
    assert Space((*found.values(), workers, ahead)).places.keys() == set(names)


def test_a_candidate_changes_how_ranks_train_together() -> None:
    how = Distributed("all_reduce", {}, "gloo", "ring", "process")
    part: Any = SimpleNamespace(name="c")
    wanted = Wanted(part, part, part, Ranks(2, how))
    found = with_ranks(wanted, {"scheme": "ddp:static_graph=true:bucket_mib=5.0", "algorithm": "native"}).ranks
    assert found is not None and found.size == 2
    assert found.distributed == Distributed("ddp", {"static_graph": True, "bucket_mib": 5.0}, "gloo", "native",
                                            "process", native=True)  # fmt: skip
    assert with_ranks(wanted, {}) == wanted


def test_places_are_a_knob_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages of two cores, each with two threads."""
    monkeypatch.setattr("d5suite.instruments.threads._core_of", lambda cpu: (cpu // 2 % 2, cpu % 2))
    monkeypatch.setattr("d5suite.instruments.threads.allowed_cpus", lambda: list(range(8)))
    found = {each.name: each for each in common_knobs(2, 8, [])}
    assert found["D5SUITE_PLACEMENT"].values == ("", "siblings", "packages")
    monkeypatch.setattr("d5suite.instruments.threads._core_of", lambda cpu: (0, cpu))
    assert "D5SUITE_PLACEMENT" not in {each.name for each in common_knobs(2, 8, [])}
