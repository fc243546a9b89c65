"""A case: the subject of measurements, as a user declares it, and how it becomes part of a job.

Imports the standard library, `d5suite.errors`, `d5suite.job` and `d5suite.measurements`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d5suite.errors import ConfigurationError, calling_file
from d5suite.job import CaseJob, Ranks, Result
from d5suite.passes import DEFAULT

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.levels.backend import Backend
    from d5suite.measurements.base import Measurement
    from d5suite.network.given_inputs import Given
    from d5suite.optimizers.settings import Optimizer

TIME_LIMIT_S = 1800.0
"""Time limit of a worker in seconds, unless a case has another limit."""


@dataclass(frozen=True)
class Settings:
    """The user's options for a session; None leaves the choice to the case.

    Attributes
    ----------
    preset, device, precision : str
    threads, seed, loader_workers : int
    batch_size, image_size : int, optional
    coupling, placement : str, optional
    capacity : int, optional
        For workflows: the kind of the couplings, the placement of the ranks, and the number of
        messages that fit into a coupling's buffer.
    optimizer : Optimizer, optional
    datasets : mapping of str to Path or None
        Paths of datasets; in place of a missing path, a small synthetic dataset is made and cached.
    timeout_s : float, optional
        Time limit of a worker.
    memory_bytes : int
        Limit of a worker's resident memory.
    wrap : str, optional
        Command that is put in front of every worker's command line.
    pythons : mapping of str to str
        Interpreters by backend.
    sampling : mapping
        Fields of `SamplingSettings` that the user set.
    jobs : Path
        Folder for job files.
    named : sequence of Path
        Files named on the command line.
    network : Path, optional
        The user's own network.
    shapes : mapping of str to tuple of int
        Dimensions of the network's inputs, where the file leaves them open.
    inputs : mapping of str to Given
        Values of the network's inputs, and ranges to draw from.
    sample : Path, optional
        An ``.npz`` file with inputs of the network.
    ranks : sequence of Ranks
        Numbers of ranks and ways to train for level 3; empty to leave level 3 out.
    divides_batch : bool
        Whether all ranks share one batch: strong scaling.
    passes : mapping of str to str or None
        Passes over each prepared step, with the file that defines the pass; None for a pass of
        d5suite or of a plug-in.
    wait_quiet_s : float, optional
        Total seconds that the session may wait for a quiet machine.
    environment : mapping of str to str
        Further environment variables of the workers.
    tuned : mapping of (str, str, str) to mapping of str to object
        By case, backend and mode: fields of these settings that have other values there.
    write_jobs, from_jobs : Path, optional
        Folder of jobs that run elsewhere: to write the jobs, or to read their results.
    """

    preset: str | None = None
    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1
    seed: int = 0
    loader_workers: int = 0
    batch_size: int | None = None
    image_size: int | None = None
    coupling: str | None = None
    placement: str | None = None
    capacity: int | None = None
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
    inputs: Mapping[str, Given] = field(default_factory=dict)
    sample: Path | None = None
    ranks: Sequence[Ranks] = ()
    divides_batch: bool = False
    passes: Mapping[str, str | None] = field(default_factory=lambda: dict.fromkeys(DEFAULT))
    wait_quiet_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    tuned: Mapping[tuple[str, str, str], Mapping[str, Any]] = field(default_factory=dict)
    write_jobs: Path | None = None
    from_jobs: Path | None = None

    @property
    def elsewhere(self) -> Path | None:
        """The folder of jobs that run elsewhere, if any."""
        return self.write_jobs or self.from_jobs

    def of(self, case: str, backend: str, mode: str) -> Settings:
        """Return the settings of one case on one backend in one mode."""
        return replace(self, **self.tuned.get((case, backend, mode), {}))


@dataclass(frozen=True)
class Shared:
    """Files of a case that the backends of one session share.

    Attributes
    ----------
    reference : str
        File of reference answers.
    trajectory : str
        File for this backend's float64 trajectory.
    peers : list of str
        Trajectories of backends that were started before, whether or not they exist yet.
    """

    reference: str
    trajectory: str
    peers: list[str] = field(default_factory=list)


class Runner(NamedTuple):
    """A backend for a case, with ranks at level 3, and the problem if it cannot run the case."""

    selection: Selection
    ranks: Ranks | None = None
    problem: str | None = None


class Case(ABC):
    """A subject of measurements on every backend.

    Attributes
    ----------
    name : str
        Name under which results of different backends are compared; without ``/``.
    label : str
        Distinguishes the case's tests from tests of other cases of the same function; may be empty.
    batch : str
        Cases with the same batch share one job per backend.
    origin : str
        The file that declares the case, for messages.
    shares_references : bool
        Whether a separate job computes the references before any backend runs.
    every_backend : bool
        Whether backends that run only on request measure the case, too.
    knobs : tuple of str
        Settings that can be swept, because they change the case or its results.
    """

    name: str
    label: str = ""
    origin: str = ""
    shares_references: bool = False
    every_backend: bool = False
    knobs: tuple[str, ...] = ("threads", "precision")

    @property
    @abstractmethod
    def batch(self) -> str:
        """Cases with the same batch share one job per backend."""

    def is_same(self, other: Case) -> bool:
        """Return whether both are the same case; only then may they share a name."""
        return self == other

    def runners(self, settings: Settings) -> list[Runner] | None:
        """Return the runners that replace the chosen backends; None to use the chosen backends."""
        return None

    def of_ranks(self, ranks: Ranks) -> tuple[Ranks, str | None]:
        """Return the ranks as the case uses them, and why it cannot use this number, or None."""
        return ranks, None

    def why_excluded(self, measurement: type[Measurement], settings: Settings, path: Path) -> str | None:
        """Return why the options exclude a measurement, or None.

        Parameters
        ----------
        measurement : type of Measurement
        settings : Settings
        path : Path
            The file that declares the case.
        """
        return None

    def uses_option(self, option: str) -> bool:
        """Return whether the case uses the dataset or network of an option."""
        return False

    def why_unsupported(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> str | None:
        """Return why a backend cannot make a selected measurement, or None."""
        return None

    def check(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> None:  # noqa: B027
        """Raise `ConfigurationError` if the options contradict the case."""

    @abstractmethod
    def job(
        self, selection: Selection | None, settings: Settings, measurements: list[str], files: dict[str, str],
        shared: Shared,
    ) -> CaseJob:  # fmt: skip
        """Return the case's part of a job.

        Raises
        ------
        D5Error
            If the case is invalid.
        """

    @abstractmethod
    def preset_name(self, selection: Selection | None, settings: Settings) -> str:
        """Return the preset at which a backend is measured."""

    def facts(self, part: CaseJob, result: Result) -> dict[str, Any]:
        """Return additional facts for a measurement's record."""
        return {}

    def time_limit_s(self, selection: Selection, settings: Settings, trains: bool) -> float:
        """Return the worker's time limit in seconds; ``trains``: whether it trains to a target."""
        return TIME_LIMIT_S


