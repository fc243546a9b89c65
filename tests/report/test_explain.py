"""``d5suite explain`` on planted results: a changed figure changes the sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from tests.report.planted import bench, layers, machine, result


def said(tmp_path: Path, *benches: dict[str, Any], options: tuple[str, ...] = (), case: str = "") -> dict[str, str]:
    """Return the sentences about the training step of the last result, with their figures."""
    path, answer = result(tmp_path / "out.json", *benches), tmp_path / "said.json"
    assert main(["explain", str(path), *([case] if case else []), "--json", str(answer), *options]) == 0
    (*_, last) = [each for each in json.loads(answer.read_text()) if each["measurement"].endswith("training_step")]
    return {each["text"]: ", ".join(each["figures"]) for each in last["sentences"]}


@pytest.mark.parametrize("share", [0.61, 0.37])
def test_the_part_in_convolutions_is_told_with_its_figure(tmp_path: Path, share: float) -> None:
    found = said(tmp_path, bench(part=layers(conv=share)))
    assert found[f"{share:.0%} of the step is in Conv"] == "layers.times, layers.step_s"
    assert found["22% of the step is in BatchNormalization"]
    assert found["10% of the step is optimizer"] == "layers.other.optimizer"


def test_with_ceilings_parts_of_them_are_told(tmp_path: Path) -> None:
    options = ("--machine", str(machine(tmp_path / "machine.json")))
    found = said(tmp_path, bench(part=layers()), options=options)
    assert "61% of the step is in Conv, at 49% of the ceiling of arithmetic" in found
    assert "22% of the step is in BatchNormalization, at 91% of the ceiling of memory" in found
    assert any("at its ceilings Conv would take 31 ms less, and the step be at most 1.45" in each for each in found)
    machine(tmp_path / "machine.json", flops=60e9)  # another ceiling, another sentence
    assert "61% of the step is in Conv, at 82% of the ceiling of arithmetic" in said(
        tmp_path, bench(part=layers()), options=options
    )


def test_what_has_no_figure_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(tmp_path, bench())
    assert len(found) == 1 and next(iter(found)).startswith("a step takes 100 ms")
    text = " ".join(capsys.readouterr().out.split())
    assert "not said, for want of figures: times of operators: measure with --passes layers" in text
    found = said(tmp_path, bench(part=layers(conv=0.2, bn=0.1)))
    assert "the profiler tells the nodes of 30% of the step only, so nothing is said of operators" in found


def test_nothing_is_concluded_from_a_disturbed_machine_or_a_wrong_answer(tmp_path: Path) -> None:
    (text,) = said(tmp_path, bench(part=layers(), disturbed="a compiler ran"))
    assert text.startswith("something disturbed the machine") and "a compiler ran" in text
    wrong = bench(part=layers())
    wrong["extra_info"]["d5suite"]["validation"]["checks"][0] |= {"error": 1.0, "tolerance": 0.1, "passed": False}
    (text,) = said(tmp_path, wrong)
    assert text.startswith("its answer is wrong")


@pytest.mark.parametrize(("loading_s", "end"), [(0.01, "is not the bound"), (0.2, "is the bound")])
def test_the_loader_is_the_bound_or_not(tmp_path: Path, loading_s: float, end: str) -> None:
    loader = bench("input_pipeline", step_s=loading_s)
    assert any(each.endswith(f"the loader {end}") for each in said(tmp_path, loader, bench()))
    disturbed = bench("input_pipeline", step_s=loading_s, disturbed="a compiler ran")
    assert not any("loader" in each for each in said(tmp_path, disturbed, bench()))


def test_threads_and_batches_are_compared_with_fewer(tmp_path: Path) -> None:
    found = said(tmp_path, bench(), bench(threads=2, step_s=0.1 / 1.3))
    assert found["2 threads give 1.30 times the rate of 1: serial part 54%"].endswith("throughput.value at 1 thread")
    assert "batches of 8 give 1.60 times the images/s of 4" in said(tmp_path, bench(), bench(batch=8, step_s=0.125))


def test_an_unknown_case_and_another_machine_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = result(tmp_path / "out.json", bench(part=layers()))
    assert main(["explain", str(path), "no_case"]) == 2
    assert "Cases: imagenet_resnet50" in capsys.readouterr().err
    assert main(["explain", str(path), "--machine", str(machine(tmp_path / "m.json", cpus=64))]) == 2
    assert "the machine file is of another machine: the number of CPUs" in capsys.readouterr().err


def test_parts_of_a_step_that_the_profiler_slows_down_are_said_to_be(tmp_path: Path) -> None:
    part = layers() | {"slowdown": 1.4, "plain_step_s": 0.1 / 1.4}
    found = said(tmp_path, bench(part=part), options=("--machine", str(machine(tmp_path / "machine.json"))))
    assert any(each.startswith("the profiler slows the step down 1.40 times") for each in found)
    assert "61% of the step is in Conv, reaching at least 49% of the ceiling of arithmetic" in found
    assert not any("would take" in each for each in found)  # of the time that the profiler added


def test_more_than_a_ceiling_and_several_ceilings_are_told_as_such(tmp_path: Path) -> None:
    options = ("--machine", str(machine(tmp_path / "machine.json", flops=30e9)))
    found = said(tmp_path, bench(part=layers()), options=options)
    assert any("1.64 times as fast as the ceiling of arithmetic: fewer operations are made" in each for each in found)
    part = layers()
    part["graph"]["conv1"] |= {"backward_flops": 0, "backward_bytes": 400_000_000}
    found = said(tmp_path, bench(part=part), options=("--machine", str(machine(tmp_path / "machine.json"))))
    assert any("of its ceilings, mostly that of memory" in each for each in found)


def test_a_loader_that_shares_the_cpus_is_no_bound_by_itself(tmp_path: Path) -> None:
    benches = [bench("input_pipeline", step_s=0.1), bench(step_s=0.1)]
    for each in benches:
        each["extra_info"]["d5suite"]["environment"]["cpu"]["allowed_cpus"] = [0]
    assert any("each alone (1 CPU for both do 20 together): the loader is" in each for each in said(tmp_path, *benches))


def test_a_gain_within_the_intervals_is_not_decided(tmp_path: Path) -> None:
    found = said(tmp_path, bench(), bench(threads=2, step_s=0.0995))  # each interval is 1% to either side
    (text,) = (each for each in found if each.startswith("2 threads"))
    assert text == "2 threads give 1.01 times the rate of 1, but their intervals overlap, so another run may turn it"
