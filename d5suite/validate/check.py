"""A check: one comparison of an answer with its reference. Imports NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from d5suite.errors import ValidationError

UNTIMED = "Nothing was timed. The job file reproduces this: python -m d5suite.worker JOB"
"""Hint of a check that fails before timing."""


@dataclass(frozen=True)
class Check:
    """One comparison of an answer with its reference.

    Attributes
    ----------
    name : str
        What is compared with what.
    error, tolerance : float
        Relative L2 error, and the largest accepted error.
    detail : str
        The worst tensor or step.
    proof : mapping
        Facts about the whole proof for the record; see ``results/schema.json``.
    """

    name: str
    error: float
    tolerance: float
    detail: str = ""
    proof: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def worst(cls, name: str, errors: Mapping[str, float], tolerance: float) -> Check:
        """Combine many tensors into one check: the largest error, and the first wrong tensor."""
        worst = max(errors, key=lambda key: errors[key] if not math.isnan(errors[key]) else math.inf)
        wrong = next((key for key, error in errors.items() if not error <= tolerance), None)
        detail = f"worst: {worst}" if wrong is None else f"first tensor that disagrees: {wrong} ({errors[wrong]:.3g})"
        return cls(f"{name}, {len(errors)} tensors", errors[worst], tolerance, detail)

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance

    @property
    def finding(self) -> str:
        """A failed check in one sentence: what disagrees, by how much, and where first."""
        text = f"{self.name}: relative error {self.error:.3g} exceeds {self.tolerance:.3g}"
        return f"{text}; {self.detail}" if self.detail else text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; a non-finite error becomes the largest float."""
        error = self.error if math.isfinite(self.error) else float(np.finfo(np.float64).max)
        return {
            "name": self.name,
            "error": error,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "detail": self.detail,
        }


@dataclass
class Validation:
    """The checks made so far."""

    checks: list[Check] = field(default_factory=list)

    def require(self, checks: Iterable[Check], *, hint: str = UNTIMED) -> None:
        """Add checks; raise `ValidationError` with this hint at the first that fails."""
        for check in checks:
            self.checks.append(check)
            if not check.passed:
                raise ValidationError(check.finding, hint=hint)

    def to_dict(self) -> dict[str, Any]:
        """Return ``passed``, ``checks`` and facts about the whole proof, JSON-able."""
        facts = {key: value for check in self.checks for key, value in check.proof.items()}
        return {"passed": all(c.passed for c in self.checks), "checks": [c.to_dict() for c in self.checks], **facts}
