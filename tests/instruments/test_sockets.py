"""The kernel's count of a process's TCP sockets."""

from __future__ import annotations

import socket
import sys

import pytest

from d5suite.instruments.sockets import moved, tcp_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts them")
def test_bytes_of_a_pair_of_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            before = tcp_bytes()
            if not before:
                pytest.skip("this system does not tell what a socket has moved")
            one.sendall(b"x" * 50_000)
            left = 50_000
            while left:
                left -= len(other.recv(left))
            found = moved(before, tcp_bytes())
    assert found == (50_000, 50_000)
