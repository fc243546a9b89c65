"""The makespan of a coupled workflow: where each component's time went, and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from d5suite.distributed.gathering import gather
from d5suite.instruments.clock import AgreedClock, now
from d5suite.instruments.sampling import Samples, sample
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import STEP, Measurement, Phase, Step
from d5suite.measurements.schemas import array, by_name, choice, integer, mapping, number, or_null, record, text
from d5suite.measurements.tables import WORKFLOWS
from d5suite.validate.check import Check
from d5suite.workflows.account import bottleneck, components_of, couplings_of, summed
from d5suite.workflows.couplings import BLOCK
from d5suite.workloads.workflow import WorkflowWorkload


def _share(what: str) -> dict[str, Any]:
    return number(f"share of the makespan {what}, mean of its ranks", minimum=0, maximum=1)


def _spread(what: str) -> dict[str, Any]:
    """Return the schema of a mean and a standard deviation, as SimAI-Bench reports them."""
    return or_null(mapping({"mean": number(minimum=0), "std": number(minimum=0)}, description=what))


SCHEMA = record({
    "workflow": mapping(description="components, couplings and the bottleneck", properties={
        "steps": integer("of a run", minimum=1),
        "communicator": text("what moves messages between ranks"),
        "placement": text("packed: a component's ranks follow each other; interleaved: they take turns"),
        "hosts": array(text(), "by rank"),
        "components": by_name(description="by name: where the time went", values=mapping({
            "role": text("simulation, training, inference or program"),
            "program": text("its name"),
            "ranks": array(integer(minimum=0), "in the job", minItems=1),
            "computing": _share("computing"),
            "exchanging": _share("in messages among its own ranks"),
            "moving": _share("copying in couplings"),
            "waiting": _share("for other components, in couplings"),
            "ended": _share("after its own end"),
            "waits_for": by_name(_share("waiting for it"), "by component"),
            "iteration_s": _spread("of a step, as the program counts them"),
            "figures": by_name(number(), "the program's own"),
        })),
        "couplings": by_name(description="by name: what was moved", values=mapping({
            "source": text("the component that gives"), "target": text("the component that takes"),
            "kind": text("what moves the data"), "policy": text("what a writer does when the buffer is full"),
            "capacity": integer("messages that fit into the buffer of a channel", minimum=1),
            "messages": number("per run, given", minimum=0), "taken": number("per run", minimum=0),
            "dropped": number("per run, by the policy", minimum=0),
            "bytes": number("per run, taken", minimum=0),
            "write_s": number("of a run, copying", minimum=0), "read_s": number("of a run, copying", minimum=0),
            "wait_for_room_s": number("of a run, the source", minimum=0),
            "wait_for_data_s": number("of a run, the target", minimum=0),
            "latency_s": or_null(number("from the beginning of writing to the end of reading, median")),
            "bytes_per_s": or_null(number("while the slower side copies", minimum=0)),
            "message_write_s": _spread("of a message, copying"),
            "message_read_s": _spread("of a message, copying"),
            "message_write_bytes_per_s": _spread("mean of the rates of single messages"),
            "message_read_bytes_per_s": _spread("mean of the rates of single messages"),
            "efficiency": number("of the two components, as Do et al. define it"),
            "idle": text("which side has less to do: source or target"),
            "idle_share": number("of that side, of a step", minimum=0, maximum=1),
        })),
        "bottleneck": mapping(description="what limits the makespan", properties={
            "kind": choice(
                "none", "computing", "exchanging", "moving", "buffer", "turns", description="see docs/workflows.md"
            ),
            "where": text("a component or a coupling"),
            "sentence": text("with the figures that it rests on"), "mend": text("what would help"),
        }),
    }),
    "efficiency": number("the least of all couplings", maximum=1),
    "idle_share": number("the largest share of the makespan for which a component waits", minimum=0, maximum=1),
})  # fmt: skip


class WorkflowStep(Step):
    """One run of the whole workflow."""

    def __init__(self, workload: WorkflowWorkload) -> None:
        self.workload = workload
        self.items = workload.case.steps
        start = now()
        self.program = workload.program
        self.built_s = now() - start
        self._summary: dict[str, Any] = {}

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.workload.close()

    def call_first(self) -> None:
        """Run the workflow for the first time."""
        if self.first_call_s is None:
            start = now()
            self.make_one()
            self.first_call_s = self.built_s + now() - start

    def make_one(self) -> None:
        self.workload.begin()
        self.workload.communicator.barrier()
        self.workload.run()
        self.workload.end()

    def phases(self) -> Iterable[Phase]:
        yield Phase(self, "make_one", STEP)
        yield Phase(self.program, "run", f"run {self.workload.component}")
        for part in self.program.parts:
            yield Phase(self.program, part, part)
        for joint in self.workload.joints:
            mine = self.workload.component
            if mine in (joint.source, joint.target):
                other = joint.target if mine == joint.source else joint.source
                marks = self.workload.marks[joint.name]
                yield Phase(marks, "wait", f"wait for {other}: {joint.name}", role="thread_wait")
                yield Phase(marks, "move", f"move {joint.name}", role="data_transfer")

    def time(self, settings: SamplingSettings) -> Samples:
        """Sample the makespan: from the common start to the slowest rank's end."""
        workload = self.workload
        communicator = workload.communicator
        workload.rows.clear()
        latest: list[float] = []

        def agree(seconds: float) -> float:
            latest[:] = gather(communicator, seconds)
            return max(latest)

        clock, ended = AgreedClock(agree), now()

        def prepare() -> None:
            workload.begin()
            clock.advance(now() - ended)  # time between samples counts in the budget

        def run() -> None:
            nonlocal ended
            communicator.barrier()
            start = now()
            workload.run()
            ended = now()
            clock.advance(ended - start)
            makespan, own = max(latest), latest[communicator.rank]
            workload.end()
            row = workload.rows[-1]
            row["total_s"], row["ended_s"] = makespan, makespan - own
            workload.tell(
                f"{workload.component}, run {len(workload.rows)}, {makespan:.3g} s",
                {"series": {"run_s": [r["total_s"] for r in workload.rows]}},
            )

        found = sample(run, lambda: None, settings, before_sample=prepare, clock=clock)
        self._summarize(workload.rows[-len(found.samples_s) :])
        return found if self.first_call_s is None else replace(found, first_call_s=self.first_call_s)

    def _summarize(self, rows: list[dict[str, Any]]) -> None:
        """Put the accounts of all ranks together. Collective."""
        workload, runs = self.workload, len(rows)
        figures = self.program.figures() if self.program.place.rank == 0 else {}
        found = gather(workload.communicator, {"row": summed(rows), "figures": figures, "role": self.program.role,
                                               "program": self.program.name})  # fmt: skip
        accounts = [each["row"] for each in found]
        components = components_of(accounts)
        for each in found:
            one = components[each["row"]["component"]]
            one.setdefault("figures", {}).update({k: v for k, v in each["figures"].items() if np.isfinite(v)})
            one |= {"role": each["role"], "program": each["program"]}
        kinds = {
            joint.name: {"source": joint.source, "target": joint.target, "kind": joint.kind, "policy": joint.policy,
                         "capacity": joint.capacity}
            for joint in workload.joints
        }  # fmt: skip
        couplings = couplings_of(accounts, kinds, runs)
        makespan = max(each["total_s"] for each in accounts) / runs
        communicator = workload.communicator
        self._summary = {
            "workflow": {
                "steps": workload.case.steps, "communicator": communicator.name, "placement": workload.case.placement,
                "hosts": list(communicator.hosts), "components": components, "couplings": couplings,
                "bottleneck": bottleneck(components, couplings, makespan),
            },
            "efficiency": min((each["efficiency"] for each in couplings.values()), default=1.0),
            "idle_share": max(each["waiting"] for each in components.values()),
        }  # fmt: skip

    def record(self, samples: Samples) -> dict[str, Any]:
        return self._summary

    def series(self) -> dict[str, list[float]]:
        """Return this rank's seconds of waiting and copying, by run."""
        rows = self.workload.rows
        return {f"{key} of rank 0": [row[key] for row in rows] for key in ("wait_s", "move_s", "exchange_s")}


def same_as_proved(workload: WorkflowWorkload, step: WorkflowStep) -> Iterator[Check]:
    """Compare the last timed run with the run whose messages were compared: it may lose some."""
    yield from workload.everywhere(workload.same_results("the last timed run"))
    for name, each in step._summary["workflow"]["couplings"].items():
        if each["policy"] == BLOCK:
            yield Check(f"{name}: messages per timed run, lost or twice", abs(each["messages"] - each["taken"]), 0.0)


class WorkflowMakespan(Measurement):
    """A coupled workflow from start to end."""

    name = "workflow"
    level = 3
    unit = "steps/s"
    needs = ("level 2",)
    takes_turns = False
    runs_network = False
    without_memory = "not taken of workflows"
    table = WORKFLOWS
    schema = SCHEMA
    checks_after = (same_as_proved,)

    def prepare(self, workload: WorkflowWorkload) -> Step:
        return WorkflowStep(workload)

    def prove(self, workload: WorkflowWorkload, step: WorkflowStep) -> Iterator[Check]:
        """Compare every message at both ends, and what each program computed with a reference."""
        yield from workload.proved_run()
