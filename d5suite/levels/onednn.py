"""oneDNN's verbose output: which implementation ran, on which layouts, for how long.

Where a framework computes with oneDNN, ``ONEDNN_VERBOSE=profile_exec`` (up to version 2.4
``DNNL_VERBOSE=1``) or the framework's own switch makes it write one line per primitive to standard
output: https://uxlfoundation.github.io/oneDNN/dev_guide_verbose.html. Adapters join these lines to
nodes by marks between them (`mark`) or by the time at which they ran (`kernels_by_time`). oneDNN
reads the variables only once, so a framework without a switch repeats the step in a process of its
own (`repeated`).

Imports `d5suite.errors`, and `attribution` and `profile` of its own folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.errors import BackendError
from d5suite.levels.attribution import Interval, Owner
from d5suite.levels.profile import Kernel, Kernels
from d5suite.network import Network

_MARK = "d5suite mark"

_BEGIN = "d5suite step"

_LINE = re.compile(
    r"^(?:one)?dnn(?:l)?_verbose,(?:v\d+,)?(?P<early>[\d.]+,)?(?:primitive,)?(?P<late>[\d.]+,)?exec,", re.MULTILINE
)
"""A line's beginning, with or without a version, a time stamp and the word ``primitive``."""

_NOTHING = ("undef", "any", "")

_VERBOSE = {
    "ONEDNN_VERBOSE": "profile_exec", "ONEDNN_VERBOSE_TIMESTAMP": "1",
    "DNNL_VERBOSE": "1", "DNNL_VERBOSE_TIMESTAMP": "1",
}  # fmt: skip
"""Variables that make any version of oneDNN write its lines."""

PATIENCE_S = 600.0
"""Timeout in seconds of a step that is repeated in a process of its own."""


def mark(owner: str) -> None:
    """Write a line that names the owner of the kernels beside it.

    Parameters
    ----------
    owner : str
        Any text without line breaks; empty if the kernels belong to nothing.
    """
    os.write(1, f"{_MARK} {owner}\n".encode())


def step_begins() -> None:
    """Write a line that marks a step's start; `Repeated.lines` returns what follows the last."""
    os.write(1, f"{_BEGIN}\n".encode())


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """Redirect standard output, including that of C libraries, to a file."""
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
    """Return the kernel that a line of verbose output describes; None for any other line."""
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


def kernels_by_owner(lines: Iterable[str], *, marks_follow: bool = False) -> dict[str, tuple[Kernel, ...]]:
    """Return the kernels by the owner that the marks beside them name; equal kernels are joined.

    Parameters
    ----------
    lines : iterable of str
        The captured output of one step. Kernels that belong to nothing are under ``""``.
    marks_follow : bool
        Whether a mark follows the kernels that it marks, instead of preceding them.
    """
    pairs: list[tuple[str, Kernel]] = []
    owner, marked = "", 0
    for line in lines:
        if line.startswith(_MARK):
            owner = line.removeprefix(_MARK).strip()
            if marks_follow:
                pairs[marked:] = [(owner, kernel) for _, kernel in pairs[marked:]]
                owner, marked = "", len(pairs)
        elif (kernel := kernel_of(line)) is not None:
            pairs.append((owner, kernel))
    return _together(pairs)


def kernels_by_time(lines: Iterable[str], intervals: Sequence[Interval]) -> dict[str, tuple[Kernel, ...]]:
    """Return the kernels by the interval in which they ran; equal kernels are joined.

    Parameters
    ----------
    lines : iterable of str
        Verbose output with time stamps.
    intervals : sequence of Interval
        In nanoseconds since 1970, as time stamps are in milliseconds. A kernel belongs to the
        interval that contains its midpoint; if there is none, or several with different
        `Interval.what`, it is under ``""``.
    """
    pairs = []
    for line in lines:
        if (kernel := kernel_of(line)) is not None:
            middle = _started_ns(line) + kernel.seconds * 1e9 / 2
            found = {each.what for each in intervals if each.start <= middle <= each.end}
            pairs.append((found.pop() if len(found) == 1 else "", kernel))
    return _together(pairs)


