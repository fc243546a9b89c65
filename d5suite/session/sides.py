"""The two sides of a comparison: what a SPEC says, made ready to run workers.

====================== ============================================================================
``here``               this interpreter, as it is
a path                 of an interpreter, or of the folder of a virtual environment
``env:NAME=VALUE``     a variable of the worker's environment
``mode:NAME``          another mode of each backend
``rev:REVISION``       d5suite as it is at a revision of the Git repository of the current folder
``install:REQUIREMENT`` what pip installs on top of this environment, with the versions that it has
====================== ============================================================================

Imports packaging, `d5suite.errors` and `d5suite.files`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import d5suite
from d5suite.errors import ConfigurationError
from d5suite.files import cache_folder, locked

FORMS = "here, an interpreter, a virtual environment, env:NAME=VALUE, mode:NAME, rev:REVISION or install:REQUIREMENT"

START_S = 60.0
"""Seconds that an interpreter may take to import d5suite's worker without a framework."""

GIT_S, PIP_S = 120.0, 3600.0
"""Seconds that git and pip may take; a framework has gigabytes."""

LAST_LINES = 12
"""Last lines of a failed command's output in a message: pip's conflict report needs as many."""

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
    repository : Path or None
        The top of the repository that `folder` is a revision of; None if it is of none.
    """

    spec: str
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mode: str | None = None
    folder: Path | None = None
    repository: Path | None = None


@contextlib.contextmanager
def made(spec: str, option: str) -> Iterator[Side]:
    """Make a side; remove afterwards what only this comparison needs.

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
            side = held.enter_context(_installed(spec, value, where))
        else:
            side = held.enter_context(_interpreter(spec, where))
        if side.folder is not None:  # it may have another d5suite, or none
            _require_worker(side, where)
        yield side


def _variable(spec: str, value: str, where: str) -> Side:
    name, equals, text = value.partition("=")
    if not equals or not name.isidentifier() or "\0" in text:
        raise ConfigurationError("this sets no variable", where=where, hint="Write env:NAME=VALUE.")
    return Side(spec, environment={name: text})


@contextlib.contextmanager
def _interpreter(spec: str, where: str) -> Iterator[Side]:
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
        if not path.exists():
            raise ConfigurationError("not a virtual environment: bin/python is missing", where=where)
    found = shutil.which(path)
    if found is None:
        raise ConfigurationError("this is neither an executable file nor a known form", where=where,
                                 hint=f"Give {FORMS}.")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="d5suite-side-") as folder:  # Python imports from where it runs
        yield Side(spec, python=os.path.abspath(found), folder=Path(folder))  # links choose environments


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
        yield Side(spec, environment=_python_path(folder), folder=folder, repository=top.resolve())


def revisions(good: str, bad: str, repository: Path | None = None) -> list[str]:
    """Return the commits after one revision up to another one that follows it, the oldest first.

    Of merges only the first parent's line: each of its commits was the main line's state once.

    Parameters
    ----------
    good, bad : str
    repository : Path, optional
        Whose revisions; the current folder's by default.

    Raises
    ------
    ConfigurationError
        If there are none: the good revision must be an ancestor of the bad one.
    """
    both = f"{good}..{bad}"
    where = both if repository is None else f"{both} of {repository}"
    if any(not each or each.startswith("-") for each in (good, bad)):
        raise ConfigurationError("not a range of revisions", where=where)
    for each in (good, bad):
        _commit(each, where, repository)
    listed = ["git", "rev-list", "--reverse", "--first-parent", "--ancestry-path", both]
    found = _output(listed, where, GIT_S, folder=repository).split()
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
    command = ["git", "show", "--no-patch", "--format=%h %cs %s", f"{revision}^{{commit}}"]
    return _output(command, f"revision {revision}", GIT_S, folder=repository).strip()


