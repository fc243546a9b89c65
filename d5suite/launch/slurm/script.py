"""Batch scripts that can be read, and submitted by hand with ``sbatch FILE``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from d5suite.instruments.threads import thread_environment
from d5suite.job import Job
from d5suite.launch.base import MEETING, STARTED_BY_SRUN
from d5suite.launch.command import command
from d5suite.launch.slurm.profile import ClusterProfile

OPTIONS = {
    "partition": "--partition", "account": "--account", "qos": "--qos", "reservation": "--reservation",
    "time": "--time", "gres": "--gres", "constraint": "--constraint", "memory": "--mem",
}  # fmt: skip
"""Keys of a profile, and the options of sbatch that they set."""

FAILED = "d5suite: a line failed: "
"""Beginning of the message about a line that failed before the worker; the key follows."""

STOP = """
# A line below that fails ends the job.
d5suite_failed() { echo "%s$d5suite_key: exit status $1 of: $(sed -n "$2p" "$0")" >&2; exit 1; }
trap 'code=$?; [ ${#BASH_SOURCE[@]} -gt 1 ] || d5suite_failed $code $LINENO' ERR
"""
"""Lines of bash that end a job after a line that fails. In a sourced file, all commands but the
last may fail."""

BODY = """
# Ranks meet in a folder that all nodes see.
export {meeting}="$job.meeting-$SLURM_JOB_ID"
mkdir -p "${meeting}"
trap 'rm -rf "${meeting}" "$job.couplings"' EXIT

# What an earlier start has measured is kept; a job is started again if it is preempted or loses a node.
continues=
if [ -e "$job.result.json" ]; then
    continues=--continue
    start=1
    while [ -e "$job.start$start.result.json" ]; do start=$((start + 1)); done
    mv "$job.result.json" "$job.start$start.result.json"
fi
rm -f "$job".rank*.result.json

