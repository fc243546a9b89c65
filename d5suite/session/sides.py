"""The two sides of a comparison: what a SPEC says, made ready to run workers.

====================== ============================================================================
``here``               this interpreter, as it is
a path                 of an interpreter, or of the folder of a virtual environment
``env:NAME=VALUE``     a variable of the worker's environment
``mode:NAME``          another mode of each backend
``rev:REVISION``       d5suite as it is at a revision of the Git repository of the current folder
``install:REQUIREMENT`` what pip installs on top of this environment, kept in the cache
====================== ============================================================================

Imports `d5suite.errors`, `d5suite.files` and `d5suite.launch`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import d5suite
from d5suite.errors import ConfigurationError
from d5suite.files import cache_folder, locked

FORMS = "here, an interpreter, a virtual environment, env:NAME=VALUE, mode:NAME, rev:REVISION or install:REQUIREMENT"

START_S = 60.0
"""Seconds that an interpreter may take to import d5suite's worker without a framework."""

GIT_S, PIP_S = 120.0, 3600.0
"""Seconds that git and pip may take; a framework has gigabytes."""

LAST_LINES = 5
"""Of a failed command's output in a message."""

PROBE = """
import json, d5suite, d5suite.worker.__main__, d5suite.worker.turns
print(json.dumps({"version": d5suite.__version__, "file": d5suite.__file__}))
"""


@dataclass(frozen=True)
class Side:
    """One side, ready to run.

    Attributes
    ----------
    spec : str
        As the user wrote it.
    python : str or None
        Its interpreter; None for this one.
    environment : mapping of str to str
        Further variables of its workers.
    mode : str or None
        The mode of its backends; None for the chosen one.
    folder : Path or None
        Where its workers run, so that they import their own d5suite; None for the current folder.
    """

    spec: str
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mode: str | None = None
    folder: Path | None = None


@contextlib.contextmanager
def made(spec: str, option: str) -> Iterator[Side]:
    """Make a side; what it needs only for this comparison is removed afterwards.

    Parameters
    ----------
    spec : str
    option : str
        Where it was given, for messages.

    Raises
    ------
    ConfigurationError
        If nobody knows what it means, it cannot be built, or no worker runs there.
    """
    where = f"{option} {spec}"
    form, colon, value = spec.partition(":")
    with contextlib.ExitStack() as held:
        if spec == "here":
            side = Side(spec)
        elif form == "env" and colon:
            side = _variable(spec, value, where)
        elif form == "mode" and colon:
            if not value:
                raise ConfigurationError("it names no mode", where=where, hint="Write mode:NAME.")
            side = Side(spec, mode=value)
        elif form == "rev" and colon:
            side = held.enter_context(_revision(spec, value, where))
        elif form == "install" and colon:
            side = _installed(spec, value, where)
        else:
            side = _interpreter(spec, where)
        if side.folder is not None:  # it may have another d5suite, or none
            _require_worker(side, where)
        yield side


def _variable(spec: str, value: str, where: str) -> Side:
    name, equals, text = value.partition("=")
    if not equals or not name.isidentifier() or "\0" in text:
        raise ConfigurationError("this sets no variable", where=where, hint="Write env:NAME=VALUE.")
    return Side(spec, environment={name: text})


def _interpreter(spec: str, where: str) -> Side:
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
        if not path.exists():
            raise ConfigurationError("this folder is no virtual environment: it has no bin/python", where=where)
    found = shutil.which(path)
    if found is None:
        raise ConfigurationError("this is neither an executable file nor a known form", where=where,
                                 hint=f"Give {FORMS}.")  # fmt: skip
    return Side(spec, python=os.path.abspath(found), folder=Path(tempfile.gettempdir()))  # links choose environments


@contextlib.contextmanager
def _revision(spec: str, revision: str, where: str) -> Iterator[Side]:
    """Write a revision's files into a temporary folder; the repository stays as it is."""
    if not revision or revision.startswith("-"):
        raise ConfigurationError("it names no revision", where=where, hint="Write rev:REVISION, such as rev:HEAD~1.")
    with tempfile.TemporaryDirectory(prefix="d5suite-rev-") as temporary:
        folder = Path(temporary) / "d5suite"
        folder.mkdir()
        top = Path(_output(["git", "rev-parse", "--show-toplevel"], where, GIT_S).strip())
        git = ["git", "-C", str(top)]
        commit = _output([*git, "rev-parse", "--verify", f"{revision}^{{commit}}"], where, GIT_S).strip()
        index = {"GIT_INDEX_FILE": str(Path(temporary) / "index")}
        _output([*git, "read-tree", commit], where, GIT_S, index)
        _output([*git, "checkout-index", "--all", f"--prefix={folder}/"], where, GIT_S, index)
        if not (folder / "d5suite" / "worker" / "__main__.py").exists():
            raise ConfigurationError("this revision holds no d5suite", where=where, hint=f"The repository is {top}.")
        yield Side(spec, environment=_python_path(folder), folder=folder)


