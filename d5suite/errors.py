"""The errors d5suite raises, each saying what is wrong, where, and what to do next.

Imports nothing beyond the standard library, so that every other module may import it.
"""

from __future__ import annotations


class D5Error(Exception):
    """Base class of every error that d5suite raises on purpose.

    Parameters
    ----------
    what : str
        One sentence: what is wrong.
    where : str, optional
        The file, node, tensor or option concerned.
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
        return f"{text}\n  {self.hint}" if self.hint else text


class NetworkError(D5Error):
    """A network file is corrupt, invalid, unsafe or not usable as asked."""


class UnsupportedOperatorError(NetworkError):
    """A backend does not implement some operators of a network; all of them are listed at once."""


class BackendError(D5Error):
    """A backend is unknown, not installed, or cannot do what was asked of it."""


class DataError(D5Error):
    """A dataset or one of its files is missing, corrupt or unsafe."""


class JobError(D5Error):
    """A job file or result file is invalid, or a worker process failed."""


class ValidationError(D5Error):
    """An answer disagrees with the reference; nothing may be timed."""


class ConfigurationError(D5Error):
    """An option, a recipe or a setting is invalid."""
