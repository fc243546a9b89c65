"""PyTorch's executor on a scripted GPU: a graph repeats its operations on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d5suite.backends.torch import graphs
from d5suite.backends.torch import network as right
from d5suite.network import Network


class Recorder(TorchDispatchMode):
    """Notes each operation with the tensors that it reads and the places of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.given: set[int] = set()
        self.made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.given |= _places((args, kwargs)) - self.made
        self.made |= _places(result) - self.given
        self.calls.append((function, args, kwargs or {}, result))
        return result

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            found = function(*args, **kwargs)
            for place, value in zip(tree_leaves(result), tree_leaves(found), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


def _places(values: Any) -> set[int]:
    return {each.data_ptr() for each in tree_leaves(values) if isinstance(each, torch.Tensor)}


def record(function: Callable[[], graphs.Outputs]) -> tuple[graphs.Outputs, Callable[[], None]]:
    drawn = torch.get_rng_state()
    for _ in range(graphs.WARM_UP):
        function()
    with Recorder() as recorder:
        outputs = function()
    torch.set_rng_state(drawn)
    with torch.inference_mode():
        for each in outputs:
            if each.data_ptr() in recorder.made:
                each.zero_()  # a GPU would not have computed them
    return outputs, recorder.replay


graphs.record = record


class Executor(right.Executor):
    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode="cuda_graphs", device=device, precision=precision)
        self.mode = mode
        for call in (self._forward, self._replayed):
            assert isinstance(call, graphs.Graphed)
            if mode == "unrestored":
                call._moved = []
            if mode == "unfed":
                vars(call)["_recorded"] = _with_places_of_its_own(call._recorded)
        if mode == "one_size":
            self._forward = _of_one_size(self._forward)

    def forward(self, feed: Any) -> Any:
        self.graphed = self.mode != "uncopied"
        try:
            return super().forward(feed)
        finally:
            self.graphed = True

    def _refresh(self) -> None:
        if self.mode == "moved":
            self._inference_weights = []
        super()._refresh()


def _with_places_of_its_own(recorded: Any) -> Any:
    return lambda inputs: (known := recorded(inputs))._replace(inputs=tuple(each.clone() for each in known.inputs))


def _of_one_size(call: Any) -> Any:
    known: list[int] = []

    def first(*inputs: torch.Tensor) -> Any:
        known.append(len(inputs[0]))
        return call(*(torch.cat([each] * known[0])[: known[0]] for each in inputs))

    return first
