"""oneDNN's verbose output: which implementation ran, on which layouts, for how long.

Where a framework computes with oneDNN, ``ONEDNN_VERBOSE=profile_exec`` (up to version 2.4
``DNNL_VERBOSE=1``) or the framework's own switch makes it write one line per primitive to standard
output: https://uxlfoundation.github.io/oneDNN/dev_guide_verbose.html. Adapters that join these
lines to nodes write a mark (`mark`) before and after each.

Imports `d5suite.levels.profile`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from d5suite.levels.profile import Kernel

_MARK = "d5suite mark"

_LINE = re.compile(r"^(?:one)?dnn(?:l)?_verbose,(?:v\d+,)?(?:[\d.]+,)?(?:primitive,)?(?:[\d.]+,)?exec,", re.MULTILINE)
"""A line's beginning, with or without a version, a time stamp and the word ``primitive``."""

_NOTHING = ("undef", "any", "")


def mark(owner: str) -> None:
    """Write a line that says to what the following kernels belong; nothing if ``owner`` is empty.

    Parameters
    ----------
    owner : str
        Any text without line breaks.
    """
    os.write(1, f"{_MARK} {owner}\n".encode())


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """Send standard output, that of C libraries too, to a file."""
    sys.stdout.flush()
    own = os.dup(1)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.dup2(target, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)
        os.close(target)


def kernel_of(line: str) -> Kernel | None:
    """Return the kernel that a line of verbose output tells of; None for any other line."""
    begin = _LINE.match(line)
    if begin is None:
        return None
    fields = line[begin.end() :].strip().split(",")
    if len(fields) < 6:
        return None
    _, primitive, implementation, _, layouts, *_, took = fields
    try:
        seconds = float(took) / 1e3
    except ValueError:
        return None
    return Kernel(primitive, implementation, _layouts(layouts), seconds, reorder=primitive == "reorder")


def _layouts(text: str) -> str:
    """Return ``src:abcd`` from ``src_f32::blocked:abcd:f0``, for each tensor."""
    found = []
    for each in text.split():
        tensor, *parts = re.split("[:_]", each)
        tag = next((tag for kind, tag in itertools.pairwise(parts) if kind == "blocked"), "")
        if tag not in _NOTHING:
            found.append(f"{tensor}:{tag}")
    return " ".join(found)


def kernels_by_owner(lines: Iterable[str]) -> dict[str, tuple[Kernel, ...]]:
    """Return the kernels by what the marks before them say, equal ones together.

    Parameters
    ----------
    lines : iterable of str
        What was captured of one step. Kernels that belong to nothing are under ``""``.
    """
    found: dict[str, dict[tuple[str, str, str], Kernel]] = {}
    owner = ""
    for line in lines:
        if line.startswith(_MARK):
            owner = line.removeprefix(_MARK).strip()
            continue
        one = kernel_of(line)
        if one is None:
            continue
        equal = found.setdefault(owner, {})
        key = one.primitive, one.implementation, one.layouts
        before = equal.get(key)
        if before is not None:
            one = Kernel(*key, before.seconds + one.seconds, before.calls + 1, one.reorder)
        equal[key] = one
    return {owner: tuple(equal.values()) for owner, equal in found.items()}
