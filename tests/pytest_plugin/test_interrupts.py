"""How runs end: interrupts, ``-x``, full disks and runs that measure nothing, as users see them."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jsonschema
import psutil
import pytest

from d5suite.backends import discover
from tests.conftest import Run, is_dead, plugin_environment, wait_until

SCHEMA = json.loads((Path(__file__).parents[2] / "results" / "schema.json").read_text())

FILLED = '{"old": "results"}'


@pytest.fixture
def pipeline_first(recipe_folder: Path) -> Path:
    """The recipe with the input pipeline measured before inference, in one job."""
    file = recipe_folder / "test_small.py"
    file.write_text(file.read_text().replace("Recipe(", "Recipe(measurements=('input_pipeline', 'inference'), ", 1))
    return recipe_folder


def _names(path: Path) -> set[str]:
    """The benchmarks in a result file, each of which has its series beside it."""
    content = json.loads(path.read_text())
    with h5py.File(path.with_name(content["d5suite"]["series"])) as file:
        assert {group.attrs["fullname"] for group in file.values()} == {b["fullname"] for b in content["benchmarks"]}
    return {bench["name"] for bench in content["benchmarks"]}


def _folder(output: str) -> Path:
    """The job folder that the end of a run names."""
    (line,) = (line for line in output.splitlines() if line.startswith("d5suite: job files, with results: "))
    return Path(line.partition("results: ")[2])


def _is_within(folder: Path, job: str, measurement: str) -> bool:
    """Return whether a job's worker is taking samples of a measurement, which hangs."""
    found = list(folder.rglob(f"{job}.result.json"))
    return bool(found) and json.loads(found[0].read_text())["phase"] == f"measuring {measurement}"


def _ended(process: subprocess.Popen[str], end: signal.Signals, *, workers: int) -> str:
    """Interrupt a run again and again, as people and ``timeout`` do; return what it says, once all
    its processes have ended."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= workers
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(end)
        time.sleep(0.05)
    process.kill()
    output, _ = process.communicate()
    assert process.returncode == 2 and "Traceback" not in output and "INTERNALERROR" not in output, output
    wait_until(lambda: all(is_dead(each.pid) for each in family), "the workers' end")
    return output


@pytest.mark.parametrize(
    "end",
    [signal.SIGINT, *(pytest.param(end, marks=pytest.mark.slow) for end in (signal.SIGTERM, signal.SIGHUP))],
    ids=lambda end: end.name,
)
def test_an_interrupt_saves_what_the_worker_has_finished_and_leaves_no_process(
    pipeline_first: Path, imagenet_tree: Path, tmp_path: Path, end: signal.Signals
) -> None:
    """The first measurement of a job is finished, the second hangs, and no test has run yet."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(pipeline_first), "--backend", "faulty:hangs",
         "--imagenet", str(imagenet_tree), "--benchmark-json", "out.json", "--jobs", str(tmp_path / "jobs")],
        cwd=tmp_path, env=plugin_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(end, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip

    wait_until(
        lambda: _is_within(tmp_path / "jobs", "small-faulty-hangs", "small/inference"), "the hanging measurement"
    )
    output = _ended(process, end, workers=1)
    jsonschema.validate(json.loads((tmp_path / "out.json").read_text()), SCHEMA)
    assert _names(tmp_path / "out.json") == {"test_input_pipeline[faulty:hangs]"}
    assert (_folder(output) / "small-faulty-hangs.result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["hangs up", "nohup"])
def test_a_terminal_that_is_closed_loses_no_result(
    pipeline_first: Path, imagenet_tree: Path, tmp_path: Path, ignored: bool
) -> None:
    """Closing it sends SIGHUP; a run that ignores this goes on, until SIGTERM ends it."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)

    def begin() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(pipeline_first), "--backend", "faulty:hangs",
         "--imagenet", str(imagenet_tree), "--benchmark-json", "out.json", "--jobs", str(tmp_path / "jobs")],
        cwd=tmp_path, env=plugin_environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=begin,
    )  # fmt: skip
    os.close(theirs)

    def hangs() -> bool:
        with contextlib.suppress(BlockingIOError):  # the terminal shows what is written
            os.read(ours, 1 << 16)
        return _is_within(tmp_path / "jobs", "small-faulty-hangs", "small/inference")

    wait_until(hangs, "the hanging measurement")
    os.close(ours)
    if ignored:
        process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=300) == 2
    finally:
        process.kill()
    assert _names(tmp_path / "out.json") == {"test_input_pipeline[faulty:hangs]"}


@pytest.mark.parametrize("end", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=str)
def test_an_interrupt_ends_workers_that_take_turns(
    recipe_folder: Path, imagenet_tree: Path, tmp_path: Path, end: signal.Signals
) -> None:
    """One is in its round and hangs; the other waits for its turn, which never comes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe_folder), "-k", "inference",
         "--backend", "faulty,faulty:hangs", "--imagenet", str(imagenet_tree), "--benchmark-json", "out.json",
         "--jobs", str(tmp_path / "jobs")],
        cwd=tmp_path, env=plugin_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(end, signal.SIG_DFL),
    )  # fmt: skip

    names = ("small-faulty", "small-faulty-hangs")
    wait_until(
        lambda: all(_is_within(tmp_path / "jobs", name, "small/inference") for name in names),
        "both workers within their measurement",
    )
    _ended(process, end, workers=2)
    assert not (tmp_path / "out.json").exists(), "what was not finished is no result"
    assert not [*tmp_path.glob(".*.part"), *tmp_path.glob(".*.old")]


