"""A framework's own ways to train on several ranks, such as DistributedDataParallel, as schemes.

A `NativeScheme` describes one without importing the framework; `Backend.schemes` has them by name.
A `FrameworkScheme` is the adapter's code. It is made from a replica, as d5suite's own schemes are,
and its ranks connect at a `Meeting`.

Imports the standard library and `d5suite.levels` only.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from d5suite.levels.distributed import Buffers, Replica, SchemeSettings
from d5suite.levels.network import Native

Value = bool | int | float | str
"""Value of a knob."""


@dataclass(frozen=True)
class Knob:
    """A setting of a native scheme.

    Attributes
    ----------
    default : bool, int, float or str
        All values have its type; a whole number is accepted as a float, too.
    meaning : str
        What it sets, with its unit.
    least : float, optional
        The least accepted value.
    among : sequence of str
        The accepted values, if they are words.
    """

    default: Value
    meaning: str
    least: float | None = None
    among: Sequence[str] = ()

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value; None if nothing is."""
        kind = type(self.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            return f"{value!r} is not {'an' if kind is int else 'a'} {kind.__name__}"
        if self.among and value not in self.among:
            return f"{value!r} is not one of {', '.join(self.among)}"
        if self.least is not None and not (isinstance(value, int | float) and value >= self.least):
            return f"{value!r} is less than {self.least:g}"
        return None


@dataclass(frozen=True)
class NativeScheme:
    """A framework's own way to train on several ranks, described without importing the framework.

    Attributes
    ----------
    title : str
        The name as the framework's authors write it.
    synchronous : bool
        Whether each step equals one process's step on all ranks' batches together. An asynchronous
        scheme applies each rank's gradient by itself, to weights that the rank then takes. Its knob
        ``in_turn`` applies them rank after rank, so that `d5suite.validate.distributed.rules` can
        check them.
    transports : mapping of str to str
        What moves the gradients, by device. Other devices are not supported.
    sends : float or None
        Bytes that all ranks together send in a step, divided by the bytes of all parameters and by
        the number of ranks minus one. A collective counts as a ring's. None if they cannot be
        known.
    servers : bool
        Whether processes beside the ranks hold the parameters; `sends` is then divided by the
        number of ranks.
    requires : mapping of str to str
        Further modules that it needs, each with the command that installs it. The mode and a colon
        in front of a module limit it to that mode.
    knobs : mapping of str to Knob
        Its settings.
    rounds : mapping of str to float
        By ``KNOB=VALUE``: the relative error of the parameters after one step that this setting may
        cause by rounding what is sent; under ``""``, the error that any setting may cause.
    module : str
        The adapter's module that has it in ``SCHEMES``.
    quick : bool
        Whether its proof takes only seconds, so that the short form of the kit includes it.
    """

    title: str
    synchronous: bool
    transports: Mapping[str, str]
    sends: float | None
    servers: bool = False
    requires: Mapping[str, str] = field(default_factory=dict)
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    rounds: Mapping[str, float] = field(default_factory=dict)
    module: str = "native"
    quick: bool = True


@dataclass(frozen=True)
class NativeSettings(SchemeSettings):
    """Settings of a native scheme; `settings_type` adds its knobs as fields."""

    described: ClassVar[NativeScheme]

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, knob in self.described.knobs.items():
            problem = knob.problem(getattr(self, key))
            self._require(problem is None, f"{key} is {knob.meaning}: {problem}")

    @property
    def rounding(self) -> float:
        """The relative error of the parameters that these settings may cause by rounding."""
        chosen = ["", *(f"{key}={getattr(self, key)}" for key in self.described.knobs)]
        return max(self.described.rounds.get(each, 0.0) for each in chosen)

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float | None:
        """See `SchemeSettings.bytes_per_step`; None where it cannot be known."""
        sends, pairs = self.described.sends, size if self.described.servers and size > 1 else size - 1
        return None if sends is None else sends * elements * itemsize * pairs


def settings_type(name: str, described: NativeScheme) -> type[NativeSettings]:
    """Return the class of a native scheme's settings."""
    knobs = [(key, type(knob.default), field(default=knob.default)) for key, knob in described.knobs.items()]
    return make_dataclass(
        name, knobs, bases=(NativeSettings,), frozen=True, namespace={"name": name, "described": described}
    )


@dataclass
class Meeting:
    """What the ranks of a native scheme need to connect, before any of them computes.

    Attributes
    ----------
    rank, size, local_rank : int
    hosts : sequence of str
        The ranks' hosts, by rank.
    device : str
    threads : int
        This rank's thread budget.
    folder : Path or None
        A folder that all ranks see and that is removed afterwards; None if mpiexec was started by
        hand.
    gather : callable
        Takes this rank's value, JSON-able, and returns the values of all ranks. Collective.
    """

    rank: int
    size: int
    local_rank: int
    hosts: Sequence[str]
    device: str
    threads: int
    folder: Path | None
    gather: Callable[[Any], list[Any]]
    _held: list[socket.socket] = field(default_factory=list, repr=False)

    def port(self) -> int:
        """Reserve a port of this host for a server that starts later.

        The port stays bound, but does not listen, until this process ends. So the system gives it
        to no other process, but a server that sets ``SO_REUSEADDR``, as nearly all do, can bind it.
        """
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        self._held.append(held)
        return int(held.getsockname()[1])

    def address(self, rank: int) -> str:
        """Return the name under which this rank reaches another: loopback if all share a host."""
        return "127.0.0.1" if len(set(self.hosts)) == 1 else self.hosts[rank]

    def addresses(self) -> list[str]:
        """Reserve a port on each rank, and return ``host:port`` by rank. Collective."""
        ports = self.gather(self.port())
        return [f"{self.address(rank)}:{port}" for rank, port in enumerate(ports)]


class FrameworkScheme(ABC):
    """One rank's part of a framework's own scheme; a single rank never has one.

    The constructor takes ``(replica, settings)`` on every rank alike. A second scheme may be made
    on the same replica, which then has other weights and a new optimizer state, or on another
    replica, perhaps in another precision. The older scheme is not used after that.

    Attributes
    ----------
    replica : Replica
        Training starts from the replica's weights and the optimizer's settings.
    settings : NativeSettings
    """

    def __init__(self, replica: Replica, settings: NativeSettings) -> None:
        self.replica, self.settings = replica, settings

    @classmethod
    def meet(cls, meeting: Meeting, settings: NativeSettings) -> Callable[[], None]:
        """Connect this process to the other ranks, after `runtime.configure`, before any tensor.

        Collective. By default there is nothing to connect.

        Returns
        -------
        callable
            Closes the connection cleanly; every rank calls it at the end of its job. Everything
            that a rank has started ends when the rank ends, for whatever reason.
        """
        return lambda: None

    @abstractmethod
    def step(self, feed: Native) -> Native:
        """Make this rank's part of one step, and return the loss of this rank's batch.

        The learning rate is the trainer's current `learning_rate`. The mean gradient is clipped as
        the trainer's `optimizer` says.
        """

    def weights(self) -> Buffers:
        """Copy the parameters as `Replica.weights` does, by default the replica's. Collective."""
        return self.replica.weights()

    def finish(self) -> None:
        """Give the executor the trained parameters, the same on all ranks. Steps may follow.

        Collective. By default there is nothing to do: the framework trains the executor's own
        parameters.
        """
        return

    def bytes_per_step(self, elements: int, itemsize: int, size: int) -> float | None:
        """See `SchemeSettings.bytes_per_step`; an adapter overrides it if settings change it."""
        return self.settings.bytes_per_step(elements, itemsize, size)
