"""The cluster that the tests of ``d5suite slurm`` share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.launch.slurm.cluster import Cluster, cluster, lacking

EXPECTED = bool(os.environ.get("D5SUITE_HAS_SLURM"))
"""Whether continuous integration has installed Slurm: its tests are not skipped."""


def _cannot(reason: str) -> None:
    assert not EXPECTED, reason
    pytest.skip(reason)


@pytest.fixture(scope="session")
def started() -> Iterator[Cluster]:
    """A cluster of two nodes for all tests of a session."""
    reason = lacking()
    if reason is not None:
        _cannot(reason)
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(cluster())
        except AssertionError as error:  # no fault of ours: this needs Slurm's daemons only
            _cannot(f"Slurm does not start here: {error}")
        yield found


@pytest.fixture
def slurm(started: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster with both nodes up and without jobs, before and after a test."""
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    started.revive()
    yield started
    started.revive()
