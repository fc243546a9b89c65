"""The measurements that a run wants, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from d5suite.backends import Selection
from d5suite.cases.case import Case
from d5suite.job import Ranks, key_of
from d5suite.measurements.base import Measurement


class Wanted(NamedTuple):
    """One measurement of a case on a backend; at level 3 with ranks, in a sweep with a point."""

    case: Case
    measurement: type[Measurement]
    selection: Selection
    ranks: Ranks | None = None
    point: str = ""

    @property
    def key(self) -> str:
        """The measurement's name within a job."""
        return key_of(self.case.name, self.measurement.name)

    @property
    def runner(self) -> str:
        """Name of the runner in results: the backend, and at level 3 also the ranks."""
        return "-".join(str(each) for each in (self.selection, self.ranks) if each is not None)

    @property
    def job(self) -> tuple[str, str]:
        """Key of the job that makes the measurement: the batch of cases, runner and point."""
        return self.case.batch, self.runner + self.point


@dataclass
class MeasurementResult:
    """A record, or the reason why there is no record.

    Attributes
    ----------
    record : dict or None
    samples_s : list of float
        Samples in seconds.
    series : dict of str to list of float
    failure : str or None
    kept : dict or None
        Partial results that survive a failure, such as the curves of runs that missed their target.
    wrong : bool
        Whether the measurement failed because an answer was wrong.
    """

    record: dict[str, Any] | None = None
    samples_s: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None
    kept: dict[str, Any] | None = None
    wrong: bool = False
