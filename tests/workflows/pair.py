"""Two programs that only wait and pass numbers on, and runs of them on threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from d5suite.backends import select
from d5suite.distributed.communicators.threads import run
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import Distributed, Job, WorkflowCase
from d5suite.levels.distributed import Communicator
from d5suite.measurements.distributed.workflow import WorkflowStep
from d5suite.workflows.base import Program
from d5suite.workflows.couplings.base import Field, Fields
from d5suite.workloads.workflow import WorkflowWorkload


class Giver(Program):
    """Gives a number per step, after a pause: the pauses of ``pauses`` in turn."""

    name = "giver"
    role = "simulation"
    options: ClassVar[Mapping[str, object]] = {"pauses": [0.0], "unit": "K", "shape": [4]}

    def gives(self) -> Mapping[str, Fields]:
        return {"numbers": {"value": Field(tuple(self.option("shape")), "float64", self.option("unit"))}}

    def start(self) -> None:
        self.total = 0

    def step(self, step: int) -> bool:
        pauses = self.option("pauses")
        time.sleep(pauses[step % len(pauses)])
        self.total += step
        self.place.out["numbers"].put(step, {"value": np.full(self.option("shape"), self.total, float)})
        return True

    def state(self) -> dict[str, np.ndarray]:
        return {"total": np.array(self.total)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self.total = int(state["total"])

    def result(self) -> dict[str, np.ndarray]:
        return {"total": np.array(float(self.total))}


class Taker(Program):
    """Adds up what it takes from all, after a pause each; with ``forgets`` its state is lost."""

    name = "taker"
    role = "training"
    options: ClassVar[Mapping[str, object]] = {"pause": 0.0, "unit": "K", "late": 0.0, "forgets": False}

    def takes(self) -> Mapping[str, Fields]:
        return {"numbers": {"value": Field((4,), "float64", self.option("unit"))}}

    def start(self) -> None:
        self.sum, self.steps = 0.0, list[int]()

    def step(self, step: int) -> bool:
        if step == 0:
            time.sleep(self.option("late"))
        found = self.place.into["numbers"].get_all()
        if found is None:
            return False
        time.sleep(self.option("pause"))
        self.sum += sum(float(each.arrays["value"].sum()) for each in found)
        self.steps.append(found[0].step)
        return True

    def state(self) -> dict[str, np.ndarray]:
        return {} if self.option("forgets") else {"sum": np.array(self.sum)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self.sum = float(state.get("sum", 0.0))

    def result(self) -> dict[str, np.ndarray]:
        return {"sum": np.array(self.sum)}

    def figures(self) -> dict[str, float]:
        return {"taken": float(len(self.steps))}


def case(
    *, kind: str = "memory", policy: str = "block", capacity: int = 2, steps: int = 8, givers: int = 1,
    write_s: float = 0.0, checkpoint_every: int = 0, giver: Mapping[str, Any] | None = None,
    taker: Mapping[str, Any] | None = None,
) -> WorkflowCase:  # fmt: skip
    """Return a workflow of both."""
    return WorkflowCase(
        name="pair", preset="smoke", measurements=["workflow"],
        sampling={"min_rounds": 1, "max_rounds": 1, "max_time_s": 0.0, "warmup": "off"},
        components=[
            {"name": "giving", "program": "giver", "file": __file__, "ranks": givers, "options": dict(giver or {})},
            {"name": "taking", "program": "taker", "file": __file__, "ranks": 1, "options": dict(taker or {})},
        ],
        couplings=[{"name": "numbers", "source": "giving", "target": "taking", "kind": kind, "policy": policy,
                    "capacity": capacity, "write_s": write_s}],
        steps=steps, checkpoint_every=checkpoint_every,
    )  # fmt: skip


def on_threads(of: WorkflowCase, work: Callable[[WorkflowWorkload], Any], folder: Path, ranks: int = 2) -> list[Any]:
    """Call a function with the workload of each rank, in a thread each."""
    job = Job(
        {"name": "deep500", "mode": "reference"}, "cpu", "fp32", ranks, 0, [of], ranks=ranks, distributed=Distributed()
    )

    def one(communicator: Communicator) -> Any:
        workload = WorkflowWorkload(job, of, select("deep500"))
        workload.communicator, workload.meeting = communicator, folder
        return work(workload)

    return run(ranks, one)


def measured(of: WorkflowCase, folder: Path, ranks: int = 2) -> dict[str, Any]:
    """Return what a measurement of the workflow records."""

    def work(workload: WorkflowWorkload) -> dict[str, Any]:
        step = WorkflowStep(workload)
        with step:
            samples = step.time(SamplingSettings.from_dict(of.sampling))
        return step.record(samples)

    answers: Sequence[dict[str, Any]] = on_threads(of, work, folder, ranks)
    return answers[0]
