"""``d5suite compare`` on files from anywhere: what is malformed is one error, what differs is kept
apart, and what failed is never shown like what passed."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from d5suite.cli import main
from d5suite.report.schema import result_schema
from d5suite.report.series import save_series
from tests.conftest import Run

REFERENCE = Path(__file__).parents[2] / "results" / "reference-2core-cpu-smoke.json"


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(REFERENCE.read_text())
    chosen = ("imagenet_resnet50/inference", "imagenet_resnet50/gradient")
    content["benchmarks"] = [b for b in content["benchmarks"] if b["param"] == "torch" and b["group"] in chosen]
    assert len(content["benchmarks"]) == 2
    for bench in content["benchmarks"]:
        bench["extra_info"]["d5suite"].pop("turns", None)  # the rounds of other samples
    return content


@pytest.fixture
def result(reference: dict[str, Any]) -> dict[str, Any]:
    """A file of two results, to be damaged."""
    return copy.deepcopy(reference)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def record(result: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = result["benchmarks"][number]["extra_info"]["d5suite"]
    return found


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["compare", str(path)]) == 2
    return one_error(path, capsys)


def one_error(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {path}")
    assert all(c.isprintable() or c == "\n" for c in shown.err)
    assert len(shown.err) < 2000
    return shown.err


def shown(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    assert main(["compare", "--tables", *map(str, paths)]) == 0
    return capsys.readouterr().out


PLACES = [
    "", "benchmarks", "benchmarks.1", "benchmarks.1.group", "benchmarks.1.name", "benchmarks.1.param",
    "benchmarks.1.stats", "benchmarks.1.stats.data", "benchmarks.1.stats.data.0", "benchmarks.1.stats.median",
    "benchmarks.1.extra_info", "benchmarks.1.extra_info.d5suite", "d5suite", "d5suite.schema",
    *(
        f"benchmarks.1.extra_info.d5suite.{each}"
        for each in (
            "schema", "recipe", "level", "measurement", "backend", "device", "device_name", "precision", "threads",
            "ranks", "preset", "seed", "batch_size", "image_size", "classes", "optimizer", "dataset", "dataset.digest",
            "throughput", "throughput.value", "median_s", "median_ci95", "median_ci95.0", "median_ci_confidence",
            "first_call_s", "steady", "peak_memory_bytes", "memory.peak_bytes", "macs", "validation",
            "validation.passed", "validation.checks", "validation.checks.0", "validation.checks.0.error",
            "validation.checks.0.tolerance", "machine", "machine.disturbed", "machine.reasons", "environment",
            "environment.cpu", "environment.gpus",
        )
    ),
]  # fmt: skip
"""Parts of a file that are not as they should be, in turn, in each of these ways."""

WRONG: dict[str, Any] = {"an object": {"odd": {}}, "nested lists": [[["odd"]]], "a huge number": 10**300}


def left_out(place: str, told: str) -> bool:
    """Whether a table shows the other result, and names the place of what it leaves out."""
    other = "inference" if place.startswith("benchmarks.1") else "gradient"
    return f"torch:{place}:" in "".join(told.split()) and other in told


def test_every_part_of_a_wrong_type_is_one_error_and_a_number_that_cannot_be_costs_one_result(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample, median, ours = (f"benchmarks.1.{each}" for each in ("stats.data.0", "stats.median", "extra_info.d5suite"))
    for place in PLACES:
        for name, wrong in WRONG.items():
            damaged: Any = {"": copy.deepcopy(result)}
            *way, last = ["", *filter(None, place.split("."))]
            at = damaged
            for key in way:
                at = at[int(key) if isinstance(at, list) else key]
            if isinstance(at[int(last) if isinstance(at, list) else last], dict) and isinstance(wrong, dict):
                wrong = None
            at[int(last) if isinstance(at, list) else last] = wrong
            code = main(["compare", str(write(tmp_path / "x.json", damaged[""]))])
            huge = name == "a huge number" and not place.endswith("schema")
            if place == sample or (place == sample[:-2] and isinstance(wrong, list)):
                assert code == 0 and left_out(sample, capsys.readouterr().out), (place, name)
            elif huge and place.startswith((ours, median)):
                assert code == 0 and left_out(place, capsys.readouterr().out), (place, name)
            else:
                assert code == 2 and one_error(tmp_path / "x.json", capsys), (place, name)


def test_every_missing_part_that_is_required_is_one_error(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in result_schema()["$defs"]["record"]["required"]:
        damaged = copy.deepcopy(result)
        del record(damaged, 1)[name]
        assert name in refused(write(tmp_path / "x.json", damaged), capsys)
    for name in result_schema()["$defs"]["benchmark"]["required"]:
        damaged = copy.deepcopy(result)
        del damaged["benchmarks"][1][name]
        if name == "extra_info":  # an ordinary benchmark of pytest-benchmark, then
            assert "gradient" not in shown(capsys, write(tmp_path / "x.json", damaged))
        else:
            assert "benchmarks.1" in refused(write(tmp_path / "x.json", damaged), capsys)


NO_RESULTS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "other text": lambda path: path.write_text("median 3 ms"),
    "null": lambda path: path.write_text("null"),
    "a list": lambda path: path.write_text("[]"),
    "no benchmarks": lambda path: path.write_text('{"benchmarks": []}'),
    "benchmarks by name": lambda path: path.write_text('{"benchmarks": {"a": 1}}'),
    "truncated": lambda path: path.write_bytes(REFERENCE.read_bytes()[:200_000]),
    "with rubbish behind": lambda path: path.write_text(REFERENCE.read_text() + "}"),
    "in UTF-16": lambda path: path.write_text(REFERENCE.read_text(), encoding="utf-16"),
    "a lone surrogate": lambda path: path.write_text('{"benchmarks": [{"extra_info": {"d5suite": "\\ud800"}}]}'),
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path: path.symlink_to(path.with_name("absent")),
    "nested deeply": lambda path: path.write_text('{"benchmarks": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "a long number": lambda path: path.write_text('{"benchmarks": ' + "9" * 5000 + "}"),
    "infinity": lambda path: path.write_text('{"benchmarks": 1e999}'),
    "a name twice": lambda path: path.write_text('{"benchmarks": [], "benchmarks": []}'),
}


@pytest.mark.parametrize("kind", NO_RESULTS)
def test_what_is_no_result_file_is_one_error(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    NO_RESULTS[kind](tmp_path / "x.json")
    refused(tmp_path / "x.json", capsys)


def test_a_file_too_large_to_be_one_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "1,099,511,627,776 bytes are more than" in refused(tmp_path / "x.json", capsys)


def test_many_samples_are_checked_and_shown(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result["benchmarks"][0]["stats"] |= {"data": [0.001] * 200_000, "median": 0.001}
    record(result)["median_s"] = 0.001
    assert "inference" in shown(capsys, write(tmp_path / "x.json", result))
    result["benchmarks"][0]["stats"]["data"][150_000] = -1
    assert left_out("benchmarks.0.stats.data.150000", shown(capsys, write(tmp_path / "x.json", result)))


NO_TIMES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "NaN": (lambda r: record(r).update(median_s=math.nan), "median_s"),
    "infinity": (lambda r: record(r).update(median_s=math.inf), "median_s"),
    "a negative median": (lambda r: record(r).update(median_s=-0.5), "median_s"),
    "a median of zero": (lambda r: record(r).update(median_s=0), "median_s"),
    "a negative interval": (lambda r: record(r).update(median_ci95=[-1, 2]), "median_ci95.0"),
    "NaN in the environment": (
        lambda r: record(r)["environment"]["memory"].update(total_bytes=math.nan), "environment.memory.total_bytes",
    ),
    "2**100 as a seed": (lambda r: record(r).update(seed=2**100), "seed"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_TIMES)
def test_a_number_that_cannot_be_costs_its_result_and_no_other(
    kind: str, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, place = NO_TIMES[kind]
    whole = write(tmp_path / "whole.json", result)
    damage(result)
    damaged = write(tmp_path / "x.json", result)
    assert left_out(f"benchmarks.0.extra_info.d5suite.{place}", shown(capsys, damaged))
    assert main(["compare", str(whole), str(damaged)]) == 4
    told = " ".join(capsys.readouterr().out.split())
    assert "1 missing" in told and f"it failed: benchmarks.0.extra_info.d5suite.{place}: " in told
    assert main(["report", str(damaged), "-o", str(tmp_path / "page.html")]) == 1
    assert f"left out: {damaged}, benchmarks.0.extra_info.d5suite.{place}: " in capsys.readouterr().err
    del result["benchmarks"][1]
    assert f"benchmarks.0.extra_info.d5suite.{place}: " in refused(write(damaged, result), capsys)


def test_a_number_that_nothing_reads_costs_nothing(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(tmp_path / "whole.json", result)
    result["benchmarks"][0]["stats"]["ops"] = math.inf
    result["benchmarks"][0]["params"] = {"size": 2**100}
    result["benchmarks"][0]["extra_info"]["own"] = [math.nan, 10**400]
    result["machine_info"]["odd"] = -math.inf
    assert main(["compare", str(whole), str(write(tmp_path / "x.json", result))]) in (0, 6)
    assert "left out" not in capsys.readouterr().out


def test_many_copies_of_a_result_are_refused_before_all_are_checked(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking 6,000 by the schema took 40 s."""

    def checked(*given: object) -> None:
        raise AssertionError("checked by the schema")

    monkeypatch.setattr(jsonschema.Draft202012Validator, "iter_errors", checked)
    result["benchmarks"] += [result["benchmarks"][0]] * 100
    assert "benchmarks.2: imagenet_resnet50/inference of torch occurs twice" in refused(
        write(tmp_path / "x.json", result), capsys
    )


