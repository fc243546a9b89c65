"""``d5suite slurm``: ``init``, ``run``, ``script``, ``status``, ``collect`` and ``cancel``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from d5suite.commands.status_line import StatusLine
from d5suite.errors import ConfigurationError, D5Error, JobError, escaped
from d5suite.files import given_path, read_json
from d5suite.launch.slurm import client
from d5suite.launch.slurm.gather import Gathering, write_jobs
from d5suite.launch.slurm.profile import ProfileFile, find_profile, read_profile
from d5suite.launch.slurm.run import PARENT, SlurmRun, find_run, submit, write_scripts
from d5suite.launch.slurm.status import JobStatus, describe, follow, job_statuses, write_reasons

PASSED = ("scheme", "communicator", "algorithm", "scaling", "preset", "device", "precision", "batch-size",
          "optimizer", "imagenet", "openimages", "seed", "loader-workers")  # fmt: skip
"""Options of pytest that are options of ``run`` and ``script``, too."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``slurm`` to the commands of ``d5suite``."""
    slurm = commands.add_parser("slurm", help="measure several nodes of a cluster under Slurm")
    own = slurm.add_subparsers(metavar="COMMAND", required=True)

    draft = own.add_parser("init", help="ask Slurm about its partitions, and draft a site profile")
    draft.add_argument("--partition", metavar="NAME", help="default: Slurm's default partition")
    draft.add_argument("--out", type=given_path, metavar="FILE", help="default: ./d5suite-slurm.toml; - prints it")
    draft.set_defaults(run=_init)

    for name, text in (("run", "submit, follow, gather one result file"), ("script", "write batch scripts only")):
        command = own.add_parser(name, help=text, epilog="Further options of pytest follow after --.")
        command.add_argument("recipes", nargs="*", metavar="RECIPE", help="recipe files of level 3")
        command.add_argument("--nodes", metavar="N[,…]", help="numbers of nodes to measure")
        command.add_argument(
            "--profile", type=given_path, metavar="FILE", help="site profile (default: ./d5suite-slurm.toml)"
        )
        command.add_argument("--folder", type=given_path, metavar="DIR", help=f"folder for runs (default: {PARENT})")
        command.add_argument(
            "--out", type=given_path, metavar="FILE", help="result file (default: in the run's folder)"
        )
        command.add_argument("--backend", metavar="NAME[:MODE][,…]", help="as for pytest, like the options below")
        for option in PASSED:
            command.add_argument(f"--{option}", metavar="VALUE")
        command.set_defaults(run=_run if name == "run" else _script)
        if name == "run":
            command.add_argument(
                "--resume", nargs="?", type=given_path, const=Path(), metavar="RUN",
                help="submit the missing jobs of a run (default: the latest run)",
            )  # fmt: skip
            command.add_argument("--no-follow", action="store_true", help="submit only; collect later")

    status = own.add_parser("status", help="show what a run has measured, and what is missing and why")
    collect = own.add_parser("collect", help="gather what a run has measured, from any shell")
    stop = own.add_parser("cancel", help="cancel waiting and running jobs")
    for command, work in ((status, _status), (collect, _collect), (stop, _cancel)):
        command.add_argument(
            "folder", nargs="?", type=given_path, metavar="RUN", help="folder of the run (default: the latest run)"
        )
        command.set_defaults(run=work)
    collect.add_argument("--out", type=given_path, metavar="FILE", help="result file (default: as the run states)")


def _init(options: argparse.Namespace) -> None:
    from d5suite.launch.slurm.draft import draft

    draft(options.partition, options.out)


def _script(options: argparse.Namespace) -> None:
    run = _new(options)
    shadowing = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    if shadowing:
        print(f"note: sbatch would take these before the lines of a script; unset them: {', '.join(shadowing)}")
    for script, jobs in write_scripts(run, list(run.jobs)).items():
        print(f"{script}: {', '.join(jobs)}")
    print(f"submit them with sbatch, then: d5suite slurm collect {_shown(run.folder)}")


