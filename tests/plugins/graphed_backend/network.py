"""PyTorch's executor on a scripted GPU: to replay a graph computes anew, into the same places."""

from collections.abc import Callable
from typing import Any

import torch

from d5suite.backends.torch import graphs
from d5suite.backends.torch import network as right
from d5suite.network import Network


def record(function: Callable[[], graphs.Outputs]) -> tuple[graphs.Outputs, Callable[[], None]]:
    drawn = torch.get_rng_state()
    for _ in range(graphs.WARM_UP):
        function()
    places = tuple(each.clone() for each in function())
    torch.set_rng_state(drawn)
    for place in places:
        with torch.inference_mode(place.is_inference()):
            place.zero_()

    def replay() -> None:
        for place, value in zip(places, function(), strict=True):
            with torch.inference_mode(place.is_inference()):
                place.copy_(value)

    return places, replay


graphs.record = record


class Executor(right.Executor):
    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode="cuda_graphs", device=device, precision=precision)
        self.mode = mode
        for call in (self._forward, self._differentiate):
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