BAD_VALUES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no samples": (lambda r: r["benchmarks"][0]["stats"].update(data=[]), "benchmarks.0.stats.data"),
    "an unknown schema": (lambda r: r["d5suite"].update(schema="d5suite-99"), "'d5suite-99'"),
    "a record's unknown schema": (lambda r: record(r, 1).update(schema="d5suite-2"), "benchmarks.1: its schema is"),
    "one name twice": (lambda r: r["benchmarks"].append(r["benchmarks"][0]), "benchmarks.2: imagenet_resnet50/infer"),
    "an unknown measurement": (lambda r: rename(r, "fly"), "'fly' are not described"),
    "an interval that ends before it begins": (
        lambda r: record(r)["median_ci95"].reverse(),
        "benchmarks.0.extra_info.d5suite.median_ci95: the interval begins at",
    ),
    "another median than the samples'": (
        lambda r: record(r).update(median_s=2 * record(r)["median_s"]),
        "benchmarks.0.extra_info.d5suite.median_s: it is ",
    ),
    "another median in its stats": (
        lambda r: r["benchmarks"][0]["stats"].update(median=1e-9),
        "benchmarks.0.stats.median: it is 1e-09 s, and the samples' median ",
    ),
    "other samples": (
        lambda r: r["benchmarks"][0]["stats"].update(data=[1.0, 2.0, 3.0]),
        "and the samples' median 2 s",
    ),
    "less memory than none": (
        lambda r: record(r).update(peak_memory_bytes=-1),
        "benchmarks.0.extra_info.d5suite.peak_memory_bytes: -1 bytes are less than none",
    ),
    "a peak below zero": (
        lambda r: record(r)["memory"].update(peak_bytes=-5),
        "benchmarks.0.extra_info.d5suite.memory.peak_bytes: -5 bytes",
    ),
    "another backend's name": (
        lambda r: r["benchmarks"][0].update(param="jax"),
        "benchmarks.0.param: it is 'jax', and the record's backend 'torch'",
    ),
    "a backend's name that begins alike": (
        lambda r: r["benchmarks"][0].update(param="torchlike"),
        "benchmarks.0.param: it is 'torchlike'",
    ),
    "another measurement's group": (
        lambda r: r["benchmarks"][0].update(group="imagenet_resnet50/gradients"),
        "benchmarks.0.group: it is 'imagenet_resnet50/gradients', and the record's recipe and measurement are",
    ),
    "another recipe's group": (
        lambda r: r["benchmarks"][0].update(group="lenet/inference"),
        "benchmarks.0.group: it is 'lenet/inference'",
    ),
    "an unknown format": (
        lambda r: (
            rename(r, "fly"),
            r["d5suite"].update(measurements={"fly": describe("median_s", "runes")}),
        ),
        "median_s cannot be shown as 'runes'",
    ),
    "a format of other values": (
        lambda r: (
            rename(r, "fly"),
            r["d5suite"].update(measurements={"fly": describe("environment", "figure")}),
        ),
        "environment cannot be shown as 'figure'",
    ),
}


