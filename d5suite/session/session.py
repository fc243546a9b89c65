"""All jobs of one run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.backends import Selection
from d5suite.cases.case import TIME_LIMIT_S, Case, Settings, Shared
from d5suite.errors import ConfigurationError, describe_error
from d5suite.files import locked
from d5suite.instruments.quiet import await_quiet
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import CaseJob, Job, Ranks, Result, key_of
from d5suite.launch.base import Outcome
from d5suite.launch.turns import TurnWorker
from d5suite.measurements import file_of
from d5suite.measurements.base import Measurement
from d5suite.session.attempts import Attempt, attempts, read_outcome, settle, work
from d5suite.session.elsewhere import attempts_in
from d5suite.session.nodes import add_nodes
from d5suite.session.record import record

KEEP_RUNS = 20
"""Folders of job files kept; older ones go when a new one is made."""

RUN_FOLDER = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")
"""Their names: date, time, process, and a number if it has several in a second. Nothing else in
``--jobs DIR`` is ours to remove."""

LOCK = "session.lock"
"""A file in each that a session holds a lock on while it runs."""


class Wanted(NamedTuple):
    """One measurement of one case; at level 3, by ranks."""

    case: Case
    measurement: type[Measurement]
    ranks: Ranks | None = None

    @property
    def key(self) -> str:
        """Its name within a job."""
        return key_of(self.case.name, self.measurement.name)

    def job_on(self, selection: Selection) -> tuple[str, str]:
        """Return the job that makes it: a batch of cases, and what runs them."""
        return self.case.batch, runner(selection, self.ranks)


def runner(selection: Selection, ranks: Ranks | None) -> str:
    """Name of a job's runner in results: a backend, and at level 3 its ranks."""
    return "-".join(str(each) for each in (selection, ranks) if each is not None)


@dataclass
class Found:
    """One measurement of one backend: a record, or why there is none.

    Attributes
    ----------
    record : dict or None
    samples_s : list of float
        Seconds.
    series : dict of str to list of float
    failure : str or None
    kept : dict or None
        Partial results that survive the failure, such as the curves of runs that missed their
        target.
    wrong : bool
        Whether it failed because an answer was wrong.
    """

    record: dict[str, Any] | None = None
    samples_s: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None
    kept: dict[str, Any] | None = None
    wrong: bool = False


class Plan(NamedTuple):
    """The job of a batch on a backend: what is wanted, by key, and how a part of it is made."""

    selection: Selection
    wanted: dict[str, Wanted]
    slug: str
    limit_s: float
    make: Callable[[list[str]], Job]


