"""Measurements of ranks that add numbers or train, and of which rank 1 misbehaves half-way.

Which fault it is stands in the environment; only the case called ``faulty`` has it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.distributed.distributed_step import DistributedTraining
from d5suite.measurements.distributed.steps import DistributedStep
from d5suite.measurements.tables import TIMES
from d5suite.validate.check import Check

FAULT, NOTE, WHERE = "RANKED_FAULT", "RANKED_FAULT_NOTE", "RANKED_FAULT_RANK"
"""Environment variables: the fault, where to note when it happens, and its rank, by default 1."""

STEPS = 40

WORKS_S = 8.0
"""Seconds of long work."""


class AddingStep(Step):
    def __init__(self, workload: Any) -> None:
        self.workload, self.made = workload, 0

    def run(self) -> object:
        values = np.ones(4)
        self.workload.communicator.all_reduce(values)
        return values

    def synchronize(self) -> None:
        pass

    def time(self, settings: SamplingSettings) -> Samples:
        times = []
        self.workload.heartbeat.steps = 1
        for step in range(STEPS):
            if step == STEPS // 2 and self.faulty:
                misbehave(os.environ[FAULT], self.workload.heartbeat)
            elif step == STEPS // 2 and self.workload.case.name == "faulty" and os.environ[FAULT] == "stopped inside":
                time.sleep(3)  # the other rank is inside before
            start = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - start)
            self.workload.heartbeat.steps += 1
            time.sleep(0.05)  # as a step that computes
        self.workload.heartbeat.steps = 0
        return Samples(times[0], [], times, True, "rounds", settings.confidence)

    @property
    def faulty(self) -> bool:
        return self.workload.case.name == "faulty" and self.workload.communicator.rank == int(os.environ.get(WHERE, 1))


def timed_sum(workload: Any, step: AddingStep) -> Iterable[Check]:
    yield Check("sum afterwards", float(step.faulty and os.environ[FAULT] == "lies"), 0.0)


class Adding(Measurement):
    name = "adding"
    level = 3
    checks_after = (timed_sum,)
    table = TIMES

    def prepare(self, workload: Any) -> Step:
        return AddingStep(workload)

    def prove(self, workload: Any, step: Step) -> Iterable[Check]:
        found = step.run()
        yield Check("sum", float(abs(np.asarray(found) - workload.communicator.size).max()), 0.0)


class TrainingStep(DistributedStep):
    def _next_feed(self) -> Any:
        if self.workload.heartbeat.steps > 3 and self.communicator.rank == int(os.environ.get(WHERE, 1)):
            misbehave(os.environ[FAULT], self.workload.heartbeat)
        return super()._next_feed()


class Training(DistributedTraining):
    name = "training"
    takes_memory = False

    def prepare(self, workload: Any) -> Step:
        return TrainingStep(workload)


def misbehave(fault: str, heartbeat: Any) -> None:
    Path(os.environ[NOTE]).write_text(str(time.monotonic()))
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "stopped inside":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {os.getpid()}"])
    if fault == "works":  # one call of native code that keeps the interpreter to itself
        start, count = time.monotonic(), 10**7
        sum(range(count))
        sum(range(int(count * WORKS_S / (time.monotonic() - start))))
    if fault == "hangs":
        threading.Event().wait()
    if fault == "spins":  # sleeps as long as it still counts as computing: the test lasts 20 s
        while True:
            sum(range(10**6))
            time.sleep(0.1)
    if fault == "raises":
        raise RuntimeError("the kernel is missing")
    if fault == "disk":  # what a full disk looks like to a writer; Python's own files are not to be cut
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    if fault == "memory":
        hoard = []
        while True:
            hoard.append(np.ones(8 << 20))
            heartbeat.steps += 1  # on a slow machine it would hang, before it has too much
    if fault == "orphan":
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", os.environ[NOTE]], start_new_session=True
        )
        threading.Event().wait()
