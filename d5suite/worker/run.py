"""Run a job: for every case prepare, prove, sample, prove the timed answers, and record.

Passes that do not disturb timing precede the first proof; the other passes follow the second proof.

Imports a framework only through the backend, after the job is read.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import d5suite
from d5suite.distributed import framework
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.gathering import disagreements, gather
from d5suite.distributed.meeting import meet
from d5suite.distributed.network import VARIABLES as INTERFACES
from d5suite.distributed.network import require_interface
from d5suite.errors import JobError, ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.gpus import driver_states
from d5suite.instruments.memory import return_freed_memory
from d5suite.instruments.settings import ALONE, InTurns
from d5suite.instruments.threads import set_affinity, thread_environment
from d5suite.job import TIME, CaseJob, Job, Measured, key_of, stem_of
from d5suite.launch.heartbeat import HeartbeatWriter
from d5suite.launch.ranks import MEETS
from d5suite.measurements import find as find_measurement
from d5suite.passes import find as find_pass
from d5suite.passes.base import Pass, PreparedStep, take
from d5suite.passes.time import Time
from d5suite.validate.check import Validation
from d5suite.worker.ranks import RankInfo, code_digest, share_resources, watch_ranks
from d5suite.worker.references import compute_references
from d5suite.worker.turns import MeasurementTurns, TurnChannel
from d5suite.worker.writer import ResultWriter
from d5suite.workloads.base import Workload

INHERITED = frozenset(os.environ)
"""Names of the environment variables that this process was started with."""

SLOW_COLLECTION_S = 0.01
"""Duration of a garbage collection, in seconds, above which later ones skip what exists."""


@dataclass
class PreparedMeasurement:
    """One measurement of a case, on its way through the phases of the worker.

    Attributes
    ----------
    key : str
        ``case/measurement``.
    prepared : PreparedStep
    passes : list of Pass
        The job's passes, without ``time``.
    parts : dict of str to dict
        Parts that the passes have recorded so far, by name of the pass.
    validation : Validation
    """

    key: str
    prepared: PreparedStep
    passes: list[Pass]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    validation: Validation = field(default_factory=Validation)

    def take_passes(self, writer: ResultWriter, *, disturbing: bool) -> None:
        """Run the passes that disturb timing, or the passes that do not."""
        for each in self.passes:
            if each.disturbs == disturbing:
                writer.phase(f"taking the {each.name} pass of {self.key}", self.key)
                self.parts[each.name] = take(each, self.prepared)


def run(
    job: Job,
    writer: ResultWriter,
    rank_info: RankInfo | None = None,
    heartbeat: HeartbeatWriter | None = None,
    channel: TurnChannel | None = None,
    *,
    continues: bool = False,
) -> None:
    """Run a job, or one rank's part of the job, and write the results as they come.

    Parameters
    ----------
    job : Job
    writer : ResultWriter
    rank_info : RankInfo, optional
        Rank of this process; if missing, this process is the only rank.
    heartbeat : HeartbeatWriter, optional
        Shows a watcher that this rank is alive.
    channel : TurnChannel, optional
        Channel to the session, to take samples in turn with other workers.
    continues : bool
        Whether a workflow goes on from the checkpoints of an earlier attempt.

    Raises
    ------
    D5Error
        If nothing in the job can run. If a measurement fails, the failure is recorded, and the
        other measurements go on.
    """
    notes: list[str] = []
    rank_info = rank_info or RankInfo()
    job, cpus = share_resources(job, rank_info, notes)
    os.environ.update(thread_environment(job.threads))
    cpus = set_affinity(job.threads, notes, cpus)
    if job.references_only:
        compute_references(job, writer)
        return
    writer.result.threads = {"budget": job.threads, "cpus": cpus, "notes": notes}
    with contextlib.ExitStack() as communicating:
        if heartbeat is not None:
            communicating.callback(watch_ranks(rank_info, heartbeat, writer, job.places))
        try:
            beating = heartbeat or HeartbeatWriter(None)
            for case, workload in _workloads(job, writer, rank_info, beating, communicating, channel):
                workload.continues = continues
                _agree(job, workload, writer)
                _measure(job, case, workload, writer, channel)
                del workload
        except BaseException:
            communicating.pop_all()  # closing would wait for the other ranks, and this one has failed
            raise


def _workloads(
    job: Job,
    writer: ResultWriter,
    rank_info: RankInfo,
    heartbeat: HeartbeatWriter,
    communicating: contextlib.ExitStack,
    channel: TurnChannel | None,
) -> Iterator[tuple[CaseJob, Workload]]:
    """Start the framework, meet the other ranks, and yield the cases with their workloads."""
    from d5suite.instruments.environment import describe
    from d5suite.workloads.collective import CollectiveWorkload
    from d5suite.workloads.network import NetworkWorkload
    from d5suite.workloads.operator import OperatorWorkload
    from d5suite.workloads.workflow import WorkflowWorkload

    kinds: dict[str, type[Workload]] = {
        each.kind: each for each in (NetworkWorkload, OperatorWorkload, CollectiveWorkload, WorkflowWorkload)
    }
    writer.phase("starting the framework")
    selection = kinds[job.cases[0].kind].select(job)
    backend = selection.backend
    backend.check(device=job.device, precision=job.precision)
    gpus = driver_states() if job.device != "cpu" else ()
    runtime = backend.load("runtime", selection.mode)
    backend.check_mode(selection.mode)
    runtime.configure(threads=job.threads, seed=job.seed, device=job.device)
    communicator = None
    if job.distributed is not None:
        writer.phase(MEETS)
        if job.distributed.interface:
            require_interface(job.distributed.interface, "--interface")
            os.environ.update(dict.fromkeys(INTERFACES, job.distributed.interface))
        heartbeat.calls = lambda: (0, True)
        communicator = open_communicator(
            job.distributed.communicator, job.distributed.algorithm,
            rank=rank_info.rank, size=rank_info.ranks, meeting=rank_info.meeting,
        )  # fmt: skip
        communicating.callback(communicator.close)
        heartbeat.calls, heartbeat.framework = lambda: communicator.activity, framework.calls
        if job.distributed.native and rank_info.ranks > 1:
            leave = meet(
                backend, selection.mode, job.distributed.scheme, job.distributed.settings, communicator,
                device=job.device, precision=job.precision, threads=job.threads, local_rank=rank_info.local_rank,
                folder=rank_info.meeting,
            )  # fmt: skip
            communicating.callback(leave)
    problem = runtime.device_problem(job.device)
    if problem:
        raise JobError(f"backend {backend.name!r} cannot use device {job.device!r}: {problem}")
    versions = runtime.versions()
    backend.check_version(versions)
    result = writer.result
    result.backend = {
        "name": backend.name,
        "mode": selection.mode,
        "version": backend.version() or versions.get(backend.name, "unknown"),
        "versions": versions,
    }
    result.device = {"kind": job.device, "name": runtime.device_name(job.device)}
    gc.collect()
    gc.freeze()  # otherwise every collection walks the framework's objects, for up to 0.2 s
    result.environment = describe(
        ["d5suite", "numpy", "onnx", "onnxruntime", "pillow", "h5py"], INHERITED.intersection(backend.variables)
    )
    writer.write()
    if channel is not None:
        channel.run(ALONE)
    for kind in dict.fromkeys(case.kind for case in job.cases):
        result.ceilings.update(kinds[kind].ceilings(job, selection, writer.phase))
    for number, case in enumerate(job.cases, start=1):
        if rank_info.rank > 0:
            case = case.as_later_rank()
        first, *others = case.keys()
        workload = writer.attempt(
            first,
            "reading the case of",
            lambda case=case: kinds[case.kind](job, case, selection),  # type: ignore[misc]
        )
        if workload is None:
            result.failures.update(dict.fromkeys(others, result.failures[first]))
            continue
        workload.folder = stem_of(writer.path, rank_info.rank)
        workload.gpus_before = gpus
        if communicator is not None:
            workload.communicator, workload.heartbeat = communicator, heartbeat
            workload.meeting = rank_info.meeting
        yield case, workload
        del workload
        if number < len(job.cases):
            gc.collect()  # native objects hold large arrays in reference cycles
        gc.freeze()  # after the last case, too: Python looks for garbage when it ends


def _agree(job: Job, workload: Workload, writer: ResultWriter) -> None:
    """Check, before any training, that all ranks have the same network, data and code.

    Raises
    ------
    JobError
        If ranks disagree.
    """
    if job.ranks == 1:
        return
    communicator = workload.communicator
    writer.phase("comparing the ranks' network, data and code")
    backend = writer.result.backend
    versions = {**backend["versions"], "Python": platform.python_version(), "NumPy": np.__version__}
    facts = {
        **workload.fingerprint(),
        "seed": str(job.seed),
        "precision": job.precision,
        "backend": f"{backend['name']}:{backend['mode']}",
        **{f"version of {name}": version for name, version in versions.items()},
        "d5suite's version": d5suite.__version__,
        "d5suite's code": code_digest(),
        "distributed": json.dumps(asdict(job.distributed) if job.distributed else None),
    }
    differ = disagreements(gather(communicator, facts), communicator.hosts)
    if differ:
        raise JobError("the ranks disagree on " + "; ".join(differ), hint="Give all of them the same job and d5suite.")


def _measure(job: Job, case: CaseJob, workload: Workload, writer: ResultWriter, channel: TurnChannel | None) -> None:
    """Run one case: prove all measurements first, then time them, because they share executors."""
    prepared = [_prepare(job, case, name, workload, writer, channel) for name in case.measurements]
    with _quick_collections():
        set_threads = getattr(workload.backend.load("runtime"), "set_threads", None)
        with channel.proving(job.threads, set_threads) if channel is not None else contextlib.nullcontext():
            proved = [each for each in prepared if each is not None and _prove(each, writer)]
            workload.free_validation()
            if channel is not None:  # other workers need the memory
                return_freed_memory()
        if proved:
            writer.result.facts[case.name] = workload.facts()
        for each in proved:
            workload.tell = lambda where, kept, key=each.key: writer.tell(key, where, kept)  # type: ignore[misc]
            writer.attempt(each.key, "measuring", lambda each=each: _time(each, writer, channel))  # type: ignore[misc]
            writer.write()


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Let garbage collections within the block skip the objects that exist, if they are slow.

    Every sampling collects garbage first. PyTorch imports its compiler with the first optimizer,
    and collections then take 60 ms longer.
    """
    start = now()
    gc.collect()
    if now() - start < SLOW_COLLECTION_S:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _prepare(
    job: Job, case: CaseJob, name: str, workload: Workload, writer: ResultWriter, channel: TurnChannel | None
) -> PreparedMeasurement | None:
    """Build a measurement's step, and run the passes that precede the proof.

    The first call and the peak memory are measured here, so no other worker may run.
    """
    key = key_of(case.name, name)

    def prepare() -> PreparedMeasurement:
        if channel is not None:
            channel.require_alone(f"the first call of {key}")
        measurement = find_measurement(name, case.files.get(name))()
        step = measurement.prepare(workload)
        passes = [find_pass(each, job.pass_files.get(each))() for each in job.passes if each != TIME]
        trial = PreparedMeasurement(key, PreparedStep(workload, measurement, step, workload.settings), passes)
        trial.take_passes(writer, disturbing=False)
        step.call_first()
        step.reset()
        return trial

    return writer.attempt(key, "preparing", prepare)


