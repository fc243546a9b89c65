"""Slurm's own commands, and their messages when Slurm refuses or does not answer."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from d5suite.errors import ConfigurationError, D5Error

LIMIT_S = 120.0
"""Timeout of a Slurm command in seconds; Slurm's own timeouts are shorter."""

KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_SOCKET"})
"""Variables that say which cluster Slurm's commands ask, and as whom."""

OPTIONS = re.compile(r"(SLURM\w*|SBATCH|SALLOC|SRUN|SQUEUE|SCANCEL|SINFO|SACCT|PMI|PMIX)_")
"""Names of variables that set options of Slurm's commands, or describe an allocation."""

DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"})
"""Variables with which Slurm assigns GPUs to an allocation."""

ARRAY_SIZE = 1001
"""Slurm's default of MaxArraySize."""

SUBMIT_LIMIT = re.compile(r"(?i:submitjob)|^(?!.*\b(?:QOS|Assoc)[A-Z]).*accounting/QOS policy")
"""Messages of sbatch when too many jobs are submitted. Older versions print only a general message,
which may mean this limit."""

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


class Cause(NamedTuple):
    """The keys of a profile that cause a message of Slurm.

    Attributes
    ----------
    pattern : str
        A regular expression for the message.
    key : str
        The key that causes the message.
    others : tuple of str
        Keys that may cause the message, too, if ``key`` is not given.
    always : bool
        Whether ``others`` may cause the message even if ``key`` is given.
    """

    pattern: str
    key: str
    others: tuple[str, ...] = ()
    always: bool = False


CAUSES = (
    Cause(r"unrecognized option|invalid option|ambiguous|requires an argument|doesn't allow", "options"),
    Cause(r"(?:QOS|Assoc)\w*WallDuration|QOSTimeLimit|PartitionTimeLimit", "time"),
    Cause(r"(?:QOS|Assoc)\w*Node\w*Limit|PartitionNodeLimit|node count|too many nodes", "most_nodes"),
    Cause(r"(?:QOS|Assoc)\w*Mem", "memory"),
    Cause(r"(?:QOS|Assoc)\w*GRES", "gres"),
    Cause(r"(?:QOS|Assoc)\w*Cpu", "cores_per_node"),
    Cause(r"invalid account|account/partition|user/account|association|Assoc[A-Z]", "account", ("partition",)),
    Cause(r"qos", "qos", ("account", "partition")),
    Cause(r"account", "account"),
    Cause(r"reservation", "reservation"),
    Cause(r"time limit|timelimit|time.?spec", "time"),
    Cause(r"gres|generic resource", "gres"),
    Cause(r"feature|BadConstraints|constraint", "constraint"),
    Cause(r"memory|--mem\b", "memory"),
    Cause(r"exclusive", "exclusive"),
    Cause(r"node configuration|PartitionConfig", "cores_per_node", ("memory", "gres", "constraint"), always=True),
    Cause(r"more processors|cpu count|ntasks-per-node", "cores_per_node"),
    Cause(r"partition", "partition"),
)
"""Messages of Slurm that a wrong value causes. The first match wins, so the most specific patterns
come first."""

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
    "AssocMaxCpuPerJobLimit": "most_nodes",
    "QOSMaxCpuPerJobLimit": "most_nodes",
    "QOSMaxCpuPerNode": "cores_per_node",
    "AssocMaxMemPerJob": "memory",
    "QOSMaxMemoryPerJob": "memory",
    "AssocMaxGRESPerJob": "gres",
    "QOSMaxGRESPerJob": "gres",
    "ReservationDeleted": "reservation",
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


def command_environment() -> dict[str, str]:
    """Return the environment of Slurm's commands, without variables that set their options.

    A profile alone decides what a job requests. A shell's ``SBATCH_PARTITION`` would override the
    script's own lines, ``SQUEUE_PARTITION`` would hide jobs, and variables of an allocation, such
    as ``SLURM_MEM_PER_CPU``, would enter the job, where srun refuses them.
    """
    environment = {name: value for name, value in os.environ.items() if name in KEPT or not OPTIONS.match(name)}
    if "SLURM_JOB_ID" in os.environ:
        for name in DEVICES:
            environment.pop(name, None)
    return environment


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
        done = subprocess.run(
            list(command), capture_output=True, text=True, input="", timeout=LIMIT_S, env=command_environment()
        )
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


def likely_causes(message: str, given: Collection[str]) -> list[str]:
    """Return the keys of the profile that likely caused a message; the likeliest first.

    Parameters
    ----------
    message : str
        What Slurm said.
    given : collection of str
        The keys that the profile sets.
    """
    for cause in CAUSES:
        if re.search(cause.pattern, message, re.IGNORECASE):
            others = [key for key in cause.others if key in given]
            return [cause.key, *others] if cause.always or cause.key not in given else [cause.key]
    return []


def largest_array() -> int:
    """Return how many jobs an array may have here; Slurm's default if Slurm does not say."""
    try:
        said = call("scontrol", "show", "config")
    except D5Error:
        return ARRAY_SIZE
    found = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", said, re.MULTILINE)
    return max(1, min((int(one or other) for one, other in found), default=ARRAY_SIZE))


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
    parts: dict[tuple[str, str], dict[str, SlurmState]] = {}
    for line in output.splitlines():
        name, number, state, nodes, reason = line.split("|", 4)
        number, _, component = number.partition("+")
        parts.setdefault((name, number), {})[component] = SlurmState(state, reason.strip(), nodes)
    found = {}
    for key, own in parts.items():  # the first component of a heterogeneous job runs the script
        nodes = ",".join(each.nodes for _, each in sorted(own.items()) if each.nodes)
        found[key] = replace(own[min(own)], nodes=nodes)
    return found


def accounted(number: str) -> SlurmState | None:
    """Return a job's state from Slurm's accounting; None if unavailable."""
    try:
        options = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State,NodeList"]
        output = call("sacct", *options, f"--jobs={number}")
    except (RefusedError, ConfigurationError):
        return None
    first = [line for line in output.splitlines() if not re.match(r"\d+\+[1-9]", line)]  # component
    for line in first[-1:]:
        _, state, nodes = line.split("|", 2)
        return SlurmState(state.split()[0], "", nodes)
    return None


def cancel(numbers: Sequence[str]) -> None:
    """Cancel jobs; jobs that have ended are ignored."""
    if numbers:
        call("scancel", "--quiet", *numbers)
