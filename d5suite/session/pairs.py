"""Two sides of the same measurements, timed in turn by workers that live side by side.

A block is ABBA or BAAB, at random. A letter is a slot: a few samples of that side. Blocks are taken
until the sequential test has decided or the budget is spent. Then both sides prove what was timed,
and only proved samples count.

Two processes of one program differ in memory layout, and no number of pairs averages this out. So a
measurement that is slower or faster is repeated in new processes, until these confirm or refute the
change.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from d5suite.backends import select
from d5suite.cases.case import Settings
from d5suite.errors import D5Error
from d5suite.job import Job
from d5suite.launch.turns import TurnWorker, require_same
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.session import Session
from d5suite.session.sides import Side
from d5suite.session.turns import TurnJob, TurnScheduler
from d5suite.statistics.contests import veto_of
from d5suite.statistics.decisions import Decision, decide_pairs
from d5suite.statistics.launches import Launches
from d5suite.statistics.sequential import block_difference

SIDES, ORDERS = "AB", ("ABBA", "BAAB")
"""The sides, and their orders in a block."""

SLOT_S, LONG_S = 0.05, 0.5
"""Shortest slot, and shortest sample that fills a slot alone, in seconds."""

SLOT, LONGEST_SLOT = 3, 50
"""Fewest and most samples of a slot; a sample of at least `LONG_S` fills a slot alone."""

CONFIRMING_BLOCKS = 14
"""Most blocks of a confirming launch."""

CONFIRMING_ALPHA = 0.1
"""Error rate at which a confirming launch stops; the launch only has to find the slower side."""


@dataclass(frozen=True)
class StoppingRule:
    """Limits after which a comparison stops undecided.

    Attributes
    ----------
    blocks : int
        Most blocks of one measurement.
    seconds : float
        After this time no block of the measurement begins.
    decides_disturbed : bool
        Whether launches on a disturbed machine decide, too. Both samples of a pair share a
        disturbance only in part.
    """

    blocks: int = 60
    seconds: float = 300.0
    decides_disturbed: bool = False


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
    a, b : MeasurementResult
        A side that failed has a reason. If only one side failed, the other side has neither a
        record nor a reason.
    decision : Decision or None
        None if a side failed.
    blocks : int
        Number of blocks that the decision rests on.
    launches : int
        Number of launches of both sides.
    """

    wanted: Wanted
    a: MeasurementResult
    b: MeasurementResult
    decision: Decision | None = None
    blocks: int = 0
    launches: int = 1


class InterruptedPairsError(KeyboardInterrupt):
    """Raised on an interrupt; holds the finished part of the batch."""

    def __init__(self, pairs: list[Pair]) -> None:
        super().__init__()
        self.pairs = pairs


