"""The sides of a comparison: a SPEC describes each side.

====================== ============================================================================
``here``               the current interpreter, as it is
a path                 an interpreter, or the folder of a virtual environment
``env:NAME=VALUE``     a variable in the worker's environment
``mode:NAME``          the mode NAME of the backends
``rev:REVISION``       d5suite as it is at a revision of the Git repository of the current folder
``install:REQUIREMENT`` the current environment, with a requirement that pip installs on top
====================== ============================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import d5suite
from d5suite.errors import ConfigurationError
from d5suite.session.environments import environment_with
from d5suite.session.tools import commit_of, git, run_tool, top_of

FORMS = "here, an interpreter, a virtual environment, env:NAME=VALUE, mode:NAME, rev:REVISION or install:REQUIREMENT"

START_S = 60.0
"""Seconds that an interpreter may take to import d5suite's worker, without a framework."""

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
        The SPEC, as the user wrote it.
    python : str or None
        Interpreter; None for the current interpreter.
    environment : mapping of str to str
        Additional environment variables of the workers.
    mode : str or None
        Mode of the backends; None for the chosen mode.
    folder : Path or None
        Working directory of the workers, from which they import their own d5suite; None for the
        current directory.
    repository : Path or None
        The top folder of the repository, if `folder` holds one of its revisions.
    """

    spec: str
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mode: str | None = None
    folder: Path | None = None
    repository: Path | None = None


@contextlib.contextmanager
def prepared_side(spec: str, option: str) -> Iterator[Side]:
    """Prepare a side; afterwards remove its temporary files.

    Parameters
    ----------
    spec : str
    option : str
        The option that gave the SPEC, for messages.

    Raises
    ------
    ConfigurationError
        If the SPEC has no known form, the side cannot be prepared, or no worker runs there.
    """
    where = f"{option} {spec}"
    form, colon, value = spec.partition(":")
    with contextlib.ExitStack() as held:
        if spec == "here":
            side = Side(spec)
        elif form == "env" and colon:
            name, equals, text = value.partition("=")
            if not equals or not name.isidentifier() or "\0" in text:
                raise ConfigurationError("this sets no variable", where=where, hint="Write env:NAME=VALUE.")
            side = Side(spec, environment={name: text})
        elif form == "mode" and colon:
            if not value:
                raise ConfigurationError("it names no mode", where=where, hint="Write mode:NAME.")
            side = Side(spec, mode=value)
        elif form == "rev" and colon:
            side = _revision(spec, value, where, held)
        elif form == "install" and colon:
            python = environment_with(value, where, held) / "bin" / "python"
            home = Path(d5suite.__file__).parents[1]
            side = Side(spec, str(python), _python_path(home), folder=home)
        else:
            side = _interpreter(spec, where, held)
        if side.folder is not None:  # it may have another d5suite, or none
            _require_worker(side, where)
        yield side


def _interpreter(spec: str, where: str, held: contextlib.ExitStack) -> Side:
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
        if not path.exists():
            raise ConfigurationError("not a virtual environment: bin/python is missing", where=where)
    found = shutil.which(path)
    if found is None:
        raise ConfigurationError("this is neither an executable file nor a known form", where=where,
                                 hint=f"Give {FORMS}.")  # fmt: skip
    folder = held.enter_context(tempfile.TemporaryDirectory(prefix="d5suite-side-"))  # Python imports from its folder
    return Side(spec, os.path.abspath(found), folder=Path(folder))  # not resolved: links choose environments


def _revision(spec: str, revision: str, where: str, held: contextlib.ExitStack) -> Side:
    """Write a revision's files into a temporary folder; the repository does not change."""
    if not revision or revision.startswith("-"):
        raise ConfigurationError("it names no revision", where=where, hint="Write rev:REVISION, such as rev:HEAD~1.")
    temporary = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="d5suite-rev-")))
    folder = temporary / "d5suite"
    folder.mkdir()
    top = top_of(where)
    commit = commit_of(revision, where, top)
    index = {"GIT_INDEX_FILE": str(temporary / "index")}
    git(where, "read-tree", commit, folder=top, environment=index)
    git(where, "checkout-index", "--all", f"--prefix={folder}/", folder=top, environment=index)
    if not (folder / "d5suite" / "worker" / "__main__.py").exists():
        raise ConfigurationError("this revision holds no d5suite", where=where, hint=f"The repository is {top}.")
    return Side(spec, environment=_python_path(folder), folder=folder, repository=top.resolve())


def _python_path(folder: Path) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


def run_code(side: Side, code: str, arguments: Sequence[str], where: str, failed: str) -> str:
    """Run Python code on a side, in the current folder but without importing from it.

    Parameters
    ----------
    side : Side
    code : str
    arguments : sequence of str
    where, failed : str
        For messages: what the code concerns, and what a failure means.

    Raises
    ------
    ConfigurationError
        If the code fails; the last lines of the output say why.
    """
    code = f"import sys; sys.path[:] = filter(None, sys.path)\n{code}"
    command = [side.python or sys.executable, "-c", code, *arguments]
    return run_tool(command, where, START_S, side.environment, failed=failed)


def _require_worker(side: Side, where: str) -> None:
    """Check that the side's interpreter has a d5suite whose workers take turns."""
    command = [side.python or sys.executable, "-c", PROBE]
    said = run_tool(command, where, START_S, side.environment, side.folder, "no worker of d5suite runs there")
    try:
        found = json.loads(said.splitlines()[-1])
        version = found["version"]
    except (ValueError, LookupError, TypeError):
        raise ConfigurationError("not a Python interpreter", where=where, hint=f"Give {FORMS}.") from None
    if side.folder is not None and "PYTHONPATH" in side.environment:
        own = side.folder.resolve()
        if own not in Path(found["file"]).resolve().parents:
            raise ConfigurationError(f"its d5suite, {version}, is not the one in {own}", where=where)
