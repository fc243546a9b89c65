"""``d5suite roofline`` on planted results and machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from d5suite.cli import main
from tests.report.planted import bench, layers, machine, result


def run(tmp_path: Path, *benches: dict[str, Any], options: tuple[str, ...] = (), **roof: Any) -> dict[str, Any]:
    """Run the command on these results, and return its JSON."""
    files = result(tmp_path / "out.json", *benches), machine(tmp_path / "machine.json", **roof)
    answer = tmp_path / "roof.json"
    assert main(["roofline", str(files[0]), "--machine", str(files[1]), "--json", str(answer), *options]) == 0
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def test_nodes_and_step_stand_under_their_roofs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "roof.svg"
    found = run(tmp_path, bench(part=layers()), options=("--svg", str(svg)))
    (one,) = found["rooflines"]
    nodes = {(each["name"], each["direction"]): each for each in one["nodes"]}
    conv, normalization = nodes["conv1", "forward"], nodes["bn1", "forward"]
    assert (conv["level"], conv["bound"]) == ("L3", "arithmetic")  # 40 MB fit, and 25 FLOP/byte exceed 100 / 50
    assert conv["share"] == pytest.approx(0.01 / (0.61 * 0.1 / 3))
    assert (normalization["level"], normalization["bound"]) == ("memory", "memory")  # 200 MB do not fit
    assert normalization["share"] == pytest.approx(0.02 / 0.022)
    assert one["step"]["flops"] == 3_001_000_000 and one["step"]["bytes"] == 320_000_000
    assert one["step"]["share"] == pytest.approx((0.01 + 0.02 + 0.02) / 0.1)
    assert found["bytes"] == "counted" and ("flatten", "forward") not in nodes
    text = capsys.readouterr().out
    assert "bytes are counted" in text and "memory" in text and "roof of 1 thread: 100 GFLOP/s" in text
    drawn = ElementTree.parse(svg).getroot()  # noqa: S314  written above
    assert drawn.tag.endswith("svg") and "FLOP per byte (counted)" in svg.read_text()


def test_a_point_above_its_roof_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = run(tmp_path, bench(part=layers()))["rooflines"][0]
    assert not any(each["finding"] for each in (honest["step"], *honest["nodes"]))
    low = run(tmp_path, bench(part=layers()), memory=5e9)["rooflines"][0]  # planted: half of the true bandwidth
    above = {each["name"]: each["finding"] for each in low["nodes"] if each["finding"]}
    assert set(above) == {"bn1"} and "the ceiling of memory is too low" in above["bn1"]
    assert "! bn1 forward" in capsys.readouterr().out


def test_a_machine_file_of_another_machine_is_refused_or_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = result(tmp_path / "out.json", bench(part=layers())), machine(tmp_path / "machine.json", cpu="another CPU")
    assert main(["roofline", str(files[0]), "--machine", str(files[1])]) == 2
    assert "the CPU of the machine file is another CPU" in capsys.readouterr().err
    assert main(["roofline", str(files[0]), "--machine", str(files[1]), "--other-machine"]) == 0
    assert "* another machine's roof" in capsys.readouterr().out


def test_results_without_counts_or_ceilings_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = result(tmp_path / "out.json", bench()), machine(tmp_path / "machine.json")
    assert main(["roofline", str(files[0]), "--machine", str(files[1])]) == 2
    assert "measure with --passes layers" in capsys.readouterr().err
    result(files[0], bench(part=layers()), bench(threads=3, part=layers()))
    assert main(["roofline", str(files[0]), "--machine", str(files[1])]) == 0
    assert "the machine file has no ceiling of arithmetic in fp32 of 3 threads" in " ".join(
        capsys.readouterr().out.split()
    )


def test_outputs_are_checked_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "no.json", "--machine", "no", "--svg", str(tmp_path / "no" / "a.svg")]) == 2
    text = capsys.readouterr().err
    assert "a.svg" in text and "a fault of d5suite" not in text


def test_trajectories_are_apart_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted: Amdahl's law with a serial part of 40%, and a batch whose weights are read once."""
    benches = [bench(threads=n, step_s=0.1 * (0.4 + 0.6 / n), part=layers()) for n in (1, 2, 4)]
    larger = layers(0.15)
    for node in larger["graph"].values():  # twice the operations, 1.25 times the traffic
        node |= {key: 2 * node[key] for key in ("flops", "backward_flops") if node[key]}
        node |= {key: node[key] * 5 // 4 for key in ("bytes", "backward_bytes") if node[key]}
    benches += [bench(batch=8, step_s=0.15, part=larger), bench(threads=2, batch=8, step_s=0.12, part=larger)]
    found = run(tmp_path, *benches)["trajectories"]
    kinds = {(each["kind"], tuple(each["segments"][0]["batch"])): each["segments"] for each in found}
    assert {kind for kind, _ in kinds} == {"strong", "weak", "size"}
    for each in (segment for line in found for segment in line["segments"]):
        assert each["log2_rate"] == pytest.approx(each["log2_intensity"] + each["log2_bandwidth"], abs=1e-9)
    strong = kinds["strong", (4, 4)]
    assert [each["threads"] for each in strong] == [[1, 2], [2, 4]]
    assert strong[0]["serial_part"] == pytest.approx(0.4) and strong[0]["log2_intensity"] == pytest.approx(0)
    size = next(line["segments"][0] for line in found if line["kind"] == "size")  # of one thread: the fewest first
    assert size["threads"] == [1, 1]
    assert 2 ** size["log2_intensity"] == pytest.approx(1.6, rel=0.01)
    text = " ".join(capsys.readouterr().out.split())
    assert "disturbed" not in text and "strong scaling:" in text and "serial part 40%" in text
    assert "weak scaling:" in text and "batch size:" in text and "mostly locality" in text
    benches[1] = bench(threads=2, step_s=0.07, part=layers(), disturbed="a compiler ran")
    disturbed = [line for line in run(tmp_path, *benches)["trajectories"] if line["kind"] == "strong"]
    assert [each["serial_part"] for each in disturbed[0]["segments"]] == [None, None]
    assert "disturbed, so nothing follows" in " ".join(capsys.readouterr().out.split())
