"""What schemes do in a step, noted by letting them run: none of them is written a second time.

A scheme gets a replica whose arrays are hollow and whose passes are noted as seconds, and a
communicator that notes messages and collectives. A collective that another thread makes waits for
what computed the gradients that the thread has read.

Imports `d5suite.distributed`, `d5suite.levels` and its neighbours.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from d5suite.distributed.schemes import make_scheme
from d5suite.distributed.schemes.all_reduce import AllReduce, Waiting
from d5suite.distributed.schemes.parameter_server import ParameterServerSettings
from d5suite.errors import ConfigurationError
from d5suite.levels.distributed import Buffers, Replica, Scheme, SchemeSettings
from d5suite.levels.network import Native
from d5suite.simulation.programs import Hollow, Noted, NotingCommunicator, Served, aside, move, touch
from d5suite.simulation.step import ComputeStep

SIMULATED: Mapping[str, Callable[[SchemeSettings, int], int]] = {
    "all_reduce": lambda settings, rank: 0,
    "model_averaging": lambda settings, rank: 0,
    "parameter_server": lambda settings, rank: min(rank, _servers(settings)),
    "gossip": lambda settings, rank: rank,
    "asynchronous": lambda settings, rank: min(rank, 1),
    "stale_synchronous": lambda settings, rank: min(rank, 1),
}
"""By scheme: the rank whose program a rank has, peers included."""

NOT_SIMULATED = f"Simulated are {', '.join(SIMULATED)}. Of compressing schemes, what compressing takes is not known."
"""Why other schemes are not."""

ALIKE = frozenset({"all_reduce", "model_averaging", "gossip"})
"""Schemes in which no rank is special."""


Plan = Callable[[Sequence[tuple[int, tuple[str, ...]]]], Sequence[int]]
"""Takes the bytes and names of buckets of gradients, and returns in which order they go."""


def _servers(settings: SchemeSettings) -> int:
    assert isinstance(settings, ParameterServerSettings)
    return settings.servers


class _Replica(Replica):
    """A replica that computes nothing: it notes what computing takes."""

    def __init__(self, step: ComputeStep, communicator: NotingCommunicator, staged: bool) -> None:
        self.names = tuple(step.parameters)
        self._of, self._to, self._staged = step, communicator, staged
        network = step.network or SimpleNamespace(statistics=(), parameters=self.names)
        self.trainer: Any = SimpleNamespace(
            step=self._whole_step, learning_rate=0.0, set_learning_rate=lambda rate: None,
            optimizer=SimpleNamespace(clip_norm=None, slots=()), executor=SimpleNamespace(network=network),
        )  # fmt: skip

    def _hollow(self, name: str, born: int = -1) -> Any:
        return Hollow(self._of.parameters[name], np.float32, born)

    def _pass(self, ready: Callable[[str, np.ndarray], None] | None = None) -> tuple[Native, Buffers]:
        for each in self._of.forward:
            self._to.compute(each.seconds, each.label)
        found: Buffers = {}
        for each in self._of.backward:
            born = self._to.compute(each.seconds, each.label)
            for name in each.parameters:
                found[name] = self._hollow(name, born)
                if ready is not None:
                    ready(name, found[name])
        return {"loss": 0.0}, found

    def gradients(self, feed: Native) -> tuple[Native, Buffers]:
        loss, found = self._pass()
        self._stage()
        return loss, {name: found[name] for name in self.names}

    def apply(self, gradients: Mapping[str, np.ndarray]) -> None:
        self._to.join()
        self._stage()
        self._to.compute(self._of.update_s, "update")

    def _stage(self) -> None:
        if self._staged:
            move(2 * self._of.nbytes)

    def _whole_step(self, feed: Native) -> Native:
        loss, _ = self._pass()
        self._to.join()
        self._to.compute(self._of.update_s, "update")
        return loss

    def buffers(self, values: Native) -> Buffers:
        return dict(values)

    def native(self, buffers: Mapping[str, np.ndarray]) -> Native:
        return dict(buffers)

    def weights(self) -> Buffers:
        move(2 * self._of.nbytes)
        return {name: self._hollow(name) for name in self.names}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self._to.join()
        move(2 * self._of.nbytes)


class _EarlyReplica(_Replica):
    """One that hands out gradients during the backward pass."""

    def gradients_early(self, feed: Native, ready: Callable[[str, np.ndarray], None]) -> tuple[Native, Buffers]:
        return self._pass(ready)


def noted(
    settings: SchemeSettings, step: ComputeStep, rank: int, size: int, hosts: Sequence[str], *, steps: int, early: bool,
    bytes_per_s: float = math.inf, staged: bool = False, plan: Plan | None = None, tell_s: float = 0.0,
) -> Noted:  # fmt: skip
    """Let a scheme make some steps on one rank, and return what it did.

    The first step, in which schemes learn about gradients, is left out.

    Parameters
    ----------
    settings, step, rank, size, hosts
        As of `d5suite.simulation.simulate.Setup`.
    steps : int
    early : bool
        Whether gradients come during the backward pass.
    bytes_per_s : float
        With which arrays are copied and added.
    staged : bool
        Whether gradients are copied to and from arrays that a communicator can move.
    plan : callable, optional
        Takes buckets of gradients, each the bytes and names of one, and returns in which order they
        go; for a scheme that chooses while it runs.
    tell_s : float
        Seconds in which the other ranks are told which bucket goes next.

    Raises
    ------
    ConfigurationError
        If the scheme is not simulated, or refuses its settings.
    """
    if settings.name not in SIMULATED:
        raise ConfigurationError(f"the scheme {settings.name} is not simulated", hint=NOT_SIMULATED)
    given = {name: value for name, value in settings.to_dict().items() if name != "name"}

    def note(rank: int, steps: int) -> tuple[Noted, Mapping[int, np.ndarray]]:
        """Return the program, and what the rank says by tag: headers and orders."""
        with aside():
            communicator = NotingCommunicator(rank, size, hosts, "native", bytes_per_s)
            communicator.heard = functools.lru_cache(lambda other: note(other, 1)[1])
            replica = (_EarlyReplica if early else _Replica)(step, communicator, staged)
            scheme = make_scheme(settings.name, replica, communicator, **given)
            if isinstance(scheme, AllReduce) and plan is not None:
                scheme.agree = _Planned(scheme, communicator, plan, tell_s)  # type: ignore[method-assign]
            return _run(scheme, communicator, steps), communicator.said

    return note(rank, steps)[0]


def _run(scheme: Scheme, communicator: NotingCommunicator, steps: int) -> Noted:
    if scheme.serves:
        communicator.left = steps * (communicator.size - 1)
        with contextlib.suppress(Served):
            scheme.serve()
        communicator.work()
        return Noted(communicator.streams, [])
    scheme.step({})
    scheme.restart()
    communicator.forget()
    marks = []
    for _ in range(steps):
        scheme.step({})
        communicator.join()
        marks.append(len(communicator.streams[0]))
    return Noted(communicator.streams, marks)


class _Planned:
    """Chooses buckets as a plan says; the message that tells so is noted as computing.

    So ranks stay alike, and need not be simulated one by one.
    """

    def __init__(self, scheme: AllReduce, communicator: NotingCommunicator, plan: Plan, tell_s: float) -> None:
        self._scheme, self._to, self._plan, self._tell_s = scheme, communicator, plan, tell_s
        self._left: list[int] = []

    def __call__(self, waiting: Waiting) -> list[int]:
        if not self._left:
            self._left = list(self._plan([(each.nbytes, each.names) for each in self._scheme.buckets]))
        number = self._left.pop(0)
        for each in waiting.take(number).values():
            touch(each)
        self._to.spend(self._tell_s, "choose")
        return [number] * len(self._scheme.buckets[number].parts)
