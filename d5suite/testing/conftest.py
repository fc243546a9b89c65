"""The backend under test as a fixture, expected failures as marks, and the closing table."""

from __future__ import annotations

import fnmatch
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from d5suite.errors import D5Error
from d5suite.levels.contract import ContractError
from d5suite.testing import subject as subjects
from d5suite.testing.progress import CaseProgress, case_name
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
    "test_dropout": "level 1: gradients",
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
"""What a backend declares, and the rows that prove it."""

_OUTCOMES = ("passed", "failed", "expected failure", "skipped")

MOST_OPERATORS = 8
"""Most missing operators that the summary names."""


@dataclass
class Tally:
    """The outcomes of a run.

    Attributes
    ----------
    rows : mapping of str to Counter
        By level: how many cases had each outcome.
    expected_failures : mapping of str to list of str
        Names of cases, by reason.
    skips : mapping of str to Counter
        By level: how many cases were skipped for each reason.
    whole : bool
        Whether the run includes every case that is not slow.
    """

    rows: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    expected_failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skips: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    whole: bool = True


_tally = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    """Find the backend under test before collection."""
    try:
        chosen = subjects.choose(config.getoption("backend"), config.getoption("device"), config.getoption("threads"))
        chosen.short = config.getoption("markexpr") == "not slow"
    except D5Error as error:
        # With --pyargs, pytest loads this file while collecting, and hides a UsageError.
        pytest.exit(f"error: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
    config.addinivalue_line("markers", "slow: repeats a clause on more cases; --quick leaves it out")
    config.stash[_tally] = Tally()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.get_verbosity() == 0:
        config.pluginmanager.register(CaseProgress(reporter, lambda: subjects.chosen().note), "d5suite-progress")


@pytest.fixture(scope="session")
def subject() -> Subject:
    """Return the backend under test with its framework configured."""
    chosen = subjects.chosen()
    chosen.configure()
    gc.collect()
    gc.freeze()  # otherwise each of a dozen collections scans the framework's objects for up to a second
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
    """Note that the run is partial if it leaves out cases that are not slow."""
    for item in items:
        if item.get_closest_marker("slow") is None:
            item.config.stash[_tally].whole = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note the running case, for the table of errors."""
    subjects.chosen().begin(case_name(str(item.path), item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Count each case once, under its level; for a broken clause, show only the message."""
    report: pytest.TestReport = yield
    if call.excinfo is not None and report.outcome == "failed" and not item.config.option.fulltrace:
        _shorten(report, call.excinfo)
    if report.when == "call" or report.outcome != "passed":
        _count(item, report)
    return report


def _count(item: pytest.Item, report: pytest.TestReport) -> None:
    tally, level = item.config.stash[_tally], LEVELS.get(item.path.stem, item.path.stem)
    expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
    tally.rows[level]["expected failure" if expected else report.outcome] += 1
    if expected:
        tally.expected_failures[str(report.wasxfail)].append(item.name)
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        tally.skips[level][str(report.longrepr[2]).removeprefix("Skipped: ")] += 1


def _shorten(report: pytest.TestReport, raised: pytest.ExceptionInfo[BaseException]) -> None:
    """Replace a traceback by the broken clause and the adapter's own lines."""
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
    """Fail a run that proves nothing, or leaves a declared level without any proof."""
    if session.exitstatus == 0 and _unproved(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def _unproved(config: pytest.Config) -> list[str]:
    """Return a sentence for each declared claim that the run does not prove."""
    tally, backend = config.stash[_tally], subjects.chosen().backend
    rows = tally.rows
    if not any(row["passed"] for row in rows.values()):
        return ["no case passed: nothing is proved"]
    run = set(LEVELS.values()) - {LEVELS[file] for file in ("whole_zoo", "test_onnx_nodes", "test_schemes")}
    if not tally.whole or not run <= set(rows):
        return []
    declared = [f"level {level}" for level in sorted(backend.levels)]
    declared += ["gradient"] if "gradient" not in backend.absent else []
    return [
        f"backend {backend.name!r} declares {claim}, and no case of it passed: it is not proved"
        for claim in declared
        if not any(rows[row]["passed"] for row in _CLAIMS[claim] if row in rows)
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write a table of outcomes by level, and the reasons of skips and expected failures."""
    tally, subject = config.stash[_tally], subjects.chosen()
    if config.getoption("collectonly"):
        return
    write = terminalreporter.write_line

    def write_row(name: str, cells: Iterable[Any], **markup: bool) -> None:
        widths = (13, 13, 18, 13)
        write(f"{name:<26}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), **markup)

    terminalreporter.section(f"conformance of {subject}")
    write_row("", _OUTCOMES)
    known = [level for level in LEVELS.values() if level in tally.rows]
    total = sum(tally.rows.values(), Counter())
    for level, counts in [
        *((each, tally.rows[each]) for each in dict.fromkeys([*known, *tally.rows])),
        ("total", total),
    ]:
        write_row(level, [counts[outcome] for outcome in _OUTCOMES], red=bool(counts["failed"]))
    lines = ["", *subject.seen.lines(subject.backend)] if subject.seen.worst else []
    for reason, names in tally.expected_failures.items():
        lines += ["", f"expected to fail ({len(names)}): {reason}", f"  {', '.join(sorted(names))}"]
    for level, reasons in tally.skips.items():
        lines += ["", f"skipped, {level}:", *(f"  {count:4d}  {reason}" for count, reason in _folded(reasons))]
    for line in lines:
        write(line)
    for sentence in _unproved(config):
        write("")
        write(sentence, red=True)


def _folded(reasons: Counter[str]) -> list[tuple[int, str]]:
    """Return the number of skips by reason, with all missing operators joined into one reason."""
    found, count, operators = Counter[str](), 0, set[str]()
    for reason, times in reasons.items():
        match = re.fullmatch(r"(?:\S+ has no operator|it lacks) (.*)", reason)
        if match is None or ", because " in reason:
            found[reason] += times
            continue
        count += times
        operators.update(each.partition(" ")[0] for each in match[1].split("; "))
    if operators:
        shown = ", ".join(sorted(operators)[:MOST_OPERATORS])
        more = f" and {len(operators) - MOST_OPERATORS} more" if len(operators) > MOST_OPERATORS else ""
        found[f"it has no operator {shown}{more}"] += count
    return [(times, reason) for reason, times in found.most_common()]
