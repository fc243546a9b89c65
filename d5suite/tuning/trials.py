"""Trials: a candidate's worker takes turns with the worker of a base, which waits between trials.

So whatever slows the machine slows both. A trial ends early once the sequential test of
`d5suite.statistics.sequential` shows that the candidate is slower than the best one so far. Every
candidate is proved before its first turn, and one that may be taken is proved again after its last
one. A candidate that crashes, hangs or takes too much memory costs its own trial. `whole_runs` has
the trials of what cannot take turns.

Imports `d5suite.session`, `d5suite.launch` and `d5suite.statistics`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from d5suite.backends import select
from d5suite.distributed.communicators import COMMUNICATORS
from d5suite.distributed.schemes import SCHEMES
from d5suite.errors import ConfigurationError, describe_error
from d5suite.job import Distributed, Job
from d5suite.launch.run import start_job
from d5suite.launch.supervisor import Supervisor
from d5suite.launch.turns import TurnWorker
from d5suite.levels.knobs import LOADERS, OF_RANKS
from d5suite.session.pairs import ORDERS, SIDES, samples_of_slot
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.session import Session
from d5suite.statistics.contests import veto_of
from d5suite.statistics.sequential import block_difference, median_bounds
from d5suite.tuning.space import Change

ALPHA = 0.05
"""Error rate of the sequential test that ends a trial."""

MOST_BLOCKS, ENOUGH = 12, 0.01
"""Most blocks of a trial; and the width of the interval, in logarithms, at which it ends."""

FEWEST_BLOCKS, BLOCKS_S = 3, 20.0
"""Fewest blocks of a trial, and seconds after which no more begin: of long steps few are enough."""

HOPELESS, HOPELESS_BLOCKS = math.log(1.25), 2
"""A candidate ends after so few blocks if each shows that it takes so much longer than the best."""

PATIENCE, LEAST_LIMIT_S = 4.0, 60.0
"""Time limit of a candidate: how many times as long as the base took to be ready, and at least so
many seconds."""

LOST = "the default's worker ended during the trial"
"""Why a trial is made again, once."""

TIMED = ("time", "time_to_accuracy")
"""Goals that are seconds: of an item, and of a training run to its target."""

FIGURE_OF = {"p99": "p99_s", "memory": "memory_bytes", "energy": "energy_j", "energy_delay": "energy_j"}
"""By goal that is not time alone: the figure that it needs."""

GOALS = (*TIMED, *FIGURE_OF)
"""What may be made small: seconds; those that 99% of the steps stay below, per item; peak bytes;
joules of an item; and joules times seconds."""


@dataclass
class Trial:
    """One trial of a candidate.

    Attributes
    ----------
    status : {"measured", "pruned", "wrong", "failed"}
    value : float
        Logarithm of the goal's ratio, the candidate's over the base's; NaN if unknown.
    time : float
        The same of the time per item, whatever the goal; NaN without a block.
    interval : tuple of float
        Interval of `time` that holds however often one looks.
    blocks : int
    seconds : float
        What the trial took, with starting and proving.
    prepared_s : float
        Seconds until the worker was ready.
    reason : str
        Why it failed.
    disturbed : str
        What disturbed the machine so much that the trial decides nothing.
    figures : dict of str to float
        ``time_s``, ``p99_s``, ``memory_bytes`` and ``energy_j`` of the candidate, as far as known;
        all but memory are for as many items as a step of the base has.
    """

    status: str
    value: float = math.nan
    time: float = math.nan
    interval: tuple[float, float] = (-math.inf, math.inf)
    blocks: int = 0
    seconds: float = 0.0
    prepared_s: float = 0.0
    reason: str = ""
    disturbed: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON values; unknown or infinite values are None."""
        found = asdict(self)
        found["interval"] = [each if math.isfinite(each) else None for each in self.interval]
        return {
            key: None if isinstance(each, float) and not math.isfinite(each) else each for key, each in found.items()
        }


def takes_turns(wanted: Wanted) -> bool:
    """Return whether samples of a measurement can be taken in turn with another worker's."""
    return wanted.measurement.takes_turns and wanted.ranks is None


