"""How long a run still takes: an estimate from earlier runs and from what this one has done."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

GUESSES_S = {"starting": 6.0, "preparing": 3.0, "validating": 9.0, "measuring": 1.0, "proving": 1.5, "turns": 5.0}
"""Phases of a worker, in order, with a first guess of their duration in seconds. Turns are those of
all backends together."""

PHASE = re.compile(rf"\b({'|'.join(GUESSES_S)})\b(?:.* (\S+/\S+))?")
"""Finds the name of the phase that begins, and the measurement's key if there is one."""

JobName = tuple[str, str]
"""Batch of cases and what runs them."""


class EstimatedStep(NamedTuple):
    """A step of a job, or of all backends in turn; the job's runner is then empty."""

    job: JobName
    verb: str
    key: str


class TimeEstimate:
    """Time that a run still takes.

    Parameters
    ----------
    jobs : mapping
        The measurements' keys by job, in the order they run.
    known : dict of str to float
        Seconds of steps of earlier runs; receives this run's.
    conditions : str
        Distinguishes these steps from those of runs of other sizes.
    """

    def __init__(self, jobs: Mapping[JobName, Sequence[str]], known: dict[str, float], conditions: str = "") -> None:
        self._known, self._conditions = known, conditions
        self._own: dict[EstimatedStep, float] = {}
        self._steps: dict[JobName, list[EstimatedStep]] = {}
        for job, keys in jobs.items():
            steps = [("starting", ""), *((verb, key) for verb in ("preparing", "validating") for key in keys)]
            steps += [(verb, key) for key in keys for verb in ("measuring", "proving")]
            self._steps[job] = [EstimatedStep(job, *step) for step in steps]
            if sum(batch == job[0] for batch, _ in jobs) > 1:
                turns = (job[0], "")
                self._steps[turns] = [EstimatedStep(turns, "turns", key) for key in keys]
        self._active: tuple[EstimatedStep, float] | None = None

    def begin(self, job: JobName, phase: str) -> None:
        """Note that a job, or backends in turn, have begun a phase; the steps before are done."""
        found = PHASE.search(phase)
        step = EstimatedStep(job, found[1], found[2] or "") if found else None
        if step is None or step not in self._steps.get(job, ()):
            return
        now = time.monotonic()
        if self._active is not None:
            before, start = self._active
            self._own[before] = self._known[self._name(before)] = round(self._own.get(before, 0.0) + now - start, 1)
        steps = self._steps[job]
        self._steps[job] = steps[steps.index(step) + 1 :]
        self._active = step, now

    def end(self, job: JobName) -> None:
        """Note that a job has ended."""
        self._steps.pop(job, None)
        if not any(batch == job[0] and runner for batch, runner in self._steps):
            self._steps.pop((job[0], ""), None)

    def left_s(self) -> float:
        """Return the seconds that are left."""
        left = sum(self._expected(step) for steps in self._steps.values() for step in steps)
        if self._active is not None:
            step, start = self._active
            left += max(self._expected(step) - (time.monotonic() - start), 0.0)
        return left

    def earlier_s(self) -> float | None:
        """Return the seconds that earlier runs took for the steps left; None if any is new."""
        names = [self._name(step) for steps in self._steps.values() for step in steps]
        known = [self._known.get(name) for name in names]
        return None if None in known or not known else sum(each for each in known if each is not None)

    def _expected(self, step: EstimatedStep) -> float:
        """Return a step's duration in an earlier run, or the mean of similar steps, or a guess."""
        if self._name(step) in self._known:
            return self._known[self._name(step)]
        for alike in ("key", "verb"):
            took = [
                seconds
                for other, seconds in self._own.items()
                if other.verb == step.verb and getattr(other, alike) == getattr(step, alike)
            ]
            if took:
                return statistics.mean(took)
        return GUESSES_S[step.verb]

    def _name(self, step: EstimatedStep) -> str:
        return " ".join((*step.job, step.verb, step.key, self._conditions))
