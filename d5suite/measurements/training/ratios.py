"""Steps timed in turn with the framework's own way of doing the same, for their ratio."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Step
from d5suite.measurements.schemas import integer, mapping, number, record
from d5suite.statistics.ratios import paired_ratio

SCHEMA = record(
    {
        "compared_with": {"enum": ["hand_written", "native"], "description": "the other way, timed in turn"},
        "ratio": mapping(
            {
                "median": number("of the ratios of rounds"),
                "ci95": {"type": "array", "items": number(), "description": "95% interval of that median"},
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
        self._other_samples: Samples | None = None

    @abstractmethod
    def sample_both(self, settings: SamplingSettings) -> dict[str, Samples]:
        """Sample ``d5suite`` and `other` in turn."""

    def time(self, settings: SamplingSettings) -> Samples:
        found = self.sample_both(settings)
        self._other_samples = found[self.other]
        return found["d5suite"]

    def record(self, samples: Samples) -> dict[str, Any]:
        assert self._other_samples is not None
        ratio = paired_ratio(samples.samples_s, self._other_samples.samples_s)
        return {
            "compared_with": self.other,
            "ratio": {"median": ratio.value, "ci95": list(ratio.interval), "rounds": ratio.n},
            "compared_median_s": self._other_samples.median_s,
        }

    def series(self) -> dict[str, list[float]]:
        assert self._other_samples is not None
        return {f"{self.other}_s": list(self._other_samples.samples_s)}
