"""The command line as a person meets it, on an 80-column terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from d5suite.cli import main
from tests.conftest import Run, plugin_environment
from tests.report.pages import settle


def d5suite(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "d5suite.cli", *arguments],
        env={**os.environ, "COLUMNS": "80", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _fits(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines())


def test_help_lists_the_commands() -> None:
    done = d5suite("--help")
    assert done.returncode == 0
    for command in ("doctor", "backends", "compare", "network", "data"):
        assert command in done.stdout
    assert "pytest recipes/" in done.stdout
    assert _fits(done.stdout)
    assert d5suite().stdout == done.stdout


def test_conformance_has_pytests_options_for_going_on_after_a_failure() -> None:
    done = d5suite("conformance", "--help")
    for option in ("-k", "--quick", "--exitfirst", "--last-failed", "--durations", "--full-trace"):
        assert option in done.stdout
    assert _fits(done.stdout)


LACKING = """
import sys
sys.modules.update(dict.fromkeys(("tensorflow", "keras", "jax"), None))
from d5suite.cli import main
sys.exit(main(["doctor"]))
"""
"""``d5suite doctor`` where the frameworks that take longest to import are not installed."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["deep500", "faulty", "absent", "unimportable"], id="some", marks=pytest.mark.quick),
        pytest.param([], id="all", marks=pytest.mark.slow),
    ],
)
def test_doctor_tries_each_backend_and_survives_faulty_ones(names: list[str]) -> None:
    command = ["-m", "d5suite.cli", "doctor", *names] if names else ["-c", LACKING]
    done = subprocess.run(
        [sys.executable, *command], env=plugin_environment() | {"COLUMNS": "80"}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert _fits(done.stdout)
    flat = " ".join(done.stdout.replace("│", " ").split())
    assert re.search(r" faulty +\S+ yes ", flat)
    assert "no_such_framework" in flat
    assert "unimportable" in flat
    shown = flat.partition("Backends")[2]
    assert [f" {name} " in shown for name in ("onnxruntime", "mxnet", "torch")] == [not names] * 3
    assert "Noise:" in done.stdout


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["compare", LONG], ["compare", "a", "b", "--json", LONG], ["compare", "a", "--history", LONG],
        ["report", "a", "-o", LONG], ["layers", LONG], ["history", "show", LONG], ["network", f"{LONG}.onnx"],
        ["data", "verify", LONG, "b"], ["trace", "analyze", LONG], ["slurm", "run", "a", "--profile", LONG],
        ["advise", "gpt:layers=2,hidden=8,heads=2", "--batch", "2", "--machine", LONG], ["compare", ""],
        ["ab", "a", "--a", "here", "--b", "here", "--thresholds", LONG],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_path_that_cannot_be_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = 0
    try:
        code = main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said
    assert any(each in said for each in ("is too long", "the path is empty", "File name too long"))


def test_a_mistyped_recipe_is_named(tmp_path: Path) -> None:
    """An environment without the tests' own packages, as that of `make bench`, named hypothesis."""
    (tmp_path / "hypothesis.py").write_text("raise ModuleNotFoundError(\"No module named 'hypothesis'\")\n")
    environment = plugin_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "recipes/test_digit.py"],
        cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 4 and "file or directory not found: recipes/test_digit.py" in done.stderr, done.stderr
    assert "hypothesis" not in done.stdout + done.stderr


def test_doctor_refuses_an_unknown_backend() -> None:
    done = d5suite("doctor", "pytorch")
    assert done.returncode == 2 and "there is no backend 'pytorch'" in done.stderr


def test_backends_are_described() -> None:
    done = d5suite("backends", environment=plugin_environment())
    assert done.returncode == 0, done.stderr
    assert "faulty:segfault" in done.stdout
    flat = " ".join(done.stdout.split())
    assert "pip install 'd5suite[absent]'" in flat
    for fault in (
        "backend 'exits' is faulty: faulty_backend.exits:BACKEND failed to import: SystemExit: no licence",
        "backend 'modeless' breaks clause 'backend.data' of the contract: it has no mode",
        "backend 'twin' breaks clause 'backend.name' of the contract: faulty_backend:OTHER_TWIN (twin-backend) and "
        "faulty_backend:TWIN (faulty-backend) both have this name",
    ):
        assert fault in flat


def test_modes_of_backends_come_first_and_operators_only_on_request() -> None:
    """136 operators of each backend drowned its modes."""
    told = d5suite("backends").stdout
    first = told.partition("\n\n")[0].splitlines()
    assert first[0].startswith("modes") and any(
        re.match(r"torch:compile +(not )?(installed|here)", line) for line in first
    )
    assert "LayerNormalization" not in told and "operators (--operators lists them)" in told
    assert "LayerNormalization" in d5suite("backends", "--operators").stdout