def _prove(trial: PreparedMeasurement, writer: ResultWriter) -> bool:
    """Compare the answers of a step with an independent reference; return whether they agree."""
    workload, measurement, step, _ = trial.prepared

    def prove() -> bool:
        try:
            trial.validation.require(measurement.prove(workload, step))
        except ValidationError as error:
            raise measurement.explain(workload, step, error) from error
        finally:
            writer.result.validation[trial.key] = trial.validation.to_dict()
        return True

    return writer.attempt(trial.key, "validating", prove) is not None


def _time(trial: PreparedMeasurement, writer: ResultWriter, channel: TurnChannel | None) -> None:
    """Sample a step, prove the timed answers, run the passes that disturb; record the result."""
    workload, measurement, step, settings = trial.prepared
    timing, turns = Time(), None
    if channel is not None:
        channel.require_alone(trial.key)
        if measurement.takes_turns:
            turns = MeasurementTurns(channel, trial.key)
            settings = InTurns(**settings.to_dict(), turns=turns)
    part = timing.take(trial.prepared._replace(settings=settings))
    part["proof_after_s"] = _prove_timed(trial, timing, writer)
    if not (turns is None or turns.taken):
        raise JobError(
            f"{measurement.name} has taken no turns",
            hint="Sample its step with d5suite.instruments.sampling, or set takes_turns = False.",
        )
    extra, series = step.record(timing.samples), step.series()
    if workload.job.ranks > 1:
        workload.communicator.barrier()  # if one rank's proof fails, no rank has a result
    trial.take_passes(writer, disturbing=True)
    writer.result.measurements[trial.key] = Measured(
        measurement.level, step.items, step.macs, series, extra, {**trial.parts, TIME: part}
    )
    writer.result.kept.pop(trial.key, None)
    low, high = part["samples"]["median_ci_s"]
    print(
        f"d5suite: {trial.key}: median {timing.samples.median_s * 1e3:.4g} ms "
        f"({part['samples']['median_ci_confidence']:.0%} interval {low * 1e3:.4g} to {high * 1e3:.4g} ms, "
        f"{len(timing.samples.samples_s)} samples)",
        flush=True,
    )


def _prove_timed(trial: PreparedMeasurement, timing: Time, writer: ResultWriter) -> float:
    """Prove the timed answers; return the seconds that the proof took.

    If a check fails, samples and series are kept in the result file, apart from the results.
    """
    writer.phase(f"proving what was timed of {trial.key}", trial.key)
    workload, measurement, step, _ = trial.prepared
    start, samples = now(), timing.samples.to_dict()
    try:
        trial.validation.require(
            itertools.chain(timing.check(), measurement.check_timed(workload, step)),
            hint=f"So what was timed is wrong. Its {len(samples['samples_s'])} samples (median "
            f"{samples['median_s'] * 1e3:.4g} ms) are set aside under 'kept' in the worker's result file.",
        )
    except Exception:
        kept = writer.result.kept.get(trial.key, {"series": {}})
        kept |= {"samples": samples, "series": {**kept["series"], "samples_s": samples["samples_s"]}}
        writer.result.kept[trial.key] = kept
        raise
    finally:
        writer.result.validation[trial.key] = trial.validation.to_dict()
    return now() - start
