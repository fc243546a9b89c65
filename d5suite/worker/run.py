"""Carry out a job: for each case prepare, take memory, prove, time, and prove what was timed.

Imports a framework only after the job is read, through its backend.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

import d5suite
from d5suite.distributed import framework
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.gathering import disagreements, gather
from d5suite.distributed.meeting import meet
from d5suite.errors import JobError, ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.memory import return_freed_memory
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import InTurns, SamplingSettings
from d5suite.instruments.threads import set_affinity, thread_environment
from d5suite.job import CaseJob, Job, OperationCase, key_of
from d5suite.launch.heartbeat import HeartbeatWriter
from d5suite.measurements import find
from d5suite.measurements.base import Measurement, Step
from d5suite.validate.check import Check, Validation
from d5suite.worker.passes import take_memory, take_time
from d5suite.worker.ranks import RankInfo, code_digest, share_resources, watch_ranks
from d5suite.worker.turns import Channel, MeasurementTurns
from d5suite.worker.writer import ResultWriter
from d5suite.workloads.base import Workload


class Prepared(NamedTuple):
    """A measurement of a case, ready to be proved and timed."""

    key: str
    measurement: Measurement
    step: Step
    memory: dict[str, Any]
    validation: Validation


def run(
    job: Job,
    writer: ResultWriter,
    rank_info: RankInfo | None = None,
    heartbeat: HeartbeatWriter | None = None,
    channel: Channel | None = None,
) -> None:
    """Carry out a job, or one rank's part, recording into ``writer`` as it goes.

    With a channel, samples are taken in turn with other workers', where that can be done.

    Raises
    ------
    D5Error
        If nothing of the job can run. A measurement that fails is recorded and costs only itself.
    """
    notes: list[str] = []
    rank_info = rank_info or RankInfo()
    job, cpus = share_resources(job, rank_info, notes)
    os.environ.update(thread_environment(job.threads))
    cpus = set_affinity(job.threads, notes, cpus)
    if "reference" in job.passes:
        _compute_references(job, writer)
        return
    writer.result.threads = {"budget": job.threads, "cpus": cpus, "notes": notes}
    with contextlib.ExitStack() as communicating:
        if heartbeat is not None:
            communicating.callback(watch_ranks(rank_info, heartbeat, writer))
        try:
            for case, workload in _workloads(job, writer, rank_info, heartbeat or HeartbeatWriter(None), communicating):
                _agree(job, workload, writer)
                _measure(job, case, workload, writer, channel)
        except BaseException:
            communicating.pop_all()  # to close waits for the other ranks, and this one has failed
            raise


def _compute_references(job: Job, writer: ResultWriter) -> None:
    from d5suite.workloads.operator import compute_reference

    for case in job.cases:
        assert isinstance(case, OperationCase)
        first, *others = case.keys()
        found = writer.attempt(
            first,
            "computing the reference of",
            lambda case=case: compute_reference(job, case),  # type: ignore[misc]
        )
        for key in (first, *others):
            if found is not None:
                writer.result.references[key] = found
            else:
                writer.result.failures[key] = writer.result.failures[first]
    writer.write()


def _workloads(
    job: Job, writer: ResultWriter, rank_info: RankInfo, heartbeat: HeartbeatWriter, communicating: contextlib.ExitStack
) -> Iterator[tuple[CaseJob, Workload]]:
    """Start the framework, meet the other ranks, and build each case's workload in turn."""
    from d5suite.instruments.environment import describe
    from d5suite.workloads.collective import CollectiveWorkload
    from d5suite.workloads.network import NetworkWorkload
    from d5suite.workloads.operator import OperatorWorkload

    kinds: dict[str, type[Workload]] = {
        each.kind: each for each in (NetworkWorkload, OperatorWorkload, CollectiveWorkload)
    }
    writer.phase("starting the framework")
    selection = kinds[job.cases[0].kind].select(job)
    backend = selection.backend
    backend.check(device=job.device, precision=job.precision)
    runtime = backend.load("runtime", selection.mode)
    runtime.configure(threads=job.threads, seed=job.seed, device=job.device)
    communicator = None
    if job.distributed is not None:
        writer.phase("meeting the other ranks")
        communicator = open_communicator(
            job.distributed.communicator, job.distributed.algorithm,
            rank=rank_info.rank, size=rank_info.ranks, meeting=rank_info.meeting,
        )  # fmt: skip
        communicating.callback(communicator.close)
        heartbeat.waits, heartbeat.framework = lambda: communicator.busy, framework.calls
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
    result = writer.result
    result.backend = {
        "name": backend.name,
        "mode": selection.mode,
        "version": backend.version() or versions.get(backend.name, "unknown"),
        "versions": versions,
    }
    result.device = {"kind": job.device, "name": runtime.device_name(job.device)}
    gc.collect()
    gc.freeze()  # else each collection, several per measurement, takes up to 0.2 s for the framework's objects
    result.environment = describe(["d5suite", "numpy", "onnx", "onnxruntime", "pillow", "h5py"])
    writer.write()
    for kind in dict.fromkeys(case.kind for case in job.cases):
        result.ceilings.update(kinds[kind].ceilings(job, selection, writer.phase))
    for case in job.cases:
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
        if communicator is not None:
            workload.communicator, workload.heartbeat = communicator, heartbeat
        yield case, workload
        gc.collect()  # native objects hold large arrays in reference cycles


