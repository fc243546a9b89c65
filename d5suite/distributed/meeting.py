"""How ranks of a framework's own scheme connect. Imports `d5suite.levels` and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from d5suite.distributed.framework import INSIDE
from d5suite.distributed.gathering import gather
from d5suite.distributed.loops import loops_give_way
from d5suite.distributed.schemes import settings_from_dict
from d5suite.errors import BackendError
from d5suite.levels.backend import Backend
from d5suite.levels.distributed import Communicator
from d5suite.levels.native import Meeting, NativeSettings


def meet(
    backend: Backend,
    mode: str,
    scheme: str,
    settings: Mapping[str, Any],
    communicator: Communicator,
    *,
    device: str,
    precision: str,
    threads: int,
    local_rank: int,
    folder: Path | None,
) -> Callable[[], None]:
    """Let the framework connect the ranks; return the function that disconnects them. Collective.

    Parameters
    ----------
    backend : Backend
    mode, scheme : str
    settings : mapping
        Settings of the scheme.
    communicator : Communicator
        Already connects the ranks.
    device, precision : str
    threads, local_rank : int
        Threads of this rank, and its number on its host.
    folder : Path or None
        A folder that all ranks see.

    Raises
    ------
    BackendError
        If the backend lacks the scheme here.
    """
    lacking = backend.lacks_scheme(scheme, mode=mode, device=device, precision=precision)
    if lacking:
        raise BackendError(lacking)
    chosen = settings_from_dict({"name": scheme, **settings}, backend)
    assert isinstance(chosen, NativeSettings)
    hosts: Sequence[str] = communicator.hosts
    if len(set(hosts)) > 1:  # a name may lead to another interface, or to 127.0.1.1
        addresses = [(each or "").partition(",")[0] for each in gather(communicator, communicator.network["address"])]
        hosts = addresses if all(addresses) else hosts
    meeting = Meeting(
        communicator.rank, communicator.size, local_rank, hosts, device, threads, folder,
        lambda value: gather(communicator, value),
    )  # fmt: skip
    with INSIDE:
        leave = backend.framework_scheme(scheme, mode).meet(meeting, chosen)
    loops_give_way(communicator.hosts, communicator.rank)
    return leave
