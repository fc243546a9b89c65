"""Settings of sampling: samples, warm-up and turns. Imports `d5suite.errors`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

from d5suite.errors import ConfigurationError

MOST_ROUNDS = 1_000_000
"""Largest ``min_rounds``: a result of more samples would be too large to read."""

TIME_LIMIT = "D5SUITE_TIME_LIMIT"
"""Environment variable: seconds that this process may run."""

SHARE_OF_LIMIT = 0.75
"""Share of the time limit after which no sample starts: the rest is for proving what was timed, so
that a result is saved."""

ALONE, BESIDE = "alone", "beside"
"""How a worker runs: alone on the machine while anything is measured, the first call and the peak
memory included; or beside other workers, while it imports its framework and while it proves."""


@dataclass(frozen=True)
class SamplingSettings:
    """Number of samples to take, and when to stop.

    The fields correspond to pytest-benchmark's options:

    ================================= ==============================================================
    ``--benchmark-min-rounds``        ``min_rounds``: honoured, however long it takes, until
                                      `SHARE_OF_LIMIT` of the process's time limit is spent
    ``--benchmark-max-time``          ``max_time_s``: after ``min_rounds``, no sample starts later
    ``--benchmark-precision``         ``relative_precision``
    ``--benchmark-warmup``            ``warmup``: ``auto`` warms up until steady; ``on`` for
                                      ``max_time_s`` or ``warmup_iterations`` calls, whichever ends
                                      first, as pytest-benchmark does; ``off`` only makes the first
                                      call
    ``--benchmark-warmup-iterations`` ``warmup_iterations``: limit in every mode; the default of
                                      100000 is no limit in practice
    ================================= ==============================================================

    On CPython pytest-benchmark turns ``auto`` into False, as it does ``off``; only the typed option
    tells them apart. ``--benchmark-confidence`` is for pytest-benchmark's interval of the mean and
    has another default (0.99).

    Parameters
    ----------
    min_rounds : int
        Fewest samples, from 1 to `MOST_ROUNDS`. Fewer than 6 give no 95% interval of the median.
    max_time_s : float
        Time for sampling in seconds, including time between samples.
    max_rounds : int
        Most samples; at least ``min_rounds``.
    relative_precision : float
        Stop when both ends of the median's interval are within this fraction of the median.
    confidence : float
        Confidence of that interval, in (0, 1).
    warmup : {"auto", "on", "off"}
        See above.
    warmup_iterations : int
        Most warm-up calls after the first call.
    l2_cold : bool
        Whether to make the device's L2 cache cold before each sample, which is then one call.

    Raises
    ------
    ConfigurationError
        If a value is out of bounds.
    """

    min_rounds: int = 5
    max_time_s: float = 1.0
    max_rounds: int = 10_000
    relative_precision: float = 0.02
    confidence: float = 0.95
    warmup: Literal["auto", "on", "off"] = "auto"
    warmup_iterations: int = 100_000
    l2_cold: bool = False

    def __post_init__(self) -> None:
        for name, accepted, meaning in (
            (
                "min_rounds",
                _is_count(self.min_rounds, 1) and self.min_rounds <= MOST_ROUNDS,
                f"a whole number from 1 to {MOST_ROUNDS:,}",
            ),
            ("max_rounds", _is_count(self.max_rounds, 1), "a whole number, at least 1"),
            ("max_time_s", _is_number(self.max_time_s) and 0 <= self.max_time_s < float("inf"), "seconds, 0 or more"),
            ("relative_precision", _is_number(self.relative_precision) and self.relative_precision >= 0, "0 or more"),
            ("confidence", _is_number(self.confidence) and 0 < self.confidence < 1, "between 0 and 1"),
            ("warmup", self.warmup in ("auto", "on", "off"), "'auto', 'on' or 'off'"),
            ("warmup_iterations", _is_count(self.warmup_iterations, 0), "a whole number, 0 or more"),
            ("l2_cold", isinstance(self.l2_cold, bool), "true or false"),
        ):
            if not accepted:
                raise ConfigurationError(
                    f"{getattr(self, name)!r} is not {meaning}",
                    where=f"sampling settings, {name}",
                    hint="Correct the job file or the --benchmark-* option it came from.",
                )
        if self.max_rounds < self.min_rounds:
            object.__setattr__(self, "max_rounds", self.min_rounds)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingSettings:
        """Rebuild the settings from `to_dict`; missing fields take their defaults.

        Raises
        ------
        ConfigurationError
            If a field is unknown or a value is out of bounds.
        """
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigurationError(
                f"unknown: {', '.join(unknown)}", where="sampling settings", hint=f"Known are: {', '.join(known)}."
            )
        return cls(**values)


class Turn(NamedTuple):
    """Number of samples to take, and whether to begin with calls that do not count."""

    samples: int
    wakes: bool = True


class Turns(Protocol):
    """Source of turns, for workers that take samples in turn."""

    def wait(self, sample_s: float) -> Turn | None:
        """Wait for this worker's turn; None at the end. A sample lately took ``sample_s``."""

    def give(self, samples_s: list[float], took_s: float) -> None:
        """Hand over the samples of one turn, in seconds, and how long they took in all."""


@dataclass(frozen=True)
class InTurns(SamplingSettings):
    """Settings of a step whose samples are taken in turn with other workers'.

    Parameters
    ----------
    turns : Turns
        They decide how many samples are taken, instead of ``min_rounds``, ``max_time_s`` and
        ``relative_precision``.

    Raises
    ------
    ConfigurationError
        If ``turns`` is missing.
    """

    turns: Turns | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns is None:
            raise ConfigurationError("no turns", where="sampling settings")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
