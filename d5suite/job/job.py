"""A job: one worker's measurements, as names and numbers.

A job holds no code, but may name Python files that the worker imports: files that define a
measurement or a pass, or describe a custom operator. The job states the files' SHA-256, and the
worker runs no other content. So trust a job from elsewhere as far as you trust the files that it
names. A job writes only into its own folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from d5suite.errors import ConfigurationError, JobError
from d5suite.files import write_json
from d5suite.job import schema
from d5suite.job.placement import placed

SCHEMA = "d5suite-job-3"

TIME = "time"
"""The pass that every job has."""

LONGEST_NAME = 100
"""Most bytes in the name of a case or preset: a file name consists of two names and a suffix."""


@dataclass(frozen=True)
class CaseJob:
    """One case of a job; subclasses add their workload.

    Attributes
    ----------
    name : str
        The case's name; unique within the job.
    preset : str
    measurements : list of str
        Names of measurements.
    sampling : dict
        Fields of `d5suite.instruments.sampling.SamplingSettings`.
    files : dict of str to str
        By measurement: the Python file that defines it, if d5suite does not.
    reference : str or None
        File of reference answers, which backends share (HDF5).
    """

    name: str
    preset: str
    measurements: list[str]
    sampling: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    reference: str | None = None

    kind: ClassVar[str] = ""

    def keys(self) -> list[str]:
        """Return the keys of the case's measurements: ``case/measurement``."""
        return [key_of(self.name, each) for each in self.measurements]

    def imports(self) -> list[str]:
        """Return the Python files that the worker imports for the case."""
        return list(self.files.values())

    def with_places(self, change: Callable[[str], str]) -> CaseJob:
        """Return the case with changed paths to the files that jobs of a session share."""
        return replace(self, reference=self.reference and change(self.reference))

    def alone(self) -> CaseJob:
        """Return the case without files that only one job at a time may write."""
        return self

    def as_later_rank(self) -> CaseJob:
        """Return the case for a rank other than 0, which writes no shared file."""
        return self

    def divided(self, ranks: int) -> CaseJob:
        """Return the case with its batch divided among ranks; unchanged without a batch.

        Raises
        ------
        ConfigurationError
            The batch size is not a multiple of the number of ranks.
        """
        return self


@dataclass(frozen=True)
class NetworkCase(CaseJob):
    """A network on a dataset.

    Attributes
    ----------
    network : dict
        ``zoo`` (a name) or ``onnx`` (a path), with ``classes``, ``image_size`` in pixels,
        ``label_smoothing`` and ``several_labels`` (per image, verified or unknown); or ``given``
        (the path of a user's network), with the inputs' ``shapes``, and the contents that the user
        gives them: ``inputs`` (values and ranges) and ``sample`` (a path).
    dataset : dict
        ``kind`` and ``root``.
    batch_size : int
        Images.
    optimizer : dict
        Settings, as `d5suite.optimizers.settings.Optimizer.to_dict` writes them.
    validation_steps : int
        Training steps over which backends must agree.
    training : dict
        Settings of a run to a target, as `d5suite.cases.recipe.Training.to_dict` writes them; empty
        without such a run.
    peers : list of str
        Float64 trajectory files to agree with; files that do not exist are left out.
    trajectory : str or None
        Where to write this backend's float64 trajectory.
    """

    network: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, str] = field(default_factory=dict)
    batch_size: int = 1
    optimizer: dict[str, Any] = field(default_factory=dict)
    validation_steps: int = 1
    training: dict[str, Any] = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)
    trajectory: str | None = None

    kind: ClassVar[str] = "network"

    def with_places(self, change: Callable[[str], str]) -> NetworkCase:
        """See `CaseJob.with_places`."""
        return replace(
            self,
            reference=self.reference and change(self.reference),
            trajectory=self.trajectory and change(self.trajectory),
            peers=[change(each) for each in self.peers],
        )

    def alone(self) -> NetworkCase:
        """See `CaseJob.alone`."""
        return replace(self, reference=None, trajectory=None, peers=[])

    def as_later_rank(self) -> NetworkCase:
        """See `CaseJob.as_later_rank`."""
        return replace(self, trajectory=None)

    def divided(self, ranks: int) -> NetworkCase:
        """See `CaseJob.divided`. Proofs are not shared between batch sizes, hence `alone`."""
        batch, left = divmod(self.batch_size, ranks)
        if left or not batch:
            raise ConfigurationError(
                f"a batch of {self.batch_size} cannot be divided among {ranks} ranks", where="--scaling strong",
                hint="Choose --batch-size, the images of all ranks together.",
            )  # fmt: skip
        return replace(self.alone(), batch_size=batch)


