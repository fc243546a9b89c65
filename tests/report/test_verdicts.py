"""``d5suite compare BASE NEW``: each verdict and exit code, planted; what differs is refused; files
of pytest-benchmark and asv; files that lie."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as XML

import pytest

from d5suite.cli import main
from tests.conftest import Run
from tests.report.pages import settle

REFERENCE = Path(__file__).parents[2] / "results" / "reference-2core-cpu-smoke.json"
RANKS = REFERENCE.with_name("reference-2core-cpu-ranks.json")
QUIET = ("--between-runs", "0.005")
"""Of a machine on which runs hardly differ."""


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(REFERENCE.read_text())
    chosen = ("imagenet_resnet50/inference", "imagenet_resnet50/gradient")
    content["benchmarks"] = [
        b for b in content["benchmarks"] if b["group"] in chosen and b["param"] in ("jax", "torch")
    ]
    assert len(content["benchmarks"]) == 4
    noise = random.Random(0)
    for bench in content["benchmarks"]:
        bench["extra_info"]["d5suite"].pop("turns", None)  # the rounds of other samples
        settle(bench, [bench["stats"]["median"] * noise.lognormvariate(0, 0.01) for _ in range(15)])
    return content


@pytest.fixture
def result(reference: dict[str, Any]) -> dict[str, Any]:
    """A file of four results, to be changed."""
    return copy.deepcopy(reference)


@pytest.fixture
def base(reference: dict[str, Any], tmp_path: Path) -> Path:
    return write(tmp_path / "base.json", reference)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def record(result: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = result["benchmarks"][number]["extra_info"]["d5suite"]
    return found


def slow_down(result: dict[str, Any], factor: float, *numbers: int) -> None:
    for number in numbers:
        bench = result["benchmarks"][number]
        settle(bench, [factor * each for each in bench["stats"]["data"]])


def compared(
    capsys: pytest.CaptureFixture[str], base: Path, new: Path, *options: str, code: int
) -> dict[str, dict[str, Any]]:
    """Compare, and return the JSON's benchmarks by name."""
    assert main(["compare", str(base), str(new), "--json", "-", *options]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["exit"] == code
    return {each["name"]: each for each in found["benchmarks"]}


TORCH = "imagenet_resnet50/inference torch"


def name_of(result: dict[str, Any], number: int) -> str:
    bench = result["benchmarks"][number]
    return f"{bench['group']} {bench['param']}"


def test_the_same_results_are_the_same(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, base, base, *QUIET, code=0)
    assert {each["verdict"] for each in found.values()} == {"same"}
    assert all(each["ratio"] == 1 and each["interval"][0] < 1 < each["interval"][1] for each in found.values())


def test_two_runs_on_a_noisy_machine_are_never_told_the_same_nor_slower(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third slower is what two runs of the same code may show."""
    slow_down(result, 1.33, 0, 1, 2, 3)
    found = compared(capsys, base, write(tmp_path / "new.json", result), code=6)
    assert {each["verdict"] for each in found.values()} == {"uncertain"}
    assert "two runs may differ by" in found[TORCH]["reasons"][0]


@pytest.mark.parametrize(("factor", "verdict", "code"), [(3.0, "slower", 1), (1 / 3, "faster", 6)])
def test_what_exceeds_the_noise_between_runs_is_found_among_the_others(
    factor: float, verdict: str, code: int, base: Path, result: dict[str, Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    slow_down(result, factor, 2)
    found = compared(capsys, base, write(tmp_path / "new.json", result), code=code)
    assert [name for name, each in found.items() if each["verdict"] == verdict] == [name_of(result, 2)]
    assert found[name_of(result, 2)]["ratio"] == pytest.approx(factor)


def test_a_small_change_is_found_where_runs_hardly_differ_and_counts_from_the_least_effect_on(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_down(result, 1.08, 0)
    slow_down(result, 1.02, 1)
    found = compared(capsys, base, write(tmp_path / "new.json", result), *QUIET, code=1)
    assert found[name_of(result, 0)]["verdict"] == "slower"
    assert found[name_of(result, 0)]["p_value"] < 0.001
    assert found[name_of(result, 1)]["verdict"] == "same"


def test_samples_that_overlap_decide_nothing(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The median moved, but as many samples are as fast as before."""
    data = result["benchmarks"][0]["stats"]["data"]
    settle(result["benchmarks"][0], [each * (1.3 if n % 2 else 0.8) for n, each in enumerate(data + data[:1])])
    found = compared(capsys, base, write(tmp_path / "new.json", result), *QUIET, code=6)
    assert found[name_of(result, 0)]["verdict"] == "uncertain"


def test_a_disturbed_run_convicts_nobody(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_down(result, 3, 0)
    record(result)["machine"] = {"disturbed": True, "reasons": ["steal 20%"]}
    found = compared(capsys, base, write(tmp_path / "new.json", result), *QUIET, code=6)
    assert found[name_of(result, 0)]["reasons"] == ["NEW was disturbed: steal 20%"]
    record(result)["machine"] = {"disturbed": False, "reasons": []}
    record(result)["warnings"] = [loud := "the machine was not quiet after 300 s of --wait-quiet: load 3.1"]
    found = compared(capsys, base, write(tmp_path / "new.json", result), *QUIET, code=6)
    assert found[name_of(result, 0)]["reasons"] == [f"NEW was disturbed: {loud}"]


def test_a_benchmark_that_disappears_is_missing_and_another_one_new(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = name_of(result, 1)
    del result["benchmarks"][1]
    less = write(tmp_path / "less.json", result)
    assert compared(capsys, base, less, *QUIET, code=4)[gone]["verdict"] == "missing"
    assert compared(capsys, less, base, *QUIET, code=0)[gone]["verdict"] == "new"


def test_a_failed_benchmark_says_why_it_is_missing_and_a_wrong_answer_is_none(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = name_of(result, 1)
    group, _, backend = gone.rpartition(" ")
    del result["benchmarks"][1]
    failure = {"group": group, "backend": backend, "wrong": False, "message": "died of SIGKILL\nlog"}
    result["d5suite"]["failures"] = [failure]
    new = write(tmp_path / "new.json", result)
    found = compared(capsys, base, new, *QUIET, code=4)[gone]
    assert (found["verdict"], found["reasons"]) == ("missing", ["it failed: died of SIGKILL"])
    failure["wrong"] = True
    write(new, result)
    assert compared(capsys, base, new, *QUIET, code=3)[gone]["verdict"] == "invalid"
    assert compared(capsys, new, new, *QUIET, code=3)[gone]["verdict"] == "invalid"  # though BASE has it not either
    failed = write(tmp_path / "failed.json", result)
    del result["d5suite"]["failures"]
    assert main(["compare", str(failed), str(write(new, result)), *QUIET]) == 0
    assert f"failed in BASE, and NEW has it not: {gone}: died of SIGKILL" in capsys.readouterr().out


def test_a_failed_validation_is_invalid_however_fast(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_down(result, 0.1, 0)
    record(result)["validation"]["checks"][0]["error"] = 2 * record(result)["validation"]["checks"][0]["tolerance"]
    new = write(tmp_path / "new.json", result)
    assert compared(capsys, base, new, *QUIET, code=3)[name_of(result, 0)]["verdict"] == "invalid"
    assert compared(capsys, new, base, *QUIET, code=0)[name_of(result, 0)]["verdict"] == "new"


GROWN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "memory": (lambda r: r.update(peak_memory_bytes=int(1.12 * r["peak_memory_bytes"])), "grew by 12%"),
    "first call": (lambda r: r.update(first_call_s=10 * r["first_call_s"] + 1), "times as long"),
    "accuracy": (
        lambda r: r["validation"]["checks"][0].update(error=0.9 * r["validation"]["checks"][0]["tolerance"]),
        "to 0.9 of what is accepted",
    ),
}


@pytest.mark.parametrize("what", GROWN)
def test_what_else_grew_is_a_regression(
    what: str, base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = GROWN[what]
    change(record(result))
    new = write(tmp_path / "new.json", result)
    found = compared(capsys, base, new, *QUIET, code=1)
    assert found[name_of(result, 0)]["regressions"] == [what]
    assert said in found[name_of(result, 0)]["reasons"][0]
    assert [each["regressions"] for each in found.values()].count([]) == 3
    compared(capsys, new, base, *QUIET, code=0)
    lax = write(tmp_path / "lax.toml", "[default]\nmemory = 0.2\nfirst_call = 100\naccuracy = 1e6\n")
    compared(capsys, base, new, *QUIET, "--thresholds", str(lax), code=0)


DIFFER: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "threads": (lambda r: r.update(threads=7), "threads: 2 ≠ 7"),
    "preset": (lambda r: r.update(preset="huge"), "preset: smoke ≠ huge"),
    "precision": (lambda r: r.update(precision="bf16"), "precision: fp32 ≠ bf16"),
    "data": (lambda r: r["dataset"].update(digest="0" * 64), "data: "),
    "seed": (lambda r: r.update(seed=9), "seed: 0 ≠ 9"),
    "device": (lambda r: r.update(device="cuda", device_name="GPU"), "device: cpu ≠ cuda"),
    "CPU": (lambda r: r["environment"]["cpu"].update(model="Other"), "≠ Other"),
    "cores": (lambda r: r["environment"]["cpu"].update(logical_cores=64), "cores: 2 ≠ 64"),
    "memory": (lambda r: r["environment"]["memory"].update(total_bytes=1 << 40), "memory: 24 GiB ≠ 1024 GiB"),
    "driver": (lambda r: r["environment"].update(gpus=[{"name": "G", "driver_version": "1"}]), "driver: none ≠ 1"),
    "L2": (lambda r: r.update(l2_cold={"cache_bytes": 1, "buffer_bytes": 2}), "L2 cache: none ≠ cold"),
    "ECC": (lambda r: r["environment"].update(gpus=[{"ecc_mode_current": "Disabled"}]), "GPU ECC: none ≠ Disabled"),
    "MIG": (lambda r: r["environment"].update(gpus=[{"mig_mode_current": "Enabled"}]), "GPU MIG: none ≠ Enabled"),
    "power": (lambda r: r["environment"].update(gpus=[{"power_limit": "300.00"}]), "power limit (W): none ≠ 300.00"),
}


@pytest.mark.parametrize("what", DIFFER)
def test_runs_of_other_conditions_are_refused_unless_forced(
    what: str, base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = DIFFER[what]
    change(record(result))
    new = write(tmp_path / "new.json", result)
    assert compared(capsys, base, new, *QUIET, code=5) == {}
    assert main(["compare", str(base), str(new)]) == 5
    text = capsys.readouterr().out
    assert said in " ".join(text.split())
    assert f"({name_of(result, 0)})" in " ".join(text.split())
    assert len(compared(capsys, base, new, *QUIET, "--force", code=0)) == 4


SET_UP: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "settings": (lambda d: d["settings"].update(overlap=False), "scheme overlap: True ≠ False"),
    "launcher": (lambda d: d.update(launcher="mpi"), "launcher: process ≠ mpi"),
    "algorithm": (lambda d: d.update(algorithm="ring"), "algorithm: native ≠ ring"),
    "oversubscribed": (lambda d: d.update(oversubscribed=True), "oversubscribed: False ≠ True"),
    "hosts": (lambda d: d["ranks"][1].update(host="other"), "hosts: 1 ≠ 2"),
}


@pytest.mark.parametrize("what", SET_UP)
def test_ranks_of_another_set_up_are_refused(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(RANKS.read_text())
    content["benchmarks"] = [each for each in content["benchmarks"] if each["param"] == "torch-all_reduce-gloo-2"]
    base = write(tmp_path / "base.json", content)
    compared(capsys, base, base, code=6)
    change, said = SET_UP[what]
    change(record(content)["distributed"])
    new = write(tmp_path / "new.json", content)
    assert compared(capsys, base, new, code=5) == {}
    main(["compare", str(base), str(new)])
    assert said in capsys.readouterr().out


def test_versions_may_differ_and_are_told(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(result)["backend"]["version"] = "99.0"
    found = compared(capsys, base, write(tmp_path / "new.json", result), *QUIET, code=0)
    assert any(each.endswith("≠ 99.0") for each in found[name_of(result, 0)]["differences"])


def test_which_one_of_equal_gpus_it_was_is_told(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = {"name": "G", "driver_version": "1", "mig_mode_current": "Disabled"}
    paths = []
    for number, uuid in enumerate(("ab12", "cd34")):
        for bench in result["benchmarks"]:
            bench["extra_info"]["d5suite"]["environment"]["gpus"] = [{**gpu, "uuid_sha256": uuid}]
        paths.append(write(tmp_path / f"{number}.json", result))
    found = compared(capsys, paths[0], paths[1], *QUIET, code=0)
    assert "GPU (hashed UUID): ab12 ≠ cd34" in found[name_of(result, 0)]["differences"]
    assert not any("MIG" in each for each in found[name_of(result, 0)]["differences"])


def test_results_of_several_conditions_in_one_file_find_their_own(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy.deepcopy(result["benchmarks"])
    for bench in other:
        bench["extra_info"]["d5suite"]["threads"] = 1
        settle(bench, [2 * each for each in bench["stats"]["data"]])
    one = write(tmp_path / "one.json", {**result, "benchmarks": result["benchmarks"] + other})
    turned = write(tmp_path / "turned.json", {**result, "benchmarks": other + result["benchmarks"]})
    assert main(["compare", str(one), str(turned), *QUIET]) == 0
    assert "8 same" in capsys.readouterr().out


def test_thresholds_are_of_benchmarks_and_later_ones_win(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_down(result, 1.2, 0, 1, 2, 3)
    new = write(tmp_path / "new.json", result)
    rules = "[default]\nbetween_runs = 0.005\n[[benchmark]]\nmatch = '*inference*'\neffect = 0.3\n"
    rules += "[[benchmark]]\nmatch = '* torch'\neffect = 0.1\n[[benchmark]]\nmatch = 'nothing*'\n"
    thresholds = write(tmp_path / "t.toml", rules)
    found = compared(capsys, base, new, "--thresholds", str(thresholds), code=1)
    assert {name: each["verdict"] for name, each in found.items()} == {
        "imagenet_resnet50/inference jax": "same",
        "imagenet_resnet50/inference torch": "slower",
        "imagenet_resnet50/gradient jax": "slower",
        "imagenet_resnet50/gradient torch": "slower",
    }
    assert main(["compare", str(base), str(new), "--thresholds", str(thresholds)]) == 1
    assert "'nothing*' matches no benchmark" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("effect = 1", "'effect' is unknown"),
        ("[default]\nefect = 1", "'efect' is unknown"),
        ("[default]\neffect = -1", "effect is -1"),
        ("[default]\neffect = nan", "effect is nan"),
        ("[default]\neffect = true", "effect is True"),
        ("[default]\nfirst_call = 0.5", "first_call is 0.5"),
        ("[[benchmark]]\neffect = 1", "it has no 'match'"),
        ("benchmark = 3", "'benchmark' is not a list"),
        ("default = 3", "not a table"),
        ("[default", "not valid TOML"),
        ("x = " + "[" * 100_000, "not valid TOML"),
        ("\x1b]0;x\x07", "not valid TOML"),
    ],
)
def test_thresholds_that_make_no_sense_are_one_error(
    content: str, said: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thresholds = write(tmp_path / "t.toml", content)
    assert main(["compare", str(base), str(base), "--thresholds", str(thresholds)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err and str(thresholds) in shown.err
    assert all(c.isprintable() or c == "\n" for c in shown.err)


def test_a_threshold_may_be_given_by_a_name_with_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `compare` prints it; a shell pattern would take [10-x] for one character."""
    base = write(tmp_path / "a.json", plain({"test_a[10-x]": 1e-3, "test_ax": 1e-3}))
    new = write(tmp_path / "b.json", plain({"test_a[10-x]": 1.3e-3, "test_ax": 1e-3}))
    rules = write(tmp_path / "t.toml", "[[benchmark]]\nmatch = 'test_x.py::test_a[10-x]'\neffect = 0.5\n")
    found = compared(capsys, base, new, *QUIET, "--thresholds", str(rules), code=0)
    assert found["test_x.py::test_a[10-x]"]["verdict"] == "same"


def test_options_of_verdicts_need_two_files(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(base), "--force"]) == 2
    assert main(["compare", str(base), str(base), str(base), "--between-runs", "0.1"]) == 2
    assert main(["compare", str(base), str(base), "--between-runs", "nan"]) == 2
    assert main(["compare", str(base), str(base), "--json", str(base.with_name("no") / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_every_form_says_the_same_and_obeys_no_name(
    base: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\u202e\r|<b>[x](http:x)@all\x00"
    for content in (result, base_content := json.loads(base.read_text())):
        record(content, 3)["recipe"] = f"a{evil}"
        content["benchmarks"][3]["group"] = f"a{evil}/{record(content, 3)['measurement']}"
    write(base, base_content)
    slow_down(result, 1.5, 0)
    gone = name_of(result, 1)
    del result["benchmarks"][1]
    record(result, 1)["validation"]["passed"] = False
    new = write(tmp_path / "new.json", result)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "junit")}
    options = [each for name, path in files.items() for each in (f"--{name}", str(path))]
    assert main(["compare", str(base), str(new), *QUIET, *options]) == 3
    text = capsys.readouterr().out
    assert "1 slower, 1 same, 1 missing, 1 invalid (exit 3)" in text
    markdown = files["markdown"].read_text()
    assert "1 slower, 1 same, 1 missing, 1 invalid" in markdown
    for each in (text, markdown):
        assert all(c.isprintable() or c in "\n\u200b" for c in each)
        assert "\\x1b" in text
    assert "<b>" not in markdown and "](" not in markdown and "@all" not in markdown
    tree = XML.fromstring(files["junit"].read_bytes())  # noqa: S314  ours
    assert {key: tree.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "2", "errors": "1", "skipped": "0",
    }  # fmt: skip
    (missing,) = (each for each in tree if f"{each.get('classname')} {each.get('name')}" == gone)
    assert missing[0].tag == "failure"
    assert json.loads(files["json"].read_text())["exit"] == 3


def test_no_name_becomes_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "a.json", plain({"https://x.y": 1.0, "WWW.x.y": 1.0}))
    assert main(["compare", str(base), str(base), *QUIET, "--markdown", "-"]) == 0
    assert not any(each in capsys.readouterr().out for each in ("://", "WWW."))


def test_the_table_fits_a_terminal(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", str(base), str(base)]) == 6
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


# Files of other tools


def plain(medians: dict[str, float], *, data: bool = True, cores: int = 2) -> dict[str, Any]:
    noise = random.Random(1)
    benchmarks = []
    for name, median in medians.items():
        samples = [median * noise.lognormvariate(0, 0.01) for _ in range(20)]
        stats: dict[str, Any] = {"median": median, "iqr": 0.014 * median, "rounds": 20}
        benchmarks.append(
            {"name": name, "fullname": f"test_x.py::{name}", "stats": stats | ({"data": samples} if data else {})}
        )
    machine = {"cpu": {"brand_raw": "X", "count": cores}, "machine": "x86_64", "system": "Linux"}
    return {"machine_info": machine, "benchmarks": benchmarks, "datetime": "2026-01-01", "version": "5.3.1"}


@pytest.mark.parametrize("data", [True, False])
def test_files_of_pytest_benchmark_are_compared(data: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "a.json", plain({"test_a[x y]": 1e-3, "test_b": 2.0, "test_c": 3.0}, data=data))
    new = write(tmp_path / "b.json", plain({"test_a[x y]": 1e-3, "test_b": 3.0}, data=data))
    found = compared(capsys, base, new, *QUIET, code=1)
    assert {name: each["verdict"] for name, each in found.items()} == {
        "test_x.py::test_a[x y]": "same", "test_x.py::test_b": "slower", "test_x.py::test_c": "missing",
    }  # fmt: skip
    other = write(tmp_path / "c.json", plain({"test_b": 2.0}, cores=4))
    assert compared(capsys, base, other, code=5) == {}


def test_two_unnamed_processors_are_told_apart_by_their_instructions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, flags in {"a": ["asimd"], "b": ["sve", "asimd"], "c": ["asimd"]}.items():
        cpu = {"count": 2, "arch_string_raw": "aarch64", "flags": flags}
        run = plain({"test_a": 1.0}) | {"machine_info": {"cpu": cpu, "machine": "aarch64", "system": "Linux"}}
        files.append(write(tmp_path / f"{name}.json", run))
    assert compared(capsys, files[0], files[1], code=5) == {}
    assert main(["compare", str(files[0]), str(files[1])]) == 5
    assert "asimd, sve" in " ".join(capsys.readouterr().out.split())
    assert main(["compare", str(files[0]), str(files[2]), *QUIET]) == 0
    assert "does not name the CPU's model" in " ".join(capsys.readouterr().out.split())


def asv(results: dict[str, list[Any]], cpu: str = "X") -> str:
    columns = ["result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b",
               "stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples", "profile"]  # fmt: skip
    return json.dumps(
        {"commit_hash": "0" * 40, "env_name": "virtualenv-py3.11", "date": 1, "python": "3.11", "requirements": {},
         "params": {"machine": "m", "cpu": cpu, "num_cpu": "2", "arch": "x86_64", "ram": "1", "os": "Linux"},
         "result_columns": columns, "results": results, "version": 2}
    )  # fmt: skip


def test_files_of_asv_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def timed(*medians: float | None, params: Any = ()) -> list[Any]:
        known = [each and 0.99 * each for each in medians], [each and 1.01 * each for each in medians]
        return [list(medians), list(params), "v", 1, 1.0, None, None, *known, [1] * len(medians), [30] * len(medians)]

    sizes = [["1", "2", "3"]]
    rows = {"b.time_x": timed(1.0), "b.T.time_y": timed(1.0, 2.0, math.nan, params=sizes),
            "b.peakmem_z": timed(100.0 * 2**20), "b.track_w": timed(3.0), "b.time_v": timed(1.0)}  # fmt: skip
    base = write(tmp_path / "a.json", asv(rows))
    rows |= {
        "b.T.time_y": timed(1.0, 3.0, math.nan, params=sizes),
        "b.peakmem_z": timed(120.0 * 2**20),
        "b.time_v": timed(None),
    }
    new = write(tmp_path / "b.json", asv(rows))
    found = compared(capsys, base, new, *QUIET, code=1)
    assert {name: each["verdict"] for name, each in found.items()} == {
        "b.time_x": "same", "b.T.time_y(1)": "same", "b.T.time_y(2)": "slower", "b.peakmem_z": "slower",
        "b.time_v": "missing",
    }  # fmt: skip
    assert found["b.peakmem_z"]["regressions"] == ["memory"]
    assert main(["compare", str(base), str(new), *QUIET]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "b.track_w: whether more of it is better is not known" in text
    assert compared(capsys, base, write(tmp_path / "c.json", asv(rows, cpu="Y")), code=5) == {}


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no samples": (lambda: plain_of({"data": []}), "has no samples"),
    "a clock that went backwards": (lambda: plain_of({"data": [1.0, -0.5]}), "'-0.5' is not a positive number"),
    "a clock that stood": (lambda: plain_of({"median": 0}), "'0' is not a positive number"),
    "a huge number": (lambda: plain_of({"data": [10**300]}), "beyond 64 bits"),
    "NaN": (lambda: plain_of({"data": [math.nan]}), "'nan' is not a positive number"),
    "an odd median": (lambda: plain_of({"median": "\x1b[2J"}), "is not a positive number"),
    "no stats": (lambda: {"benchmarks": [{"name": "x", "fullname": "x", "extra_info": {}}]}, "no name or no stats"),
    "no name": (lambda: {"benchmarks": [{"stats": {}, "extra_info": {}}]}, "no name or no stats"),
    "a name twice": (lambda: {"benchmarks": plain({"a": 1.0})["benchmarks"] * 2}, "test_x.py::a occurs twice"),
    "odd benchmarks": (lambda: {"benchmarks": [3]}, "does not fit"),
    "no benchmarks": (lambda: {"benchmarks": []}, "no benchmarks here"),
    "a list": (lambda: [], "no benchmarks here"),
    "an empty file": (lambda: "", "not valid JSON"),
    "a truncated file": (lambda: REFERENCE.read_text()[:100_000], "not valid JSON"),
    "a file nested deeply": (lambda: '{"benchmarks": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "a number of 5,000 digits": (lambda: '{"benchmarks": ' + "9" * 5000 + "}", "no benchmarks here"),
    "another schema": (
        lambda: REFERENCE.read_text().replace('"d5suite-1"', '"d5suite-99"'), "Read it with the version of d5suite",
    ),
    "asv's other format": (lambda: {"result_columns": [], "results": {}, "version": 1}, "not a result file of asv"),
    "asv without results": (lambda: {"result_columns": [], "results": {}, "version": 2}, "no benchmarks here"),
    "asv's too many params": (
        lambda: {"result_columns": ["result", "params"], "version": 2,
                 "results": {"time_x": [None, [list(range(1000))] * 20]}}, "differs from the combinations of params",
    ),
    "asv's odd result": (
        lambda: {"result_columns": ["result"], "version": 2, "results": {"time_x\x1b": [[[]]]}},
        "not a positive number",
    ),
}  # fmt: skip


def plain_of(stats: dict[str, Any]) -> dict[str, Any]:
    content = plain({"a": 1.0}, data=False)
    content["benchmarks"][0]["stats"] |= stats
    return content


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("side", ["BASE", "NEW"])
def test_a_bad_file_is_one_error_that_names_it(
    kind: str, side: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = BAD[kind]
    bad = write(tmp_path / "bad.json", make())
    assert main(["compare", *map(str, (bad, base) if side == "BASE" else (base, bad))]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {bad}")
    assert said in shown.err
    assert all(c.isprintable() or c == "\n" for c in shown.err)
    assert len(shown.err) < 2000 and shown.err.count("\n") <= 2


def test_times_far_apart_have_a_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far = [
        write(tmp_path / f"{n}.json", plain_of({"data": [s, 1.01 * s, 0.99 * s]}))
        for n, s in enumerate((1e-300, 1e300))
    ]
    for (base, new), code in ((far, 1), (far[::-1], 0)):
        assert compared(capsys, base, new, code=code)["test_x.py::a"]["verdict"] == ("slower" if code else "faster")
        assert main(["compare", str(base), str(new)]) == code
        capsys.readouterr()


def test_a_wrong_answer_of_a_run_is_known_to_the_comparison(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_pytest(
        str(recipe_folder), "--backend", "faulty,faulty:wrong", "-k", "inference", "--benchmark-json", "a.json"
    )
    assert done.returncode == 1
    content = json.loads((tmp_path / "a.json").read_text())
    (failure,) = content["d5suite"]["failures"]
    assert failure["wrong"] is True
    assert (failure["group"], failure["backend"]) == ("small/inference", "faulty:wrong")
    found = compared(capsys, tmp_path / "a.json", tmp_path / "a.json", code=3)
    assert {name: each["verdict"] for name, each in found.items()}["small/inference faulty:wrong"] == "invalid"