def rename(result: dict[str, Any], measurement: str) -> dict[str, Any]:
    record(result)["measurement"] = measurement
    result["benchmarks"][0]["group"] = f"{record(result)['recipe']}/{measurement}"
    return result


def describe(value: str, form: str) -> dict[str, Any]:
    table = {"columns": [{"heading": "x", "value": value, "format": form}], "note": "", "width": 20}
    return {"level": 1, "unit": "images/s", "table": table, "schema": {}}


@pytest.mark.parametrize("kept", sorted(REFERENCE.parent.glob("reference-*.json")), ids=lambda path: path.stem)
def test_the_references_of_this_repository_agree_with_themselves(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(capsys, kept)


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_a_value_that_cannot_be_is_named_with_its_place(
    kind: str, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said = BAD_VALUES[kind]
    damage(result)
    assert said in refused(write(tmp_path / "x.json", result), capsys)


def test_a_terminal_obeys_no_name(result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r"
    for bench in result["benchmarks"]:
        info = bench["extra_info"]["d5suite"]
        info["recipe"] = f"a{evil}"
        bench["group"] = f"a{evil}/{info['measurement']}"
        bench["param"] = f"torch{evil}"
    record(result)["machine"] = {"disturbed": True, "reasons": [f"other{evil}"]}
    record(result)["preset"] = evil
    record(result)["dataset"]["digest"] = "0" * 64
    text = shown(capsys, write(tmp_path / "x.json", result))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x1b[2J" in text
    record(result)["threads"] = evil
    refused(write(tmp_path / "x.json", result), capsys)


CONDITIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "threads": (lambda r: r.update(threads=7), "threads 7"),
    "ranks": (lambda r: r.update(ranks=2), "ranks 2"),
    "optimizer": (lambda r: r["optimizer"].update(learning_rate=0.5), "optimizer learning_rate 0.5"),
    "seed": (lambda r: r.update(seed=9), "seed 9"),
    "device": (lambda r: r.update(device="cuda"), "device cuda"),
    "device name": (lambda r: r.update(device_name="Other"), "device name Other"),
    "precision": (lambda r: r.update(precision="bf16"), "precision bf16"),
    "image size": (lambda r: r.update(image_size=9), "image size 9"),
    "classes": (lambda r: r.update(classes=9), "classes 9"),
    "batch": (lambda r: r.update(batch_size=9), "batch 9"),
    "preset": (lambda r: r.update(preset="huge"), "preset huge"),
    "data": (lambda r: r["dataset"].update(digest="0" * 64), f"data drawn imagenet {'0' * 64}"),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_results_of_other_conditions_stand_apart_and_what_differs_is_named(
    condition: str, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a.json", result)
    together = shown(capsys, first, write(tmp_path / "b.json", result))
    assert together.count("imagenet_resnet50  (") == 1
    assert "apart" not in together
    change, said = CONDITIONS[condition]
    for number in range(2):
        change(record(result, number))
    text = shown(capsys, first, write(tmp_path / "b.json", result))
    assert text.count("imagenet_resnet50  (") == 2
    assert text.count("apart from others by: ") == 2
    assert " ".join(text.split()).count(f"apart from others by: {said}") == 1
    tables = text.split("imagenet_resnet50  (")[1:]
    assert ["torch (1)" in each for each in tables] == [True, False]
    assert ["torch (2)" in each for each in tables] == [False, True]


def test_what_differs_within_one_file_stands_apart_too(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy.deepcopy(result["benchmarks"])
    for bench in other:
        bench["extra_info"]["d5suite"]["threads"] = 1
    result["benchmarks"] += other
    text = shown(capsys, write(tmp_path / "a.json", result))
    assert "apart from others by: threads 1" in text
    assert "apart from others by: threads 2" in text


@pytest.mark.parametrize("how", ["passed", "a check", "an error"])
def test_a_failed_validation_is_never_shown_like_another_result(
    how: str, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = shown(capsys, write(tmp_path / "a.json", result))
    assert "✗" not in first
    validation = record(result)["validation"]
    if how == "passed":
        validation["passed"] = False
    elif how == "a check":
        validation["checks"][0]["passed"] = False
    else:
        validation["checks"][0]["error"] = 2 * validation["checks"][0]["tolerance"]
    text = shown(capsys, write(tmp_path / "b.json", result))
    (row,) = (line for line in text.splitlines() if "torch✗" in line)
    assert row.split()[1:] == ["failed"] + ["–"] * (len(row.split()) - 2)
    assert "✗ failed validation" in text
    assert "imagenet_resnet50/inference, torch: " in text
    assert "torch✗" in shown(capsys, tmp_path / "b.json", tmp_path / "a.json")


def test_files_of_pytest_benchmark_alone_are_named_so(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"group": None, "name": "test_x", "param": None, "stats": {"data": [-1.0]}, "extra_info": {}}
    result["benchmarks"].insert(0, plain)  # beside d5suite's own they are left out
    assert "inference" in shown(capsys, write(tmp_path / "x.json", result))
    result["benchmarks"] = [plain, {}]
    assert "but 2 benchmarks of pytest-benchmark" in refused(write(tmp_path / "x.json", result), capsys)


def test_reasons_to_doubt_a_result_are_told(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(result)["warnings"] = ["8 threads share 2 CPUs, all that this process may use"]
    text = shown(capsys, write(tmp_path / "x.json", result))
    assert "torch!" in text
    assert "imagenet_resnet50/inference, torch: 8 threads share 2 CPUs" in text


def test_more_threads_than_cpus_reach_the_results_their_schema_and_the_table(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_pytest(
        str(recipe_folder), "--backend", "faulty", "-k", "inference", "--threads", "999", "--benchmark-json", "a.json"
    )
    assert done.returncode == 0, done.stdout
    assert "999 threads share" in done.stdout.split("d5suite =")[1]
    content = json.loads((tmp_path / "a.json").read_text())
    jsonschema.validate(content, result_schema())
    (warning,) = record(content)["warnings"]
    assert warning.startswith("999 threads share")
    text = shown(capsys, tmp_path / "a.json")
    assert re.search(r"faulty\*?!", text)
    assert warning in " ".join(text.split())


def test_series_of_another_run_beside_a_file_are_found(
    tmp_path: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a power failure between two renames."""
    result["d5suite"] |= {"series": "out.h5", "series_token": "a"}
    path = write(tmp_path / "out.json", result)
    shown(capsys, path)  # moved without its series
    save_series(tmp_path / "out.h5", {}, "a")
    shown(capsys, path)
    save_series(tmp_path / "out.h5", {}, "b")
    assert "it and its series, out.h5, come from different runs" in refused(path, capsys)
    (tmp_path / "out.h5").write_text("no HDF5")
    assert "the series beside it cannot be read" in refused(path, capsys)


@pytest.mark.parametrize("columns", [80, 100])
def test_long_names_of_schemes_are_divided_and_no_figure_is(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    kept = Path(__file__).parents[2] / "results" / "reference-2core-cpu-ranks.json"
    ranked = json.loads(kept.read_text())
    ranked["benchmarks"] = [
        each for each in ranked["benchmarks"] if each["param"].startswith(("torch", "jax", "mxnet"))
    ]
    for bench in ranked["benchmarks"]:
        info = bench["extra_info"]["d5suite"]
        info["machine"], backend = {"disturbed": False, "reasons": []}, info["backend"]
        if backend["name"] == "torch":
            backend["name"] = "tensorflow"
            bench["param"] = bench["param"].replace("torch", "tensorflow:xla", 1)
    said = shown(capsys, write(tmp_path / "ranks.json", ranked))
    heading, _, rest = said.partition("distributed_step")
    table = rest.split("\n\n")[0].splitlines()
    assert all(len(line) <= columns for line in said.splitlines())
    words = " ".join(heading.split())
    assert "median ms × fastest images/s comm" in words and " err/tol " in words
    assert ("slowest" in heading) == (columns == 100)
    rows = "\n".join(line.split()[0] for line in table if line.strip())
    named = rows.replace("\n-", "-").split("\n")
    assert sorted(named) == sorted(bench["param"] for bench in ranked["benchmarks"])
    one, two = ([name for name in named if name.endswith(f"all_reduce-{end}")] for end in ("local-1", "gloo-2"))
    assert len(one) == len(two) == 3 and named[:3] == one  # of as many ranks, the fastest first
    medians = {each["param"]: each["stats"]["median"] for each in ranked["benchmarks"]}
    assert all(sorted(group, key=lambda name: medians[name]) == group for group in (one, two))
    assert "\n-" in rows


def test_tables_of_operators_break_no_word_and_cut_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns "forward" was broken in two, and err/tol was cut."""
    path = Path(__file__).parents[2] / "results" / "reference-2core-cpu-operators.json"

    def tables(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["compare", "--tables", str(path)]) == 0
        return capsys.readouterr().out.partition("\n* disturbed")[0]

    wide, narrow = tables(400), tables(80)
    assert all(len(line) <= 80 for line in narrow.splitlines()) and "…" not in narrow
    backend = r"^  ((?:deep500|jax|keras|mxnet|tensorflow|torch)\*?) .* (\S+)$"
    errors = [re.findall(backend, text.replace(" \n", "\n"), re.MULTILINE) for text in (wide, narrow)]
    assert len(errors[0]) == 632 and errors[0] == errors[1]
    assert narrow.count("× fastest") == narrow.count("err/tol") == 15
    found = re.findall(r"^[\w/]+(?: *\n    [\w/]+)* *$", narrow, re.MULTILINE)
    measurements = [each.split() for each in found]
    with path.open() as file:
        named = {bench["group"].partition(".")[2] for bench in json.load(file)["benchmarks"]}
    assert named <= {"".join(parts) for parts in measurements}
    assert all(part.endswith(("/", "_")) for parts in measurements for part in parts[:-1])


def test_a_narrow_table_of_ranks_shows_waiting_the_slowest_rank_and_where_ranks_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    content = json.loads(REFERENCE.with_name("reference-2core-cpu-ranks.json").read_text())
    content["benchmarks"] = [b for b in content["benchmarks"] if b["param"] == "torch-all_reduce-gloo-2"][:1]
    info = record(content)
    info["distributed"] |= {"straggler_ratio": 7.82, "slowest_rank": 1}
    place = {
        "cpus": [0, 1, 2, 8], "sockets": [0], "numa_nodes": [0, 1], "gpu": "3", "transport": "TCP", "interface": "eth1",
        "nic_numa_node": 1,
    }  # fmt: skip
    info["placement"] = [
        {"rank": rank, "host": f"node{rank}", "address": f"10.0.0.{rank}", **place} for rank in range(2)
    ]
    assert main(["compare", str(write(tmp_path / "ranks.json", content))]) == 0
    shown = capsys.readouterr().out
    heading = next(line for line in shown.splitlines() if "images/s" in line)
    assert "comm" in heading and "wait" in heading and len(heading.rstrip()) <= 80
    where = "cores 0-2,8, socket 0, NUMA nodes 0-1, GPU 3, TCP eth1"
    flat = " ".join(shown.split())
    host = info["distributed"]["ranks"][1]["host"]
    assert f"torch-all_reduce-gloo-2: rank 1 on {host} computes 7.82 times as long as the others' mean" in flat
    assert f"2 ranks over gloo: rank 0: node0, {where} 10.0.0.0, its card at NUMA node 1 rank 1: node1, " in flat