def installed_from(repository: Path, revision: str) -> str:
    """Return the SPEC of what pip installs from a revision of a repository on this machine.

    Parameters
    ----------
    repository : Path
        Its top, or a folder in it that holds the package.
    revision : str

    Raises
    ------
    ConfigurationError
        If there is no such revision.
    """
    where = f"{repository}@{revision}"
    commit = _commit(revision, where, repository)
    top = Path(_output(["git", "rev-parse", "--show-toplevel"], where, GIT_S, folder=repository).strip())
    inside = repository.resolve().relative_to(top.resolve()).as_posix()
    return f"install:git+{top.as_uri()}@{commit}" + ("" if inside == "." else f"#subdirectory={inside}")


def _commit(revision: str, where: str, repository: Path | None = None) -> str:
    command = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]
    return _output(command, where, GIT_S, folder=repository).strip()


@contextlib.contextmanager
def _installed(spec: str, requirement: str, where: str) -> Iterator[Side]:
    """Make, or reuse, a virtual environment of this one's packages and the required one."""
    if not requirement.strip() or requirement.startswith("-"):
        raise ConfigurationError("it names no requirement", where=where, hint="Write install:NAME==VERSION.")
    below = [path for path in [*site.getsitepackages(), *_user_site()] if Path(path).is_dir()]
    versions = sorted(f"{name}=={each.version}" for name, each in _distributions().items())
    with contextlib.ExitStack() as held:
        try:
            requirement, content = _identified(requirement, where)
            identity = json.dumps([requirement, content, sys.executable, sys.version, below, versions])
            cache_folder().mkdir(parents=True, exist_ok=True)
            if content is None:
                temporary = tempfile.TemporaryDirectory(prefix="environment-", dir=cache_folder())
                folder = Path(held.enter_context(temporary))
                _install(folder, requirement, below, where)
            else:
                folder = cache_folder() / f"environment-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
                whole = folder / "d5suite-whole"
                with locked(folder.with_name(f".{folder.name}.lock")):
                    if not whole.exists():
                        shutil.rmtree(folder, ignore_errors=True)
                        _install(folder, requirement, below, where)
                        whole.touch()
        except OSError as error:
            raise ConfigurationError(f"cannot make the environment: {error.strerror}", where=where) from error
        home = Path(d5suite.__file__).parents[1]
        yield Side(spec, python=str(folder / "bin" / "python"), environment=_python_path(home), folder=home)


def _identified(requirement: str, where: str) -> tuple[str, str | None]:
    """Return what pip installs, and the identifier of its content, None if unknown."""
    found = re.fullmatch(r"(?P<name>[\w.-]+\s*(\[[^\]]*\])?\s*@\s*)?(?P<link>.*)", requirement.strip(), re.DOTALL)
    assert found is not None
    name, link = found["name"] or "", found["link"]
    if link.startswith("git+"):
        exact = _at_commit(link, where)
        return (requirement, None) if exact is None else (name + exact, "")
    if link.startswith("file:"):
        path = Path(url2pathname(urlsplit(link).path))
    elif "://" in link:
        return requirement, "" if re.search(r"#(.*&)?sha(256|384|512)=", link) else None
    else:
        path = Path(re.sub(r"\[[^\]]*\]$", "", link))
    if path.is_file():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        return requirement, digest.hexdigest()
    return requirement, None if os.sep in link or link.startswith(".") else ""


def _at_commit(link: str, where: str) -> str | None:
    """Return a pip link pinned to its current commit; None if that is unknown."""
    address, sharp, fragment = link.partition("#")
    parts = urlsplit(address.removeprefix("git+"))
    path, at, revision = parts.path.rpartition("@")
    if not at:
        path, revision = parts.path, "HEAD"
    if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", revision):
        return link
    url = urlunsplit(parts._replace(path=path))
    names = [f"refs/heads/{revision}", f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}"]  # pip's order
    if revision == "HEAD" or revision.startswith("refs/"):
        names = [revision]
    try:
        said = _output(["git", "ls-remote", "--", url, *names], where, GIT_S, {"GIT_TERMINAL_PROMPT": "0"})
    except ConfigurationError:  # pip will say why
        return None
    commits = {name: commit for commit, _, name in (line.partition("\t") for line in said.splitlines())}
    commit = next((commits[name] for name in names if name in commits), None)
    return None if commit is None else f"git+{url}@{commit}{sharp}{fragment}"


