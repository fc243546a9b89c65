"""Fresh launches after the search: the speed-up with its interval, and what each knob gives.

The search's own samples chose the best candidate, so they flatter it. Launches here are new
processes that the search has not seen: one of each side, which take turns in rounds. A launch is
represented by its median, and the interval is Student's over launches
(`d5suite.statistics.rounds`).

Imports `d5suite.session` and its neighbours.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from d5suite.launch.turns import TurnWorker
from d5suite.session.pairs import samples_of_slot
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.session import Session
from d5suite.statistics.contests import veto_of
from d5suite.statistics.ratios import Ratio
from d5suite.statistics.rounds import ratio_of_rounds
from d5suite.tuning.search import GAIN
from d5suite.tuning.space import Candidate, Change, Space
from d5suite.tuning.trials import FIGURE_OF, TIMED, TrialJob, Trials, item_s, takes_turns
from d5suite.tuning.whole_runs import run_whole

TUNED, DEFAULT, STOCK = "tuned", "default", "stock"
"""The sides: the candidate, d5suite's default, and the framework as it comes."""

ROUNDS, MOST_ROUNDS = 8, 100
"""Fewest and most rounds of a launch."""

ROUNDS_S, LONGEST_S = 5.0, 20.0
"""Least and most seconds of a launch's rounds: as many as the deadline leaves. Within a launch a
step of some milliseconds varies more than launches do."""

FEWEST_LAUNCHES = 3
"""Two launches would give an interval from a hundredth to a hundred times."""


@dataclass
class Confirmed:
    """What fresh launches found.

    Attributes
    ----------
    rounds : dict of str to list of list of float
        By side and launch: seconds per item in each round, up to one factor for all.
    records : dict of str to list of dict
        Records of each side's launches, with ``p99_s``, the 99th percentile in seconds per item.
    failure : str
        Why a side has no result; empty if all have.
    disturbed : str
        What disturbed the machine so much that nothing follows.
    """

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failure: str = ""
    disturbed: str = ""

    def ratio(self, side: str, over: str) -> Ratio | None:
        """Return how many times as long a side takes as another one, per item."""
        if not self.rounds.get(side) or not self.rounds.get(over):
            return None
        return ratio_of_rounds(self.rounds[over], self.rounds[side], run_sd=0.0)

    def goal_ratio(self, goal: str, wanted: Wanted) -> Ratio | None:
        """Return the tuned side's figure of a goal over the default's; None if the goal is time."""
        if goal in TIMED or not self.records.get(TUNED):
            return None
        default, tuned = ([[figure(goal, wanted, each)] for each in self.records[side]] for side in (DEFAULT, TUNED))
        return ratio_of_rounds(default, tuned, run_sd=0.0)

    def why_not(self, goal: str, wanted: Wanted) -> str:
        """Return why fresh launches do not confirm a smaller goal; empty if they do."""
        ratio = self.ratio(TUNED, DEFAULT) if goal in TIMED else self.goal_ratio(goal, wanted)
        if ratio is not None and ratio.high < 1:
            return ""
        said = "nothing was measured" if ratio is None else f"{ratio.value:.3f} times the default's"
        between = "" if ratio is None else f" ({ratio.low:.3f} to {ratio.high:.3f})"
        return f"fresh launches do not confirm it: {goal} is {said}{between}"


def figure(goal: str, wanted: Wanted, record: Mapping[str, Any]) -> float:
    """Return the figure that a goal minimizes, from the record of a fresh launch."""
    joules = (record.get("energy") or {}).get("joules_per_item", math.nan)
    known = {
        "p99_s": record["p99_s"], "memory_bytes": record.get("peak_memory_bytes") or math.nan, "energy_j": joules
    }  # fmt: skip
    return float(known[FIGURE_OF[goal]]) * (item_s(wanted, record) if goal == "energy_delay" else 1.0)


def confirm(
    session: Session, wanted: Wanted, changes: Mapping[str, Change], launches: Iterator[int], *, count: int,
    deadline: float, tell: Callable[[str], None],
) -> Confirmed:  # fmt: skip
    """Measure several sides in fresh launches.

    Parameters
    ----------
    session : Session
    wanted : Wanted
    changes : mapping of str to Change
        By side.
    launches : iterator of int
        Numbers of launches that were not used yet.
    count : int
        Launches of each side.
    deadline : float
        Time of `time.monotonic` after which no launch begins, except for the first three.
    tell : callable
    """
    found = Confirmed({side: [] for side in changes}, {side: [] for side in changes})
    late_s = 0.0  # what a launch needs after its rounds
    for launch in range(1, count + 1):
        start = time.monotonic()
        if launch > FEWEST_LAUNCHES and start > deadline:
            tell(f"no time for more than {launch - 1} of {count} launches")
            break
        tell(f"fresh launch {launch} of {count}: {', '.join(changes)}")
        end = start + (deadline - start) / (count + 1 - launch)
        _launch(session, wanted, changes, launches, found, end - late_s)
        late_s = max(0.0, min(late_s + time.monotonic() - end, LONGEST_S))
        if found.failure:
            break
    return found