def _agree(job: Job, workload: Workload, writer: ResultWriter) -> None:
    """Compare what all ranks must have in common, before anything is trained.

    Raises
    ------
    JobError
        If they disagree.
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


def _measure(job: Job, case: CaseJob, workload: Workload, writer: ResultWriter, channel: Channel | None) -> None:
    """Do everything for one case: prove all, then time, because measurements share executors."""
    result = writer.result
    ready = [found for name in case.measurements if (found := _prepare(job, case, name, workload, writer)) is not None]
    ready = [each for each in ready if _prove(each, workload, writer)]
    workload.free_validation()
    if channel is not None:  # others live beside this worker
        return_freed_memory()
    if ready:
        result.facts[case.name] = workload.facts()
    for each in ready:
        workload.tell = lambda where, kept, key=each.key: writer.tell(key, where, kept)  # type: ignore[misc]
        turns = MeasurementTurns(channel, each.key) if channel and each.measurement.takes_turns else None
        _time(each, workload, writer, turns)


def _prepare(job: Job, case: CaseJob, name: str, workload: Workload, writer: ResultWriter) -> Prepared | None:
    key = key_of(case.name, name)

    def prepare() -> Prepared:
        measurement = find(name, case.files.get(name))()
        step = measurement.prepare(workload)
        memory: dict[str, Any] = {"missing": measurement.without_memory}
        if measurement.takes_memory and "memory" in job.passes:
            writer.phase(f"taking peak memory of {key}", key)
            memory = take_memory(workload, step)
        else:
            step.call_first()
        step.reset()
        return Prepared(key, measurement, step, memory, Validation())

    return writer.attempt(key, "preparing", prepare)


def _prove(each: Prepared, workload: Workload, writer: ResultWriter) -> bool:
    def prove() -> bool:
        try:
            each.validation.require(each.measurement.prove(workload, each.step))
        except ValidationError as error:
            raise each.measurement.explain(workload, each.step, error) from error
        finally:
            writer.result.validation[each.key] = each.validation.to_dict()
        return True

    return writer.attempt(each.key, "validating", prove) is not None


def _time(each: Prepared, workload: Workload, writer: ResultWriter, turns: MeasurementTurns | None) -> None:
    settings: SamplingSettings = workload.settings
    if turns is not None:
        settings = InTurns(**settings.to_dict(), turns=turns)

    def prove(samples: Samples, first: Iterable[Check]) -> None:
        """Prove what was timed; if that fails, what was measured is kept beside the result."""
        writer.phase(f"proving what was timed of {each.key}", each.key)
        start = now()
        try:
            each.validation.require(
                itertools.chain(first, each.measurement.check_timed(workload, each.step)),
                hint=f"So what was timed is wrong. Its {len(samples.samples_s)} samples (median "
                f"{samples.median_s * 1e3:.4g} ms) are set aside under 'kept' in the worker's result file.",
            )
        except Exception:
            taken = samples.to_dict()
            kept = writer.result.kept.setdefault(each.key, {"series": {}})
            kept |= {"samples": taken, "series": {**kept["series"], "samples_s": taken["samples_s"]}}
            writer.result.kept[each.key] = kept
            raise
        finally:
            writer.result.validation[each.key] = each.validation.to_dict()
        took_s.append(now() - start)

    took_s: list[float] = []

    def time() -> bool:
        measured = take_time(workload, each.measurement, each.step, settings, each.memory, prove)
        if not (turns is None or turns.taken):
            raise JobError(
                f"{each.measurement.name} has taken no turns",
                hint="Sample its step with d5suite.instruments.sampling, or set takes_turns = False.",
            )
        if workload.job.ranks > 1:
            workload.communicator.barrier()  # what one rank could not prove is a result of none
        extra = {**measured.extra, "proof_after_s": took_s[-1]}
        writer.result.measurements[each.key] = replace(measured, extra=extra)
        writer.result.kept.pop(each.key, None)
        samples = measured.samples
        low, high = samples["median_ci_s"]
        print(
            f"d5suite: {each.key}: median {samples['median_s'] * 1e3:.4g} ms "
            f"({samples['median_ci_confidence']:.0%} interval {low * 1e3:.4g} to {high * 1e3:.4g} ms, "
            f"{len(samples['samples_s'])} samples)",
            flush=True,
        )
        return True

    writer.attempt(each.key, "measuring", time)
    writer.write()
