"""Progress of the kit: one line per case on a terminal, one per test in a pipe.

Replaces pytest's dots, except with ``-q`` or ``-v``. Imports pytest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class CaseProgress:
    """Writes the cases of a run through pytest's terminal reporter.

    Parameters
    ----------
    reporter : TerminalReporter
    note : callable
        Returns a short note about the last case.
    """

    def __init__(self, reporter: Any, note: Callable[[], str]) -> None:
        self._reporter = reporter
        self._note = note
        self._each = bool(reporter.isatty)
        reporter.showfspath = False
        reporter._show_progress_info = False
        self._test = self._case = ""
        self._counts: Counter[str] = Counter()
        self._seconds = self._case_seconds = 0.0
        self._outcome, self._what = "", ""
        self._running = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self) -> Any:
        """Print no letter for a case; the closing summary lists it."""
        category, *shown = yield
        return (category, "", "") if self._running else (category, *shown)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Show the running case; write the line of the test before it."""
        self._case = case_name(location[0], nodeid)
        test = _group(self._case)
        if test != self._test:
            self._end_test()
            self._test = test
        self._case_seconds, self._outcome, self._what, self._running = 0.0, "passed", "", True
        if self._each:
            self._rewrite(f"{'':>9}    {self._case}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the case's seconds, and record its outcome."""
        self._case_seconds += report.duration
        if report.outcome != "passed":
            expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
            self._outcome = "expected failure" if expected else report.outcome
            if report.outcome == "failed":
                crash = getattr(report.longrepr, "reprcrash", None)
                self._what = str(crash.message if crash is not None else report.longrepr).partition("\n")[0]

    def pytest_runtest_logfinish(self) -> None:
        """Write a line for a case: on a terminal always, elsewhere if it failed."""
        self._running = False
        self._counts[self._outcome] += 1
        self._seconds += self._case_seconds
        failed = self._outcome == "failed"
        if failed or (self._each and self._outcome != "skipped"):
            said = "FAILED " if failed else "expected failure " if self._outcome == "expected failure" else ""
            note = self._what or self._note()
            line = f"{self._case_seconds:7.2f} s    {said}{self._case}{f'  {note}' if note else ''}"
            self._rewrite(line, "\n", red=failed)

    def pytest_sessionfinish(self) -> None:
        """Write the line of the last test."""
        self._end_test()

    def _end_test(self) -> None:
        if self._each:
            self._rewrite("")
        elif self._counts:
            counts = ", ".join(f"{number} {outcome}" for outcome, number in self._counts.items())
            self._write(f"{self._seconds:7.2f} s  {self._test}: {counts}\n")
        self._counts.clear()
        self._seconds = 0.0

    def _rewrite(self, line: str, end: str = "", **markup: bool) -> None:
        """Overwrite the terminal's line; cut it unless it stays."""
        if not self._each:
            self._write(line + end, **markup)
            return
        width = self._reporter._screen_width - 1
        self._write("\r" + (line if end else line[:width]).ljust(width) + end, **markup)

    def _write(self, text: str, **markup: bool) -> None:
        self._reporter.write(text, flush=True, **markup)


def case_name(path: str, nodeid: str) -> str:
    """Return a case's file and name; pytest's id lacks the file outside its root."""
    file, _, name = nodeid.partition("::")
    return f"{Path(file or path).name}::{name}"


def _group(case: str) -> str:
    """Return the test of a case, or its class if it has one."""
    test = case.partition("[")[0]
    return test.rpartition("::")[0] if test.count("::") > 1 else test