class PairedRun:
    """Measures batches on both sides.

    Parameters
    ----------
    sides : (Side, Side)
    settings : Settings
    budget : StoppingRule
        Budget for each measurement.
    tell : callable, optional
        Receives messages on the progress.
    seed : int, optional
        Seed for the random order of the sides.

    Raises
    ------
    ConfigurationError
        If the folders for job files cannot be made.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        settings: Settings,
        budget: StoppingRule,
        tell: Callable[[str], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self._sides = dict(zip(SIDES, sides, strict=True))
        self._budget, self._tell = budget, tell or (lambda what: None)
        self._random = random.Random(seed)
        self._held = ExitStack()
        self._sessions: dict[str, Session] = {}
        memory = settings.memory_bytes // 2  # two workers live side by side
        for name in SIDES:
            jobs = settings.jobs.absolute() / f"side-{name.lower()}"
            self._sessions[name] = Session(replace(settings, jobs=jobs, memory_bytes=memory))
            self._held.callback(self._sessions[name].close)

    def close(self) -> None:
        """Unlock the folders of job files."""
        self._held.close()

    def run(self, batch: Sequence[Wanted], tests: Mapping[str, Criterion], alpha: float) -> list[Pair]:
        """Measure a batch on both sides; confirm changes in new processes.

        Parameters
        ----------
        batch : sequence of Wanted
            Measurements of one job. A side may use another mode of the backend.
        tests : mapping of str to Criterion
            Criteria by key.
        alpha : float
            Probability that any change is confirmed if there is none.

        Raises
        ------
        InterruptedPairsError
            After Ctrl-C, with the finished pairs.
        BackendError
            If the backend lacks a side's mode.
        """
        histories: dict[str, _History] = {}
        left, budget, launch = list(batch), self._budget, 0
        while left:
            launch += 1
            interrupt: BaseException | None = None
            try:
                pairs = self._launch(left, tests, launch, budget)
            except InterruptedPairsError as error:
                pairs, interrupt = error.pairs, error
            for pair in pairs:
                key = pair.wanted.key
                if launch == 1:
                    histories[key] = _History(pair, tests[key].effect, budget)
                elif interrupt is None or pair.decision is not None:
                    histories[key].add(pair, alpha)
            if interrupt is not None:
                raise InterruptedPairsError([each.pair() for each in histories.values()]) from interrupt
            left = [each for each in left if histories[each.key].open]
            if launch == 1:
                alpha /= max(1, len(left))
                tests = {each.key: replace(tests[each.key], alpha=CONFIRMING_ALPHA) for each in left}
                budget = replace(budget, blocks=min(CONFIRMING_BLOCKS, budget.blocks))
        return [each.pair() for each in histories.values()]

    def _launch(
        self, batch: Sequence[Wanted], tests: Mapping[str, Criterion], launch: int, budget: StoppingRule
    ) -> list[Pair]:
        results: dict[str, dict[str, MeasurementResult]] = {name: {} for name in SIDES}
        jobs = {name: self._job(name, batch, results[name], launch) for name in self._random.choice(ORDERS)[:2]}
        scheduler = PairScheduler(batch, tests, budget, self._random, self._tell)
        interrupt: KeyboardInterrupt | None = None
        try:
            scheduler.run(jobs)
        except KeyboardInterrupt as error:  # what is finished counts
            interrupt = error
        pairs = [scheduler.pair(each, results) for each in batch]
        if interrupt is not None:
            raise InterruptedPairsError(pairs) from interrupt
        return pairs

    def _job(self, name: str, batch: Sequence[Wanted], results: dict[str, MeasurementResult], launch: int) -> TurnJob:
        """Return the job of one side."""
        side, session = self._sides[name], self._sessions[name]
        if side.mode is not None:
            selection = select(f"{batch[0].selection.backend.name}:{side.mode}")
            batch = [each._replace(selection=selection) for each in batch]

        def start(job: Job, path: Path, limit_s: float) -> TurnWorker:
            self._tell(f"{path.name.removesuffix('.job.json')}: side {name} ({side.spec}) prepares and proves")
            own = session.launch(job, path, limit_s, python=side.python)
            environment = {**own.environment, **side.environment}
            return TurnWorker(job, path, replace(own, environment=environment, folder=side.folder))

        return session.run(batch, results, start, launch)


class _History:
    """One measurement in all launches so far."""

    def __init__(self, first: Pair, effect: float, budget: StoppingRule) -> None:
        self._latest, self._blocks, self._count = first, first.blocks, 1
        self._launches = Launches(first.decision, effect) if first.decision else None
        self._decides_disturbed, self._bars = budget.decides_disturbed, dict.fromkeys(_disturbances(first))

    @property
    def open(self) -> bool:
        """Whether another launch is needed."""
        barred = bool(self._bars) and not self._decides_disturbed
        return self._launches is not None and self._launches.open and not barred

    def add(self, pair: Pair, alpha: float) -> None:
        """Add another launch."""
        self._latest = pair
        if pair.decision is None or self._launches is None:  # a side has failed
            self._launches = None
            return
        self._blocks, self._count = self._blocks + pair.blocks, self._count + 1
        self._bars |= dict.fromkeys(_disturbances(pair))
        self._launches.add(pair.decision, alpha)

    def pair(self) -> Pair:
        """Return the pair with the decision of all launches."""
        if self._launches is None:
            return self._latest
        decision = self._launches.decision()
        if not self._decides_disturbed:
            decision = decision.barred([*self._bars])
        return replace(self._latest, decision=decision, blocks=self._blocks, launches=self._count)


def _disturbances(pair: Pair) -> list[str]:
    """Return the disturbances that were so strong that the launch decides nothing."""
    records = [each.record or {} for each in (pair.a, pair.b)]
    vetoes = {side: veto_of(each.get("machine", {})) for side, each in zip(SIDES, records, strict=True)}
    return [f"side {side} was disturbed: {why}" for side, why in vetoes.items() if why]


class PairScheduler(TurnScheduler):
    """One launch of both sides of a batch, which take turns in every measurement."""

    def __init__(
        self,
        batch: Sequence[Wanted],
        tests: Mapping[str, Criterion],
        budget: StoppingRule,
        random: random.Random,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__([each.key for each in batch])
        self._tests, self._budget, self._random, self._tell = tests, budget, random, tell
        self._decided: dict[str, tuple[dict[str, list[float]], Decision, int]] = {}
        self._gave_up: set[tuple[str, str]] = set()

    def take(self, key: str, workers: Mapping[str, TurnWorker]) -> Mapping[str, str]:
        """Take blocks, unless a side has failed before its first turn."""
        if len(workers) < len(SIDES) or key not in self._tests:
            failed = next((side for side in SIDES if side not in workers), "B")
        else:
            self._tell(f"{key}: both sides are proved and take turns")
            failed = self._take_blocks(key, workers)
        if not failed:
            return {}
        self._gave_up |= {(key, side) for side in workers if side != failed}
        return dict.fromkeys(workers, f"side {failed} has failed in this measurement")

    def _take_blocks(self, key: str, workers: Mapping[str, TurnWorker]) -> str:
        """Take blocks until the test has decided or the budget is spent.

        Returns
        -------
        str
            The side whose worker ended; empty if none did.
        """
        test, samples, differences = self._tests[key], {side: list[float]() for side in SIDES}, list[float]()
        end, count = time.monotonic() + self._budget.seconds, SLOT
        for number in range(1 + self._budget.blocks):
            block: dict[str, list[float]] = {side: [] for side in SIDES}
            for side in self._random.choice(ORDERS) if number else SIDES:
                taken = workers[side].take(count)
                if taken is None:
                    return side
                workers[side].rest()
                block[side] += taken
                samples[side] += taken
            if not number:  # not part of any block: both workers have just been woken
                count = samples_of_slot(max(worker.sample_s for worker in workers.values()))
                continue
            differences.append(block_difference(block["A"], block["B"]))
            decision = decide_pairs(differences, effect=test.effect, alpha=test.alpha)
            if decision.outcome != "uncertain" or time.monotonic() > end:
                break
        self._decided[key] = samples, decision, len(differences)
        return ""

    def pair(self, wanted: Wanted, results: Mapping[str, Mapping[str, MeasurementResult]]) -> Pair:
        """Return a measurement's pair with the decision, given the results of both sides by key."""
        key = wanted.key
        a, b = (self._result(key, side, results[side].get(key)) for side in SIDES)
        if key not in self._decided or a.record is None or b.record is None:
            return Pair(wanted, a, b)
        samples, decision, blocks = self._decided[key]
        try:
            require_same(samples["A"], a.samples_s)
            require_same(samples["B"], b.samples_s)
        except D5Error as error:
            return Pair(wanted, MeasurementResult(failure=str(error)), MeasurementResult(failure=str(error)))
        return Pair(wanted, a, b, decision, blocks)

    def _result(self, key: str, side: str, result: MeasurementResult | None) -> MeasurementResult:
        if (key, side) in self._gave_up:
            return MeasurementResult()
        return result or MeasurementResult(failure=self.errors.get(side, "it was not measured"))


def samples_of_slot(sample_s: float) -> int:
    """Return the number of samples in a slot, given the seconds of a sample."""
    if sample_s >= LONG_S:
        return 1
    return min(LONGEST_SLOT, max(SLOT, math.ceil(SLOT_S / sample_s)))