@dataclass(frozen=True)
class OperationCase(CaseJob):
    """One ONNX node.

    Attributes
    ----------
    operation : dict
        The node, as `d5suite.network.operation.Operation.to_dict` writes it.
    """

    operation: dict[str, Any] = field(default_factory=dict)

    kind: ClassVar[str] = "operation"

    def imports(self) -> list[str]:
        """See `CaseJob.imports`."""
        custom = self.operation.get("custom")
        return [*super().imports(), *([custom["file"]] if custom else [])]


@dataclass(frozen=True)
class CollectiveCase(CaseJob):
    """One collective at several sizes.

    Attributes
    ----------
    collective : str
        A key of `d5suite.distributed.calls.CALLS`.
    sizes : list of int
        Sizes in bytes, ascending.
    """

    collective: str = ""
    sizes: list[int] = field(default_factory=list)

    kind: ClassVar[str] = "collective"


@dataclass(frozen=True)
class WorkflowCase(CaseJob):
    """Programs that run side by side, and the couplings that join them.

    Attributes
    ----------
    components : list of dict
        ``name``, ``program``, ``file`` (the Python file that defines the program, or null),
        ``ranks`` (null: all ranks that the others leave) and ``options``.
    couplings : list of dict
        Fields of `d5suite.workflows.ports.Joint`.
    steps : int
        Number of steps of every component, in a run.
    placement : {"packed", "interleaved"}
        Whether a component's ranks follow each other.
    checkpoint_every : int
        Steps between checkpoints, from which a restart is proved; 0 for no checkpoints.
    """

    components: list[dict[str, Any]] = field(default_factory=list)
    couplings: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 1
    placement: str = "packed"
    checkpoint_every: int = 0

    kind: ClassVar[str] = "workflow"

    def imports(self) -> list[str]:
        """See `CaseJob.imports`; includes the executables of users' programs."""
        own = [each["file"] for each in self.components if each.get("file")]
        own += [each["options"]["executable"] for each in self.components if each["options"].get("executable")]
        return [*super().imports(), *own]


KINDS: dict[str, type[CaseJob]] = {
    each.kind: each for each in (NetworkCase, OperationCase, CollectiveCase, WorkflowCase)
}
"""Kinds of cases by name."""


@dataclass(frozen=True)
class Distributed:
    """Settings with which the ranks of a level-3 job train together.

    Attributes
    ----------
    scheme : str
        A key of `d5suite.distributed.schemes.SCHEMES` or of a backend's ``schemes``; empty for
        collectives, which do not train.
    settings : dict
        Settings of the scheme.
    communicator : str
        A key of `d5suite.distributed.communicators.COMMUNICATORS`.
    algorithm : str
        Algorithm of the collectives: a key of `d5suite.distributed.algorithms.ALGORITHMS`.
    launcher : {"none", "process", "mpi"}
        Launcher that starts the ranks; ``none`` for a single rank.
    oversubscribe : bool
        Whether ranks may share cores and GPUs.
    native : bool
        Whether the scheme is the framework's own; the communicator is then only used for decisions
        that all ranks must take alike.
    interface : str
        The network interface that transports use; empty to let the transport choose.
    """

    scheme: str = "all_reduce"
    settings: dict[str, Any] = field(default_factory=dict)
    communicator: str = "local"
    algorithm: str = "native"
    launcher: str = "none"
    oversubscribe: bool = False
    native: bool = False
    interface: str = ""


