"""The backend under test as a fixture, expected failures as data, and the closing table."""

from __future__ import annotations

import fnmatch
import gc
from collections import Counter
from typing import Any

import pytest

from d5suite.errors import D5Error
from d5suite.levels.contract import ContractError
from d5suite.testing import subject as subjects
from d5suite.testing.progress import Progress, case_name
from d5suite.testing.raised import broken_clause
from d5suite.testing.subject import Subject

LEVELS = {
    "test_discovery": "plug-in",
    "test_level0": "level 0: operators",
    "test_onnx_nodes": "ONNX node tests",
    "test_operators": "level 1: operators",
    "test_networks": "level 1: networks",
    "test_answers": "levels 1 and 2: answers",
    "test_gradients": "level 1: gradients",
    "whole_zoo": "level 1: the zoo",
    "test_training": "level 2: training",
    "test_distributed": "level 3: replicas",
    "test_schemes": "level 3: schemes",
    "test_native": "level 3: own schemes",
    "test_process": "process",
}
"""Rows of the table, by test file."""

_CLAIMS = {
    "level 0": ["level 0: operators"],
    "level 1": ["ONNX node tests", "level 1: operators", "level 1: networks"],
    "gradient": ["level 1: gradients"],
    "level 2": ["level 2: training"],
    "level 3": ["level 3: replicas"],
}
"""Declarations of a backend, and the rows that prove them."""

_OUTCOMES = ("passed", "failed", "expected failure", "skipped")

_rows = pytest.StashKey["dict[str, Counter[str]]"]()
_explained = pytest.StashKey["dict[str, list[str]]"]()
_skips = pytest.StashKey["dict[str, Counter[str]]"]()
_whole = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Find the backend under test before collection."""
    try:
        chosen = subjects.choose(config.getoption("backend"), config.getoption("device"), config.getoption("threads"))
        chosen.short = config.getoption("markexpr") == "not slow"
    except D5Error as error:
        # With --pyargs pytest loads this file while it collects, and then hides a UsageError.
        pytest.exit(f"error: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
    config.addinivalue_line("markers", "slow: repeats a clause on more cases; --quick leaves it out")
    config.stash[_rows] = {}
    config.stash[_explained] = {}
    config.stash[_skips] = {}
    config.stash[_whole] = True
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.get_verbosity() == 0:
        config.pluginmanager.register(Progress(reporter, lambda: subjects.chosen().note), "d5suite-progress")


@pytest.fixture(scope="session")
def subject() -> Subject:
    """Return the backend under test with its framework configured."""
    chosen = subjects.chosen()
    chosen.configure()
    gc.collect()
    gc.freeze()  # else each of a dozen collections takes up to a second for the framework's objects
    return chosen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that the backend expects to fail."""
    for item in items:
        reason = expected_failure(item)
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def expected_failure(item: pytest.Item) -> str:
    """Return why the backend expects a case to fail in this mode, or an empty text."""
    subject = subjects.chosen()
    for pattern, reason in subject.backend.expected_failures.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in (item.name, f"{subject.mode}:{item.name}")):
            return reason
    return ""


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Note that the run is of chosen cases; without the slow ones it still covers every level."""
    for item in items:
        if item.get_closest_marker("slow") is None:
            item.config.stash[_whole] = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the subject which case its errors are of."""
    subjects.chosen().begin(case_name(str(item.path), item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Count each case once, under its level; show only the message of a broken clause."""
    report: pytest.TestReport = yield
    if call.excinfo is not None and report.outcome == "failed" and not item.config.option.fulltrace:
        _shorten(report, call.excinfo)
    outcome = None
    if report.outcome == "skipped":
        outcome = "expected failure" if hasattr(report, "wasxfail") else "skipped"
    elif report.outcome == "failed":
        outcome = "failed"
    elif report.when == "call":
        outcome = "passed"
    if outcome is not None:
        level = LEVELS.get(item.path.stem, item.path.stem)
        item.config.stash[_rows].setdefault(level, Counter())[outcome] += 1
        if outcome == "expected failure":
            item.config.stash[_explained].setdefault(str(getattr(report, "wasxfail", "")), []).append(item.name)
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            item.config.stash[_skips].setdefault(level, Counter())[reason] += 1
    return report


def _shorten(report: pytest.TestReport, raised: pytest.ExceptionInfo[BaseException]) -> None:
    """Replace a traceback through our files by the broken clause and the adapter's own lines."""
    error, backend = raised.value, subjects.chosen().backend
    inner = error.__cause__ if isinstance(error, ContractError) else error
    found, lines = broken_clause(inner, backend) if isinstance(inner, Exception) else (None, "")
    broken = error if isinstance(error, ContractError) else found
    if broken is not None:
        shown: Any = raised.getrepr(style="native")
        shown.reprcrash.message = broken.what
        shown.reprtraceback.reprentries[0].lines = [f"{broken}{lines}\n"]
        report.longrepr = shown


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Any:
    """Fail a run that proves nothing, or nothing of a level that the backend declares."""
    if session.exitstatus == 0 and _unproved(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def _unproved(config: pytest.Config) -> list[str]:
    """Return a sentence for each declared claim that the run does not prove."""
    rows, backend = config.stash[_rows], subjects.chosen().backend
    if not any(row["passed"] for row in rows.values()):
        return ["no case passed: nothing is proved"]
    run = set(LEVELS.values()) - {LEVELS[file] for file in ("whole_zoo", "test_onnx_nodes", "test_schemes")}
    if not config.stash[_whole] or not run <= set(rows):
        return []
    declared = [f"level {level}" for level in sorted(backend.levels)]
    declared += ["gradient"] if "gradient" not in backend.absent else []
    return [
        f"backend {backend.name!r} declares {claim}, and no case of it passed: it is not proved"
        for claim in declared
        if not any(rows[row]["passed"] for row in _CLAIMS[claim] if row in rows)
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the table of outcomes per level, with the reasons of skips and expected failures."""
    rows = config.stash[_rows]
    if config.getoption("collectonly"):
        return
    write = terminalreporter.write_line
    terminalreporter.section(f"conformance of {subjects.chosen()}")
    total: Counter[str] = Counter()
    write(
        f"{'':<26}" + "".join(f"{outcome:>18}" if i == 2 else f"{outcome:>13}" for i, outcome in enumerate(_OUTCOMES))
    )
    levels = [level for level in LEVELS.values() if level in rows]
    for level in [*levels, *(level for level in rows if level not in levels)]:
        total.update(rows[level])
        _write_row(write, level, rows[level])
    _write_row(write, "total", total)
    if subjects.chosen().seen.worst:
        write("")
        for line in subjects.chosen().seen.lines(subjects.chosen().backend):
            write(line)
    for reason, names in config.stash[_explained].items():
        write("")
        write(f"expected to fail ({len(names)}): {reason}")
        write(f"  {', '.join(sorted(names))}")
    for level, reasons in config.stash[_skips].items():
        write("")
        write(f"skipped, {level}:")
        for reason, count in reasons.most_common():
            write(f"  {count:4d}  {reason}")
    for sentence in _unproved(config):
        write("")
        write(sentence, red=True)


def _write_row(write: Any, name: str, counts: Counter[str]) -> None:
    cells = (f"{counts[o]:>18}" if i == 2 else f"{counts[o]:>13}" for i, o in enumerate(_OUTCOMES))
    write(f"{name:<26}" + "".join(cells), red=bool(counts["failed"]))
