"""Measuring what pytest has collected: the session decides the order, and runs the jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from d5suite.errors import D5Error
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.progress import progress_of
from d5suite.pytest_plugin.sweep import Sweep
from d5suite.pytest_plugin.turns import launches

if TYPE_CHECKING:
    from d5suite.session import MeasurementResult


def schedule(session: pytest.Session) -> None:
    """Make a session for each point of the sweep, with the measurements collected for it.

    Raises
    ------
    ConfigurationError
        If the folder for job files cannot be made.
    """
    from d5suite.session import Session
    from d5suite.session.schedule import MeasurementSchedule

    config, option = session.config, session.config.option
    targets = [stash.target(item) for item in session.items if item.get_closest_marker("skip") is None]
    wanted: dict[str, list[stash.BenchmarkTarget]] = {}
    for each in filter(None, targets):
        wanted.setdefault(each.point, []).append(each)
    is_disabled = option.benchmark_disable and not option.benchmark_enable
    config.stash[stash.SESSION] = sweep = Sweep({}, {})
    for point, own in wanted.items():
        sweep.sessions[point] = jobs = Session(own[0].settings)
        if config.stash[stash.TERMINAL]:
            jobs.progress, jobs.provisional = progress_of(config).tell, progress_of(config).add_median
        sweep.schedules[point] = MeasurementSchedule(
            jobs,
            [each.wanted for each in own],
            turns=not option.one_by_one and not is_disabled,
            launches=launches(config),
            alone=bool(option.launches),
        )


def measured(config: pytest.Config, target: stash.BenchmarkTarget) -> MeasurementResult:
    """Return the result of a test's measurement; the session measures it unless its job has run."""
    if hasattr(config, "workerinput"):
        pytest.fail("measurements run one at a time: leave out pytest-xdist's -n", pytrace=False)
    with _uncaptured(config):
        return config.stash[stash.SESSION].result(target.wanted)


def write_jobs(config: pytest.Config) -> None:
    """Write the job files of all tests, for ``--write-jobs``.

    Raises
    ------
    UsageError
        If a job makes no sense.
    """
    try:
        config.stash[stash.SESSION].write()
    except D5Error as error:
        raise pytest.UsageError(str(error)) from error


@contextlib.contextmanager
def _uncaptured(config: pytest.Config) -> Iterator[None]:
    """Suspend capturing on a terminal, to show progress there."""
    manager = config.pluginmanager.getplugin("capturemanager")
    shows = manager is not None and config.stash[stash.TERMINAL]
    with manager.global_and_fixture_disabled() if shows else contextlib.nullcontext():
        try:
            yield
        finally:
            progress_of(config).clear()