def _launch(
    session: Session, wanted: Wanted, changes: Mapping[str, Change], launches: Iterator[int], found: Confirmed,
    end: float,
) -> None:  # fmt: skip
    if takes_turns(wanted):
        results, rounds = _in_turns(session, wanted, changes, launches, found, end)
    else:
        turn = -1 if len(next(iter(found.rounds.values()))) % 2 else 1
        order = list(changes)[::turn]  # every second launch in reverse
        results = {side: run_whole(session, wanted, changes[side], next(launches)) for side in order}
        rounds = {side: [item_s(wanted, each.record)] for side, each in results.items() if each.record is not None}
    for side in changes:
        if found.failure or results[side].record is None or side not in rounds:
            found.failure = found.failure or f"{side}: {_reason(results[side])}"
            return
    for side in changes:
        record, median = results[side].record, statistics.median(rounds[side])
        assert record is not None
        spread = float(np.quantile(results[side].samples_s, 0.99) / np.median(results[side].samples_s))
        found.rounds[side].append(rounds[side])
        found.records[side].append({**record, "p99_s": median * spread})
        found.disturbed = found.disturbed or veto_of(record.get("machine", {}))


def _in_turns(
    session: Session, wanted: Wanted, changes: Mapping[str, Change], launches: Iterator[int], found: Confirmed,
    end: float,
) -> tuple[dict[str, MeasurementResult], dict[str, list[float]]]:  # fmt: skip
    """Return results, and seconds of each round, scaled to the default's number of items."""
    jobs = {side: TrialJob(session, wanted, change, next(launches)) for side, change in changes.items()}
    try:
        workers: dict[str, TurnWorker] = {}
        for side, job in jobs.items():
            worker = job.ready()
            if worker is None:
                found.failure = f"{side}: {_reason(job.end())}"
                return {}, {}
            workers[side] = worker
        rounds = _rounds(workers, end)
        results = {}
        for side, job in jobs.items():  # one after the other: a meter reads the whole machine
            workers[side].finish()
            results[side] = job.end()
    finally:
        for job in jobs.values():
            job.close()
    scales = {side: math.exp(change.items) for side, change in changes.items()}
    return results, {side: [each / scales[side] for each in own] for side, own in rounds.items()}


def _rounds(workers: Mapping[str, TurnWorker], end: float) -> dict[str, list[float]]:
    """Take rounds until `end`, every second one in reverse; leave out a side whose worker ended."""
    rounds: dict[str, list[float]] = {side: [] for side in workers}
    count, start = 1, time.monotonic()
    end = min(max(end, start + ROUNDS_S), start + LONGEST_S)
    for number in range(1 + MOST_ROUNDS):
        if number > ROUNDS and time.monotonic() > end:
            break
        for side in list(workers) if number % 2 else list(workers)[::-1]:
            taken = workers[side].take(count)
            if taken is None:
                return {each: own for each, own in rounds.items() if each != side}
            workers[side].rest()
            if number:  # the first one only wakes the workers
                rounds[side].append(statistics.median(taken))
        if not number:
            count = samples_of_slot(max(each.sample_s for each in workers.values()))
    return rounds


def _reason(result: MeasurementResult) -> str:
    return (result.failure or "it left no result").partition("\n")[0]


def ablate(
    space: Space, best: Candidate, trials: Trials, deadline: float, tell: Callable[[str], None]
) -> tuple[Candidate, list[dict[str, Any]]]:
    """Take back one knob after the other, and keep back what gives nothing.

    Parameters
    ----------
    space : Space
    best : Candidate
    trials : Trials
        Their base is the best candidate.
    deadline : float
        Time of `time.monotonic` after which the remaining knobs stay as they are.
    tell : callable

    Returns
    -------
    reduced : Candidate
        The best candidate without the knobs that give nothing.
    parts : list of dict
        By knob: how many times as much of the goal it takes without it, and whether it stays.
    """
    parts: list[dict[str, Any]] = []
    idle: dict[str, str] = {}
    for name, value in space.differences(best).items():
        default = space.knobs[space.places[name]].default
        part: dict[str, Any] = {"knob": name, "value": value, "without": None, "interval": None, "stays": True}
        parts.append(part)
        if time.monotonic() > deadline:
            part["note"] = "not measured: no time was left"
            continue
        without = space.changed(best, **{name: default})
        trial = trials.measure(space.change(without))
        if trial.status == "measured":
            part["without"] = math.exp(trial.value)
            if trial.value == trial.time:  # no other figure has an interval
                part["interval"] = [math.exp(each) for each in trial.interval if math.isfinite(each)] or None
            if trial.value < GAIN:
                part["stays"] = False
                idle[name] = default
        else:
            part["note"] = f"without it: {trial.status}"
        tell(f"without {name}={value}: {_said(part)}")
    return space.changed(best, **idle), parts


def _said(part: Mapping[str, Any]) -> str:
    if part["without"] is None:
        return str(part["note"])
    return f"{part['without']:.3f} times as much" + ("" if part["stays"] else ", so that it is left out")