class Test(NamedTuple):
    """One test function, parametrised over cases and backends.

    Attributes
    ----------
    function : str
        Name of the function.
    measurement : type of Measurement
    cases : callable
        Returns the cases for the user's settings; raises `D5Error` if the settings are invalid.
    """

    function: str
    measurement: type[Measurement]
    cases: Callable[[Settings], Sequence[Case]]


class Declaration(ABC):
    """A declaration in a file of ``recipes/`` or ``operators/``: a `Recipe` or `Problems`."""

    name: str

    @abstractmethod
    def tests(self) -> Iterator[Test]:
        """Yield the test functions."""


UNDECLARED = {f"level {level}": level for level in (2, 3)}
"""Levels that a backend may lack, by their names in `Measurement.needs`."""


def preset_of(declared: Declaration, name: str | None, presets: Iterable[str]) -> Sequence[Any]:
    """Return the content of a declaration's preset, by default of the first preset.

    Raises
    ------
    ConfigurationError
        If there is no such preset.
    """
    if name is not None and name not in presets:
        raise ConfigurationError(
            f"there is no preset {name!r}", where=declared.name, hint=f"Presets: {', '.join(presets)}."
        )
    found: Sequence[Any] = getattr(declared, name or next(iter(presets)))
    return found


def absent(backend: Backend, measurement: type[Measurement], **parts: str | None) -> str | None:
    """Return which need of a measurement a backend lacks, and why; None if it lacks nothing.

    Parameters
    ----------
    backend : Backend
    measurement : type of Measurement
    **parts
        Values for the names that `Measurement.needs` has in braces.
    """
    for key in measurement.needs:
        needed = key.format(**parts)
        if needed in UNDECLARED and UNDECLARED[needed] not in backend.levels:
            return f"{backend.name} has no {needed}: {backend.absent.get(needed, 'not declared')}"
        if needed in backend.absent:
            return f"{backend.name} has no {needed}: {backend.absent[needed]}"
    return None


def declared_in() -> Path:
    """Return the file whose code declares a problem or a recipe."""
    return calling_file(str(Path(__file__).parent))
