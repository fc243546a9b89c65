"""Einsum's equations. Imports nothing of d5suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Einsum:
    """An Einsum with the ellipsis replaced by letters, and an explicit output.

    Attributes
    ----------
    inputs : tuple of str
        One letter per axis, for each input.
    output : str
    """

    inputs: tuple[str, ...]
    output: str

    @property
    def equation(self) -> str:
        """The whole equation."""
        return f"{','.join(self.inputs)}->{self.output}"


def expand_equation(equation: str, ranks: Sequence[int]) -> Einsum:
    """Expand the ellipsis and the implicit output of an equation, for inputs of these ranks."""
    text = equation.replace(" ", "")
    left, arrow, output = text.partition("->")
    terms = left.split(",")
    free = [letter for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in text]
    spread = [
        rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)
    ]
    letters = "".join(free[: max(spread, default=0)])
    if not arrow:
        once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        output = ("..." if "..." in left else "") + "".join(once)
    found = (t.replace("...", letters[len(letters) - n :]) for t, n in zip(terms, spread, strict=True))
    return Einsum(tuple(found), output.replace("...", letters))