def revisions(good: str, bad: str) -> list[str]:
    """Return the commits after one revision up to another one that follows it, the oldest first.

    Of merges only the first parent's line: each of its commits was the main line's state once.

    Raises
    ------
    ConfigurationError
        If there are none: the good revision must be an ancestor of the bad one.
    """
    where = f"{good}..{bad}"
    if any(not each or each.startswith("-") for each in (good, bad)):
        raise ConfigurationError("these are no revisions", where=where)
    for each in (good, bad):
        _output(["git", "rev-parse", "--verify", f"{each}^{{commit}}"], where, GIT_S)
    listed = ["git", "rev-list", "--reverse", "--first-parent", "--ancestry-path", where]
    found = _output(listed, where, GIT_S).split()
    if not found:
        raise ConfigurationError("no revision lies between them", where=where,
                                 hint="The good revision must be an ancestor of the bad one.")  # fmt: skip
    return found


def subject(revision: str) -> str:
    """Return a commit's short name, date and subject.

    Raises
    ------
    ConfigurationError
        If there is no such commit.
    """
    command = ["git", "show", "--no-patch", "--format=%h %cs %s", f"{revision}^{{commit}}"]
    return _output(command, f"revision {revision}", GIT_S).strip()


def _installed(spec: str, requirement: str, where: str) -> Side:
    """Make a virtual environment of this one's packages and the required one; or take it again."""
    if not requirement.strip() or requirement.startswith("-"):
        raise ConfigurationError("it names no requirement", where=where, hint="Write install:NAME==VERSION.")
    below = [path for path in [*site.getsitepackages(), *_user_site()] if Path(path).is_dir()]
    identity = json.dumps([requirement, sys.executable, sys.version, below])
    folder = cache_folder() / f"environment-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    python, whole = folder / "bin" / "python", folder / "d5suite-whole"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock")):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                venv.create(folder, symlinks=True)
                pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
                _output([*pip, "--", requirement], where, PIP_S)
                own = next(folder.glob("lib/python*/site-packages"))
                lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in below)
                (own / "zz_d5suite.pth").write_text(lines)
                whole.touch()
            except OSError as error:
                raise ConfigurationError(f"cannot make the environment: {error.strerror}", where=where) from error
    home = Path(d5suite.__file__).parents[1]
    return Side(spec, python=str(python), environment=_python_path(home), folder=home)


def _user_site() -> Sequence[str]:
    return [site.getusersitepackages()] if site.ENABLE_USER_SITE else []


def _python_path(folder: Path) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


def _require_worker(side: Side, where: str) -> None:
    """Check that the side's interpreter has a d5suite whose workers take turns."""
    command = [side.python or sys.executable, "-c", PROBE]
    said = _output(command, where, START_S, side.environment, side.folder, "no worker of d5suite runs there")
    try:
        found = json.loads(said.splitlines()[-1])
        version = found["version"]
    except (ValueError, LookupError, TypeError):
        raise ConfigurationError("this is no Python interpreter", where=where, hint=f"Give {FORMS}.") from None
    if side.folder is not None and "PYTHONPATH" in side.environment:
        own = side.folder.resolve()
        if own not in Path(found["file"]).resolve().parents:
            raise ConfigurationError(f"its d5suite, {version}, is not the one in {own}", where=where)


def _output(
    command: Sequence[str],
    where: str,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    failed: str = "",
) -> str:
    """Run a command, and return its output.

    Raises
    ------
    ConfigurationError
        If it fails; the last lines of its output say why.
    """
    what = failed or f"{' '.join(command[:4])} failed"
    try:
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, cwd=folder, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{what}: it took longer than {limit_s:g} s", where=where) from None
    except OSError as error:
        raise ConfigurationError(f"{what}: {error.strerror}", where=where) from None
    said = (done.stdout if done.returncode == 0 else done.stderr).decode(errors="replace")
    if done.returncode != 0:
        last = "\n  ".join(said.strip().splitlines()[-LAST_LINES:])
        raise ConfigurationError(what, where=where, hint=last or f"It exited with status {done.returncode}.")
    return said
