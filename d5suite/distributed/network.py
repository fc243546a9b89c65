"""The network between hosts: interfaces, and the address by which others reach a rank.

Imports `d5suite.errors`, and psutil lazily.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from d5suite.errors import ConfigurationError, D5Error

VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl_tcp_if_include",
    "UCX_NET_DEVICES",
    "FI_TCP_IFACE",
    "HOROVOD_GLOO_IFACE",
    "DMLC_INTERFACE",
)
"""Variables that tell transports which interface to use: Gloo, NCCL, Open MPI, UCX, libfabric,
Horovod, MXNet's KVStore."""

ANYWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737), to ask for the default route."""


class Interface(NamedTuple):
    """An interface of this host, and its address."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


def interfaces() -> list[Interface]:
    """Return this host's interfaces that are up, with one IP address each, IPv4 before IPv6."""
    import psutil

    up = {name for name, each in psutil.net_if_stats().items() if each.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        own = [each.address for kind in (socket.AF_INET, socket.AF_INET6) for each in addresses if each.family == kind]
        if name in up and own:
            found.append(Interface(name, own[0]))
    return found


def require_interface(name: str, where: str) -> Interface:
    """Return the interface of this name.

    Raises
    ------
    ConfigurationError
        If this host has no such interface with an address.
    """
    found = interfaces()
    for each in found:
        if each.interface == name:
            return each
    raise ConfigurationError(
        f"host {socket.gethostname()} has no network interface {name!r} with an address",
        where=where,
        hint=f"It has {', '.join(map(str, found))}.",
    )


def networks(hosts: Sequence[str], variable: str) -> list[Interface]:
    """Return the interfaces by which this rank reaches the others.

    They are those that the variable names; else loopback, if all ranks share a host; else the
    interface with the address of the host's name. On many systems ``/etc/hosts`` gives this name a
    loopback address, such as 127.0.1.1: then the default route's interface, or the only one.

    Parameters
    ----------
    hosts : sequence of str
        Hosts by rank.
    variable : str
        The transport's variable, such as ``GLOO_SOCKET_IFNAME``: names separated by commas.

    Raises
    ------
    ConfigurationError
        If the variable names an interface that this host lacks.
    D5Error
        If no interface can be chosen.
    """
    names = [each.strip() for each in os.environ.get(variable, "").split(",") if each.strip()]
    if names:
        return [require_interface(name, variable) for name in names]
    if len(set(hosts)) == 1:
        return [Interface("lo", "127.0.0.1")]
    found = interfaces()
    host, of_name, route = socket.gethostname(), set[str](), ""
    with contextlib.suppress(OSError):
        of_name = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ANYWHERE, 9))  # sends nothing
        route = probe.getsockname()[0]
    others = [each for each in found if not _is_loopback(each.address)]
    for fits in (of_name, {route}, {each.address for each in others} if len(others) == 1 else set()):
        if chosen := [each for each in others if each.address in fits]:
            return chosen[:1]
    raise D5Error(
        f"host {host} has the address {' and '.join(sorted(of_name)) or 'of no interface'}, where no other host "
        f"reaches it; its interfaces are {', '.join(map(str, found))}",
        hint=f"Name one of them: --interface NAME, or {variable}=NAME.",
    )


def named_interface(variables: Sequence[str]) -> Mapping[str, str | None]:
    """Return the interface that a transport's variables name, and its address; None if unknown."""
    name = next((os.environ[each] for each in variables if os.environ.get(each)), None)
    address = next((each.address for each in interfaces() if each.interface == name), None)
    return {"interface": name, "address": address}


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
