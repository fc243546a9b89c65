"""Backends that take turns in the measurements of a case.

The order of the backends reverses with every round, so that drift in time affects all backends
alike. Measurements that cannot be taken in turns are made by one worker while the others wait. If a
worker dies, only its own measurement is lost; the other workers go on.

Before the rounds, workers prepare one at a time, alone, because the first call and the peak memory
are recorded. Then two workers may prove at once, while the next worker imports its framework. As
many workers live side by side as fit into memory. The others take turns afterwards, in another
group, and the record has a note. Several launches repeat all measurements that take turns, in new
processes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from d5suite.errors import D5Error, describe_error
from d5suite.instruments.memory import free_memory
from d5suite.instruments.settings import BESIDE, SamplingSettings
from d5suite.instruments.threads import allowed_cpus
from d5suite.job import Job
from d5suite.launch.signals import uninterrupted
from d5suite.launch.turns import TurnWorker, require_same
from d5suite.session.record import with_samples
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.session import Session
from d5suite.session.turns import TurnJob, TurnScheduler
from d5suite.statistics.intervals import relative_half_width
from d5suite.statistics.rounds import without_drift

TURN_S, LONG_S = 0.05, 0.1
"""Shortest turn, and shortest sample that needs no uncounted calls before it, in seconds. Caches
that another worker has filled make the first sample longer by milliseconds."""

ROUNDS = 6
"""Number of rounds into which a budget is divided: the fewest that give a 95% interval."""

LONGEST = 1000
"""Most samples of a turn."""

ROOM = 1.2
"""Free memory needed to start another worker, in multiples of the largest worker so far."""

CROWDED = "memory had no room for all workers at once: only those in one group took turns"

SPARE = 0.95
"""Fraction of the free memory that a worker may use beside others."""

AT_ONCE, MOST_THREADS = 2, 4
"""Most workers that prove at once, and most threads of a worker that proves beside another. The
workers share their cores. This was measured on two cores only."""

ROOM_TO_PROVE = 2.0
"""Free memory needed to prove with two workers at once, in multiples of the need of one worker:
both may grow by this much, and the memory that the first worker already holds is the reserve."""

WIDER = 2
"""Memory of a worker that has proved, in multiples of its memory after preparing: float64 is twice
as wide."""


def can_take_turns(session: Session, jobs: Sequence[Sequence[Wanted]], least: int = 2) -> bool:
    """Return whether at least `least` jobs of a case have measurements that take turns."""
    first = jobs[0][0]
    if session.settings.elsewhere is not None or session.settings.device != "cpu" or first.ranks is not None:
        return False
    if first.case.shares_references:
        return False
    return sum(any(each.measurement.takes_turns for each in batch) for batch in jobs) >= least


def measure_in_turns(session: Session, jobs: Sequence[Sequence[Wanted]], launches: int = 1) -> None:
    """Measure a case on several backends in turn; `Session.known` then has the results.

    Parameters
    ----------
    session : Session
    jobs : sequence of sequence of Wanted
        The measurements of each backend.
    launches : int
        Number of launches, each in new processes.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C; `Session.known` has the finished results.
    """
    jobs = _in_proving_order(session, jobs)
    try:
        for launch in range(1, launches + 1):
            if launch > 1:
                jobs = _launched_again(session, jobs)
            waiting, crowded = jobs, False
            while waiting:
                rounds = RoundScheduler(session, waiting, launch, crowded=crowded)
                rounds.measure()
                waiting, crowded = rounds.left(), True
    except Exception as error:  # of any kind: it costs this case and no other
        for each in itertools.chain.from_iterable(jobs):
            if session.known(each) is None:
                session.keep(each, MeasurementResult(failure=describe_error(error)))


def _preset(session: Session, batch: Sequence[Wanted]) -> str:
    """Return the name of the preset at which a job measures."""
    return batch[0].case.preset_name(batch[0].selection, session.settings)


def _in_proving_order(session: Session, jobs: Sequence[Sequence[Wanted]]) -> list[Sequence[Wanted]]:
    """Return the jobs in the order in which they prove.

    The first job of a shared preset computes references for the others; its backend has no slow
    float64 if there is a choice. Jobs with a preset of their own fill the wait. The longest proofs
    follow.
    """
    slow = [bool(batch[0].selection.backend.slow_float64) for batch in jobs]
    presets = [_preset(session, batch) for batch in jobs]
    first: dict[str, int] = {}
    for index in sorted(range(len(jobs)), key=slow.__getitem__):
        first.setdefault(presets[index], index)

    def place(index: int) -> int:
        if first[presets[index]] == index:
            return 0 if presets.count(presets[index]) > 1 else 1
        return 2 if slow[index] else 3

    return [jobs[index] for index in sorted(range(len(jobs)), key=place)]


def _launched_again(session: Session, jobs: Sequence[Sequence[Wanted]]) -> list[list[Wanted]]:
    """Return the measurements that take turns and have not failed, to launch them again."""

    def is_sound(wanted: Wanted) -> bool:
        result = session.known(wanted)
        return wanted.measurement.takes_turns and result is not None and result.record is not None

    return [sound for batch in jobs if (sound := [each for each in batch if is_sound(each)])]


class RoundScheduler(TurnScheduler):
    """One launch of the backends, which take turns in rounds."""

    def __init__(self, session: Session, jobs: Sequence[Sequence[Wanted]], launch: int, *, crowded: bool) -> None:
        super().__init__(list(dict.fromkeys(each.key for batch in jobs for each in batch)))
        self._session, self._launch, self._is_crowded = session, launch, crowded
        self._batches = {batch[0].runner: batch for batch in jobs}
        self._results: dict[str, dict[str, MeasurementResult]] = {name: {} for name in self._batches}
        self._workers: dict[str, TurnWorker] = {}
        self._largest = 0
        self._need: dict[str, int] = {}
        self._rounds: dict[str, dict[str, list[list[float]]]] = {}
        self._token = uuid.uuid4().hex
        self._beside = len(allowed_cpus()) > 1
        self._at_once = AT_ONCE if session.settings.threads <= MOST_THREADS else 1
        self._presets = {name: _preset(session, batch) for name, batch in self._batches.items()}
        self._proved = set(self._presets.values() if launch > 1 or crowded else ())

    def measure(self) -> None:
        """Measure until done or interrupted, and store the results in the session."""
        jobs = {}
        for name, batch in self._batches.items():

            def start(job: Job, path: Path, limit_s: float, name: str = name) -> TurnWorker:
                ended = self._workers.pop(name, None)
                self._largest = max(self._largest, ended.peak_bytes if ended is not None else 0)
                launch = self._session.launch(job, path, limit_s, memory_bytes=self._limit())
                self._workers[name] = TurnWorker(job, path, launch, beside=self._beside)
                return self._workers[name]

            jobs[name] = self._session.run(batch, self._results[name], start, self._launch)
        ended_by: BaseException | None = None
        try:
            self.run(jobs)
        except BaseException as error:
            ended_by = error
            raise
        finally:
            with uninterrupted():
                self._settle(ended_by)

    def left(self) -> list[list[Wanted]]:
        """Return the measurements that did not fit into memory beside the others."""
        missing = {
            name: [each for each in batch if each.key not in self._results[name] and name not in self.errors]
            for name, batch in self._batches.items()
        }
        return [batch for batch in missing.values() if batch]

    def _settle(self, ended_by: BaseException | None) -> None:
        """Store the results in the session, with the rounds in which they were taken."""
        self._is_crowded |= bool(self.left())
        for name, batch in self._batches.items():
            for each in batch:
                result = self._results[name].get(each.key)
                if result is None and name in self.errors:
                    result = MeasurementResult(failure=self.errors[name])
                if result is None:
                    continue
                if result.record is None and not result.wrong and isinstance(ended_by, Exception):
                    result = MeasurementResult(failure=describe_error(ended_by))
                before = self._session.known(each) if self._launch > 1 else None
                if result.record is not None and name in self._rounds.get(each.key, ()):
                    result = self._with_rounds(each.key, name, result, before)
                elif ended_by is not None and before is not None and not result.wrong:
                    result = before
                self._session.keep(each, result)

    def _with_rounds(
        self, key: str, name: str, result: MeasurementResult, before: MeasurementResult | None
    ) -> MeasurementResult:
        """Return a result with its rounds appended to the rounds of earlier launches."""
        assert result.record is not None
        rounds = self._rounds[key][name]
        try:
            require_same(list(itertools.chain.from_iterable(rounds)), result.samples_s)
        except D5Error as error:
            return MeasurementResult(failure=str(error))
        launch: dict[str, Any] = {
            "group": self._token,
            "beside": sorted(other for other in self._rounds[key] if other != name),
            "rounds": [len(each) for each in rounds],
        }
        if self._is_crowded:
            launch["note"] = CROWDED
        if before is None or before.record is None:
            return replace(result, record={**result.record, "turns": [launch]})
        samples = [*before.samples_s, *result.samples_s]
        ends = [0, *itertools.accumulate(sum(each["rounds"]) for each in before.record["turns"]), len(samples)]
        launches = [samples[start:end] for start, end in itertools.pairwise(ends)]
        turns = [*before.record["turns"], launch]
        return replace(
            before,
            record={**with_samples(before.record, launches, result.record), "turns": turns},
            samples_s=samples,
            series={**before.series, "samples_s": samples},
        )

    def _next(self, name: str, jobs: Mapping[str, TurnJob]) -> tuple[str, TurnWorker] | None:
        waiting = super()._next(name, jobs)
        worker = self._workers.get(name)
        if waiting is None or waiting[0]:
            self._proved.add(self._presets[name])
            self._need[name] = worker.peak_bytes if worker is not None else 0
        elif worker is not None and worker.asks == BESIDE:
            self._need[name] = WIDER * worker.peak_bytes
        if waiting is not None and waiting[0]:
            self._tell_median(waiting[0], name, waiting[1].sample_s, 0)
        return waiting

    def _tell_median(self, key: str, name: str, median_s: float, rounds: int) -> None:
        if self._session.provisional is not None:
            self._session.provisional(key, name, median_s, rounds)

    def has_room(self) -> bool:
        """Return whether one more worker, as large as the largest so far, fits into memory."""
        largest = max([self._largest, *(each.peak_bytes for each in self._workers.values())])
        return self._limit() >= ROOM * largest

    def may_prepare(self, name: str, proving: Collection[str]) -> bool:
        """See `TurnScheduler.may_prepare`.

        The first job of a preset proves before the other jobs begin: it computes references and a
        training run for all jobs of the preset.
        """
        if not proving:
            return True
        preset = self._presets[name]
        waits = preset not in self._proved and any(self._presets[each] == preset for each in proving)
        needed = max([self._largest, *self._need.values()])
        return len(proving) < self._at_once and not waits and self._limit() >= ROOM_TO_PROVE * needed

    def _limit(self) -> int:
        """Return the memory limit of one more worker in bytes."""
        others = sum(worker.resident_bytes() for worker in self._workers.values())
        whole = self._session.settings.memory_bytes
        if not others:
            return whole
        return min(whole - others, int(SPARE * min(free_memory("cpu").values())))

    def take(self, key: str, workers: Mapping[str, TurnWorker]) -> Mapping[str, str]:
        """Take rounds until the ratios are precise, or the budget is spent."""
        sampling = self._sampling(key)
        rounds: dict[str, list[list[float]]] = {name: [] for name in workers}
        self._rounds[key] = rounds
        spent, number, last = 0.0, 0, ""
        while rounds:
            if self._session.progress is not None:
                self._session.progress(key, f"{len(rounds)} backends take turns, round {number + 1}")
            for name in list(rounds) if number % 2 == 0 else list(reversed(rounds)):
                worker = workers[name]
                count = samples_of_turn(worker.sample_s, sampling)
                samples = worker.take(count, wakes=name != last and worker.sample_s < LONG_S)
                worker.rest()
                last = name
                if samples is None:
                    del rounds[name]
                    continue
                rounds[name].append(samples)
                self._tell_median(key, name, statistics.median(map(statistics.median, rounds[name])), number + 1)
                spent += worker.took_s
            number += 1
            if any(workers[name].is_late for name in rounds):
                break
            if rounds and _is_enough(list(rounds.values()), spent / len(rounds), sampling):
                break
        return {}

    def _sampling(self, key: str) -> SamplingSettings:
        """Return the settings with the largest budget: slower backends have smaller presets."""
        wanted = [each for batch in self._batches.values() for each in batch if each.key == key]
        return max(map(self._session.sampling, wanted), key=lambda each: each.max_time_s)


def samples_of_turn(sample_s: float, sampling: SamplingSettings) -> int:
    """Return the number of samples in a worker's turn.

    Parameters
    ----------
    sample_s : float
        Seconds that a sample takes; 0 if unknown.
    sampling : SamplingSettings
        The budget is divided into `ROUNDS` parts.
    """
    if sample_s <= 0:
        return 1
    budget = math.floor(sampling.max_time_s / ROUNDS / sample_s)
    return max(1, min(math.ceil(TURN_S / sample_s), budget, LONGEST))


def _is_enough(rounds: Sequence[Sequence[Sequence[float]]], spent_s: float, sampling: SamplingSettings) -> bool:
    """Return whether samples suffice, after ``spent_s`` seconds per worker."""
    least, most = (f(sum(map(len, each)) for each in rounds) for f in (min, max))
    count = len(rounds[0])
    compete = len(rounds) > 1
    if least < sampling.min_rounds or (count < ROUNDS and most < sampling.max_rounds and (compete or least > count)):
        return False
    if spent_s >= sampling.max_time_s or most >= sampling.max_rounds:
        return True
    return is_precise(rounds, sampling)


def is_precise(rounds: Sequence[Sequence[Sequence[float]]], sampling: SamplingSettings) -> bool:
    """Return whether the ratios to the first backend are precise enough, or the only median."""
    import numpy as np

    first, *others = [[statistics.median(each) for each in its] for its in rounds]
    series = [np.exp(without_drift(np.log(its) - np.log(first))) for its in others] or [np.asarray(first)]
    return all(relative_half_width(list(each), sampling.confidence) <= sampling.relative_precision for each in series)
