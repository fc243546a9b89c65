"""Which interface a rank uses, and what the record says of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from d5suite.distributed import network
from d5suite.distributed.communicators import problem
from d5suite.distributed.network import Interface, interfaces, networks
from d5suite.errors import ConfigurationError, D5Error
from d5suite.instruments.placement import describe_placement

LO, ETH0, ETH1 = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.7"), Interface("eth1", "192.168.3.7")
ROOT = Path(__file__).parents[2]
NAMED = "GLOO_SOCKET_IFNAME"


class Probe:
    """A socket on a host whose default route is that of an address."""

    address: str | None = None

    def __init__(self, *_: object) -> None:
        if self.address is None:
            raise OSError("there is no route")

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, _: object) -> None: ...

    def getsockname(self) -> tuple[str | None, int]:
        return self.address, 9


@pytest.mark.parametrize(
    ("has", "of_name", "route", "taken"),
    [
        ([LO, ETH0, ETH1], ["10.0.0.7"], ETH1.address, ETH0),
        ([LO, ETH0, ETH1], ["127.0.1.1"], ETH1.address, ETH1),  # as Debian's /etc/hosts has it
        ([LO, ETH0, ETH1], ["127.0.1.1", "192.168.3.7"], None, ETH1),
        ([LO, ETH0], ["127.0.1.1"], None, ETH0),
        ([LO, ETH0], [], None, ETH0),
        ([LO, ETH0, ETH1], ["127.0.1.1"], None, None),
        ([LO, ETH0, ETH1], [], "10.9.9.9", None),
        ([LO], ["127.0.1.1"], None, None),
    ],
)
def test_ranks_of_several_hosts_use_an_address_that_others_reach(
    has: list[Interface],
    of_name: list[str],
    route: str | None,
    taken: Interface | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(*_: object) -> list[Any]:
        if not of_name:
            raise socket.gaierror("unknown")
        return [(None, None, None, "", (address, 0)) for address in of_name]

    monkeypatch.delenv(NAMED, raising=False)
    monkeypatch.setattr(network, "interfaces", lambda: has)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(Probe, "address", route)
    if taken is not None:
        assert networks(["a", "b"], NAMED) == [taken]
        return
    with pytest.raises(
        D5Error, match=r"where no other host reaches it; its interfaces are lo \(127\.0\.0\.1\)"
    ) as info:
        networks(["a", "b"], NAMED)
    assert "--interface NAME" in str(info.value)


def test_a_variable_names_the_interface_and_one_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: [LO, ETH0, ETH1])
    monkeypatch.setenv(NAMED, "eth1, eth0")
    for hosts in (["a", "a"], ["a", "b"]):
        assert networks(hosts, NAMED) == [ETH1, ETH0]
    monkeypatch.setenv(NAMED, "eth7")
    with pytest.raises(
        ConfigurationError, match=r"has no network interface 'eth7'.*\n  It has lo \(127\.0\.0\.1\), eth0"
    ):
        networks(["a", "a"], NAMED)
    monkeypatch.delenv(NAMED)
    assert networks(["a", "a"], NAMED) == [LO]


def test_this_process_has_a_place() -> None:
    found = describe_placement("cpu", "lo")
    assert found["cpus"] and found["gpu"] is None and found["nic_numa_node"] is None
    if hasattr(os, "sched_getaffinity"):
        assert found["cpus"] == sorted(os.sched_getaffinity(0))


RANK = """
import sys, pathlib, psutil, numpy as np
from d5suite.distributed.communicators import open_communicator

rank, meeting = int(sys.argv[1]), pathlib.Path(sys.argv[2])
c = open_communicator("gloo", rank=rank, size=2, meeting=meeting, timeout_s=60)
array = np.ones(1000)
c.all_reduce(array)
connected = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"}
print(c.network["interface"], c.network["address"], *sorted(connected))
c.barrier()
c.close()
"""

OTHERS = [each for each in interfaces() if not each.address.startswith("127.") and ":" not in each.address]


@pytest.mark.skipif(problem("gloo") is not None, reason="gloo is not installed")
@pytest.mark.skipif(not OTHERS, reason="there is only the loopback interface")
def test_gloo_uses_the_chosen_interface(tmp_path: Path) -> None:
    chosen = OTHERS[0]
    environment = os.environ | {NAMED: chosen.interface, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for each in started:
        said, _ = each.communicate(timeout=300)
        assert each.returncode == 0 and said.split() == [chosen.interface, chosen.address, chosen.address]
