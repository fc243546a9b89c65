"""The placement map of ranks: node, cores, NUMA node, GPU and network interface of each."""

from __future__ import annotations

from typing import Any

from d5suite.distributed.gathering import gather
from d5suite.distributed.network import VARIABLES, named_interface
from d5suite.instruments.placement import describe_placement
from d5suite.levels.distributed import Communicator
from d5suite.measurements.schemas import array, integer, mapping, or_null, text

_NUMBERS = array(integer(minimum=0))

SCHEMA = array(
    mapping(
        {
            "rank": integer(minimum=0),
            "host": text(),
            "cpus": _NUMBERS,
            "sockets": _NUMBERS,
            "numa_nodes": _NUMBERS,
            "gpu": or_null(text("as CUDA counts them on the host")),
            "transport": or_null(text("what moves the data")),
            "interface": or_null(text("of the network; null: the transport does not say")),
            "address": or_null(text("of the interface")),
            "nic_numa_node": or_null(integer("of the interface's card", minimum=0)),
        }
    ),
    "by rank: where it ran, and by which way its messages went",
    minItems=1,
)


def placements(communicator: Communicator, device: str, transport: str = "") -> list[dict[str, Any]]:
    """Return every rank's place, as `SCHEMA` describes it. Collective.

    Parameters
    ----------
    communicator : Communicator
    device : str
    transport : str
        What moves the data, if it is not the communicator.
    """
    network = {"transport": transport, **named_interface(VARIABLES)} if transport else communicator.network
    own = {**describe_placement(device, network["interface"]), **network}
    found = gather(communicator, own)
    return [{"rank": rank, "host": communicator.hosts[rank], **each} for rank, each in enumerate(found)]