# Who else is on the nodes, before and after.
others() {{ timeout 20 squeue --noheader --nodelist="{nodelist}" --states=running --format='{number} %u %N'; }}
others > "$job.jobs" 2>&1
{srun}
status=$?
others >> "$job.jobs" 2>&1
exit $status
"""


def batch_script(
    jobs: Sequence[Path], *, name: str, profile: ClusterProfile, nodes: int, device: str, folder: Path, output: Path,
    pythons: Mapping[str, str], components: Mapping[str, int] = MappingProxyType({}),
) -> str:  # fmt: skip
    """Return the text of a batch script.

    Parameters
    ----------
    jobs : sequence of Path
        Job files ``NAME.job.json`` with the same needs. Several become a job array.
    name : str
        The job's name in Slurm.
    profile : ClusterProfile
    nodes : int
    device : str
        ``cpu`` hides GPUs from the workers.
    folder : Path
        Working directory.
    output : Path
        The log of the batch script and of srun, without suffix.
    pythons : mapping of str to str
        By name of a job file: the interpreter of its backend, if one is configured.
    components : mapping of str to int
        By component of a workflow: its nodes, from `nodes_of_components`. With components, Slurm
        gets one heterogeneous job.
    """
    stems = [str(path).removesuffix(".job.json") for path in jobs]
    what = ", ".join(Path(stem).name for stem in stems) if len(stems) < 4 else f"{len(stems)} jobs"
    parts = list(components.items()) or [("", nodes)]
    where = f" ({', '.join(f'{count} for {each}' for each, count in parts)})" if components else ""
    options = _options(profile, parts, name, folder, output, len(jobs))
    head = [
        "#!/bin/bash",
        f"# d5suite: {what}; {nodes} node{'s' if nodes > 1 else ''}{where}.",
        "# Written by `d5suite slurm`. To run it by hand: sbatch THIS_FILE",
        *(f"#SBATCH {option}" for option in options),
        *_preparation(profile, len(components)),
        "",
        *_exports(profile, device),
        "",
    ]
    if len(jobs) > 1:
        head += ["jobs=(", *(f"    {shlex.quote(stem)}" for stem in stems), ")"]
        head += ["job=${jobs[$SLURM_ARRAY_TASK_ID]}"]
    else:
        head += [f"job={shlex.quote(stems[0])}"]
    chosen = [pythons.get(path.name) for path in jobs]
    if any(chosen):
        default = _python(profile)
        words = " ".join(shlex.quote(each or default) for each in chosen)
        head += [f"pythons=({words})", "python=${pythons[${SLURM_ARRAY_TASK_ID:-0}]}"]
    else:
        head += [f"python={shlex.quote(_python(profile))}"]
    line: list[str] = []
    for number, (_, count) in enumerate(parts):
        launcher = srun(profile, count, number if components else None)
        own = command('"$job.job.json"', launcher, python='"$python"', options=["$continues"])
        line += [":", *own[1:]] if number else own
    lists = [f"$SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(len(components))]
    return "\n".join(head) + BODY.format(
        meeting=MEETING, srun=" ".join(line), nodelist=",".join(lists) or "$SLURM_JOB_NODELIST",
        number="%i" if components else "%A",
    )  # fmt: skip


def nodes_of_components(job: Job, profile: ClusterProfile) -> dict[str, int]:
    """Return how many nodes each component of a workflow has for itself.

    The result is empty if components share nodes: their ranks alternate, or do not fill nodes.
    """
    counts = {name: len(ranks) for name, ranks in job.places.items()}
    follow = [rank for ranks in job.places.values() for rank in ranks] == list(range(job.ranks))
    if len(counts) < 2 or not follow or any(count % profile.ranks_per_node for count in counts.values()):
        return {}
    return {name: count // profile.ranks_per_node for name, count in counts.items()}


def _options(
    profile: ClusterProfile, parts: Sequence[tuple[str, int]], name: str, folder: Path, output: Path, count: int
) -> list[str]:
    """Return sbatch's options; each further component's options follow the word ``hetjob``."""
    found = [f"--job-name={name}", *_resources(profile, *parts[0])]
    found += [f"--array=0-{count - 1}"] * (count > 1)
    where = f"{output}.%a.log" if count > 1 else f"{output}.log"
    found += ["--open-mode=append", f"--output={where}", f"--chdir={folder}", *profile.options]
    for part in parts[1:]:
        found += ["hetjob", f"--job-name={name}", *_resources(profile, *part), *profile.options]
    return [_word(each) for each in found]


def _resources(profile: ClusterProfile, component: str, nodes: int) -> list[str]:
    """Return the options that say what a component needs."""
    own = profile.components.get(component, {})
    asked = {option: own.get(key, getattr(profile, key)) for key, option in OPTIONS.items()}
    return [
        f"--nodes={nodes}",
        f"--ntasks-per-node={profile.ranks_per_node}",
        f"--cpus-per-task={profile.threads_per_rank}",
        *(f"{option}={value}" for option, value in asked.items() if value),
        *["--exclusive"] * profile.exclusive,
    ]


def _word(option: str) -> str:
    """Quote an option as sbatch reads it from a script."""
    return option if re.fullmatch(r"[\w%@+=:,./\[\]*&|()-]+", option) else shlex.quote(option)


def srun(profile: ClusterProfile, nodes: int, group: int | None = None) -> list[str]:
    """Return the launcher of the workers, quoted for bash; if one worker fails, srun ends all.

    It passes on the job's own variables, even where ``sbatch --export=NONE`` left out the user's.

    Parameters
    ----------
    profile : ClusterProfile
    nodes : int
    group : int, optional
        The component of a heterogeneous job.
    """
    options = [
        f"--nodes={nodes}", f"--ntasks={profile.ranks(nodes)}", f"--cpus-per-task={profile.threads_per_rank}",
        "--export=ALL", "--kill-on-bad-exit=1", f"--mpi={profile.mpi}", f"--cpu-bind={profile.cpu_bind}",
    ]  # fmt: skip
    options += [f"--gpu-bind={profile.gpu_bind}"] if profile.gpu_bind else []
    options += [f"--het-group={group}"] if group is not None else []
    return ["srun", *map(shlex.quote, options), *_container(profile.container)]


def _container(text: str) -> list[str]:
    """Return the words of the container's command, quoted for bash.

    Variables expand on the node, as a user of a shell expects: not within single quotes.
    """
    literal = "\0"  # stands for a dollar sign that bash keeps; the profile has none
    kept = re.sub(r"'[^']*'|\\\$", lambda found: found[0].replace("\\$", "$").replace("$", literal), text)
    words = shlex.split(kept)
    return [_expanding(word).replace(literal, r"\$") if shlex.quote(word) != word else word for word in words]


def _preparation(profile: ClusterProfile, components: int) -> list[str]:
    """Return what runs before the worker, with the key of the profile before each part."""
    groups = f"--het-group=0-{components - 1} " if components else ""
    parts = {
        "setup": profile.setup,
        "modules": [f"module load {shlex.quote(each)}" for each in profile.modules],
        "environment": [f"source {_expanding(profile.environment)}/bin/activate"] if profile.environment else [],
        "scratch": [
            f"export TMPDIR={_expanding(profile.scratch)}",
            f'srun {groups}--export=ALL --ntasks-per-node=1 mkdir -p "$TMPDIR"',
        ] if profile.scratch else [],
    }  # fmt: skip
    lines = [line for key, own in parts.items() if own for line in (f"d5suite_key={key}", *own)]
    return [*(STOP % FAILED).splitlines(), *lines, "trap - ERR"] if lines else []


def _exports(profile: ClusterProfile, device: str) -> list[str]:
    """Return lines that export workers' variables; see `d5suite.launch.base.worker_environment`."""
    own = {**thread_environment(profile.threads_per_rank), "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    own[STARTED_BY_SRUN] = "free" if profile.cpu_bind == "none" and not profile.gpu_bind else "bound"
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    return [f"export {name}={shlex.quote(value)}" for name, value in own.items()]


def _python(profile: ClusterProfile) -> str:
    return profile.python or ("python3" if profile.environment or profile.container else sys.executable)


def _expanding(text: str) -> str:
    """Quote a word for bash so that only variables expand, and a ``~`` at its beginning."""
    text = re.sub(r"^~(?=/|$)", "$HOME", text)
    return '"' + re.sub(r'(["\\`]|\$(?![A-Za-z_{]))', r"\\\1", text) + '"'


def write_script(path: Path, text: str) -> None:
    """Write a script that its owner may execute."""
    from d5suite.files import write_bytes

    write_bytes(path, text.encode())
    path.chmod(path.stat().st_mode | 0o100)
