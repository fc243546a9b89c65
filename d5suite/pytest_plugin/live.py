"""Lines at the bottom of a terminal that are updated during a run. Imports rich lazily."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from d5suite.pytest_plugin.output import discard_dead_output

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

REFRESH_S, RARELY = 1.0, 10
"""Seconds between two refreshes, which update the time; and the factor by which they are rarer
while samples are taken."""


class LiveLines:
    """Provisional results, what is running, and for how long.

    Parameters
    ----------
    start_s : float
        `time.monotonic` at the start of the run.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._live: Live | None = None
        self._ended = threading.Event()
        self._what, self._left_s, self._shown_s = "", 0.0, 0.0
        self._results: RenderableType = ""
        self._rests = False

    def show(
        self, what: str, left_s: float, medians: Mapping[str, Mapping[str, tuple[float, int]]], *, rests: bool
    ) -> None:
        """Show new lines.

        Parameters
        ----------
        what : str
            What is running.
        left_s : float
            Estimate of the time left, in seconds.
        medians : mapping
            By measurement, then by backend: the median in seconds, and the number of its rounds.
        rests : bool
            Whether to refresh the lines rarely until the next call, because samples are taken.
        """
        self._what, self._left_s, self._shown_s = what, left_s, time.monotonic()
        self._results, self._rests = _table(medians), rests
        discard_dead_output()
        with contextlib.suppress(OSError):
            if self._live is None:
                self._live = self._begin()
            self._live.refresh()

    def _begin(self) -> Live:
        """Put the lines below what pytest has written, and refresh them from time to time."""
        from rich.live import Live

        from d5suite.report.console import Console

        console = Console(file=sys.__stderr__, markup=False, highlight=False, emoji=False)
        live = Live(
            self, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        print("\r\033[K", end="", file=sys.__stderr__, flush=True)  # pytest has begun a line
        live.start()
        console.show_cursor(True)
        self._ended = threading.Event()
        threading.Thread(target=self._refresh, args=(live, self._ended), daemon=True).start()
        return live

    def clear(self) -> None:
        """Remove the lines."""
        if self._live is not None:
            live, self._live = self._live, None
            self._ended.set()
            with contextlib.suppress(OSError):
                live.stop()

    def _refresh(self, live: Live, ended: threading.Event) -> None:
        while not ended.wait(REFRESH_S * (RARELY if self._rests else 1)):
            with contextlib.suppress(OSError):
                live.refresh()

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        now = time.monotonic()
        left_s = self._left_s - (now - self._shown_s)
        line = Table.grid(expand=True)
        line.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        line.add_column(no_wrap=True, justify="right")
        line.add_row(f"  {self._what}", f" {clock(now - self._start_s)}{left(left_s)}")
        return Group(self._results, line) if self._results else line


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def left(seconds: float) -> str:
    """Return how long a run still takes, for people; empty if it should have ended."""
    if seconds >= 90:
        return f", about {seconds / 60:.0f} min left"
    return f", about {max(5, 5 * round(seconds / 5))} s left" if seconds > 0 else ""


def _table(medians: Mapping[str, Mapping[str, tuple[float, int]]]) -> RenderableType:
    """Return a table of provisional medians, a line for each backend; empty without any."""
    from rich.table import Table

    backends = list(dict.fromkeys(backend for found in medians.values() for backend in found))
    if not backends:
        return ""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("  proved, provisional ms", overflow="ellipsis", no_wrap=True)
    for measurement in medians:
        table.add_column(measurement, justify="right", no_wrap=True)
    for backend in backends:
        table.add_row(f"    {backend}", *(_cell(found.get(backend)) for found in medians.values()))
    return table


def _cell(found: tuple[float, int] | None) -> str:
    """Return a median in ms, with a ~ if it is one of warm-up calls only; empty if unknown."""
    return "" if found is None else f"{'~' if found[1] == 0 else ''}{1e3 * found[0]:.4g}"
