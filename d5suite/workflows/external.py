"""A user's own program, in any language, coupled through a socket.

The rank starts the program and listens on a Unix socket, whose path is in `SOCKET`. Whatever the
program gives and asks for goes on through the declared coupling, of any kind. All numbers are
little-endian, 64 bits:

1. The program says, in one line per array and an empty line at the end, what it gives and takes:
   ``give COUPLING ARRAY DTYPE UNIT SIZE SIZE …``, ``take`` likewise.
2. To give: ``1``, the number of the coupling (in the order of its lines), the step, and the arrays.
   The answer is ``0``.
3. To take: ``2``, the number of the coupling, and a 0. The answer is the step, and the arrays; or
   ``-1`` if nothing follows.
4. At the end it closes the socket.

Imports the standard library, NumPy and its neighbours.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from d5suite.errors import ConfigurationError
from d5suite.workflows.base import Place, Program
from d5suite.workflows.couplings.base import Channel, CouplingError, Field, Fields
from d5suite.workflows.couplings.sockets import receive_into

SOCKET, STEPS, RANK, RANKS = "D5SUITE_SOCKET", "D5SUITE_STEPS", "D5SUITE_COMPONENT_RANK", "D5SUITE_COMPONENT_RANKS"
"""Environment variables of the program: the socket, its steps, its rank, and how many ranks."""

GIVE, TAKE = 1, 2

PATIENCE_S = 30.0
"""Seconds in which the program must connect."""


def declared(options: Mapping[str, object], what: str) -> dict[str, dict[str, Field]]:
    """Return the arrays that a declaration states, by coupling: ``[shape, dtype, unit]`` each."""
    stated = options.get(what, {})
    assert isinstance(stated, Mapping)
    return {
        coupling: {name: Field(tuple(shape), dtype, unit) for name, (shape, dtype, unit) in arrays.items()}
        for coupling, arrays in stated.items()
    }


class ExternalProgram(Program):
    """Starts a program for every run, and hands its arrays on."""

    name = "external"
    options: ClassVar[Mapping[str, object]] = {"executable": "", "arguments": [], "gives": {}, "takes": {}}

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._process: subprocess.Popen[bytes] | None = None
        self._names: list[str] = []

    def gives(self) -> Mapping[str, Fields]:
        return declared(self.place.options, "gives")

    def takes(self) -> Mapping[str, Fields]:
        return declared(self.place.options, "takes")

    def start(self) -> None:
        """See `Program.start`: every run starts the program anew."""

    def step(self, step: int) -> bool:
        raise AssertionError("the program makes its own steps")

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="d5suite-") as folder, socket.socket(socket.AF_UNIX) as server:
            path = Path(folder, "socket")
            server.bind(str(path))
            server.listen(1)
            server.settimeout(PATIENCE_S)
            own = {SOCKET: str(path), STEPS: str(self.place.steps), RANK: str(self.place.rank),
                   RANKS: str(self.place.ranks)}  # fmt: skip
            words = [str(self.option("executable")), *map(str, self.option("arguments"))]
            with subprocess.Popen(words, env={**os.environ, **own}, stdin=subprocess.DEVNULL) as process:
                try:
                    self._serve(server)
                    code = process.wait(PATIENCE_S)
                except BaseException as error:
                    process.kill()
                    if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
                        raise CouplingError(
                            f"it did not connect or end within {PATIENCE_S:g} s", where=words[0]
                        ) from error
                    raise
            if code:
                raise CouplingError(f"exited with status {code}", where=words[0])

    def _serve(self, server: socket.socket) -> None:
        with server.accept()[0] as stream:
            stream.settimeout(None)
            self._greet(stream)
            head = np.zeros(3, "<i8")
            steps = 0
            while receive_into(stream, head):
                what, number, step = head.tolist()
                if not 0 <= number < len(self._names) or what not in (GIVE, TAKE):
                    raise CouplingError(f"{what}, {number} is no request", where=str(self.option("executable")))
                if what == GIVE:
                    self._give(stream, self._names[number], step)
                    self.place.tell(steps)
                    steps += 1
                else:
                    self._take(stream, self._names[number])

    def _greet(self, stream: socket.socket) -> None:
        """Read what the program gives and takes, and compare it with the declaration."""
        said: dict[str, dict[str, dict[str, Field]]] = {"give": {}, "take": {}}
        text = bytearray()
        while not text.endswith(b"\n\n"):
            byte = stream.recv(1)
            if not byte:
                raise CouplingError("closed its socket at once", where=str(self.option("executable")))
            text += byte
        self._names = []
        for line in text.decode("utf-8", "replace").splitlines():
            if not line:
                continue
            what, coupling, name, dtype, unit, *sizes = line.split()
            said[what].setdefault(coupling, {})[name] = Field(tuple(map(int, sizes)), dtype, unit)
            if coupling not in self._names:
                self._names.append(coupling)
        for what, stated in (("give", self.gives()), ("take", self.takes())):
            for coupling, arrays in said[what].items():
                for name, each in arrays.items():
                    expected = stated.get(coupling, {}).get(name)
                    if expected != each:
                        raise ConfigurationError(
                            f"coupling {coupling!r}: {name!r} is {each} in the program, and {expected} in its "
                            "declaration",
                            where=str(self.option("executable")),
                        )

    def _give(self, stream: socket.socket, coupling: str, step: int) -> None:
        port = self.place.out[coupling]
        channel = port.ends[0].channel
        row = np.empty(channel.nbytes, np.uint8)
        if not receive_into(stream, row):
            raise CouplingError("closed its socket amid an array", where=str(self.option("executable")))
        port.put(step, channel.unpacked(row))
        stream.sendall(np.zeros(1, "<i8").tobytes())

    def _take(self, stream: socket.socket, coupling: str) -> None:
        port = self.place.into[coupling]
        found = port.get()
        stream.sendall(np.array([-1 if found is None else found.step], "<i8").tobytes())
        if found is not None:
            channel: Channel = port.ends[0].channel
            stream.sendall(channel.packed(found.arrays).tobytes())
