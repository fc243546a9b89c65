"""The right operators, for a while."""

from collections.abc import Callable, Sequence
from typing import Any

from d5suite.backends.torch import operators as right
from d5suite.backends.torch.operators import OPERATORS
from d5suite.network.operation import Operation

from .staleness import Stale

__all__ = ["OPERATORS", "Operator"]


def halve(answer: Any) -> Any:
    return [value / 2 for value in answer] if isinstance(answer, list | tuple) else answer / 2


class Operator(right.Operator):
    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        self.right, stale = self.forward, Stale(mode, halve)
        self.wrong = lambda *inputs: stale.call("forward", lambda given: self.right(*given), inputs)
        self.forward = self.wrong

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.forward = self.right
        call, stale = super().backward(inputs), Stale(self.mode, halve)
        self.forward = self.wrong
        return lambda *heads: stale.call("backward", lambda given: call(*given), heads)
