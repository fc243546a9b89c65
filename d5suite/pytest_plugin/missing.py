"""Results that a run lacks: they are reported, and decide its exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.storage import has_benchmark

MOST_REASONS = 8
"""Lines of reasons why something is absent; pytest's ``-rs`` shows all."""

MOST_NAMED = 2
"""Measurements or backends that such a line names."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End with an error if nothing was measured, or if something requested by name was not."""
    config, option = session.config, session.config.option
    if (
        option.collectonly
        or option.setuponly
        or option.write_jobs
        or not has_benchmark(config)
        or (option.benchmark_skip and not option.benchmark_only)
    ):
        return
    deselected = config.stash[stash.DESELECTED]
    absent = {**deselected}
    for item in session.items:
        mark = item.get_closest_marker("skip")
        if stash.target(item) is not None and mark is not None:
            absent[item] = str(mark.kwargs.get("reason", "skipped"))
    _report_lacking(config, absent)
    _report_unused(config, session.items)
    nothing = absent and not config.stash[stash.RESULTS] and not session.testsfailed
    idle = _idle_backends(session, absent)
    missed = {item: why for item, why in absent.items() if nothing or _backend_of(item) in idle or _is_named(item)}
    if "s" not in config.option.reportchars:  # pytest lists them itself
        _report_skipped(config, {item: why for item, why in absent.items() if item not in {**deselected, **missed}})
    if not missed:
        return
    reasons = list(dict.fromkeys(f"{item.name}: {why}" for item, why in missed.items()))
    title = "nothing was measured" if nothing else "not measured, though requested by name"
    more = [f"and {len(reasons) - MOST_REASONS} more"] if len(reasons) > MOST_REASONS else []
    config.stash[stash.REMARKS].append("\n  ".join([f"{title}:", *reasons[:MOST_REASONS], *more]))
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED if nothing else pytest.ExitCode.TESTS_FAILED


def _report_skipped(config: pytest.Config, skipped: dict[pytest.Item, str]) -> None:
    """Report why tests were skipped, a line for each reason."""
    by_reason: dict[str, list[stash.BenchmarkTarget]] = {}
    for item, why in skipped.items():
        target = stash.target(item)
        if target is not None and not (config.getoption("network") and target.case.every_backend):  # `_report_lacking`
            by_reason.setdefault(why.partition("\n")[0], []).append(target)
    lines = []
    for why, targets in by_reason.items():
        names = dict.fromkeys(each.measurement.name for each in targets)
        backends = dict.fromkeys(str(each.selection) for each in targets)
        on = f" on {', '.join(backends)}" if len(backends) <= MOST_NAMED else ""
        lines.append(f"{len(targets)} {', '.join(names) if len(names) <= MOST_NAMED else 'measurements'}{on}: {why}")
    if lines:
        more = [f"and {len(lines) - MOST_REASONS} more reasons; -rs lists all"] if len(lines) > MOST_REASONS else []
        title = f"{sum(map(len, by_reason.values()))} skipped:"
        config.stash[stash.REMARKS].append("\n  ".join([title, *lines[:MOST_REASONS], *more]))


def _report_lacking(config: pytest.Config, absent: dict[pytest.Item, str]) -> None:
    """Report why backends cannot run the user's own network."""
    results: list[dict[str, Any]] = config.stash[stash.RESULTS]
    targets = ((stash.target(item), why) for item, why in absent.items())
    reasons = dict.fromkeys(why for target, why in targets if target is not None and target.case.every_backend)
    if results and reasons and config.getoption("network") is not None:
        config.stash[stash.REMARKS].append("\n  ".join(["not measured:", *reasons]))


def _report_unused(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Report datasets or networks that no selected test uses."""
    cases = [target.case for target in map(stash.target, items) if target is not None]
    for option in ("imagenet", "openimages", "network"):
        if cases and config.getoption(option) is not None and not any(case.uses_option(option) for case in cases):
            config.stash[stash.REMARKS].append(f"--{option} had no effect: no selected test uses it")


def _idle_backends(session: pytest.Session, absent: Iterable[pytest.Item]) -> set[str]:
    """Return the backends named by `--backend` that have nothing to measure."""
    if session.config.getoption("backend") is None:
        return set()
    busy = {_backend_of(item) for item in {*session.items} - {*absent} if stash.target(item) is not None}
    return {_backend_of(item) for item in absent} - busy


def _backend_of(item: pytest.Item) -> str:
    """Return the backend of a test of a measurement."""
    target = stash.target(item)
    assert target is not None
    return str(target.selection)


def _is_named(item: pytest.Item) -> bool:
    """Return whether the command line names both the measurement and the backend of a test."""
    config, backend, function = item.config, _backend_of(item), item.name.partition("[")[0]
    words = {word.lower().removeprefix("test_") for word in re.findall(r"[\w:.-]+", config.option.keyword)}
    words -= {"and", "or", "not"}
    ids = [named for file, _, named in (str(each).partition("::") for each in config.args) if _is(file, item)]
    target = stash.target(item)
    if target is not None and target.point:  # a sweep names knobs, not each of their combinations
        return item.name in ids
    return item.name in ids or (
        (function in ids or any(word in function for word in words))
        and (config.getoption("backend") is not None or any(word in backend for word in words))
    )


def _is(file: str, item: pytest.Item) -> bool:
    return Path(file).name == item.path.name