@pytest.mark.slow
def test_the_first_failure_ends_the_run_and_saves_what_else_its_job_has_finished(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path
) -> None:
    done = run_pytest(str(recipe_folder), "--backend", "faulty:raises", "-x", "--benchmark-json", "out.json")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout and "stopping after 1 failures" in done.stdout, done.stdout
    assert _names(tmp_path / "out.json") == {"test_input_pipeline[faulty:raises]"}
    assert (_folder(done.stdout) / "small-faulty-raises.result.json").exists()


def _limited(tmp_path: Path, recipe: Path, tree: Path, limit: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    whole = {**plugin_environment(), "PYTHONDONTWRITEBYTECODE": "1"}  # else Python's own files are cut
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(recipe), "--backend", "faulty",
         "-k", "inference", "--imagenet", str(tree), "--benchmark-json", "out.json",
         "--benchmark-min-rounds", "1000", "--benchmark-warmup=off"],
        cwd=tmp_path, env=whole, capture_output=True, text=True, preexec_fn=limit,
    )  # fmt: skip


def test_a_full_disk_leaves_the_old_results_alone_and_shows_the_new_ones(
    recipe_folder: Path, imagenet_tree: Path, tmp_path: Path
) -> None:
    """The series fit, and the JSON does not."""
    for name in ("out.json", "out.h5"):
        (tmp_path / name).write_text(FILLED)

    def limit() -> None:  # no file may grow beyond this: what a full disk looks like to a writer
        resource.setrlimit(resource.RLIMIT_FSIZE, (48_000, 48_000))

    done = _limited(tmp_path, recipe_folder, imagenet_tree, limit)
    assert done.returncode == 4, done.stdout
    assert "out.json: the results could not be saved: File too large; what was there before is untouched" in done.stdout
    assert "images/s" in done.stdout and (_folder(done.stdout) / "small-faulty.result.json").exists()
    assert [(tmp_path / name).read_text() for name in ("out.json", "out.h5")] == [FILLED, FILLED]
    assert not [*tmp_path.glob(".*.part"), *tmp_path.glob(".*.old")]


@pytest.mark.parametrize("kind", ["old results", "no results"])
def test_results_are_put_in_place_together_or_not_at_all(tmp_path: Path, monkeypatch: Any, kind: str) -> None:
    """The second of two files cannot be renamed."""
    from d5suite.files import PendingFile, commit_all

    paths = [tmp_path / "a.h5", tmp_path / "a.json"]
    for path in paths:
        if kind == "old results":
            path.write_text(FILLED)
    files = [PendingFile(path) for path in paths]
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if Path(target) == paths[1]:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        commit_all(files)
    for each in files:
        each.discard()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == (dict.fromkeys(["a.h5", "a.json"], FILLED) if kind == "old results" else {})