class Ranks(NamedTuple):
    """Ranks that train together: the number of ranks, and the settings."""

    size: int
    distributed: Distributed

    def __str__(self) -> str:
        """Return the name in results, such as ``all_reduce-gloo-2``; without a scheme, ``2``."""
        how = self.distributed
        if not how.scheme:
            return str(self.size)
        scheme = ":".join([how.scheme, *(f"{key}={value}" for key, value in how.settings.items())])
        algorithm = how.algorithm if how.algorithm != "native" else ""
        communicator = "" if how.native and how.launcher != "mpi" else how.communicator
        return "-".join(filter(None, (scheme, communicator, algorithm, str(self.size))))


@dataclass(frozen=True)
class Job:
    """Cases on one backend; the schema is ``job.json``.

    Attributes
    ----------
    backend : dict
        ``name`` and ``mode``.
    device, precision : str
    threads, seed, loader_workers, ranks : int
        ``threads`` is the number for all ranks together.
    cases : list of CaseJob
    passes : list of str
        Names of the passes over each prepared step, always with ``time``.
    pass_files : dict of str to str
        By pass: the Python file that defines it, if d5suite does not.
    references_only : bool
        Whether only reference answers of operations are computed, which needs no backend; nothing
        is measured.
    digests : dict of str to str
        By Python file that the worker imports: the SHA-256, which `save` adds.
    distributed : Distributed or None
        Settings with which the ranks train together, at level 3.
    """

    backend: dict[str, str]
    device: str
    precision: str
    threads: int
    seed: int
    cases: list[CaseJob]
    passes: list[str] = field(default_factory=lambda: ["memory", "energy", TIME])
    pass_files: dict[str, str] = field(default_factory=dict)
    references_only: bool = False
    loader_workers: int = 0
    ranks: int = 1
    digests: dict[str, str] = field(default_factory=dict)
    distributed: Distributed | None = None

    def keys(self) -> list[str]:
        """Return the names of all measurements, in order: ``case/measurement``."""
        return [key_of(case.name, name) for case in self.cases for name in case.measurements]

    @property
    def places(self) -> dict[str, list[int]]:
        """The ranks of each component of a workflow; empty for other jobs."""
        case = self.cases[0] if self.cases else None
        if not isinstance(case, WorkflowCase):
            return {}
        return placed(case.components, self.ranks, interleaved=case.placement == "interleaved")

    def imports(self) -> list[str]:
        """Return the Python files that the worker imports."""
        files = (file for case in self.cases for file in case.imports())
        return list(dict.fromkeys([*files, *self.pass_files.values()]))

    def require_code(self) -> None:
        """Check that the Python files have not changed since the job was written.

        Raises
        ------
        JobError
            If a file is missing, or its SHA-256 differs from the SHA-256 in the job.
        """
        for file in self.imports():
            found = _sha256(file)
            if found is None:
                raise JobError("there is no such Python file", where=file)
            if self.digests.get(file) != found:
                stated = (
                    "is not the one that the job was written for" if file in self.digests else "has no SHA-256 there"
                )
                raise JobError(
                    f"the job would run this file, which {stated}",
                    where=file,
                    hint="If you trust it, run it with python -m d5suite.worker --trust JOB.",
                )

    def save(self, path: Path) -> None:
        """Write the job file atomically, with the digests of the files it imports."""
        content = asdict(_with_places(self, lambda place: _name_in(path.parent, place)))
        content["cases"] = [
            {"kind": case.kind, **each} for case, each in zip(self.cases, content["cases"], strict=True)
        ]
        digests = {file: self.digests.get(file) or _sha256(file) for file in self.imports()}
        content["digests"] = {file: digest for file, digest in digests.items() if digest is not None}
        write_json(path, {"schema": SCHEMA, **content})

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read and check a job file.

        Raises
        ------
        JobError
            If the file cannot be read or does not fit the schema; every fault is named. If the job
            would write outside of its own folder.
        """
        content = schema.read(path, "job.json", "job")
        content.pop("schema")
        content["cases"] = [KINDS[case.pop("kind")](**case) for case in content["cases"]]
        if content.get("distributed") is not None:
            content["distributed"] = Distributed(**content["distributed"])
        job = cls(**content)
        if job.ranks > 1 and (job.distributed is None or job.distributed.launcher == "none"):
            raise JobError(f"'distributed' is required for {job.ranks} ranks", where=str(path))
        if TIME not in job.passes:
            raise JobError(f"'passes' lacks {TIME!r}: what was timed is what a result holds", where=str(path))
        for name in (name for case in job.cases for name in (case.name, case.preset)):
            if not is_plain_name(name):
                raise JobError(f"not a plain name: {name!r}", where=str(path))
        return _with_places(job, lambda place: _path_in(path, place))


def is_plain_name(name: object) -> bool:
    """Return whether a name is safe as a file name."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name.encode(errors="replace")) <= LONGEST_NAME
        and not name.startswith(".")
        and not set(name) & set("/\\")
    )


