"""How many batches a loader prepares ahead, where its caller gives no number."""

from __future__ import annotations

import os

from d5suite.errors import ConfigurationError

PREFETCH = "D5SUITE_PREFETCH"
"""Environment variable with that number; by default `AHEAD`."""

AHEAD, MOST_AHEAD = 2, 1024


def prefetch_by_default() -> int:
    """Return the number of batches to prepare ahead.

    Raises
    ------
    ConfigurationError
        If the variable does not hold a number from 1 to `MOST_AHEAD`.
    """
    text = os.environ.get(PREFETCH, str(AHEAD))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_AHEAD):
        raise ConfigurationError(f"{PREFETCH} is {text!r}; it must be a whole number from 1 to {MOST_AHEAD}")
    return int(text)
