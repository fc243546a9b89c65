"""Slurm's own commands, and their messages when Slurm refuses or does not answer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from d5suite.errors import ConfigurationError, D5Error

LIMIT_S = 120.0
"""Timeout of a Slurm command in seconds; Slurm's own are shorter."""

NO_ANSWER = re.compile(
    r"unable to contact slurm controller|connection refused|socket timed out|zero bytes were transmitted"
    r"|controller .*(not responding|timed out)|communication connection failure",
    re.IGNORECASE,
)
"""Messages of Slurm's commands when the controller is down or slow."""

FINAL = {
    "COMPLETED": "ended",
    "FAILED": "failed",
    "TIMEOUT": "ran out of time",
    "CANCELLED": "was cancelled",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "lost a node, which did not boot",
    "OUT_OF_MEMORY": "ran out of memory",
    "DEADLINE": "missed its deadline",
    "REVOKED": "was revoked",
}
"""Final job states of Slurm, in words."""

CAUSES = {
    "partition": r"partition",
    "account": r"account|user/account|association",
    "qos": r"qos",
    "reservation": r"reservation",
    "time": r"time limit|timelimit|time.?spec",
    "gres": r"gres|generic resource",
    "constraint": r"feature|constraint",
    "memory": r"memory|--mem\b",
    "options": r"unrecognized option|invalid option|ambiguous|requires an argument|doesn't allow",
    "exclusive": r"exclusive",
    "cores_per_node": r"node configuration|more processors|cpu count|ntasks-per-node|PartitionConfig|BadConstraints",
    "most_nodes": r"node count|PartitionNodeLimit|too many nodes",
}
"""By key of a profile: the messages of Slurm that a wrong value causes; the first match wins."""

NEVER_STARTS = {
    "PartitionTimeLimit": "time",
    "PartitionNodeLimit": "most_nodes",
    "PartitionConfig": "cores_per_node",
    "PartitionInactive": "partition",
    "PartitionDown": "partition",
    "BadConstraints": "constraint",
    "AccountNotAllowed": "account",
    "InvalidAccount": "account",
    "InvalidQOS": "qos",
    "QOSNotAllowed": "qos",
    "QOSTimeLimit": "time",
    "AssocMaxWallDurationPerJobLimit": "time",
    "QOSMaxWallDurationPerJobLimit": "time",
    "AssocMaxNodePerJobLimit": "most_nodes",
    "QOSMaxNodePerJobLimit": "most_nodes",
}
"""By reason for which a pending job never starts: the key of the profile that causes it."""


class RefusedError(D5Error):
    """Raised when Slurm refuses, with Slurm's own message."""


class NoAnswerError(D5Error):
    """Raised when Slurm does not answer."""


@dataclass(frozen=True)
class SlurmState:
    """Slurm's state of a job.

    Attributes
    ----------
    name : str
        Slurm's state, such as ``RUNNING``.
    reason : str
        Why the job waits, or why it ended.
    nodes : str
        The nodes on which it runs or ran.
    """

    name: str
    reason: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.name in FINAL


def call(*command: str) -> str:
    """Run one of Slurm's commands and return what it prints.

    Raises
    ------
    ConfigurationError
        There is no such command on this machine.
    NoAnswerError
        The controller does not answer.
    RefusedError
        Slurm refuses; the message is Slurm's.
    """
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, input="", timeout=LIMIT_S)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no {command[0]} here", hint="Call d5suite slurm on a login node of a Slurm cluster."
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]} got no answer in {LIMIT_S:g} s") from None
    if done.returncode == 0:
        return done.stdout
    lines = [line.split("error: ", 1)[-1] for line in done.stderr.splitlines() if line.strip()]
    message = "; ".join(dict.fromkeys(line for line in lines if not line.startswith("Try "))) or "no reason given"
    if NO_ANSWER.search(message):
        raise NoAnswerError(f"{command[0]}: {message}")
    raise RefusedError(f"{command[0]}: {message}")


def likely_cause(message: str, given: Collection[str]) -> str | None:
    """Return the key of the profile that likely caused a message; prefer keys that are set."""
    likely = [key for key, pattern in CAUSES.items() if re.search(pattern, message, re.IGNORECASE)]
    return next((key for key in likely if key in given), likely[0] if likely else None)


def submit(script: str) -> str:
    """Submit a batch script; return the job's number."""
    return call("sbatch", "--parsable", script).strip().partition(";")[0]


def states(names: Sequence[str]) -> dict[tuple[str, str], SlurmState]:
    """Return Slurm's states of all jobs with these names.

    Slurm forgets jobs some minutes after their end.

    Returns
    -------
    dict
        By name and number of the job; a number is such as ``17`` or ``17_3``.
    """
    if not names:
        return {}
    output = call(
        "squeue", "--noheader", "--array", "--states=all", f"--name={','.join(names)}", "--format=%j|%i|%T|%N|%r"
    )
    found = {}
    for line in output.splitlines():
        name, number, state, nodes, reason = line.split("|", 4)
        found[name, number] = SlurmState(state, reason.strip(), nodes)
    return found


def accounted(number: str) -> SlurmState | None:
    """Return a job's state from Slurm's accounting, if available."""
    try:
        options = ["--noheader", "--parsable2", "--allocations", "--format=State,NodeList"]
        output = call("sacct", *options, f"--jobs={number}")
    except (RefusedError, ConfigurationError):
        return None
    for line in output.splitlines()[-1:]:
        state, nodes = line.split("|", 1)
        return SlurmState(state.split()[0], "", nodes)
    return None


def cancel(numbers: Sequence[str]) -> None:
    """Cancel jobs; jobs that have ended are ignored."""
    if numbers:
        call("scancel", "--quiet", *numbers)
