"""A workflow: this rank's program, its ports, and runs of all ranks together."""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends import Selection
from d5suite.distributed.clocks import compare_clocks
from d5suite.distributed.gathering import gather
from d5suite.errors import ConfigurationError
from d5suite.files import write_bytes
from d5suite.instruments.clock import now
from d5suite.job import Job, WorkflowCase, placed
from d5suite.levels.description import capped
from d5suite.levels.network import Executor
from d5suite.network import Network
from d5suite.validate.check import Check
from d5suite.validate.norms import relative_l2
from d5suite.workflows import account, find
from d5suite.workflows.base import NativeBuilder, Place, Program, WorkflowCheckpoints
from d5suite.workflows.couplings import BLOCK, KINDS, problem
from d5suite.workflows.couplings.base import Field, Fields, Marks
from d5suite.workflows.group import Subcommunicator
from d5suite.workflows.ports import Joint, Port, close_ports, disagreement, end_ports, open_ports, pairs
from d5suite.workloads.base import Workload

TELL_S = 1.0
"""Shortest time between two notes on the progress of a run, which survive a failure."""

Digests = dict[str, list[tuple[int, int]]]
"""Numbers and checksums of the messages, by channel."""


class WorkflowWorkload(Workload):
    """A workflow on one backend; every rank runs the program of its component.

    Attributes
    ----------
    joints : list of Joint
    places : dict of str to list of int
        Ranks by component.
    component : str
        Component of this rank.
    rows : list of dict
        This rank's accounts of the runs.
    """

    kind = "workflow"

    def __init__(self, job: Job, case: WorkflowCase, selection: Selection) -> None:
        super().__init__(job, case, selection)
        self.case = case
        self.joints = [Joint.from_dict(each) for each in case.couplings]
        self.places = placed(case.components, job.ranks, interleaved=case.placement == "interleaved")
        for joint in self.joints:
            pairs(joint, len(self.places[joint.source]), len(self.places[joint.target]))
            lacking = problem(joint.kind)
            if lacking is not None:
                raise ConfigurationError(lacking, where=f"coupling {joint.name!r}")
        self.marks = {joint.name: Marks() for joint in self.joints}
        self.rows: list[dict[str, Any]] = []
        self.tolerance, _ = capped(self.backend.tolerances[job.precision], job.precision)
        self._program: Program | None = None
        self._folders: dict[str, Path] = {}
        self._generation = 0
        self._told = now()
        self._offset_ns = 0

    @property
    def is_repeatable(self) -> bool:
        """Whether no message is discarded, so that all runs have the same results."""
        return all(joint.policy == BLOCK for joint in self.joints)

    @property
    def component(self) -> str:
        """The component of this rank."""
        return next(name for name, ranks in self.places.items() if self.communicator.rank in ranks)

    def facts(self) -> dict[str, Any]:
        return {}

    def fingerprint(self) -> dict[str, str]:
        return {"workflow": repr((self.case.components, self.case.couplings, self.case.steps))}

    def free_validation(self) -> None:
        """Do nothing: the proof releases its objects itself."""

    def executor(self, network: Network, precision: str | None = None) -> Executor:
        """Build a network as it is timed, or in another precision in the proving mode."""
        mode = self.selection.mode if precision is None else self.backend.proving_mode(self.selection.mode)
        self.backend.check_operators(network)
        return self.backend.executor(
            network, mode=mode, device=self.job.device, precision=precision or self.job.precision
        )

    @property
    def program(self) -> Program:
        """The program of this rank, after a check that it fits the programs it is coupled with."""
        if self._program is None:
            self._program = self._made()
        return self._program

    def _made(self) -> Program:
        communicator, component = self.communicator, self.component
        ranks = self.places[component]
        declared = next(each for each in self.case.components if each["name"] == component)
        number = list(self.places).index(component)
        builder = NativeBuilder(self.executor, self.backend.trainer, self.tolerance, self.job.threads)
        place = Place(
            component, ranks.index(communicator.rank), len(ranks), self.case.steps, self.job.seed, declared["options"],
            Subcommunicator(communicator, ranks, number), builder,
            {
                joint.name: len(self.places[joint.target if joint.source == component else joint.source])
                for joint in self.joints if component in (joint.source, joint.target)
            },
            tell=self._tell_step,
        )  # fmt: skip
        made = find(declared["program"], declared.get("file"))(place)
        self._fields = self._agreed(made)
        if len(set(communicator.hosts)) > 1:
            self._offset_ns = compare_clocks(communicator).offset_ns
        return made

    def _agreed(self, program: Program) -> dict[tuple[str, str], Fields]:
        """Check that programs agree on their couplings, on all ranks; return this rank's fields."""
        hosts = self.communicator.hosts
        stated: dict[str, Any] = {}
        for what, couplings in (("gives", program.gives()), ("takes", program.takes())):
            for name, of in couplings.items():
                stated[f"{what} {name}"] = {key: list(each) for key, each in of.items()}
        answers = gather(self.communicator, stated)

        def fields(rank: int, who: str, what: str, joint: Joint) -> Fields:
            said = answers[rank].get(f"{what} {joint.name}")
            if said is None:
                raise ConfigurationError(f"coupling {joint.name!r}: {who} {what} nothing of this name", where=self.name)
            return {key: Field(tuple(shape), dtype, unit) for key, (shape, dtype, unit) in said.items()}

        found: dict[tuple[str, str], Fields] = {}
        for joint in self.joints:
            ranks = self.places[joint.source], self.places[joint.target]
            for one, other in pairs(joint, *map(len, ranks)):
                writer, reader = ranks[0][one], ranks[1][other]
                given = fields(writer, joint.source, "gives", joint)
                taken = fields(reader, joint.target, "takes", joint)
                wrong = disagreement(joint, given, taken)
                if wrong is not None:
                    raise ConfigurationError(wrong, where=self.name, hint="Correct one of the two programs.")
                if hosts[writer] != hosts[reader] and not KINDS[joint.kind].hosts:
                    raise ConfigurationError(
                        f"coupling {joint.name!r}: {KINDS[joint.kind].title} joins ranks of one host, not of "
                        f"{hosts[writer]} and {hosts[reader]}",
                        where=self.name, hint="Choose another coupling, or another placement.",
                    )  # fmt: skip
                if self.communicator.rank in (writer, reader):
                    found[joint.name, self.component] = given
        return found

    def _found_folders(self) -> dict[str, Path]:
        """Make folders that all ranks see: in memory if possible, and on a disk for files."""
        if self._folders:
            return self._folders
        made = ["", ""]
        if self.communicator.rank == 0:
            made[0] = tempfile.mkdtemp(prefix="d5suite-couplings-", dir=self.meeting)
            made[1] = made[0]
            if self.folder is not None and any(joint.kind == "files" for joint in self.joints):
                made[1] = f"{self.folder}.couplings"
                shutil.rmtree(made[1], ignore_errors=True)  # left by a failed attempt
                Path(made[1]).mkdir(parents=True)
        common, disk = gather(self.communicator, made)[0]
        self._folders = {"": Path(common), "files": Path(disk)}
        return self._folders

    def begin(self, first_step: int = 0, checkpoints: WorkflowCheckpoints | None = None) -> None:
        """Open all couplings and load the state before a step; called by all ranks."""
        program, self._generation = self.program, self._generation + 1
        folders = {kind: path / str(self._generation) for kind, path in self._found_folders().items()}
        if self.communicator.rank == 0:
            for path in set(folders.values()):
                path.mkdir()
        self.communicator.barrier()
        place = program.place
        place.out, place.into = open_ports(
            self.joints, self.places, self._fields, self.communicator, folders, self._offset_ns, self.marks
        )
        place.first_step, place.checkpoints = first_step, checkpoints
        self._ports: list[Port] = [*place.out.values(), *place.into.values()]
        communicator, ports = self.communicator, self._ports
        if self.heartbeat is not None:
            self.heartbeat.calls = lambda: (
                communicator.activity[0] + sum(each.calls for each in ports),
                communicator.activity[1] or any(each.waits for each in ports),
            )
        program.start()
        if first_step and checkpoints is not None:
            program.load(checkpoints.load(first_step))
        self._exchanged_s = place.group.seconds

    def run(self) -> None:
        """Run this rank's program, and tell its readers that no further message follows."""
        self._begun, self._steps_at = now(), list[float]()
        self.program.run()
        end_ports(self.program.place.out)
        self._ended = now()

    def end(self) -> Digests:
        """Close all couplings, and note this rank's account; called by all ranks.

        Returns
        -------
        dict
            By side and channel: the messages that passed, if the marks were proving.
        """
        place = self.program.place
        accounts = {port.joint.name: (port.account(), port) for port in self._ports}
        close_ports(place.out, place.into)
        self.communicator.barrier()
        if self.communicator.rank == 0:
            for path in set(self._folders.values()):
                shutil.rmtree(path / str(self._generation), ignore_errors=True)
        ports = {
            name: {
                "other": port.joint.target if port.joint.source == place.component else port.joint.source,
                "wait_s": found.wait_s, "move_s": found.move_s, "messages": found.messages, "bytes": found.bytes,
                "dropped": found.dropped, "moves": account.moments(found.moves_s),
                "rates": account.moments([port.ends[0].channel.nbytes / each for each in found.moves_s if each]),
                "latency_s": statistics.median(found.latencies_s) if found.latencies_s else None,
            }
            for name, (found, port) in accounts.items()
        }  # fmt: skip
        row = account.rank_account(
            place.component, self.communicator.rank, self._ended - self._begun,
            place.group.seconds - self._exchanged_s, ports, np.diff([self._begun, *self._steps_at]).tolist(),
        )  # fmt: skip
        self.rows.append(dict(row))
        return {
            f"{'gave' if name in place.out else 'took'} {one.channel.name}": list(one.digests)
            for name, (_, port) in accounts.items() for one in port.ends
        }  # fmt: skip

    def close(self) -> None:
        """Remove the folders; called by all ranks."""
        if self._folders:
            self.communicator.barrier()
            if self.communicator.rank == 0:
                for path in set(self._folders.values()):
                    shutil.rmtree(path, ignore_errors=True)
                if self.folder is not None:  # nobody continues a workflow that has succeeded
                    shutil.rmtree(f"{self.folder}.checkpoints", ignore_errors=True)
            self._folders = {}

    def _tell_step(self, step: int) -> None:
        self._steps_at.append(now())
        if now() - self._told >= TELL_S:
            self._told = now()
            with suppress(OSError):
                self.tell(
                    f"{self.component}, step {step + 1} of {self.case.steps}",
                    {"series": {"run_s": self._runs_s(), "steps": [step + 1.0]}},
                )

    def _runs_s(self) -> list[float]:
        return [row["total_s"] for row in self.rows]

    # Proofs.

    def proved_run(self) -> Iterator[Check]:
        """Make a run whose messages are compared, and prove the results of every program.

        If this attempt `continues` an earlier attempt that failed, the run begins at the latest
        checkpoint of that attempt.
        """
        kept: WorkflowCheckpoints | None = None
        first = 0
        if self.case.checkpoint_every and self.is_repeatable:
            kept = self._checkpoints()
            first = max(self._kept_steps(kept), default=0)
        for mark in self.marks.values():
            mark.proving = True
        self.begin(first, kept)
        self.communicator.barrier()
        self.run()
        digests = self.end()
        for mark in self.marks.values():
            mark.proving = False
        self.expected = {name: np.array(value) for name, value in self.program.result().items()}
        yield from self._delivered(digests)
        yield from self.everywhere(self.program.checks())
        if kept is not None:
            yield from self._restarted(kept)

    def _delivered(self, digests: Digests) -> Iterator[Check]:
        found: Digests = {}
        for each in gather(self.communicator, digests):
            found.update({name: [tuple(pair) for pair in pairs_] for name, pairs_ in each.items()})
        for joint in self.joints:
            wrong, sent = 0, 0
            for key, gave in found.items():
                if not key.startswith(f"gave {joint.name}-"):
                    continue
                took = found[key.replace("gave ", "took ", 1)]
                sent += len(gave)
                known = dict(gave)
                wrong += sum(known.get(number) != digest for number, digest in took)
                wrong += sum(later[0] <= earlier[0] for earlier, later in itertools.pairwise(took))
                wrong += len(gave) - len(took) if joint.policy == BLOCK else not took and bool(gave)
            name = f"{joint.name} ({joint.kind}, {joint.policy}): {sent} messages, lost, twice or changed"
            yield Check(name, float(wrong), 0.0)

    def everywhere(self, checks: Any) -> Iterator[Check]:
        """Yield the checks of all ranks, on every rank."""
        own = [[each.name, float(each.error), float(each.tolerance), each.detail] for each in checks]
        for rank, found in enumerate(gather(self.communicator, own)):
            for name, error, tolerance, detail in found:
                many = len(self.places[next(c for c, ranks in self.places.items() if rank in ranks)]) > 1
                yield Check(f"{name}, rank {rank}" if many else name, error, tolerance, detail)

    def _restarted(self, kept: WorkflowCheckpoints) -> Iterator[Check]:
        """Check that a run from the checkpoints of all ranks gives the results of the whole run."""
        steps = self._kept_steps(kept)
        if not steps:
            return
        self.begin(steps[-1], WorkflowCheckpoints(kept.folder, 0, kept.rank))
        self.run()
        self.end()
        yield from self.everywhere(self.same_results(f"a run restarted before step {steps[-1] + 1}"))

    def _checkpoints(self) -> WorkflowCheckpoints:
        """Return the checkpoints, kept beside the job for a later attempt; called by all ranks."""
        common = self._found_folders()[""]
        folder = Path(f"{self.folder}.checkpoints") if self.folder is not None else common / "checkpoints"
        stated, said = folder / "workflow", self.fingerprint()["workflow"]
        if self.communicator.rank == 0:
            if not self.continues:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            if not stated.exists():
                write_bytes(stated, said.encode())
        self.communicator.barrier()
        if stated.read_text(encoding="utf-8") != said:
            raise ConfigurationError(
                "the checkpoints are of another workflow", where=str(folder), hint="Run the job without --continue."
            )
        return WorkflowCheckpoints(folder, self.case.checkpoint_every, self.communicator.rank)

    def _kept_steps(self, kept: WorkflowCheckpoints) -> list[int]:
        """Return the steps before which all ranks have kept their states, except the run's end."""
        return [each for each in kept.steps(self.communicator.size) if each < self.case.steps]

    def same_results(self, what: str) -> Iterator[Check]:
        """Compare the results of this rank's program with the proved run."""
        found = self.program.result()
        if self.expected and self.is_repeatable:
            errors = {name: relative_l2(found[name], value) for name, value in self.expected.items()}
            yield Check.worst(f"{self.component}: {what} vs the proved one", errors, self.tolerance.repeats)
