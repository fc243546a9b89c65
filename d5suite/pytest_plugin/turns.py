"""Order of a run's jobs: backends in turn or one by one, launches, a quiet machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from d5suite.errors import ConfigurationError
from d5suite.pytest_plugin import stash

if TYPE_CHECKING:
    from d5suite.session import Session

LAUNCHES = {"standard": 3}
"""Launches of each worker by preset; 1 at the others."""

WAIT_QUIET_S = 300.0
"""Limit of ``--wait-quiet`` in seconds, if none is given."""


def add_options(group: Any) -> None:
    """Add the options to a group of pytest's."""
    group.addoption(
        "--one-by-one",
        action="store_true",
        help="measure a recipe's backends one after another (default: their workers run side by side and take turns)",
    )
    group.addoption(
        "--launches",
        type=int,
        metavar="N",
        help="start each worker of a recipe N times (default: 3 at preset standard, else 1)",
    )
    group.addoption(
        "--wait-quiet",
        nargs="?",
        type=_seconds,
        const=WAIT_QUIET_S,
        metavar="SECONDS",
        help="before each recipe wait until the machine is idle; wait at most SECONDS in total (default 300); mark "
        "later results with !",
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds: write --wait-quiet=SECONDS") from None


def check_options(config: pytest.Config) -> None:
    """Raise `ConfigurationError` if the options contradict each other."""
    if config.getoption("one_by_one") and config.getoption("launches"):
        raise ConfigurationError("--launches is for workers that take turns", hint="Leave out --one-by-one.")


def launches(config: pytest.Config) -> int:
    """Return the number of launches of each worker that takes turns."""
    return config.getoption("launches") or LAUNCHES.get(config.getoption("preset") or "", 1)


def before_job(config: pytest.Config, session: Session, target: stash.Target, every: Iterable[stash.Target]) -> None:
    """Wait for a quiet machine, if asked to; let the backends of a case take turns, if they can.

    Parameters
    ----------
    config : pytest.Config
    session : Session
        Which then knows the results.
    target : Target
        Of a job that has not run.
    every : iterable of Target
        What the run measures.
    """
    from d5suite.session.rounds import Place, can_take_turns, measure_in_turns

    option = config.option
    session.wait_until_quiet()
    if option.one_by_one or (option.benchmark_disable and not option.benchmark_enable):
        return
    places: dict[tuple[str, str], Place] = {}
    for each in every:
        if each.job[0] == target.job[0]:
            places.setdefault(each.job, Place(each.selection, [])).batch.append(each.wanted)
    beside = list(places.values())
    if any(session.has_run(each.batch[0], each.selection) for each in beside):
        return
    if can_take_turns(session, beside, least=1 if option.launches else 2):
        measure_in_turns(session, beside, launches(config))
