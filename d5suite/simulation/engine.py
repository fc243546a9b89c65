"""SimGrid plays programs: compiled once, run in a process of its own with a limit of memory.

SimGrid is Debian's (``libsimgrid-dev``); its library is C++, and `engine.cc` is the program that
uses it. Found when it is needed. Imports NumPy, `d5suite.errors`, `d5suite.files`, `platform` and
`programs`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d5suite.errors import D5Error
from d5suite.files import atomic_path, made_once
from d5suite.levels.distributed import ANY
from d5suite.simulation.platform import ComputeNode, Interconnect, platform_xml
from d5suite.simulation.programs import LAST, OpKind, Programs

SOURCE = Path(__file__).with_name("engine.cc")

FLAGS = ("-O2", "-std=c++17")

OPTIONS = (
    "--cfg=network/model:CM02", "--cfg=network/TCP-gamma:0", "--cfg=network/crosstraffic:0",
    "--cfg=contexts/stack-size:32", "--cfg=contexts/guard-size:0", "--log=root.threshold:critical",
)  # fmt: skip
"""A message takes α + bytes · β and shares links max-min fairly; nothing is added for TCP."""

INSTALL = "On Debian and Ubuntu: apt-get install libsimgrid-dev g++"

FOLDERS = ("/usr/include", "/usr/local/include")
"""Where SimGrid's headers are, beside ``CPLUS_INCLUDE_PATH``."""

LIMIT_S = 600.0
"""Seconds after which a simulation is ended."""

MEMORY_BYTES = 4 << 30
"""Limit of the engine's memory."""

MOST_MESSAGES = 3_000_000
"""Messages of a simulation: about two minutes, and 2 GB."""

OP = np.dtype([(name, np.int64) for name in ("kind", "peer", "mailbox", "bytes", "ref")] + [("seconds", np.float64)])
TIMES = np.dtype([(name, np.float64) for name in ("begin", "end", "started", "finished")])


def problem() -> str | None:
    """Return what is missing to simulate, or None."""
    if shutil.which(_compiler()) is None:
        return f"the simulation needs a C++ compiler, {_compiler()}, which is not installed"
    folders = [*filter(None, os.environ.get("CPLUS_INCLUDE_PATH", "").split(":")), *FOLDERS]
    if not any(Path(folder, "simgrid/s4u.hpp").exists() for folder in folders):
        return "the simulation needs SimGrid, which is not installed"
    return None


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _program() -> Path:
    """Compile the engine, or find it in the cache."""
    if missing := problem():
        raise D5Error(missing, hint=INSTALL)
    version = subprocess.run(
        [_compiler(), *FLAGS, "-E", "-dM", "-include", "simgrid/config.h", "-x", "c++", os.devnull],
        capture_output=True, text=True, errors="replace",
    ).stdout  # fmt: skip
    known = "\n".join(line for line in version.splitlines() if "SIMGRID_VERSION" in line or "__VERSION__" in line)
    key = hashlib.sha256(SOURCE.read_bytes() + known.encode()).hexdigest()[:16]

    def make(target: Path) -> None:
        with atomic_path(target) as partial:
            done = subprocess.run(
                [_compiler(), *FLAGS, "-o", str(partial), str(SOURCE), "-lsimgrid"],
                capture_output=True, text=True, errors="replace",
            )  # fmt: skip
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                raise D5Error(
                    f"the simulation's engine does not compile: {(lines or ['no message'])[0]}",
                    where=str(SOURCE),
                    hint="It is written for SimGrid 3.25 and later. " + INSTALL,
                )
        os.chmod(target, 0o700)

    return made_once(f"simulation/engine-{key}", make)


@dataclass(frozen=True)
class Played:
    """When everything happened.

    Attributes
    ----------
    programs : Programs
    network : Interconnect
    ops : list of list of numpy.ndarray
        By rank and stream: the operations as the engine got them (`OP`).
    times : list of list of numpy.ndarray
        By rank and stream: seconds (`TIMES`) at which each operation began and ended and, where it
        waited for a message, at which the message started and finished.
    """

    programs: Programs
    network: Interconnect
    ops: list[list[np.ndarray]]
    times: list[list[np.ndarray]]