@dataclass
class Session:
    """All jobs of one pytest run.

    Attributes
    ----------
    settings : Settings
    progress : callable
        Receives the name of a job and what its worker does, at each new phase; None in a pipe.
    folder : Path
        The folder of its job files, locked until `close`; that of jobs which run elsewhere is not.

    Raises
    ------
    ConfigurationError
        If the folder cannot be made.
    """

    settings: Settings
    progress: Callable[[str, str], None] | None = None
    _found: dict[tuple[str, str], dict[str, Found]] = field(default_factory=dict)
    _trajectories: dict[tuple[str, str, str], Path] = field(default_factory=dict)
    _shared_files: set[Path] = field(default_factory=set)
    _cases: dict[str, list[Case]] = field(default_factory=dict)
    _referenced: dict[str, Found] = field(default_factory=dict)
    _waited_s: float = 0.0
    _loud: str = ""
    folder: Path = field(init=False)
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        if self.settings.elsewhere is not None:
            self.folder = self.settings.elsewhere
            return
        parent = self.settings.jobs
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.folder = parent / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with locked(parent / f".{LOCK}"):  # a folder is seen once it is locked
                number = 1
                while self.folder.exists():
                    number += 1
                    self.folder = parent / f"{name}-{number}"
                self.folder.mkdir()
                self._held.enter_context(locked(self.folder / LOCK))
                _prune(parent)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make the folder for job files: {error.strerror}",
                where=str(self.folder),
                hint="Choose --jobs DIR.",
            ) from error

    def found(self, wanted: Wanted, selection: Selection, batch: Sequence[Wanted]) -> Found:
        """Return one measurement's record; the first call for a batch and a backend runs their job.

        Parameters
        ----------
        wanted : Wanted
        selection : Selection
        batch : sequence of Wanted
            All that the run wants of the same batch on the same backend.
        """
        key = wanted.job_on(selection)
        if key not in self._found:
            found = self._found[key] = {}
            try:
                self._run(selection, batch, found)
            except Exception as error:  # whatever it is, it costs this job and no other
                for each in batch:
                    found.setdefault(each.key, Found(failure=describe_error(error)))
        clash = self._clash(wanted.case)
        if clash is not None:
            return Found(failure=clash)
        lost = Found(failure=f"{wanted.key}: the job of {selection} ended before it came to this measurement")
        return self._found[key].get(wanted.key, lost)

    def wait_until_quiet(self) -> None:
        """Wait for a quiet machine, as long as the settings say in all; else mark what follows."""
        limit_s = self.settings.wait_quiet_s
        if limit_s is None or self.settings.elsewhere is not None:
            return
        tell, start = self.progress, time.monotonic()
        loud = await_quiet(limit_s - self._waited_s, None if tell is None else lambda what: tell("--wait-quiet", what))
        self._waited_s += time.monotonic() - start
        self._loud = f"the machine was not quiet after {limit_s:g} s of --wait-quiet: {loud}" if loud else ""

    def sampling(self, wanted: Wanted, selection: Selection) -> SamplingSettings:
        """Return the sampling settings of a measurement."""
        return SamplingSettings.from_dict(self._part(wanted.case, selection, [wanted]).sampling)

    def keep(self, wanted: Wanted, selection: Selection, found: Found) -> None:
        """Store a measurement's result."""
        self._found.setdefault(wanted.job_on(selection), {})[wanted.key] = found

    def has_run(self, wanted: Wanted, selection: Selection) -> bool:
        """Return whether the job of a measurement has run."""
        return wanted.job_on(selection) in self._found

    def known(self, wanted: Wanted, selection: Selection) -> Found | None:
        """Return the result of a measurement so far; runs nothing."""
        return self._found.get(wanted.job_on(selection), {}).get(wanted.key)

    def write(self, selection: Selection, batch: Sequence[Wanted]) -> Path:
        """Write the job file of a batch on a backend, to be run elsewhere.

        Raises
        ------
        ConfigurationError
            A case makes no sense, or has the name of another.
        """
        for each in batch:
            clash = self._clash(each.case)
            if clash is not None:
                raise ConfigurationError(clash)
        path = self.folder / f"{_slug(batch[0], selection)}.job.json"
        self._job(batch, selection).save(path)
        return path

    def close(self) -> None:
        """Delete the large files that only this session needed; job files stay, unlocked."""
        self._held.close()
        if self.settings.elsewhere is not None:  # other processes may need them still
            return
        for path in (*self._trajectories.values(), *self._shared_files):
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)

    def _clash(self, case: Case) -> str | None:
        """Return the error if another case has the same name, or None."""
        known = self._cases.setdefault(case.name, [])
        if not any(each.is_same(case) for each in known):
            known.append(case)
        if len(known) == 1:
            return None
        files = " and ".join(sorted({each.origin for each in known}))
        return f"{case.name}: two cases have this name, in {files}\n  Rename one of them."

    def _run(self, selection: Selection, batch: Sequence[Wanted], found: dict[str, Found]) -> None:
        """Run the job of a batch on a backend, after the job of the references it needs."""
        plan = self._plan(selection, batch, found)
        if plan is None:
            return

        def run(job: Job, number: int) -> tuple[Outcome, Result, Path]:
            return self._work(job, plan.slug, number, plan.limit_s)

        done = attempts(plan.make, list(plan.wanted), run)
        if self.settings.from_jobs is not None:
            done = attempts_in(self.folder / f"{plan.slug}.job.json", plan.make(list(plan.wanted)))
        for attempt in done:
            self._take(attempt, plan, found)

    def in_turns(
        self,
        selection: Selection,
        batch: Sequence[Wanted],
        start: Callable[[Job, Path, float], TurnWorker],
        launch: int = 1,
        into: dict[str, Found] | None = None,
    ) -> Generator[tuple[str, TurnWorker], None, None]:
        """Run the job of a batch by workers that wait for their turns.

        A worker that exceeds a limit below the session's, set to leave room for others, leaves its
        current measurement unsettled.

        Parameters
        ----------
        selection : Selection
        batch : sequence of Wanted
        start : callable
            Starts a worker, given the job, its file and the seconds for which it may run.
        launch : int
            From 1: a later one of the same job.
        into : dict of str to Found, optional
            Receives the results, by key; by default `known` has them, and those of a later launch
            replace those before.

        Yields
        ------
        str, TurnWorker
            A measurement's key, and the worker that waits for its first turn. It is resumed when
            the worker was told that its turns have ended.
        """
        found = self._found.setdefault(batch[0].job_on(selection), {}) if into is None else into
        plan = self._plan(selection, batch, found)
        remaining = [] if plan is None else list(plan.wanted)
        number = 0
        while plan is not None and remaining:
            number += 1
            slug = plan.slug if launch == 1 else f"{plan.slug}-launch{launch}"
            job, path = plan.make(remaining), self._path(slug, number)
            job.save(path)
            worker, interrupt = start(job, path, plan.limit_s), None
            try:
                while (key := worker.ready()) is not None:
                    self._keep_trajectories(job, selection)  # proved: it proves those that start beside it
                    yield key, worker
            except BaseException as error:  # an interrupt must not lose what the worker has finished
                interrupt = error
            outcome, result = read_outcome(worker.end(interrupt), path)
            crowded = outcome.exceeded_bytes is not None and outcome.exceeded_bytes < self.settings.memory_bytes
            settled, remaining = settle(job, outcome, result or Result(), path, [] if crowded else remaining)
            for attempt in settled:
                self._take(attempt, plan, found)
            if interrupt is not None:
                raise interrupt

    def _plan(self, selection: Selection, batch: Sequence[Wanted], found: dict[str, Found]) -> Plan | None:
        """Plan the job of a batch, once the references that it needs exist."""
        valid: dict[str, Wanted] = {}
        senseless: dict[str, str] = {}
        for each in batch:
            self._clash(each.case)  # all names are known before any is judged
        for each in batch:
            name = each.case.name
            if name in senseless:
                found[each.key] = Found(failure=senseless[name])
            elif (clash := self._clash(each.case)) is not None:
                found[each.key] = Found(failure=clash)
            else:
                try:
                    self._part(each.case, selection, [each])
                    valid[each.key] = each
                except Exception as error:
                    senseless[name] = describe_error(error)
                    found[each.key] = Found(failure=senseless[name])
        shared = [each for each in valid.values() if each.case.shares_references]
        for key, failed in self._compute_references(shared).items():
            found[key] = failed
            del valid[key]
        if not valid:
            return None
        slug = _slug(next(iter(valid.values())), selection)
        limit_s = max(
            each.case.time_limit_s(selection, self.settings, each.measurement.trains) for each in valid.values()
        )

        def make(remaining: list[str]) -> Job:
            return self._job([valid[key] for key in remaining], selection)

        return Plan(selection, valid, slug, limit_s, make)

    def _take(self, attempt: Attempt, plan: Plan, found: dict[str, Found]) -> None:
        self._keep_trajectories(attempt.job, plan.selection)
        try:
            found[attempt.key] = self._finding(attempt, plan.wanted[attempt.key])
        except Exception as error:
            found[attempt.key] = Found(failure=describe_error(error))

    def _finding(self, attempt: Attempt, wanted: Wanted) -> Found:
        measured = attempt.measured
        if measured is None:
            return Found(failure=attempt.failure, kept=attempt.kept, wrong=attempt.wrong)
        part = next(each for each in attempt.job.cases if each.name == wanted.case.name)
        samples = measured.samples
        found = record(wanted.case, part, wanted.measurement, attempt.job, attempt.result, measured)
        if self._loud:
            found["warnings"] = [*found.get("warnings", []), self._loud]
        if attempt.job_file is not None:
            found["job"] = os.path.relpath(attempt.job_file)
        if attempt.path is not None:
            add_nodes(found, attempt.key, attempt.job, attempt.result, attempt.path)
        return Found(
            found,
            samples["samples_s"],
            {"samples_s": samples["samples_s"], "warmup_s": samples["warmup_s"], **measured.series},
        )

    def _compute_references(self, wanted: Sequence[Wanted]) -> dict[str, Found]:
        """Compute missing references in a job of their own; return the failures."""
        missing = {each.key: each for each in wanted if each.key not in self._referenced}
        if missing:
            slug = f"{next(iter(missing.values())).case.batch}-reference-{len(self._referenced)}"

            def make(remaining: list[str]) -> Job:
                job = self._job([missing[key] for key in remaining], None)
                return replace(job, passes=["reference"], device="cpu")

            for attempt in attempts(
                make, list(missing), lambda job, number: self._work(job, slug, number, TIME_LIMIT_S)
            ):
                self._referenced[attempt.key] = Found(failure=attempt.failure)
        failed = {each.key: self._referenced[each.key] for each in wanted if each.key in self._referenced}
        return {key: found for key, found in failed.items() if found.failure is not None}

    def _job(self, wanted: Sequence[Wanted], selection: Selection | None) -> Job:
        settings = self.settings
        by_case: dict[str, list[Wanted]] = {}
        for each in wanted:
            by_case.setdefault(each.case.name, []).append(each)
        backend = {"name": "none", "mode": "none"}
        ranks = wanted[0].ranks if selection is not None else None
        if selection is not None:
            backend = {"name": selection.backend.name, "mode": selection.mode}
        threads, workers = settings.threads, settings.loader_workers
        if ranks is not None:  # as many threads per rank by every number of them: efficiencies compare like with like
            threads = ranks.size * max(1, threads // max(each.size for each in settings.ranks))
            workers = min(workers, threads)
        return Job(
            backend=backend,
            device=settings.device,
            precision=settings.precision,
            threads=threads,
            seed=settings.seed,
            loader_workers=workers,
            ranks=ranks.size if ranks is not None else 1,
            distributed=ranks.distributed if ranks is not None else None,
            cases=[self._part(each[0].case, selection, each) for each in by_case.values()],
        )

    def _part(self, case: Case, selection: Selection | None, wanted: Sequence[Wanted]) -> CaseJob:
        files = {each.measurement.name: file_of(each.measurement) for each in wanted}
        part = case.job(
            selection,
            self.settings,
            [each.measurement.name for each in wanted],
            {name: file for name, file in files.items() if file is not None},
            self._shared(case, selection),
        )
        ranks = wanted[0].ranks
        if self.settings.elsewhere is not None:  # jobs may run concurrently
            part = part.alone()
        return part if ranks is None or not self.settings.divides_batch else part.divided(ranks.size)

    def _shared(self, case: Case, selection: Selection | None) -> Shared:
        preset = case.preset_name(selection, self.settings)
        reference = self.folder / f"{case.batch}-{preset}.reference.h5"
        self._shared_files.add(reference)
        peers = [
            path
            for (name, its_preset, backend), path in self._trajectories.items()
            if (name, its_preset) == (case.name, preset) and backend != str(selection) and path.exists()
        ]
        trajectory = self.folder / f"{case.name}-{str(selection).replace(':', '-')}.trajectory.h5"
        return Shared(str(reference), str(trajectory), [str(path) for path in peers])

    def _keep_trajectories(self, job: Job, selection: Selection) -> None:
        for part in job.cases:
            trajectory = getattr(part, "trajectory", None)
            if trajectory and Path(trajectory).exists():
                self._trajectories[part.name, part.preset, str(selection)] = Path(trajectory)

    def _work(self, job: Job, slug: str, number: int, limit_s: float) -> tuple[Outcome, Result, Path]:
        path, report = self._path(slug, number), self.progress
        name = path.name.removesuffix(".job.json")
        progress = None if report is None else lambda phase: report(name, phase)
        outcome, result = work(job, path, self.settings, limit_s, progress)
        return outcome, result, path

    def _path(self, slug: str, number: int) -> Path:
        return self.folder / (slug + (f"-{number}" if number > 1 else "") + ".job.json")


def _slug(wanted: Wanted, selection: Selection) -> str:
    """Return the name of the files of a measurement's job."""
    return "-".join(wanted.job_on(selection)).replace(":", "-")


def _prune(parent: Path) -> None:
    """Remove the oldest folders of job files, except those of sessions that run."""
    ours = sorted(path for path in parent.iterdir() if RUN_FOLDER.fullmatch(path.name))
    for old in ours[:-KEEP_RUNS]:
        with contextlib.suppress(OSError), locked(old / LOCK, wait=False):
            shutil.rmtree(old, ignore_errors=True)
