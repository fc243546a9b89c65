"""Two sides in turn, with workers that only pretend: who runs when, when it ends, and what several
launches say together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from d5suite.backends import select
from d5suite.cases.case import Settings
from d5suite.cases.problem import Problem, ProblemCase
from d5suite.launch.turns import TurnWorker
from d5suite.measurements import find
from d5suite.session.pairs import SIDES, Criterion, InterruptedPairsError, Pair, PairedRun, StoppingRule
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.sides import Side
from d5suite.statistics.launches import launches_needed

CRITERION = Criterion(effect=0.02, alpha=0.01)
ALPHA = 0.01
Time = Callable[[str, int], float | None]
"""Seconds of a sample, by problem and launch; None if the worker dies in its turn."""


@dataclass
class Pretence:
    """What workers pretend on each side, and what has happened.

    Attributes
    ----------
    times : list of callable
        Of A and B.
    fails : set of (str, str)
        Sides and problems that fail before their turn.
    interrupt : (str, int) or None
        Where somebody presses Ctrl-C: problem and launch.
    changes : bool
        Whether a result lacks a sample that was handed over.
    machine : dict
        What disturbed the machine, as in a record.
    said : list of str
        Why workers were told to leave.
    events : list of str
        Who was told that its turns have ended, and who then went on.
    """

    times: Sequence[Time]
    fails: set[tuple[str, str]] = field(default_factory=set)
    interrupt: tuple[str, int] | None = None
    changes: bool = False
    machine: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


@dataclass
class Worker:
    """A worker of one measurement."""

    pretence: Pretence
    side: str
    name: str
    launch: int
    noise: random.Random
    sample_s: float = 0.1
    given: list[float] = field(default_factory=list)
    left: str = ""
    done: bool = False

    def take(self, count: int) -> list[float] | None:
        if self.pretence.interrupt == (self.name, self.launch) and len(self.given) > 20:
            raise KeyboardInterrupt
        time = self.pretence.times[SIDES.index(self.side)](self.name, self.launch)
        if time is None:
            return None
        taken = [time * self.noise.lognormvariate(0, 0.01) for _ in range(count)]
        self.given += taken
        return taken

    def rest(self) -> None:
        """It has no threads."""

    def finish(self) -> None:
        self.done = True
        self.pretence.events.append(f"{self.side} ends")

    def leave(self, reason: str) -> None:
        self.left = reason
        self.pretence.said.append(f"{self.side} {self.name}: {reason}")


def pretend(monkeypatch: pytest.MonkeyPatch, pretence: Pretence) -> None:
    """Replace the sessions of both sides."""

    class Pretender:
        made = 0

        def __init__(self, settings: Settings) -> None:
            self.settings, self.side = settings, SIDES[Pretender.made]
            Pretender.made += 1

        def close(self) -> None:
            pass

        def run(
            self, batch: Sequence[Wanted], results: dict[str, MeasurementResult], start: Any, launch: int
        ) -> Generator[tuple[str, TurnWorker], None, None]:
            for each in batch:
                name = each.case.name.partition(".")[2]
                if (self.side, name) in pretence.fails:
                    results[each.key] = MeasurementResult(failure="it is wrong", wrong=True)
                    continue
                worker = Worker(
                    pretence, self.side, name, launch, random.Random(f"{SIDES.index(self.side)}{name}{launch}")
                )
                try:
                    yield each.key, cast(TurnWorker, worker)
                except GeneratorExit:
                    results[each.key] = MeasurementResult(failure="the worker was interrupted")
                    raise
                pretence.events.append(f"{self.side} goes on")
                if worker.done:
                    given = worker.given[:-1] if pretence.changes else worker.given
                    record = {"of": f"launch {launch}"} | ({"machine": pretence.machine} if pretence.machine else {})
                    results[each.key] = MeasurementResult(record=record, samples_s=given)
                else:
                    why = worker.left if pretence.times[SIDES.index(self.side)](name, launch) else "the worker died"
                    results[each.key] = MeasurementResult(failure=why)

    monkeypatch.setattr("d5suite.session.pairs.Session", Pretender)


def run(tmp_path: Path, names: str, budget: StoppingRule = StoppingRule()) -> dict[str, Pair]:  # noqa: B008  immutable
    """Measure some problems, with names of one letter."""
    batch = [
        Wanted(ProblemCase("p", Problem(name, "Relu", {"X": (3,)})), find("forward"), select("torch")) for name in names
    ]
    paired = PairedRun((Side("here"), Side("here")), Settings(jobs=tmp_path), budget, seed=1)
    try:
        pairs = paired.run(batch, {each.key: CRITERION for each in batch}, ALPHA)
    except InterruptedPairsError as error:
        pairs = error.pairs
        pairs = [each for each in pairs if each.decision is not None]
    finally:
        paired.close()
    return {each.wanted.case.name.partition(".")[2]: each for each in pairs}


def verdicts(pairs: dict[str, Pair]) -> dict[str, str | None]:
    return {name: each.decision.outcome if each.decision else None for name, each in pairs.items()}


def steady(name: str, launch: int) -> float:
    return 0.1


def test_what_has_changed_is_measured_by_new_processes_until_they_confirm_it_and_the_rest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"s": 0.13, "e": 0.1, "f": 0.08}
    pretence = Pretence([steady, lambda name, launch: times[name]])
    pretend(monkeypatch, pretence)
    found = run(tmp_path, "sef")
    assert verdicts(found) == {"s": "slower", "e": "same", "f": "faster"}
    assert (slower := found["s"].decision) is not None and slower.ratio is not None
    assert slower.ratio.value == pytest.approx(1.3, rel=0.01)
    records = {name: each.b.record for name, each in found.items()}
    again = launches_needed(ALPHA / 2)  # two are suspected
    last = {"of": f"launch {1 + again}"}
    assert records == {"s": last, "e": {"of": "launch 1"}, "f": last}
    assert {name: each.launches for name, each in found.items()} == {"s": 1 + again, "e": 1, "f": 1 + again}
    assert found["s"].blocks >= 8 + 5 * again
    told, went = pretence.events[::2], pretence.events[1::2]  # one at a time
    assert [each.replace("ends", "goes on") for each in told] == went and len(went) == 2 * (3 + 2 * again)


@pytest.mark.parametrize(
    ("later", "verdict", "launches"),
    [
        ([0.1] * 9, "same", None),  # one process had an unlucky memory layout
        ([0.13, 0.07, 0.07], "uncertain", 4),  # layouts differ by more than the effect
        ([0.13, 0.13, 0.07] + 20 * [0.13], "slower", 1 + launches_needed(ALPHA, 1)),  # one lucky process
    ],
)
def test_what_later_launches_do_not_confirm_is_not_slower(
    later: list[float], verdict: str, launches: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, Pretence([steady, lambda name, launch: [0.13, *later][launch - 1]]))
    (found,) = run(tmp_path, "s").values()
    assert found.decision is not None and found.decision.outcome == verdict
    assert found.launches == launches or (launches is None and 3 <= found.launches <= 9)
    reasons = " ".join(found.decision.reasons)
    assert ("launches do not confirm" in reasons) == (verdict == "uncertain")
    if verdict == "uncertain":
        assert reasons.startswith("1.299 times as long, which later launches do not confirm: 0.69")
        assert found.decision.ratio is not None and found.decision.ratio.low < 1 < found.decision.ratio.high


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize(("share", "limits"), [(0.05, False), (0.6, True)])
def test_a_disturbed_machine_decides_nothing_above_the_limit_unless_told_to(
    share: float, limits: bool, decides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"disturbed": True, "reasons": ["others used 1.6 of 2 CPUs"], "taken_share": share}
    pretend(monkeypatch, Pretence([steady, lambda name, launch: 0.13 if name == "s" else 0.1], machine=machine))
    found = run(tmp_path, "se", StoppingRule(decides_disturbed=decides))
    if decides or not limits:
        assert verdicts(found) == {"s": "slower", "e": "same"}
        return
    assert verdicts(found) == {"s": "uncertain", "e": "uncertain"}
    for each in found.values():
        assert each.decision is not None and each.launches == 1 and each.decision.finds == math.inf
        assert each.decision.reasons == tuple(f"side {side} was disturbed: others used 1.6 of 2 CPUs" for side in "AB")


def test_a_side_that_fails_costs_this_measurement_and_the_other_side_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretence = Pretence([steady, lambda name, launch: None if name == "d" else 0.1], fails={("A", "w"), ("B", "v")})
    pretend(monkeypatch, pretence)
    found = run(tmp_path, "wadve")
    assert verdicts(found) == {"w": None, "a": "same", "d": None, "v": None, "e": "same"}
    failures = {name: (each.a.failure, each.b.failure) for name, each in found.items() if each.decision is None}
    wrong = "it is wrong"
    assert failures == {"w": (wrong, None), "d": (None, "the worker died"), "v": (None, wrong)}
    assert {each for each in pretence.said if not each.startswith("B d:")} == {
        "B w: side A has failed in this measurement", "A d: side B has failed in this measurement",
        "A v: side B has failed in this measurement",
    }  # fmt: skip


def test_a_budget_that_is_spent_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Pretence([steady, lambda name, launch: 0.13]))
    for budget, blocks in ((StoppingRule(blocks=3), 3), (StoppingRule(seconds=0), 1)):
        pretend(monkeypatch, Pretence([steady, lambda name, launch: 0.13]))
        (found,) = run(tmp_path, "s", budget).values()
        assert found.decision is not None
        assert (found.decision.outcome, found.blocks) == ("uncertain", blocks)


@pytest.mark.parametrize(
    ("launch", "expected"), [(1, {"a": "same"}), (2, {"a": "same", "s": "uncertain", "t": "uncertain"})]
)
def test_an_interrupt_costs_what_was_not_finished(
    launch: int, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, Pretence([steady, lambda name, launch: 0.1 if name == "a" else 0.13], interrupt=("s", launch)))
    found = run(tmp_path, "ast")
    assert verdicts(found) == expected
    decisions = [each.decision for name, each in found.items() if name != "a"]
    assert all(each is not None and "no second launch" in each.reasons[0] for each in decisions)


def test_a_result_with_other_samples_than_were_handed_over_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, Pretence([steady, steady], changes=True))
    (found,) = run(tmp_path, "s").values()
    assert found.decision is None and "other samples than it handed over" in str(found.b.failure)
