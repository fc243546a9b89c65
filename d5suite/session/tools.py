"""Running git, pip and interpreters; revisions of a Git repository."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from d5suite.errors import ConfigurationError

LAST_LINES = 12
"""Last lines of a failed command's output that a message shows: enough for pip's conflicts."""

GIT_S = 120.0
"""Time limit of git in seconds."""

REPOSITORY_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE", "GIT_INTERNAL_SUPER_PREFIX", "GIT_NO_REPLACE_OBJECTS", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX",
    "GIT_REPLACE_REF_BASE", "GIT_SHALLOW_FILE", "GIT_WORK_TREE",
)  # fmt: skip
"""Variables that name a repository: ``git rev-parse --local-env-vars``, without configuration."""


def run_tool(
    command: Sequence[str],
    where: str,
    limit_s: float,
    environment: Mapping[str, str | None] | None = None,
    folder: Path | None = None,
    failed: str = "",
) -> str:
    """Run a command, and return its output.

    Parameters
    ----------
    command : sequence of str
    where : str
        What the command concerns, for messages.
    limit_s : float
        Time limit in seconds.
    environment : mapping of str to str or None, optional
        Additional environment variables; None removes a variable.
    folder : Path, optional
        Working directory.
    failed : str, optional
        What a failure means, for messages.

    Raises
    ------
    ConfigurationError
        If the command fails; the last lines of the output say why.
    """
    what = failed or f"{' '.join(command[:4])} failed"
    whole = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, env={name: value for name, value in whole.items() if value is not None}, cwd=folder,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{what}: it took longer than {limit_s:g} s", where=where) from None
    except OSError as error:
        raise ConfigurationError(f"{what}: {error.strerror}", where=where) from None
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
    last = "\n  ".join([line for line in lines if line.strip()][-LAST_LINES:])
    raise ConfigurationError(what, where=where, hint=last or f"It exited with status {done.returncode}.")


def git(where: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run git in a folder, by default the current one, and return its stripped output.

    Git does not see the variables with which a Git hook names its own repository.

    Raises
    ------
    ConfigurationError
        See `run_tool`.
    """
    own: dict[str, str | None] = {**dict.fromkeys(REPOSITORY_VARIABLES), **(environment or {})}
    return run_tool(["git", *arguments], where, GIT_S, own, folder).strip()


def commit_of(revision: str, where: str, folder: Path | None = None) -> str:
    """Return the identifier of a revision's commit."""
    return git(where, "rev-parse", "--verify", f"{revision}^{{commit}}", folder=folder)


def top_of(where: str, folder: Path | None = None) -> Path:
    """Return the top folder of a repository."""
    return Path(git(where, "rev-parse", "--show-toplevel", folder=folder))


def revisions(good: str, bad: str, repository: Path | None = None) -> list[str]:
    """Return the commits after `good`, up to `bad`, the oldest first.

    At merges, only the first parent counts: all returned commits were once the state of the main
    branch.

    Parameters
    ----------
    good, bad : str
    repository : Path, optional
        By default the repository of the current folder.

    Raises
    ------
    ConfigurationError
        If there are no commits: the good revision must be an ancestor of the bad revision.
    """
    both = f"{good}..{bad}"
    where = both if repository is None else f"{both} of {repository}"
    if any(not each or each.startswith("-") for each in (good, bad)):
        raise ConfigurationError("not a range of revisions", where=where)
    for each in (good, bad):
        commit_of(each, where, repository)
    listed = git(where, "rev-list", "--reverse", "--first-parent", "--ancestry-path", both, folder=repository)
    found = listed.split()
    if not found:
        raise ConfigurationError("no revision lies between them", where=where,
                                 hint="The good revision must be an ancestor of the bad one.")  # fmt: skip
    return found


def subject(revision: str, repository: Path | None = None) -> str:
    """Return a commit's short name, date and subject.

    Raises
    ------
    ConfigurationError
        If there is no such commit.
    """
    commit = f"{revision}^{{commit}}"
    return git(f"revision {revision}", "show", "--no-patch", "--format=%h %cs %s", commit, folder=repository)


def installed_from(repository: Path, revision: str) -> str:
    """Return the SPEC of a side on which pip installs a revision of a local repository.

    Parameters
    ----------
    repository : Path
        The top folder of the repository, or the package's folder inside the repository.
    revision : str

    Raises
    ------
    ConfigurationError
        If there is no such revision.
    """
    where = f"{repository}@{revision}"
    commit, top = commit_of(revision, where, repository), top_of(where, repository)
    inside = repository.resolve().relative_to(top.resolve()).as_posix()
    return f"install:git+{top.as_uri()}@{commit}" + ("" if inside == "." else f"#subdirectory={inside}")
