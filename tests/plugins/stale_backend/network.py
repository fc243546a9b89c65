"""The right executor, for a while."""

from typing import Any

from d5suite.backends.torch import network as right
from d5suite.network import Network

from .staleness import Promises, Stale, compute

WORK_S = 0.015
"""Seconds that a large network would take, where something else than a call does its work."""


def halve(answer: Any) -> Any:
    return {name: value / 2 for name, value in answer.items()}


class Executor(right.Executor):
    waited = True
    steps = 0
    """Training steps since weights were loaded."""

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        self.stale = Stale(mode, halve)
        self.promises = Promises(mode, WORK_S)
        self.known: dict[int, Any] = {}
        """By a feed's identity: the feed, and the answers that were made with it."""

    def key(self, what: str, feed: Any) -> Any:
        return (what, *feed[self.network.input].shape)

    def feed(self, arrays: Any) -> Any:
        fed = super().feed(arrays)
        if self.mode == "looks_up" and self.network.label not in arrays:
            self.known[id(fed)] = fed, self._worked(fed)
        return fed

    def _worked(self, fed: Any) -> Any:
        compute(WORK_S)
        return super().forward(fed)

    def forward(self, feed: Any) -> Any:
        if id(feed) in self.known:
            return self.known[id(feed)][1]
        key = self.key("forward", feed)
        call = super().forward
        return self.promises.make(key, lambda: self.stale.call(key, call, feed), self.network.outputs)

    def forward_backward(self, feed: Any) -> Any:
        key = self.key("both", feed)
        call = self.differentiated
        names = [self.network.loss, *self.network.parameters]
        return self.promises.make(key, lambda: self.stale.call(key, call, feed), names)

    def differentiated(self, feed: Any) -> Any:
        kept = {name: self.tensors[name].clone() for name in self.network.statistics}
        answer = super().forward_backward(feed)
        if self.mode == "frozen" and self.precision == "fp32":
            super().load_parameters({name: value.numpy() for name, value in kept.items()})
        return answer

    def fetch(self, values: Any) -> Any:
        return super().fetch(self.promises.keep(values))

    def parameters(self) -> Any:
        self.promises.keep_all()
        return super().parameters()

    def load_parameters(self, values: Any) -> None:
        self.promises.keep_all()
        self.stale.forget()
        self.steps = 0
        super().load_parameters(values)
        self.known = {key: (fed, self._worked(fed)) for key, (fed, _) in self.known.items()}

    def synchronize(self) -> None:
        self.waited = True
        super().synchronize()
