"""A study's report: every figure can be made again from the raw data, and nothing else is said."""

from __future__ import annotations

import copy
import csv
import gzip
import html
import importlib.util
import io
import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.files import read_bounded
from d5suite.report import crossover
from d5suite.report.scaling import size_text
from d5suite.report.study import pdf
from d5suite.report.study.chapters import compose
from d5suite.report.study.claims import say
from d5suite.report.study.doubts import threats
from d5suite.report.study.figures import RULES, RawData, StatedFigure, check_report
from d5suite.report.study.gathered import gather_study
from d5suite.study.state import COMMIT, WITH_CHANGES, RunState, read_state, sha256_of
from tests.report.pages import OPERATORS, RANKS, SMOKE, content, record, settle
from tests.report.test_crossover import planted

STUDY = """
title = "A study of what is at hand"
budget = "10m"
[[question]]
ask = "Which framework is fastest?"
parts = ["networks"]
[[question]]
ask = "What do ranks give?"
parts = ["ranks"]
[part.networks]
title = "Networks"
share = 0.5
cost = "2m"
recipes = ["recipes/test_imagenet_resnet50.py"]
[part.ranks]
title = "Ranks"
share = 0.4
cost = "2m"
recipes = ["recipes/test_digits_lenet.py"]
"""

FURTHER = """
[part.{0}]
title = "The part {0}"
share = 0.01
cost = "1s"
command = ["machine", "-o", "{{out}}"]
"""

CHROMIUM = pdf.browser()


@pytest.fixture(autouse=True)
def without_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of the module is printed once; those of single tests are not."""
    monkeypatch.setattr(pdf, "browser", lambda: None)


def small() -> dict[str, Any]:
    """Both measurements of three backends, with samples that decide one comparison of two."""
    found = content(SMOKE)
    found["benchmarks"] = [
        each for each in found["benchmarks"]
        if record(each)["measurement"] in ("inference", "training_step") and record(each)["backend"]["name"] in
        ("jax", "keras", "mxnet") and record(each)["recipe"] == "imagenet_resnet50"
    ]  # fmt: skip
    found["d5suite"].pop("series", None)
    found["d5suite"].pop("failures", None)
    times = {
        "inference": {"jax": 0.1, "keras": 0.2, "mxnet": 0.4},
        "training_step": {"jax": 0.3, "keras": 0.3, "mxnet": 0.31},
    }
    for each in found["benchmarks"]:
        info = record(each)
        middle = times[info["measurement"]][info["backend"]["name"]]
        for name in ("turns",):
            info.pop(name, None)
        info["machine"] = {"disturbed": False, "reasons": []}
        samples = [middle * (1 + 0.001 * place) for place in range(-10, 11)]
        settle(each, samples)
        info["throughput"]["value"] = 4 / statistics.median(samples)
    return found


def laid(folder: Path, results: dict[str, dict[str, Any]], machine: str = "here") -> Path:
    """Lay a study's folder with the results of its runs."""
    raw = folder / "raw" / machine
    raw.mkdir(parents=True, exist_ok=True)
    for name in results:
        (folder / "jobs" / machine / name).mkdir(parents=True, exist_ok=True)
    further = "".join(FURTHER.format(name) for name in results if f"[part.{name}]" not in STUDY)
    (folder / "study.toml").write_text(STUDY + further)
    state = read_state(raw)
    for name, found in results.items():
        state.result(name).write_text(json.dumps(found))
        sha256 = sha256_of(state.result(name))
        command = f"pytest x --jobs jobs/{machine}/{name} --benchmark-json raw/{machine}/{name}.json"
        state.runs[name] = RunState(command, name, "done", "", "2026-11-27T08:00:00+00:00", 60.0, sha256)
    state.save()
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder with its report."""
    ranks = content(RANKS)
    few = ("all_reduce-local-1", "all_reduce-gloo-2", "parameter_server-gloo-2")
    ranks["benchmarks"] = [
        each for each in ranks["benchmarks"]
        if record(each)["backend"]["name"] in ("jax", "keras") and each["name"].rstrip("]").endswith(few)
    ]  # fmt: skip
    ranks["d5suite"].pop("series", None)
    folder = laid(tmp_path_factory.mktemp("study"), {"networks": small(), "ranks": ranks})
    assert main(["study", "--report", str(folder)]) == 0
    return folder


def sentences(folder: Path) -> list[str]:
    """The sentences of a report as they read."""
    page = (folder / "report.html").read_text()
    found = re.findall(r'<p class="claim">(.*?)</p>', page, re.DOTALL)
    return [html.unescape(re.sub(r'<a class="ref".*?</a>|<[^>]*>', "", each)) for each in found]


def numbers(folder: Path) -> list[tuple[str, str, str, str]]:
    """Rule, form, places and text of each figure of a report, read with nothing of d5suite's."""
    page = (folder / "report.html").read_text()
    pattern = r'<data value="[^"]*" data-rule="([^"]*)" data-form="([^"]*)"'
    pattern += r'(?: data-in="([^"]*)")? data-places="([^"]*)">([^<]*)</data>'
    return [
        (rule, form, " ".join(shared + each for each in rest.split(" ")), text)
        for rule, form, shared, rest, text in re.findall(pattern, page)
    ]


