"""Bytes that this process has sent and received through TCP, as the kernel counts them.

A framework's own communication cannot be counted by d5suite, but its sockets can (Linux, tcp(7)).
What goes through shared memory, a GPU's links or InfiniBand is not in these figures.

Imports the standard library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from typing import NamedTuple

_ACKED, _RECEIVED, _SENT, _LENGTH = 120, 128, 200, 256
"""Offsets in the kernel's ``struct tcp_info`` (linux/tcp.h); ``bytes_sent`` is there since Linux
4.19, the others since 4.1."""


class TcpBytes(NamedTuple):
    """Bytes of one TCP socket, or the difference of two readings."""

    sent: int
    received: int


def tcp_bytes() -> dict[int, TcpBytes]:
    """Return what each open TCP socket of this process has moved, by inode; empty if unknown."""
    found: dict[int, TcpBytes] = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return {}
    for number in numbers:
        with contextlib.suppress(OSError, struct.error):
            state = os.fstat(number)
            if stat.S_ISSOCK(state.st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
                        (received,) = struct.unpack_from("Q", info, _RECEIVED)
                        (sent,) = struct.unpack_from("Q", info, _SENT if len(info) >= _SENT + 8 else _ACKED)
                        found[state.st_ino] = TcpBytes(sent, received)
    return found


def moved(before: dict[int, TcpBytes], after: dict[int, TcpBytes]) -> TcpBytes:
    """Return what was moved between two readings; sockets closed meanwhile are left out."""
    none = TcpBytes(0, 0)
    sent = sum(each.sent - before.get(inode, none).sent for inode, each in after.items())
    received = sum(each.received - before.get(inode, none).received for inode, each in after.items())
    return TcpBytes(sent, received)
