"""A case: what a user declares to be measured, and how it becomes part of a job.

Imports the standard library, `d5suite.errors`, `d5suite.job` and `d5suite.measurements`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d5suite.errors import calling_file
from d5suite.job import CaseJob, Ranks, Result

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.levels.backend import Backend
    from d5suite.measurements.base import Measurement
    from d5suite.optimizers.settings import Optimizer

TIME_LIMIT_S = 1800.0
"""Limit of a worker in seconds, unless a case says otherwise."""


@dataclass(frozen=True)
class Settings:
    """The user's choices for a session; None means the case's own.

    Attributes
    ----------
    preset, device, precision : str
    threads, seed, loader_workers : int
    batch_size : int, optional
    optimizer : Optimizer, optional
    datasets : mapping of str to Path or None
        Where datasets lie; without a path a small one is drawn and cached.
    timeout_s : float, optional
        Of each worker.
    memory_bytes : int
        Most resident memory of each worker.
    wrap : str, optional
        Command in front of each worker.
    pythons : mapping of str to str
        Interpreters by backend.
    sampling : mapping
        Fields of `SamplingSettings` that the user gave.
    jobs : Path
        Where job files go.
    named : sequence of Path
        Files named on the command line.
    network : Path, optional
        The user's own network.
    shapes : mapping of str to tuple of int
        Its inputs' dimensions, where its file leaves them open.
    ranks : sequence of Ranks
        By how many ranks, and how, level 3 is measured; without any, it is not.
    divides_batch : bool
        Whether the batch is that of all ranks together: strong scaling.
    wait_quiet_s : float, optional
        How long the session may wait for a quiet machine in all.
    write_jobs, from_jobs : Path, optional
        Folder of jobs that run elsewhere: to write them to, and to take their results from.
    """

    preset: str | None = None
    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1
    seed: int = 0
    loader_workers: int = 0
    batch_size: int | None = None
    optimizer: Optimizer | None = None
    datasets: Mapping[str, Path | None] = field(default_factory=dict)
    timeout_s: float | None = None
    memory_bytes: int = sys.maxsize
    wrap: str | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    jobs: Path = Path(".d5suite/jobs")
    named: Sequence[Path] = ()
    network: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: Sequence[Ranks] = ()
    divides_batch: bool = False
    wait_quiet_s: float | None = None
    write_jobs: Path | None = None
    from_jobs: Path | None = None

    @property
    def elsewhere(self) -> Path | None:
        """The folder of jobs that this process does not run itself."""
        return self.write_jobs or self.from_jobs


@dataclass(frozen=True)
class Shared:
    """Files that the backends of one session share about a case.

    Attributes
    ----------
    reference : str
        Where reference answers are kept.
    trajectory : str
        Where this backend leaves its float64 trajectory.
    peers : list of str
        Trajectories of the backends before it.
    """

    reference: str
    trajectory: str
    peers: list[str] = field(default_factory=list)


class Runner(NamedTuple):
    """Runner of a case: a backend, and at level 3 its ranks; or why it cannot."""

    selection: Selection
    ranks: Ranks | None = None
    problem: str | None = None


class Case(ABC):
    """Something to measure on every backend.

    Attributes
    ----------
    name : str
        Results of different backends are compared under it; without ``/``.
    label : str
        What tells its tests from those of other cases of the same function; empty if nothing must.
    batch : str
        Cases of one batch share a job per backend.
    origin : str
        Where it is declared, for messages.
    shares_references : bool
        Whether a job of its own computes the references before any backend runs.
    every_backend : bool
        Whether it is measured on backends that are otherwise measured on request only.
    """

    name: str
    label: str = ""
    origin: str = ""
    shares_references: bool = False
    every_backend: bool = False

    @property
    @abstractmethod
    def batch(self) -> str:
        """See the attributes."""

    def is_same(self, other: Case) -> bool:
        """Return whether both are the same case, so that sharing a name is no conflict."""
        return self == other

    def runners(self, settings: Settings) -> list[Runner] | None:
        """Return the runners that replace the chosen backends; None if those measure it."""
        return None

    @abstractmethod
    def why_excluded(self, measurement: type[Measurement], settings: Settings, path: Path) -> str | None:
        """Return why the options exclude a measurement, or None.

        Parameters
        ----------
        measurement : type of Measurement
        settings : Settings
        path : Path
            The file that declares the case.
        """

    def uses_option(self, option: str) -> bool:
        """Return whether it uses the dataset or network of an option."""
        return False

    @abstractmethod
    def why_unsupported(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> str | None:
        """Return why a backend cannot make a selected measurement, or None."""

    @abstractmethod
    def check(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> None:
        """Raise `ConfigurationError` if the options contradict the case."""

    @abstractmethod
    def job(
        self, selection: Selection | None, settings: Settings, measurements: list[str], files: dict[str, str],
        shared: Shared,
    ) -> CaseJob:  # fmt: skip
        """Return its part of a job.

        Raises
        ------
        D5Error
            If it makes no sense.
        """

    @abstractmethod
    def preset_name(self, selection: Selection | None, settings: Settings) -> str:
        """Return the preset at which a backend is measured."""

    @abstractmethod
    def facts(self, part: CaseJob, result: Result) -> dict[str, Any]:
        """Return its part of a measurement's record."""

    def time_limit_s(self, selection: Selection, settings: Settings, trains: bool) -> float:
        """Return the limit of its worker in seconds; ``trains`` if it trains to a target."""
        return TIME_LIMIT_S


class Test(NamedTuple):
    """One test function, which is parametrised over its cases and backends.

    Attributes
    ----------
    function : str
        Its name.
    measurement : type of Measurement
    cases : callable
        The cases under the user's settings; raises `D5Error` if these make no sense.
    """

    function: str
    measurement: type[Measurement]
    cases: Callable[[Settings], Sequence[Case]]


class Declaration(ABC):
    """A declaration in a file of ``recipes/`` or ``operators/``: a `Recipe` or `Problems`."""

    name: str

    @abstractmethod
    def tests(self) -> Iterator[Test]:
        """Return its test functions."""


UNDECLARED = {f"level {level}": level for level in (2, 3)}
"""Levels that a backend may leave out, by what measurements call them in `Measurement.needs`."""


def absent(backend: Backend, measurement: type[Measurement], **parts: str | None) -> str | None:
    """Return why a backend lacks what a measurement needs, or None.

    Parameters
    ----------
    backend : Backend
    measurement : type of Measurement
    **parts
        Fill the names in braces of `Measurement.needs`.
    """
    for key in measurement.needs:
        needed = key.format(**parts)
        if needed in UNDECLARED and UNDECLARED[needed] not in backend.levels:
            return f"{backend.name} has no {needed}: {backend.absent.get(needed, 'not declared')}"
        if needed in backend.absent:
            return f"{backend.name} has no {needed}: {backend.absent[needed]}"
    return None


def declared_in() -> Path:
    """Return the file whose code makes a problem or a recipe."""
    return calling_file(str(Path(__file__).parent))
