"""Limits of a container or a batch job on memory, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from d5suite.instruments import control_groups
from d5suite.instruments.environment import describe
from d5suite.instruments.memory import free_memory
from d5suite.pytest_plugin.settings import memory_of
from d5suite.report.runs import machine_of

M = 1 << 20
UNLIMITED = "9223372036854771712"

VERSIONS = {
    "version 2": (
        "0::/a/b",
        {
            "a/b": {"memory.max": "max", "memory.current": f"{500 * M}", "memory.stat": ""},
            "a": {
                "memory.max": f"{800 * M}", "memory.current": f"{500 * M}",
                "memory.stat": f"anon {200 * M}\ninactive_file {250 * M}\nactive_file {50 * M}",
            },
        },
    ),
    "version 1": (
        "9:cpu,cpuacct:/\n4:memory:/a/b\n0::/",
        {
            "memory/a/b": {
                "memory.limit_in_bytes": f"{800 * M}", "memory.usage_in_bytes": f"{500 * M}",
                "memory.stat": f"inactive_file 0\ntotal_inactive_file {300 * M}\ntotal_active_file 0",
            },
            "memory/a": {"memory.limit_in_bytes": UNLIMITED, "memory.usage_in_bytes": "0", "memory.stat": ""},
        },
    ),
    "version 1 in a container": (  # which sees its own group at the root, under the host's name
        "4:memory:/docker/1234",
        {
            "memory": {
                "memory.limit_in_bytes": f"{800 * M}", "memory.usage_in_bytes": f"{200 * M}", "memory.stat": "",
            },
        },
    ),
    "version 2, throttled": (
        "0::/",
        {"": {"memory.max": "max", "memory.high": f"{800 * M}", "memory.current": f"{200 * M}", "memory.stat": ""}},
    ),
}  # fmt: skip


@pytest.fixture(params=VERSIONS)
def limited(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 800 MiB, of which 200 MiB are used, on a machine of 24 GiB."""
    own, groups = VERSIONS[request.param]
    (tmp_path / "own").write_text(own)
    for folder, files in groups.items():
        (tmp_path / "fs" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / "fs" / folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=24576 * M, available=14336 * M))


@pytest.mark.usefixtures("limited")
def test_the_least_limit_counts_for_all_that_asks_for_memory() -> None:
    assert control_groups.memory_limit() == control_groups.total_memory() == 800 * M
    assert control_groups.available_memory() == 600 * M
    assert min(free_memory("cpu").values()) == 600 * M
    assert memory_of("90%") == 720 * M
    found = describe([])
    assert found["memory"]["total_bytes"] == 24576 * M and found["memory"]["limit_bytes"] == 800 * M
    assert machine_of(found)["memory"] == "1 GiB"  # rounded: another machine than the host


def test_a_machine_without_limits_counts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "missing")
    assert control_groups.memory_limit() is None
    assert control_groups.total_memory() == psutil.virtual_memory().total
    assert "limit_bytes" not in describe([])["memory"]
