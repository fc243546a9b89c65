"""The cluster that the tests of ``d5suite slurm`` share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.launch.slurm.cluster import Cluster, cluster, lacking


@pytest.fixture(scope="session")
def started() -> Iterator[Cluster]:
    """A cluster of two nodes for all tests of a session."""
    reason = lacking()
    if reason is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(cluster())
        except AssertionError as error:  # no fault of ours: this needs Slurm's daemons only
            pytest.skip(f"Slurm does not start here: {error}")
        yield found


@pytest.fixture
def slurm(started: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster with both nodes up and without jobs, before and after a test."""
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    started.revive()
    yield started
    started.revive()
