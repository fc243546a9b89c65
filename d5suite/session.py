"""The parent side of a benchmark session: turn recipes into jobs, run them, and collect what the workers found.

One job per (recipe, backend) holds all wanted measurements. A worker that crashes, hangs or is killed costs the
measurement it was working on; a new worker takes up the rest. A second, short job per (recipe, backend) takes peak
memory. Knows jobs and results, and backends as data; never imports a framework.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d5suite.backends import Selection
from d5suite.errors import ConfigurationError, D5Error, JobError
from d5suite.files import read_json
from d5suite.job import Job
from d5suite.launch.local import Limits, Outcome, interpreter, run_worker
from d5suite.levels.training import Optimizer
from d5suite.problem import MAX_TIME_S, Problem, Task
from d5suite.recipe import TIME_LIMIT_S, TIME_TO_ACCURACY, Recipe
from d5suite.worker import result_path

SYNTHETIC_IMAGES = 320
"""Training images of the small set that recipes make for themselves, but at least `LEAST_PER_CLASS` of each class."""

LEAST_PER_CLASS = 2
"""See `SYNTHETIC_IMAGES`."""

WITH_MEMORY = ("inference", "gradient", "training_step", "input_pipeline")
"""Measurements whose peak memory is taken."""

KEEP_RUNS = 20
"""Folders of job files kept; older ones go when a new one is made."""


@dataclass(frozen=True)
class Settings:
    """What the user chose for a whole session; None means the recipe's or preset's own.

    Attributes
    ----------
    preset, device, precision : str
    threads, seed, loader_workers : int
    batch_size : int, optional
    optimizer : Optimizer, optional
    datasets : mapping of str to Path or None
        Where datasets lie; without a path a small one is made and cached.
    timeout_s : float, optional
        Of each worker.
    memory_bytes : int
        Most resident memory of each worker.
    wrap : str, optional
        Command in front of each worker.
    pythons : mapping of str to str
        Interpreters by backend.
    sampling : mapping
        Fields of `SamplingSettings` that the user gave.
    jobs : Path
        Where job files go.
    """

    preset: str | None
    device: str
    precision: str
    threads: int
    seed: int
    loader_workers: int
    batch_size: int | None
    optimizer: Optimizer | None
    datasets: Mapping[str, Path | None]
    timeout_s: float | None
    memory_bytes: int
    wrap: str | None
    pythons: Mapping[str, str]
    sampling: Mapping[str, Any]
    jobs: Path


@dataclass
class Found:
    """What is known of one measurement of one backend: a record, or why there is none.

    ``kept`` is what a measurement that failed leaves all the same, such as the curves of runs that missed their target.
    """

    record: dict[str, Any] | None = None
    failure: str | None = None
    kept: dict[str, Any] | None = None


@dataclass
class Session:
    """All jobs of one pytest run.

    Attributes
    ----------
    settings : Settings
    progress : callable
        Receives a line whenever a worker enters a new phase; None in a pipe.
    """

    settings: Settings
    progress: Callable[[str], None] | None = None
    _found: dict[tuple[str, str], dict[str, Found]] = field(default_factory=dict)
    _trajectories: dict[tuple[str, str, str], Path] = field(default_factory=dict)
    _references: set[Path] = field(default_factory=set)
    _operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    _described: dict[str, tuple[Problem, str | None]] = field(default_factory=dict)
    _referenced: dict[str, Any] = field(default_factory=dict)
    _without_reference: dict[str, Found] = field(default_factory=dict)
    _folder: Path | None = None

    def measurement(self, recipe: Recipe, selection: Selection, measurement: str, wanted: Sequence[str]) -> Found:
        """One measurement's record; the first call for a (recipe, backend) runs the job for all that are wanted."""
        key = (recipe.name, str(selection))
        if key not in self._found:
            self._found[key] = {}
            try:
                self._run(recipe, selection, list(wanted), self._found[key])
            except D5Error as error:
                for name in wanted:
                    self._found[key].setdefault(name, Found(failure=str(error)))
        return self._found[key][measurement]

    def close(self) -> None:
        """Delete the large files that only this session needed; job files stay."""
        for path in (*self._trajectories.values(), *self._references):
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)

    @property
    def folder(self) -> Path:
        """The folder of the session's job files.

        Raises
        ------
        ConfigurationError
            If it cannot be made.
        """
        if self._folder is None:
            parent = self.settings.jobs
            folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise ConfigurationError(
                    f"cannot make the folder for job files: {error.strerror}",
                    where=str(folder),
                    hint="Choose --jobs DIR.",
                ) from error
            for old in sorted(p for p in parent.iterdir() if p.is_dir())[:-KEEP_RUNS]:
                shutil.rmtree(old, ignore_errors=True)
            self._folder = folder
        return self._folder

    def job(self, recipe: Recipe, selection: Selection, measurements: list[str], task: str) -> Job:
        """The job for these measurements of a recipe on a backend."""
        settings = self.settings
        preset_name, preset = recipe.preset_for(selection.backend, settings.preset)
        network: dict[str, Any] = (
            {"onnx": recipe.network} if recipe.network.endswith(".onnx") else {"zoo": recipe.network}
        )
        optimizer = settings.optimizer or preset.optimizer or recipe.optimizer
        workload = (recipe.name, preset_name)
        peers = [
            path
            for (*its_workload, name), path in self._trajectories.items()
            if tuple(its_workload) == workload and name != str(selection)
        ]
        reference = self.folder / f"{recipe.name}-{preset_name}.reference.h5"
        self._references.add(reference)
        return Job(
            recipe=recipe.name,
            task=task,
            measurements=measurements,
            backend={"name": selection.backend.name, "mode": selection.mode},
            device=settings.device,
            precision=settings.precision,
            threads=settings.threads,
            seed=settings.seed,
            preset=preset_name,
            network={
                **network,
                "classes": preset.classes,
                "image_size": preset.image_size,
                "label_smoothing": recipe.label_smoothing,
                "several_labels": recipe.dataset == "openimages",
            },
            dataset={"kind": recipe.dataset, "root": self._dataset(recipe, preset.classes)},
            training=preset.training.to_dict() if preset.training else {},
            batch_size=settings.batch_size or preset.batch_size,
            optimizer=optimizer.to_dict(),
            loader_workers=settings.loader_workers,
            sampling={"max_time_s": preset.max_time_s, **settings.sampling},
            validation_steps=recipe.acceptance.trajectory_steps,
            peers=[str(path) for path in peers if path.exists()],
            trajectory=str(self.folder / f"{_slug(recipe, selection)}.trajectory.h5") if task == "measure" else None,
            reference=str(reference) if task == "measure" else None,
        )

    def _dataset(self, recipe: Recipe, classes: int) -> str:
        """Where a recipe's dataset lies; nowhere if it comes with a library."""
        kind = recipe.dataset
        if kind == "digits":
            return ""
        given = self.settings.datasets.get(kind)
        if given is not None:
            return str(given.resolve())
        from d5suite.data.synthesis import cached_conversion, cached_imagenet, cached_openimages

        # Few images of each of many classes: what is measured is speed, and a thousand classes take long to draw.
        train = max(LEAST_PER_CLASS, SYNTHETIC_IMAGES // classes)
        if kind == "openimages":
            root = cached_openimages(classes)
        else:
            root = cached_imagenet(classes=classes, train_per_class=train, val_per_class=-(-train // 4))
        converted = [each for each in recipe.formats if each != "folder"]
        return str(cached_conversion(root, converted[0]) if converted else root)

    def _run(self, recipe: Recipe, selection: Selection, wanted: list[str], found: dict[str, Found]) -> None:
        records = self._attempt(
            _slug(recipe, selection),
            lambda remaining: self.job(recipe, selection, remaining, "measure"),
            lambda job, result, name: self._record(job, result, name),
            wanted,
            found,
            lambda job: self._keep_trajectory(recipe, selection, job),
            limit_s=self._limit_s(recipe, selection, wanted),
        )
        if records:
            self._add_memory(recipe, selection, records)
        found.update({name: Found(record=record) for name, record in records.items()})

    def _limit_s(self, recipe: Recipe, selection: Selection, wanted: Sequence[str]) -> float:
        """How long a recipe's worker may take, unless the user says so."""
        _, preset = recipe.preset_for(selection.backend, self.settings.preset)
        if preset.training is None or TIME_TO_ACCURACY not in wanted:
            return TIME_LIMIT_S
        return math.inf if preset.training.time_limit_s is None else preset.training.time_limit_s

    def _keep_trajectory(self, recipe: Recipe, selection: Selection, job: Job) -> None:
        if job.trajectory and Path(job.trajectory).exists():
            self._trajectories[recipe.name, job.preset, str(selection)] = Path(job.trajectory)

    def _attempt(
        self,
        slug: str,
        make: Callable[[list[str]], Job],
        record: Callable[[Job, dict[str, Any], str], dict[str, Any]],
        wanted: list[str],
        found: dict[str, Found],
        after: Callable[[Job], None] = lambda job: None,
        limit_s: float = TIME_LIMIT_S,
    ) -> dict[str, dict[str, Any]]:
        """Run a job until each measurement has a record, which is returned, or a failure, which goes to `found`.

        A worker that dies costs the measurement it was working on; a new one takes up the rest.
        """
        records: dict[str, dict[str, Any]] = {}
        remaining = list(wanted)
        attempt = 0
        while remaining:
            attempt += 1
            job = make(remaining)
            outcome, result, path = self._work(job, slug + (f"-{attempt}" if attempt > 1 else ""), limit_s)
            after(job)
            where = f"\njob file: {path}"
            kept = result.get("kept", {})
            if kept:
                where = f"\nresult file, with what there is of it: {result_path(path)}{where}"
            for name, failure in result.get("failures", {}).items():
                found[name] = Found(failure=f"{failure['message']}{where}", kept=kept.get(name))
            for name in result.get("measurements", {}):
                records[name] = record(job, result, name)
            if outcome.ok and result.get("status") == "done":
                break
            if result.get("status") == "failed":
                message = f"{result['error']['message']}{where}"
                lost = [name for name in remaining if name not in records and name not in found]
            else:
                guilty = result.get("measurement")
                reason = f"{outcome.reason} without finishing" if outcome.ok else outcome.reason
                message = f"{reason}, while {result.get('phase', 'starting')}{where}\n{outcome.tail}"
                lost = [guilty] if guilty else [n for n in remaining if n not in records and n not in found]
            for name in lost:
                found[name] = Found(failure=message, kept=kept.get(name))
            remaining = [name for name in remaining if name not in records and name not in found]
        return records

    # Level 0.

    def task(self, task: Task, selection: Selection, wanted: Sequence[Task]) -> Found:
        """One direction of one problem; the first call for a backend runs the job for all that are wanted of it."""
        key = ("operators", str(selection))
        if key not in self._found:
            found = self._found[key] = {}
            try:
                self._run_operators(selection, wanted, found)
            except D5Error as error:
                for each in wanted:
                    found.setdefault(each.measurement, Found(failure=str(error)))
        lost = Found(failure=f"{task.measurement}: the job of {selection} ended before it came to this measurement")
        return self._found[key].get(task.measurement, lost)

    def _run_operators(self, selection: Selection, wanted: Sequence[Task], found: dict[str, Found]) -> None:
        valid: dict[str, Task] = {}
        for each in wanted:
            failure = self._describe(each)
            if failure is None:
                valid[each.measurement] = each
            else:
                found[each.measurement] = Found(failure=failure)
        valid = {name: each for name, each in valid.items() if name not in found}  # two may have one name
        self._compute_references(list(valid))
        remaining = [name for name in valid if name not in self._without_reference]
        found.update({n: self._without_reference[n] for n in valid if n in self._without_reference})
        records = self._attempt(
            f"operators-{str(selection).replace(':', '-')}",
            lambda names: self._operator_job(names, selection, "measure"),
            lambda job, result, name: self._operator_record(job, result, name, valid[name]),
            remaining,
            found,
        )
        found.update({name: Found(record=record) for name, record in records.items()})

    def _describe(self, task: Task) -> str | None:
        """Keep the description of a task's operation for jobs, or say what is wrong with it.

        Whatever that is: a problem is a user's own code, and must not take the others with it.
        """
        if task.group in self._described:
            known, failure = self._described[task.group]
            if known is task.problem:
                return failure
            files = " and ".join(sorted({str(known.file), str(task.problem.file)}))
            return f"{task.group}: two problems have this name, in {files}\n  Rename one of them."
        failure = None
        try:
            content = task.problem.operation(task.family, self.settings.precision).to_dict()
            json.dumps(content)
            self._operations[task.group] = content
        except D5Error as error:
            failure = str(error)
        except Exception as error:  # a user's description may fail in any way
            failure = f"{task.problem.file}, {task.group}: {type(error).__name__}: {error}"
        self._described[task.group] = (task.problem, failure)
        return failure

    def _compute_references(self, names: list[str]) -> None:
        """Let a process of its own compute the references that are not yet there, for all backends to come."""
        missing = [name for name in names if name not in self._referenced and name not in self._without_reference]
        if missing:
            failed: dict[str, Found] = {}
            done = self._attempt(
                f"operators-reference-{len(self._referenced)}",
                lambda remaining: self._operator_job(remaining, None, "reference"),
                lambda job, result, name: {},
                missing,
                failed,
            )
            self._referenced.update(done)
            self._without_reference.update(failed)

    def _operator_job(self, names: list[str], selection: Selection | None, task: str) -> Job:
        settings = self.settings
        preset = settings.preset or "smoke"
        reference = self.folder / "operators.reference.h5"
        self._references.add(reference)
        backend = {"name": "none", "mode": "none"}
        if selection is not None:
            backend = {"name": selection.backend.name, "mode": selection.mode}
        return Job(
            recipe="operators",
            task=task,
            measurements=names,
            backend=backend,
            device=settings.device if selection is not None else "cpu",
            precision=settings.precision,
            threads=settings.threads,
            seed=settings.seed,
            preset=preset,
            sampling={"max_time_s": MAX_TIME_S[preset], **settings.sampling},
            operations=[self._operations[group] for group in dict.fromkeys(n.rpartition("/")[0] for n in names)],
            reference=str(reference),
        )

    def _operator_record(self, job: Job, result: dict[str, Any], name: str, task: Task) -> dict[str, Any]:
        record = self._record(job, result, name)
        facts = record["d5suite"]
        facts.update(
            recipe=task.group,
            measurement=task.direction,
            source=task.problem.source,
            throughput={"value": 1 / facts["median_s"], "unit": "calls/s"},
            memory={"missing": "not taken at level 0"},
            ceilings=result["ceilings"],
        )
        return record

    def _add_memory(self, recipe: Recipe, selection: Selection, records: dict[str, dict[str, Any]]) -> None:
        measurable = [name for name in records if name in WITH_MEMORY]
        if not measurable:
            return
        job = self.job(recipe, selection, measurable, "memory")
        outcome, result, _ = self._work(job, f"{_slug(recipe, selection)}-memory")
        for name in measurable:
            memory = result.get("measurements", {}).get(name, {}).get("memory")
            if memory is not None:
                records[name]["d5suite"]["peak_memory_bytes"] = memory["peak_bytes"]
                records[name]["d5suite"]["memory"] = memory
            else:
                why = result.get("failures", {}).get(name, {}).get("message", outcome.reason)
                records[name]["d5suite"]["memory"] = {"missing": why.splitlines()[-1]}

    def _work(self, job: Job, name: str, limit_s: float = TIME_LIMIT_S) -> tuple[Outcome, dict[str, Any], Path]:
        settings = self.settings
        path = self.folder / f"{name}.job.json"
        job.save(path)
        answer = result_path(path)
        shown = ""

        def watch() -> None:
            nonlocal shown
            try:
                phase = str(read_json(answer)["phase"])
            except (JobError, KeyError):
                return
            if self.progress is not None and phase != shown:
                shown = phase
                self.progress(f"{name}: {phase}")

        outcome = run_worker(
            path,
            threads=job.threads,
            device=job.device,
            limits=Limits(limit_s if settings.timeout_s is None else settings.timeout_s, settings.memory_bytes),
            log=self.folder / f"{name}.log",
            python=interpreter(job.backend["name"], settings.pythons) if job.task != "reference" else sys.executable,
            wrap=settings.wrap,
            watch=watch if self.progress is not None else None,
        )
        try:
            result = read_json(answer)
        except JobError:
            result = {}
            if outcome.ok:
                outcome = Outcome(False, "the worker left no result", outcome.tail)
        return outcome, result, path

    def _record(self, job: Job, result: dict[str, Any], name: str) -> dict[str, Any]:
        measured = result["measurements"][name]
        samples = measured["samples"]
        backend = result["backend"]
        machine = measured["machine"]
        return {
            "samples_s": samples["samples_s"],
            "series": {"samples_s": samples["samples_s"], "warmup_s": samples["warmup_s"], **measured["series"]},
            "d5suite": {
                "schema": "d5suite-1",
                "recipe": job.recipe,
                "level": measured["level"],
                "measurement": name,
                "backend": {key: backend[key] for key in ("name", "mode", "version", "versions")},
                "device": job.device,
                "device_name": result["device"]["name"],
                "precision": job.precision,
                "threads": job.threads,
                "cpus": result["threads"]["cpus"],
                "ranks": job.ranks,
                **self._workload_facts(job, result),
                "preset": job.preset,
                "seed": job.seed,
                "throughput": {"value": measured["items"] / samples["median_s"], "unit": "images/s"},
                "median_s": samples["median_s"],
                "median_ci95": samples["median_ci_s"],
                "median_ci_confidence": samples["median_ci_confidence"],
                "first_call_s": samples["first_call_s"],
                "compile_s": samples["compile_s"],
                "warmup_calls": len(samples["warmup_s"]),
                "steady": samples["steady"],
                "stopped_by": samples["stopped_by"],
                "peak_memory_bytes": None,
                "macs": measured["macs"],
                "validation": result["validation"][name],
                "machine": {"disturbed": machine["disturbed"], "reasons": machine["reasons"]},
                "environment": result["environment"],
                **measured["extra"],
            },
        }

    @staticmethod
    def _workload_facts(job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if job.operations:
            return {}
        return {
            "dataset": result["dataset"],
            "batch_size": job.batch_size,
            "image_size": job.network["image_size"],
            "classes": job.network["classes"],
            "optimizer": job.optimizer,
        }


def _slug(recipe: Recipe, selection: Selection) -> str:
    return f"{recipe.name}-{str(selection).replace(':', '-')}"
