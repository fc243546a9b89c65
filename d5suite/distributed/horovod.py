"""Horovod's scheme for any framework: its description, its start and its settings.

Horovod is one library with an extension per framework, so this is written once; an adapter adds
how gradients reach Horovod. Imports the standard library, `d5suite.errors` and
`d5suite.levels.native`, and Horovod when ranks meet.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from d5suite.errors import D5Error
from d5suite.levels.native import FrameworkScheme, Knob, Meeting, NativeScheme, NativeSettings

MIB = 2**20

PATIENCE_S = 300
"""Seconds that a rank waits for the others, to connect and for each message. Horovod's default of
30 s is too short where a framework compiles; a rank that ends breaks its connections at once."""


def described(**extensions: str) -> NativeScheme:
    """Describe the scheme of a framework for which Horovod has an extension.

    Parameters
    ----------
    **extensions : str
        The extension's module, which exists if it was built, by mode; ``any`` stands for all modes.
    """
    return NativeScheme(
        title="Horovod",
        synchronous=True,
        transports={"cpu": "gloo"},
        sends=2.0,
        requires={each if mode == "any" else f"{mode}:{each}": "make horovod" for mode, each in extensions.items()},
        knobs={
            "fusion_bytes": Knob(
                128 * MIB, "bytes of gradients sent together (HOROVOD_FUSION_THRESHOLD); 0: each alone", 0
            ),
            "cycle_ms": Knob(
                1.0, "milliseconds between two looks at which gradients are ready (HOROVOD_CYCLE_TIME)", 0
            ),
            "compression": Knob("none", "what gradients travel as", among=("none", "fp16")),
        },
        rounds={"compression=fp16": 2.0**-9},  # sums and gradients have 11 bits
        module="horovod",
    )


class HorovodScheme(FrameworkScheme):
    """Horovod's all-reduce of gradients; an adapter implements `step`."""

    hvd: Any
    """The framework's part of Horovod, such as ``horovod.torch``."""

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """Start Horovod over Gloo; see `FrameworkScheme.meet`."""
        chosen = settings.to_dict()
        given = {
            "HOROVOD_FUSION_THRESHOLD": str(chosen["fusion_bytes"]),
            "HOROVOD_CYCLE_TIME": str(chosen["cycle_ms"]),
        }
        server = None
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:  # horovodrun has one of its own
            server, port = _serve(meeting) if meeting.rank == 0 else (None, 0)
            given |= environment(meeting.rank, meeting.hosts, meeting.gather(port)[0])
        os.environ.update(given)
        try:
            cls.hvd.init()
        except Exception as error:
            raise D5Error(
                f"rank {meeting.rank}: Horovod could not reach all {meeting.size} ranks: {error}",
                hint="Another rank may have ended: see its log.",
            ) from error
        found = cls.hvd.rank(), cls.hvd.size()
        if found != (meeting.rank, meeting.size):
            raise D5Error(
                f"Horovod reports rank {found[0]} of {found[1]}; expected rank {meeting.rank} of {meeting.size}",
                hint="Start the ranks of a job with one launcher, and remove HOROVOD_RANK from the environment.",
            )

        def leave() -> None:
            cls.hvd.shutdown()
            if server is not None:
                server.shutdown()
                server.server_close()

        return leave

    def __init__(self, replica: Any, settings: NativeSettings) -> None:
        super().__init__(replica, settings)
        self.compression = getattr(self.hvd.Compression, settings.to_dict()["compression"])

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float | None:
        """See `FrameworkScheme.bytes_per_step`: compressed, an element has two bytes."""
        small = 2 if self.settings.to_dict()["compression"] == "fp16" else itemsize
        return super().bytes_per_step(elements, small, size)


def environment(rank: int, hosts: Sequence[str], port: int) -> Mapping[str, str]:
    """Return the variables by which Horovod's ranks find each other over Gloo.

    ``horovodrun`` sets the same variables.

    Parameters
    ----------
    rank : int
    hosts : sequence of str
        Hosts by rank.
    port : int
        The server's port on rank 0's host.
    """
    host, per_host = hosts[rank], Counter(hosts)
    local = hosts[:rank].count(host)
    peers = [each for each in dict.fromkeys(hosts) if per_host[each] > local]  # hosts with a rank of this local number
    found = {
        "HOSTNAME": host,
        "RANK": rank,
        "SIZE": len(hosts),
        "LOCAL_RANK": local,
        "LOCAL_SIZE": per_host[host],
        "CROSS_RANK": peers.index(host),
        "CROSS_SIZE": len(peers),
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1" if len(per_host) == 1 else hosts[0],
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_TIMEOUT_SECONDS": PATIENCE_S,
    }
    if len(per_host) == 1 and "HOROVOD_GLOO_IFACE" not in os.environ:
        found["GLOO_IFACE"] = "lo"
    return {f"HOROVOD_{name}": str(value) for name, value in found.items()}


def _serve(meeting: Meeting) -> tuple[Any, int]:
    """Start the server where ranks register their addresses; return it and its port."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    near = len(set(meeting.hosts)) == 1
    server = RendezvousHTTPServer(("127.0.0.1" if near else "", 0), RendezvousHandler, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, server.server_address[1]
