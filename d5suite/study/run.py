"""Running a study: what is planned and what it costs, run by run, interrupted and resumed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from d5suite.errors import ConfigurationError
from d5suite.files import locked
from d5suite.study.declaration import JOBS, OUT, RAW, TOML, DeclaredRun, Study
from d5suite.study.state import DONE, FAILED, HALF, JOB_FILES, LEFT_OUT, MachineRuns, RunState, sha256_of

POLL_S = 0.2
"""Seconds between two looks at a run."""

PATIENCE_S = 120.0
"""Seconds that a run has to save its results after an interrupt."""

INTERRUPTED = 2
"""Exit code of pytest, and of d5suite, after an interrupt."""

SAYS_NO = ("tune",)
"""Commands whose code 1 is a finding."""

REPEAT = ".again"
"""Folder, beside results and beside job files, where a run writes that has an earlier result."""

PR_SET_PDEATHSIG = 1
"""Option of ``prctl``, from Linux's ``prctl.h``."""


@dataclass(frozen=True)
class PlannedRun:
    """A run with its expected time.

    Attributes
    ----------
    run : DeclaredRun
    command : str
        As one types it in the study's folder.
    seconds : float
        Expected.
    source : {"earlier run", "stated"}
        What that rests on.
    kept : bool
        Whether it is finished already.
    """

    run: DeclaredRun
    command: str
    seconds: float
    source: str
    kept: bool


def plan(
    study: Study, state: MachineRuns, *, only: str = "", again: bool = False, earlier: Sequence[MachineRuns] = ()
) -> list[PlannedRun]:
    """Return a study's runs on a machine, in their order.

    Parameters
    ----------
    study : Study
    state : MachineRuns
        State of this machine; finished runs are kept.
    only : str, optional
        One part.
    again : bool
        Whether finished runs are measured again, too.
    earlier : sequence of MachineRuns
        States of other studies; their times are used as estimates.

    Raises
    ------
    ConfigurationError
        If there is no such part.
    """
    if only and only not in study.parts:
        where = "--again" if again else "--only"
        raise ConfigurationError(f"there is no part {only!r}", where=where, hint=f"Known: {', '.join(study.parts)}.")
    found: list[PlannedRun] = []
    waiting: set[str] = set()
    for run in study.runs:
        if only in ("", run.part):
            command = shlex.join(words_of(run, state))
            took = [
                known.seconds for each in (state, *earlier) if (known := each.runs.get(run.name)) is not None
                and known.state == DONE and _alike(known.command, command, each.name, state.name)
            ]  # fmt: skip
            seconds, source = (took[0], "earlier run") if took else (run.cost_s, "stated")
            kept = not again and state.is_kept(run.name, command) and not waiting.intersection(run.inputs)
            waiting |= set() if kept else {run.name}
            found.append(PlannedRun(run, command, seconds, source, kept))
    return found


def _alike(one: str, other: str, machine: str, own: str) -> bool:
    """Return whether two commands differ by the machine's name in paths at most."""
    return one.replace(f"/{machine}/", f"/{own}/") == other


def words_of(run: DeclaredRun, state: MachineRuns, place: Path | None = None, *, repeat: bool = False) -> list[str]:
    """Return a run's command.

    Parameters
    ----------
    run : DeclaredRun
    state : MachineRuns
    place : Path, optional
        The study's folder, to start the run elsewhere. By default paths are from that folder.
    repeat : bool
        Whether it writes into `REPEAT`.
    """
    start, own = f"{place}/" if place is not None else "", f"{REPEAT}/" if repeat else ""
    raw = f"{start}raw/{state.name}"
    places = {
        OUT: f"{raw}/{own}{run.name}.json",
        TOML: f"{raw}/{own}{run.name}.toml",
        RAW: raw,
        JOBS: f"{start}{JOB_FILES}/{state.name}/{own}{run.name}",
    }
    words = list(run.words)
    if place is not None:  # results that are packed have other names
        packed = {f"{RAW}/{name}.json": f"{RAW}/{state.result(name).name}" for name in run.inputs}
        words = [packed.get(word, word) for word in words]
    for name, path in places.items():
        words = [word.replace(name, path) for word in words]
    return words


@dataclass
class StudyProgress:
    """What a run's watcher is told.

    Attributes
    ----------
    number, count : int
        The run's place among those that are measured, from 1.
    run : PlannedRun
    left_s : float
        Seconds that this run and those after it still take.
    ended : RunState or None
        Set when it has ended.
    """

    number: int
    count: int
    run: PlannedRun
    left_s: float
    ended: RunState | None = None


