"""State that the plug-in keeps in pytest's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.cases.case import Case, Settings
    from d5suite.instruments.machine import MachineState  # noqa: F401
    from d5suite.job import Ranks
    from d5suite.measurements.base import Measurement
    from d5suite.pytest_plugin.sweep import Sweep  # noqa: F401
    from d5suite.session.results import Wanted
    from d5suite.tuning.profiles import TunedProfile  # noqa: F401


class Kept(NamedTuple):
    """Partial results of a test that failed: `d5suite.session.MeasurementResult.kept`."""

    measurement: type[Measurement]
    group: str
    backend: str
    facts: dict[str, Any]


class BenchmarkTarget(str):
    """A test's parameter: its identifier, with case, measurement, backend and point of a sweep."""

    case: Case
    measurement: type[Measurement]
    selection: Selection
    ranks: Ranks | None
    point: str
    settings: Settings

    @property
    def wanted(self) -> Wanted:
        """The measurement, as the session knows it."""
        from d5suite.session.results import Wanted

        return Wanted(self.case, self.measurement, self.selection, self.ranks, self.point)

    @property
    def job(self) -> tuple[str, str]:
        """The job that measures it: a batch of cases, and what runs them."""
        return self.wanted.job


FIXTURE = "d5suite_backend"
"""Name of the tests' parameter, which is a `BenchmarkTarget`."""

SESSION = pytest.StashKey["Sweep"]()
"""The sessions of the run, one for each point of a sweep."""

SETTINGS = pytest.StashKey["Settings"]()
SELECTIONS = pytest.StashKey["list[Selection]"]()
TUNED = pytest.StashKey["TunedProfile"]()
TERMINAL = pytest.StashKey[bool]()
RECORDS = pytest.StashKey["dict[str, dict[str, Any]]"]()
RESULTS = pytest.StashKey["list[dict[str, Any]]"]()
"""Results, as the benchmarks of a result file."""

DESELECTED = pytest.StashKey["dict[pytest.Item, str]"]()
"""Tests that the options exclude, with reasons."""

WRONG = pytest.StashKey[str]()
"""Error in the options that collection has revealed."""

MACHINE = pytest.StashKey["MachineState"]()
"""The machine's state before collection."""

REMARKS = pytest.StashKey["list[str]"]()
"""Remarks at the end of the run, beside its results."""

KEPT = pytest.StashKey["dict[str, Kept]"]()

FAILURES = pytest.StashKey["list[dict[str, Any]]"]()
"""Measurements without a record: their group, backend and message, and whether the answer was
wrong."""


def target(item: pytest.Item) -> BenchmarkTarget | None:
    """Return the target of a test item; None if it is not one of d5suite's."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get(FIXTURE) if callspec is not None else None
    return found if isinstance(found, BenchmarkTarget) else None
