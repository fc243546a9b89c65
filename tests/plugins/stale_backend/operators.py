"""The right operators, for a while."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from d5suite.backends.torch import operators as right
from d5suite.backends.torch.operators import OPERATORS
from d5suite.network.operation import Operation

from .staleness import Stale, compute

__all__ = ["OPERATORS", "Operator"]


def halve(answer: Any) -> Any:
    return [value / 2 for value in answer] if isinstance(answer, list | tuple) else answer / 2


WORK_S = 0.05
"""Seconds that feeding or fetching takes where it does a call's work: four copies take less."""


class Promise:
    """An answer that is computed when it is first fetched."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    @cached_property
    def kept(self) -> Any:
        compute(WORK_S)
        return self.work()


class Operator(right.Operator):
    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        self.right, stale = self.forward, Stale(mode, halve)
        self.wrong = lambda *inputs: stale.call("forward", lambda given: self.right(*given), inputs)
        self.calls = 0
        self.known: dict[int, Any] = {}
        if mode == "looks_up":
            self.forward = lambda *inputs: self.known[id(inputs[0])][1]
        elif mode.startswith("promises"):
            self.forward = self.promise
        else:
            self.forward = self.wrong

    def promise(self, *inputs: Any) -> Any:
        self.calls += 1
        late = self.calls >= int(self.mode.removeprefix("promises") or 1)
        return Promise(lambda: self.right(*inputs)) if late else self.right(*inputs)

    def feed(self, arrays: Any) -> Any:
        fed = super().feed(arrays)
        if self.mode == "looks_up":
            compute(WORK_S)
            self.known[id(fed[0])] = fed, self.right(*fed)
        return fed

    def fetch(self, outputs: Any) -> Any:
        return super().fetch(outputs.kept if isinstance(outputs, Promise) else outputs)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        timed, self.forward = self.forward, self.right
        call, stale = super().backward(inputs), Stale(self.mode, halve)
        self.forward = timed
        return lambda *heads: stale.call("backward", lambda given: call(*given), heads)
