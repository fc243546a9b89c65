"""Workers of several backends that take turns in each measurement of a case.

They live side by side, and only one runs at a time, from its start on: the others are blocked on a
read. A round goes through all of them, the next one back: what drifts in time drifts for all.
Measurements that cannot be taken in turns are made by one worker while the others wait. A worker
that dies costs its own measurement; the others go on.

As many workers live side by side as memory has room for. Those for which there is none take turns
in a group of their own, after these, and what is recorded says so.

Several launches repeat all of it, by new processes, for what takes turns.

Imports `d5suite.launch`, `d5suite.instruments` and its neighbours.
"""

from __future__ import annotations

import itertools
import math
import statistics
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.backends import Selection
from d5suite.errors import D5Error, describe_error
from d5suite.instruments.memory import free_memory
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import Job
from d5suite.launch.base import Launch, Limits, interpreter
from d5suite.launch.turns import TurnWorker, require_same
from d5suite.session.attempts import watcher
from d5suite.session.record import with_samples
from d5suite.session.session import Found, Session, Wanted
from d5suite.statistics.intervals import relative_half_width
from d5suite.statistics.rounds import without_drift

TURN_S, LONG_S = 0.05, 0.1
"""Least duration of a turn; and of a sample which needs no calls before it that do not count: what
another worker has done to the caches makes the first one longer by milliseconds."""

ROUNDS = 6
"""Rounds into which a budget is divided: the fewest that give a 95% interval."""

LONGEST = 1000
"""Most samples of a turn."""

ROOM = 1.2
"""Free memory, in multiples of the largest worker's so far, needed to start another one."""

CROWDED = "memory had no room for all workers at once: only those in one group took turns"

SPARE = 0.95
"""Part of the memory that is free which a worker may take beside others."""


class Place(NamedTuple):
    """One backend's measurements of the case."""

    selection: Selection
    batch: list[Wanted]


