"""Where results go: a pipe, pytest-benchmark's storage, and files beside the JSON that cannot be
saved. The JSON is kept whatever else fails."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import pytest

from d5suite.cli import main
from d5suite.pytest_plugin.settings import APART, SINGLE_CALLS
from tests.conftest import Run

ONE = ("--backend", "faulty", "-k", "inference")


def test_a_pipe_with_a_reader_gets_the_results(run_pytest: Run, recipe_folder: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor() as threads:
        read = threads.submit(pipe.read_bytes)
        done = run_pytest(str(recipe_folder), *ONE, "--benchmark-json", "pipe")
        assert done.returncode == 0, done.stdout + done.stderr
        (bench,) = json.loads(read.result(10))["benchmarks"]
    assert bench["extra_info"]["d5suite"]["backend"]["name"] == "faulty"
    assert stat.S_ISFIFO(pipe.stat().st_mode) and [each.name for each in tmp_path.glob("pipe*")] == ["pipe"]


def test_the_json_is_kept_though_the_series_and_the_storage_are_lost(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path
) -> None:
    """While the run measures, others take both places."""
    (recipe_folder / "conftest.py").write_text(
        "import shutil\nfrom pathlib import Path\n"
        "def pytest_runtest_teardown():\n"
        "    Path('out.h5').mkdir(exist_ok=True)\n"
        "    shutil.rmtree('kept', ignore_errors=True)\n"
        "    Path('kept').write_text('')\n"
    )
    storage = ("--benchmark-storage", "file://kept", "--benchmark-autosave")
    done = run_pytest(str(recipe_folder), *ONE, "--benchmark-json", "out.json", *storage)
    assert done.returncode == 4, done.stdout
    said = " ".join(done.stdout.split())
    assert "ERROR: --benchmark-storage file://kept: the results could not be stored: Not a directory" in said
    assert "ERROR: --benchmark-json" in said and "out.json: could not be saved: the series" in said
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["benchmarks"]) == 1 and not {"series", "series_token"} & content["d5suite"].keys()
    assert main(["compare", str(tmp_path / "out.json")]) == 0
    assert not [*tmp_path.glob(".*.part"), *tmp_path.glob(".*.old")]


def test_stored_results_are_whole_and_options_without_effect_are_told(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--benchmark-timer=time.process_time", "--benchmark-disable-gc", "--benchmark-min-time=0.5",
             "--benchmark-cprofile=tottime", "--benchmark-max-time", "0.05"]  # fmt: skip
    done = run_pytest(str(recipe_folder), *ONE, "--benchmark-autosave", "--benchmark-json", "out.json", *given)
    assert done.returncode == 0, done.stdout
    told = [line for line in done.stdout.splitlines() if "no effect on d5suite's measurements" in line]
    start = "d5suite: no effect on d5suite's measurements: "
    assert told == [
        f"{start}--benchmark-timer, --benchmark-disable-gc, --benchmark-min-time: {SINGLE_CALLS}",
        f"{start}--benchmark-cprofile: {APART}",
    ]
    (stored,) = (tmp_path / ".benchmarks").glob("*/0001_*.json")
    contents = [json.loads(path.read_text()) for path in (tmp_path / "out.json", stored)]
    for content in contents:
        (bench,) = content["benchmarks"]
        assert set(bench["options"]) == {"min_rounds", "max_time"} and "cprofile" not in bench
    assert contents[0]["benchmarks"][0]["stats"]["data"] == contents[1]["benchmarks"][0]["stats"]["data"]
    with h5py.File(tmp_path / "out.h5") as series:
        assert series.attrs["token"] == contents[0]["d5suite"]["series_token"]
    assert "series" not in contents[1]["d5suite"]
    page, folder, path = str(tmp_path / "page.html"), str(tmp_path / "history"), str(stored)
    for words in (["compare", path], ["report", path, "-o", page], ["history", "add", folder, path]):
        assert main(words) in (0, 6), capsys.readouterr().err  # 6: a disturbed result is not added
        assert "error" not in capsys.readouterr().err


def test_a_name_of_almost_255_bytes_has_room_for_temporary_files(tmp_path: Path) -> None:
    from d5suite.files import PendingFile, atomic_folder, write_json

    path = tmp_path / f"{'ä' * 120}.json"
    write_json(path, {})
    pending = PendingFile(path)
    pending.temporary.write_text("[]")
    pending.commit()
    assert path.read_text() == "[]"
    with atomic_folder(tmp_path / ("x" * 250)) as folder:
        (folder / "a").touch()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pipe_whose_reader_reads_nothing_more_is_given_up(tmp_path: Path) -> None:
    from d5suite.files import open_special, write_to_reader

    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open_special(pipe) as file:
        with pytest.raises(TimeoutError, match=r"has read nothing for 0\.1 s"):
            write_to_reader(file, b"x" * (1 << 22), 0.1)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            write_to_reader(file, b"x", 0.1)
