"""Options for the order of measuring: backends in turn or one by one, launches, a quiet machine."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from d5suite.errors import ConfigurationError

LAUNCHES = {"standard": 3}
"""Launches of each worker, by preset; 1 at other presets."""

WAIT_QUIET_S = 300.0
"""Default limit of ``--wait-quiet`` in seconds."""


def add_options(group: Any) -> None:
    """Add the options to a group of pytest options."""
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