@dataclass
class _Took:
    """Turns of one measurement: the samples of each round, by backend."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)


def can_take_turns(session: Session, places: Sequence[Place], least: int = 2) -> bool:
    """Return whether `least` backends make measurements of one case that take turns, on the CPU."""
    first = places[0].batch[0]
    if session.settings.elsewhere is not None or session.settings.device != "cpu" or first.ranks is not None:
        return False
    if first.case.shares_references:
        return False
    return sum(any(each.measurement.takes_turns for each in place.batch) for place in places) >= least


def measure_in_turns(session: Session, places: Sequence[Place], launches: int = 1) -> None:
    """Measure a case on several backends in turn; the session then knows the results.

    Parameters
    ----------
    session : Session
    places : sequence of Place
    launches : int
        Of each process.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C; what was finished is known.
    """
    places = sorted(places, key=lambda place: bool(place.selection.backend.slow_float64))
    try:
        _measure(session, places, launches)
    except Exception as error:  # whatever it is, it costs this case and no other
        for selection, batch in places:
            for each in batch:
                if session.known(each, selection) is None:
                    session.keep(each, selection, Found(failure=describe_error(error)))


def _measure(session: Session, places: Sequence[Place], launches: int) -> None:
    for launch in range(1, launches + 1):
        waiting = list(places) if launch == 1 else _again(session, places)
        is_crowded = False
        while waiting:
            group = _Group(session, waiting, launch, is_crowded=is_crowded)
            try:
                group.play()
            except BaseException as error:
                group.ended_by = error
                raise
            finally:
                group.close()
                group.settle()
            waiting = group.left()
            is_crowded = True


def _again(session: Session, places: Sequence[Place]) -> list[Place]:
    """Return the measurements to launch again: those that take turns and have not failed."""
    found = []
    for selection, batch in places:
        sound = [each for each in batch if each.measurement.takes_turns and _is_sound(session.known(each, selection))]
        if sound:
            found.append(Place(selection, sound))
    return found


def _is_sound(found: Found | None) -> bool:
    return found is not None and found.record is not None


class _Group:
    """Workers that live side by side."""

    def __init__(self, session: Session, places: Sequence[Place], launch: int, *, is_crowded: bool) -> None:
        self._session, self._launch, self._is_crowded = session, launch, is_crowded
        self._places = {str(place.selection): place for place in places}
        self._found: dict[str, dict[str, Found]] = {name: {} for name in self._places}
        self._workers: dict[str, TurnWorker] = {}
        self._peaks: list[int] = []
        self._runs: dict[str, Generator[tuple[str, TurnWorker], None, None]] = {}
        self._took: dict[str, _Took] = {}
        self._lost: dict[str, str] = {}
        self.ended_by: BaseException | None = None
        self._token = uuid.uuid4().hex
        self._keys = list(dict.fromkeys(each.key for place in places for each in place.batch))

    def play(self) -> None:
        """Run all measurements until done or interrupted."""
        waiting: dict[str, tuple[str, TurnWorker] | None] = {}
        for number, (name, (selection, batch)) in enumerate(self._places.items()):
            if number and not self._has_room():
                break
            self._runs[name] = self._session.in_turns(
                selection, batch, self._starter(name), self._launch, self._found[name]
            )
            waiting[name] = self._next(name)
        while any(waiting.values()):
            there = {name: each for name, each in waiting.items() if each is not None}
            key = min((key for key, _ in there.values()), key=self._keys.index)
            ready = {name: worker for name, (its, worker) in there.items() if its == key}
            self._took[key] = self._take(key, ready)
            for name, worker in ready.items():  # one after the other, so that only one runs
                worker.finish()
                waiting[name] = self._next(name)

    def close(self) -> None:
        """End all workers; the results of what they have finished are kept."""
        for run in self._runs.values():
            run.close()

    def left(self) -> list[Place]:
        """Return the measurements that did not fit into memory beside the others."""
        found = []
        for name, (selection, batch) in self._places.items():
            missing = [each for each in batch if each.key not in self._found[name] and name not in self._lost]
            if missing:
                found.append(Place(selection, missing))
        return found

    def settle(self) -> None:
        """Hand the findings to the session, with the rounds of what took turns."""
        self._is_crowded |= bool(self.left())
        for name, (selection, batch) in self._places.items():
            for each in batch:
                found = self._found[name].get(each.key)
                if found is None and name in self._lost:
                    found = Found(failure=self._lost[name])
                if found is None:
                    continue
                if found.record is None and not found.wrong and isinstance(self.ended_by, Exception):
                    found = Found(failure=describe_error(self.ended_by))
                before = self._session.known(each, selection) if self._launch > 1 else None
                self._session.keep(each, selection, self._with_rounds(each.key, name, found, before))

    def _with_rounds(self, key: str, name: str, found: Found, before: Found | None) -> Found:
        """Append a finding's rounds to those of earlier launches, and return it."""
        took = self._took.get(key)
        rounds = None if took is None else took.rounds.get(name)
        if found.record is None or rounds is None or took is None:
            return before if self.ended_by is not None and before is not None and not found.wrong else found
        try:
            require_same(list(itertools.chain.from_iterable(rounds)), found.samples_s)
        except D5Error as error:
            return Found(failure=str(error))
        launch: dict[str, Any] = {
            "group": self._token,
            "beside": sorted(other for other in took.rounds if other != name),
            "rounds": [len(each) for each in rounds],
        }
        if self._is_crowded:
            launch["note"] = CROWDED
        if before is None or before.record is None:
            return replace(found, record={**found.record, "turns": [launch]})
        samples = [*before.samples_s, *found.samples_s]
        ends = [0, *itertools.accumulate(sum(each["rounds"]) for each in before.record["turns"]), len(samples)]
        launches = [samples[start:end] for start, end in itertools.pairwise(ends)]
        turns = [*before.record["turns"], launch]
        return replace(
            before,
            record={**with_samples(before.record, launches, found.record), "turns": turns},
            samples_s=samples,
            series={**before.series, "samples_s": samples},
        )

    def _has_room(self) -> bool:
        """Return whether one more worker, as large as the largest so far, fits into memory."""
        return bool(self._limit() >= ROOM * max(self._peaks, default=0))

    def _limit(self) -> int:
        """Return the memory limit of one more worker."""
        others = sum(worker.resident_bytes() for worker in self._workers.values())
        whole = self._session.settings.memory_bytes
        if not others:
            return whole
        return min(whole - others, int(SPARE * free_memory("cpu")["in this machine's memory"]))

    def _next(self, name: str) -> tuple[str, TurnWorker] | None:
        """Let a worker run until it waits for its turns; None once it is at its end."""
        try:
            return next(self._runs[name], None)
        except Exception as error:  # whatever it is, it costs this job and no other
            self._lost[name] = describe_error(error)
            return None
        finally:
            if name in self._workers:
                self._workers[name].resident_bytes()
                self._peaks.append(self._workers[name].peak_bytes)

    def _starter(self, name: str) -> Callable[[Job, Path, float], TurnWorker]:
        session = self._session
        settings = session.settings

        def start(job: Job, path: Path, limit_s: float) -> TurnWorker:
            self._workers.pop(name, None)
            tell = session.progress
            shown = path.name.removesuffix(".job.json")
            limits = Limits(limit_s if settings.timeout_s is None else settings.timeout_s, self._limit())
            python = interpreter(job.backend["name"], settings.pythons)
            watch = None if tell is None else watcher(path, lambda phase: tell(shown, phase))
            self._workers[name] = worker = TurnWorker(job, path, Launch(limits, python, settings.wrap, watch=watch))
            return worker

        return start

    def _take(self, key: str, workers: Mapping[str, TurnWorker]) -> _Took:
        """Take rounds until their ratios are precise, or the budget is spent."""
        sampling = self._sampling(key)
        took = _Took({name: [] for name in workers})
        spent = 0.0
        tell, alive, last = self._session.progress, dict(workers), ""
        while alive:
            if tell is not None:
                count = len(next(iter(took.rounds.values())))
                tell(key, f"{', '.join(alive)} take turns, round {count + 1}")
            number = len(next(iter(took.rounds.values())))
            for name in list(alive) if number % 2 == 0 else list(reversed(alive)):
                worker = alive[name]
                count = samples_of_turn(worker.sample_s, sampling)
                found = worker.take(count, wakes=name != last and worker.sample_s < LONG_S)
                worker.rest()
                last = name
                if found is None:
                    del alive[name], took.rounds[name]
                    continue
                took.rounds[name].append(found)
                spent += worker.took_s
            if alive and _is_enough(list(took.rounds.values()), spent / len(alive), sampling):
                break
        return took

    def _sampling(self, key: str) -> SamplingSettings:
        """Return the largest budget of all in turn: slower backends have smaller presets."""
        every = [self._session.sampling(each, place.selection)
                 for place in self._places.values() for each in place.batch if each.key == key]  # fmt: skip
        return max(every, key=lambda each: each.max_time_s)


