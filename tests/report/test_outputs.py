"""Where ``compare`` and ``report`` write: no device, pipe or input is replaced.

Nothing here may write to /dev: the devices are pseudo-terminals, behind links.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from d5suite.cli import main
from d5suite.files import PendingFile, write_bytes
from tests.report.pages import RANKS, SMOKE

FORMS = ("json", "markdown", "junit")


@pytest.fixture
def results(tmp_path: Path) -> tuple[str, str]:
    """Two result files, one with series."""
    base, new = tmp_path / "base.json", tmp_path / "new.json"
    shutil.copy(RANKS, base)
    found = json.loads(RANKS.read_text())
    found["d5suite"] |= {"series": "other.h5"}
    found["d5suite"].pop("series_token", None)
    new.write_text(json.dumps(found))
    (tmp_path / "other.h5").write_bytes(b"series")
    return str(base), str(new)


class Reader(threading.Thread):
    """One who reads all that comes from a descriptor or a pipe."""

    def __init__(self, source: int | Path) -> None:
        super().__init__(daemon=True)
        self.source, self.read = source, b""
        # Opened here, so that the pipe has a reader when `__init__` returns.
        self.handle = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self.handle, True)
        self.start()

    def run(self) -> None:
        while True:
            try:
                part = os.read(self.handle, 1 << 16)
            except OSError:  # the terminal's other end is closed
                return
            self.read += part
            if not part and self.read:
                return


NO_BYTECODE = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
"""Where no file may grow large, Python would cut its own files, for all that come after."""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[Path, Reader]]:
    """A link to a character device, in a file system in which a regression can make no file."""
    master, slave = os.openpty()
    tty.setraw(slave)
    link = tmp_path / "terminal"
    link.symlink_to(os.ttyname(slave))
    assert os.path.realpath(link).startswith("/dev/pts/")
    reader = Reader(master)
    yield link, reader
    os.close(slave)
    reader.join(10)
    os.close(master)


@pytest.mark.parametrize("form", FORMS)
def test_a_device_is_written_to_and_not_replaced(
    form: str, results: tuple[str, str], terminal: tuple[Path, Reader]
) -> None:
    link, reader = terminal
    assert main(["compare", *results, f"--{form}", str(link)]) in (0, 6)
    assert link.is_char_device()
    reader.join(1)
    assert {"json": b'"benchmarks"', "markdown": b"|", "junit": b"<testsuite"}[form] in reader.read


def test_a_page_goes_into_a_device_too(terminal: tuple[Path, Reader]) -> None:
    link, reader = terminal
    assert main(["report", str(RANKS), "-o", str(link)]) == 0
    assert link.is_char_device()
    reader.join(1)
    assert reader.read.lstrip().startswith(b"<!")


@pytest.mark.parametrize("form", FORMS)
def test_a_pipe_is_written_to_if_somebody_reads_it(
    form: str, results: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["compare", *results, f"--{form}", str(pipe)]) == 2
    assert "this pipe has no reader" in capsys.readouterr().err
    reader = Reader(pipe)
    assert main(["compare", *results, f"--{form}", str(pipe)]) in (0, 6)
    reader.join(10)
    os.close(reader.handle)
    assert reader.read and stat.S_ISFIFO(pipe.stat().st_mode)


def test_no_special_file_is_replaced_by_one_that_is_put_in_place(tmp_path: Path, terminal: tuple[Path, Reader]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", terminal[0]):
        with pytest.raises(OSError, match="not a regular file"):
            PendingFile(path)
    with pytest.raises(IsADirectoryError):
        write_bytes(tmp_path, b"x")


def test_a_full_disk_is_one_error_and_the_earlier_file_stays(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("earlier")
    command = [sys.executable, "-m", "d5suite.cli", "report", str(SMOKE), "-o", "page.html"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=NO_BYTECODE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "page.html: the page cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "page.html").read_text() == "earlier"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("kind", ["csv", "png", "svg"])
def test_a_full_disk_leaves_no_part_of_a_plot(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "d5suite.cli", "report", str(SMOKE), "-o", os.devnull, f"--{kind}", "plots"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=NO_BYTECODE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, 1_500)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "plots: it cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Run a command that is refused before anything is written; its message."""
    before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    assert main(list(arguments)) == 2
    assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize("form", FORMS)
def test_no_input_of_compare_is_replaced(
    form: str, results: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("base.json")
    os.link(tmp_path / "base.json", tmp_path / "same")
    for name in ("base.json", "new.json", "link", "same", "other.h5", "new.h5"):
        path = str(tmp_path / name)
        said = refused(capsys, tmp_path, "compare", *results, f"--{form}", path)
        assert said.startswith(f"error: {path}: --{form} would replace ")
    (tmp_path / "limits.toml").write_text("")
    thresholds = str(tmp_path / "limits.toml")
    assert "would replace" in refused(
        capsys, tmp_path, "compare", *results, "--thresholds", thresholds, f"--{form}", thresholds
    )


def test_no_input_of_a_page_is_replaced(
    results: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("base.json", "new.json", "other.h5"):
        said = refused(capsys, tmp_path, "report", *results, "-o", str(tmp_path / name))
        assert "-o would replace" in said
    for kind in ("csv", "png", "svg"):
        shutil.copy(results[0], given := tmp_path / f"results.{kind}")
        page = ["-o", str(tmp_path / "page.html")]
        said = refused(capsys, tmp_path, "report", str(given), *page, f"--{kind}", str(tmp_path))
        assert f"--{kind} would replace" in said


def test_a_run_of_a_history_is_not_replaced_by_what_is_made_from_it(
    results: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "history"
    assert main(["history", "add", str(folder), results[0]]) == 0
    capsys.readouterr()
    (run,) = map(str, folder.iterdir())
    history = ["--history", str(folder)]
    assert "would replace" in refused(capsys, tmp_path, "report", results[0], *history, "-o", run)
    assert "would replace" in refused(capsys, tmp_path, "compare", results[0], *history, "--json", run)


def test_two_outputs_are_two_files(
    results: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("out")
    for other in ("out", "link", f"../{tmp_path.name}/out"):
        said = refused(
            capsys, tmp_path, "compare", *results, "--json", str(tmp_path / "out"), "--markdown", str(tmp_path / other)
        )
        assert "--json and --markdown name one file" in said
    assert "name one file" in refused(capsys, tmp_path, "compare", *results, "--json", "-", "--junit", "-")
