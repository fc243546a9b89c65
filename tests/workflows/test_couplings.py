"""Couplings: every message arrives once and in order, unless a policy discards it."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.distributed.communicators.threads import ThreadCommunicator, run
from d5suite.errors import ConfigurationError
from d5suite.levels.distributed import Communicator, Request
from d5suite.workflows.couplings import KINDS, problem
from d5suite.workflows.couplings.base import CouplingError, Field
from d5suite.workflows.ports import Joint, close_ports, end_ports, open_ports, pairs

FIELDS = {"value": Field((3,), "float64", "K"), "flag": Field((2, 2), "int8")}

WAYS = [
    pytest.param(kind, policy, marks=[pytest.mark.skip(reason=lacking)] if (lacking := problem(kind)) else [])
    for kind, of in KINDS.items()
    for policy in of.policies
    if of.threads
]


def arrays(number: int) -> dict[str, np.ndarray]:
    """Return the arrays of a message."""
    return {"value": np.arange(3.0) + number, "flag": np.full((2, 2), number % 100, np.int8)}


def passed(
    kind: str, policy: str, capacity: int, given_s: Sequence[float], taken_s: Sequence[float], *, writers: int = 1
) -> tuple[list[Any], list[Any]]:
    """Pass messages with pauses on both sides; return what writers counted and what was taken."""
    joint = Joint("numbers", "giving", "taking", kind, policy, capacity)
    places = {"giving": list(range(writers)), "taking": [writers]}
    fields = {("numbers", "giving"): FIELDS, ("numbers", "taking"): FIELDS}

    def work(of: Communicator) -> Any:
        out, into = open_ports([joint], places, fields, of, {"": Path(folder)})
        found: list[Any] = []
        for number, pause in enumerate(given_s if out else ()):
            time.sleep(pause)
            out["numbers"].put(10 * number, arrays(number))
        end_ports(out)
        if into:
            pauses = iter([*taken_s, *[0.0] * 1000])
            while (message := into["numbers"].get()) is not None:
                found.append(message)
                time.sleep(next(pauses))
        account = next(port.account() for port in (*out.values(), *into.values()))
        close_ports(out, into)
        return account, found

    with tempfile.TemporaryDirectory() as folder:
        *gave, took = run(writers + 1, work)
        left = list(Path(folder).rglob("*.h5"))
    assert not left
    return [account for account, _ in gave], took[1]


PAUSES = st.lists(st.sampled_from([0.0, 0.0, 0.002]), max_size=9)


@pytest.mark.parametrize(("kind", "policy"), WAYS)
@settings(max_examples=6)
@given(capacity=st.integers(1, 3), given_s=PAUSES, taken_s=PAUSES)
def test_nothing_is_lost_or_taken_twice(
    kind: str, policy: str, capacity: int, given_s: list[float], taken_s: list[float]
) -> None:
    (account,), messages = passed(kind, policy, capacity, given_s, taken_s)
    numbers = [each.number for each in messages]
    assert numbers == sorted(set(numbers)) and account.messages == len(given_s)
    assert len(numbers) == len(given_s) - account.dropped
    if policy == "block":
        assert numbers == list(range(len(given_s))) and account.dropped == 0
    if given_s:
        assert numbers[-1] == len(given_s) - 1  # the latest one is never discarded
    for each in messages:
        assert each.step == 10 * each.number
        assert all(np.array_equal(each.arrays[name], value) for name, value in arrays(each.number).items())


@pytest.mark.parametrize("kind", [k for k, of in KINDS.items() if of.threads and not problem(k)])
def test_many_writers_feed_one_reader(kind: str) -> None:
    accounts, messages = passed(kind, "block", 2, [0.0] * 4, [], writers=3)
    assert sum(each.messages for each in accounts) == len(messages) == 12
    for writer in range(3):
        assert [each.number for each in messages if each.source == writer] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [k for k, of in KINDS.items() if "drop_oldest" in of.policies and not problem(k)])
def test_a_late_reader_finds_the_latest(kind: str) -> None:
    joint = Joint("numbers", "giving", "taking", kind, "drop_oldest", 2)
    fields = {("numbers", "giving"): FIELDS, ("numbers", "taking"): FIELDS}

    def work(of: Communicator) -> Any:
        out, into = open_ports([joint], {"giving": [0], "taking": [1]}, fields, of, {"": Path(folder)})
        for number in range(6 if out else 0):
            out["numbers"].put(number, arrays(number))
        end_ports(out)
        of.barrier()
        found = []
        while into and (message := into["numbers"].get()) is not None:
            found.append(message.number)
        dropped = out["numbers"].account().dropped if out else 0
        close_ports(out, into)
        return found, dropped

    with tempfile.TemporaryDirectory() as folder:
        (_, dropped), (found, _) = run(2, work)
    assert found == [4, 5] and dropped == 4


def test_messages_need_no_buffers_of_their_transport(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with Gloo, a send ends when it is received."""

    class Received(Request):
        def __init__(self, of: ThreadCommunicator, to: int, message: tuple[int, int, bytes]) -> None:
            self.of, self.to, self.message = of, to, message

        def _wait(self) -> int:
            box = self.of._boxes[self.to]
            deadline = time.monotonic() + 5
            while any(each is self.message for each in box._messages):
                assert time.monotonic() < deadline, "nobody receives this"
                time.sleep(1e-4)
            return self.to

    def isend(self: ThreadCommunicator, array: np.ndarray, to: int, tag: int) -> Request:
        box, message = self._boxes[to], (self.rank, tag, array.tobytes())
        with box._arrived:
            box._messages.append(message)
            box._arrived.notify_all()
        return Received(self, to, message)

    joints = [Joint("there", "one", "other", "messages"), Joint("back", "other", "one", "messages")]
    fields = {(joint.name, of): FIELDS for joint in joints for of in ("one", "other")}

    def work(of: Communicator) -> list[int]:
        out, into = open_ports(joints, {"one": [0], "other": [1]}, fields, of, {"": tmp_path})
        found = []
        for number in range(5):
            if "there" in out:
                out["there"].put(number, arrays(number))
            elif (message := into["there"].get()) is not None:
                found.append(message.step)
        if "back" in out:
            out["back"].put(7, arrays(7))
        elif (message := into["back"].get()) is not None:
            found.append(message.step)
        end_ports(out)
        close_ports(out, into)
        return found

    monkeypatch.setattr(ThreadCommunicator, "_isend", isend)
    monkeypatch.setattr(ThreadCommunicator, "_send", lambda self, *given: isend(self, *given).wait())
    assert run(2, work) == [[7], [0, 1, 2, 3, 4]]


def test_a_wrong_array_and_a_full_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = Joint("numbers", "giving", "taking", "files")
    fields = {("numbers", "giving"): FIELDS, ("numbers", "taking"): FIELDS}

    def work(of: Communicator) -> Any:
        out, _ = open_ports([joint], {"giving": [0], "taking": [1]}, fields, of, {"": tmp_path})
        if not out:
            return None
        with pytest.raises(CouplingError, match=r"'numbers': 'value' is float32 \(3,\), and was declared as float64"):
            out["numbers"].put(0, {**arrays(0), "value": np.zeros(3, np.float32)})

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(CouplingError, match="coupling 'numbers' cannot move its data: No space left on device"):
            out["numbers"].put(0, arrays(0))
        return None

    run(2, work)


def test_ranks_that_cannot_be_paired_are_refused() -> None:
    joint = Joint("numbers", "giving", "taking", "memory")
    assert pairs(joint, 3, 1) == [(0, 0), (1, 0), (2, 0)] and pairs(joint, 2, 2) == [(0, 0), (1, 1)]
    with pytest.raises(ConfigurationError, match="'numbers' joins 2 ranks of giving to 3 of taking"):
        pairs(joint, 2, 3)
