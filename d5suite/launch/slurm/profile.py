"""A site profile: properties of a partition and needs of its jobs, in a TOML file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.files import read_toml

NAME = "d5suite-slurm.toml"
"""Name of a profile in the current folder; the user's ``slurm.toml`` is for all folders."""

TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|(?i:unlimited)")
"""A time limit as Slurm writes it: minutes, ``HH:MM:SS``, ``D-HH:MM:SS`` and others."""

OF_COMPONENTS = ("partition", "account", "qos", "reservation", "gres", "constraint", "memory")
"""Keys that a component of a workflow may set for its own nodes."""


@dataclass(frozen=True)
class ClusterProfile:
    """A site's settings; docs/slurm.md has two examples.

    Attributes
    ----------
    cores_per_node : int
        CPUs of a node as Slurm counts them, all of which a job uses.
    ranks_per_node : int
        Often 1 on a CPU partition, and the number of GPUs on another.
    most_nodes : int
        Most nodes of a job; 0 if unknown.
    partition, account, qos, reservation, time, gres, constraint, memory : str
        Options of sbatch with these names; ``memory`` is ``--mem``. Empty: not given.
    exclusive : bool
        Whether no other job may run on the nodes.
    setup : list of str
        Lines of bash that run first, such as ``module use /shared/modules``.
    modules : list of str
        Modules for ``module load``.
    environment : str
        A virtual environment to activate.
    container : str
        A command to prepend to the worker's, such as ``apptainer exec --nv image.sif``; variables
        are expanded on the node, but not within single quotes.
    python : str
        The interpreter on the nodes. By default it is the current one, or ``python3`` if an
        environment or a container is given.
    mpi : str
        srun's ``--mpi``, such as ``pmix``; ``none`` for Gloo and NCCL.
    cpu_bind : str
        srun's ``--cpu-bind``. ``none``: d5suite binds each rank to cores of its own.
    gpu_bind : str
        srun's ``--gpu-bind``. Empty: d5suite gives each rank of a node a GPU of its own.
    scratch : str
        A folder on every node for temporary files; variables such as ``$USER`` are expanded.
    options : list of str
        Further options of sbatch.
    components : dict of str to dict of str to str
        By component of a workflow: values of `OF_COMPONENTS` that replace the profile's on the
        component's nodes.
    """

    cores_per_node: int
    ranks_per_node: int = 1
    most_nodes: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    time: str = "00:30:00"
    exclusive: bool = True
    gres: str = ""
    constraint: str = ""
    memory: str = ""
    setup: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    environment: str = ""
    container: str = ""
    python: str = ""
    mpi: str = "none"
    cpu_bind: str = "none"
    gpu_bind: str = ""
    scratch: str = ""
    options: list[str] = field(default_factory=list)
    components: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def threads_per_rank(self) -> int:
        """CPUs of each rank."""
        return max(1, self.cores_per_node // self.ranks_per_node)

    def ranks(self, nodes: int) -> int:
        """Return the number of ranks on this many nodes."""
        return nodes * self.ranks_per_node

    @property
    def gpus(self) -> str | None:
        """The key that requests GPUs; None if none does."""
        if re.search(r"\bgpu\b", self.gres):
            return "gres"
        words = re.compile(r"--gpus\b|-G|--(gres|tres-per-\w+)=.*\bgpu\b")
        return "options" if any(map(words.match, self.options)) else None


@dataclass(frozen=True)
class ProfileFile:
    """A profile, with the file and the lines it was read from.

    Attributes
    ----------
    profile : ClusterProfile
    path : str
    lines : mapping of str to int
        By key: the line that sets it, from 1.
    """

    profile: ClusterProfile
    path: str
    lines: Mapping[str, int]

    def line(self, key: str) -> str:
        """Return a key's line in the file, for a message."""
        if key not in self.lines:
            return f"{self.path}: {key} is not given"
        shown = json.dumps(getattr(self.profile, key))
        return f"{self.path}:{self.lines[key]}: {key} = {shown}"


def find_profile() -> Path:
    """Return the path of the default profile.

    Raises
    ------
    ConfigurationError
        If there is no profile.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for each in (Path(NAME), home / "d5suite" / "slurm.toml"):
        if each.is_file():
            return each
    raise ConfigurationError(
        f"there is no site profile: neither ./{NAME} nor {home}/d5suite/slurm.toml",
        hint="Draft one with: d5suite slurm init",
    )


def read_profile(path: Path) -> ProfileFile:
    """Read a profile.

    Raises
    ------
    ConfigurationError
        If the profile cannot be read or is invalid; the message names the line.
    """
    content, text = read_toml(path)
    lines = _lines(text)
    known = {each.name: each for each in dataclasses.fields(ClusterProfile)}
    for key, value in content.items():
        where = f"{path}:{next((number for name, number in lines.items() if name.partition('.')[0] == key), 1)}"
        if key not in known:
            raise ConfigurationError(f"there is no key {key!r}", where=where, hint=f"Known: {', '.join(known)}.")
        _check(key, value, str(known[key].type), where)
    if "cores_per_node" not in content:
        raise ConfigurationError("cores_per_node is not given", where=str(path), hint="See: sinfo --format='%P %c'")
    profile = ClusterProfile(**content)
    if profile.ranks_per_node > profile.cores_per_node:
        what = f"{profile.ranks_per_node} ranks share {profile.cores_per_node} cores"
        raise ConfigurationError(what, where=f"{path}:{lines['ranks_per_node']}")
    return ProfileFile(profile, str(path), lines)


def _check(key: str, value: Any, kind: str, where: str) -> None:
    """Raise if a value has the wrong type, or is unsafe in a batch script."""
    rules = {
        "int": ("a whole number, at least 1", lambda: type(value) is int and value >= (key != "most_nodes")),
        "bool": ("true or false", lambda: isinstance(value, bool)),
        "str": ("a text of one line", lambda: _is_line(value)),
        "list[str]": ("a list of lines of text", lambda: isinstance(value, list) and all(map(_is_line, value))),
        "dict[str, dict[str, str]]": (
            f"tables [components.NAME] of {', '.join(OF_COMPONENTS)}",
            lambda: isinstance(value, dict) and all(map(_is_of_component, value.values())),
        ),
    }  # fmt: skip
    rule, holds = rules[kind]
    if not holds():
        raise ConfigurationError(f"{key} must be {rule}", where=where)
    if key == "time" and not TIME.fullmatch(value):
        raise ConfigurationError(f"{value!r} is not a time limit such as 00:30:00 or 1-12:00:00", where=where)
    if key == "options" and not all(each.startswith("-") for each in value):
        raise ConfigurationError("options are words such as --mail-type=END", where=where)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_of_component(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= set(OF_COMPONENTS) and all(map(_is_line, value.values()))


def _lines(text: str) -> dict[str, int]:
    """Return by key the line that sets it, from 1; a key of a table follows the table's name."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"""\s*\[*\s*["']?([\w.-]+)["']?\s*(=|\])""", line)
        if match and match[2] == "]" and line.lstrip().startswith("["):
            table = f"{match[1]}."
            found.setdefault(match[1], number)
        elif match:
            found.setdefault(table + match[1], number)
    return found
