"""A parameter server: the first k ranks add a segment each, and send everyone the sum.

Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014. Servers are
ranks that train, too.

Imports NumPy and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from d5suite.distributed.algorithms.messages import TAG
from d5suite.levels.distributed import Collective, Communicator, segments


def parameter_server(servers: int) -> Mapping[str, Collective]:
    """Return the collectives with this many servers, at most one per rank."""

    def all_reduce(communicator: Communicator, array: np.ndarray) -> None:
        """Send each server its segment and receive the sum: its own first, then others by rank."""
        flat, me = array.reshape(-1), communicator.rank
        parts = dict(enumerate(flat[part] for part in segments(flat.size, min(servers, communicator.size))))
        others = [rank for rank in range(communicator.size) if rank != me]
        own = parts.pop(me, None)
        sent = [communicator.isend(part, server, TAG) for server, part in parts.items()]
        if own is not None:
            taken = np.empty_like(own, shape=(len(others), own.size))
            receipts = [communicator.ireceive(row, other, TAG) for row, other in zip(taken, others, strict=True)]
            for receipt, row in zip(receipts, taken, strict=True):
                receipt.wait()
                np.add(own, row, out=own)
        for request in sent:
            request.wait()
        if own is not None:
            sent = [communicator.isend(own, other, TAG) for other in others]
        receipts = [communicator.ireceive(part, server, TAG) for server, part in parts.items()]
        for request in [*receipts, *(sent if own is not None else [])]:
            request.wait()

    return {"all_reduce": all_reduce}
