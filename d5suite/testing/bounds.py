"""Tolerances that carry their names, and the largest error measured against each of them.

Imports d5suite's contract and `d5suite.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from d5suite.levels.backend import Backend
from d5suite.levels.description import PRECISIONS, Tolerance
from d5suite.validate.check import Check

KINDS = ("outputs", "gradients", "trajectory")
"""The figures of a `Tolerance`."""


class Bound(float):
    """A declared tolerance, or a multiple of one.

    Attributes
    ----------
    precision, kind : str
        The tolerance is ``Backend.tolerances[precision].kind``.
    declared : float
        The declared figure.
    """

    precision: str
    kind: str
    declared: float

    @classmethod
    def of(cls, value: float, precision: str, kind: str, declared: float) -> Bound:
        """Return a tolerance with its name."""
        made = cls(value)
        made.precision, made.kind, made.declared = precision, kind, declared
        return made

    def __mul__(self, factor: Any) -> Bound:
        return Bound.of(float(self) * float(factor), self.precision, self.kind, self.declared)

    __rmul__ = __mul__

    def __str__(self) -> str:
        text = f"Backend.tolerances[{self.precision!r}].{self.kind}"
        times = float(self) / self.declared if self.declared else 1.0
        return text if times == 1 else f"{text}, {self.declared:.3g}, times the network's sensitivity, {times:.3g}"


def with_bounds(backend: Backend) -> Backend:
    """Return the backend with tolerances that carry their names."""

    def named(given: Tolerance, precision: str) -> Tolerance:
        o, g, t = (Bound.of(getattr(given, kind), precision, kind, getattr(given, kind)) for kind in KINDS)
        return replace(given, outputs=o, gradients=g, trajectory=t)

    return replace(backend, tolerances={p: named(given, p) for p, given in backend.tolerances.items()})


def explained(check: Check, precision: str) -> str:
    """Return what a failed check found, with the precision and the source of the tolerance."""
    if isinstance(check.tolerance, Bound):
        return f"{check.finding} ({check.tolerance})"
    known = any(each in check.name for each in PRECISIONS)
    return f"{check.finding} ({'' if known or not precision else f'in {precision}; '}a tolerance of the kit)"


@dataclass
class SeenAnswers:
    """The largest error of a run by declared tolerance, in the tolerance's unit.

    Attributes
    ----------
    worst : dict
        By precision and kind: the error, and the case with that error.
    checks : dict
        By precision and kind: the number of checks.
    """

    worst: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    checks: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, check: Check, case: str) -> None:
        """Record a check of a case, whether it passed or not."""
        bound = check.tolerance
        if isinstance(bound, Bound):
            key = bound.precision, bound.kind
            error = check.error * bound.declared / float(bound) if bound else check.error
            self.checks[key] = self.checks.get(key, 0) + 1
            if not error <= self.worst.get(key, (-1.0, ""))[0]:
                self.worst[key] = error, case

    def lines(self, backend: Backend) -> list[str]:
        """Return a table of every declared tolerance and the largest error."""
        rows = [f"{'errors seen, by tolerance':<26}{'declared':>13}{'worst':>13}{'checks':>8}  case"]
        for precision in backend.precisions:
            tolerance = backend.tolerances[precision]
            for kind in KINDS:
                error, case = self.worst.get((precision, kind), (None, "no check of this run needs it"))
                rows.append(
                    f"{f'{precision} {kind}':<26}{getattr(tolerance, kind):>13.3g}"
                    f"{'-' if error is None else f'{error:.2g}':>13}{self.checks.get((precision, kind), 0):>8}  {case}"
                )
        return rows
