"""CUDA graphs: the work of a function, recorded once for inputs of each shape and replayed.

Imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

WARM_UP = 3
"""Calls before recording, on a separate stream, as PyTorch's notes on CUDA semantics require: in
them, libraries choose algorithms and allocate workspaces."""

Outputs = tuple[torch.Tensor, ...]


class RecordedCall(NamedTuple):
    """A recorded call.

    Attributes
    ----------
    inputs, outputs : tuple of torch.Tensor
        The memory that the call reads and writes.
    replay : callable
        Repeats the call's work.
    """

    inputs: tuple[torch.Tensor, ...]
    outputs: Outputs
    replay: Callable[[], None]


class Graphed:
    """A function of tensors that is recorded when it is first called with inputs of some shapes.

    Its outputs stay in the memory of the recorded call, so that the next call overwrites them.

    Parameters
    ----------
    function : callable
        Takes and returns tensors. Other memory that it reads or writes must keep its address.
    moved : sequence of torch.Tensor
        Tensors that the function changes in place; recording restores their values.
    """

    def __init__(self, function: Callable[..., Outputs], moved: Sequence[torch.Tensor] = ()) -> None:
        self._function, self._moved = function, moved
        self._known: dict[tuple[object, ...], RecordedCall] = {}

    def __call__(self, *inputs: torch.Tensor) -> Outputs:
        key = tuple((each.shape, each.dtype, each.stride()) for each in inputs)
        if key not in self._known:
            self._known[key] = self._recorded(inputs)
        known = self._known[key]
        for place, given in zip(known.inputs, inputs, strict=True):
            place.copy_(given)
        known.replay()
        return known.outputs

    def _recorded(self, inputs: Sequence[torch.Tensor]) -> RecordedCall:
        places = tuple(each.clone() for each in inputs)
        before = [each.detach().clone() for each in self._moved]
        outputs, replay = record(lambda: self._function(*places))
        with torch.no_grad():
            for tensor, value in zip(self._moved, before, strict=True):
                tensor.copy_(value)
        return RecordedCall(places, outputs, replay)


def record(function: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """Record the work that a function issues to the GPU.

    Recording leaves the state of the GPU's random generator unchanged.

    Returns
    -------
    tuple of torch.Tensor
        The function's outputs, which have no values before the first replay.
    callable
        Replays the work.
    """
    drawn = torch.cuda.get_rng_state()
    current, own = torch.cuda.current_stream(), torch.cuda.Stream()
    own.wait_stream(current)
    with torch.cuda.stream(own):
        for _ in range(WARM_UP):
            function()
    current.wait_stream(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    torch.cuda.set_rng_state(drawn)
    return outputs, graph.replay
