"""A collective at several sizes, for every communicator and algorithm.

A file under ``collectives/`` declares one `Collectives`; `d5suite.pytest_plugin` makes the tests.
Imports `d5suite.backends`, `d5suite.distributed`, `d5suite.job` and `d5suite.measurements`; no
framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.backends import Selection
from d5suite.cases.case import Case, Declaration, Runner, Settings, Shared, Test, declared_in, preset_of
from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.calls import CALLS
from d5suite.distributed.transports import transport_backend
from d5suite.errors import ConfigurationError
from d5suite.job import CollectiveCase, Ranks
from d5suite.measurements import find
from d5suite.measurements.base import Measurement

if TYPE_CHECKING:
    from d5suite.levels.backend import Backend

MAX_TIME_S = {"smoke": 0.05, "standard": 0.3, "full": 1.0}
"""Sampling budget per size, by preset, in seconds, unless ``--benchmark-max-time`` is given."""


@dataclass(frozen=True)
class Collectives(Declaration):
    """One collective and its sizes in bytes.

    Attributes
    ----------
    name : str
        A key of `d5suite.distributed.calls.CALLS`.
    smoke, standard, full : sequence of int
        The sizes of the presets, ascending: 4 B to 1 MiB in steps of a factor of 64; 4 B to 256 MiB
        in powers of four; the same range in powers of two, as in nccl-tests.
    file : Path
        The Python file that declares the collective, for errors.
    """

    name: str
    smoke: Sequence[int] = tuple(4**power for power in range(1, 11, 3))
    standard: Sequence[int] = tuple(4**power for power in range(1, 15))
    full: Sequence[int] = tuple(2**power for power in range(2, 29))
    file: Path = field(default_factory=declared_in, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.name not in CALLS:
            raise ConfigurationError(
                f"there is no collective {self.name!r}", where=str(self.file), hint=f"Known: {', '.join(CALLS)}."
            )
        for preset in MAX_TIME_S:
            sizes = list(getattr(self, preset))
            counts = all(isinstance(size, int) and size > 0 for size in sizes)
            if not counts or sizes != sorted(set(sizes)) or len(sizes) < 2:
                raise ConfigurationError(
                    f"sizes of {preset!r} are {sizes}; need at least two ascending sizes in bytes",
                    where=str(self.file),
                )

    def tests(self) -> Iterator[Test]:
        yield Test("test_collectives", find("collectives"), lambda settings: [CollectivesCase(self)])

    def sizes(self, preset: str | None) -> Sequence[int]:
        """Return the sizes of a preset in bytes, ``smoke`` by default.

        Raises
        ------
        ConfigurationError
            If there is no such preset.
        """
        return preset_of(self, preset, MAX_TIME_S)


@dataclass(frozen=True)
class CollectivesCase(Case):
    """One collective.

    Attributes
    ----------
    declared : Collectives
    """

    declared: Collectives

    knobs = ("precision",)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The collective's name."""
        return self.declared.name

    @property
    def origin(self) -> str:  # type: ignore[override]
        """The file that declares the collective."""
        return str(self.declared.file)

    @property
    def batch(self) -> str:
        """All collectives share one job per communicator and algorithm."""
        return "collectives"

    def runners(self, settings: Settings) -> list[Runner]:
        """Return every combination of communicator, algorithm and number of ranks."""
        found = {}
        for size, how in settings.ranks:
            alone = replace(how, scheme="", settings={})
            selection = Selection(transport_backend(how.communicator), how.algorithm)
            found[size, str(selection)] = Runner(selection, Ranks(size, alone), self._lacking(size, how.algorithm))
        return list(found.values())

    def _lacking(self, ranks: int, algorithm: str) -> str | None:
        if ranks == 1:
            return "one rank sends nothing"
        if algorithm != "native" and self.name not in ALGORITHMS[algorithm]:
            return f"{algorithm} has no {self.name}: the transport's own is used"
        return None

    def job(
        self, selection: Selection | None, settings: Settings, measurements: list[str], files: dict[str, str],
        shared: Shared,
    ) -> CollectiveCase:  # fmt: skip
        preset = self.preset_name(selection, settings)
        return CollectiveCase(
            name=self.name,
            preset=preset,
            measurements=measurements,
            files=files,
            sampling={"max_time_s": MAX_TIME_S[preset], **settings.sampling},
            collective=self.declared.name,
            sizes=list(self.declared.sizes(settings.preset)),
        )

    def preset_name(self, selection: Selection | None, settings: Settings) -> str:
        return settings.preset or next(iter(MAX_TIME_S))

    def check(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> None:
        """Raise `ConfigurationError` if there is no such preset."""
        self.declared.sizes(settings.preset)
