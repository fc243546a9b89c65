"""Recipes through pytest, as a user runs them, on a backend that misbehaves on request."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import jsonschema
import pytest

from d5suite.backends import discover
from d5suite.cases.recipe import Recipe
from d5suite.validate.metrics import METRICS
from tests.conftest import (
    Run,
    is_dead,
    made_once,
    plugin_environment,
    run_recipe,
    run_several,
    wait_until,
    write_recipe,
)

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "results" / "schema.json").read_text())


def _strict(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_a_measurement_becomes_an_ordinary_benchmark(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    options = ("--backend", "faulty", "-k", "inference", "--benchmark-json", "out.json", "-v")
    done = run_pytest(str(recipe_folder), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    result = _strict(tmp_path / "out.json")
    jsonschema.validate(result, SCHEMA)
    (bench,) = result["benchmarks"]
    assert bench["name"] == "test_inference[faulty]"
    assert bench["group"] == "small/inference"
    info = bench["extra_info"]["d5suite"]
    versions = {"faulty": "1.0", "library": "1.0"}
    assert info["backend"] == {"name": "faulty", "mode": "good", "version": "1.0", "versions": versions}
    assert info["validation"]["checks"][0]["name"] == "output (good fp32) vs onnxruntime"
    assert 0 < info["proof_after_s"] < 60
    assert "d5suite: what was timed was proved afterwards in " in done.stdout
    assert info["batch_size"] == 4
    assert {**info["dataset"], "digest": ""} == {
        "kind": "imagenet", "synthetic": True, "images": 32, "format": "folder", "digest": ""
    }  # fmt: skip
    assert info["macs"] == 4 * (16 * 16 * (3 * 8 * 9 + 8 * 8 * 9) + 8 * 4)
    assert info["peak_memory_bytes"] > 10 << 20
    low, high = info["median_ci95"]
    assert low <= info["median_s"] <= high
    assert info["throughput"]["value"] == pytest.approx(4 / info["median_s"])
    with h5py.File(tmp_path / result["d5suite"]["series"]) as file:
        samples = file[bench["fullname"].replace("/", "|")]["samples_s"][()]
    assert samples.tolist() == bench["stats"]["data"]  # the very samples, to the last bit
    assert bench["stats"]["median"] == pytest.approx(info["median_s"])
    leftovers = [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")]
    assert not leftovers


def test_a_kept_job_file_reproduces_the_measurement(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", "--jobs", "kept", "--seed", "7")
    (job,) = (tmp_path / "kept").rglob("small-faulty.job.json")
    result = job.with_name("small-faulty.result.json")
    first = _strict(result)
    result.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.worker", str(job)], env=plugin_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    again = _strict(result)
    for checks in (each["small/inference"]["checks"] for each in (again["validation"], first["validation"])):
        for check in checks:
            if any(each in check["name"] for each in ("remembered", "outside the clock", "memory taken")):
                del check["detail"]  # it names times and bytes
    assert again["validation"] == first["validation"]
    assert again["status"] == "done"
    assert "inference: median" in done.stdout


@pytest.mark.slow
def test_a_recipe_of_several_formats_is_one_recipe_of_each(
    run_pytest: Run, recipe_folder: Path, tiny_images: Path, tmp_path: Path
) -> None:
    from d5suite.data.convert import convert

    file = recipe_folder / "test_small.py"
    file.write_text(file.read_text().replace(
        "Recipe(name=", "Recipe(measurements=('input_pipeline',), formats=('folder', 'recordio'), name="
    ))  # fmt: skip
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "--benchmark-json", "out.json", "-rs")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 deselected" in done.stdout
    result = _strict(tmp_path / "out.json")
    jsonschema.validate(result, SCHEMA)
    (bench,) = result["benchmarks"]
    assert bench["name"] == "test_input_pipeline_folder[faulty]"
    assert bench["group"] == "small-folder/input_pipeline"
    info = bench["extra_info"]["d5suite"]
    assert info["loader"] == "d5suite.data.Loader"
    assert info["format"] == "folder"
    assert info["images_per_s_per_core"] == pytest.approx(info["throughput"]["value"] / len(info["cpus"]))
    assert 0 < info["wait_s"] <= max(bench["stats"]["data"])

    # Without a dataset of the user's a small one is made, and converted
    cache = tmp_path / "cache"
    made = cache / "imagenet-v1-4x80+20-250-500px-seed0"
    cache.mkdir()
    shutil.copytree(tiny_images, made)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe_folder), "--backend", "faulty",
               "-k", "recordio", "--benchmark-json", "out.json"]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=plugin_environment() | {"D5SUITE_CACHE": str(cache)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    (bench,) = _strict(tmp_path / "out.json")["benchmarks"]
    assert bench["extra_info"]["d5suite"]["format"] == "recordio"
    convert(made, tmp_path / "by-hand", "recordio")
    assert (made.with_name(f"{made.name}-recordio") / "train.rec").read_bytes() == (
        tmp_path / "by-hand" / "train.rec"
    ).read_bytes()


FAULTS = {
    "wrong": "output (wrong fp32) vs onnxruntime: relative error 0.01 exceeds 5e-05",
    "nan": "backend 'faulty' breaks clause 'executor.finite' of the contract: tensor 'fc' holds non-finite numbers",
    "shape": "clause 'executor.forward' of the contract: tensor 'fc' has shape (4, 3), not (4, 4)",
    "dtype": "clause 'executor.fetch' of the contract: tensor 'fc' is float64, not float32",
    "few": "clause 'executor.forward' of the contract: tensor 'fc' is missing from its answer",
    "raises": "RuntimeError: the kernel is missing",
    "segfault": "died of SIGSEGV (it crashed), while measuring small/inference",
    "killed": "died of SIGKILL",
}


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(("wrong", "segfault"), id="two", marks=pytest.mark.quick),
        pytest.param(tuple(FAULTS), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_fault_costs_its_own_test_and_nothing_more(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    done = run_pytest(
        str(recipe_folder), "--backend", ",".join(["faulty", *(f"faulty:{mode}" for mode in modes)]),
        "-k", "inference or input_pipeline", "--benchmark-json", "out.json", "--benchmark-max-time", "0.01",
    )  # fmt: skip
    assert done.returncode == 1
    for mode in modes:
        assert FAULTS[mode] in done.stdout, mode
    assert done.stdout.count("job file: ") >= len(modes)
    assert f"{len(modes)} failed, {len(modes) + 2} passed" in done.stdout
    names = {bench["name"] for bench in _strict(tmp_path / "out.json")["benchmarks"]}
    assert names == {"test_inference[faulty]", "test_input_pipeline[faulty]"} | {
        f"test_input_pipeline[faulty:{mode}]" for mode in modes
    }


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        (
            "liar",
            ["--precision", "fp64"],
            "clause 'backend.tolerances' of the contract: fp64 has",
        ),
        (
            "hollow",
            [],
            "clause 'backend.operators' of the contract: declared but not",
        ),
        (
            "twin",
            [],
            "backend 'twin' breaks clause 'backend.name' of the contract: faulty_backend:OTHER_TWIN (twin-backend)",
        ),
    ],
)
def test_a_backend_that_lies_gets_one_error(
    run_pytest: Run, recipe_folder: Path, backend: str, options: list[str], message: str
) -> None:
    done = run_pytest(str(recipe_folder), "--backend", backend, "-k", "inference", *options)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_a_mode_whose_engine_is_absent_says_so(run_pytest: Run, recipe_folder: Path) -> None:
    done = run_pytest(str(recipe_folder), "--backend", "faulty:engine")
    assert done.returncode == 4
    assert "(faulty:engine) runs on no_such_engine, which is not installed; install it with: pip install" in done.stderr


def test_modes_that_exclude_each_other_are_refused_in_one_process() -> None:
    code = (
        "from d5suite.backends import backend\n"
        "b = backend('faulty')\n"
        "b.load('runtime', 'good')\n"
        "b.load('network', 'wrong')\n"
        "b.load('runtime', 'exclusive')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=plugin_environment(), capture_output=True, text=True, check=False
    )
    assert "this process runs backend 'faulty' in mode 'good', which excludes mode 'exclusive'" in done.stderr


@pytest.mark.slow
def test_a_hanging_worker_is_killed_with_all_its_children(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "orphan.pid"
    done = run_pytest(
        str(recipe_folder), "--backend", "faulty:orphan", "-k", "inference", "--job-timeout", "15",
        environment={"ORPHAN_PID_FILE": str(pid_file)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "did not finish within 15 s (--job-timeout)" in done.stdout
    wait_until(lambda: all(is_dead(int(pid)) for pid in pid_file.read_text().split()), "the end of both children")


@pytest.mark.slow
def test_a_worker_over_its_memory_is_killed(run_pytest: Run, recipe_folder: Path) -> None:
    done = run_pytest(str(recipe_folder), "--backend", "faulty:memory", "-k", "inference", "--job-memory", "2G")
    assert done.returncode == 1
    assert "over its limit of 2.00 GiB (--job-memory)" in done.stdout


def test_backends_not_asked_for_are_skipped_with_the_reason(run_pytest: Run, recipe_folder: Path) -> None:
    done = run_pytest(str(recipe_folder), "-k", "inference and absent", "-rs")
    assert done.returncode == 5
    assert "Absent is not installed (no module no_such_framework)" in done.stdout.replace("\n", "")
    assert "left out: backend 'exits' is faulty" in done.stdout
    assert "1 skipped" in done.stdout


LONG = "x" * 300

USAGE = [
    (["--backend", "absent"], "pip install 'd5suite[absent]'"),
    (["--backend", "nosuch"], "there is no backend 'nosuch'"),
    (["--backend", "faulty:turbo"], "has no mode 'turbo'"),
    (["--backend", "faulty", "--precision", "bf16"], "has no precision 'bf16'"),
    (["--backend", "faulty", "--device", "cuda"], "has no device 'cuda'"),
    (["--backend", "faulty,faulty:good"], "twice"),
    (["--backend", "unimportable"], "failed to import"),
    (["--backend", "faulty", "--benchmark-json", "absent-folder/out.json"], "No such file or directory"),
    (["--backend", "faulty", "--benchmark-json", "."], "this is a folder"),
    (["--backend", "faulty", "--loader-workers", "99"], "99 loader workers, but this job may use"),
    (
        ["--backend", "faulty", "--threads", "1", "--loader-workers", "2"],
        "2 loader workers, but this job may use 1 core",
    ),
    (["--backend", "faulty", "--preset", "huge"], "recipe 'small' has no preset 'huge'"),
    (["--threads", "0"], "--threads is 0"),
    (["--seed", str(2**32)], "--seed is 4294967296; it must be at most 2147483647"),
    (["--seed", "-1"], "--seed is -1; it must be at least 0"),
    (["--batch-size", str(10**12)], "--batch-size is 1000000000000; it must be at most"),
    (["--backend", "faulty", "--batch-size", str(10**9)], "a batch of 1,000,000,000 needs 11,444.1 GiB for its inputs"),
    (["--backend", "faulty", "--benchmark-json", "recipes/test_small.py"], "results would replace a Python file"),
    (["--job-timeout", "nan"], "--job-timeout is nan; it must be at least 1"),
    (["--job-memory", "infG"], "--job-memory: 'infG' must be positive and finite"),
    (["--job-memory", "nan%"], "--job-memory: 'nan%' must be positive and finite"),
    (["--optimizer", "learning_rate=inf"], "the learning rate must be positive and finite, not inf"),
    (["--optimizer", "learning_rate=0.1,clip_norm=nan"], "clip_norm must be a finite number, not nan"),
    (["--optimizer", ""], "--optimizer: '' is not KEY=VALUE with a number"),
    (["--optimizer", "learning_rate=0.1,learning_rate=0.2"], "--optimizer: learning_rate is given twice"),
    (["--optimizer", "learning_rate=0.1,momentum=0.5,nesterov=0.5"], "nesterov must be true or false, not 0.5"),
    (["--wrap", '"unclosed'], "--wrap: No closing quotation in '\"unclosed'"),
    (["--wrap", "no-such-profiler -x"], "--wrap: 'no-such-profiler' cannot be run as a command"),
    (["--backend", "faulty", "--benchmark-json", "res.h5"], "Choose a name such as res.json"),
    (["--job-timeout", "0"], "--job-timeout is 0"),
    (["--job-memory", "much"], "--job-memory: 'much' is not a size"),
    (["--optimizer", "learning_rate=fast"], "is not KEY=VALUE with a number"),
    (["--optimizer", "learning_rate=-1"], "the learning rate must be positive"),
    (["--openimages", "absent-folder"], "--openimages absent-folder: there is no such dataset"),
    (["--jobs", ""], "argument --jobs: the path is empty"),
    (["--imagenet", LONG], "argument --imagenet: the path 'xxxx"),
    (["--network", LONG], "argument --network: the path 'xxxx"),
    (["--passes", f"{LONG}.py"], "File name too long"),
    (["--benchmark-json", LONG], "results cannot be written here: File name too long"),
    (["--benchmark-json", "x" * 250], ".h5: results cannot be written here: File name too long"),
    (["--benchmark-json", "pipe"], "--benchmark-json pipe: results cannot be written here: this pipe has no reader"),
    (["--benchmark-json", "taken.json"], "taken.h5: results cannot be written here: a folder or a device is there"),
    (["--benchmark-storage", "bogus://x"], "--benchmark-storage bogus://x: results cannot be stored here: Storage"),
    (["--benchmark-save=a", "--benchmark-storage", "file://file/x"], "results cannot be stored here: Not a directory"),
    (["--benchmark-compare", "a/b/c"], "--benchmark-compare a/b/c: 'a/b/c' isn't an existing file"),
    (["--backend", "faulty", "--benchmark-compare-fail", "mean:5%"], "there is no earlier run to compare with"),
    (["--backend", "faulty", "--benchmark-min-rounds", str(10**12)], "more than 1000000 rounds"),
    (["--backend", "faulty", "-p", "no:benchmark"], "d5suite needs pytest-benchmark: leave out -p no:benchmark"),
]
if importlib.util.find_spec("pygal") is None:
    USAGE.append((["--backend", "faulty", "--benchmark-histogram"], "histograms need pygal, which is not installed"))


@pytest.fixture(scope="module")
def refused(
    tmp_path_factory: pytest.TempPathFactory, small_onnx: Path, imagenet_tree: Path
) -> Mapping[str, subprocess.CompletedProcess[str]]:
    """Each run with a wrong option."""
    parent = tmp_path_factory.mktemp("usage")
    os.mkfifo(parent / "pipe")
    (parent / "taken.h5").mkdir()
    (parent / "file").touch()
    start = [
        "pytest",
        "-p",
        "no:cacheprovider",
        str(write_recipe(parent, small_onnx)),
        "--imagenet",
        str(imagenet_tree),
    ]
    done = run_several([[*start, *arguments] for arguments, _ in USAGE], parent)
    return {" ".join(arguments): run for (arguments, _), run in zip(USAGE, done, strict=True)}


@pytest.mark.parametrize(("options", "message"), [(" ".join(arguments), message) for arguments, message in USAGE])
def test_a_wrong_option_ends_the_run_before_anything_is_measured(
    refused: Mapping[str, subprocess.CompletedProcess[str]], options: str, message: str
) -> None:
    done = refused[options]
    assert done.returncode == 4
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_backend_may_have_its_own_interpreter_and_a_wrapper(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    for name in ("python", "profiler"):
        script = tmp_path / name
        target = f'exec "{sys.executable}" "$@"' if name == "python" else 'exec "$@"'
        script.write_text(f'#!/bin/sh\necho {name} >> "{log}"\n{target}\n')
        script.chmod(0o755)
    done = run_pytest(
        str(recipe_folder), "--backend", "faulty", "-k", "inference", "--wrap", str(tmp_path / "profiler"),
        environment={"D5SUITE_PYTHON_FAULTY": str(tmp_path / "python")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert log.read_text().split() == ["profiler", "python"]  # one worker takes memory and times
    done = run_pytest(
        str(recipe_folder),
        "--backend",
        "faulty",
        "-k",
        "inference",
        environment={"D5SUITE_PYTHON_FAULTY": "/absent/python"},
    )
    assert done.returncode != 0
    assert "'/absent/python' is not an executable Python" in done.stdout + done.stderr


def test_a_terminal_shows_what_a_worker_does_and_a_pipe_does_not(
    recipe_folder: Path, imagenet_tree: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe_folder), "--backend", "faulty",
               "-k", "inference", "--imagenet", str(imagenet_tree)]  # fmt: skip
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        command, cwd=tmp_path, env=plugin_environment(), stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert b"faulty: starting" in shown
    assert "faulty: starting" not in output


def test_parts_of_a_step_that_do_not_add_up_are_warned_of(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    wrapper = tmp_path / "other_result.py"
    wrapper.write_text(
        "import json, subprocess, sys\n"
        "from pathlib import Path\n"
        "subprocess.run(sys.argv[1:], check=True)\n"
        "path = Path(sys.argv[-1].replace('.job.json', '.result.json'))\n"
        "result = json.loads(path.read_text())\n"
        "for measured in result['measurements'].values():\n"
        "    measured['extra']['warnings'] = ['the parts of a step sum to 90.0% of it']\n"
        "path.write_text(json.dumps(result))\n"
    )
    done = run_pytest(
        str(recipe_folder), "--backend", "faulty", "-k", "inference", "--wrap", f"{sys.executable} {wrapper}"
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("the parts of a step sum to 90.0% of it") == 1


def test_a_broken_image_fails_with_its_name(recipe_folder: Path, imagenet_tree: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(imagenet_tree, broken)
    for image in (broken / "train").rglob("*.JPEG"):
        image.write_bytes(image.read_bytes()[:200])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe_folder), "--backend", "faulty",
         "-k", "input_pipeline", "--imagenet", str(broken)],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert ".JPEG" in done.stdout
    assert "train/n" in done.stdout


@pytest.mark.slow
def test_what_a_dataset_leaves_out_is_told_once(recipe_folder: Path, imagenet_tree: Path, tmp_path: Path) -> None:
    (untidy := tmp_path / "untidy").mkdir()
    shutil.copytree(imagenet_tree, untidy / "tree")
    for split in ("train", "val"):
        (untidy / "tree" / split / "notes.txt").write_text("not an image")
    done = run_recipe(
        tmp_path, untidy / "tree", str(recipe_folder), "--backend", "faulty", "-k", "inference or input_pipeline",
        "--benchmark-json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for split in ("train", "val"):
        assert done.stdout.count(f"d5suite: dataset, {split}: 1 files or folders are left out, such as ") == 1
    for bench in _strict(tmp_path / "out.json")["benchmarks"]:
        data = bench["extra_info"]["d5suite"]["dataset"]
        assert len(data["left_out"]) == 2 and str(tmp_path) not in str(data)


def test_each_kind_of_result_has_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from d5suite.report.compare import show

    content = _strict(ROOT / "results" / "reference-2core-cpu-smoke.json")
    (step,) = (
        b for b in content["benchmarks"] if b["name"] == "test_training_step[tensorflow]" and "resnet50" in b["group"]
    )
    parts = {"data_wait": 0.0001, "host_to_device": 0.0002, "forward": 0.0403, "backward": 1.1004, "update": 0.0305,
             "other": 0.0}  # fmt: skip
    memory = {"peak_bytes": 1, "parameters_bytes": 3 << 20, "activations_bytes": 4 << 20}
    runs = [{"seed": n, "epochs": 5 + n, "seconds": 1.0, "steps": 220, "samples": 7040} for n in range(3)]
    ratio = {"median": 0.9, "ci95": [0.85, 0.95], "rounds": 9}
    kinds: dict[str, dict[str, Any]] = {
        "training_step": {"memory": memory},
        "time_to_accuracy": {"target": {"metric": "top-1 accuracy", "value": 0.97}, "runs": runs},
        "step_breakdown": {"breakdown_s": parts, "sum_over_step": 0.95, "warnings": ["the parts sum to 95% of it"]},
        "native_input_pipeline": {
            "loader": "tf.data",
            "loader_workers": 2,
            "batches_per_sample": 16,
            "images_per_s_per_core": 841.2,
            "wait_s": 0.0123,
        },
        "cost_of_loading": {
            "ratio": ratio,
            "compared_with": "native",
            "compared_median_s": 1.0,
            "loader": "tf.data",
            "format": "folder",
        },
    }
    content["benchmarks"] = []
    for measurement, more in kinds.items():
        bench = json.loads(json.dumps(step))
        bench["group"] = f"imagenet_resnet50/{measurement}"
        bench["extra_info"]["d5suite"].update(
            more, measurement=measurement, median_s=1.2345, median_ci95=[1.2335, 1.2355], median_ci_confidence=0.75
        )
        bench["stats"] |= {"data": [1.2335, 1.234, 1.2345, 1.235, 1.2355], "median": 1.2345}
        content["benchmarks"].append(bench)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))

    def table(width: int, files: int = 1) -> list[list[str]]:
        show([path] * files, Console(width=width))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        return [line.split() for line in lines]

    narrow = table(80)
    assert ["median", "ms", "wait", "feed", "forward", "backward", "update", "other", "sum"] in narrow
    assert ["tensorflow!", "1234", "0.1", "0.2", "40.3", "1100.4", "30.5", "0.0", "1171.5"] in narrow
    assert ["median", "ms", "images/s", "per", "core", "wait", "ms", "err/tol"] in narrow
    assert any(line[:2] == ["tensorflow", "1234"] and line[3:5] == ["841.2", "12.3"] for line in narrow)
    assert ["median", "ms", "÷", "native", "its", "interval", "err/tol"] in narrow
    assert ["target", "runs", "median", "s", "interval", "steps", "epochs"] in narrow
    assert ["tensorflow", "0.97", "3", "of", "3", "1.234", "1.234–1.236", "(75%)", "220", "6"] in narrow
    assert any(line[-3:-1] == ["0.900", "0.850–0.950"] for line in narrow)
    wide = table(110)
    assert any(line[-2:] == ["needed", "err/tol"] for line in wide)
    assert any(line[-2:-1] == ["7"] for line in wide)
    assert any(line[2:4] == ["1234–1236", "(75%)"] for line in wide)
    assert sum("1.000" in line for line in table(80, files=2)) == 2 * len(kinds)


# Training to accuracy

needs_torch = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

TRAINED = """
from d5suite.optimizers.settings import SGD
from d5suite.cases.recipe import Acceptance, Preset, Recipe, Training

