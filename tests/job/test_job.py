"""Job files as a stranger might write them: what they may write, and which code they may run."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from d5suite.errors import JobError
from d5suite.job import Job, NetworkCase, OperationCase
from tests.conftest import run_several

MARKER = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"


def job(*cases: Any, **more: Any) -> Job:
    return Job({"name": "faulty", "mode": "good"}, "cpu", "fp32", 1, 0, list(cases), **more)


def network(**more: Any) -> NetworkCase:
    parts: dict[str, Any] = {"network": {"zoo": "lenet5", "classes": 4, "image_size": 32}, "optimizer": {"name": "sgd"}}
    return NetworkCase("a", "smoke", ["inference"], dataset={"kind": "imagenet", "root": "/absent"}, **parts, **more)


ELSEWHERE = ["/esc.h5", "../esc.h5", "sub/esc.h5", "..", "", "link.h5", "sub/../../esc.h5"]


@pytest.mark.parametrize("place", ["reference", "trajectory", "peers"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_job_writes_and_shares_files_in_its_own_folder_only(tmp_path: Path, place: str, name: str) -> None:
    folder = tmp_path / "job"
    (folder / "sub").mkdir(parents=True)
    os.symlink(tmp_path / "outside.h5", folder / "link.h5")
    path = folder / "x.job.json"
    job(network()).save(path)
    content = json.loads(path.read_text())
    content["cases"][0][place] = [name] if place == "peers" else name
    path.write_text(json.dumps(content))
    if not name and place != "peers":  # none
        assert not getattr(Job.load(path).cases[0], place)
        return
    with pytest.raises(JobError, match="does not lie in the job's own folder") as error:
        Job.load(path)
    assert str(path) in str(error.value)


def test_the_files_of_a_job_move_with_it(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    case = network(
        reference=str(first / "r.h5"), trajectory=str(first / "t.h5"), peers=[str(first / "p.h5"), str(first / "q.h5")]
    )
    job(case).save(first / "x.job.json")
    first.rename(second)
    (moved,) = Job.load(second / "x.job.json").cases
    assert isinstance(moved, NetworkCase)
    assert [moved.reference, moved.trajectory, *moved.peers] == [
        str(second / name) for name in ("r.h5", "t.h5", "p.h5", "q.h5")
    ]


BAD_NAMES = ["../esc", "a/b", "..", ".hidden", "", "a\nb", "a\x1b[2J", "a\\b", "x" * 101, "\ud800", "/etc"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_job_with_a_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.job.json"
    for key in ("name", "preset"):
        job(network()).save(path)
        content = json.loads(path.read_text())
        content["cases"][0][key] = name
        path.write_text(json.dumps(content))
        with pytest.raises(JobError):
            Job.load(path)


def worked(folder: Path, *arguments: str) -> str:
    """What the worker says of the job, in a folder of its own."""
    (done,) = run_several([["d5suite.worker", *arguments, "x.job.json"]], folder)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("kind", ["measurement", "custom operator"])
def test_a_worker_imports_what_the_session_did_and_nothing_else(tmp_path: Path, kind: str) -> None:
    file, ran, path = tmp_path / "mine.py", tmp_path / "mine.ran", tmp_path / "x.job.json"
    file.write_text(MARKER)
    case: Any = network(files={"inference": str(file)})
    if kind == "custom operator":
        operation = {
            "op_type": "custom::Mine",
            "inputs": {},
            "attributes": {},
            "name": "m",
            "outputs": [True],
            "opset": 23,
        }
        case = OperationCase(
            "a",
            "smoke",
            ["forward"],
            reference="r.h5",
            operation={**operation, "custom": {"file": str(file), "name": "Mine"}},
        )
    job(case, **({"references_only": True} if kind == "custom operator" else {})).save(path)
    assert json.loads(path.read_text())["digests"] == {str(file): hashlib.sha256(MARKER.encode()).hexdigest()}
    if kind == "custom operator":
        worked(tmp_path)  # rerun by hand, as it was
        assert ran.exists()
        ran.unlink()

    file.write_text(MARKER + "# changed\n")
    assert f"{file}: the job would run this file, which is not the one" in worked(tmp_path)
    content = json.loads(path.read_text())
    del content["digests"]  # as a stranger writes one
    path.write_text(json.dumps(content))
    assert f"{file}: the job would run this file, which has no SHA-256" in worked(tmp_path)
    assert not ran.exists()
    if kind == "custom operator":
        worked(tmp_path, "--trust")
        assert ran.exists()
    file.unlink()
    os.mkfifo(file)
    assert f"{file}: there is no such Python file" in worked(tmp_path)
