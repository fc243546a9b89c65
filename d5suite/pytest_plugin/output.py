"""Output whose terminal or pipe is gone is discarded, so that a run ends and saves as usual."""

from __future__ import annotations

import contextlib
import os
import select

STANDARD = (1, 2)
"""Descriptors of standard output and standard error."""


def _file(descriptor: int) -> tuple[int, int, int] | None:
    """Return numbers that identify an open file; None if the descriptor is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_rdev


_OUTPUTS = frozenset(map(_file, STANDARD)) - {None}
"""The process's outputs, before pytest captures them."""


def discard_dead_output() -> None:
    """Replace outputs that nobody reads any more by ``/dev/null``.

    Writing to a terminal that was closed fails with EIO, and to a pipe that was closed with EPIPE.
    pytest keeps copies of the descriptors while it captures, so every descriptor is checked.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        if _file(descriptor) in _OUTPUTS and _is_dead(descriptor):
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                os.dup2(null, descriptor, inheritable=descriptor <= max(STANDARD))
            os.close(null)


def _is_dead(descriptor: int) -> bool:
    """Return whether a terminal or a pipe has no other end any more (poll(2))."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))
