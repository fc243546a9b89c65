"""Job folders of sessions, and exceptions that cost one job and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import select
from d5suite.cases.case import Settings
from d5suite.cases.problem import Problem, ProblemCase
from d5suite.cases.recipe import Preset, Recipe
from d5suite.job import Job, Result, result_path
from d5suite.launch.base import Outcome
from d5suite.measurements import find
from d5suite.optimizers.settings import SGD
from d5suite.session import Session
from d5suite.session.attempts import read_result
from d5suite.session.results import Wanted
from d5suite.session.session import KEEP_RUNS


def _runs(jobs: Path) -> set[str]:
    return {path.name for path in jobs.iterdir() if path.is_dir()}


def test_only_folders_of_ended_sessions_are_pruned(tmp_path: Path) -> None:
    """A session runs while more than are kept begin and end; a user's folder is none of them."""
    for name in ("results", "0-of-my-own"):
        (tmp_path / name).mkdir()
    long = Session(Settings(jobs=tmp_path))
    old = tmp_path / "20000101-000000-1"
    long.folder.rename(old)  # the oldest of all
    ended = [f"200001{day:02d}-000000-1" for day in range(2, KEEP_RUNS + 6)]
    for name in ended:
        (tmp_path / name).mkdir()
    short = Session(Settings(jobs=tmp_path))
    assert _runs(tmp_path) == {"results", "0-of-my-own", old.name, *ended[-KEEP_RUNS + 1 :], short.folder.name}
    long.close()
    short.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 0)
        last = Session(Settings(jobs=tmp_path))
    assert old.name not in _runs(tmp_path) and {short.folder.name, last.folder.name} <= _runs(tmp_path)
    last.close()


def test_one_process_may_begin_several_sessions_in_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20261123-080000")
    sessions = [Session(Settings(jobs=tmp_path)) for _ in range(3)]
    assert len({each.folder for each in sessions}) == len(_runs(tmp_path)) == 3
    for each in sessions:
        each.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d5suite.session.session.KEEP_RUNS", 1)
        Session(Settings(jobs=tmp_path)).close()
    assert len(_runs(tmp_path)) == 1


def test_an_unexpected_exception_costs_its_own_case_and_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    """One problem cannot be described, and one backend's worker cannot be started."""
    problems = [Problem(name, "Relu", {"X": (3,)}) for name in ("bad", "good")]
    describe, asked, raised = Problem.describe, [], [MemoryError("8 TiB"), OSError(5, "the disk is gone")]

    def described(self: Problem, *arguments: Any) -> Any:
        return 1 // 0 if self.name == "bad" else describe(self, *arguments)

    def fail(job: Job, *arguments: object) -> Any:
        asked.append((job.backend["name"], [case.name for case in job.cases]))
        raise raised.pop()

    monkeypatch.setattr(Problem, "describe", described)
    monkeypatch.setattr("d5suite.session.session.start_job", fail)
    session = Session(Settings(jobs=tmp_path))
    for backend, message in (("torch", "OSError: [Errno 5] the disk is gone\n"), ("jax", "out of memory: 8 TiB\n")):
        batch = [Wanted(ProblemCase("p", problem), find("forward"), select(backend)) for problem in problems]
        session.measure(batch)
        found = [session.result(each).failure or "" for each in batch]
        assert found[0].startswith("ZeroDivisionError: ") and found[1].startswith(message)
    assert asked == [("none", ["p.good"])] * 2
    session.close()


def test_a_rank_that_leaves_no_result_costs_nothing_that_is_finished(tmp_path: Path) -> None:
    """Rank 1 dies before it has written anything."""
    path = tmp_path / "some.job.json"

    Result(phase="measuring some/lost", references={"some/finished": "torch"}).save(result_path(path))
    outcome, result = read_result(Outcome(False, "rank 1 of 2 on here died of SIGKILL", "", rank=1), path)
    assert outcome.rank == 1 and result.references == {"some/finished": "torch"}


def test_a_course_proves_only_courses_of_its_own_batch_size(tmp_path: Path) -> None:
    """``d5suite tune --batch-sizes`` has several in one session, which train on other images."""
    recipe = Recipe("r", "lenet5", "digits", SGD(learning_rate=0.1), {"smoke": Preset(32, 8, 10)})
    session = Session(Settings(jobs=tmp_path, batch_size=8))

    def case(own: Session, backend: str) -> Any:
        return Job.load(own.write([Wanted(recipe, find("training_step"), select(backend))])).cases[0]

    first = case(session, "torch")
    assert case(session, "torch:stock").peers == [first.trajectory]
    larger = session.varied(batch_size=16)
    assert case(larger, "torch:stock").peers == []
    assert case(larger, "torch").trajectory != first.trajectory
    session.close()
