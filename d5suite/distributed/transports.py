"""A communicator as a backend whose modes are its algorithms, so that it can be measured.

Imports `d5suite.levels` and its neighbours.
"""

from __future__ import annotations

from functools import lru_cache

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.communicators import COMMUNICATORS
from d5suite.errors import ConfigurationError
from d5suite.levels.backend import Backend
from d5suite.levels.description import PRECISIONS, Tolerance

EXACT = Tolerance(0, 0, 0, "sums of small whole numbers have no rounding")


@lru_cache(maxsize=16)
def transport_backend(name: str) -> Backend:
    """Return a backend for the communicator of this name.

    Raises
    ------
    ConfigurationError
        If there is no such communicator.
    """
    if name not in COMMUNICATORS:
        raise ConfigurationError(f"there is no communicator {name!r}", hint=f"Known: {', '.join(COMMUNICATORS)}.")
    transport = COMMUNICATORS[name]
    return Backend(
        name=name,
        title=transport.title,
        package=__package__,
        requires=transport.requires,
        distributions=transport.requires,
        install=transport.install,
        modes={"native": "the transport's own", **dict.fromkeys(ALGORITHMS, "over single messages")},
        levels=frozenset({3}),
        devices=transport.devices,
        precisions=PRECISIONS,
        operators=frozenset(),
        tolerances=dict.fromkeys(PRECISIONS, EXACT),
        absent={
            "device events": "a collective ends when the last rank has its answer, on the host's clock",
            "L2 flush": "messages are written before each collective",
        },
    )
