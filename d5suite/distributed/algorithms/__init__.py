"""Collective algorithms over point-to-point messages, by name.

Imports NumPy, `d5suite.errors` and `d5suite.levels.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping

from d5suite.distributed.algorithms.doubling import HALVING_DOUBLING, RECURSIVE_DOUBLING
from d5suite.distributed.algorithms.hierarchical import HIERARCHICAL
from d5suite.distributed.algorithms.pairwise import PAIRWISE
from d5suite.distributed.algorithms.ring import RING
from d5suite.distributed.algorithms.server import parameter_server
from d5suite.distributed.algorithms.tree import TREE
from d5suite.levels.distributed import Collective

DEFAULTS: Mapping[str, Collective] = {**TREE, **RING, **PAIRWISE}
"""An algorithm of every collective, for a transport that has none of its own."""

ALGORITHMS: Mapping[str, Mapping[str, Collective]] = {
    "native": {},
    "ring": RING,
    "halving_doubling": HALVING_DOUBLING,
    "recursive_doubling": RECURSIVE_DOUBLING,
    "tree": TREE,
    "hierarchical": HIERARCHICAL,
    "parameter_server": parameter_server(1),
    "parameter_server_2": parameter_server(2),
    "parameter_server_4": parameter_server(4),
}
"""By algorithm, by collective: ``function(communicator, array, **more)``, in place.

A collective that an algorithm lacks is the transport's own.
"""