def samples_of_turn(sample_s: float, sampling: SamplingSettings) -> int:
    """Return the number of samples in a worker's turn.

    Parameters
    ----------
    sample_s : float
        How long one takes; 0 if nobody knows.
    sampling : SamplingSettings
        Its budget is divided into `ROUNDS`.
    """
    if sample_s <= 0:
        return 1
    budget = math.floor(sampling.max_time_s / ROUNDS / sample_s)
    return max(1, min(math.ceil(TURN_S / sample_s), budget, LONGEST))


def _is_enough(rounds: Sequence[Sequence[Sequence[float]]], spent_s: float, sampling: SamplingSettings) -> bool:
    """Return whether samples suffice, after ``spent_s`` for each worker."""
    least, most = (f(sum(map(len, each)) for each in rounds) for f in (min, max))
    count = len(rounds[0])
    if least < sampling.min_rounds or (least > count and count < ROUNDS):
        return False
    if spent_s >= sampling.max_time_s or most >= sampling.max_rounds:
        return True
    return is_precise(rounds, sampling)


def is_precise(rounds: Sequence[Sequence[Sequence[float]]], sampling: SamplingSettings) -> bool:
    """Return whether the ratios to the first, or the median of a single one, are precise enough."""
    import numpy as np

    first, *others = [[statistics.median(each) for each in its] for its in rounds]
    series = [np.exp(without_drift(np.log(its) - np.log(first))) for its in others] or [np.asarray(first)]
    return all(relative_half_width(list(each), sampling.confidence) <= sampling.relative_precision for each in series)
