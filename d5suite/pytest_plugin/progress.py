"""Output of a run: progress, each backend's rows as it finishes, the table at the end."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Generator, Mapping
from typing import Any

import pytest

from d5suite.errors import escaped
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.escapes import make_safe
from d5suite.pytest_plugin.estimate import JobName, TimeEstimate
from d5suite.pytest_plugin.live import LiveLines
from d5suite.pytest_plugin.output import discard_dead_output
from d5suite.pytest_plugin.settings import benchmark_options

MOST_ROWS = 12
"""Most measurements of a job that each get a row; a job of more gets one line."""

MOST_COLUMNS = 4
"""Number of measurements whose provisional medians are shown."""

CACHE_KEY = "d5suite/step_seconds"
"""Key in pytest's cache of the durations of steps, from which the time left is estimated."""

TABLE_OPTIONS = (
    "columns", "sort", "group-by", "name", "time-unit", "histogram", "verbose", "compare", "compare-fail",
)  # fmt: skip
"""Options of pytest-benchmark that ask for its own table."""


class RunProgress:
    """Progress of a run's jobs.

    Parameters
    ----------
    config : pytest.Config
    jobs : mapping
        Tests by job, in the order they run: for each test's node ID its measurement's key.

    Attributes
    ----------
    finished : set of str
        Tests that have run, by node ID.
    """

    def __init__(self, config: pytest.Config, jobs: Mapping[JobName, Mapping[str, str]]) -> None:
        self.jobs = jobs
        self.finished: set[str] = set()
        self._rows: list[str] = []
        self._failed = 0
        self._started: dict[JobName, float] = {}
        self._cache = getattr(config, "cache", None)
        self._known: dict[str, float] = self._cache.get(CACHE_KEY, {}) if self._cache is not None else {}
        conditions = " ".join(str(config.getoption(name)) for name in ("preset", "device", "precision", "threads"))
        self._estimate = TimeEstimate({job: list(its.values()) for job, its in jobs.items()}, self._known, conditions)
        self._slugs = {"-".join(job).replace(":", "-"): job for job in jobs}
        self._medians: dict[str, dict[str, tuple[float, int]]] = {}
        self._lines = LiveLines(time.monotonic())
        self._what, self._rests = "", False

    def tell(self, name: str, phase: str) -> None:
        """Show a worker's phase, or the round of backends that take turns, on the terminal."""
        batch, _, measurement = name.partition("/")
        slug = max((slug for slug in self._slugs if f"{name}-".startswith(f"{slug}-")), key=len, default="")
        if slug:
            job = self._slugs[slug]
            beside = [each for each in self.jobs if each[0] == job[0]]
            place = f" ({beside.index(job) + 1} of {len(beside)})" if len(beside) > 1 else ""
            shown = phase.replace(f"{job[0]}/", "").replace("taking the ", "").replace("what was timed of", "timed")
            self._what = f"{job[1]}{place}: {shown}"
            self._estimate.begin(job, phase)
        else:
            self._what = f"{measurement or name}: {phase}"
            self._estimate.begin((batch, ""), f"turns at {name}")
        self._rests = not slug or phase.startswith("measuring")
        self._show()

    def earlier_s(self) -> float | None:
        """Return the seconds that earlier runs took for all steps left; None if any is new."""
        return self._estimate.earlier_s()

    def add_median(self, key: str, backend: str, median_s: float, rounds: int) -> None:
        """Show the provisional median of a backend that is proved.

        Parameters
        ----------
        key : str
            The measurement.
        backend : str
        median_s : float
        rounds : int
            Rounds taken so far; 0 if the median is that of the warm-up calls.
        """
        self._medians.setdefault(key, {})[backend] = median_s, rounds
        self._show()

    def _show(self) -> None:
        newest = list(self._medians.items())[-MOST_COLUMNS:]
        cases = {key.partition("/")[0] for key, _ in newest}
        shown = {key.partition("/")[2] if len(cases) == 1 else key: found for key, found in newest}
        self._lines.show(self._what, self._estimate.left_s(), shown, rests=self._rests)

    def clear(self) -> None:
        """Remove what `tell` shows."""
        self._lines.clear()

    def start(self, job: JobName) -> None:
        """Start timing a job at its first test."""
        self._started.setdefault(job, time.monotonic())

    def add(self, job: JobName, nodeid: str, row: str, *, failed: bool) -> str | None:
        """Add a finished test; return its job's rows if it is the job's last test, else None."""
        self.finished.add(nodeid)
        self._rows.append(row)
        self._failed += failed
        if nodeid != list(self.jobs[job])[-1]:
            return None
        rows = self._rows
        if len(rows) > MOST_ROWS:
            took_s = time.monotonic() - self._started.get(job, time.monotonic())
            end = f", {self._failed} failed" if self._failed else ""
            rows = [f"  {job[1]}: {len(rows)} measurements in {took_s:.0f} s{end}"]
        self._rows, self._failed = [], 0
        self._estimate.end(job)
        self._medians.clear()
        if self._cache is not None:
            self._cache.set(CACHE_KEY, self._known)
        return "".join(f"\n{each}" for each in rows)


