"""Couplings by name: what moves the data from one component of a workflow to another.

Each module has ``Writer`` and ``Reader``, subclasses of those in `base`, and imports its library
when it is opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from d5suite.errors import ConfigurationError

BLOCK, DROP_OLDEST, KEEP_LATEST = POLICIES = ("block", "drop_oldest", "keep_latest")
"""What a writer does when the buffer is full: it waits for the reader, it discards the oldest
message, or (with a buffer of one message) it replaces the only one."""


@dataclass(frozen=True)
class CouplingKind:
    """A kind of coupling, known without importing it.

    Attributes
    ----------
    name, title : str
    requires : tuple of str
        Modules that must be installed.
    programs : tuple of str
        Programs that must be installed.
    install : str
        The command that installs them.
    policies : tuple of str
    why_not : str
        Why it has no other policies.
    hosts : bool
        Whether it reaches other hosts.
    threads : bool
        Whether both ends of a channel may be threads of one process.
    """

    name: str
    title: str
    requires: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    install: str = ""
    policies: tuple[str, ...] = POLICIES
    why_not: str = ""
    hosts: bool = True
    threads: bool = True


INSTALL_REDIS = "pip install 'd5suite[redis]'; apt-get install redis-server"
INSTALL_ADIOS2 = "pip install 'd5suite[adios2]'"
SENT = "a message that was sent cannot be taken back"
NEWEST = "of a stream that is read, SST discards the newest step, and never an older one"

KINDS: Mapping[str, CouplingKind] = {
    kind.name: kind
    for kind in (
        CouplingKind("files", "HDF5 files, one per step"),
        CouplingKind("memory", "shared memory", hosts=False),
        CouplingKind("messages", "messages of the communicator", policies=(BLOCK,), why_not=SENT),
        CouplingKind("sockets", "TCP sockets"),
        CouplingKind("redis", "Redis", ("redis",), ("redis-server",), INSTALL_REDIS, hosts=False),
        CouplingKind("adios2", "ADIOS2 (SST)", ("adios2",), (), INSTALL_ADIOS2, (BLOCK,), NEWEST, threads=False),
    )
}  # fmt: skip
"""Kinds of couplings by name."""


def known(name: str, where: str = "") -> CouplingKind:
    """Return the kind of this name.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    if name not in KINDS:
        raise ConfigurationError(f"there is no coupling {name!r}", where=where, hint=f"Known: {', '.join(KINDS)}.")
    return KINDS[name]


def problem(name: str) -> str | None:
    """Return a sentence on what a coupling lacks, with the command that installs it, or None."""
    kind = known(name)
    missing = [each for each in kind.requires if importlib.util.find_spec(each) is None]
    missing += [each for each in kind.programs if shutil.which(each) is None]
    return f"{kind.title} needs {' and '.join(missing)}, not installed here: {kind.install}" if missing else None
