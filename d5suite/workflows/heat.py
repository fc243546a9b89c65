"""The heat equation on the unit square, by an explicit stencil on several ranks.

du/dt = Δu, u = 0 at the boundary, forward in time and centred in space (FTCS). With spacing h and
time step h²/5 the error is of order h². A product of sines, k half waves along one side and m along
the other, is an eigenvector of the stencil. So after n steps it is the initial one times
``(1 - 4 r (sin²(kπh/2) + sin²(mπh/2)))ⁿ``, r = 1/5 (LeVeque, Finite Difference Methods for Ordinary
and Partial Differential Equations, SIAM 2007, chapter 9), while the equation itself says
``exp(-(k² + m²) π² t)``. Imports NumPy and its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.levels.distributed import segments
from d5suite.validate.check import Check
from d5suite.validate.norms import relative_l2
from d5suite.workflows.base import Place, Program
from d5suite.workflows.couplings.base import Field, Fields
from d5suite.workflows.group import Subcommunicator

RATIO = 0.2
"""Time step over h²; the stencil is stable up to 1/4."""

ROUNDING = 1e-10
"""Accepted relative error of the stencil against its own closed form: thousands of steps of a few
units of roundoff each."""

UP, DOWN = 1, 2
"""Tags of rows that go to the rank above, and below."""

Modes = Sequence[tuple[int, int, float]]
"""Half waves along both sides, and the amplitude in kelvin."""


class Stencil:
    """Some rows of the inner points of an n × n grid, with a halo of one row at each side.

    Parameters
    ----------
    points : int
        Inner points a side: h = 1 / (points + 1).
    group : Subcommunicator or None
        The ranks that share the rows; None for one process.
    """

    def __init__(self, points: int, group: Subcommunicator | None = None) -> None:
        self.points, self.group = points, group
        self.h = 1.0 / (points + 1)
        rank, ranks = (group.rank, group.size) if group is not None else (0, 1)
        self.rows = segments(points, ranks)[rank]
        self._above, self._below = rank - 1, rank + 1 if rank + 1 < ranks else -1
        count = self.rows.stop - self.rows.start
        self._held = np.zeros((2, count + 2, points + 2))
        self.steps = 0

    @property
    def field(self) -> np.ndarray:
        """Own rows, float64 (rows, points), in kelvin; a view."""
        return self._held[0, 1:-1, 1:-1]

    @property
    def time(self) -> float:
        """Time so far."""
        return self.steps * RATIO * self.h**2

    def set(self, modes: Modes) -> None:
        """Begin with a sum of sines."""
        self._held[:] = 0.0
        self.field[:] = waves(self.points, modes)[self.rows]
        self.steps = 0

    def advance(self, steps: int) -> None:
        """Make steps."""
        for _ in range(steps):
            self._exchange()
            old, new = self._held
            inner = old[1:-1, 1:-1]
            around = old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]
            np.add(inner, RATIO * (around - 4.0 * inner), out=new[1:-1, 1:-1])
            self._held = self._held[::-1]
            self.steps += 1

    def _exchange(self) -> None:
        """Fetch the rows next to one's own from the ranks above and below."""
        group, held = self.group, self._held[0]
        if group is None or group.size == 1:
            return
        edges = [(self._above, 1, 0, UP, DOWN), (self._below, -2, -1, DOWN, UP)]
        pending = [group.ireceive(held[halo], other, tag) for other, _, halo, _, tag in edges if other >= 0]
        pending += [group.isend(held[own], other, tag) for other, own, _, tag, _ in edges if other >= 0]
        for each in pending:
            each.wait()


def waves(points: int, modes: Modes, steps: int | None = None, moment: float | None = None) -> np.ndarray:
    """Return a sum of sines on the inner points, float64 (points, points), in kelvin.

    Parameters
    ----------
    points : int
    modes : sequence of tuple
    steps : int, optional
        After so many steps of the stencil, in exact arithmetic.
    moment : float, optional
        After so much time of the equation.
    """
    h = 1.0 / (points + 1)
    x = np.arange(1, points + 1) * h
    found = np.zeros((points, points))
    for k, m, amplitude in modes:
        factor = 1.0
        if steps is not None:
            factor = (1.0 - 4.0 * RATIO * (np.sin(k * np.pi * h / 2) ** 2 + np.sin(m * np.pi * h / 2) ** 2)) ** steps
        if moment is not None:
            factor = float(np.exp(-(k * k + m * m) * np.pi**2 * moment))
        found += amplitude * factor * np.outer(np.sin(k * np.pi * x), np.sin(m * np.pi * x))
    return found


