"""Interrupts: what was finished before Ctrl-C, a signal or ``-x`` is saved.

The first signal ends the run as Ctrl-C does, and later ones are ignored until all is saved: a
second Ctrl-C, or the second SIGTERM that ``timeout`` sends, would lose results.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import signal
import threading
import time
from collections.abc import Generator
from itertools import zip_longest
from typing import Any

import pytest

from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.output import discard_dead_output
from d5suite.pytest_plugin.progress import progress_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run so that its results are saved."""

PATIENCE_S = 10.0
"""Seconds after a signal until another one interrupts again, unless results are being saved.
Otherwise code that catches the first interrupt and goes on could only be killed."""


class Interrupts:
    """Handles `SIGNALS`: the first one raises `KeyboardInterrupt`, later ones are ignored.

    Signals that the user ignores, as under ``nohup``, or handles, stay as they are.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._latest_s, self._holds = -math.inf, False

    def install(self) -> None:
        """Handle signals from now on; in another thread than the main one, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        for each in SIGNALS:
            if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[each] = signal.signal(each, self)

    def hold(self) -> None:
        """Ignore all signals from now on: results are being saved."""
        self._holds = True

    def restore(self) -> None:
        """Restore the previous handlers."""
        while self._before:
            signal.signal(*self._before.popitem())

    def end(self) -> None:
        """Restore the handlers, except after an interrupt: all is saved, and the process ends."""
        if self._latest_s == -math.inf:
            self.restore()
        else:
            self._holds = False
            atexit.register(self._ignore)

    def _ignore(self) -> None:
        for each in self._before:  # Python restores the default, which would change the exit code
            signal.signal(each, signal.SIG_IGN)

    def __call__(self, number: int, frame: object) -> None:
        """Handle a signal."""
        discard_dead_output()
        now = time.monotonic()
        if not self._holds and now - self._latest_s > PATIENCE_S:
            self._latest_s = now
            raise KeyboardInterrupt(signal.Signals(number).name)


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
    interrupts = Interrupts()
    config.add_cleanup(interrupts.end)
    interrupts.install()
    try:
        return (yield)
    except BaseException:
        interrupts.hold()
        discard_dead_output()
        _replay_finished(session)
        raise
    finally:
        interrupts.hold()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart() -> None:
    """Keep pytest from writing to a terminal that is gone."""
    discard_dead_output()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport() -> None:
    """Keep pytest from writing to a terminal that is gone."""
    discard_dead_output()


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