def item_s(wanted: Wanted, record: Mapping[str, Any]) -> float:
    """Return a record's seconds per item; of training to a target, those of a run."""
    return float(record["median_s"] if wanted.measurement.trains else 1 / record["throughput"]["value"])


class TrialJob:
    """One launch of a candidate.

    Its worker waits for its turns, if the measurement can take any.

    Parameters
    ----------
    session : Session
    wanted : Wanted
    change : Change
    launch : int
        Number of the launch, which names its files.
    in_turns : bool, optional
        By default as `takes_turns` says.
    """

    def __init__(
        self, session: Session, wanted: Wanted, change: Change, launch: int, *, in_turns: bool | None = None
    ) -> None:
        settings, changed = session.settings, dict(change.settings)
        of_ranks = {name: changed.pop(name) for name in OF_RANKS if name in changed}
        workers, threads = changed.pop(LOADERS, settings.loader_workers), changed.get("threads", settings.threads)
        own = session.varied(
            **changed, loader_workers=min(workers, threads),
            environment={**settings.environment, **change.environment},
        )  # fmt: skip
        if change.mode is not None:
            wanted = wanted._replace(selection=select(f"{wanted.selection.backend.name}:{change.mode}"))
        self._session, self._key, self._error = own, wanted.key, ""
        self._in_turns = takes_turns(wanted) if in_turns is None else in_turns
        self._results: dict[str, MeasurementResult] = {}
        self._turns = own.run([with_ranks(wanted, of_ranks)], self._results, self._start, launch)

    def _start(self, job: Job, path: Path, limit_s: float) -> Supervisor:
        launch = self._session.launch(job, path, limit_s)
        return TurnWorker(job, path, launch) if self._in_turns else start_job(job, path, launch)

    def ready(self) -> TurnWorker | None:
        """Run until the worker waits for its turns; return None if it has failed or ended."""
        try:
            found = next(self._turns, None)
        except Exception as error:  # of any kind: it costs this trial only
            self._error = describe_error(error)
            return None
        return None if found is None else found[1]

    def end(self) -> MeasurementResult:
        """Run until the worker has ended; return its result."""
        self.ready()
        self._turns.close()
        return self._results.get(self._key) or MeasurementResult(failure=self._error or "it was not measured")

    def close(self) -> None:
        """End the worker at once."""
        self._turns.close()


def with_ranks(wanted: Wanted, changed: Mapping[str, str]) -> Wanted:
    """Return a measurement whose ranks have another scheme, algorithm or communicator.

    Parameters
    ----------
    wanted : Wanted
    changed : mapping of str to str
        By name of `OF_RANKS`, as the option of this name has it.
    """
    if not changed or wanted.ranks is None:
        return wanted
    how: Distributed = wanted.ranks.distributed
    own: dict[str, Any] = {name: value for name, value in changed.items() if name != "scheme"}
    how = replace(how, **own)
    how = replace(how, launcher=COMMUNICATORS[how.communicator].launcher)
    if "scheme" in changed:
        name, *pairs = changed["scheme"].split(":")
        settings = {key: _value(text) for key, _, text in (pair.partition("=") for pair in pairs)}
        native = name not in SCHEMES
        algorithm = "native" if native else how.algorithm
        how = replace(how, scheme=name, settings=settings, native=native, algorithm=algorithm)
    return wanted._replace(ranks=wanted.ranks._replace(distributed=how))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a word
        return text