def drawn_modes(seed: int, count: int = 3, highest: int = 3) -> Modes:
    """Draw a sum of sines, the same on all ranks."""
    random = np.random.default_rng([seed, count, highest])
    return [
        (int(random.integers(1, highest + 1)), int(random.integers(1, highest + 1)), float(random.uniform(0.5, 1.0)))
        for _ in range(count)
    ]


class HeatSimulation(Program):
    """The stencil, which gives its rows after every few steps.

    After the last step it takes the field that a surrogate has predicted for some steps more, makes
    the rest itself, and states the physical error.
    """

    name = "heat"
    role = "simulation"
    parts = ("advance", "predicted_rows")
    options: ClassVar[Mapping[str, object]] = {"points": 32, "stride": 10, "rest": 2, "slow_s": 0.0}

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.points, self.stride = int(self.option("points")), int(self.option("stride"))
        if self.points % place.ranks:
            raise ConfigurationError(
                f"{self.points} points a side cannot be divided among {place.ranks} ranks of {place.component}",
                hint="Choose another number of ranks, or of points.",
            )
        self.modes = drawn_modes(place.seed)
        self.stencil = Stencil(self.points, place.group)
        self._errors: dict[str, float] = {}

    def gives(self) -> Mapping[str, Fields]:
        rows = self.stencil.rows
        return {"snapshots": {"temperature": Field((rows.stop - rows.start, self.points), "float64", "K")}}

    def takes(self) -> Mapping[str, Fields]:
        return {"predicted": {"temperature": Field((self.points, self.points), "float64", "K")}}

    def start(self) -> None:
        self.stencil.set(self.modes)
        self._errors = {}

    def advance(self, steps: int) -> None:
        """Make steps of the stencil; a planted slow simulation sleeps as well."""
        self.stencil.advance(steps)
        if self.option("slow_s"):
            time.sleep(self.option("slow_s"))

    def step(self, step: int) -> bool:
        self.advance(self.stride)
        self.place.out["snapshots"].put(step, {"temperature": np.ascontiguousarray(self.stencil.field)})
        return True

    def predicted_rows(self) -> int:
        """Take the predicted field; return how many strides it is ahead."""
        found = self.place.into["predicted"].get()
        if found is None:
            return 0
        self.stencil.field[:] = found.arrays["temperature"][self.stencil.rows]
        return found.step - self.place.steps + 1

    def finish(self) -> None:
        if "predicted" not in self.place.into:
            return
        before = self.stencil.field.copy()
        ahead = self.predicted_rows()
        rest = int(self.option("rest"))
        self.stencil.steps += ahead * self.stride
        self.stencil.advance(rest * self.stride)
        expected = waves(self.points, self.modes, steps=self.stencil.steps)[self.stencil.rows]
        sums = np.array([
            np.sum((self.stencil.field - expected) ** 2), np.sum(expected**2), np.sum((before - expected) ** 2)
        ])  # fmt: skip
        self.place.group.all_reduce(sums)
        self._errors = {
            "surrogate_strides": float(ahead), "strides_after": float(rest),
            "physical_error": float(np.sqrt(sums[0] / sums[1])),
            "error_of_standing_still": float(np.sqrt(sums[2] / sums[1])),
        }  # fmt: skip

    def state(self) -> dict[str, np.ndarray]:
        return {"field": self.stencil.field.copy(), "steps": np.array(self.stencil.steps)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self.stencil.field[:] = state["field"]
        self.stencil.steps = int(state["steps"])

    def result(self) -> dict[str, np.ndarray]:
        return {"field": self.stencil.field.copy()}

    def figures(self) -> dict[str, float]:
        return self._errors

    def checks(self) -> Iterable[Check]:
        """Check the stencil on this rank: its rows against the closed form of the stencil."""
        self.start()
        steps = self.place.steps * self.stride
        self.stencil.advance(steps)
        expected = waves(self.points, self.modes, steps=steps)[self.stencil.rows]
        error = relative_l2(self.stencil.field, expected)
        yield Check(f"{self.place.component}: temperature after {steps} steps vs closed form", error, ROUNDING)