def measure(
    study: Study, state: MachineRuns, planned: Sequence[PlannedRun], *, budget_s: float,
    tell: Callable[[StudyProgress], None], made_on: Mapping[str, str], made_with: Mapping[str, str],
) -> None:  # fmt: skip
    """Run what a plan lacks, and note each run's end before the next one starts.

    A part that has spent its share of the budget lets the others go first. A run that would end
    after the budget is left out; one that takes longer than expected is interrupted at its end, and
    keeps what it has measured. A finished result is replaced only by a finished one.

    Parameters
    ----------
    study : Study
    state : MachineRuns
    planned : sequence of PlannedRun
    budget_s : float
    tell : callable
    made_on, made_with : mapping of str to str
        Facts of this machine, and versions of its software: noted with each run.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C or a signal to end; what the current run has measured is saved.
    ConfigurationError
        If another process runs the study on this machine.
    """
    waiting = [each for each in planned if not each.kept]
    spent = dict.fromkeys(study.parts, 0.0)
    start, number = time.monotonic(), 0
    with held(state), _signals_interrupt():
        for each in waiting:  # noted at once: all of them are still to be measured after an interrupt
            if state.is_kept(each.run.name, each.command):
                state.runs[each.run.name].again = True
        while waiting:
            within = (each for each in waiting if _fits(each, spent, study, budget_s, waiting))
            chosen = next(within, waiting[0])
            waiting.remove(chosen)
            number += 1
            left = budget_s - (time.monotonic() - start)
            if chosen.seconds > left:
                ended = RunState(chosen.command, chosen.run.part, LEFT_OUT)
                ended.why = f"it takes about {chosen.seconds:.0f} s, and {max(left, 0):.0f} s of the budget are left"
                state.runs.setdefault(chosen.run.name, ended)
                state.save()
            else:
                rest = sum(each.seconds for each in waiting)
                told = StudyProgress(number, number + len(waiting), chosen, 0.0)
                ended = _Execution(chosen, state, made_on, made_with).run(
                    left, lambda took, told=told, rest=rest: _tell(tell, told, took, rest)  # type: ignore[misc]
                )  # fmt: skip
                spent[chosen.run.part] += ended.seconds
            tell(StudyProgress(number, number + len(waiting), chosen, 0.0, ended))


def _fits(
    each: PlannedRun, spent: Mapping[str, float], study: Study, budget_s: float, waiting: Sequence[PlannedRun]
) -> bool:
    """Return whether a run's part has time left, and what it reads is there."""
    part = each.run.part
    reads = not any(other.run.name in each.run.inputs for other in waiting)
    return reads and spent[part] + each.seconds <= study.parts[part].share * budget_s


def _tell(tell: Callable[[StudyProgress], None], told: StudyProgress, took: float, rest: float) -> None:
    tell(StudyProgress(told.number, told.count, told.run, max(told.run.seconds - took, 0.0) + rest))


@contextlib.contextmanager
def held(state: MachineRuns) -> Iterator[None]:
    """Hold a machine's results, so that no other process changes them.

    Raises
    ------
    ConfigurationError
        If another process holds them.
    """
    state.folder.mkdir(parents=True, exist_ok=True)
    lock = state.folder / ".lock"
    lock.touch()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            raise ConfigurationError(
                "another process runs this study here", where=str(state.folder),
                hint="Wait for it, or give this machine another --machine NAME.",
            ) from None  # fmt: skip
        yield


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the study as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    ends = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for each in ends:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in ends:
            signal.signal(each, signal.SIG_DFL)


