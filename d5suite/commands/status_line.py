"""The line of a command's progress on a terminal."""

from __future__ import annotations

import shutil
import sys


class StatusLine:
    """A progress line on standard error that is updated; in a pipe nothing is shown."""

    def __init__(self) -> None:
        self.is_shown = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show a text in place of the previous one."""
        if self.is_shown:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        self.show("")