RECIPE = Recipe(
    name="tiny", network={network!r}, dataset={dataset!r}, optimizer=SGD(2.0**-4, momentum=0.9),
    measurements=("time_to_accuracy",), acceptance=Acceptance(trajectory_steps=2),
    presets={{"smoke": Preset({size}, {batch}, {classes}, optimizer={optimizer}, training=Training({training}))}},
)
"""


def _trained(
    tmp_path: Path,
    *options: str,
    dataset: str = "digits",
    network: str = "lenet5",
    size: int = 32,
    batch: int = 32,
    classes: int = 10,
    optimizer: str = "None",
    training: str,
) -> subprocess.CompletedProcess[str]:
    """Run a recipe that is trained to accuracy, by PyTorch and without a dataset of the user's."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / "test_tiny.py"
    file.write_text(TRAINED.format(**{**locals(), "network": str(network)}))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file), "--backend", "torch", "--threads", "1",
         "--loader-workers", "0", "--jobs", "jobs", "--benchmark-json", "out.json", *options],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def _result(tmp_path: Path) -> Any:
    return _strict(max((tmp_path / "jobs").rglob("tiny-torch.result.json"), key=lambda path: path.stat().st_mtime_ns))


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Three runs that miss their target, and their folder."""

    def train() -> list[Any]:
        folder = tmp_path_factory.mktemp("missed")
        done = _trained(folder, training="target=1.1, epochs=1, runs=3")
        return [str(folder), done.returncode, done.stdout, done.stderr]

    folder, *done = made_once(tmp_path_factory, "missed", train)
    return Path(folder), subprocess.CompletedProcess([], *done)


@pytest.mark.slow
@needs_torch
def test_a_missed_target_is_no_number_and_keeps_its_curves(
    missed: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = missed
    assert done.returncode == 1, done.stdout
    assert "3 of 3 runs did not reach top-1 accuracy 1.1: the run with seed 0 ended after 1 epochs at 0." in done.stdout
    assert "curves of its runs: out.tiny.png, out.missed.h5" in done.stdout.replace(f"{folder}/", "")
    content = _strict(folder / "out.json")
    assert content["benchmarks"] == [] and content["d5suite"]["pictures"] == ["out.tiny.png"]
    assert "did not reach" in content["d5suite"]["failures"][0]["message"]
    assert (folder / "out.tiny.png").read_bytes().startswith(b"\x89PNG")
    with h5py.File(folder / "out.missed.h5") as file:
        (group,) = file.values()
        accuracies = [group[f"run_{index}_top-1 accuracy"][()].item() for index in range(3)]
    runs = _result(folder)["kept"]["tiny/time_to_accuracy"]["runs"]
    assert [run["top-1 accuracy"] for run in runs] == accuracies
    (log,) = (folder / "jobs").rglob("tiny-torch.log")
    assert "run 3/3, epoch 1/1 at 0." in log.read_text()  # what a terminal shows
    assert "epoch 1/1" not in done.stdout + done.stderr  # and a pipe does not


@needs_torch
@pytest.mark.slow
def test_what_seeds_took_that_reached_the_target_is_kept_though_others_missed_it(
    missed: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    runs = _result(missed[0])["kept"]["tiny/time_to_accuracy"]["runs"]
    accuracies = [run["top-1 accuracy"] for run in runs]
    assert min(accuracies) < max(accuracies)
    done = _trained(tmp_path, training=f"target={max(accuracies)!r}, epochs=1, runs=3")
    assert done.returncode == 1, done.stdout
    reached = [value == max(accuracies) for value in accuracies]
    assert f"{reached.count(False)} of 3 runs did not reach" in done.stdout
    runs = _result(tmp_path)["kept"]["tiny/time_to_accuracy"]["runs"]
    assert [run.get("steps") == 44 for run in runs] == reached


@needs_torch
def test_a_run_that_diverges_says_so(tmp_path: Path, imagenet_tree: Path, small_onnx: Path) -> None:
    done = _trained(
        tmp_path, "--imagenet", str(imagenet_tree), dataset="imagenet", network=str(small_onnx), batch=4, classes=4,
        optimizer="SGD(1.0, weight_decay=1e4)", training="target=0.9, epochs=9",
    )  # fmt: skip
    assert done.returncode == 1
    assert "the run with seed 0 ended after " in done.stdout
    assert ": training diverged: the loss of step " in done.stdout, done.stdout


@needs_torch
def test_the_preset_limits_the_time_and_the_option_goes_before_it(tmp_path: Path) -> None:
    done = _trained(tmp_path, training="target=1.1, epochs=1, time_limit_s=0.5")
    assert "did not finish within 0.5 s" in done.stdout
    done = _trained(tmp_path, "--job-timeout", "1", training="target=1.1, epochs=1, time_limit_s=None")
    assert "did not finish within 1 s (--job-timeout)" in done.stdout


@pytest.mark.slow
@needs_torch
def test_mean_average_precision_is_reached_through_a_recipe(tmp_path: Path, small_onnx: Path) -> None:
    from d5suite.data.synthesis import make_openimages

    made = tmp_path / "openimages"
    sizes = {"train_images": 32, "validation_images": 16, "test_images": 8}
    make_openimages(made, classes=4, min_side=48, max_side=64, progress=False, **sizes)
    done = _trained(
        tmp_path, "--openimages", str(made), dataset="openimages", network=str(small_onnx), classes=4, batch=8,
        training="target=0.1, epochs=2, runs=2, metric='mean average precision'",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    result = _strict(tmp_path / "out.json")
    jsonschema.validate(result, SCHEMA)
    (bench,) = result["benchmarks"]
    info = bench["extra_info"]["d5suite"]
    assert info["target"]["metric"] == "mean average precision"
    assert all(0.1 <= run["mean average precision"] <= 1 for run in info["runs"])
    assert info["dataset"]["kind"] == "openimages" and info["dataset"]["synthetic"] and info["dataset"]["images"] == 32


@pytest.mark.slow
@needs_torch
def test_a_published_target_is_not_asked_for_on_drawn_images(
    tmp_path: Path, imagenet_tree: Path, small_onnx: Path
) -> None:
    training = "target=0.9, epochs=1, source='a paper'"
    done = _trained(tmp_path, dataset="imagenet", network=str(small_onnx), training=training)
    assert done.returncode == 4
    assert "tiny, preset 'smoke': target top-1 accuracy 0.9 needs the real imagenet" in done.stderr
    assert "Give --imagenet PATH" in done.stderr
    assert not (tmp_path / "jobs").exists()

    # A drawn set under a name of the user's is still drawn
    done = _trained(
        tmp_path, "--imagenet", str(imagenet_tree),
        dataset="imagenet", network=str(small_onnx), batch=4, classes=4, training=training,
    )  # fmt: skip
    assert done.returncode == 1
    assert "these images are drawn by d5suite" in done.stdout


def test_more_classes_than_can_be_drawn_are_refused_at_once(recipe_folder: Path, tmp_path: Path) -> None:
    file = recipe_folder / "test_small.py"
    file.write_text(file.read_text().replace("classes=4", "classes=7186").replace("'imagenet'", "'openimages'"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe_folder), "--backend", "faulty"],
        cwd=tmp_path, env=plugin_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 4
    assert "a dataset of 7186 classes, and drawn images have at most 1000" in done.stderr
    assert "Give --openimages PATH" in done.stderr


def _recipes() -> dict[str, Recipe]:
    import importlib.util

    found = {}
    for path in sorted((ROOT / "recipes").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "WORKFLOW"):  # other cases, of two programs
            found[path.stem] = module.RECIPE
    return found


@pytest.mark.parametrize(("name", "recipe"), _recipes().items(), ids=str)
def test_recipes_have_their_presets_and_say_what_full_must_reach(name: str, recipe: Recipe) -> None:
    assert name == f"test_{recipe.name}"
    assert list(recipe.presets)[:3] == ["smoke", "standard", "full"]
    for preset in recipe.presets.values():
        if preset.training is not None:
            assert preset.training.metric in METRICS
            # Nobody can say how long a real dataset takes
            assert (preset.training.time_limit_s is None) == (
                recipe.dataset != "digits" and bool(preset.training.source)
            )
    if "time_to_accuracy" in recipe.measurements:
        training = recipe.presets["full"].training
        assert training is not None and training.source
        assert training.runs >= 3
        assert 0 < training.target < 1