def _run(options: argparse.Namespace) -> int:
    if options.resume is not None:
        run = _resumed(options)
    else:
        run = _new(options)
        print(f"run: {_shown(run.folder)}", flush=True)
    out = Path(run.out)
    with Gathering(run, out) as gathering:
        with run.held(), _telling_what_goes_on(run):
            statuses = job_statuses(run)
            missing = [status.name for status in statuses if status.ended and not status.complete]
            if missing:
                submit(run, missing)
            count = len(missing) - len(run.kept_back)
            print(f"submitted {count} job{'s' * (count != 1)} of {len(run.jobs)}", flush=True)
            if run.kept_back:
                print(f"the site takes no more of yours now; still to submit: {len(run.kept_back)}", flush=True)
            if options.no_follow:
                again = f"submit the others later: d5suite slurm run --resume {_shown(run.folder)}; "
                print(f"{again * bool(run.kept_back)}collect later: d5suite slurm collect {_shown(run.folder)}")
                return 1 if run.kept_back else 0
            statuses = _followed(run, gathering)
        return _gather(run, statuses, out, gathering)


@contextlib.contextmanager
def _telling_what_goes_on(run: SlurmRun) -> Iterator[None]:
    """Say which jobs go on after an error or Ctrl-C."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, client.RefusedError):
            with contextlib.suppress(D5Error):
                job_statuses(run)  # some may have been cancelled
        where = _shown(run.folder)
        going = dict.fromkeys(number.partition("_")[0] for number in run.going())
        if going:
            print(
                f"jobs go on; collect later: d5suite slurm collect {where}; stop them: d5suite slurm cancel {where}"
                f" (Slurm's numbers: {' '.join(going)})", flush=True,
            )  # fmt: skip
        raise


def _followed(run: SlurmRun, gathering: Gathering) -> list[JobStatus]:
    """Wait until all jobs have ended; prepare gathering once none is queued."""
    shown = _Progress(run)

    def tell(statuses: list[JobStatus], remark: str) -> None:
        shown.tell(statuses, remark)
        if statuses and not any(status.waits for status in statuses):
            with contextlib.suppress(JobError):  # gathering will say so
                gathering.prepare()

    try:
        return follow(run, tell)
    finally:
        shown.clear()


def _status(options: argparse.Namespace) -> int:
    run = find_run(options.folder)
    statuses = job_statuses(run)
    print(f"run: {_shown(run.folder)}, of {run.owner}, {run.created}")
    for status in statuses:
        print(escaped(f"  {status.name}: {describe(run, status)}"))
    left = [status for status in statuses if not status.complete]
    if left and all(status.ended for status in statuses):
        print(f"submit what is missing: d5suite slurm run --resume {_shown(run.folder)}")
    return 1 if left else 0


def _collect(options: argparse.Namespace) -> int:
    run = find_run(options.folder)
    out = Path(options.out or run.out).absolute()
    with Gathering(run, out) as gathering:
        return _gather(run, job_statuses(run), out, gathering)


def _cancel(options: argparse.Namespace) -> None:
    run = find_run(options.folder)
    run.require_own()
    going = [status for status in job_statuses(run) if not status.ended]
    client.cancel([status.start.number for status in going if status.start is not None])
    print(f"cancelled {len(going)} job{'s' * (len(going) != 1)}; what was measured stays")


def _new(options: argparse.Namespace) -> SlurmRun:
    """Make a run with its job files."""
    if not options.recipes:
        raise ConfigurationError("no recipe is named", hint="Give files such as recipes/test_digits_lenet.py.")
    source = read_profile(options.profile or find_profile())
    nodes = _nodes(options.nodes, source)
    for each in options.recipes:
        if not Path(each.partition("::")[0]).exists():
            raise ConfigurationError("there is no such recipe", where=each)
    profile = source.profile
    ranks = [profile.ranks(each) for each in nodes]
    arguments = [*options.recipes, *options.further, f"--ranks={','.join(map(str, ranks))}"]
    arguments += [f"--threads={profile.threads_per_rank * max(ranks)}"]
    for name in ("backend", *PASSED):
        value = getattr(options, name.replace("-", "_"))
        arguments += [f"--{name}={value}"] if value is not None else []
    device = options.device or "cpu"
    if profile.gpus and options.device is None and not any(each.startswith("--device") for each in options.further):
        print(
            f"note: {source.line(profile.gpus)} requests GPUs, and this run measures the CPU: without --device cuda "
            "they stay idle", flush=True,
        )  # fmt: skip
    run = SlurmRun.make(
        options.folder or PARENT, cwd=os.getcwd(), arguments=arguments, out="", profile=source, device=device
    )
    run.out = str((options.out or run.folder / "result.json").absolute())
    try:
        _require_writable(Path(run.out))
        run.jobs = {name: [] for name in write_jobs(run)}
        _require_mpi(run)
        run.save()
    except BaseException:
        shutil.rmtree(run.folder, ignore_errors=True)
        raise
    return run


def _require_mpi(run: SlurmRun) -> None:
    """Raise `ConfigurationError` if MPI starts the ranks, but the profile's srun has no MPI."""
    ranks = (read_json(run.job_path(name)).get("distributed") or {} for name in run.jobs)
    if run.profile.profile.mpi == "none" and any(each.get("launcher") == "mpi" for each in ranks):
        raise ConfigurationError(
            "ranks of MPI do not meet without srun --mpi", where=run.profile.line("mpi"),
            hint="Set mpi, such as mpi = \"pmix\" (srun --mpi=list shows all), or choose another --communicator.",
        )  # fmt: skip


