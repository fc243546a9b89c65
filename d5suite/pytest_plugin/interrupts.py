"""Interrupts: what was finished before Ctrl-C, a signal or ``-x`` is saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from itertools import zip_longest
from typing import NoReturn

import pytest

from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.progress import progress_of

KILLING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run as Ctrl-C does, so that its results are saved."""


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Save finished results despite an interrupt or ``-x``."""
    config = session.config
    if not any(stash.target(item) for item in session.items):
        return (yield)
    if config.option.write_jobs:
        from d5suite.pytest_plugin.measuring import write_jobs

        write_jobs(config)
        session.items.clear()
        return (yield)
    for each in KILLING:
        if signal.getsignal(each) is signal.SIG_DFL:
            _handle(config, each, _interrupt)
    try:
        return (yield)
    except BaseException:
        _finish(config)
        _replay_finished(session)
        raise
    finally:
        _finish(config)


def _handle(config: pytest.Config, number: signal.Signals, handler: object) -> None:
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(number, handler)  # type: ignore[arg-type]
        config.stash[stash.SIGNALS].callback(signal.signal, number, before)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _finish(config: pytest.Config) -> None:
    """Ignore signals until the results are saved: a second Ctrl-C would lose them."""
    for each in (signal.SIGINT, *KILLING):
        _handle(config, each, signal.SIG_IGN)


def _replay_finished(session: pytest.Session) -> None:
    """Run the tests whose measurements are finished, and keep partial results of the others."""
    config = session.config
    finished: list[pytest.Item] = []
    for item in session.items:
        target = stash.target(item)
        if target is None or item.nodeid in progress_of(config).finished or stash.SESSION not in config.stash:
            continue
        found = config.stash[stash.SESSION].known(target.wanted)
        if found is not None and found.record is not None:
            finished.append(item)
        elif found is not None and found.kept:
            group = f"{target.case.name}/{target.measurement.name}"
            kept = stash.Kept(target.measurement, group, str(target), found.kept)
            config.stash[stash.KEPT][item.nodeid] = kept
    if finished:
        with contextlib.suppress(BaseException):  # a fixture of the test that was interrupted
            config.pluginmanager.getplugin("runner").pytest_sessionfinish(session)
    for item, following in zip_longest(finished, finished[1:]):
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
