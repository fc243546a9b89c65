"""``d5suite slurm init``: draft a site profile from Slurm's data on a partition."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from d5suite.errors import ConfigurationError
from d5suite.files import write_bytes
from d5suite.launch.slurm import client
from d5suite.launch.slurm.profile import NAME

FIELDS = "%P|%D|%c|%m|%G|%l|%f"
"""Format of sinfo's fields: partition, nodes, CPUs, MiB, gres, time limit, features."""

GPUS = re.compile(r"gpu(?::([\w.-]+))?:(\d+)")
"""GPUs of a node as sinfo reports them: their kind, if known, and their number."""

TIME = "00:30:00"
"""Time limit of a draft."""

DRAFT = """\
# Site profile of `d5suite slurm`, drafted from Slurm's data on partition {name!r}; see docs/slurm.md.
# sinfo: {nodes} nodes of {cores} CPUs and {memory} MiB; gres {gres}; time limit {limit}; features {features}
partition = "{name}"
# account = "..."              # if your site asks for one
time = "{time}"              # of each job
exclusive = true               # no other job on the nodes: it would be measured, too
cores_per_node = {cores}
ranks_per_node = {ranks}
most_nodes = {nodes}
{gres_line}
# constraint = "..."           # for nodes of one kind
# setup = []                   # lines of bash before the modules: ["module use /shared/modules"]
# modules = []                 # such as ["python/3.11", "openmpi/5"]
# environment = "..."          # a virtual environment on a file system that all nodes see
# container = "..."            # or a command in front of the worker: "apptainer exec --nv image.sif"
# mpi = "pmix"                 # for --communicator mpi; see srun --mpi=list
# scratch = "/tmp"             # for temporary files, on each node
"""


class Partition(NamedTuple):
    """Identical nodes of a partition, as sinfo reports them."""

    name: str
    nodes: int
    cores: int
    memory: str
    gres: str
    limit: str
    features: str
    default: bool


def draft(name: str | None, out: Path | None) -> None:
    """Write a profile, or print it.

    Raises
    ------
    ConfigurationError
        There is no such partition, or the file is there already.
    """
    path = Path(NAME) if out is None else out
    if str(path) != "-" and path.exists():
        raise ConfigurationError("there is a profile already", where=str(path), hint="Give --out FILE, or - to print.")
    found = partitions()
    for each in found:
        print(f"# partition {each.name}: {each.nodes} nodes, {each.cores} CPUs, gres {each.gres}, limit {each.limit}")
    chosen = _chosen(found, name)
    text = drafted(chosen)
    if str(path) == "-":
        print(text, end="")
        return
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise ConfigurationError(f"cannot write the profile: {error.strerror}", where=str(path)) from error
    device = " --device cuda" if GPUS.match(chosen.gres) else ""
    print(f"{path}: look it over, then: d5suite slurm run RECIPE --nodes 1,2{device}")


def partitions() -> list[Partition]:
    """Ask Slurm for its partitions, each with its most frequent kind of node."""
    found: dict[str, Partition] = {}
    for line in client.call("sinfo", "--noheader", f"--format={FIELDS}").splitlines():
        name, nodes, cores, memory, gres, limit, features = (word.strip() for word in line.split("|", 6))
        each = Partition(
            name.rstrip("*"), int(nodes), int(cores.rstrip("+")), memory.rstrip("+"), gres, limit, features,
            name.endswith("*"),
        )  # fmt: skip
        if each.name not in found or each.nodes > found[each.name].nodes:
            found[each.name] = each
    return list(found.values())


def _chosen(found: list[Partition], name: str | None) -> Partition:
    for each in found:
        if each.name == name or (name is None and each.default):
            return each
    if name is None and found:
        return found[0]
    known = ", ".join(each.name for each in found) or "none"
    raise ConfigurationError(f"there is no partition {name!r}", where="--partition", hint=f"Slurm has: {known}.")


def drafted(partition: Partition) -> str:
    """Return a profile's text for a partition."""
    gpus = GPUS.match(partition.gres)
    ranks = int(gpus[2]) if gpus else 1
    kind = f"gpu:{gpus[1]}:{ranks}" if gpus and gpus[1] else f"gpu:{ranks}"
    facts = partition._asdict()
    facts["gres_line"] = f'gres = "{kind}"' if gpus else '# gres = "gpu:4"             # on nodes with GPUs'
    return DRAFT.format(**facts, ranks=min(ranks, partition.cores), time=_shorter(partition.limit))


def _shorter(limit: str) -> str:
    """Return the shorter of a draft's and the partition's time limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if match is None or match[1] or int(match[2] or 0) >= 1 or int(match[3]) >= 30:
        return TIME
    return f"00:{int(match[3]):02}:{int(match[4]):02}"
