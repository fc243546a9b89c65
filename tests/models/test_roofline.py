"""Ceilings as machine files hold them, and places under them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import MemoryLevel, Roof, other_machine, read_ceilings
from d5suite.models.machine import read_machine
from d5suite.models.roofline import RooflineStep, TimedWork, explained, place, place_all, trajectories

EXAMPLE = Path(__file__).parents[2] / "examples" / "machines" / "a100-40gb.json"
ROOF = Roof(100.0, (MemoryLevel("L1", 8, 40.0), MemoryLevel("L2", 64, 20.0), MemoryLevel("memory", 0, 10.0)))


def written(path: Path, *entries: dict[str, Any], **more: Any) -> Path:
    path.write_text(json.dumps({"schema": "d5suite-machine-1", "name": "here", "ceilings": list(entries), **more}))
    return path


@pytest.mark.parametrize(
    ("work", "level", "bound", "ideal_s"),
    [
        (TimedWork(1000, 8, 1), "L1", "arithmetic", 10.0),
        (TimedWork(1, 8, 1), "L1", "L1", 0.2),
        (TimedWork(1, 9, 1), "L2", "L2", 0.45),
        (TimedWork(0, 65, 1), "memory", "memory", 6.5),
    ],
)
def test_the_smallest_level_that_holds_the_bytes_bounds(
    work: TimedWork, level: str, bound: str, ideal_s: float
) -> None:
    placed = place(work, ROOF)
    assert (placed.level, placed.bound) == (level, bound) and placed.ideal_s == pytest.approx(ideal_s)
    assert placed.above == (ideal_s > 1.05)


def test_a_step_is_bound_by_what_its_nodes_take_longest_for() -> None:
    placed = place_all([TimedWork(1000, 8, 0), TimedWork(0, 65, 0), TimedWork(0, 65, 0)], 30.0, ROOF)
    assert placed.ideal_s == pytest.approx(23) and placed.bound == "memory" and placed.work.flops == 1000


def test_segments_add_up_and_name_what_explains_them() -> None:
    steps = [
        RooflineStep(1, 4, TimedWork(100, 10, 1.0)),
        RooflineStep(2, 4, TimedWork(100, 10, 0.8)),
        RooflineStep(2, 8, TimedWork(200, 12, 1.0)),
    ]
    kinds = {line[0].kind: line for line in trajectories(steps)}
    assert set(kinds) == {"strong", "weak", "size"}
    for line in kinds.values():
        for each in line:
            assert each.rate == pytest.approx(each.intensity * each.bandwidth)
    assert "serial part 60%" in explained(kinds["strong"][0])
    assert "efficiency 100%" in explained(kinds["weak"][0])
    assert "mostly locality" in explained(kinds["size"][0])
    images = [
        RooflineStep(1, 4, TimedWork(100, 10, 1.0), image=32),
        RooflineStep(1, 4, TimedWork(400, 30, 3.0), image=64),
    ]
    ((segment,),) = trajectories(images)
    assert segment.kind == "image" and segment.knob == 2 and "images 32 → 64, batch 4" in explained(segment)
    slower = trajectories([steps[0], RooflineStep(2, 4, TimedWork(100, 10, 1.2))])
    assert "more threads do not help" in explained(slower[0][0])


def test_a_file_by_hand_has_the_ceilings_of_its_figures() -> None:
    found = read_ceilings(EXAMPLE)
    roof = found.roof(device="cuda", precision="bf16", threads=7)
    assert isinstance(roof, Roof) and roof.flops_per_s == 312e12 and roof.levels[0].name == "memory"
    assert "no ceiling of arithmetic in fp32" in str(found.roof(device="cuda", precision="fp32", threads=7))
    assert other_machine(found.host, {"cpu": {"model": "any"}}, "cpu", "") is None


def test_ceilings_are_of_their_threads_and_device(tmp_path: Path) -> None:
    one = {"what": "flops", "precision": "fp32", "threads": 1, "device": "cpu", "value": 1.0, "source": "x"}
    path = written(tmp_path / "m.json", one, {"what": "bandwidth", "value": 1.0, "source": "x"})
    found = read_ceilings(path)
    assert isinstance(found.roof(device="cpu", precision="fp32", threads=1), Roof)
    for device, precision, threads in (("cpu", "fp32", 2), ("cpu", "bf16", 1), ("cuda", "fp32", 1)):
        assert isinstance(found.roof(device=device, precision=precision, threads=threads), str)
    cache = {"what": "bandwidth", "level": "L3", "capacity_bytes": 8, "value": 1.0, "source": "x"}
    roof = read_ceilings(written(path, one, cache)).roof(device="cpu", precision="fp32", threads=1)
    assert isinstance(roof, Roof) and "memory has no ceiling" in roof.notes[0]
    with pytest.raises(ConfigurationError, match="has measured ceilings, but none of the figures of devices"):
        read_machine(path)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"what": "speed", "value": 1, "source": "x"}, "a ceiling's 'what' is one of"),
        ({"what": "flops", "source": "x"}, "this ceiling has no value"),
        ({"what": "flops", "value": -1, "source": "x"}, "-1 is not a positive number"),
        ({"what": "flops", "value": True, "source": "x"}, "True is not a positive number"),
        ({"what": "flops", "value": 1, "source": " "}, "this ceiling has no source"),
        ({"what": "flops", "value": 1, "source": "x", "threads": "all"}, "'all' is not a positive number"),
        ({"what": "flops", "value": 1, "source": "x", "precision": 32}, "this must be text"),
    ],
)
def test_a_bad_ceiling_is_refused_where_it_stands(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        read_ceilings(written(tmp_path / "m.json", {"what": "storage", "value": 1, "source": "x"}, entry))
    assert "ceilings.1" in str(caught.value)


def test_a_file_without_ceilings_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="d5suite machine -o FILE"):
        read_ceilings(written(tmp_path / "m.json"))


def test_more_threads_and_nearer_levels_are_at_least_as_fast(tmp_path: Path) -> None:
    """Planted: on two threads, L2 and memory were measured slower than on one, L2 than L3, too."""
    rates = {1: {"L1": 200.0, "L2": 110.0, "L3": 100.0, "memory": 50.0}, 2: {"L1": 20.0, "L2": 90.0, "L3": 190.0}}
    rates[2]["memory"] = 30.0
    entries = [
        {"what": "flops", "precision": "fp32", "threads": threads, "device": "cpu", "value": 100.0 / threads,
         "source": "x"} for threads in (1, 2)
    ] + [
        {"what": "bandwidth", "level": level, "capacity_bytes": size * threads, "threads": threads, "device": "cpu",
         "value": rates[threads][level], "source": "x"}
        for threads in (1, 2) for level, size in (("L1", 8), ("L2", 64), ("L3", 512), ("memory", 0))
    ]  # fmt: skip
    found = read_ceilings(written(tmp_path / "m.json", *entries))
    one, two = (found.roof(device="cpu", precision="fp32", threads=threads) for threads in (1, 2))
    assert isinstance(one, Roof) and isinstance(two, Roof)
    assert [each.bytes_per_s for each in one.levels] == [200, 110, 100, 50] and not one.notes
    assert [each.bytes_per_s for each in two.levels] == [200, 190, 190, 50] and two.flops_per_s == 100
    assert [each.capacity_bytes for each in two.levels] == [16, 128, 1024, 0]
    said = "; ".join(two.notes)
    assert "memory: measured slower than on fewer threads" in said and "L2: measured slower than L3" in said
    assert "arithmetic: measured slower than on fewer threads" in said and "L3" not in said.replace("than L3", "")
