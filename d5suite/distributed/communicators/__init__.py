"""Transports between ranks, by name. Each module imports its transport only when it is opened.

A transport's module has ``connect(algorithm, rank, size, meeting, timeout_s, hosts)``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import Communicator


@dataclass(frozen=True)
class Transport:
    """A transport's description, known without importing it.

    Attributes
    ----------
    name, title : str
    requires : tuple of str
        Modules that must be installed.
    install : str
        The command that installs them.
    launcher : str
        What starts its ranks: ``process`` (d5suite), ``mpi`` (mpiexec) or ``none`` (one rank).
    devices : tuple of str
        Devices on which the arrays may lie.
    """

    name: str
    title: str
    requires: tuple[str, ...] = ()
    install: str = ""
    launcher: str = "process"
    devices: tuple[str, ...] = ("cpu",)


COMMUNICATORS: Mapping[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport("local", "one rank", launcher="none", devices=("cpu", "cuda")),
        Transport("mpi", "MPI", ("mpi4py",), "pip install 'd5suite[mpi]'", "mpi", ("cpu", "cuda")),
        Transport("gloo", "Gloo", ("torch",), "pip install 'd5suite[torch]'"),
        Transport("nccl", "NCCL", ("torch",), "pip install 'd5suite[torch]'", devices=("cuda",)),
    )
}


def problem(name: str) -> str | None:
    """Return what a transport lacks, with the command that installs it; None if nothing.

    Raises
    ------
    ConfigurationError
        There is no such transport.
    """
    transport = _known(name)
    missing = [module for module in transport.requires if importlib.util.find_spec(module) is None]
    if missing:
        return f"{transport.title} needs {' and '.join(missing)}, which is not installed: {transport.install}"
    return None


def open_communicator(
    name: str,
    algorithm: str = "native",
    *,
    rank: int | None = None,
    size: int | None = None,
    meeting: Path | None = None,
    timeout_s: float = 60,
    hosts: Sequence[str] | None = None,
) -> Communicator:
    """Connect this process, a rank, with the others. Collective.

    Parameters
    ----------
    name : str
        A key of `COMMUNICATORS`.
    algorithm : str
        A key of `d5suite.distributed.algorithms.ALGORITHMS`.
    rank, size : int, optional
        Not needed for MPI or a single rank.
    meeting : Path, optional
        A folder that all ranks see, where ranks of gloo and nccl find each other.
    timeout_s : float
        How long gloo and nccl wait for a rank or a message. MPI waits without limit.
    hosts : sequence of str, optional
        Names of the ranks' hosts, to replace the real ones.

    Raises
    ------
    D5Error
        If a name is unknown, the transport is not installed, or a rank did not connect.
    """
    transport = _known(name)
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(f"no algorithm {algorithm!r}", hint=f"There are {', '.join(ALGORITHMS)}.")
    lacking = problem(name)
    if lacking:
        what, _, command = lacking.partition(": ")
        raise D5Error(what, hint=command)
    if transport.launcher == "process" and (rank is None or size is None or meeting is None):
        raise ConfigurationError(f"a rank of {name} needs its rank, the number of ranks and a folder to meet in")
    module = importlib.import_module(f"{__name__}.{name}")
    communicator: Communicator = module.connect(algorithm, rank, size, meeting, timeout_s, hosts)
    return communicator


def _known(name: str) -> Transport:
    if name not in COMMUNICATORS:
        raise ConfigurationError(f"no communicator {name!r}", hint=f"There are {', '.join(COMMUNICATORS)}.")
    return COMMUNICATORS[name]
