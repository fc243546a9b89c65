"""Virtual environments that replace the version of one package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import site
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from d5suite.errors import ConfigurationError
from d5suite.files import cache_folder, locked
from d5suite.session.tools import git, run_tool

PIP_S = 3600.0
"""Time limit of pip in seconds; a framework is a download of gigabytes."""


def environment_with(requirement: str, where: str, held: contextlib.ExitStack) -> Path:
    """Return a virtual environment with the current packages and a required package.

    The environment is made once and kept in the cache. If the requirement's content cannot be
    identified, the environment is temporary, and removed when `held` is closed.

    Parameters
    ----------
    requirement : str
        A requirement in pip's syntax.
    where : str
        Option that gave the requirement, for messages.
    held : ExitStack

    Raises
    ------
    ConfigurationError
        If the environment cannot be made.
    """
    if not requirement.strip() or requirement.startswith("-"):
        raise ConfigurationError("it names no requirement", where=where, hint="Write install:NAME==VERSION.")
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    below = [path for path in [*site.getsitepackages(), *user] if Path(path).is_dir()]
    versions = sorted(f"{name}=={each.version}" for name, each in _distributions().items())
    try:
        requirement, content = _identified(requirement, where)
        identity = json.dumps([requirement, content, sys.executable, sys.version, below, versions])
        cache_folder().mkdir(parents=True, exist_ok=True)
        if content is None:
            temporary = tempfile.TemporaryDirectory(prefix="environment-", dir=cache_folder())
            folder = Path(held.enter_context(temporary))
            _install(folder, requirement, below, where)
            return folder
        folder = cache_folder() / f"environment-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        whole = folder / "d5suite-whole"
        with locked(folder.with_name(f".{folder.name}.lock")):
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                _install(folder, requirement, below, where)
                whole.touch()
        return folder
    except OSError as error:
        raise ConfigurationError(f"cannot make the environment: {error.strerror}", where=where) from error


def _identified(requirement: str, where: str) -> tuple[str, str | None]:
    """Return the requirement for pip, and an identifier of its content, None if unknown."""
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
    """Return a pip link pinned to the current commit; None if the commit is unknown."""
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
        said = git(where, "ls-remote", "--", url, *names, environment={"GIT_TERMINAL_PROMPT": "0"})
    except ConfigurationError:  # pip will say why
        return None
    commits = {name: commit for commit, _, name in (line.partition("\t") for line in said.splitlines())}
    commit = next((commits[name] for name in names if name in commits), None)
    return None if commit is None else f"git+{url}@{commit}{sharp}{fragment}"


def _install(folder: Path, requirement: str, below: Sequence[str], where: str) -> None:
    """Make a virtual environment on top of the current packages, and install a package there."""
    venv.create(folder, symlinks=True)
    own = next(folder.glob("lib/python*/site-packages"))
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in below)
    (own / "zz_d5suite.pth").write_text(lines)  # before pip runs, so that it adds only what is missing
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    pip.append("--disable-pip-version-check")
    run_tool([*pip, "--no-deps", "--force-reinstall", "--", requirement], where, PIP_S)
    named = next(iter(importlib.metadata.distributions(path=[str(own)])), None)
    if named is None:
        raise ConfigurationError("pip installs nothing for this requirement", where=where)
    if not named.requires:
        return
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{each}\n" for each in _pins(named.metadata["Name"])))
    extras = re.match(r"[^\[:;]*(\[[^\]]*\])", requirement)
    whole = f"{named.metadata['Name']}{extras[1] if extras else ''}=={named.version}"
    run_tool([*pip, "--constraint", str(pins), "--", whole], where, PIP_S)


def _pins(name: str) -> Iterator[str]:
    """Yield pins to the current versions, except for the replaced package and its dependencies.

    So companion packages that a framework pins follow the framework. Dependencies of d5suite, such
    as NumPy, stay pinned.
    """
    here = _distributions()
    free = {canonicalize_name(name)} | _needed(name, here) - _needed("d5suite", here)
    for each, found in here.items():
        if each not in free and _parsed(pin := f"{each}=={found.version}"):
            yield pin


def _needed(name: str, here: Mapping[str, importlib.metadata.Distribution]) -> set[str]:
    """Return the names of a distribution and of all its installed requirements."""
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
    """Return the distributions by name; of two with one name, the one that Python imports."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for each in importlib.metadata.distributions():
        if name := each.metadata["Name"]:
            found.setdefault(canonicalize_name(name), each)
    return found
