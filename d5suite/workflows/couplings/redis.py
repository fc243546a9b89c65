"""Lists of a Redis server, which the first writer starts in the common folder.

It listens on a Unix socket there, and nowhere else, and saves nothing. So it joins ranks of one
host, as the folder does. The server ends when its writers have ended, or its parent has.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from d5suite.workflows.couplings import base
from d5suite.workflows.couplings.base import END, HEADER, Channel, CouplingError

START_S = 10.0
"""Seconds in which the server must start."""


def _connected(channel: Channel) -> Any:
    redis = importlib.import_module("redis")

    client = redis.Redis(unix_socket_path=str(channel.folder / f"{channel.name}.redis"))
    deadline = time.monotonic() + START_S
    while True:
        try:
            client.ping()
            return client
        except redis.ConnectionError as error:
            if time.monotonic() > deadline:
                raise CouplingError(f"coupling {channel.coupling!r}: Redis does not answer: {error}") from error
            time.sleep(0.02)


class Writer(base.Writer):
    """The end that starts a server and pushes."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._server = subprocess.Popen(
            [shutil.which("redis-server") or "redis-server", "--port", "0", "--save", "", "--appendonly", "no",
             "--unixsocket", str(channel.folder / f"{channel.name}.redis"), "--unixsocketperm", "700",
             "--dir", str(channel.folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._client = _connected(channel)

    def is_full(self) -> bool:
        return int(self._client.llen("queue")) >= self.capacity

    def make_room(self) -> int:
        dropped = 0
        while self.is_full():
            dropped += self._client.lpop("queue") is not None
        return dropped

    def write(self, header: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        self._client.rpush("queue", header.tobytes() + self.channel.packed(arrays).tobytes())

    def end(self) -> None:
        self._client.rpush("queue", np.full(1, END, HEADER).tobytes())

    def finish(self) -> None:
        self._client.blpop("over", START_S)
        self._client.close()
        self._server.terminate()
        self._server.wait()


class Reader(base.Reader):
    """The end that pops."""

    def connect(self) -> None:
        self._client = _connected(self.channel)

    def is_ready(self) -> bool:
        return bool(self._client.llen("queue"))

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        found = self._client.lpop("queue")
        if found is None:
            return None
        row = np.frombuffer(bytearray(found), np.uint8)
        header = row[: HEADER.itemsize].view(HEADER)
        if header["number"][0] == END:
            self.ended = True
            self._client.rpush("over", b"1")  # before any writer of this rank waits for its own reader
            return None
        return header, self.channel.unpacked(row[HEADER.itemsize :])

    def finish(self) -> None:
        self._client.close()