def _resumed(options: argparse.Namespace) -> SlurmRun:
    """Return the run to resume, with a new profile if one is given."""
    if options.recipes or options.nodes:
        raise ConfigurationError("--resume continues a run unchanged: omit recipes and --nodes")
    run = find_run(None if options.resume == Path() else options.resume)
    run.require_own()
    if options.profile is not None:
        before, run.profile = run.profile.profile, read_profile(options.profile)
        after = run.profile.profile
        if (before.cores_per_node, before.ranks_per_node) != (after.cores_per_node, after.ranks_per_node):
            raise ConfigurationError(
                f"the run has {before.ranks_per_node} ranks and {before.cores_per_node} cores a node",
                where=str(options.profile), hint="Give cores_per_node and ranks_per_node these values, or start anew.",
            )  # fmt: skip
    if options.out is not None:
        run.out = str(options.out.absolute())
        _require_writable(Path(run.out))
    _require_mpi(run)
    run.save()
    return run


def _nodes(text: str | None, source: ProfileFile) -> list[int]:
    """Return the requested node counts."""
    words = [each.strip() for each in (text or "").split(",") if each.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words) or len(set(words)) < len(words):
        raise ConfigurationError(f"{text!r} is not a list of node counts such as 1,2,4", where="--nodes")
    nodes = sorted(map(int, words))
    most = source.profile.most_nodes
    if most and nodes[-1] > most:
        raise ConfigurationError(f"{nodes[-1]} nodes are more than {source.line('most_nodes')}", where="--nodes")
    return nodes


def _require_writable(out: Path) -> None:
    """Raise `ConfigurationError` unless all files of a result can be written."""
    from d5suite.pytest_plugin.saving import AtomicDestination

    AtomicDestination(out, "--out").discard()


def _gather(run: SlurmRun, statuses: list[JobStatus], out: Path, gathering: Gathering) -> int:
    """Write the result file of all measurements; report missing ones with reasons."""
    write_reasons(run, statuses)
    code = gathering.gather()
    missing = [status for status in statuses if not status.complete]
    for status in missing:
        print(escaped(f"missing: {status.name}: {describe(run, status)}"))
    if out.exists():
        print(f"result: {_shown(out)}")
    return code or (1 if missing else 0)


class _Progress(StatusLine):
    """Progress: a line for each ended job, and on a terminal one that is updated."""

    def __init__(self, run: SlurmRun) -> None:
        super().__init__()
        self.run, self._reported, self._remark = run, set[str](), ""

    def tell(self, statuses: list[JobStatus], remark: str) -> None:
        for status in statuses:
            if status.ended and status.name not in self._reported and (status.settled or not status.complete):
                self._reported.add(status.name)
                self.clear()
                print(escaped(f"  {status.name}: {describe(self.run, status)}"), flush=True)
        if remark and not self._remark and not self.is_shown:
            print(escaped(f"  {remark}"), flush=True)
        self._remark = remark
        if self.is_shown:
            counts = Counter(self._word(status) for status in statuses)
            phase = next((status.phase for status in statuses if not status.ended and status.phase), "")
            line = remark or ", ".join(f"{count} {word}" for word, count in counts.items()) + (
                f"; {phase}" * bool(phase)
            )
            self.show(f"  {line}")

    @staticmethod
    def _word(status: JobStatus) -> str:
        if status.ended:
            return "measured" if status.complete else "ended"
        return "wait" if status.waits else "run"


def _shown(path: Path) -> str:
    """Return a path, relative if it lies below the current folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
