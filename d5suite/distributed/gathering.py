"""Exchange of values other than arrays. Imports NumPy and `d5suite.levels.distributed`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5suite.levels.distributed import Communicator


def gather(communicator: Communicator, value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective.

    Parameters
    ----------
    communicator : Communicator
    value : object
        JSON-able; numbers need not be finite.
    """
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.zeros(communicator.size, np.int64)
    lengths[communicator.rank] = len(content)
    communicator.all_gather(lengths)
    longest = int(lengths.max())
    rows = np.zeros((communicator.size, longest), np.uint8)
    rows[communicator.rank, : len(content)] = content
    communicator.all_gather(rows)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def disagreements(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Return texts that say in which facts ranks differ, and which ranks.

    Parameters
    ----------
    facts, hosts
        Facts by name, and hosts, of each rank.
    """
    found = []
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name, "none") for each in facts]
        by_value = {value: [rank for rank, own in enumerate(values) if own == value] for value in dict.fromkeys(values)}
        if len(by_value) > 1:
            most = max(by_value.values(), key=len)
            said = [
                f"{value} on rank {', '.join(f'{rank} ({hosts[rank]})' for rank in ranks)}"
                for value, ranks in by_value.items()
                if ranks is not most
            ]
            usual = next(value for value, ranks in by_value.items() if ranks is most)
            said.append(f"{usual} on {'the others' if len(most) > 1 else f'rank {most[0]} ({hosts[most[0]]})'}")
            found.append(f"{name}: {', '.join(said)}")
    return found