PROGRESS = pytest.StashKey[RunProgress]()


def progress_of(config: pytest.Config) -> RunProgress:
    """Return the run's progress."""
    return config.stash[PROGRESS]


def begin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prepare for the tests that will run."""
    jobs: dict[JobName, dict[str, str]] = {}
    for item in items:
        target = stash.target(item)
        if target is not None and item.get_closest_marker("skip") is None:
            jobs.setdefault(target.job, {})[item.nodeid] = target.wanted.key
    config.stash[PROGRESS] = RunProgress(config, jobs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write a job's rows when its last test has run."""
    report = yield
    target = stash.target(item)
    if target is None:
        return report
    make_safe(report)
    report.user_properties.append(("d5suite", True))
    if item.get_closest_marker("skip") is not None:
        return report
    job = target.job
    progress = progress_of(item.config)
    if call.when == "setup":
        progress.start(job)
    if call.when != "call":
        return report
    results = item.config.stash[stash.RESULTS]
    info = results[-1]["extra_info"]["d5suite"] if report.passed and results else None
    rows = progress.add(job, item.nodeid, _row(target, info, report.outcome), failed=report.failed)
    reporter: Any = item.config.pluginmanager.getplugin("terminalreporter")
    if rows and reporter is not None:
        discard_dead_output()
        reporter.write(rows)
    return report


def _row(target: stash.BenchmarkTarget, info: Mapping[str, Any] | None, outcome: str) -> str:
    case, name = target.wanted.key.partition("/")[0], target.measurement.name
    name = name if case == target.job[0] else target.wanted.key  # a job of several cases
    start = f"  {target.job[1]:<18} {name:<21}"
    if info is None:
        return f"{start} {outcome}"
    median, rate = info["median_s"], info["throughput"]
    mark = "  (disturbed)" if info["machine"]["disturbed"] else ""
    return f"{start} {_seconds(median):>10} {rate['value']:>10.4g} {rate['unit']}{mark}"


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.4g} {unit}"
    return f"{value * 1e6:.4g} µs"


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Show no letter for a measurement, which has a row."""
    shown = report.when == "call" or report.skipped
    if shown and ("d5suite", True) in report.user_properties and config.option.verbose < 1:
        return report.outcome, "", report.outcome.upper()
    return None


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_benchmark_group_stats(config: pytest.Config) -> Generator[None, Any, Any]:
    """Leave d5suite's results out of pytest-benchmark's table, unless an option asks for that."""
    groups = yield
    if any(f"--benchmark-{name}" in benchmark_options(config) for name in TABLE_OPTIONS):
        return groups
    others = [(name, [each for each in group if "d5suite" not in each["extra_info"]]) for name, group in groups]
    return [(name, group) for name, group in others if group]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write the table of results, remarks, and the folder of the job files."""
    discard_dead_output()
    records = [each["extra_info"]["d5suite"] for each in config.stash[stash.RESULTS]]
    if config.stash[stash.RESULTS] and not config.getoption("benchmark_quiet", False):
        _write_table(terminalreporter, config)
        if terminalreporter.verbosity > 0:
            took_s = sum(each.get("proof_after_s", 0.0) for each in records)
            terminalreporter.write_line(f"d5suite: what was timed was proved afterwards in {took_s:.3g} s")
    left_out = dict.fromkeys(said for each in records for said in each.get("dataset", {}).get("left_out", ()))
    remarks = [*(f"dataset, {said}" for said in left_out), *config.stash[stash.REMARKS]]
    if (exitstatus or remarks) and stash.SESSION in config.stash and config.stash[stash.SESSION].sessions:
        remarks.append(f"job files, with results: {config.stash[stash.SESSION].folder}")
    for remark in remarks:
        terminalreporter.write_line(f"d5suite: {escaped(remark)}")


def _write_table(terminalreporter: Any, config: pytest.Config) -> None:
    from d5suite.pytest_plugin.saving import add_derived
    from d5suite.report.compare import read_benchmarks, show_results
    from d5suite.report.console import Console

    results = config.stash[stash.RESULTS]
    add_derived([each["extra_info"]["d5suite"] for each in results], config)
    text = _TerminalText()
    console = Console(file=text, width=shutil.get_terminal_size().columns, markup=False, no_color=True)
    show_results([("", read_benchmarks(results))], console)
    terminalreporter.write_sep("=", "d5suite")
    terminalreporter.write(text.getvalue().encode(text.encoding, "replace").decode(text.encoding))


class _TerminalText(io.StringIO):
    """Text for a terminal: Rich draws tables in ASCII if the terminal's encoding needs it."""

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
