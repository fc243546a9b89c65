"""Base class of workloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from d5suite.backends import Selection, select
from d5suite.instruments.nvml import GpuState
from d5suite.instruments.settings import SamplingSettings
from d5suite.job import CaseJob, Job
from d5suite.levels.backend import Backend
from d5suite.levels.device import EventTimer, L2Flush, Sensors, event_timer, l2_flush, sensors
from d5suite.levels.distributed import Communicator
from d5suite.validate.check import Check


class Workload(ABC):
    """Data and objects that all measurements of a case share.

    Parameters
    ----------
    job : Job
    case : CaseJob
        One of the job's cases.
    selection : Selection
        The job's backend and mode.

    Attributes
    ----------
    name : str
        Name of the case.
    settings : SamplingSettings
    tell : callable
        Reports a long measurement's progress in words, with JSON-able partial results, which
        survive a failure.
    communicator : Communicator
        Communicator of all ranks; in level-3 jobs only.
    folder : Path or None
        Prefix of the paths of folders in which passes may leave files; the same on all ranks.
    meeting : Path or None
        A folder that all ranks see, which is removed when the job ends, even after a failure.
    continues : bool
        Whether to go on from the checkpoints that an earlier attempt at the job has kept.
    gpus_before : sequence of GpuState
        State of each visible GPU before the framework was started; empty without NVML.
    heartbeat : object
        The attribute ``steps`` counts the steps that all ranks make together.
    """

    kind: ClassVar[str]
    communicator: Communicator

    def __init__(self, job: Job, case: CaseJob, selection: Selection) -> None:
        self.job = job
        self.name = case.name
        self.selection = selection
        self.backend: Backend = selection.backend
        self.settings = SamplingSettings.from_dict(case.sampling)
        self.tell: Callable[[str, dict[str, Any]], None] = lambda where, kept: None
        self.heartbeat: Any = None
        self.folder: Path | None = None
        self.meeting: Path | None = None
        self.continues = False
        self.gpus_before: Sequence[GpuState] = ()
        self._proofs: dict[str, Once] = {}

    @classmethod
    def select(cls, job: Job) -> Selection:
        """Return the job's backend and mode."""
        return select(f"{job.backend['name']}:{job.backend['mode']}")

    @classmethod
    def ceilings(cls, job: Job, selection: Selection, tell: Callable[[str], None]) -> dict[str, float | None]:
        """Measure the ceilings of all cases of this kind, once per job.

        Parameters
        ----------
        job : Job
        selection : Selection
        tell : callable
            Receives messages on the progress.
        """
        return {}

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the facts that all records of the case share; JSON-able."""

    def event_timer(self) -> tuple[EventTimer | None, str]:
        """Return the backend's timer on the device; if it has none, None and the reason."""
        return event_timer(self.backend, self.job.device)

    def l2_flush(self) -> tuple[L2Flush | None, str]:
        """Return the flush of the device's L2 cache; if there is none, None and the reason."""
        return l2_flush(self.backend, self.job.device)

    def device_peak(self) -> tuple[Callable[[], None], Callable[[], int]] | None:
        """Return functions that reset and read the device's peak memory in bytes.

        None if the device has no memory of its own.
        """
        found: tuple[Callable[[], None], Callable[[], int]] | None
        found = self.backend.load("runtime").device_memory(self.job.device)
        return found

    def sensors(self) -> Sensors | None:
        """Return the device's sensors; None if the framework cannot read any."""
        return sensors(self.backend, self.job.device)

    def fingerprint(self) -> dict[str, str]:
        """Return the facts that must be equal on all ranks: short texts and checksums by name."""
        return {}

    @abstractmethod
    def free_validation(self) -> None:
        """Free objects that only the proof needs, before timing."""

    def once(self, name: str, checks: Callable[[], Iterator[Check]]) -> Iterable[Check]:
        """Return checks that several measurements need, which are made only once.

        Parameters
        ----------
        name : str
            Identifies the checks.
        checks : callable
            Makes the checks.
        """
        if name not in self._proofs:
            self._proofs[name] = Once(checks())
        return self._proofs[name]


class Once:
    """An iterable that computes items only once; later it repeats the items or the exception."""

    def __init__(self, items: Iterator[Check]) -> None:
        self._items = items
        self._seen: list[Check] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Check]:
        yield from self._seen
        if self._error is not None:
            raise self._error
        try:
            for item in self._items:
                self._seen.append(item)
                yield item
        except Exception as error:
            self._error = error
            raise
