"""A simulated worker: its step takes what a function says, and no process starts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from d5suite.backends import select
from d5suite.cases.case import Settings
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.tuning import confirm, trials, whole_runs
from d5suite.tuning.space import Change
from d5suite.tuning.tune import Tuning, TuningRequest

Cost = Callable[[Change], Mapping[str, Any]]
"""Returns ``step_s`` of a change, and as far as it matters ``memory``, ``alive``, ``joules`` of a
step, ``slow`` (how many times as long one step in 20 takes), and ``fails``."""

NOISE, ITEMS = 0.003, 8


class SimulatedWorker:
    """Waits for its turns; see `d5suite.launch.turns.TurnWorker`."""

    is_late = False

    def __init__(self, cost: Mapping[str, Any], draw: random.Random) -> None:
        self._cost, self._draw, self._taken, self.sample_s = cost, draw, 0, float(cost["step_s"])

    def take(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            self._taken += 1
            slow = float(self._cost.get("slow", 1.0)) if self._taken % 20 == 0 else 1.0
            found.append(self._cost["step_s"] * slow * math.exp(self._draw.gauss(0, NOISE)))
        return found

    def rest(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def leave(self, reason: str) -> None:
        pass


class Simulation:
    """All launches of a test.

    Attributes
    ----------
    changes : list of Change
        What was launched, in order.
    drift : float
        By how much each launch is slower than the one before.
    """

    def __init__(self, cost: Cost, *, drift: float = 0.0) -> None:
        self.cost, self.changes, self.drift, self.draw = cost, list[Change](), drift, random.Random(0)

    def job(self, session: Any, wanted: Any, change: Change, launch: int, *, in_turns: bool | None = None) -> Any:
        found = dict(self.cost(change))
        found["step_s"] *= (1 + self.drift) ** len(self.changes)
        self.changes.append(change)
        worker, items = SimulatedWorker(found, self.draw), ITEMS * math.exp(change.items)
        samples = worker.take(200)
        memory = {"peak_bytes": found.get("memory", 100), "alive_bytes": found.get("alive", 10)}
        record = {
            "median_s": found["step_s"], "throughput": {"value": items / found["step_s"]}, "machine": {},
            "peak_memory_bytes": memory["peak_bytes"], "memory": memory, "layers": found.get("layers"),
            "energy": {"joules_per_item": found["joules"] / items} if "joules" in found
            else {"missing": "this machine counts no energy of its CPUs"},
        }  # fmt: skip
        result = MeasurementResult(record, samples)
        if "fails" in found:
            result = MeasurementResult(failure=found["fails"])
        return SimpleNamespace(ready=lambda: None if "fails" in found else worker, end=lambda: result,
                               close=lambda: None)  # fmt: skip


def simulate(monkeypatch: pytest.MonkeyPatch, cost: Cost, *, drift: float = 0.0) -> Simulation:
    """Let trials and fresh launches simulate their workers."""
    simulation = Simulation(cost, drift=drift)
    for module in (trials, whole_runs, confirm):
        monkeypatch.setattr(module, "TrialJob", simulation.job)
    return simulation


def tuning(
    folder: Path, plan: TuningRequest, *, threads: int = 2, said: list[str] | None = None, **kind: Any
) -> Tuning:
    """Return the tuning of a measurement on PyTorch, whose workers are simulated."""
    facts = {"name": "inference", "takes_turns": True, "trains": False, "loads": False, "takes_layers": False, **kind}
    case: Any = SimpleNamespace(name="small")
    measurement: Any = SimpleNamespace(**facts)
    memory = facts.get("memory_bytes", 2**40)
    return Tuning(
        Wanted(case, measurement, select("torch")), Settings(threads=threads, jobs=folder, memory_bytes=memory), plan,
        (said if said is not None else []).append, lambda course: None,
    )  # fmt: skip
