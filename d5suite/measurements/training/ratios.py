"""Steps timed in turn with the framework's own way of doing the same, for their ratio."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Step
from d5suite.measurements.schemas import array, choice, integer, mapping, number, record
from d5suite.statistics.ratios import Ratio, paired_ratio

SCHEMA = record(
    {
        "compared_with": choice("hand_written", "native", description="the other way, timed in turn"),
        "ratio": mapping(
            {
                "median": number("of the ratios of rounds"),
                "ci95": array(number(), "95% interval of that median"),
                "rounds": integer("in which both took a turn"),
            },
            description="d5suite's time over the other way's",
        ),
        "compared_median_s": number("median of the other way, in seconds", exclusiveMinimum=0),
    }
)
"""The part of the record that all such measurements share."""


class RatioStep(Step):
    """A step of d5suite and another way of doing the same, timed in turn.

    Attributes
    ----------
    other : str
        The other way's name.
    """

    other: str

    def __init__(self) -> None:
        self._both: dict[str, Samples] = {}

    @abstractmethod
    def sample_both(self, settings: SamplingSettings) -> dict[str, Samples]:
        """Sample ``d5suite`` and `other` in turn."""

    def time(self, settings: SamplingSettings) -> Samples:
        self._both = self.sample_both(settings)
        return self._both["d5suite"]

    @property
    def ratio(self) -> Ratio:
        """Ratio of d5suite's time to the other way's."""
        return paired_ratio(*(self._both[name].samples_s for name in ("d5suite", self.other)))

    def record(self, samples: Samples) -> dict[str, Any]:
        ratio = self.ratio
        return {
            "compared_with": self.other,
            "ratio": {"median": ratio.value, "ci95": list(ratio.interval), "rounds": ratio.n},
            "compared_median_s": self._both[self.other].median_s,
        }

    def series(self) -> dict[str, list[float]]:
        return {f"{self.other}_s": list(self._both[self.other].samples_s)}
