"""All jobs of one run."""

from __future__ import annotations

import contextlib
import copy
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
from d5suite.job import CaseJob, Job
from d5suite.launch.base import Launch, Limits, interpreter
from d5suite.launch.run import start_job
from d5suite.launch.signals import uninterrupted
from d5suite.launch.supervisor import Supervisor
from d5suite.measurements import file_of
from d5suite.session.attempts import Attempt, settle, watcher
from d5suite.session.elsewhere import attempts_in
from d5suite.session.nodes import add_nodes
from d5suite.session.record import place_files, record
from d5suite.session.results import MeasurementResult, Wanted

KEEP_RUNS = 20
"""Number of folders of job files to keep; making a new folder removes older folders."""

RUN_FOLDER = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")
"""Names of these folders: date, time, process, and a number if a process makes several folders in a
second. Nothing else in ``--jobs DIR`` is removed."""

LOCK = "session.lock"
"""Name of a file in every such folder, which a running session locks."""


class JobPlan(NamedTuple):
    """The job of a batch: the measurements by key, and a function that makes a job from keys."""

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
        Receives the name of a job and the new phase of its worker; None in a pipe.
    provisional : callable
        Receives a measurement's key, a backend, the median so far in seconds and the number of
        rounds so far, once the backend is proved: 0 rounds before the first turn.
    folder : Path
        The folder of the job files. It is locked until `close`, unless the jobs run elsewhere.

    Raises
    ------
    ConfigurationError
        If the folder cannot be made.
    """

    settings: Settings
    progress: Callable[[str, str], None] | None = None
    provisional: Callable[[str, str, float, int], None] | None = None
    _results: dict[tuple[str, str], dict[str, MeasurementResult]] = field(default_factory=dict)
    _trajectories: dict[Path, tuple[str, str, int | None]] = field(default_factory=dict)
    _shared_files: set[Path] = field(default_factory=set)
    _cases: dict[str, list[Case]] = field(default_factory=dict)
    _references: dict[str, MeasurementResult] = field(default_factory=dict)
    _waited_s: float = 0.0
    _noise: str = ""
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
            with locked(parent / f".{LOCK}"):  # so that no process sees the folder before it is locked
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

    def measure(self, batch: Sequence[Wanted]) -> None:
        """Run the job of a batch; `result` then returns the results.

        Parameters
        ----------
        batch : sequence of Wanted
            All measurements of one job.
        """
        results = self._results[batch[0].job] = {}
        try:
            if self.settings.from_jobs is not None:
                self._read_results(batch, results)
            else:
                for _ in self.run(batch, results, self._start):
                    pass  # no turns
        except Exception as error:  # of any kind: it costs this job and no other
            for each in batch:
                results.setdefault(each.key, MeasurementResult(failure=describe_error(error)))

    def result(self, wanted: Wanted) -> MeasurementResult:
        """Return the result of a measurement whose job has run."""
        clash = self._clash(wanted.case)
        if clash is not None:
            return MeasurementResult(failure=clash)
        lost = f"{wanted.key}: the job of {wanted.selection} ended before it came to this measurement"
        return self.known(wanted) or MeasurementResult(failure=lost)

    def wait_until_quiet(self) -> None:
        """Wait for a quiet machine; if the time for waiting is spent, mark later results."""
        limit_s = self.settings.wait_quiet_s
        if limit_s is None or self.settings.elsewhere is not None:
            return
        tell, start = self.progress, time.monotonic()
        noise = await_quiet(
            limit_s - self._waited_s,
            None if tell is None else lambda what: tell("--wait-quiet", what),
            threads=self.settings.threads,
        )
        self._waited_s += time.monotonic() - start
        self._noise = f"the machine was not quiet after {limit_s:g} s of --wait-quiet: {noise}" if noise else ""

    def sampling(self, wanted: Wanted) -> SamplingSettings:
        """Return the sampling settings of a measurement."""
        return SamplingSettings.from_dict(self._case_job([wanted], wanted.selection).sampling)

    def keep(self, wanted: Wanted, result: MeasurementResult) -> None:
        """Store a measurement's result."""
        self._results.setdefault(wanted.job, {})[wanted.key] = result

    def has_run(self, wanted: Wanted) -> bool:
        """Return whether the job of a measurement has run."""
        return wanted.job in self._results

    def known(self, wanted: Wanted) -> MeasurementResult | None:
        """Return the result of a measurement, if there is one yet."""
        return self._results.get(wanted.job, {}).get(wanted.key)

    def write(self, batch: Sequence[Wanted]) -> Path:
        """Write the job file of a batch, to be run elsewhere.

        Raises
        ------
        ConfigurationError
            A case is invalid, or has the name of another case.
        """
        for each in batch:
            clash = self._clash(each.case)
            if clash is not None:
                raise ConfigurationError(clash)
        path = self._path(_slug(batch[0]))
        self._job(batch).save(path)
        return path

    def varied(self, **changes: Any) -> Session:
        """Return a copy with other settings, which shares this session's folder and results."""
        other = copy.copy(self)
        other.settings = replace(self.settings, **changes)
        return other

    def close(self) -> None:
        """Delete the large files that only this session needed, and unlock the job files."""
        self._held.close()
        if self.settings.elsewhere is not None:  # other processes may need them still
            return
        for path in (*self._trajectories, *self._shared_files):
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)

    def _clash(self, case: Case) -> str | None:
        """Return the error message if another case has the same name; else None."""
        known = self._cases.setdefault(case.name, [])
        if not any(each.is_same(case) for each in known):
            known.append(case)
        if len(known) == 1:
            return None
        files = " and ".join(sorted({each.origin for each in known}))
        return f"{case.name}: two cases have this name, in {files}\n  Rename one of them."

    def launch(
        self, job: Job, path: Path, limit_s: float, *, python: str | None = None, memory_bytes: int | None = None
    ) -> Launch:
        """Return the settings with which this session launches the worker of a job.

        Parameters
        ----------
        job : Job
        path : Path
            The job file.
        limit_s : float
            Time limit in seconds, unless the settings have one.
        python : str, optional
            Interpreter, instead of the configured interpreter.
        memory_bytes : int, optional
            Memory limit, instead of the limit in the settings.
        """
        settings, progress = self._settings_of(job), self.progress
        if python is None and not job.references_only:
            python = interpreter(job.backend["name"], settings.pythons)
        limits = Limits(
            limit_s if settings.timeout_s is None else settings.timeout_s,
            settings.memory_bytes if memory_bytes is None else memory_bytes,
        )
        name = path.name.removesuffix(".job.json")
        watch = None if progress is None else watcher(path, lambda phase: progress(name, phase))
        return Launch(limits, python, settings.wrap, settings.environment, watch=watch)

    def _settings_of(self, job: Job) -> Settings:
        """Return the settings of a job, with the tuned settings that a file has for the job."""
        return self.settings.of(job.cases[0].name, job.backend["name"], job.backend["mode"])

    def run(
        self,
        batch: Sequence[Wanted],
        results: dict[str, MeasurementResult],
        start: Callable[[Job, Path, float], Supervisor],
        launch: int = 1,
    ) -> Generator[tuple[str, Any], None, None]:
        """Run the job of a batch; after a crash a new worker continues with the rest.

        A worker may have a smaller memory limit than the session, to leave room for others. If it
        exceeds that limit, the rest of the job has no result, and no new worker starts.

        Parameters
        ----------
        batch : sequence of Wanted
        results : dict of str to MeasurementResult
            Receives the results, by key.
        start : callable
            Starts a worker, given the job, its file and the time limit in seconds.
        launch : int
            Number of this launch of the same job, from 1.

        Yields
        ------
        str, TurnWorker
            Only if `start` returns a `TurnWorker`: a measurement's key, and the worker that waits
            for the first turn. Resume after telling the worker that the turns have ended. The key
            is empty while the worker proves, or waits for permission to go on (`TurnWorker.asks`).
        """
        plan = self._plan(batch, results)
        if plan is not None:
            yield from self._attempts(plan, results, start, launch)

    def _attempts(
        self,
        plan: JobPlan,
        results: dict[str, MeasurementResult],
        start: Callable[[Job, Path, float], Supervisor],
        launch: int = 1,
    ) -> Generator[tuple[str, Any], None, None]:
        slug = plan.slug if launch == 1 else f"{plan.slug}-launch{launch}"
        remaining, number = list(plan.wanted), 0
        while remaining:
            number += 1
            job, path = plan.make(remaining), self._path(slug, number)
            job.save(path)
            worker, interrupt = start(job, path, plan.limit_s), None
            try:
                while (key := worker.ready()) is not None:
                    yield key, worker
            except BaseException as error:  # an interrupt must not lose what the worker has finished
                interrupt = error
            with uninterrupted():
                outcome = worker.end(interrupt)
                crowded = outcome.exceeded_bytes is not None and outcome.exceeded_bytes < self.settings.memory_bytes
                settled, remaining = settle(job, outcome, path, [] if crowded else remaining)
                for attempt in settled:
                    self._take(attempt, plan, results)
            if interrupt is not None:
                raise interrupt

    def _start(self, job: Job, path: Path, limit_s: float) -> Supervisor:
        return start_job(job, path, self.launch(job, path, limit_s))

    def _read_results(self, batch: Sequence[Wanted], results: dict[str, MeasurementResult]) -> None:
        """Read the results of a job that ran elsewhere."""
        plan = self._plan(batch, results)
        if plan is not None:
            for attempt in attempts_in(self._path(plan.slug), plan.make(list(plan.wanted))):
                self._take(attempt, plan, results)

    def _plan(self, batch: Sequence[Wanted], results: dict[str, MeasurementResult]) -> JobPlan | None:
        """Plan the job of a batch, once the references that it needs exist.

        Invalid measurements get their failure in `results`.
        """
        for each in batch:
            self._clash(each.case)  # registers all names before the first one is judged
        valid: dict[str, Wanted] = {}
        for each in batch:
            failure = self._clash(each.case) or self._problem_with(each)
            if failure is None:
                valid[each.key] = each
            else:
                results[each.key] = MeasurementResult(failure=failure)
        for key, failed in self._compute_references([e for e in valid.values() if e.case.shares_references]).items():
            results[key] = failed
            del valid[key]
        if not valid:
            return None
        limit_s = max(
            each.case.time_limit_s(each.selection, self.settings, each.measurement.trains) for each in valid.values()
        )
        slug = _slug(next(iter(valid.values())))
        return JobPlan(valid, slug, limit_s, lambda keys: self._job([valid[key] for key in keys]))

    def _problem_with(self, wanted: Wanted) -> str | None:
        """Return why a measurement is invalid; None if it is valid."""
        try:
            self._case_job([wanted], wanted.selection)
        except Exception as error:
            return describe_error(error)
        return None

    def _take(self, attempt: Attempt, plan: JobPlan, results: dict[str, MeasurementResult]) -> None:
        """Store the result of an attempt."""
        try:
            results[attempt.key] = self._result_of(attempt, plan.wanted[attempt.key])
        except Exception as error:
            results[attempt.key] = MeasurementResult(failure=describe_error(error))

    def _result_of(self, attempt: Attempt, wanted: Wanted) -> MeasurementResult:
        measured = attempt.measured
        if measured is None:
            return MeasurementResult(failure=attempt.failure, kept=attempt.kept, wrong=attempt.wrong)
        part = next(each for each in attempt.job.cases if each.name == wanted.case.name)
        samples = measured.samples
        content = record(wanted.case, part, wanted.measurement, attempt.job, attempt.result, measured)
        if self._noise:
            content["warnings"] = [*content.get("warnings", []), self._noise]
        if attempt.job_file is not None:
            content["job"] = os.path.relpath(attempt.job_file)
        place_files(content, measured, (attempt.job_file or attempt.path or self.folder).parent)
        if attempt.path is not None:
            add_nodes(content, attempt.key, attempt.job, attempt.result, attempt.path)
        series = {"samples_s": samples["samples_s"], "warmup_s": samples["warmup_s"], **measured.series}
        return MeasurementResult(content, samples["samples_s"], series)

    def _compute_references(self, wanted: Sequence[Wanted]) -> dict[str, MeasurementResult]:
        """Compute missing references in a separate job; return the failures."""
        missing = {each.key: each for each in wanted if each.key not in self._references}
        if missing:
            slug = f"{next(iter(missing.values())).case.batch}-reference-{len(self._references)}"

            def make(keys: list[str]) -> Job:
                job = self._job([missing[key] for key in keys], reference=True)
                return replace(job, references_only=True, device="cpu")

            for _ in self._attempts(JobPlan(missing, slug, TIME_LIMIT_S, make), self._references, self._start):
                pass  # no turns
        computed = {each.key: self._references[each.key] for each in wanted if each.key in self._references}
        return {key: result for key, result in computed.items() if result.failure is not None}

    def _job(self, wanted: Sequence[Wanted], *, reference: bool = False) -> Job:
        settings, selection = self.settings, None if reference else wanted[0].selection
        if selection is not None:
            settings = settings.of(wanted[0].case.name, selection.backend.name, selection.mode)
        by_case: dict[str, list[Wanted]] = {}
        for each in wanted:
            by_case.setdefault(each.case.name, []).append(each)
        ranks = None if reference else wanted[0].ranks
        threads, workers = settings.threads, settings.loader_workers
        if ranks is not None:  # the same threads per rank for every number of ranks, so that efficiencies compare
            threads = ranks.size * max(1, threads // max(each.size for each in settings.ranks))
            workers = min(workers, threads)
        return Job(
            backend={
                "name": selection.backend.name if selection is not None else "none",
                "mode": selection.mode if selection is not None else "none",
            },
            device=settings.device,
            precision=settings.precision,
            threads=threads,
            seed=settings.seed,
            loader_workers=workers,
            ranks=ranks.size if ranks is not None else 1,
            distributed=ranks.distributed if ranks is not None else None,
            cases=[self._case_job(each, selection) for each in by_case.values()],
            passes=list(settings.passes),
            pass_files={name: file for name, file in settings.passes.items() if file is not None},
        )

    def _case_job(self, wanted: Sequence[Wanted], selection: Selection | None) -> CaseJob:
        """Return one case's part of a job; without a selection, the job computes references."""
        case, ranks, settings = wanted[0].case, wanted[0].ranks, self.settings
        if selection is not None:
            settings = settings.of(case.name, selection.backend.name, selection.mode)
        files = {each.measurement.name: file_of(each.measurement) for each in wanted}
        part = case.job(
            selection,
            settings,
            [each.measurement.name for each in wanted],
            {name: file for name, file in files.items() if file is not None},
            self._shared(case, selection, settings),
        )
        if self.settings.elsewhere is not None:  # jobs may run concurrently
            part = part.alone()
        return part if ranks is None or not self.settings.divides_batch else part.divided(ranks.size)

    def _shared(self, case: Case, selection: Selection | None, settings: Settings) -> Shared:
        """Return the files that a case's jobs share; a trajectory depends on the batch size."""
        preset, batch = case.preset_name(selection, settings), settings.batch_size
        reference = self.folder / f"{case.batch}-{preset}.reference.h5"
        self._shared_files.add(reference)
        own = f"{case.name}-{str(selection).replace(':', '-')}" + (f"-batch{batch}" if batch else "")
        trajectory = self.folder / f"{own}.trajectory.h5"
        self._trajectories[trajectory] = key = case.name, preset, batch
        peers = [str(path) for path, of in self._trajectories.items() if of == key and path != trajectory]
        return Shared(str(reference), str(trajectory), peers)

    def _path(self, slug: str, number: int = 1) -> Path:
        return self.folder / (slug + (f"-{number}" if number > 1 else "") + ".job.json")


def _slug(wanted: Wanted) -> str:
    """Return the name that all files of a measurement's job begin with."""
    return "-".join(wanted.job).replace(":", "-")


def _prune(parent: Path) -> None:
    """Remove the oldest folders of job files, except folders of running sessions."""
    ours = sorted(path for path in parent.iterdir() if RUN_FOLDER.fullmatch(path.name))
    for old in ours[:-KEEP_RUNS]:
        with contextlib.suppress(OSError), locked(old / LOCK, wait=False):
            shutil.rmtree(old, ignore_errors=True)
