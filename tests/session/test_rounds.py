"""Backends that take turns, with workers that only pretend: who runs when, what drifts, dies, is
wrong, interrupted or too large, and what is recorded of it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from d5suite import SGD, Recipe
from d5suite.backends import select
from d5suite.cases.case import Settings
from d5suite.cases.problem import Problem, ProblemCase
from d5suite.cases.recipe import Preset
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import Job
from d5suite.launch.base import Launch, Limits
from d5suite.launch.turns import TurnWorker
from d5suite.measurements import find
from d5suite.report.compare import TableRow
from d5suite.report.contests import Contest, contests_of
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.rounds import ROUNDS, can_take_turns, measure_in_turns, samples_of_turn
from d5suite.session.session import Session

NAMES = ("torch", "jax", "mxnet")
SAMPLING = SamplingSettings(max_time_s=12.0)
MEMORY = 2**50


@dataclass
class Machine:
    """A machine whose clock only samples move, and what workers pretend on it.

    Attributes
    ----------
    sample_s : callable
        Seconds of a worker's sample, by the clock; None if it dies of it.
    fails : dict
        Why a measurement fails after it was timed, by backend, measurement and launch.
    interrupt : (str, int, int) or None
        Measurement, launch and round in which somebody presses Ctrl-C.
    resident, peaks : dict of str to int
        Bytes of a worker, and at most, by backend, else none.
    turns : list of str
        Who has taken a turn, started, was let run alone or beside others, waits for its first turn,
        and was told that its turns have ended.
    looks : int
        How often the session looks at a worker until it has proved; 0 if workers ask nothing.
    """

    sample_s: Callable[[Worker, float], float | None]
    fails: dict[tuple[str, str, int], MeasurementResult] = field(default_factory=dict)
    interrupt: tuple[str, int, int] | None = None
    resident: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    turns: list[str] = field(default_factory=list)
    looks: int = 0


class Worker:
    """A worker that pretends; `TurnWorker` in its place."""

    machine: Machine
    is_late = False

    def __init__(self, job: Job, path: Path, launch: Launch, *, beside: bool) -> None:
        self.name, self.launch = path.name.split(".")[0], int(path.name.split(".")[1])
        self.memory_bytes, self.died, self.asks = launch.limits.memory_bytes, False, ""
        self.begin("")

    def begin(self, measurement: str) -> None:
        self.measurement, self.given, self.turns = measurement, list[float](), 0
        self.sample_s, self.took_s = 1.0, 0.0

    @property
    def peak_bytes(self) -> int:
        return self.machine.peaks.get(self.name, self.resident_bytes())

    def resident_bytes(self) -> int:
        return self.machine.resident.get(self.name, 0)

    def take(self, count: int, *, wakes: bool = True) -> list[float] | None:
        machine = self.machine
        self.turns += 1
        if machine.interrupt == (self.measurement, self.launch, self.turns):
            raise KeyboardInterrupt
        machine.turns.append(self.name)
        taken = []
        for _ in range(count):
            time = machine.sample_s(self, machine.now)
            if time is None:
                self.died = True
                return None
            machine.now += time
            taken.append(time)
        self.given += taken
        self.took_s = sum(taken)
        return taken

    def rest(self) -> None:
        pass

    pause = resume = rest

    def let(self) -> None:
        self.machine.turns.append(f"{self.name} {self.asks}")
        self.asks = ""

    def finish(self) -> None:
        self.machine.turns.append(f"{self.name} ends")


class Pretender:
    """A session whose workers pretend."""

    progress = provisional = None

    def __init__(self, machine: Machine, memory: int) -> None:
        self.machine, self.settings = machine, Settings(memory_bytes=memory, threads=2)
        self.found: dict[tuple[str, str], MeasurementResult] = {}

    def sampling(self, wanted: Wanted) -> SamplingSettings:
        return SAMPLING

    def known(self, wanted: Wanted) -> MeasurementResult | None:
        return self.found.get((wanted.runner, wanted.measurement.name))

    def keep(self, wanted: Wanted, result: MeasurementResult) -> None:
        self.found[wanted.runner, wanted.measurement.name] = result

    def launch(self, job: Job, path: Path, limit_s: float, memory_bytes: int) -> Launch:
        return Launch(Limits(limit_s, memory_bytes))

    def run(
        self, batch: Sequence[Wanted], results: dict[str, MeasurementResult], start: Any, launch: int
    ) -> Generator[tuple[str, TurnWorker], None, None]:
        name = batch[0].runner

        def started() -> Worker:
            job = Job({"name": name, "mode": "any"}, "cpu", "fp32", threads=1, seed=0, cases=[])
            self.machine.turns.append(f"{name} starts")
            return cast(Worker, start(job, Path(f"{name}.{launch}.job.json"), 60.0))

        worker = started()
        for asked in ("alone", "beside", "alone") if self.machine.looks else ():
            worker.asks = asked
            while worker.asks:
                yield "", cast(TurnWorker, worker)
            for _ in range(self.machine.looks if asked == "beside" else 0):
                yield "", cast(TurnWorker, worker)
        if self.machine.looks:
            self.machine.turns.append(f"{name} is ready")
        for place, each in enumerate(batch):
            worker.begin(each.measurement.name)
            if self.machine.resident.get(name, 0) > worker.memory_bytes:
                return
            if each.measurement.takes_turns:
                try:
                    yield each.key, cast(TurnWorker, worker)
                except GeneratorExit:
                    results[each.key] = MeasurementResult(failure="the worker was interrupted")
                    raise
            if worker.died:
                results[each.key] = MeasurementResult(failure="the worker died")
                if place + 1 < len(batch):
                    worker = started()
                continue
            failed = self.machine.fails.get((name, each.measurement.name, launch))
            results[each.key] = failed or MeasurementResult(
                record=_record(worker.given or [1.0], launch), samples_s=worker.given or [1.0]
            )


def _record(samples: list[float], launch: int) -> dict[str, Any]:
    """The record of a launch: the second one needs most memory and is least exact."""
    checks = [{"name": "outputs", "error": 0.5 if launch == 2 else 0.1, "tolerance": 1.0}]
    return {
        "median_s": statistics.median(samples), "throughput": {"value": 1.0}, "steady": True,
        "machine": {"disturbed": False, "reasons": [], "taken_share": 0.0},
        "peak_memory_bytes": 200 if launch == 2 else 100,
        "validation": {"passed": True, "checks": checks},
    }  # fmt: skip


MEASUREMENTS = ("inference", "gradient", "step_breakdown")


def recipe() -> Recipe:
    return Recipe("r", "lenet5", "digits", SGD(0.1), {"smoke": Preset(32, 4, 10), "reduced": Preset(32, 4, 10)})


def run(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    launches: int = 1,
    memory: int = MEMORY,
    free: int = MEMORY,
    names: Sequence[str] = NAMES,
) -> dict[tuple[str, str], MeasurementResult]:
    """Measure on three backends; by backend and measurement what was found."""
    session = Pretender(machine, memory)
    monkeypatch.setattr(Worker, "machine", machine, raising=False)
    monkeypatch.setattr("d5suite.session.rounds.TurnWorker", Worker)
    monkeypatch.setattr("d5suite.session.turns.run_beside", lambda workers: None)
    monkeypatch.setattr("d5suite.session.rounds.free_memory", lambda device: {"in this machine's memory": free})
    jobs = [[Wanted(recipe(), find(each), select(name)) for each in MEASUREMENTS] for name in names]
    with contextlib.suppress(KeyboardInterrupt):
        measure_in_turns(cast(Session, session), jobs, launches)
    return session.found


def contests(found: dict[tuple[str, str], MeasurementResult]) -> dict[str, Contest[TableRow]]:
    """The contests by measurement, as a report ranks them."""
    rows: dict[str, list[TableRow]] = {}
    for (backend, measurement), each in found.items():
        if each.record is not None:
            record = {**each.record, "data": each.samples_s, "place": backend, "ranks": 1}
            rows.setdefault(measurement, []).append(TableRow(measurement, backend, "", record))
    ranked = {name: contests_of(own, in_turn=True) for name, own in rows.items()}
    return {name: contest for name, several in ranked.items() for contest in several}


def failures(found: dict[tuple[str, str], MeasurementResult]) -> dict[tuple[str, str], str | None]:
    return {key: each.failure for key, each in found.items() if each.record is None}


TIMES = {"torch": 1.0, "jax": 1.01, "mxnet": 0.9}


def steady(worker: Worker, now: float) -> float:
    return TIMES[worker.name]


def test_rounds_go_there_and_back_one_worker_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(steady)
    found = run(monkeypatch, machine)
    turns = [each for each in machine.turns if " " not in each]
    there, back = list(NAMES), list(reversed(NAMES))
    assert turns == (there + back) * (len(turns) // 6) and len(turns) >= 2 * 3 * ROUNDS
    assert not failures(found)
    (record,) = [each.record for key, each in found.items() if key == ("jax", "gradient")]
    assert record is not None and record["turns"][0]["beside"] == ["mxnet", "torch"]
    assert "turns" not in (found["jax", "step_breakdown"].record or {})


def test_the_longest_proofs_follow_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda worker, now: 1.0)
    run(monkeypatch, machine, names=("deep500", "jax", "tensorflow", "torch", "mxnet"))
    started = [each.removesuffix(" starts") for each in machine.turns if each.endswith("starts")]
    assert started == ["tensorflow", "deep500", "jax", "torch", "mxnet"]  # deep500 alone is at the reduced size


def test_two_prove_at_once_while_the_next_one_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda worker, now: 1.0, looks=3)
    run(monkeypatch, machine, names=("torch", "mxnet", "tensorflow", "keras"))
    told = machine.turns.index
    assert told("torch alone") < told("keras starts") < told("torch is ready")  # Keras has slow float64
    assert told("keras beside") < told("mxnet alone") < told("mxnet beside") < told("keras is ready")
    assert told("mxnet alone") < told("tensorflow starts") < told("keras is ready") < told("tensorflow alone")
    assert max(told(f"{each} is ready") for each in ("torch", "keras", "mxnet", "tensorflow")) < told("torch")


def test_the_first_of_a_preset_proves_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes their references. A backend at the reduced size shares none."""
    machine = Machine(lambda worker, now: 1.0, looks=3)
    run(monkeypatch, machine, names=("deep500", "torch", "jax"))
    told = machine.turns.index
    assert told("torch beside") < told("deep500 alone") < told("torch is ready") < told("jax alone")