def _with_places(job: Job, change: Callable[[str], str]) -> Job:
    """Return the job with changed paths to the files that jobs of a session share."""
    return replace(job, cases=[case.with_places(change) for case in job.cases])


def _name_in(folder: Path, place: str) -> str:
    return Path(place).name if Path(place).parent.resolve() == folder.resolve() else place


def _path_in(job: Path, name: str) -> str:
    folder = job.parent.resolve()
    place = folder / name
    if place.resolve() != folder / place.name:
        raise JobError(
            f"{name!r} does not lie in the job's own folder", where=str(job), hint="Give the name of a file there."
        )
    return str(place)


def _sha256(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if Path(file).is_file() else None
    except (OSError, ValueError):
        return None


def key_of(case: str, measurement: str) -> str:
    """Return the name of a measurement within a job: ``case/measurement``."""
    return f"{case}/{measurement}"


def result_path(job_path: Path) -> Path:
    """Return a job's result path: ``name.result.json`` for ``name.job.json`` or ``name.json``."""
    return job_path.with_name(f"{_stem(job_path)}.result.json")


def log_path(job_path: Path) -> Path:
    """Return the path of a worker's log: ``name.log``."""
    return job_path.with_name(f"{_stem(job_path)}.log")


def reason_path(job_path: Path) -> Path:
    """Return the file with the reason why a job run elsewhere lacks results: ``name.reason``."""
    return job_path.with_name(f"{_stem(job_path)}.reason")


def results_of(job_path: Path) -> list[Path]:
    """Return the results of a job that ran elsewhere, the latest last.

    A job that was restarted keeps its earlier results as ``name.start1.result.json``, and so on.
    """
    before = result_path(job_path).name.removesuffix(".result.json") + ".start"
    found: dict[int, Path] = {}
    for path in job_path.parent.glob("*.result.json"):
        number = path.name.removeprefix(before).removesuffix(".result.json")
        if path.name.startswith(before) and number.isdecimal():
            found[int(number)] = path
    latest = [path for path in [result_path(job_path)] if path.exists()]
    return [found[number] for number in sorted(found)] + latest


def of_rank(path: Path, rank: int) -> Path:
    """Return the file of a rank: ``name.rank1.log`` for ``name.log``; rank 0 has the job's file."""
    if rank == 0:
        return path
    suffix = next(each for each in (".result.json", path.suffix) if path.name.endswith(each))
    return path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")


def stem_of(result: Path, rank: int = 0) -> Path:
    """Return ``name``, with which a job's file names begin, given the result file of a rank."""
    return result.with_name(result.name.removesuffix(".result.json").removesuffix(f".rank{rank}" if rank else ""))


def _stem(job_path: Path) -> str:
    return job_path.name.removesuffix(".json").removesuffix(".job")
