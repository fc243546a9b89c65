"""TCP sockets, between hosts, too.

The writer listens, and a file in the common folder tells the reader where; it also holds a secret,
without which nobody is served. The writer keeps its messages in a queue, where it can discard them,
and a thread sends one whenever the reader asks for it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from d5suite.files import write_bytes
from d5suite.workflows.couplings import base
from d5suite.workflows.couplings.base import END, HEADER, Channel, CouplingError

ASK = b"?"
"""The reader's request for one message."""

TIMEOUT_S = 60.0
"""Seconds in which the ends must find each other."""


def _place(channel: Channel) -> Path:
    return channel.folder / f"{channel.name}.address"


def receive_into(stream: socket.socket, array: np.ndarray) -> bool:
    """Fill an array of one axis; False if the other side has closed."""
    row = array.view(np.uint8)
    while len(row):
        count = stream.recv_into(row.data)
        if not count:
            return False
        row = row[count:]
    return True


class Writer(base.Writer):
    """The end that listens."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._queue: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._changed = threading.Condition()
        self._over = self._gone = False
        alone = len(set(channel.communicator.hosts)) == 1
        self._server = socket.create_server(("127.0.0.1" if alone else "", 0))
        self._secret = secrets.token_hex(16)
        host = "127.0.0.1" if alone else socket.gethostname()
        address = {"host": host, "port": self._server.getsockname()[1], "secret": self._secret}
        write_bytes(_place(channel), json.dumps(address).encode())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream = self._server.accept()[0]
                with stream:
                    given = np.zeros(len(self._secret), np.uint8)
                    stream.settimeout(TIMEOUT_S)
                    if not receive_into(stream, given) or not hmac.compare_digest(
                        given.tobytes(), self._secret.encode()
                    ):
                        continue
                    stream.settimeout(None)
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._answer(stream)
                    break
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _answer(self, stream: socket.socket) -> None:
        while stream.recv(1):
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._over)
                header, row = self._queue.popleft() if self._queue else (np.full(1, END, HEADER), np.empty(0, np.uint8))
                self._changed.notify_all()
            stream.sendall(header.tobytes())
            stream.sendall(row.data)
            if header["number"][0] == END:
                break

    def await_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < self.capacity or self._gone)
        if self._gone:
            raise CouplingError(f"coupling {self.channel.coupling!r}: the reader has closed its connection")

    def make_room(self) -> int:
        with self._changed:
            more = max(0, len(self._queue) - self.capacity + 1)
            for _ in range(more):
                self._queue.popleft()
        return more

    def write(self, header: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        row = self.channel.packed(arrays)
        with self._changed:
            self._queue.append((header, row))
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def finish(self) -> None:
        self._thread.join(TIMEOUT_S)
        self._server.close()


class Reader(base.Reader):
    """The end that connects and asks."""

    def connect(self) -> None:
        address = json.loads(_place(self.channel).read_text())
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._stream = socket.create_connection((address["host"], address["port"]), timeout=TIMEOUT_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise CouplingError(
                        f"coupling {self.channel.coupling!r}: no connection to {address['host']}: {error}"
                    ) from error
                time.sleep(0.1)
        self._stream.settimeout(None)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.sendall(address["secret"].encode())
        self._asked = False

    def _ask(self) -> None:
        if not self._asked:
            self._stream.sendall(ASK)
            self._asked = True

    def await_message(self) -> None:
        self._ask()
        select.select([self._stream], [], [])

    def is_ready(self) -> bool:
        self._ask()
        return bool(select.select([self._stream], [], [], 0)[0])

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        header, row = np.empty(1, HEADER), np.empty(self.channel.nbytes, np.uint8)
        self._asked = False
        if not receive_into(self._stream, header):
            raise CouplingError(f"coupling {self.channel.coupling!r}: the writer has closed its connection")
        if header["number"][0] == END:
            self.ended = True
            return None
        if not receive_into(self._stream, row):
            raise CouplingError(f"coupling {self.channel.coupling!r}: the writer has closed its connection")
        return header, self.channel.unpacked(row)

    def finish(self) -> None:
        self._stream.close()