def _install(folder: Path, requirement: str, below: Sequence[str], where: str) -> None:
    """Make a virtual environment whose packages lie over those of this one, and install one."""
    venv.create(folder, symlinks=True)
    own = next(folder.glob("lib/python*/site-packages"))
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in below)
    (own / "zz_d5suite.pth").write_text(lines)  # before pip runs, which then adds only what is lacking
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    pip.append("--disable-pip-version-check")
    _output([*pip, "--no-deps", "--force-reinstall", "--", requirement], where, PIP_S)
    named = next(iter(importlib.metadata.distributions(path=[str(own)])), None)
    if named is None:
        raise ConfigurationError("pip installs nothing for this requirement", where=where)
    if not named.requires:
        return
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{each}\n" for each in _pins(named.metadata["Name"])))
    extras = re.match(r"[^\[:;]*(\[[^\]]*\])", requirement)
    whole = f"{named.metadata['Name']}{extras[1] if extras else ''}=={named.version}"
    _output([*pip, "--constraint", str(pins), "--", whole], where, PIP_S)


def _pins(name: str) -> Iterator[str]:
    """Return this environment's versions, without the replaced package and what only it needs.

    A framework pins companions of its own, such as jaxlib, which then follow it. What d5suite
    needs itself, such as NumPy, stays as it is.
    """
    here = _distributions()
    free = {canonicalize_name(name)} | _needed(name, here) - _needed("d5suite", here)
    for each, found in here.items():
        if each not in free and _parsed(pin := f"{each}=={found.version}"):
            yield pin


def _needed(name: str, here: Mapping[str, importlib.metadata.Distribution]) -> set[str]:
    """Return a distribution and all its installed requirements."""
    found: set[str] = set()
    left: list[str] = [canonicalize_name(name)]
    while left:
        if (each := left.pop()) in here and each not in found:
            found.add(each)
            required = filter(None, map(_parsed, here[each].requires or ()))
            left += [
                canonicalize_name(one.name) for one in required if not one.marker or one.marker.evaluate({"extra": ""})
            ]
    return found


def _parsed(requirement: str) -> Requirement | None:
    try:
        return Requirement(requirement)
    except InvalidRequirement:
        return None


def _distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return this environment's distributions by name; of several, the first is imported."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for each in importlib.metadata.distributions():
        if name := each.metadata["Name"]:
            found.setdefault(canonicalize_name(name), each)
    return found


def _user_site() -> Sequence[str]:
    return [site.getusersitepackages()] if site.ENABLE_USER_SITE else []


def _python_path(folder: Path) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


def output_of(side: Side, code: str, arguments: Sequence[str], where: str, failed: str) -> str:
    """Run Python code on a side, in the current folder but without importing from it.

    Parameters
    ----------
    side : Side
    code : str
    arguments : sequence of str
    where, failed : str
        For messages: what it concerns, and what its failure means.

    Raises
    ------
    ConfigurationError
        If it fails; the last lines of its output say why.
    """
    code = f"import sys; sys.path[:] = filter(None, sys.path)\n{code}"
    command = [side.python or sys.executable, "-c", code, *arguments]
    return _output(command, where, START_S, side.environment, failed=failed)


def _require_worker(side: Side, where: str) -> None:
    """Check that the side's interpreter has a d5suite whose workers take turns."""
    command = [side.python or sys.executable, "-c", PROBE]
    said = _output(command, where, START_S, side.environment, side.folder, "no worker of d5suite runs there")
    try:
        found = json.loads(said.splitlines()[-1])
        version = found["version"]
    except (ValueError, LookupError, TypeError):
        raise ConfigurationError("not a Python interpreter", where=where, hint=f"Give {FORMS}.") from None
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
    said = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).decode(errors="replace")
    if done.returncode != 0:
        last = "\n  ".join([line for line in said.splitlines() if line.strip()][-LAST_LINES:])
        raise ConfigurationError(what, where=where, hint=last or f"It exited with status {done.returncode}.")
    return said