@pytest.mark.parametrize(("resident", "peaks", "beside"), [
    (100, {}, True),
    (300, {}, False),
    (100, {"torch": 250}, True),  # the first one has proved, and needs no more
    (100, {"torch": 400}, False),
    (100, {"jax": 200}, False),  # the second one may need twice as much to prove
])  # fmt: skip
def test_two_prove_at_once_only_if_memory_has_room_for_both(
    resident: int, peaks: dict[str, int], beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(steady, looks=3, resident=dict.fromkeys(NAMES, resident), peaks=peaks)
    run(monkeypatch, machine, memory=1000)
    told = machine.turns.index
    assert (told("mxnet alone") < told("jax is ready")) is beside


def test_workers_with_many_threads_prove_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d5suite.session.rounds.MOST_THREADS", 1)
    machine = Machine(steady, looks=3)
    run(monkeypatch, machine)
    assert machine.turns.index("jax is ready") < machine.turns.index("mxnet alone")


def test_what_drifts_in_time_changes_neither_ranks_nor_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets slower by a third in each round, and two backends differ by 1%."""
    found = run(monkeypatch, Machine(lambda worker, now: TIMES[worker.name] * (1 + now / 9)))
    inference = contests(found)["inference"]
    assert [row.backend for row, _ in inference.standing] == ["mxnet", "torch", "jax"]
    ratios = [ratio.value for _, ratio in inference.standing]
    assert ratios == pytest.approx([1, 1 / 0.9, 1.01 / 0.9], rel=0.02)
    medians = [each.record["median_s"] for each in found.values() if each.record is not None]
    assert max(medians) > 1.5  # so that the drift is one


def test_a_worker_that_dies_in_the_third_round_loses_its_own_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(worker: Worker, now: float) -> float | None:
        is_its_turn = worker.name == "jax" and worker.measurement == "inference" and worker.turns == 3
        return None if is_its_turn else TIMES[worker.name]

    machine = Machine(dies)
    found = run(monkeypatch, machine)
    assert failures(found) == {("jax", "inference"): "the worker died"}
    assert machine.turns.count("jax starts") == 2 and machine.turns.count("torch starts") == 1
    by_group = {group: [row.backend for row, _ in each.standing] for group, each in contests(found).items()}
    assert by_group == {"inference": ["mxnet", "torch"], "gradient": ["mxnet", "torch", "jax"]}
    assert len(found["torch", "inference"].samples_s) >= ROUNDS


def test_an_answer_that_was_wrong_after_timing_has_no_place_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"series": {"samples_s": [1.0]}}
    wrong = MeasurementResult(failure="what was timed is wrong", wrong=True, kept=kept)
    found = run(monkeypatch, Machine(steady, fails={("mxnet", "inference", 1): wrong}))
    assert failures(found) == {("mxnet", "inference"): "what was timed is wrong"}
    assert found["mxnet", "inference"].kept == kept and found["mxnet", "inference"].wrong
    assert [row.backend for row, _ in contests(found)["inference"].standing] == ["torch", "jax"]


def test_workers_near_their_time_limit_are_told_to_prove_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "is_late", True)
    found = run(monkeypatch, Machine(steady))
    assert not failures(found)
    assert all(len(each.samples_s) == 1 for (_, name), each in found.items() if name == "inference")


def test_an_interrupt_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, Machine(steady, interrupt=("gradient", 1, 2)))
    finished = {key for key, each in found.items() if each.record is not None}
    assert finished == {(name, "inference") for name in NAMES}
    found = run(monkeypatch, Machine(steady, interrupt=("gradient", 2, 2)), launches=3)
    launches = {key: len((each.record or {}).get("turns", ())) for key, each in found.items()}
    assert launches == {
        (name, each): count for name in NAMES for each, count in zip(MEASUREMENTS, (2, 1, 0), strict=True)
    }


def test_launches_differ_and_the_interval_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each launch another backend has an unlucky memory layout."""
    unlucky = {1: "torch", 2: "jax", 3: "mxnet"}
    machine = Machine(lambda worker, now: TIMES[worker.name] * (1.1 if unlucky[worker.launch] == worker.name else 1))
    found = run(monkeypatch, machine, launches=3)
    assert not failures(found)
    inference = contests(found)["inference"]
    assert {"torch", "jax"} in [{one.backend, other.backend} for one, other in inference.ties]
    assert {(ratio.method, ratio.n) for _, ratio in inference.standing} == {("launches", 3)}
    kept = found["torch", "inference"].record
    assert kept is not None and kept["median_ci95"][1] > 1.1 * kept["median_s"]  # not that of all samples
    assert (kept["peak_memory_bytes"], kept["validation"]["checks"][0]["error"]) == (200, 0.5)
    one = run(monkeypatch, Machine(steady))["torch", "inference"]
    assert len(found["torch", "inference"].samples_s) == 3 * len(one.samples_s)
    assert machine.turns.count("jax starts") == 3
    assert found["torch", "step_breakdown"].samples_s == [1.0]  # of the first launch


@pytest.mark.parametrize("wrong", [True, False])
def test_what_fails_in_a_later_launch_is_failed(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(steady, fails={("jax", "gradient", 2): MeasurementResult(failure="lost", wrong=wrong)})
    found = run(monkeypatch, machine, launches=3)
    assert failures(found) == {("jax", "gradient"): "lost"}
    assert [row.backend for row, _ in contests(found)["gradient"].standing] == ["mxnet", "torch"]


@pytest.mark.parametrize(
    ("resident", "memory", "free", "groups"),
    [
        ({}, MEMORY, MEMORY, 1),
        (dict.fromkeys(NAMES, 400), 1000, MEMORY, 2),  # of --job-memory
        (dict.fromkeys(NAMES, 400), MEMORY, 450, 3),  # of the machine
        ({"torch": 100, "jax": 900, "mxnet": 100}, 950, MEMORY, 3),  # one is larger than those before it
    ],
)
def test_what_memory_has_no_room_for_takes_turns_later_and_is_marked(
    resident: dict[str, int], memory: int, free: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(monkeypatch, Machine(steady, resident=resident), memory=memory, free=free)
    assert not failures(found) and len(found) == 9
    turns = [each.record["turns"][0] for each in found.values() if each.record is not None and "turns" in each.record]
    assert len({each["group"] for each in turns}) == groups
    assert [("note" in each) for each in turns] == [groups > 1] * len(turns)


def test_an_exception_costs_its_own_case_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretender, "sampling", lambda *given: 1 // 0)
    found = run(monkeypatch, Machine(steady))
    assert all((each.failure or "").startswith("ZeroDivisionError: ") for each in found.values()) and len(found) == 9


@pytest.mark.parametrize(
    ("sample_s", "budget_s", "expected"),
    [(1.0, 6.0, 1), (0.02, 6.0, 3), (0.02, 0.3, 2), (0.02, 0.0, 1), (0.0, 6.0, 1), (1e-6, 6.0, 1000)],
)
def test_a_turn_is_long_against_switching_and_short_against_the_budget(
    sample_s: float, budget_s: float, expected: int
) -> None:
    assert samples_of_turn(sample_s, SamplingSettings(max_time_s=budget_s)) == expected


def test_what_cannot_take_turns_is_measured_as_before(tmp_path: Path) -> None:
    def jobs(*names: str, measurements: Sequence[str] = MEASUREMENTS) -> list[list[Wanted]]:
        return [[Wanted(recipe(), find(each), select(name)) for each in measurements] for name in names]

    session = Session(Settings(jobs=tmp_path))
    assert can_take_turns(session, jobs("torch", "jax"))
    assert not can_take_turns(session, jobs("torch"))
    assert not can_take_turns(session, jobs("torch", "jax", measurements=["input_pipeline"]))
    case = ProblemCase("p", Problem("q", "Relu", {"X": (3,)}))
    assert not can_take_turns(session, [[Wanted(case, find("forward"), select(name))] for name in NAMES])
    session.settings = Settings(device="cuda", jobs=tmp_path)
    assert not can_take_turns(session, jobs("torch", "jax"))
    session.close()
