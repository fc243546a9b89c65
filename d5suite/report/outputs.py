"""Output paths, checked before anything is written, so that no input is lost.

Imports the standard library and, from d5suite, `errors` and `files`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from d5suite.errors import ConfigurationError, JobError
from d5suite.files import check_writable, is_special, read_json

STANDARD_OUTPUT = Path("-")


def check_outputs(
    files: Mapping[str, Path | None],
    inputs: Iterable[Path],
    folders: Mapping[str, tuple[Path | None, str]] | None = None,
) -> None:
    """Check that no output overwrites an input or another output.

    Parameters
    ----------
    files : mapping
        Files to write by option.
    inputs : iterable of Path
        Files to read; the series of a result file count as part of it.
    folders : mapping, optional
        Folders to write into by option, each with the suffix of the files.

    Raises
    ------
    ConfigurationError
        If two outputs are the same file, or an output is an input or cannot be written.
    """
    given = {option: path for option, path in files.items() if path is not None}
    for (one, first), (other, second) in itertools.combinations(given.items(), 2):
        if _same(first, second) and not is_special(first):
            raise ConfigurationError(f"{one} and {other} name one file", where=str(second), hint="Name two files.")
    read = [each for path in inputs for each in (path, *_series_of(path))]
    targets = [(option, path) for option, path in given.items() if path != STANDARD_OUTPUT]
    for option, (folder, suffix) in (folders or {}).items():
        targets += [(option, path) for path in (folder.glob(f"*{suffix}") if folder is not None else ())]
    for option, path in targets:
        for source in read:
            if _same(path, source) and not is_special(path):
                raise ConfigurationError(
                    f"{option} would replace {source}, which is read", where=str(path), hint="Name another place."
                )
    for option, path in given.items():
        if path != STANDARD_OUTPUT:
            require_writable(path, option)


def require_writable(path: Path, option: str) -> None:
    """Raise `ConfigurationError` if the file that an option names cannot be written."""
    hint = "Choose a file in a folder that exists and may be written to."
    with refused(f"{option} cannot be written here", path, hint):
        check_writable(path)


@contextlib.contextmanager
def refused(what: str, where: Path, hint: str | None = None) -> Iterator[None]:
    """Turn an `OSError` from in here into a `ConfigurationError` that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{what}: {error.strerror or error}", where=str(where), hint=hint) from None


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _series_of(path: Path) -> Iterator[Path]:
    """Return the series files of a result file: the one it names, and the usual one."""
    beside = Path(os.path.realpath(path))
    yield beside.with_name(beside.name.removesuffix(".json") + ".h5")
    try:
        content = read_json(path, any_number=True)
    except JobError:  # reported by whoever reads the file
        return
    facts = content.get("d5suite") if isinstance(content, dict) else None
    name = facts.get("series") if isinstance(facts, dict) else None
    if isinstance(name, str) and Path(name).name and "\0" not in name:
        yield beside.with_name(Path(name).name)