@dataclass
class _Execution:
    """One command, from its start to the note of its end.

    A run whose earlier result is finished writes beside it, and replaces it when it is complete.
    """

    planned: PlannedRun
    state: MachineRuns
    made_on: Mapping[str, str]
    made_with: Mapping[str, str]
    earlier: RunState | None = field(init=False)

    def __post_init__(self) -> None:
        known = self.state.runs.get(self.name)
        finished = known is not None and known.state == DONE and self.state.is_whole(self.name)
        self.earlier = known if finished else None

    @property
    def name(self) -> str:
        return self.planned.run.name

    @property
    def target(self) -> Path:
        """The folder that it writes into."""
        return self.state.folder / REPEAT if self.earlier else self.state.folder

    def run(self, left_s: float, watch: Callable[[float], None]) -> RunState:
        """Run it, note how it ended, and return that."""
        run, state = self.planned.run, self.state
        noted = RunState(self.planned.command, run.part, HALF, "it is running, or was killed", _now())
        noted.made_on, noted.made_with = dict(self.made_on), dict(self.made_with)
        noted.inputs = {each: sha256_of(state.result(each)) for each in run.inputs}
        if self.earlier is None:
            state.runs[self.name] = noted
            for each in state.left(self.name):  # an older result would be taken for this run's
                remove(each)
        else:
            remove(self.target)
            self.target.mkdir()
        state.save()
        (state.job_files / (REPEAT if self.earlier else "")).mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        interrupted: BaseException | None = None
        code, over = -1, False
        with (self.target / f"{self.name}.log").open("wb") as log:
            process = subprocess.Popen(
                self._started(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_interruptible(),
            )  # fmt: skip
            try:
                while process.poll() is None:
                    watch(time.monotonic() - start)
                    over = time.monotonic() - start > left_s
                    if over:
                        break
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(POLL_S)
            except BaseException as error:  # whatever it is: no process is left behind
                interrupted = error
            finally:
                code = _ended(process)
        noted.seconds = round(time.monotonic() - start, 1)
        noted.sha256 = sha256_of(self.target / f"{self.name}.json")
        noted.state, noted.why = self._outcome(noted, code, cut=over or interrupted is not None)
        if over:
            noted.why = f"the budget ended: {noted.why}"
        self._put(noted)
        state.save()
        if interrupted is not None:
            raise interrupted
        return noted

    def _started(self) -> list[str]:
        """Return the words that start it from the current folder."""
        run, folder = self.planned.run, self.state.folder.parents[1]
        words = words_of(run, self.state, folder, repeat=self.earlier is not None)
        if run.is_slurm:
            jobs, out = (words[words.index(option) + 1] for option in ("--folder", "--out"))
            if unfinished := _unfinished(Path(jobs)):
                words = ["d5suite", "slurm", "run", "--resume", str(unfinished), "--out", out]
        module = {"pytest": "pytest", "d5suite": "d5suite.cli"}[words[0]]
        return [sys.executable, "-m", module, *words[1:]]

    def _outcome(self, noted: RunState, code: int, *, cut: bool) -> tuple[str, str]:
        """Return its state and why."""
        words, there = self.planned.run.words, bool(noted.sha256)
        log = self.target / f"{self.name}.log"
        if cut or (words[0] == "pytest" and code == INTERRUPTED and there):
            return HALF, "it was interrupted" + ("" if there else " before it had a result")
        if not there:
            return FAILED, f"it ended with code {code}: {_said(log)}"
        if code == 0:
            return DONE, ""
        if code == 1 and (words[0] == "pytest" or words[1] in SAYS_NO):
            return DONE, "a measurement in it failed" if words[0] == "pytest" else "it found nothing better"
        return FAILED, f"it ended with code {code}: {_said(log)}"

    def _put(self, noted: RunState) -> None:
        """Note its end, and put its result in the place of the earlier one, if it is finished."""
        state, earlier = self.state, self.earlier
        if earlier is not None and noted.state != DONE:
            earlier.why = f"measured again {noted.started}, and {noted.why}; this is the earlier result"
            return
        state.runs[self.name] = noted
        if earlier is not None:
            new = sorted(self.target.iterdir())
            for each in state.left(self.name):
                if each.name not in [other.name for other in new]:
                    remove(each)
            for each in new:
                if each.suffix == ".log":
                    each.write_bytes(each.read_bytes().replace(f"/{REPEAT}/".encode(), b"/"))
                if each.is_dir():
                    remove(state.folder / each.name)
                os.replace(each, state.folder / each.name)
            jobs = state.job_files / REPEAT / self.name
            if jobs.exists():
                remove(state.job_files / self.name)
                os.replace(jobs, state.job_files / self.name)
        for each in (state.folder / REPEAT, state.job_files / REPEAT):
            with contextlib.suppress(OSError):  # it holds another run's, or is not there
                each.rmdir()


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _interruptible() -> Callable[[], object]:
    """Return what lets a new process save its results and end when it is interrupted.

    A shell starts what runs in the background with SIGINT ignored, and children inherit that. On
    Linux the process is interrupted, too, if this one is killed.
    """
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if library is not None:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGINT)

    return prepare


def _unfinished(folder: Path) -> Path | None:
    """Return the latest run through Slurm in a folder, to go on with."""
    runs = [each.parent for each in folder.glob("*/run.json")]
    return max(runs, key=lambda each: each.stat().st_mtime, default=None)


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Interrupt a process if it runs, wait until it has saved its results, and return its code."""
    for end, patience in ((signal.SIGINT, PATIENCE_S), (signal.SIGKILL, None)):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, end)
        for _ in range(2):  # a second Ctrl-C hurries nobody: results are being saved
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                process.wait(patience)
                break
    return process.wait()


def _said(log: Path) -> str:
    """Return the last error in a log, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"error: \S", line, re.IGNORECASE)]
    return next(iter(errors[-1:] or [line for line in lines if line][-1:]), "it said nothing")[:300]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