@pytest.mark.slow
def test_results_have_files_of_their_own_behind_links_too(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    """The runs are named ``run-0.1`` and ``run-0.2``."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "run-0.2.h5").write_text(FILLED)
    (tmp_path / "latest.json").symlink_to(kept / "run-0.1")
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", "--benchmark-json", "latest.json")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "latest.json").is_symlink()
    assert {path.name for path in kept.iterdir()} == {"run-0.1", "run-0.1.h5", "run-0.2.h5"}
    assert _names(kept / "run-0.1") == {"test_inference[faulty]"}


def test_a_run_that_measures_nothing_says_so_and_fails(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(FILLED)
    done = run_pytest(str(recipe_folder), "-k", "absent", "--benchmark-json", "out.json")
    assert done.returncode == 5, done.stdout
    assert (
        "nothing was measured:\n  test_inference[absent]: " in done.stdout and "Absent is not installed" in done.stdout
    )
    assert "out.json is of an earlier run" in done.stdout
    for asked in (["--collect-only", "-q"], ["--benchmark-skip"], ["--setup-plan"]):
        assert run_pytest(str(recipe_folder), "-k", "absent", *asked).returncode == 0


@pytest.mark.slow
def test_what_is_asked_for_by_name_is_not_absent_without_a_word(run_pytest: Run, recipe_folder: Path) -> None:
    file = recipe_folder / "test_small.py"
    done = run_pytest(f"{file}::test_inference[faulty]", f"{file}::test_gradient[faulty]")
    assert done.returncode == 1, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert "not measured, though requested by name:\n  test_gradient[faulty]: faulty has no gradient" in done.stdout
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "not step and not input")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout and "requested by name" not in done.stdout
    assert "d5suite: 1 skipped:\n  1 gradient on faulty: faulty has no gradient" in done.stdout
    if discover()[0]["torch"].problem() is None:
        done = run_pytest(str(recipe_folder), "--backend", "faulty,torch", "-k", "gradient")
        assert done.returncode == 1, done.stdout
        assert "1 passed, 1 skipped" in done.stdout
        assert "requested by name:\n  test_gradient[faulty]: faulty has no gradient" in done.stdout


@pytest.mark.slow
def test_failures_are_saved_where_nothing_else_is(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_pytest(
        str(recipe_folder), "--backend", "faulty", "-k", "inference", "--benchmark-json", "base.json"
    ).returncode == 0  # fmt: skip
    (tmp_path / "new.json").write_text(FILLED)
    done = run_pytest(
        str(recipe_folder), "--backend", "faulty:wrong", "-k", "inference", "--benchmark-json", "new.json"
    )
    assert done.returncode == 1 and "earlier run" not in done.stdout
    content = json.loads((tmp_path / "new.json").read_text())
    assert content["benchmarks"] == [] and content["machine_info"]
    (failure,) = content["d5suite"]["failures"]
    assert failure["wrong"] and failure["group"] == "small/inference"


def test_measurements_beside_each_other_are_refused(run_pytest: Run, recipe_folder: Path) -> None:
    """pytest-benchmark saves nothing then."""
    pytest.importorskip("xdist")
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", "-n", "1")
    assert done.returncode == 1
    assert "measurements run one at a time: leave out pytest-xdist's -n" in done.stdout


def test_a_picture_that_cannot_be_drawn_costs_no_number(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    (recipe_folder / "conftest.py").write_text(
        "from d5suite.measurements import find\nfind('inference').plot = 'no such plot'\n"
    )
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout
    assert "d5suite: no picture of small/inference: KeyError: 'no such plot'" in done.stdout
    assert _names(tmp_path / "out.json") == {"test_inference[faulty]"}
    assert not list(tmp_path.glob("*.png")) + list(tmp_path.glob(".*.part"))


def test_a_dataset_that_no_recipe_of_the_run_takes_is_told(
    run_pytest: Run, recipe_folder: Path, imagenet_tree: Path, small_onnx: Path
) -> None:
    unused = ["--openimages", str(imagenet_tree), "--network", str(small_onnx)]
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", *unused)
    assert done.returncode == 0, done.stdout
    for option, told in (("openimages", True), ("network", True), ("imagenet", False)):
        assert (f"d5suite: --{option} had no effect" in done.stdout) == told


def test_tests_of_a_users_own_end_as_without_d5suite(run_pytest: Run, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(FILLED)
    (tmp_path / "test_mine.py").write_text(
        "import signal, pytest\n"
        "def test_signals(): assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
    )
    done = run_pytest("test_mine.py", "--benchmark-disable", "--benchmark-json", "out.json")
    assert done.returncode == 0, done.stdout
    assert "d5suite:" not in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--benchmark-disable", "--benchmark-json", "out.json"], "--benchmark-disable saves no results"),
        (["--jobs", "/dev/null/x"], "cannot make the folder for job files: Not a directory"),
        (["--benchmark-max-time", "nan"], "max_time_s: nan is not seconds, 0 or more"),
    ],
)
def test_what_can_only_be_seen_with_the_tests_still_ends_the_run_before_anything_is_measured(
    run_pytest: Run, recipe_folder: Path, options: list[str], message: str
) -> None:
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", *options)
    assert done.returncode == 4
    assert message in done.stderr and "Traceback" not in done.stderr


def test_options_in_the_environment_count(run_pytest: Run, recipe_folder: Path) -> None:
    variable = {"PYTEST_ADDOPTS": "--benchmark-max-time=nan"}
    done = run_pytest(str(recipe_folder), "--backend", "faulty", "-k", "inference", environment=variable)
    assert done.returncode == 4
    assert "max_time_s: nan is not seconds, 0 or more" in done.stderr


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="measured with PyTorch")


@needs_torch
@pytest.mark.slow
def test_an_interrupted_training_keeps_its_curves(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_tiny.py").write_text(
        "from d5suite import SGD, Recipe\n"
        "from d5suite.cases.recipe import Preset, Training\n"
        "SMOKE = Preset(32, 32, 10, training=Training(target=1.1, epochs=10_000))\n"
        "RECIPE = Recipe(name='tiny', network='lenet5', dataset='digits', optimizer=SGD(2.0**-4),\n"
        "    measurements=('time_to_accuracy',), presets={'smoke': SMOKE})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_tiny.py", "--backend", "torch",
         "--loader-workers", "0", "--jobs", "jobs", "--benchmark-json", "out.json"],
        cwd=tmp_path, env=plugin_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

    def trains() -> bool:
        found = list((tmp_path / "jobs").rglob("tiny-torch.result.json"))
        epoch = re.search(r"epoch (\d+)/", json.loads(found[0].read_text())["phase"]) if found else None
        return epoch is not None and int(epoch[1]) > 1

    wait_until(trains, "an epoch after the first")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert (tmp_path / "out.tiny.png").exists() and not (tmp_path / "out.json").exists()
    with h5py.File(tmp_path / "out.missed.h5") as file:
        (group,) = file.values()
        assert len(group["run_0_seconds"]) >= 1
