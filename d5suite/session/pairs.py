"""Two sides of each measurement, timed in turn by workers that live side by side.

A block is ABBA or BAAB, a coin decides which; a letter is a few samples of that side. Only one
worker runs at a time, from its start on: the other one is blocked on a read. Blocks are taken until
the sequential test has decided or the budget is spent; then each side proves what was timed, and
only what is proved counts.

Two processes of one program differ in their memory layout, which no number of pairs averages out.
So what is slower or faster is measured again by new processes, until they confirm it or not.

Imports `d5suite.statistics`, `d5suite.launch` and its neighbours.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from d5suite.backends import Selection, select
from d5suite.cases.case import Settings
from d5suite.errors import D5Error, describe_error
from d5suite.job import Job
from d5suite.launch.base import Launch, Limits, interpreter
from d5suite.launch.turns import TurnWorker, require_same
from d5suite.session.session import Found, Session, Wanted
from d5suite.session.sides import Side
from d5suite.statistics.launches import Launches
from d5suite.statistics.sequential import Decision, block_difference, decide

ORDERS = ((0, 1, 1, 0), (1, 0, 0, 1))
"""Orders of the sides in a block; 0 is side A."""

LETTER_S, LONG_S = 0.05, 0.5
"""Least duration of a letter; and of a sample that is one by itself, without two more."""

LETTER, LONGEST_LETTER = 3, 50
"""Samples of a letter: usually, and at most."""

AGAIN = 14
"""Blocks of a launch that confirms, at most."""

AGAIN_ALPHA = 0.1
"""Error rate at which such a launch has seen enough to say which side is slower."""

Run = Generator[tuple[str, TurnWorker], None, None]
"""Function of one side: its `Session.in_turns`."""


@dataclass(frozen=True)
class Budget:
    """Limits at which to stop undecided.

    Attributes
    ----------
    blocks : int
    seconds : float
        Of one measurement; no block begins later.
    """

    blocks: int = 60
    seconds: float = 300.0


@dataclass(frozen=True)
class Criterion:
    """Criterion of one decision: the relative effect that counts, and the error rate."""

    effect: float
    alpha: float


@dataclass(frozen=True)
class Pair:
    """One measurement on both sides.

    Attributes
    ----------
    wanted : Wanted
    selection : Selection
    a, b : Found
        What failed has a reason; if only the other side failed, there is neither record nor reason.
    decision : Decision or None
        None if a side failed.
    blocks : int
        Pairs that it rests on.
    launches : int
        Of both sides.
    doubt : str
        Why it is uncertain, though pairs of one launch have decided it.
    """

    wanted: Wanted
    selection: Selection
    a: Found
    b: Found
    decision: Decision | None = None
    blocks: int = 0
    launches: int = 1
    doubt: str = ""


class InterruptedPairsError(KeyboardInterrupt):
    """Raised on an interrupt; holds the finished part of the batch."""

    def __init__(self, pairs: list[Pair]) -> None:
        super().__init__()
        self.pairs = pairs


class Duel:
    """The sessions of both sides.

    Parameters
    ----------
    sides : (Side, Side)
    settings : Settings
    budget : Budget
    tell : callable, optional
        Receives what is being done.
    seed : int, optional
        Of the coin.

    Raises
    ------
    ConfigurationError
        If there is no place for job files.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        settings: Settings,
        budget: Budget,
        tell: Callable[[str], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self._sides, self._budget, self._tell = sides, budget, tell or (lambda what: None)
        self._coin = random.Random(seed)
        self._held = ExitStack()
        self._sessions: list[Session] = []
        memory = settings.memory_bytes // 2  # of two workers that live side by side
        for name in "ab":
            own = replace(settings, jobs=settings.jobs.absolute() / f"side-{name}", memory_bytes=memory)
            self._sessions.append(Session(own))
            self._held.callback(self._sessions[-1].close)

    def close(self) -> None:
        """Free the folders of job files."""
        self._held.close()

    def run(
        self, batch: Sequence[Wanted], selection: Selection, tests: Mapping[str, Criterion], alpha: float
    ) -> list[Pair]:
        """Measure a batch of one backend on both sides; confirm changes in new processes.

        Parameters
        ----------
        batch : sequence of Wanted
            Of one job.
        selection : Selection
            The backend; a side may have another mode.
        tests : mapping of str to Criterion
            By key.
        alpha : float
            Probability that any change is confirmed if there is none.

        Raises
        ------
        InterruptedPairsError
            After Ctrl-C, with what was finished.
        BackendError
            If the backend has not a side's mode.
        """
        try:
            first = self._launch(batch, selection, tests, 1, self._budget)
        except InterruptedPairsError as error:
            raise InterruptedPairsError([_Course(each, 0).pair() for each in error.pairs]) from error
        courses = {each.wanted.key: _Course(each, tests[each.wanted.key].effect) for each in first}
        changed = [each for each in batch if courses[each.key].open]
        alpha /= max(1, len(changed))
        again = {each.key: replace(tests[each.key], alpha=AGAIN_ALPHA) for each in changed}
        budget = replace(self._budget, blocks=min(AGAIN, self._budget.blocks))
        launch = 1
        while changed:
            launch += 1
            interrupt: InterruptedPairsError | None = None
            try:
                found = self._launch(changed, selection, again, launch, budget)
            except InterruptedPairsError as error:
                found, interrupt = [each for each in error.pairs if each.decision is not None], error
            for pair in found:
                courses[pair.wanted.key].hear(pair, alpha)
            if interrupt is not None:
                raise InterruptedPairsError([each.pair() for each in courses.values()]) from interrupt
            changed = [each for each in changed if courses[each.key].open]
        return [each.pair() for each in courses.values()]

    def _launch(
        self,
        batch: Sequence[Wanted],
        selection: Selection,
        tests: Mapping[str, Criterion],
        launch: int,
        budget: Budget,
    ) -> list[Pair]:
        chosen = [
            selection if side.mode is None else select(f"{selection.backend.name}:{side.mode}") for side in self._sides
        ]
        runs = [
            session.in_turns(its, batch, self._starter(place, session), launch)
            for place, (session, its) in enumerate(zip(self._sessions, chosen, strict=True))
        ]
        match = _Match(runs, [each.key for each in batch], tests, budget, self._coin, self._tell)
        interrupt: KeyboardInterrupt | None = None
        try:
            match.play()
        except KeyboardInterrupt as error:  # what is finished counts
            interrupt = error
        finally:
            for run in runs:
                run.close()
        pairs = [
            match.pair(each, selection, [
                session.known(each, its) for session, its in zip(self._sessions, chosen, strict=True)
            ])
            for each in batch
        ]  # fmt: skip
        if interrupt is not None:
            raise InterruptedPairsError(pairs) from interrupt
        return pairs

    def _starter(self, place: int, session: Session) -> Callable[[Job, Path, float], TurnWorker]:
        settings, side = session.settings, self._sides[place]

        def start(job: Job, path: Path, limit_s: float) -> TurnWorker:
            self._tell(f"{path.name.removesuffix('.job.json')}: {_called(place)} ({side.spec}) prepares and proves")
            limits = Limits(limit_s if settings.timeout_s is None else settings.timeout_s, settings.memory_bytes)
            python = side.python or interpreter(job.backend["name"], settings.pythons)
            return TurnWorker(job, path, Launch(limits, python, settings.wrap, side.environment, side.folder))

        return start


class _Course:
    """One measurement in the course of its launches."""

    def __init__(self, first: Pair, effect: float) -> None:
        self._latest, self._blocks, self._count = first, first.blocks, 1
        self._launches = Launches(first.decision, effect) if first.decision else None

    @property
    def open(self) -> bool:
        """Whether another launch is needed."""
        return self._launches is not None and self._launches.open

    def hear(self, pair: Pair, alpha: float) -> None:
        """Add the findings of another launch."""
        self._latest = pair
        if pair.decision is None or self._launches is None:  # a side has failed
            self._launches = None
            return
        self._blocks, self._count = self._blocks + pair.blocks, self._count + 1
        self._launches.hear(pair.decision.ratio, alpha)

    def pair(self) -> Pair:
        """Combine the findings of all launches."""
        if self._launches is None:
            return self._latest
        decision, doubt = self._launches.decision()
        return replace(self._latest, decision=decision, doubt=doubt, blocks=self._blocks, launches=self._count)


@dataclass
class _Turns:
    """One measurement's samples from both sides, and the differences of its blocks."""

    samples: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    differences: list[float] = field(default_factory=list)
    decision: Decision | None = None
    failed: int | None = None


class _Match:
    """One batch: both sides come to each measurement, and take turns in it."""

    def __init__(
        self,
        runs: Sequence[Run],
        keys: Sequence[str],
        tests: Mapping[str, Criterion],
        budget: Budget,
        coin: random.Random,
        tell: Callable[[str], None],
    ) -> None:
        self._runs, self._keys, self._tests, self._budget = runs, keys, tests, budget
        self._coin, self._tell = coin, tell
        self._turns: dict[str, _Turns] = {}
        self._lost: dict[int, str] = {}
        self._left: set[tuple[str, int]] = set()

    def play(self) -> None:
        """Run both sides until done or interrupted."""
        first = self._coin.randrange(2)
        order = (first, 1 - first)
        waiting = {side: self._next(side) for side in order}
        while any(waiting.values()):
            there = {side: each for side, each in waiting.items() if each is not None}
            key = min((key for key, _ in there.values()), key=self._place)
            ready = [side for side in order if side in there and there[side][0] == key]
            failed = None if len(ready) == 2 and key in self._tests else 1 - ready[0]
            if failed is None:
                self._tell(f"{key}: both sides are proved and take turns")
                self._turns[key] = self._take([there[side][1] for side in range(2)], self._tests[key])
                failed = self._turns[key].failed
            for side in ready:  # one after the other, so that only one runs
                worker = there[side][1]
                if failed is None:
                    worker.finish()
                else:
                    worker.leave(f"{_called(failed)} has failed in this measurement")
                    if side != failed:
                        self._left.add((key, side))
                waiting[side] = self._next(side)

    def pair(self, wanted: Wanted, selection: Selection, known: Sequence[Found | None]) -> Pair:
        """Return a measurement's outcome, with what each side's session knows of it."""
        turns = self._turns.get(wanted.key)
        a, b = (self._known(wanted.key, side, found) for side, found in enumerate(known))
        pair = Pair(wanted, selection, a, b)
        if turns is None or turns.decision is None or a.record is None or b.record is None:
            return pair
        try:
            for samples, found in zip(turns.samples, (a, b), strict=True):
                require_same(samples, found.samples_s)
        except D5Error as error:
            return replace(pair, a=Found(failure=str(error)), b=Found(failure=str(error)))
        return replace(pair, decision=turns.decision, blocks=len(turns.differences))

    def _known(self, key: str, side: int, found: Found | None) -> Found:
        if (key, side) in self._left:
            return Found()
        return found or Found(failure=self._lost.get(side, "it was not measured"))

    def _place(self, key: str) -> int:
        return self._keys.index(key) if key in self._keys else -1

    def _next(self, side: int) -> tuple[str, TurnWorker] | None:
        """Let a side run until it waits for its turns; return None once it has ended."""
        try:
            return next(self._runs[side], None)
        except Exception as error:  # whatever it is, it costs this job and no other
            self._lost[side] = describe_error(error)
            return None

    def _take(self, workers: Sequence[TurnWorker], test: Criterion) -> _Turns:
        """Take blocks until it is decided, the budget is spent, or a worker has ended."""
        turns = _Turns()
        end = time.monotonic() + self._budget.seconds

        def letter(side: int, count: int) -> list[float]:
            found = workers[side].take(count)
            if found is None:
                raise _SideFailedError(side)
            turns.samples[side].extend(found)
            return found

        try:
            for side in range(2):
                letter(side, LETTER)  # counts for nothing: both have just been woken
            count = _samples_of_letter(max(worker.sample_s for worker in workers))
            while len(turns.differences) < self._budget.blocks:
                block: tuple[list[float], list[float]] = ([], [])
                for side in self._coin.choice(ORDERS):
                    block[side].extend(letter(side, count))
                turns.differences.append(block_difference(*block))
                turns.decision = decide(turns.differences, effect=test.effect, alpha=test.alpha)
                if turns.decision.verdict != "uncertain" or time.monotonic() > end:
                    break
        except _SideFailedError as error:
            turns.failed, turns.decision = error.side, None
        return turns


class _SideFailedError(Exception):
    """Raised when a worker ends in the middle of its turns."""

    def __init__(self, side: int) -> None:
        super().__init__(side)
        self.side = side


def _called(side: int) -> str:
    return f"side {'AB'[side]}"


def _samples_of_letter(sample_s: float) -> int:
    if sample_s >= LONG_S:
        return 1
    return min(LONGEST_LETTER, max(LETTER, math.ceil(LETTER_S / sample_s)))
