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
from d5suite.launch.slurm.script import batch_script, nodes_of_components, write_script

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
    kept_back : list of str
        Jobs that this process submits once the site's limit on submitted jobs allows it; not in the
        ledger.
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
    kept_back: list[str] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """The part of a job's name in Slurm that identifies the run."""
        return self.folder.name

    def job_path(self, name: str) -> Path:
        """Return the path of a job file."""
        return self.folder / JOBS / f"{name}.job.json"

    def going(self) -> list[str]:
        """Return Slurm's numbers of the jobs whose end is not known."""
        latest = [starts[-1] for starts in self.jobs.values() if starts]
        return [each.number for each in latest if each.number and each.state is None]

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
        If there is no run.
    """
    place = given or PARENT
    if (place / LEDGER).exists():
        return SlurmRun.load(place)
    runs = [each.parent for each in place.glob(f"*/{LEDGER}") if each.stat().st_uid == os.geteuid()]
    if not runs:
        raise ConfigurationError("there is no run of yours", where=str(place), hint="Name its folder.")
    return SlurmRun.load(max(runs, key=lambda each: (each.name[:15], each.stat().st_mtime)))


def write_scripts(run: SlurmRun, names: Sequence[str]) -> dict[Path, list[str]]:
    """Write the batch scripts of some jobs; return the scripts with the names of their jobs."""
    return {_write_script(run, alike): list(alike) for alike in _arrays(run, names)}


def _arrays(run: SlurmRun, names: Sequence[str]) -> list[dict[str, Job]]:
    """Group jobs with the same needs into job arrays that are no larger than the site allows."""
    by_needs: dict[tuple[int, str, str], list[tuple[str, Job]]] = {}
    for name in names:
        job = Job.load(run.job_path(name))
        alone = name if nodes_of_components(job, run.profile.profile) else ""  # Slurm has no array of such jobs
        by_needs.setdefault((job.ranks, job.device, alone), []).append((name, job))
    most = client.largest_array() if len(by_needs) < len(names) else 1
    groups = [by_needs[needs] for needs in sorted(by_needs)]
    return [dict(alike[first : first + most]) for alike in groups for first in range(0, len(alike), most)]


def _write_script(run: SlurmRun, alike: Mapping[str, Job]) -> Path:
    """Write the batch script of jobs with the same needs."""
    profile = run.profile.profile
    paths = {run.job_path(name): job for name, job in alike.items()}
    pythons = {path.name: interpreter(job.backend["name"], {}) for path, job in paths.items()}
    job = next(iter(paths.values()))
    nodes = job.ranks // profile.ranks_per_node
    before = [int(each.name.partition("-")[0]) for each in (run.folder / SCRIPTS).glob("[0-9]*-nodes*.sh")]
    number = 1 + max(before, default=0)
    script = run.folder / SCRIPTS / f"{number:02}-nodes{nodes}.sh"
    text = batch_script(
        list(paths), name=_title(run, script), profile=profile, nodes=nodes, device=job.device, folder=Path(run.cwd),
        output=script.with_suffix(""), pythons={name: own for name, own in pythons.items() if own is not None},
        components=nodes_of_components(job, profile),
    )  # fmt: skip
    write_script(script, text)
    return script


def _title(run: SlurmRun, script: Path) -> str:
    """Return the name in Slurm of a script's jobs."""
    return f"d5suite-{run.identity}-{int(script.name.partition('-')[0])}"


def submit(run: SlurmRun, names: Sequence[str]) -> None:
    """Submit jobs; each is in the ledger before Slurm gets it.

    Where the site limits how many jobs a user may submit, the jobs beyond that stay in
    `SlurmRun.kept_back`, to be submitted once others have ended.

    Raises
    ------
    RefusedError
        Slurm refuses; jobs that were submitted before go on.
    NoAnswerError
        The controller does not answer. It may have accepted the script; `number_all` looks.
    """
    groups = _arrays(run, names)
    while groups:
        alike = groups.pop(0)
        run.kept_back = [name for group in groups for name in group]
        try:
            _submit(run, alike)
        except client.RefusedError as error:
            is_limit = client.SUBMIT_LIMIT.search(error.what) is not None
            if is_limit and len(alike) > 1:
                each = list(alike.items())
                half = (len(each) + 1) // 2
                groups[:0] = [dict(each[:half]), dict(each[half:])]
            elif is_limit and run.going():
                run.kept_back = [*alike, *run.kept_back]
                return
            else:
                keys = client.likely_causes(error.what, run.profile.lines)
                hint = "\n  ".join(run.profile.line(key) for key in keys)
                raise client.RefusedError(error.what, hint=hint or None) from error


def _submit(run: SlurmRun, alike: Mapping[str, Job]) -> None:
    """Submit jobs with the same needs; what Slurm refuses leaves no trace."""
    script = _write_script(run, alike)
    for place, name in enumerate(alike):
        start = Submission(_title(run, script), place if len(alike) > 1 else None)
        run.jobs[name] = [*run.jobs.get(name, []), start]
    run.save()
    try:
        answer = client.submit(str(script))
    except client.RefusedError:
        for name in alike:
            run.jobs[name].pop()
        run.save()
        script.unlink()
        raise
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
