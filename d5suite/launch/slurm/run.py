"""A run under Slurm: a folder of job files, batch scripts, results, and a ledger of submissions."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError, JobError
from d5suite.files import locked, read_json, write_json
from d5suite.job import Job
from d5suite.launch.base import interpreter
from d5suite.launch.slurm import client
from d5suite.launch.slurm.profile import ClusterProfile, ProfileFile
from d5suite.launch.slurm.script import batch_script, write_script

SCHEMA = "d5suite-slurm-1"

PARENT = Path("d5suite-slurm")
"""Parent folder of runs, unless ``--folder`` names another."""

LEDGER, JOBS, SCRIPTS = "run.json", "jobs", "scripts"
"""Names in a run's folder."""


@dataclass(frozen=True)
class Submission:
    """One start of a job.

    Attributes
    ----------
    name : str
        The job's name in Slurm.
    element : int or None
        The job's index in a job array.
    number : str
        Slurm's number, such as ``17`` or ``17_3``; empty until Slurm has answered.
    state : dict or None
        How the job ended, as `client.SlurmState`, once that is known: Slurm forgets it.
    """

    name: str
    element: int | None = None
    number: str = ""
    state: dict[str, str] | None = None


@dataclass
class SlurmRun:
    """A run, as recorded in its ledger.

    Attributes
    ----------
    folder : Path
    owner : str
        The user who made the run.
    created : str
        Time, in ISO 8601.
    cwd : str
        The folder in which the run was made; names of recipes are relative to it.
    arguments : list of str
        Arguments of pytest, without the folder of job files.
    out : str
        The result file.
    profile : ProfileFile
    device : str
    jobs : dict of str to list of Submission
        By name of a job file, without suffix: all its submissions.
    """

    folder: Path
    owner: str
    created: str
    cwd: str
    arguments: list[str]
    out: str
    profile: ProfileFile
    device: str = "cpu"
    jobs: dict[str, list[Submission]] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The part of a job's name in Slurm that identifies the run."""
        return self.folder.name

    def job_path(self, name: str) -> Path:
        """Return the path of a job file."""
        return self.folder / JOBS / f"{name}.job.json"

    @classmethod
    def make(cls, parent: Path, **facts: Any) -> SlurmRun:
        """Make a new run in a new folder.

        Raises
        ------
        ConfigurationError
            The folder cannot be made.
        """
        user = getpass.getuser()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            while True:
                name = f"{time.strftime('%Y%m%d-%H%M%S')}-{user}-{secrets.token_hex(2)}"
                with contextlib.suppress(FileExistsError):
                    (parent / name).mkdir()
                    break
            run = cls((parent / name).absolute(), user, time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts)
            for each in (JOBS, SCRIPTS):
                (run.folder / each).mkdir()
        except OSError as error:
            raise ConfigurationError(
                f"cannot make a folder for the run: {error.strerror}", where=str(parent), hint="Choose --folder DIR."
            ) from error
        return run

    def save(self) -> None:
        """Write the ledger atomically."""
        content = {
            "schema": SCHEMA, "owner": self.owner, "created": self.created, "cwd": self.cwd,
            "arguments": self.arguments, "out": self.out, "device": self.device,
            "profile": {
                "path": self.profile.path, "keys": asdict(self.profile.profile), "lines": dict(self.profile.lines)
            },
            "jobs": {name: [asdict(each) for each in starts] for name, starts in self.jobs.items()},
        }  # fmt: skip
        write_json(self.folder / LEDGER, content)

    @classmethod
    def load(cls, folder: Path) -> SlurmRun:
        """Read a run's ledger.

        Raises
        ------
        ConfigurationError
            There is no ledger, or the file is not one.
        """
        path = folder / LEDGER
        try:
            content = read_json(path)
            if content.pop("schema") != SCHEMA:
                raise ValueError("another version of d5suite wrote it")
            profile = content.pop("profile")
            source = ProfileFile(ClusterProfile(**profile["keys"]), profile["path"], profile["lines"])
            starts = content.pop("jobs")
            jobs = {name: [Submission(**each) for each in own] for name, own in starts.items()}
            return cls(folder=folder.absolute(), profile=source, jobs=jobs, **content)
        except (JobError, AttributeError, KeyError, TypeError, ValueError) as error:
            what = error.what if isinstance(error, JobError) else f"not the ledger of a run: {error}"
            raise ConfigurationError(what, where=str(path), hint="Name a folder that d5suite slurm run made.") from None

    def require_own(self) -> None:
        """Check that this user made the run, and so may submit and cancel its jobs.

        Raises
        ------
        ConfigurationError
            Another user made it.
        """
        owner = self.folder.stat().st_uid
        if owner != os.geteuid():
            with contextlib.suppress(KeyError):
                raise ConfigurationError(
                    f"this run is {pwd.getpwuid(owner).pw_name}'s", where=str(self.folder),
                    hint="You may look at it with d5suite slurm status, and collect it with --out FILE.",
                )  # fmt: skip
            raise ConfigurationError("this run is another user's", where=str(self.folder))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run against other processes, and load their changes.

        Raises
        ------
        ConfigurationError
            Another process has locked it.
        """
        try:
            with locked(self.folder / ".lock", wait=False):
                self.jobs = self.load(self.folder).jobs
                yield
        except BlockingIOError:
            raise ConfigurationError("another process submits or follows this run", where=str(self.folder)) from None


def find_run(given: Path | None) -> SlurmRun:
    """Return the run in a folder, or else this user's latest run below it; by default in `PARENT`.

    Raises
    ------
    ConfigurationError
        There is none.
    """
    place = given or PARENT
    if (place / LEDGER).exists():
        return SlurmRun.load(place)
    runs = [each.parent for each in place.glob(f"*/{LEDGER}") if each.stat().st_uid == os.geteuid()]
    if not runs:
        raise ConfigurationError("there is no run of yours", where=str(place), hint="Name its folder.")
    return SlurmRun.load(max(runs, key=lambda each: (each.name[:15], each.stat().st_mtime)))


def write_scripts(run: SlurmRun, names: Sequence[str], first: int = 1) -> dict[Path, list[str]]:
    """Write one batch script per number of nodes; return the scripts with the names of their jobs.

    Parameters
    ----------
    run : SlurmRun
    names : sequence of str
        Jobs to submit.
    first : int
        The number of the first script.
    """
    profile = run.profile.profile
    by_nodes: dict[tuple[int, str], list[str]] = {}
    pythons = {}
    for name in names:
        job = Job.load(run.job_path(name))
        by_nodes.setdefault((job.ranks // profile.ranks_per_node, job.device), []).append(name)
        own = interpreter(job.backend["name"], {})
        if own is not None:
            pythons[run.job_path(name).name] = own
    found = {}
    for number, ((nodes, device), alike) in enumerate(sorted(by_nodes.items()), first):
        path = run.folder / SCRIPTS / f"{number:02}-nodes{nodes}.sh"
        text = batch_script(
            [run.job_path(name) for name in alike], name=f"d5suite-{run.identity}-{number}", profile=profile,
            nodes=nodes, device=device, folder=Path(run.cwd), output=path.with_suffix(""), pythons=pythons,
        )  # fmt: skip
        write_script(path, text)
        found[path] = alike
    return found


def submit(run: SlurmRun, names: Sequence[str]) -> None:
    """Submit jobs; each is in the ledger before Slurm gets it.

    Raises
    ------
    RefusedError
        Slurm refuses; jobs that were submitted before go on.
    NoAnswerError
        The controller does not answer. It may have accepted the script; `number_all` looks.
    """
    first = 1 + len(list((run.folder / SCRIPTS).glob("*.sh")))
    for number, (script, alike) in enumerate(write_scripts(run, names, first).items(), first):
        title = f"d5suite-{run.identity}-{number}"
        for place, name in enumerate(alike):
            start = Submission(title, place if len(alike) > 1 else None)
            run.jobs[name] = [*run.jobs.get(name, []), start]
        run.save()
        try:
            answer = client.submit(str(script))
        except client.RefusedError as error:
            for name in alike:
                run.jobs[name].pop()
            run.save()
            key = client.likely_cause(error.what, run.profile.lines)
            raise client.RefusedError(error.what, hint=run.profile.line(key) if key else None) from error
        for name in alike:
            last = run.jobs[name][-1]
            run.jobs[name][-1] = replace(last, number=_numbered(answer, last.element))
        run.save()


def number_all(run: SlurmRun, states: Mapping[tuple[str, str], client.SlurmState]) -> bool:
    """Fill in missing numbers of submissions from Slurm's states; return whether any changed."""
    changed = False
    for starts in run.jobs.values():
        last = starts[-1] if starts else None
        if last is None or last.number:
            continue
        for name, number in states:
            if name == last.name and (last.element is None or number.endswith(f"_{last.element}")):
                starts[-1] = replace(last, number=number)
                changed = True
    return changed


def _numbered(answer: str, element: int | None) -> str:
    return answer if element is None else f"{answer}_{element}"