def test_every_figure_is_made_again_from_the_raw_data(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count, faults = check_report(study)
    assert count > 60
    assert not faults
    assert main(["study", "--check", str(study)]) == 0
    assert f"{count} figures" in capsys.readouterr().out


def test_plain_values_are_those_of_the_files(study: Path) -> None:
    """Reads the raw data without d5suite: a pointer leads to the value whose digits are shown."""
    scales = {"ms": 1e3, "µs": 1e6, "MiB": 2**-20, "GB/s": 1e-9, "percent": 100}
    seen = 0
    for rule, form, places, text in numbers(study):
        if rule != "value":
            continue
        file, _, pointer = places.partition("#")
        value: Any = json.loads((study / file).read_text())
        for token in pointer.split("/")[1:]:
            value = value[int(token)] if isinstance(value, list) else value[token]
        digits = re.match(r"[\d.]+", text)
        assert digits is not None
        if form == "time":
            unit = text.split("\N{NO-BREAK SPACE}")[1]
            value *= {"s": 1, "ms": 1e3, "µs": 1e6}[unit]
        shown = float(digits[0])
        assert shown == pytest.approx(
            value * scales.get(form, 1), rel=6e-3, abs=0.5 if form in ("count", "percent") else 0
        )
        seen += 1
    assert seen > 15


def test_ratios_are_those_of_the_samples(study: Path) -> None:
    seen = 0
    for rule, _, places, text in numbers(study):
        if rule == "ratio" and "networks.json" in places:
            medians = []
            for place in places.split(" "):
                file, _, pointer = place.partition("#")
                bench = json.loads((study / file).read_text())["benchmarks"][int(pointer.rpartition("/")[2])]
                medians.append(statistics.median(bench["stats"]["data"]))
            assert float(text) == pytest.approx(medians[1] / medians[0], rel=0.01)
            seen += 1
    assert seen


def test_verdicts_are_decided_once(study: Path) -> None:
    text = "\n".join(sentences(study))
    assert "imagenet_resnet50 inference" in text
    assert "jax is fastest" in text
    assert "Networks: a clear winner in 1 of 1 comparisons (jax 1)." in text
    assert re.search(r"imagenet_resnet50 training step.*it is undecided which of", text)
    assert "a step of parameter_server takes" in text
    assert not re.search(r"training step[^:]*\), \w+ is fastest: ", text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'(data-rule="ratio"[^>]*>)([\d.]+)', r"\g<1>9\2"),
        (r'(data-rule="value" data-form="time"[^>]*>)([\d.]+)', r"\g<1>7\2"),
        (r'(data-rule="such:passed"[^>]*>)\d+', r"\g<1>99"),
        (r'(data-rule="clear:jax"[^>]*>)\d+', r"\g<1>3"),
        (r'(data-places=")raw/here/', r"\1raw/there/"),
        (r'(data-rule=")ratio:low', r"\1ratio:high"),
        (r'(data-rule=")ratio', r"\1none"),
    ],
)
def test_a_wrong_figure_is_caught(study: Path, tmp_path: Path, old: str, new: str) -> None:
    shutil.copytree(study, tmp_path / "copy")
    page = tmp_path / "copy" / "report.html"
    planted, count = re.subn(old, new, page.read_text(), count=1)
    assert count == 1
    page.write_text(planted)
    faults = check_report(tmp_path / "copy")[1]
    assert len(faults) == 1
    assert main(["study", "--check", str(tmp_path / "copy")]) == 1


