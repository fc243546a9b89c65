"""What the thread test concludes from a machine's figures, scripted; nothing is measured here."""

from __future__ import annotations

import pytest

from d5suite.backends import discover
from d5suite.levels.contract import ContractError
from d5suite.testing import test_process
from d5suite.testing.subject import Subject

ALONE = [[0.99, 1.0]]
TWO = [[1.9, 1.95], [1.8, 1.9]]
LOADED = [[0.2, 0.22], [0.19, 0.9], [0.21, 1.1]]
LOADED_ALONE = [[0.2, 0.9, 1.02]]
SHARING = [[0.5, 1.95, 1.9], [0.4, 2.0, 2.0]]
LOADED_WITH_TWO = [[0.4, 1.9], [0.5, 2.0]]


@pytest.mark.parametrize(
    ("windows", "outcome"),
    [
        pytest.param(ALONE, None, id="one thread"),
        pytest.param(LOADED + ALONE, None, id="one thread, once the machine was free"),
        pytest.param(LOADED_ALONE, None, id="one thread on a loaded machine"),
        pytest.param(TWO, ContractError, id="two threads"),
        pytest.param(SHARING, ContractError, id="two threads that share one processor"),
        pytest.param(LOADED_WITH_TWO, ContractError, id="two threads that wait for one another"),
        pytest.param(LOADED, pytest.skip.Exception, id="loaded machine"),
        pytest.param(LOADED + TWO, ContractError, id="two threads, once the machine was free"),
        pytest.param(LOADED + TWO[:1], pytest.skip.Exception, id="loaded machine but for a moment"),
    ],
)
def test_a_machine_that_gives_too_little_proves_nothing_about_threads(
    monkeypatch: pytest.MonkeyPatch, windows: list[list[float]], outcome: type[BaseException] | None
) -> None:
    monkeypatch.setattr(test_process, "_seeded", lambda _, seed: {"windows": windows if seed == 3 else []})
    subject = Subject(discover()[0]["torch"], "eager", "cpu", 1)
    if outcome is None:
        test_process.test_the_thread_budget_is_obeyed(subject, "inference")
        return
    told = r"the machine gave the process 0\.19 processors; it takes 0\.9 to tell|(1\.95|2\.00) threads work, not 1"
    with pytest.raises(outcome, match=told):
        test_process.test_the_thread_budget_is_obeyed(subject, "inference")


@pytest.mark.parametrize(
    ("windows", "seeds"),
    [
        pytest.param(ALONE, [3], id="one thread"),
        pytest.param(TWO, [3, 4], id="two threads"),
        pytest.param(LOADED, [3, 4], id="loaded machine"),
    ],
)
def test_a_second_process_runs_only_where_the_first_one_did_not_show_one_thread(
    monkeypatch: pytest.MonkeyPatch, windows: list[list[float]], seeds: list[int]
) -> None:
    """One thread in the first process decides."""
    asked: list[int] = []

    def seeded(_: Subject, seed: int) -> dict[str, list[list[float]]]:
        asked.append(seed)
        return {"windows": windows if seed == 3 else ALONE}

    monkeypatch.setattr(test_process, "_seeded", seeded)
    test_process.test_the_thread_budget_is_obeyed(Subject(discover()[0]["torch"], "eager", "cpu", 1), "inference")
    assert asked == seeds