def _started_ns(line: str) -> float:
    """Return when a line's primitive began, in nanoseconds since 1970; 0 if not stated."""
    begin = _LINE.match(line)
    stamp = (begin["early"] or begin["late"]) if begin else None
    return float(stamp.rstrip(",")) * 1e6 if stamp else 0.0


def _together(pairs: Iterable[tuple[str, Kernel]]) -> dict[str, tuple[Kernel, ...]]:
    """Join equal kernels of each owner."""
    found: dict[str, dict[tuple[str, str, str], Kernel]] = {}
    for owner, one in pairs:
        equal = found.setdefault(owner, {})
        key = one.primitive, one.implementation, one.layouts
        before = equal.get(key)
        if before is not None:
            one = Kernel(*key, before.seconds + one.seconds, before.calls + one.calls, one.reorder)
        equal[key] = one
    return {owner: tuple(equal.values()) for owner, equal in found.items()}


def kernels_of(
    network: Network, found: Mapping[str, Sequence[Kernel]], owners: Mapping[str, Owner], notes: Sequence[str] = ()
) -> Kernels:
    """Assign kernels to nodes, given the owner of each text.

    Parameters
    ----------
    network : Network
    found : mapping of str to sequence of Kernel
        From `kernels_by_owner` or `kernels_by_time`.
    owners : mapping of str to Owner
        By text. Kernels of a text without an owner, or whose owner has no nodes, are listed apart.
    notes : sequence of str
    """
    of: dict[tuple[tuple[str, ...], str], list[Kernel]] = {}
    apart: list[Kernel] = []
    for text, kernels in found.items():
        nodes, backward, _ = owners.get(text, Owner())
        if nodes:
            key = tuple(network.nodes[index].name for index in nodes), "backward" if backward else "forward"
            of.setdefault(key, []).extend(kernels)
        else:
            apart += kernels
    joined = {key: _together(("", kernel) for kernel in kernels)[""] for key, kernels in of.items()}
    return Kernels(joined, _together(("", kernel) for kernel in apart).get("", ()), tuple(notes))


class Repeated(NamedTuple):
    """A step to repeat in a process of its own.

    Attributes
    ----------
    network : Network
    mode, precision : str
        The executor's mode and precision.
    threads : int
    backward : bool
        Whether to call ``forward_backward`` instead of ``forward``.
    arrays : dict of str to numpy.ndarray
        The inputs of the step.
    """

    network: Network
    mode: str
    precision: str
    threads: int
    backward: bool
    arrays: dict[str, Any]

    @classmethod
    def given(cls) -> Repeated:
        """Return the work that the parent process gave this process."""
        found = pickle.load(sys.stdin.buffer)  # noqa: S301  the process that started this one wrote it
        assert isinstance(found, cls)
        return found

    def lines(self, module: str, folder: Path) -> list[str]:
        """Run a module in a process whose oneDNN logs its kernels; return its last step's lines.

        Parameters
        ----------
        module : str
            The module to run. It calls `given`, and gets ``folder`` as its argument.
        folder : Path

        Raises
        ------
        BackendError
            If the process fails.
        """
        told = folder / "onednn.txt"
        try:
            with told.open("wb") as output:
                subprocess.run(
                    [sys.executable, "-m", module, str(folder)],
                    input=pickle.dumps(self), stdout=output, stderr=subprocess.PIPE, env=os.environ | _VERBOSE,
                    timeout=PATIENCE_S, check=True,
                )  # fmt: skip
        except (OSError, subprocess.SubprocessError, pickle.PicklingError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
            raise BackendError(f"oneDNN's kernels are not known: {said[-1] if said else error}") from error
        return told.read_text(encoding="utf-8", errors="replace").rpartition(_BEGIN)[2].splitlines()