def test_changed_raw_data_are_caught(study: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(study, tmp_path / "copy"))
    path = copied / "raw" / "here" / "networks.json"
    found = json.loads(path.read_text())
    bench = next(each for each in found["benchmarks"] if record(each)["measurement"] == "inference")
    settle(bench, [7 * each for each in bench["stats"]["data"]])
    path.write_text(json.dumps(found))
    assert check_report(copied)[1]
    assert main(["study", "--report", str(copied)]) == 0
    assert not check_report(copied)[1]
    assert any("has changed since it was measured" in each for each in sentences(copied))


def _without(measurement: str) -> Callable[[dict[str, Any]], None]:
    def remove(found: dict[str, Any]) -> None:
        found["benchmarks"] = [each for each in found["benchmarks"] if record(each)["measurement"] != measurement]

    return remove


def test_a_result_that_is_removed_takes_its_sentences_along(study: Path, tmp_path: Path) -> None:
    before = sentences(study)
    assert any("training step" in each for each in before)
    found = small()
    _without("training_step")(found)
    folder = laid(tmp_path / "study", {"networks": found})
    assert main(["study", "--report", str(folder)]) == 0
    after, page = sentences(folder), (folder / "report.html").read_text()
    assert any("inference" in each for each in after)
    assert not any("training step" in each or "parameter_server" in each for each in after)
    assert 'id="training"' not in page
    assert 'id="ranks"' not in page  # a section without data does not appear
    assert "Not answered: the part ranks has no result yet." in page
    assert any("nothing was measured for it: What do ranks give?" in each for each in after)
    assert any("Not run: ranks" in each for each in after)
    assert not check_report(folder)[1]


def test_a_sentence_without_its_figure_is_not_said(study: Path) -> None:
    raw = RawData(study)
    there = raw.figure("value", ["raw/here/networks.json#/benchmarks/0/extra_info/d5suite/median_s"], "time")
    assert say("It takes ", there, ".") is not None
    for place in ("raw/here/networks.json#/benchmarks/0/no_such", "raw/here/none.json#/a", "../../etc/passwd#/a", "#"):
        missing = raw.figure("value", [place], "time")
        assert missing is None
        assert say("It takes ", there, " of ", missing, ".") is None


def test_tables_and_csv_files_say_the_same(study: Path) -> None:
    report = compose(gather_study(study), None)
    seen = 0
    for chapter in report.chapters:
        for table in chapter.tables:
            lines = list(csv.reader(io.StringIO((study / "tables" / f"{table.name}.csv").read_text())))
            assert len(lines) == len(table.rows) + 1
            for line, row in zip(lines[1:], table.rows, strict=True):
                values = [float(each) for each in line if re.fullmatch(r"[\d.e+-]+", each)]
                figures = [each.value for cell in row for each in cell.parts if isinstance(each, StatedFigure)]
                assert values == pytest.approx(figures)
                seen += len(values)
    assert seen > 20


def test_pictures_are_files_and_in_the_page(study: Path) -> None:
    files = sorted(each.name for each in (study / "figures").glob("*.svg"))
    page = (study / "report.html").read_text()
    assert files
    assert all(f"figures/{name}" in page for name in files)
    assert "<svg" in page
    assert not re.search(r'(src|href)="https?:|url\((?!#)', page)  # it loads nothing


def test_how_to_reproduce_and_where_figures_are(study: Path) -> None:
    page = (study / "report.html").read_text()
    assert "--benchmark-json raw/here/networks.json" in page
    assert "jobs/here/networks/" in page
    assert json.loads(SMOKE.read_text())["commit_info"]["id"][:12] in page
    refs = set(re.findall(r'href="#(ref-\d+)"', page))
    assert refs
    assert refs == set(re.findall(r'<li id="(ref-\d+)"', page))
    assert "raw/here/networks.json#/benchmarks/" in page


