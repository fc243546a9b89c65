"""The process that runs one job: ``python -m d5suite.worker job.json``.

It sets the thread budget, validates, measures, and writes the result file anew after each step, so that whatever ends
it early costs only what was not yet measured. Imports a framework only after the job is read, through its backend.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from d5suite.errors import D5Error, JobError
from d5suite.files import write_json
from d5suite.job import RESULT_SCHEMA, Job
from d5suite.launch.local import PARENT
from d5suite.measure.threads import set_affinity, thread_environment

PR_SET_PDEATHSIG = 1
"""From Linux's ``prctl.h``."""


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends, however it does (Linux: prctl(2)).

    A session that is killed itself cannot end its workers, and one that goes on would disturb what is measured next.
    """
    if sys.platform == "linux" and os.getppid() == parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended just before
            os.kill(os.getpid(), signal.SIGKILL)


def result_path(job_path: Path) -> Path:
    """Where a job's result lies: beside the job file, ``name.result.json`` for ``name.job.json`` or ``name.json``."""
    name = job_path.name.removesuffix(".json").removesuffix(".job")
    return job_path.with_name(f"{name}.result.json")


def main(arguments: list[str] | None = None) -> int:
    """Run a job file.

    Returns
    -------
    int
        0 if every measurement succeeded, 1 if one failed, 2 if the job could not run at all.
    """
    parser = argparse.ArgumentParser(prog="python -m d5suite.worker", description="Run one d5suite job file.")
    parser.add_argument("job", type=Path, help="the job file")
    parser.add_argument("--result", type=Path, help="the result file (default: beside the job file)")
    options = parser.parse_args(arguments)
    end_with(int(os.environ.pop(PARENT, "0")))
    path = options.result or result_path(options.job)
    try:
        job = Job.load(options.job)
        result = _Result(path, job)
    except (D5Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        try:
            run(job, result)
        except D5Error as error:
            result.fail(error)
            print(f"error: {error}", file=sys.stderr)
            return 2
        result.finish()
    except OSError as error:
        print(f"error: {error.filename or path}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 1 if result.data["failures"] else 0


def run(job: Job, result: _Result) -> None:
    """Carry out a job, recording into ``result`` as it goes.

    Raises
    ------
    D5Error
        If nothing of the job can run. A measurement that fails is recorded and costs only itself.
    """
    os.environ.update(thread_environment(job.threads))
    notes: list[str] = []
    cpus = set_affinity(job.threads, notes)

    from d5suite.measure.environment import describe
    from d5suite.measure.machine import disturbance, snapshot
    from d5suite.operator_workload import OperatorWorkload, References
    from d5suite.workload import Workload

    if job.task == "reference":
        references = References(job)
        for name in job.measurements:
            result.attempt(name, "computing the reference of", partial(references.compute, name))
        return
    gpu = job.device != "cpu"
    result.phase("starting the framework")
    workload = OperatorWorkload(job) if job.operations else Workload(job)
    backend = workload.backend
    runtime = backend.load("runtime", workload.selection.mode)
    runtime.configure(threads=job.threads, seed=job.seed, device=job.device)
    problem = runtime.device_problem(job.device)
    if problem:
        raise JobError(f"backend {backend.name!r} cannot use device {job.device!r}: {problem}")
    versions = runtime.versions()
    result.data["backend"] = {
        "name": backend.name,
        "mode": workload.selection.mode,
        "version": backend.version() or versions.get(backend.name, "unknown"),
        "versions": versions,
    }
    result.data["device"] = {"kind": job.device, "name": runtime.device_name(job.device)}
    result.data["threads"] = {"budget": job.threads, "cpus": cpus, "notes": notes}
    result.data["environment"] = describe(["d5suite", "numpy", "onnx", "onnxruntime", "pillow", "h5py"])
    result.write()

    if job.task == "memory" and isinstance(workload, Workload):
        for name in job.measurements:
            result.attempt(name, "peak memory of", partial(workload.peak_memory, name))
        return

    if isinstance(workload, OperatorWorkload):
        result.phase("measuring the machine's ceilings")
        result.data["ceilings"] = workload.ceilings()
        result.write()
    if isinstance(workload, Workload):
        workload.tell = result.tell
    for group in workload.order():
        ready = []
        for name in group:

            def validate(name: str = name) -> dict[str, Any]:
                try:
                    workload.validate(name)
                finally:
                    if name in workload.validations:
                        result.data["validation"][name] = workload.validations[name].to_dict()
                return {}

            if result.attempt(name, "validating", validate):
                ready.append(name)
        workload.release()
        if ready and isinstance(workload, Workload):
            result.data["dataset"] = workload.dataset
        for name in ready:

            def measure(name: str = name) -> dict[str, Any]:
                before = snapshot(gpu=gpu)
                measured = workload.measure(name)
                found = disturbance(before, snapshot(gpu=gpu), own_pids=[os.getppid()], threads=job.threads)
                return {
                    "level": workload.level(name),
                    "samples": measured.samples.to_dict(),
                    "items": measured.items,
                    "macs": measured.macs,
                    "series": measured.series,
                    "extra": measured.extra,
                    "machine": found.to_dict(),
                }

            result.attempt(name, "measuring", measure)


class _Result:
    """The result file, rewritten atomically at each change of phase."""

    def __init__(self, path: Path, job: Job) -> None:
        self.path = path
        self.start = time.monotonic()
        self.data: dict[str, Any] = {
            "schema": RESULT_SCHEMA,
            "status": "running",
            "phase": "starting",
            "measurement": None,
            "recipe": job.recipe,
            "task": job.task,
            "validation": {},
            "measurements": {},
            "failures": {},
            "kept": {},
        }
        self.write()

    def write(self) -> None:
        write_json(self.path, self.data)

    def phase(self, text: str, measurement: str | None = None) -> None:
        self.data["phase"] = text
        self.data["measurement"] = measurement
        self.write()
        print(f"d5suite: {time.monotonic() - self.start:6.1f} s  {text}", flush=True)

    def tell(self, where: str, kept: dict[str, Any]) -> None:
        """Where the measurement in hand is, and what is to be kept of it should it fail."""
        name = str(self.data["measurement"])
        self.data["kept"][name] = kept
        self.phase(f"measuring {name}: {where}", name)

    def attempt(self, name: str, doing: str, work: Callable[[], dict[str, Any]]) -> bool:
        """Do one piece of work for a measurement; record what it gives, or why it failed."""
        self.phase(f"{doing} {name}", name)
        try:
            found = work()
        except D5Error as error:
            self.data["failures"][name] = {"type": type(error).__name__, "message": str(error)}
            print(f"error: {name}: {error}", file=sys.stderr)
        except Exception as error:
            self.data["failures"][name] = {
                "type": type(error).__name__,
                "message": "".join(traceback.format_exception(error)[-8:]),
            }
            traceback.print_exc()
        else:
            self.data["kept"].pop(name, None)
            if found:
                self.data["measurements"][name] = found
            if "samples" in found:
                samples = found["samples"]
                low, high = samples["median_ci_s"]
                print(
                    f"d5suite: {name}: median {samples['median_s'] * 1e3:.4g} ms "
                    f"({samples['median_ci_confidence']:.0%} interval {low * 1e3:.4g} to {high * 1e3:.4g} ms, "
                    f"{len(samples['samples_s'])} samples)",
                    flush=True,
                )
        self.write()
        return name not in self.data["failures"]

    def fail(self, error: Exception) -> None:
        self.data.update(status="failed", error={"type": type(error).__name__, "message": str(error)})
        self.write()

    def finish(self) -> None:
        self.data.update(status="done", phase="done", measurement=None)
        self.write()


if __name__ == "__main__":
    sys.exit(main())