def play(programs: Programs, network: Interconnect, node: ComputeNode | None = None) -> Played:
    """Play programs on a network, whose nodes have cores without limit if none are given.

    Raises
    ------
    D5Error
        If SimGrid is missing, there are too many messages, or the engine fails.
    """
    count = programs.messages
    if count > MOST_MESSAGES:
        raise D5Error(
            f"{count:,} messages are too many to simulate one by one: at most {MOST_MESSAGES:,}",
            hint="Choose fewer ranks, or a scheme and algorithm in which ranks are alike, such as all_reduce by "
            "halving_doubling on one switch.",
        )
    program = _program()
    ops, boxes = _packed(programs)
    node = node or ComputeNode()
    homes, cores = node.hosts(len(programs.members), network.island)
    if len(ops) < len(homes):  # each kind of ranks has cores of its own: ranks that share them are not folded
        homes = list(range(len(ops)))
    with tempfile.TemporaryDirectory(prefix="d5suite-simulation-") as name:
        folder = Path(name)
        used = {(rank, op.peer) for rank, own in enumerate(programs.streams) for s in own for op in s
                if op.kind == OpKind.ISEND} if network.topology == "switch" else set()  # fmt: skip
        platform = platform_xml(network, len(programs.streams), used, [cores] * (max(homes) + 1) if node.cores else ())
        (folder / "platform.xml").write_text(platform)
        with (folder / "programs").open("wb") as file:
            file.write(struct.pack("=2q", len(ops), boxes))
            for rank, streams in enumerate(ops):
                file.write(struct.pack("=3q", rank, homes[rank], len(streams)))
                for each in streams:
                    file.write(struct.pack("=q", len(each)))
                    file.write(each.tobytes())
        files = [str(folder / name) for name in ("platform.xml", "programs", "times")]
        threads = node.threads if node.cores else 0
        busy = [repr(each) for each in (network.busy_s, network.busy_s_per_byte)]
        command = [str(program), *files, str(threads), *busy, *OPTIONS]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, preexec_fn=_limited
            )
        except subprocess.TimeoutExpired:
            raise D5Error(
                f"the simulation of {count:,} messages takes longer than {LIMIT_S:.0f} s", hint="Choose fewer ranks."
            ) from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise D5Error(
                "ranks wait for each other for ever" if done.returncode == 4
                else f"the simulation's engine ended with status {done.returncode}: {said}",
                hint="Choose fewer ranks, if its memory was not enough." if done.returncode < 0 else None,
            )  # fmt: skip
        flat = np.fromfile(folder / "times", TIMES)
    times: list[list[np.ndarray]] = []
    start = 0
    for streams in ops:
        times.append([])
        for each in streams:
            times[-1].append(flat[start : start + len(each)])
            start += len(each)
    return Played(programs, network, ops, times)


def _limited() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _packed(programs: Programs) -> tuple[list[list[np.ndarray]], int]:
    """Return operations as numbers; each pair of ranks and tag has a mailbox.

    A receive from anyone has a mailbox by receiver and tag; answers to whoever sent last have one
    for each rank, numbered one after the other.
    """
    size = len(programs.streams)
    sends, messages = (
        int(OpKind.ISEND),
        (int(OpKind.ISEND), int(OpKind.IRECV)),
    )  # an enumeration's members compare slowly
    anyone = {(rank, op.tag) for rank, own in enumerate(programs.streams) for ops in own for op in ops
              if op.kind == OpKind.IRECV and op.peer == ANY}  # fmt: skip
    numbers: dict[tuple[int, int, int], int] = {}
    blocks: dict[tuple[int, int, bool], int] = {}
    free = 0
    for rank, own in enumerate(programs.streams):
        for op in (op for ops in own for op in ops):
            key = (rank, op.tag, op.kind == OpKind.ISEND)
            if op.peer == LAST and op.kind in (OpKind.ISEND, OpKind.IRECV) and key not in blocks:
                blocks[key] = free
                for other in range(size):
                    numbers[(rank, other, op.tag) if key[2] else (other, rank, op.tag)] = free + other
                free += size
    packed: list[list[np.ndarray]] = []
    for rank, own in enumerate(programs.streams):
        packed.append([])
        for ops in own:
            rows = []
            for op in ops:
                box = 0
                if op.kind in messages:
                    if op.peer == LAST:
                        box = blocks[rank, op.tag, op.kind == sends]
                    else:
                        source, to = (rank, op.peer) if op.kind == sends else (op.peer, rank)
                        key3 = (ANY if (to, op.tag) in anyone else source, to, op.tag)
                        if key3 not in numbers:
                            numbers[key3] = free
                            free += 1
                        box = numbers[key3]
                rows.append((op.kind, op.peer, box, op.nbytes, op.ref, op.seconds))
            packed[-1].append(np.array(rows, OP))
    return packed, free
