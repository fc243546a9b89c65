"""Training steps that are kept while they are timed, so that they can be made again afterwards.

The proofs before and after timing cover the ends of a run. What lies between them is covered by
pairs of neighbouring steps, drawn at random: parameters, optimizer state and batch before each,
parameters after it. Everything is copied between samples, never within one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from d5suite.levels.network import Arrays, Native
from d5suite.levels.training import Trainer
from d5suite.validate.network.gradient_references import sampled
from d5suite.validate.training.formulas import OptimizerState

FIRST = 4
"""Number of the first step that may be kept: earlier ones are compared in another way."""

PAIRS = 3
"""Most pairs that are kept; later pairs replace the earliest."""

LARGE = 32 << 20
"""Bytes of parameters above which only the last pair is kept."""


@dataclass
class KeptStep:
    """One timed step.

    Attributes
    ----------
    number : int
        Number of the update, from 1.
    turn : int
        Number of its batch.
    start : mapping of str to numpy.ndarray
        All parameters and running statistics before the step.
    state : mapping of str to numpy.ndarray
        The optimizer's state before the step: whole with Dropout, else `sampled`.
    random : mapping of str to numpy.ndarray
        The state of Dropout's generator before the step.
    end : mapping of str to numpy.ndarray
        Parameters after the step, `sampled`; empty until then.
    loss : mapping
        The step's loss, on the device; empty until the step is made.
    """

    number: int
    turn: int
    start: Arrays
    state: OptimizerState
    random: Arrays
    end: Arrays = field(default_factory=dict)
    loss: Native = field(default_factory=dict)


class KeptSteps:
    """Pairs of neighbouring timed steps, one drawn within every doubling of their number.

    The number of steps is not known in advance. So the last pair lies in the second half of the
    run, or in the quarter before.

    Parameters
    ----------
    trainer : Trainer
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._draws = np.random.default_rng()  # other steps in every run
        self._steps: list[KeptStep] = []
        self._pair = range(0)
        self._between: Arrays | None = None
        self._doubling = 0
        network = trainer.executor.network
        whole = 4 * sum(network.initializers[name].size for name in network.parameters)
        self._pairs = 1 if whole > LARGE else PAIRS

    @property
    def complete(self) -> list[KeptStep]:
        """The steps whose ends are known, the earliest first."""
        return [each for each in self._steps if each.end]

    def before(self, number: int, turn: int) -> None:
        """Keep the state before step ``number``, on batch ``turn``, if the step was drawn."""
        if number < FIRST:
            return
        if number.bit_length() != self._doubling:
            self._doubling = number.bit_length()
            first = int(self._draws.integers(number, 2 * number - 1))
            self._pair = range(first, first + 2)
        if number not in self._pair:
            return
        executor = self._trainer.executor
        random = {name: value.copy() for name, value in executor.random_state().items()} if executor.drops else {}
        state = self._trainer.state()
        if not executor.drops:
            state = {key: sampled({key: value})[key] if "/" in key else value for key, value in state.items()}
        start = executor.parameters() if self._between is None else self._between
        self._between = None
        self._steps.append(KeptStep(number, turn, start, state, random))
        if number == self._pair[1]:
            del self._steps[: -2 * self._pairs]

    def after(self, number: int, loss: Native) -> None:
        """Keep the result of step ``number``, if the step was drawn."""
        if self._steps and self._steps[-1].number == number and not self._steps[-1].end:
            last, network = self._steps[-1], self._trainer.executor.network
            values = self._trainer.executor.parameters()
            last.end, last.loss = sampled({name: values[name] for name in network.parameters}), dict(loss)
            self._between = values if number + 1 in self._pair else None