def test_a_network_is_counted(small_onnx: Path) -> None:
    done = d5suite("network", "resnet50")
    assert "25,557,032" in done.stdout
    assert "4,089.184" in done.stdout
    layers = d5suite("network", str(small_onnx), "--layers", "--batch-size", "2")
    assert "2×8×16×16" in layers.stdout
    wrong = d5suite("network", "resnet51")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: the zoo has no network 'resnet51'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet50", "--batch-size", str(10**21)], f"--batch-size is {10**21}; it must be at most 2147483647"),
        (["resnet50", "--image-size", str(10**23)], f"--image-size is {10**23}; it must be at most 65536"),
        (["resnet50", "--image-size", "0"], "--image-size is 0; it must be at least 1"),
    ],
)
def test_sizes_of_a_network_have_bounds(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["network", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_pipe_is_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "f.onnx")
    assert main(["network", str(tmp_path / "f.onnx")]) == 2
    assert "f.onnx: this is not a regular file" in capsys.readouterr().err


def test_an_image_set_is_made_and_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "set"
    arguments = ("data", "make", "imagenet", "--out", str(out), "--classes", "2", "--train-per-class", "2")
    done = d5suite(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # progress is for terminals
    assert len(list((out / "train").rglob("*.JPEG"))) == 4
    made = d5suite("data", "make", "openimages", "--out", str(tmp_path / "several"), "--classes", "2",
                   "--train-images", "2", "--validation-images", "2", "--test-images", "2")  # fmt: skip
    assert f"pytest recipes/test_openimages_resnet50.py --openimages {tmp_path / 'several'}" in made.stdout
    again = d5suite(*arguments)
    assert again.returncode == 2
    assert str(out) in again.stderr


def test_results_are_compared(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", "--benchmark-json", "a.json")
    one = d5suite("compare", str(tmp_path / "a.json"))
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("small  (smoke, 32 px, batch 4, fp32, ")
    assert "inference" in one.stdout
    assert "faulty" in one.stdout
    assert _fits(one.stdout)
    slower = json.loads((tmp_path / "a.json").read_text())
    for bench in slower["benchmarks"]:
        settle(bench, [2 * each for each in bench["stats"]["data"]])
    (tmp_path / "b.json").write_text(json.dumps(slower))
    two = d5suite("compare", "--tables", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert "1.000" in two.stdout
    assert "2.000" in two.stdout
    assert _fits(two.stdout.split("small", 1)[1])  # above it stand the files' names
    for bench in slower["benchmarks"]:
        bench["extra_info"]["d5suite"]["dataset"]["digest"] = "0" * 64
    (tmp_path / "b.json").write_text(json.dumps(slower))
    other = d5suite("compare", "--tables", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert other.stdout.count("small  (smoke, 32 px, batch 4, fp32, ") == 2  # data of their own
    assert "2.000" not in other.stdout


@pytest.mark.parametrize("content", ["", "{", "[]", '{"benchmarks": []}'])
def test_a_file_without_results_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    done = d5suite("compare", str(tmp_path / "x.json"))
    assert done.returncode == 2
    assert str(tmp_path / "x.json") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_reference_results_fit_the_schema_and_are_shown() -> None:
    folder = Path(__file__).parents[1] / "results"
    schema = json.loads((folder / "schema.json").read_text())
    references = sorted(folder.glob("reference-*.json"))
    assert references
    for reference in references:
        result = json.loads(reference.read_text())
        jsonschema.validate(result, schema)
        assert (folder / result["d5suite"]["series"]).exists()
        done = d5suite("compare", str(reference))
        assert done.returncode == 0
        assert _fits(done.stdout)


def test_a_backend_of_reduced_size_stands_in_the_table_of_the_others() -> None:
    done = d5suite("compare", str(Path(__file__).parents[1] / "results" / "reference-2core-cpu-smoke.json"))
    assert done.stdout.count("imagenet_resnet50  (") == 1
    assert "deep500† " in done.stdout and "† deep500 is measured at a reduced size, batch 2" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  deep500† ")]
    assert len(rows) == 4 and all("–" in row and "1" not in row for row in rows)  # not ranked


@pytest.mark.parametrize("words", [["ab", "--help"], ["backends"], ["network", "resnet18"]], ids=" ".join)
def test_a_terminal_that_lacks_characters_gets_others(words: list[str]) -> None:
    environment = {**plugin_environment(), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-m", "d5suite.cli", *words], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode("latin-1")
    assert done.stdout and b"Traceback" not in done.stderr
