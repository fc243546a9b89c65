"""A record as a benchmark: the samples that a worker took, repeated to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from d5suite.errors import D5Error
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.options import settings
from d5suite.pytest_plugin.progress import progress_of
from d5suite.pytest_plugin.turns import before_job

if TYPE_CHECKING:
    from d5suite.session import Found, Session


class ReplayTimer:
    """A timer for pytest-benchmark that repeats times taken elsewhere."""

    __name__ = "d5suite_replay"

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, samples_s: list[float]) -> None:
        """Replay these durations, in seconds, one per round."""
        self._readings = (reading for sample in samples_s for reading in (0.0, sample))

    def __call__(self) -> float:
        """Return the next reading: 0 at a round's start, the sample at its end."""
        return next(self._readings)


def replay(request: pytest.FixtureRequest, benchmark: Any, target: stash.Target, timer: ReplayTimer) -> None:
    """Measure, unless the job of this test has run already, and repeat the samples."""
    from d5suite.report.schema import check_record

    config = request.config
    if hasattr(config, "workerinput"):
        pytest.fail("measurements run one at a time: leave out pytest-xdist's -n", pytrace=False)
    with _uncaptured(config):
        session = session_of(config)
        if not session.has_run(target.wanted, target.selection):
            before_job(config, session, target, _targets(request.session))
        found = session.found(target.wanted, target.selection, _batch(request.session, target))
    if found.record is None:
        _fail(request, benchmark, target, found)
        return
    try:
        check_record(found.record, target.measurement)
    except D5Error as error:
        pytest.fail(str(error), pytrace=False)
    benchmark.extra_info["d5suite"] = found.record
    timer.load(found.samples_s)
    benchmark.pedantic(lambda: None, rounds=len(found.samples_s), iterations=1)
    config.stash[stash.RECORDS][request.node.nodeid] = found.series
    result = {"group": benchmark.group, "param": str(target), "extra_info": {"d5suite": found.record}}
    config.stash[stash.RESULTS].append(
        {**result, "stats": {"data": found.samples_s}, "measurement": target.measurement}
    )


def _fail(request: pytest.FixtureRequest, benchmark: Any, target: stash.Target, found: Found) -> None:
    from d5suite.session.session import runner

    failure = found.failure or "no result"
    backend = runner(target.selection, target.ranks)
    request.config.stash[stash.FAILURES].append(
        {"group": benchmark.group, "backend": backend, "wrong": found.wrong, "message": failure}
    )
    if found.kept:
        from d5suite.pytest_plugin.saving import where_kept

        kept = stash.Kept(target.measurement, benchmark.group, str(target), found.kept)
        request.config.stash[stash.KEPT][request.node.nodeid] = kept
        failure += where_kept(request.config, kept)
    pytest.fail(failure, pytrace=False)


def write_jobs(session: pytest.Session) -> None:
    """Write the job files of all tests, for ``--write-jobs``.

    Raises
    ------
    UsageError
        A job makes no sense.
    """
    written: set[tuple[str, str]] = set()
    for target in _targets(session):
        if target.job not in written:
            written.add(target.job)
            try:
                session_of(session.config).write(target.selection, _batch(session, target))
            except D5Error as error:
                raise pytest.UsageError(str(error)) from error


def _batch(session: pytest.Session, target: stash.Target) -> list[Any]:
    """Return all measurements that the run wants from the same job."""
    return [each.wanted for each in _targets(session) if each.job == target.job]


def _targets(session: pytest.Session) -> list[stash.Target]:
    """Return the targets of the run."""
    targets = (stash.target(item) for item in session.items if item.get_closest_marker("skip") is None)
    return [each for each in targets if each is not None]


def session_of(config: pytest.Config) -> Session:
    """Return the run's jobs.

    Raises
    ------
    ConfigurationError
        If there is no place for job files.
    """
    if stash.SESSION not in config.stash:
        from d5suite.session import Session

        tell = progress_of(config).tell if config.stash[stash.TERMINAL] else None
        config.stash[stash.SESSION] = Session(settings(config), tell)
    return config.stash[stash.SESSION]


@contextlib.contextmanager
def _uncaptured(config: pytest.Config) -> Iterator[None]:
    """Suspend capturing to show progress on a terminal; keep it in a pipe."""
    manager = config.pluginmanager.getplugin("capturemanager")
    if manager is None or not config.stash[stash.TERMINAL]:
        yield
    else:
        with manager.global_and_fixture_disabled():
            yield
