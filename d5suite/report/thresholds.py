"""Thresholds above which a change counts, by benchmark, and the TOML file that sets them.

Imports `d5suite.statistics`, `d5suite.errors` and `d5suite.files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.files import read_toml
from d5suite.statistics.decisions import Threshold


def chosen_names(names: Iterable[str], pattern: str) -> set[str]:
    """Return the names that match a shell pattern; if the pattern is a name, only that name."""
    known = set(names)
    return {pattern} if pattern in known else {name for name in known if fnmatchcase(name, pattern)}


PAIRED = Threshold(effect=0.02)
"""Threshold of two sides measured in turn, which share the machine's noise."""

NAMES = tuple(each.name for each in fields(Threshold))
_AT_LEAST = {"first_call": 1.0, "accuracy": 1.0, "figure": 1.0}


@dataclass
class Thresholds:
    """Thresholds of all benchmarks.

    Attributes
    ----------
    default : Threshold
    rules : list of (str, dict)
        Names or shell patterns of names, with the values they set; later ones win.
    matched : set of str
        Patterns that matched a benchmark.
    """

    default: Threshold = field(default_factory=Threshold)
    rules: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    matched: set[str] = field(default_factory=set)

    def of(self, name: str) -> Threshold:
        """Return the threshold of a benchmark."""
        threshold = self.default
        for pattern, values in self.rules:
            if name == pattern or fnmatchcase(name, pattern):
                self.matched.add(pattern)
                threshold = replace(threshold, **values)
        return threshold

    @property
    def unmatched(self) -> list[str]:
        """Patterns that have matched no benchmark so far."""
        return [pattern for pattern, _ in self.rules if pattern not in self.matched]


def read_thresholds(path: Path | None, default: Threshold = Threshold()) -> Thresholds:  # noqa: B008  immutable
    """Read a TOML file: tables ``default`` and ``[[benchmark]]`` with ``match``, a name or pattern.

    Parameters
    ----------
    path : Path or None
        Without a file, all have the default.
    default : Threshold
        For values that the file does not set.

    Raises
    ------
    ConfigurationError
        If the file cannot be read, is not TOML, or has an unknown name or a value out of range.
    """
    if path is None:
        return Thresholds(default)
    where = str(path)
    content, _ = read_toml(path)
    unknown = set(content) - {"default", "benchmark"}
    rules = content.get("benchmark", [])
    if unknown or not isinstance(rules, list):
        named = f"{sorted(unknown)[0]!r} is unknown" if unknown else "'benchmark' is not a list"
        raise ConfigurationError(named, where=where, hint="Write [default] and [[benchmark]].")
    thresholds = Thresholds(replace(default, **_values(content.get("default", {}), f"{where}, default")))
    for number, rule in enumerate(rules):
        place = f"{where}, benchmark {number + 1}"
        if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
            raise ConfigurationError("it has no 'match'", where=place, hint='Write match = "case/measurement *".')
        thresholds.rules.append((rule["match"], _values({k: v for k, v in rule.items() if k != "match"}, place)))
    return thresholds


def _values(given: Any, where: str) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise ConfigurationError("not a table", where=where, hint=f"It has {', '.join(NAMES)}.")
    for name, value in given.items():
        if name not in NAMES:
            raise ConfigurationError(f"{name!r} is unknown", where=where, hint=f"There are {', '.join(NAMES)}.")
        least = _AT_LEAST.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e6:
            raise ConfigurationError(f"{name} is {value!r}", where=where, hint=f"Give a number from {least:g} on.")
    return {name: float(value) for name, value in given.items()}
