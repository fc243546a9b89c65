"""A result: all that a worker has measured so far; the file is replaced after every addition."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from d5suite.errors import JobError
from d5suite.files import write_json
from d5suite.job import schema
from d5suite.job.job import TIME, of_rank

SCHEMA = "d5suite-result-3"


class SamplesPart(TypedDict):
    """The times of one measurement in seconds: `d5suite.instruments.sampling.Samples.to_dict`."""

    first_call_s: float
    compile_s: float
    warmup_s: list[float]
    samples_s: list[float]
    steady: bool
    stopped_by: str
    median_s: float
    median_ci_s: list[float]
    median_ci_confidence: float
    drift: dict[str, float]
    outliers: dict[str, int]


@dataclass(frozen=True)
class Failure:
    """Failure of a measurement: the exception's type and a message for the user."""

    type: str
    message: str


@dataclass(frozen=True)
class Measured:
    """Result of one measurement.

    Attributes
    ----------
    level : int
    items : int
        Images or calls per sample.
    macs : int or None
        Multiply-accumulates of one forward pass of the batch; None where no network runs.
    series : dict of str to list of float
        Further series with a value per sample or per step.
    extra : dict
        The measurement's own part of the record.
    passes : dict of str to dict
        By pass: the part that the pass recorded, or ``missing`` with the reason. The part ``time``
        holds the ``samples``, and whether the ``machine`` was ``disturbed``, with ``reasons``.
    """

    level: int
    items: int
    macs: int | None
    series: dict[str, list[float]]
    extra: dict[str, Any]
    passes: dict[str, dict[str, Any]]

    @property
    def samples(self) -> SamplesPart:
        """The samples of the ``time`` pass."""
        samples: SamplesPart = self.passes[TIME]["samples"]
        return samples

    @property
    def machine(self) -> dict[str, Any]:
        """The state of the machine during the ``time`` pass."""
        machine: dict[str, Any] = self.passes[TIME]["machine"]
        return machine


@dataclass
class Result:
    """All that a worker has measured so far; the schema is ``result.json``.

    Attributes
    ----------
    status : {"running", "done", "failed"}
        ``failed``: nothing could run, and ``error`` has the reason.
    phase : str
        What the worker is doing, for people to read.
    measurement : str or None
        The key of the measurement that the worker is busy with.
    backend, device, threads, environment : dict
        The software that ran, and the machine.
    ceilings : dict of str to float or None
        FLOP/s of a large matrix product and bytes/s of a large copy; only for operations. None if
        an answer was wrong.
    facts : dict of str to dict
        By case: facts common to all measurements of the case, such as the dataset's digest.
    validation : dict of str to dict
        By key: the checks made so far, even if the measurement failed.
    measurements : dict of str to Measured
        Results by key.
    references : dict of str to str
        By key: the backend whose gradient the reference holds; only with `Job.references_only`.
    failures : dict of str to Failure
        Failures by key.
    kept : dict of str to dict
        By key: partial results that survive a failure.
    error : Failure or None
    """

    status: str = "running"
    phase: str = "starting"
    measurement: str | None = None
    backend: dict[str, Any] = field(default_factory=dict)
    device: dict[str, str] = field(default_factory=dict)
    threads: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float | None] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: dict[str, Measured] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: Failure | None = None

    def save(self, path: Path) -> None:
        """Write the result file atomically."""
        write_json(path, {"schema": SCHEMA, **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read and check a result file.

        Raises
        ------
        JobError
            If the file cannot be read or does not fit the schema; every fault is named.
        """
        content = schema.read(path, "result.json", "result")
        content.pop("schema")
        for name, kind in (("measurements", Measured), ("failures", Failure)):
            content[name] = {key: kind(**value) for key, value in content[name].items()}
        if content["error"] is not None:
            content["error"] = Failure(**content["error"])
        return cls(**content)


def failures_of_ranks(path: Path, ranks: int, first: str) -> dict[str, str]:
    """Return the failures of a job's ranks by measurement, with the number of the failed rank.

    Rank 0 notes failed measurements in the job's own result. The failures returned here also
    include errors of other ranks, and errors before the first measurement. The earliest failure is
    the cause of the others.

    Parameters
    ----------
    path : Path
        The job's result file; the result files of the ranks are in the same folder.
    ranks : int
        Number of ranks.
    first : str
        The measurement to which an error before any measurement is attributed.
    """
    found = []
    for rank in range(ranks):
        own = of_rank(path, rank)
        with contextlib.suppress(JobError, OSError):
            result = Result.load(own)
            errors = {key: failure.message for key, failure in result.failures.items()}
            if result.error is not None:
                errors.setdefault(result.measurement or first, result.error.message)
            who, when = f"rank {rank} of {ranks}: " if ranks > 1 else "", own.stat().st_mtime_ns
            found += [(when, key, f"{who}{message}") for key, message in errors.items()]
    failures: dict[str, str] = {}
    for _, key, message in sorted(found):
        failures.setdefault(key, message)
    return failures