def test_threats_are_found_in_the_data(tmp_path: Path) -> None:
    found = small()
    one, two, *_ = found["benchmarks"]
    record(one)["machine"] = {"disturbed": True, "reasons": ["another process took 40% of a CPU"], "taken_share": 0.4}
    record(two)["steady"] = False
    found["d5suite"]["failures"] = [
        {"group": "imagenet_resnet50/inference", "backend": "torch", "wrong": False, "message": "it crashed"}
    ]
    folder = laid(tmp_path / "study", {"networks": found})
    state = read_state(folder / "raw" / "here")
    state.runs["ranks"] = RunState("pytest y", "ranks", "half", "it was interrupted")
    state.save()
    assert main(["study", "--report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    said = "\n".join(sentences(folder))
    assert "1 of 6 results were disturbed" in said
    assert "still changing" in said
    assert "There is no result of imagenet_resnet50/inference on torch" in said
    assert "The run ranks on here is not whole: it was interrupted" in said
    assert "1 of 2 comparisons are not decided because the machine was disturbed" in said
    assert "not decided: disturbed" in page
    assert not check_report(folder)[1]


def test_machines_stand_side_by_side(tmp_path: Path) -> None:
    other = small()
    for each in other["benchmarks"]:
        record(each)["environment"]["cpu"]["model"] = "Another CPU"
        record(each)["device_name"] = "Another CPU"
        settle(each, [2 * one for one in each["stats"]["data"]])
    folder = laid(tmp_path / "study", {"networks": small()})
    laid(folder, {"networks": other}, machine="there")
    assert main(["study", "--report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Another CPU" in page
    assert ">there/networks" in page
    assert not check_report(folder)[1]
    assert "a clear winner in 2 of 2 comparisons" in "\n".join(sentences(folder))  # none across machines


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    folder = laid(tmp_path / "study", {"networks": small(), "ranks": {"benchmarks": [{"extra_info": 1}]}})
    (folder / "raw" / "here" / "networks.log").write_text("{")
    assert main(["study", "--report", str(folder)]) == 0
    assert any("raw/here/ranks.json is left out" in each for each in sentences(folder))


def test_a_run_that_the_study_no_longer_has_is_left_out(tmp_path: Path) -> None:
    folder = laid(tmp_path / "study", {"networks": small(), "dropped": small()})
    (folder / "study.toml").write_text(STUDY)
    assert main(["study", "--report", str(folder)]) == 0
    said = "\n".join(sentences(folder))
    assert "raw/here/dropped.json is left out: the study no longer has this run." in said
    assert "6 results of 3 backends" in said


def test_who_is_slower_than_an_undecided_first_is_said(tmp_path: Path) -> None:
    found = small()
    for each in found["benchmarks"]:
        if record(each)["measurement"] == "training_step" and record(each)["backend"]["name"] == "mxnet":
            settle(each, [0.9 * (1 + 0.001 * place) for place in range(-10, 11)])
            record(each)["throughput"]["value"] = 4 / 0.9
    folder = laid(tmp_path / "study", {"networks": found})
    assert main(["study", "--report", str(folder)]) == 0
    said = "\n".join(sentences(folder))
    assert re.search(r"training step.*undecided which of (jax, keras|keras, jax) is fastest", said)
    assert re.search(r"training step.*mxnet is slower than (jax|keras): it takes 3.00 times as long", said)
    assert not re.search(r"(jax|keras) is slower than", said) and not check_report(folder)[1]


def test_whether_loading_keeps_pace_answers_a_question_about_loading_only(tmp_path: Path) -> None:
    found = content(SMOKE)
    rates = {"input_pipeline": 90.0, "training_step": 60.0}
    found["benchmarks"] = [
        each for each in found["benchmarks"]
        if record(each)["recipe"] == "imagenet_resnet50" and record(each)["measurement"] in rates
        and record(each)["backend"]["name"] in ("jax", "torch")
    ]  # fmt: skip
    for each in found["benchmarks"]:
        record(each)["throughput"]["value"] = rates[record(each)["measurement"]]
        record(each)["machine"] = {"disturbed": False, "reasons": []}
    folder = laid(tmp_path / "study", {"networks": found})
    declared = (folder / "study.toml").read_text()
    asked = declared.replace('parts = ["networks"]', 'parts = ["networks"]\ntopics = ["loading"]')
    (folder / "study.toml").write_text(asked)
    assert main(["study", "--report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    start = page.index("Which framework is fastest?")
    answer = html.unescape(re.sub(r"<[^>]*>", "", page[start : page.index("What do ranks give?", start)]))
    assert "loading alone gives 90 images/s, 1.50 times the rate of the training step" in answer
    assert "Loading: a clear winner in" in answer and "Training: a clear winner in" not in answer
    assert not check_report(folder)[1]


def test_an_undecided_first_is_held_against_the_one_that_may_be_as_fast(tmp_path: Path) -> None:
    found = small()
    rounds = {"jax": [0.3] * 4, "keras": [0.4] * 4, "mxnet": [0.28, 0.28, 1.0, 1.0]}
    for each in found["benchmarks"]:
        info = record(each)
        name = info["backend"]["name"]
        if info["measurement"] == "training_step":
            settle(each, rounds[name] * 3)
            info["throughput"]["value"] = 4 / statistics.median(rounds[name])
            info["turns"] = [{"group": "one", "beside": sorted(set(rounds) - {name}), "rounds": [1] * 12}]
    folder = laid(tmp_path / "study", {"networks": found})
    assert main(["study", "--report", str(folder)]) == 0
    (said,) = [
        each for each in sentences(folder) if "training step" in each and "undecided which of jax, mxnet" in each
    ]
    low, high = map(float, re.findall(r"interval (\S+) to (\S+)\)", said)[0])
    assert low < 1 < high and said.endswith("the interval includes 1.")  # keras, the second, is slower
    assert any("keras is slower than jax: it takes 1.33 times" in each for each in sentences(folder))


def test_how_near_operators_come_to_their_ceilings(tmp_path: Path) -> None:
    shares = {
        ("forward", "torch"): (0.5, 0.1), ("forward", "jax"): (0.25, 0.9), ("backward", "torch"): (0.2, 0.3),
        ("backward", "jax"): (0.05, 0.4),
    }  # fmt: skip
    found = content(OPERATORS)
    cases = sorted({record(each)["recipe"] for each in found["benchmarks"]})[:2]
    chosen = []
    for each in found["benchmarks"]:
        info = record(each)
        arithmetic, memory = shares.get((info["measurement"], info["backend"]["name"]), (0.0, 0.0))
        if info["recipe"] in cases and arithmetic:
            times = 3.0 if info["recipe"] == cases[1] else 1.0  # of the second case, one ceiling is exceeded
            info["fraction_of_ceiling"] = {"flops_per_s": arithmetic, "bytes_per_s": memory * times}
            info["machine"] = {"disturbed": False, "reasons": []}
            chosen.append(each)
    assert len(chosen) == 8
    found["benchmarks"] = chosen
    found["d5suite"].pop("series", None)
    folder = laid(tmp_path / "study", {"networks": found})
    assert main(["study", "--report", str(folder)]) == 0
    said = "\n".join(sentences(folder))
    assert "2 cases are nearest to the ceiling of memory traffic, the run's fastest copy: the best backend " in said
    assert "reaches 65% of it in the median, and 90% at most (" in said  # 90% and 40%
    assert "ceiling of arithmetic" not in said and not check_report(folder)[1]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    found = small()
    for each in found["benchmarks"]:
        record(each)["recipe"] = "<script>alert(1)</script>"
        each["group"] = f"<script>alert(1)</script>/{record(each)['measurement']}".replace("</script>", "<|script>")
        record(each)["recipe"] = "<script>alert(1)<|script>"
    folder = laid(tmp_path / "study", {"networks": found})
    assert main(["study", "--report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script" in page


def test_which_findings_held(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = small()
    for each in later["benchmarks"]:
        if record(each)["measurement"] == "inference" and record(each)["backend"]["name"] == "jax":
            settle(each, [9 * one for one in each["stats"]["data"]])
            record(each)["throughput"]["value"] /= 9
    new = laid(tmp_path / "new", {"networks": later})
    assert main(["study", "--held", str(study), str(new)]) == 0
    said = capsys.readouterr().out
    assert "1 reversed" in said
    assert "imagenet_resnet50 inference: jax then, keras now: reversed" in said
    assert "imagenet_resnet50 training_step: undecided then, undecided now: undecided in both" in said
    assert main(["study", "--report", str(new), "--earlier", str(study)]) == 0
    page = (new / "report.html").read_text()
    assert 'id="held"' in page
    assert "reversed" in (new / "tables" / "held.csv").read_text()
    assert not check_report(new)[1]
    same = laid(tmp_path / "same", {"networks": small()})
    assert main(["study", "--held", str(study), str(same)]) == 0
    assert "1 held" in capsys.readouterr().out


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_the_pdf_is_printed_from_the_page(study: Path) -> None:
    printed = (study / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page") >= 3


def test_without_a_browser_a_sentence_says_what_to_install(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf, "browser", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = pdf.print_pdf(study / "report.html", tmp_path / "report.pdf")
    assert "install chromium" in said
    assert not (tmp_path / "report.pdf").exists()


def test_each_rule_has_a_name_that_a_report_uses_or_may(study: Path) -> None:
    used = {rule.partition(":")[0] for rule, *_ in numbers(study)}
    assert used <= set(RULES)
    assert len(used) >= 8


@pytest.mark.parametrize("arguments", [[], ["x.toml", "--report", "y"], ["--report", "none"], ["--check", "none"]])
def test_usage_is_one_clear_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *arguments]) == 2
    assert capsys.readouterr().err.count("error:") == 1


def test_layers_and_roofs_are_told_with_their_figures(tmp_path: Path) -> None:
    found = small()
    layers = {
        "times": [
            {"nodes": ["conv"], "direction": "forward", "seconds": 0.06, "calls": 1},
            {"nodes": ["fc"], "direction": "forward", "seconds": 0.03, "calls": 1},
        ],
        "graph": {
            "conv": {"op_type": "Conv", "stage": "", "flops": 4_000_000_000, "bytes": 40_000_000},
            "fc": {"op_type": "Gemm", "stage": "", "flops": 1_000_000_000, "bytes": 80_000_000},
        },
        "other": {}, "step_s": 0.1, "plain_step_s": 0.1, "slowdown": 1.0, "coverage": 0.9, "left_over_s": 0.01,
        "method": "planted",
    }  # fmt: skip
    for each in found["benchmarks"]:
        if record(each)["measurement"] == "inference":
            record(each)["layers"] = copy.deepcopy(layers)
            if record(each)["backend"]["name"] == "mxnet":
                record(each)["layers"] |= {"coverage": 0.4}
    info = record(found["benchmarks"][0])
    machine = {
        "schema": "d5suite-machine-1", "name": "planted", "host": {}, "not_kept": [], "missing": [],
        "ceilings": [
            {"what": "flops", "value": 1e11, "source": "planted", "precision": "fp32", "threads": info["threads"],
             "device": "cpu"},
            {"what": "bandwidth", "value": 2e10, "source": "planted", "threads": info["threads"], "device": "cpu"},
        ],
    }  # fmt: skip
    folder = laid(tmp_path / "study", {"networks": found, "machine": machine})
    assert main(["study", "--report", str(folder)]) == 0
    said = "\n".join(sentences(folder))
    assert "60% of the step is in Conv; nodes explain 90% of it" in said
    assert "of its roof" in said
    assert "explain 40% of the step only" in said
    assert (folder / "tables" / "rooflines.csv").is_file()
    picture = (folder / "figures" / "rooflines-here-imagenet_resnet50-inference.svg").read_text()
    assert "mathdefault" not in picture  # ticks are numbers
    assert "GFLOP/s" in picture
    assert "1 of 3 profiles of layers explain less than 90% of their step" in said
    assert not check_report(folder)[1]


def test_orders_and_swept_knobs_are_told_over_their_bases(tmp_path: Path) -> None:
    ranks = content(RANKS)
    ranks["d5suite"].pop("series", None)
    ranks["benchmarks"] = [each for each in ranks["benchmarks"] if each["name"].endswith("[jax-all_reduce-gloo-2]")]
    other = copy.deepcopy(ranks["benchmarks"][0])
    for key in ("name", "fullname", "param"):
        other[key] = other[key].replace("all_reduce", "all_reduce:order=tac")
    record(other)["distributed"]["settings"]["order"] = "tac"
    settle(other, [each * 2 for each in other["stats"]["data"]])
    record(other)["throughput"]["value"] /= 2
    record(other).pop("turns", None)
    record(ranks["benchmarks"][0]).pop("turns", None)
    ranks["benchmarks"].append(other)
    found = small()
    for each in copy.deepcopy(found["benchmarks"]):
        record(each)["threads"] = 1
        settle(each, [1.5 * one for one in each["stats"]["data"]])
        record(each)["throughput"]["value"] /= 1.5
        found["benchmarks"].append(each)
    folder = laid(tmp_path / "study", {"networks": found, "ranks": ranks})
    assert main(["study", "--report", str(folder)]) == 0
    said = "\n".join(sentences(folder))
    assert re.search(
        r"digits_lenet on jax with 2 ranks: a step of all_reduce with order tac takes 2.00 times as long as one "
        r"without an order \(95% interval 1\.\d+ to [23]\.\d+\): slower\.", said,
    )  # fmt: skip
    assert re.search(r"inference on jax .*: 2 threads give 1.50 times the rate of 1 \(95% interval", said)
    assert (folder / "tables" / "ordering.csv").is_file()
    assert not check_report(folder)[1]


def test_results_of_other_commands_are_told(tmp_path: Path) -> None:
    trials = [{"status": "done"}] * 7
    course = {"case": "digits", "measurement": "training_step", "backend": "jax", "trials": trials}
    kept = {
        **course, "backend": "keras", "decision": {"taken": False, "reason": "nothing is faster"},
        "confirmed": {"versus_stock": [0.8, 0.4, 1.6]},
    }  # fmt: skip
    taken = {**course, "decision": {"taken": True}, "confirmed": {"versus_stock": [0.8, 0.75, 0.86]}}
    found: dict[str, dict[str, Any]] = {
        "tune": {"schema": "d5suite-tune-1", "machine": {}, "courses": [taken, kept]},
        "simulation": {
            "title": "resnet50", "step_s": 0.5, "measured_s": 0.4, "ranks": 64,
            "what_if": [{"change": "network=2x", "step_s": 0.45}],
        },
    }  # fmt: skip
    folder = laid(tmp_path / "study", {"networks": small(), **found})
    assert main(["study", "--report", str(folder)]) == 0
    said = "\n".join(sentences(folder))
    assert "tuned settings take 0.80 times as long as the framework as it comes (95% interval 0.75 to 0.86)" in said
    assert "on keras: after 7 trials the default is kept: nothing is faster." in said
    assert "on keras: tuned settings" not in said
    assert "resnet50: a simulated step of 64 ranks takes 500\N{NO-BREAK SPACE}ms." in said
    assert "with network=2x it takes 0.90 times as long" in said
    assert not check_report(folder)[1]


def test_nothing_is_concluded_from_a_disturbed_machine(tmp_path: Path) -> None:
    found = small()
    for each in copy.deepcopy(found["benchmarks"]):
        record(each)["threads"] = 1
        settle(each, [1.5 * one for one in each["stats"]["data"]])
        record(each)["throughput"]["value"] /= 1.5
        found["benchmarks"].append(each)
    for each in found["benchmarks"]:
        record(each)["machine"] = {"disturbed": True, "reasons": ["others took 80% of a CPU"], "taken_share": 0.8}
    folder = laid(tmp_path / "study", {"networks": found})
    assert main(["study", "--report", str(folder)]) == 0
    said = "\n".join(sentences(folder))
    assert "a clear winner in 0 of 2 comparisons" in said
    assert "is fastest:" not in re.sub("it is undecided which of .*? is fastest:", "", said)
    assert "threads give" not in said


def test_parts_of_several_commits_and_versions_are_told_apart(tmp_path: Path) -> None:
    ranks = content(RANKS)
    ranks["d5suite"].pop("series", None)
    ranks["benchmarks"] = [each for each in ranks["benchmarks"] if each["name"].endswith("[jax-all_reduce-gloo-2]")]
    for each in ranks["benchmarks"]:
        record(each)["backend"] |= {"version": "0.99", "versions": {"jax": "0.99"}}
    folder = laid(tmp_path / "study", {"networks": small(), "ranks": ranks})
    state = read_state(folder / "raw" / "here")
    state.runs["networks"].made_with = {COMMIT: "aaaaaaaaaaaa", "onnxruntime": "1.9"}
    state.runs["ranks"].made_with = {COMMIT: f"bbbbbbbbbbbb {WITH_CHANGES}", "onnxruntime": "1.9+cpu"}
    state.runs["ranks"].made_on = {"host": "another"}
    state.runs["networks"].made_on = {"host": "one"}
    state.runs["networks"].again = True
    state.save()
    assert main(["study", "--report", str(folder)]) == 0
    said, page = "\n".join(sentences(folder)), (folder / "report.html").read_text()
    told = "aaaaaaaaaaaa measured networks, bbbbbbbbbbbb with changes measured ranks"
    assert f"Parts were measured by different commits of d5suite: {told}." in said
    assert "The working tree had changes that no commit holds when ranks ran." in said
    assert re.search(r"jax differs between parts: \S+ for networks, 0.99 for ranks\.", said)
    assert "host differs between parts: one for networks, another for ranks." in said
    assert "onnxruntime differs" not in said  # a package's metadata may lack the build
    assert "The run networks on here was to be measured again, and that has not been finished." in said
    assert "aaaaaaaaaaaa (networks), bbbbbbbbbbbb with changes (ranks)" in page
    assert "Not answered" not in said


def test_what_a_question_lacks_is_said(tmp_path: Path) -> None:
    folder = laid(tmp_path / "study", {"networks": small()})
    text = (folder / "study.toml").read_text()
    both = '"recipes/test_imagenet_resnet50.py", "recipes/test_imagenet_alexnet.py"'
    (folder / "study.toml").write_text(text.replace('"recipes/test_imagenet_resnet50.py"', both))
    state = read_state(folder / "raw" / "here")
    state.result("networks.imagenet_resnet50").write_bytes(state.result("networks").read_bytes())
    state.runs["networks.imagenet_resnet50"] = state.runs.pop("networks")
    state.save()
    answers = compose(gather_study(folder), None).answers
    assert [each.is_open for each in answers] == [False, True]
    assert answers[0].lacking == "Answered in part: there is no whole result of networks.imagenet_alexnet."


def test_a_packed_study_says_the_same(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("d5suite.study.pack.SMALL", 1000)
    folder = Path(shutil.copytree(study, tmp_path / "copy"))
    raw, before = folder / "raw" / "here", sentences(study)
    (raw / "networks.h5").write_bytes(b"no curve is drawn from it")
    (raw / "networks.log").write_text("rootdir: /home/me/d5\n" + "Wrote /home/me/d5/raw/x.json\n" * 1000)
    assert main(["study", "--pack", str(folder)]) == 0
    assert "MB before" in capsys.readouterr().out
    assert sorted(each.name for each in raw.iterdir() if each.name != ".lock") == [
        "networks.json.gz", "networks.log.gz", "ranks.json.gz", "state.json"
    ]  # fmt: skip
    assert set(gzip.decompress((raw / "networks.log.gz").read_bytes()).splitlines()) == {
        b"rootdir: .", b"Wrote ./raw/x.json"
    }  # fmt: skip
    assert not (folder / "jobs" / "here").exists()
    page = (folder / "report.html").read_text()
    assert "above 100 kB are packed by gzip" in page
    assert "Job files, traces, and series that no curve is drawn from are left out" in page
    assert sentences(folder) == before
    count, faults = check_report(folder)
    assert count > 60
    assert not faults
    state = read_state(raw)
    assert all(state.is_kept(name, run.command) for name, run in state.runs.items())  # --resume repeats none
    assert main(["compare", str(raw / "networks.json.gz")]) == 0
    packed = raw / "networks.json.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    assert main(["compare", str(packed)]) == 2
    assert "this is not a whole gzip file" in capsys.readouterr().err
    bomb = gzip.compress(bytes(2000))
    packed.write_bytes(bomb)
    with pytest.raises(OSError, match="unpacked, it has more than the 1,000 bytes"):
        read_bounded(packed, 1000)


def test_crossovers_and_servers_are_told_with_the_orders(tmp_path: Path) -> None:
    measured = crossover.studies(planted({"ring": 1.5}))
    predicted = crossover.to_dict(measured, [], [1, 64], 1024)
    folder = laid(tmp_path / "study", {"networks": small(), "crossover": predicted})
    assert main(["study", "--report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    said = "\n".join(sentences(folder))
    assert 'id="ordering"><h2>Ordering, and parameter servers against all-reduce</h2>' in page
    known = {(each["bytes"], each["tensors"]): each["crossover_ranks"] for each in predicted["crossovers"]
             if each["against"] == "any" and each["servers"] == "parameter_server"}  # fmt: skip
    for (nbytes, tensors), ranks in known.items():
        start = f"On gloo, {size_text(nbytes)} in {tensors} tensor{'s' * (tensors > 1)}: "
        end = f"some all-reduce is predicted to be faster than one parameter server from {ranks} ranks on."
        never = "no all-reduce is predicted to be faster than one parameter server with up to 1024 ranks."
        assert start + (end if ranks else never) in said
    assert "On gloo, measured sums by ring take 1.50 times as long as predicted (median of 6 sizes" in said
    lines = list(csv.reader(io.StringIO((folder / "tables" / "crossover.csv").read_text())))
    assert len(lines) == 1 + len(predicted["crossovers"]) / 3
    assert not check_report(folder)[1]


def test_ceilings_that_may_be_too_low_are_doubted(tmp_path: Path) -> None:
    shared = {"what": "bandwidth", "level": "memory", "device": "cpu", "source": "planted"}
    machine = {
        "schema": "d5suite-machine-1", "name": "planted", "host": {}, "missing": [], "not_kept": [{"why": "busy"}] * 3,
        "ceilings": [
            {**shared, "threads": 2, "value": 2e10, "agrees": False},
            {**shared, "threads": 1, "value": 5e10, "agrees": True},
        ],
    }  # fmt: skip
    folder = laid(tmp_path / "study", {"networks": small(), "machine": machine})
    claims = [each.text if not isinstance(each, str) else each for each in threats(gather_study(folder)) if each]
    assert "1 of 2 ceilings of here were reached by one way of measuring only; independent ways stayed below." in claims
    assert "3 measurements of the ceilings of here were disturbed and are left out." in claims
    assert "The ceiling of memory on here is too low for 2 threads: 20 GB/s, and 50 GB/s for 1." in claims
