"""A search's course as JSON values: trials of an earlier run, wrong candidates, a Pareto list.

Imports its neighbours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from d5suite.errors import ConfigurationError
from d5suite.tuning.space import Candidate, Space
from d5suite.tuning.trials import Trial

FIGURES = ("time", "p99_s", "memory_bytes", "energy_j")
"""What trials are compared by in a Pareto list."""


def wrong(trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the candidates whose answers were wrong; those that were timed with their times."""
    return [
        {"knobs": each["knobs"], "time": None if each["time"] is None else math.exp(each["time"]),
         "reason": each["reason"]}
        for each in trials if each["status"] == "wrong"
    ]  # fmt: skip


def pareto(trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the trials that no other one beats in one figure without losing in another.

    Parameters
    ----------
    trials : sequence of mapping
        Trials of one course. A figure that any trial lacks is left out for all trials.
    """
    sound = [each for each in trials if each["status"] == "measured"]
    points = [{"time": math.exp(each["time"]), **each["figures"]} for each in sound]
    names = [name for name in FIGURES if points and all(_is_known(point.get(name)) for point in points)]

    def beats(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
        return all(one[n] <= other[n] for n in names) and any(one[n] < other[n] for n in names)

    return [
        {"knobs": each["knobs"], **{name: point[name] for name in names}}
        for each, point in zip(sound, points, strict=True)
        if not any(beats(other, point) for other in points)
    ]


def _is_known(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def known_trials(course: Mapping[str, Any], space: Space) -> dict[Candidate, list[dict[str, Any]]]:
    """Return the trials of an earlier run by candidate.

    Raises
    ------
    ConfigurationError
        If that run had another space. The order of the knobs does not matter.
    """
    if _unordered(course.get("space")) != _unordered(space.to_list()):
        raise ConfigurationError(
            "the earlier run had another space of knobs", where="--resume",
            hint="Leave --resume out to begin anew.",
        )  # fmt: skip
    found: dict[Candidate, list[dict[str, Any]]] = {}
    for each in course.get("trials", []):
        found.setdefault(space.complete(each["knobs"]), []).append(dict(each))
    return found


def _unordered(knobs: object) -> list[str]:
    return sorted(json.dumps(each, sort_keys=True) for each in knobs) if isinstance(knobs, list) else []


def trial_of(content: Mapping[str, Any]) -> Trial:
    """Return a trial from its JSON values."""
    number = {name: math.nan if content[name] is None else float(content[name]) for name in ("value", "time")}
    return Trial(content["status"], number["value"], number["time"], blocks=content["blocks"],
                 seconds=content["seconds"], reason=content["reason"], figures=dict(content["figures"]))  # fmt: skip
