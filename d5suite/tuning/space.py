"""A space of knobs, its candidates, and what a candidate sets.

A candidate has a value for each knob. A knob whose condition does not hold has its default, so that
two candidates that do the same are equal. Imports `d5suite.levels` and `d5suite.errors`.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.levels.knobs import BATCH, MODE, TuningKnob

Candidate = tuple[str, ...]
"""A value for each knob of a space, in the space's order."""


@dataclass(frozen=True)
class Change:
    """What a candidate sets.

    Attributes
    ----------
    mode : str or None
        Mode of the backend; None for the chosen one.
    settings : mapping of str to object
        Fields of `d5suite.cases.case.Settings`.
    environment : mapping of str to str
        Variables of the worker.
    items : float
        Logarithm of the items of a step, over those of the default.
    """

    mode: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    items: float = 0.0


@dataclass(frozen=True)
class Space:
    """Knobs, those that others depend on first.

    Attributes
    ----------
    knobs : tuple of TuningKnob

    Raises
    ------
    ConfigurationError
        If a knob is there twice or has fewer than two different values, or a condition can never
        hold: it names a knob that is not there before it, or a value that this one lacks.
    """

    knobs: tuple[TuningKnob, ...]

    def __post_init__(self) -> None:
        known: dict[str, TuningKnob] = {}
        for knob in self.knobs:
            where = f"knob {knob.name}"
            if knob.name in known:
                raise ConfigurationError("there are two knobs of this name", where=where)
            if len(set(knob.values)) < max(2, len(knob.values)):
                raise ConfigurationError("it needs two values or more, all different", where=where)
            for other, values in knob.when.items():
                if other not in known:
                    raise ConfigurationError(f"it depends on {other!r}, which is not before it", where=where)
                if not values or set(values) - set(known[other].values):
                    lacking = ", ".join(map(repr, sorted(set(values) - set(known[other].values)))) or "no value at all"
                    raise ConfigurationError(f"it depends on {other} being {lacking}, which never is", where=where)
            known[knob.name] = knob
        for knob in self.knobs:
            if not any(self.is_active(knob, values) for values in self._settings_of(knob)):
                raise ConfigurationError("its conditions contradict each other", where=f"knob {knob.name}")

    def _settings_of(self, knob: TuningKnob) -> Iterator[dict[str, str]]:
        """Yield all values of the knobs that a knob depends on, directly or not."""
        needed = set(knob.when)
        for other in reversed(self.knobs):
            if other.name in needed:
                needed |= set(other.when)
        above = [other for other in self.knobs if other.name in needed]
        for values in itertools.product(*(other.values for other in above)):
            yield self._kept(above, dict(zip((other.name for other in above), values, strict=True)))

    @cached_property
    def default(self) -> Candidate:
        """The candidate that changes nothing."""
        return tuple(knob.default for knob in self.knobs)

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each knob, by name."""
        return {knob.name: place for place, knob in enumerate(self.knobs)}

    def is_active(self, knob: TuningKnob, values: Mapping[str, str]) -> bool:
        """Return whether a knob has an effect, given the values of those before it."""
        return all(values[other] in wanted for other, wanted in knob.when.items())

    def complete(self, values: Mapping[str, str]) -> Candidate:
        """Return the candidate with these values; knobs without an effect get their default.

        Raises
        ------
        ConfigurationError
            If there is no such knob or value.
        """
        for name, value in values.items():
            if name not in self.places:
                raise ConfigurationError(f"there is no knob {name!r}", hint=f"Knobs: {', '.join(self.places)}.")
            if value not in self.knobs[self.places[name]].values:
                known = ", ".join(repr(each) for each in self.knobs[self.places[name]].values)
                raise ConfigurationError(f"{name} has no value {value!r}", hint=f"Values: {known}.")
        return tuple(self._kept(self.knobs, values).values())

    def _kept(self, knobs: Sequence[TuningKnob], values: Mapping[str, str]) -> dict[str, str]:
        """Return the values of knobs, with the default of those without an effect."""
        found: dict[str, str] = {}
        for knob in knobs:
            found[knob.name] = values.get(knob.name, knob.default) if self.is_active(knob, found) else knob.default
        return found

    def changed(self, candidate: Candidate, **values: str) -> Candidate:
        """Return a candidate with some values changed."""
        return self.complete({**dict(zip(self.places, candidate, strict=True)), **values})

    def differences(self, candidate: Candidate, base: Candidate | None = None) -> dict[str, str]:
        """Return the values that differ from another candidate's, by default from the default's."""
        pairs = zip(self.places, candidate, self.default if base is None else base, strict=True)
        return {name: value for name, value, other in pairs if value != other}

    def moves(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidates that differ in the value of one active knob, in order of knobs."""
        for knob in self.knobs:
            for value in knob.values:
                other = self.changed(candidate, **{knob.name: value})
                if other != candidate and other[self.places[knob.name]] == value:
                    yield other

    def candidates(self) -> Iterator[Candidate]:
        """Yield all different candidates, the default first."""
        seen: set[Candidate] = set()
        for values in itertools.product(*(knob.values for knob in self.knobs)):
            found = self.complete(dict(zip(self.places, values, strict=True)))
            if found not in seen:
                seen.add(found)
                yield found

    def size(self) -> int:
        """Return the number of different candidates."""

        def count(place: int, values: dict[str, str]) -> int:
            if place == len(self.knobs):
                return 1
            knob = self.knobs[place]
            chosen = knob.values if self.is_active(knob, values) else (knob.default,)
            if not any(knob.name in later.when for later in self.knobs[place + 1 :]):
                return len(chosen) * count(place + 1, {**values, knob.name: chosen[0]})
            return sum(count(place + 1, {**values, knob.name: value}) for value in chosen)

        return count(0, {})

    def change(self, candidate: Candidate, environment: Mapping[str, str] = os.environ) -> Change:
        """Return what a candidate sets.

        Parameters
        ----------
        candidate : Candidate
        environment : mapping of str to str
            What the user has set: knobs that are part of a variable add to it.
        """
        mode, items, settings, variables = None, 0.0, dict[str, Any](), dict[str, list[str]]()
        for knob, value in zip(self.knobs, candidate, strict=True):
            if knob.variable and value:
                kept = environment.get(knob.variable, "") if knob.joins else ""
                parts = variables.setdefault(knob.variable, [kept] * bool(kept) + [knob.joins])
                parts.append(knob.texts.get(value, value))
            elif not knob.variable and value != knob.default:
                if knob.name == MODE:
                    mode = value
                else:
                    settings[knob.name] = knob.value_of(value)
                if knob.name == BATCH:
                    items = math.log(int(value) / int(knob.default))
        joined = {}
        for name, parts in variables.items():
            joins = next(knob.joins for knob in self.knobs if knob.variable == name)
            joined[name] = joins.join(part for part in parts if part != joins)
        return Change(mode, settings, joined, items)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the space as JSON values."""
        return [
            {"name": knob.name, "values": list(knob.values), "when": {k: list(v) for k, v in knob.when.items()},
             "source": knob.source}
            for knob in self.knobs
        ]  # fmt: skip
