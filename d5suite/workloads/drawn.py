"""The inputs of a user's own network: drawn at random, or given by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.data.random_inputs import RandomInput, RandomSource
from d5suite.network import Network
from d5suite.network.given_inputs import described, read_sample
from d5suite.network.user_network import input_ranges


def drawn_source(network: Network, settings: Mapping[str, Any], *, seed: int) -> RandomSource:
    """Return a source of batches for a user's network.

    Parameters
    ----------
    network : Network
    settings : mapping
        `NetworkCase.network`: the keys ``inputs`` and ``sample`` replace drawn inputs.
    seed : int
    """
    sample, ranges = _sample(settings), input_ranges(network)

    def source_of(name: str) -> RandomInput:
        shape, dtype = network.shapes[name][1 if network.batched else 0 :], network.dtypes[name]
        sizes, number = tuple(n or 0 for n in shape), settings.get("inputs", {}).get(name)
        if name in sample:
            return RandomInput(name, sizes, dtype, sample=sample[name] if network.batched else sample[name][None])
        if number is None:
            return RandomInput(name, sizes, dtype, ranges.get(name))
        if isinstance(number, Sequence):
            return RandomInput(name, sizes, dtype, (number[0], number[1]), given=True)
        return RandomInput(name, sizes, dtype, sample=np.full((1, *sizes), number, dtype))

    return RandomSource([source_of(name) for name in network.inputs], labels=_labels(network), seed=seed)


def _labels(network: Network) -> RandomInput:
    """Return the random input of labels; for a squared error, normal noise as targets."""
    name = network.label or ""
    cells = tuple(n or 1 for n in network.shapes[name][1:]) if name else ()
    if network.has_targets:
        return RandomInput(name, cells, network.dtypes[name])
    scores = [node.inputs[0] for node in network.nodes if node.op_type == "SoftmaxCrossEntropyLoss"]
    classes = next((network.shapes[each][1] for each in scores), None)
    return RandomInput(name, cells, np.dtype(np.int64), (0, classes or 1), given=True)


def given_in_words(settings: Mapping[str, Any]) -> dict[str, str]:
    """Describe in words, by input, the values that the user gives."""
    return described(settings.get("inputs", {}), _sample(settings))


def _sample(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return read_sample(Path(settings["sample"])) if settings.get("sample") else {}