class Trials:
    """Trials against one base. Use it as a context manager: its base's worker waits meanwhile.

    Parameters
    ----------
    session : Session
    wanted : Wanted
        The measurement. Its backend is that of the base and of all candidates.
    base : Change
        What the base sets.
    launches : iterator of int
        Numbers of launches that were not used yet.
    goal : str
        One of `GOALS`.
    seed : int
        For the random order of the sides.
    tell : callable, optional
        Receives what is being done.

    Attributes
    ----------
    prepared_s : float
        Seconds until the base's worker was ready.
    ended_s : float
        Seconds that the last candidate's worker took to end, with its last proof.
    base_figures : dict of str to float
        As `Trial.figures`, of the first trial of the base against itself.
    record : mapping
        The record of that trial.
    notes : list of str
    """

    def __init__(
        self, session: Session, wanted: Wanted, base: Change, launches: Any, *, goal: str = "time", seed: int = 0,
        tell: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._session, self._wanted, self._base, self._launches = session, wanted, base, launches
        self._goal, self._random = goal, random.Random(seed)
        self._tell = tell or (lambda what: None)
        self._job: TrialJob | None = None
        self._worker: TurnWorker | None = None
        self.prepared_s = self.ended_s = 0.0
        self.base_figures: dict[str, float] = {}
        self.record: Mapping[str, Any] = {}
        self.notes: list[str] = []
        self._first_s = 0.0

    def __enter__(self) -> Trials:
        """Start nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the base's worker."""
        self._end_base()

    def _end_base(self) -> None:
        if self._job is not None:
            self._job.close()
        self._worker = None

    def _base_worker(self) -> TurnWorker:
        """Return the base's worker; start it if there is none."""
        if self._worker is None:
            start = time.monotonic()
            self._job = TrialJob(self._session, self._wanted, self._base, next(self._launches))
            self._worker = self._job.ready()
            self.prepared_s = time.monotonic() - start
            if self._worker is None:
                raise self._base_fails(self._job.end())
        return self._worker

    def _base_fails(self, result: MeasurementResult) -> ConfigurationError:
        where = f"{self._wanted.key} {self._wanted.selection}"
        return ConfigurationError(f"the default itself fails: {result.failure}", where=where)

    def measure(self, change: Change, bar: float = math.inf) -> Trial:
        """Measure a candidate.

        Parameters
        ----------
        change : Change
        bar : float
            The best value so far: the trial ends early once it is surely missed.

        Raises
        ------
        ConfigurationError
            If the base itself cannot be measured.
        """
        if self._goal not in TIMED and not self.base_figures and change != self._base:
            self.measure(self._base)
        trial = self._measured(change, bar)
        return trial if trial.reason != LOST else self._measured(change, bar)

    def _limited(self) -> Session:
        """Return the session with a time limit for candidates."""
        limit = max(LEAST_LIMIT_S, PATIENCE * self.prepared_s)
        timeout = self._session.settings.timeout_s
        return self._session.varied(timeout_s=limit if timeout is None else min(limit, timeout))

    def _measured(self, change: Change, bar: float) -> Trial:
        if self._worker is not None and self._worker.is_late:
            self._end_base()
        base, start = self._base_worker(), time.monotonic()
        job = TrialJob(self._limited(), self._wanted, change, next(self._launches))
        try:
            worker = job.ready()
            prepared_s = time.monotonic() - start
            trial = Trial("failed")
            if worker is not None:
                trial = self._turns(base, worker, change.items - self._base.items, bar)
            if trial.status == "pruned" and worker is not None:
                worker.leave("it is slower than the best one")
                job.end()
            else:
                ending = time.monotonic()
                if worker is not None:
                    worker.finish()
                trial = self._judged(trial, job.end(), change.items - self._base.items)
                self.ended_s = time.monotonic() - ending
        finally:
            job.close()
        return replace(trial, seconds=time.monotonic() - start, prepared_s=prepared_s)

    def _turns(self, base: TurnWorker, worker: TurnWorker, items: float, bar: float) -> Trial:
        """Take blocks until the trial is decided; `items` as `Change.items`, over the base's."""
        sides = dict(zip(SIDES, (base, worker), strict=True))
        samples: dict[str, list[float]] = {side: [] for side in SIDES}
        differences: list[float] = []
        count, status, start = 1, "measured", time.monotonic()
        for number in range(1 + MOST_BLOCKS):
            if len(differences) >= FEWEST_BLOCKS and time.monotonic() - start > BLOCKS_S:
                break
            block = take_block(sides, self._random.choice(ORDERS) if number else SIDES, count)
            if isinstance(block, str):
                if block == "A":  # the base has ended; the next trial starts it again
                    self._end_base()
                    return Trial("failed", reason=LOST)
                return Trial("failed")
            if not number:  # not part of any block: both workers have just been woken
                count = samples_of_slot(max(each.sample_s for each in sides.values()))
                self._watch(base.sample_s)
                continue
            for side in SIDES:
                samples[side] += block[side]
            differences.append(block_difference(block["A"], block["B"]) - items)
            low, high = median_bounds(differences, ALPHA)
            if self._goal == "time":
                hopeless = len(differences) >= HOPELESS_BLOCKS and min(differences) > bar + HOPELESS
                if hopeless or (low > bar):
                    status = "pruned"
                    break
                if high - low < ENOUGH:
                    break
        value, scale = statistics.median(differences), math.exp(items)
        p99 = {side: float(np.quantile(samples[side], 0.99)) for side in SIDES}
        figures = {
            "time_s": statistics.median(samples["B"]) / scale, "p99_s": p99["B"] / scale, "base_p99_s": p99["A"],
        }  # fmt: skip
        return Trial(status, value, value, median_bounds(differences, ALPHA), len(differences), figures=figures)

    def _watch(self, sample_s: float) -> None:
        """Note whether the default itself has become slower or faster since its first trial."""
        self._first_s = self._first_s or sample_s
        if self._first_s and not 0.75 < sample_s / self._first_s < 1.33:
            self.notes.append(f"the default takes {sample_s / self._first_s:.2f} times as long as at first")
            self._first_s = sample_s

    def _judged(self, trial: Trial, result: MeasurementResult, items: float) -> Trial:
        """Add what the worker's own result says."""
        if result.record is None:
            reason = (result.failure or trial.reason or "it left no result").partition("\n")[0]
            return replace(trial, status="wrong" if result.wrong else "failed", reason=trial.reason or reason)
        if trial.status == "failed":
            return trial
        record = result.record
        joules = (record.get("energy") or {}).get("joules_per_item")
        known = {
            "memory_bytes": record.get("peak_memory_bytes"),
            "energy_j": joules and joules * self._items_of_base(record, items),
        }
        figures = {**trial.figures, **{name: float(each) for name, each in known.items() if each}}
        if not self.base_figures and trial.status == "measured":
            self.base_figures, self.record = figures, record
        trial = replace(trial, figures=figures, disturbed=veto_of(record.get("machine", {})))
        return replace(trial, value=self.goal_value(trial))

    def _items_of_base(self, record: Mapping[str, Any], items: float) -> float:
        """Return the items of a step of the base, from a candidate's record."""
        return float(record["throughput"]["value"] * record["median_s"]) / math.exp(items)

    def goal_value(self, trial: Trial) -> float:
        """Return the logarithm of the goal's ratio.

        Raises
        ------
        ConfigurationError
            If this machine or measurement has no such figure; says why.
        """
        if self._goal in TIMED:
            return trial.time
        name = FIGURE_OF[self._goal]
        base = trial.figures.get(f"base_{name}", self.base_figures.get(name, math.nan))
        ratio = trial.figures.get(name, math.nan) / base
        if not ratio > 0:
            raise ConfigurationError(
                f"there is no {self._goal} of this measurement here: {why_missing(self._goal, self.record)}",
                where=f"--goal {self._goal}", hint=f"Choose another goal: {', '.join(GOALS)}.",
            )  # fmt: skip
        return math.log(ratio) + (trial.time if self._goal == "energy_delay" else 0.0)


def why_missing(goal: str, record: Mapping[str, Any]) -> str:
    """Return why a record has no figure of a goal."""
    part = record.get("energy" if goal.startswith("energy") else goal) or {}
    return str(part.get("missing") or "it was not recorded")


def take_block(sides: Mapping[str, TurnWorker], order: Sequence[str], count: int) -> dict[str, list[float]] | str:
    """Take a slot of samples in each turn; return them by side, or the side whose worker ended."""
    block: dict[str, list[float]] = {side: [] for side in sides}
    for side in order:
        taken = sides[side].take(count)
        if taken is None:
            return side
        sides[side].rest()
        block[side] += taken
    return block
