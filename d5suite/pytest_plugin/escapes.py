"""What pytest prints is made safe for a terminal: a network's names may hold control sequences."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

from d5suite.errors import escaped


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Escape the message of a failed collection."""
    report = yield
    if "d5suite.cases.case" in sys.modules:  # a recipe was imported
        make_safe(report)
    return report


def make_safe(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Escape the control characters in a report's text."""
    shown: Any = report.longrepr
    if isinstance(shown, str):
        report.longrepr = escaped(shown)
    elif isinstance(shown, tuple):  # of a skipped test
        report.longrepr = (shown[0], shown[1], escaped(shown[2]))
    elif hasattr(shown, "longrepr"):  # of a collection
        shown.longrepr = escaped(shown.longrepr)
    else:
        for traceback, crash, _ in getattr(shown, "chain", ()):
            if crash is not None:
                crash.message = escaped(crash.message)
            for entry in traceback.reprentries:
                entry.lines = [escaped(line) for line in entry.lines]
