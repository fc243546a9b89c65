"""The errors that d5suite raises: what is wrong, where, and what to do next.

May import the standard library only, so that every other module may import it.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path


def escaped(text: str, keep: str = "\n\t") -> str:
    """Return a text for a terminal: control characters are escaped, except for those in ``keep``.

    Names in files from strangers may hold sequences that clear the screen, hide text or set the
    title. Invisible and bidirectional characters are escaped, too.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class D5Error(Exception):
    """Base class of all errors of d5suite.

    Parameters
    ----------
    what : str
        What is wrong, in one sentence.
    where : str, optional
        The file, node, tensor or option with the fault.
    hint : str, optional
        What the user can do next.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what, where, hint)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return escaped(f"{text}\n  {self.hint}" if self.hint else text)


class NetworkError(D5Error):
    """A network is corrupt, invalid or unsafe, or does not fit the request."""


class UnreadNetworkError(NetworkError):
    """A network may be valid ONNX, but d5suite cannot read it."""


class UnsupportedOperatorError(NetworkError):
    """A backend lacks operators of a network; the error lists them all."""


class BackendError(D5Error):
    """A backend is unknown, not installed, or cannot do what is requested."""


class DataError(D5Error):
    """A dataset or one of its files is missing, corrupt or unsafe."""


class JobError(D5Error):
    """A job file or result file is invalid, or a worker process failed."""


class ValidationError(D5Error):
    """An answer disagrees with the reference, so the step must not be timed."""


class ConfigurationError(D5Error):
    """An option, a recipe or a setting is invalid."""


class TraceError(D5Error):
    """A trace cannot be read, written or analysed."""


TRACEBACK_ENTRIES = 6
"""Number of traceback entries, counted from the last, that a message shows."""


def describe_error(error: Exception) -> str:
    """Format an exception for the user; add the traceback if it is not a `D5Error`."""
    if isinstance(error, D5Error):
        return str(error)
    if isinstance(error, MemoryError):
        return escaped(f"out of memory: {error}") + "\n  Ask for less, such as a smaller --batch-size."
    entries = traceback.format_tb(error.__traceback__)[-TRACEBACK_ENTRIES:]
    return escaped("".join([*traceback.format_exception_only(error), *entries]).rstrip())


def calling_file(own: str) -> Path:
    """Return the file of the code that called into the file or folder ``own``, for errors."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith((own, "<string>")) and frame.f_back is not None:
        frame = frame.f_back
    return Path(frame.f_code.co_filename)
