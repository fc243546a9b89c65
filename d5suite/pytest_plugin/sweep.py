"""``--sweep``: a case over knobs, point by point, each proved and measured as any other run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from d5suite.errors import ConfigurationError, D5Error
from d5suite.pytest_plugin.settings import elsewhere, settings

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.cases.case import Case, Settings
    from d5suite.measurements.base import Measurement
    from d5suite.session import MeasurementResult, Session
    from d5suite.session.results import Wanted
    from d5suite.session.schedule import MeasurementSchedule

MOST_POINTS = 256
"""Points of a sweep; each starts a worker for every backend."""


class SweptKnob(NamedTuple):
    """A setting that can be swept: its option's name in pytest, and the parser of a value."""

    option: str
    read: Callable[[str], Any]


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**31:
        raise ValueError("not a whole number from 1 on")
    return int(text)


KNOBS: Mapping[str, SweptKnob] = {
    "threads": SweptKnob("threads", _whole),
    "batch-size": SweptKnob("batch_size", _whole),
    "image-size": SweptKnob("image_size", _whole),
    "precision": SweptKnob("precision", str),
    "coupling": SweptKnob("coupling", str),
    "placement": SweptKnob("placement", str),
    "capacity": SweptKnob("capacity", _whole),
}
"""Knobs by name. Ranks have ``--ranks``."""

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
"""As in `d5suite.levels.description`, which imports NumPy."""

PLACEMENTS = ("packed", "interleaved")
"""As in `d5suite.cases.workflow`, which also knows the kinds of couplings."""

CHOICES = {"precision": PRECISIONS, "placement": PLACEMENTS}


@dataclass(frozen=True)
class SweepPoint:
    """One setting of all knobs.

    Attributes
    ----------
    values : mapping of str to object
        Values by knob; empty without a sweep.
    settings : Settings
    firsts : mapping of str to object
        The first value of each knob: cases that lack the knob are measured at this value only.
    """

    values: Mapping[str, Any]
    settings: Settings
    firsts: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What the point adds to a test's name, such as ``@threads=2+batch-size=4``."""
        from d5suite.report.reading import AT

        return AT + "+".join(f"{knob}={value}" for knob, value in self.values.items()) if self.values else ""

    def why_not(self, case: Case, selection: Selection) -> str | None:
        """Return why a backend cannot measure a case at this point, or None."""
        from d5suite.instruments.threads import allowed_cpus

        for knob, value in self.values.items():
            if knob not in case.knobs and value != self.firsts[knob]:
                return f"{case.name} has no {knob} to sweep: it is measured once"
        cpus = len(allowed_cpus())
        if "threads" in self.values and self.settings.threads > cpus:
            return f"{self.settings.threads} threads are more than the {cpus} CPUs that they may use"
        if "precision" in self.values:
            try:
                selection.backend.check(device=self.settings.device, precision=self.settings.precision)
            except D5Error as error:
                return error.what
        return None

    def contradiction(self, case: Case, selection: Selection, measurement: type[Measurement]) -> str | None:
        """Return how a swept setting, such as a batch size, contradicts a case, or None."""
        if self.values:
            try:
                case.check(selection.backend, measurement, self.settings)
            except D5Error as error:
                return str(error).partition("\n")[0]
        return None


POINTS = pytest.StashKey["list[SweepPoint]"]()


def add_options(group: Any) -> None:
    """Add the option."""
    group.addoption(
        "--sweep",
        action="append",
        default=[],
        metavar="KNOB=V1,V2,…",
        help=f"measure each case at every value of a knob ({', '.join(KNOBS)}); repeat it for all combinations",
    )


def points(config: pytest.Config) -> list[SweepPoint]:
    """Return all points of the sweep, or the one point without a sweep; made once."""
    if POINTS not in config.stash:
        base, swept = settings(config), check_options(config)
        firsts = {knob: values[0] for knob, values in swept.items()}
        config.stash[POINTS] = [
            SweepPoint(chosen, _changed(base, chosen), firsts)
            for each in itertools.product(*swept.values())
            for chosen in [dict(zip(swept, each, strict=True))]
        ]
    return config.stash[POINTS]


def _changed(base: Settings, chosen: Mapping[str, Any]) -> Settings:
    changes = {KNOBS[knob].option: value for knob, value in chosen.items()}
    if "threads" in chosen:
        changes["loader_workers"] = min(base.loader_workers, chosen["threads"])
    return replace(base, **changes)


def check_options(config: pytest.Config) -> dict[str, Sequence[Any]]:
    """Return the values of each knob.

    Raises
    ------
    ConfigurationError
        If a knob is unknown, given twice, or also given as an option, or a value makes no sense.
    """
    given: list[str] = config.getoption("sweep")
    found: dict[str, Sequence[Any]] = {}
    for text in given:
        knob, _, listed = text.partition("=")
        where = f"--sweep {text}"
        if knob not in KNOBS:
            hint = "Give --ranks 1,2,4 instead." if knob == "ranks" else f"Known: {', '.join(KNOBS)}."
            raise ConfigurationError(f"there is no knob {knob!r}", where=where, hint=hint)
        if knob in found:
            raise ConfigurationError(f"{knob} is given twice", where=where, hint="List all values in one --sweep.")
        option = f"--{knob}"
        if any(str(each).partition("=")[0] == option for each in config.invocation_params.args):
            raise ConfigurationError(f"{option} is given, too", where=where, hint="Leave one of them out.")
        try:
            values = [KNOBS[knob].read(value.strip()) for value in listed.split(",")]
        except ValueError as error:
            raise ConfigurationError(f"{listed!r} holds a value that is {error}", where=where) from None
        if unknown := [each for each in values if each not in CHOICES.get(knob, values)]:
            raise ConfigurationError(
                f"there is no {knob} {unknown[0]!r}", where=where, hint=f"Known: {', '.join(CHOICES[knob])}."
            )
        if len(set(values)) < len(values):
            raise ConfigurationError(f"{listed!r} names something twice", where=where)
        found[knob] = values
    count = 1
    for each in found.values():
        count *= len(each)
    if count > MOST_POINTS:
        raise ConfigurationError(f"{count} points are more than {MOST_POINTS}", where="--sweep")
    if found and elsewhere(config):
        raise ConfigurationError("jobs that run elsewhere have one setting", where="--sweep")
    return found


@dataclass(frozen=True)
class Sweep:
    """The sessions of all points, and what each measures.

    Attributes
    ----------
    sessions : dict of str to Session
        By the points' labels.
    schedules : dict of str to MeasurementSchedule
    """

    sessions: dict[str, Session]
    schedules: dict[str, MeasurementSchedule]

    @property
    def folder(self) -> Path:
        """The folder of the job files, or the one that holds those of all points."""
        first = next(iter(self.sessions.values())).folder
        return first if len(self.sessions) == 1 else first.parent

    def result(self, wanted: Wanted) -> MeasurementResult:
        """Return a measurement's result; if there is none yet, run its whole job first."""
        return self.schedules[wanted.point].result(wanted)

    def known(self, wanted: Wanted) -> MeasurementResult | None:
        """Return the result of a measurement, if there is one yet."""
        session = self.sessions.get(wanted.point)
        return session.known(wanted) if session is not None else None

    def write(self) -> None:
        """Write all job files, to be run elsewhere."""
        for each in self.schedules.values():
            each.write()

    def close(self) -> None:
        """Close all sessions."""
        for each in self.sessions.values():
            each.close()
