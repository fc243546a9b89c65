"""From a step, a scheme and a network to its time.

Imports `d5suite.distributed`, `d5suite.models`, `d5suite.errors`, NumPy and its neighbours.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from d5suite.distributed.algorithms import ALGORITHMS
from d5suite.distributed.order import planned
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.distributed import SchemeSettings
from d5suite.models.algorithms import ALGORITHMS as MODELS
from d5suite.models.algorithms import algorithm_s
from d5suite.models.ceilings import Roof
from d5suite.models.communication import Link
from d5suite.models.roofline import level_of
from d5suite.simulation import symmetry
from d5suite.simulation.engine import MOST_MESSAGES, play
from d5suite.simulation.outcome import SimulatedStep, outcome
from d5suite.simulation.platform import ComputeNode, Interconnect
from d5suite.simulation.programs import Noted, Op, OpKind, Programs, expanded
from d5suite.simulation.schemes import ALIKE, NOT_SIMULATED, SIMULATED, noted
from d5suite.simulation.step import HELD, ComputeStep

MANY_STEPS = 30_000
"""Messages up to which several steps are simulated, so that the first one's start has passed."""

STEPS = 3
"""So many of them."""

COMPARED = 8
"""Kinds of ranks, of each of which another rank's program is compared, too."""

MANY_RANKS = 64
"""Simulated ranks from which on tasks that nothing comes between are one."""

SAMPLED = 5
"""Ranks whose messages are counted before all are."""


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    Attributes
    ----------
    step : ComputeStep
    settings : SchemeSettings
    algorithm : str
        Algorithm of collectives; a key of `d5suite.distributed.algorithms.ALGORITHMS`.
    ranks : int
    network : Interconnect
    early : bool
        Whether the backend hands out gradients during the backward pass.
    given : tuple of Noted, optional
        Programs by rank, of a trace, in the place of a scheme's.
    node : ComputeNode
        What ranks copy, add and compute with.
    staged : bool
        Whether gradients are copied to and from arrays that a communicator can move.
    """

    step: ComputeStep
    settings: SchemeSettings
    algorithm: str
    ranks: int
    network: Interconnect
    early: bool = True
    given: tuple[Noted, ...] | None = None
    node: ComputeNode = field(default_factory=ComputeNode)
    staged: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(str(rank // self.network.island) for rank in range(self.ranks))


def node_of(step: ComputeStep, roofs: Sequence[Roof], *, threads: int, cores: int) -> ComputeNode:
    """Return a node that copies arrays as fast as the memory level of gradients and weights.

    Parameters
    ----------
    step : ComputeStep
    roofs : sequence of Roof
        Roofs per rank; the lowest roof counts.
    threads : int
        Threads per rank.
    cores : int
        Cores per node; 0 if nothing waits for a core.
    """
    arrays = HELD * step.nbytes if step.parameters else math.inf  # of a trace they are not known: memory
    return ComputeNode(min(level_of(arrays, each).bytes_per_s for each in roofs), threads, cores)


def simulate(
    setup: Setup, factors: Sequence[float] | None = None, *, fold: bool = True, steps: int | None = None
) -> SimulatedStep:
    """Simulate a step.

    Parameters
    ----------
    setup : Setup
    factors : sequence of float, optional
        By rank: how many times as long its computing takes. Ranks are then simulated one by one.
    fold : bool
        Whether one of several ranks that are alike may stand for all.
    steps : int, optional
        How many steps are simulated.

    Raises
    ------
    D5Error
        If it cannot be simulated; the sentence says why.
    """
    check_algorithm(setup)
    if setup.given is not None and setup.ranks != len(setup.given) and _direct(setup.given):
        raise ConfigurationError(
            "this trace has messages outside of collectives, so its number of ranks cannot be changed"
        )
    if setup.ranks < 2:
        raise ConfigurationError(f"{setup.ranks} ranks send nothing: at least 2 are simulated")
    with _uncollected():
        programs = make_programs(setup, factors, fold=fold, steps=steps)
        return outcome(play(programs, setup.network, setup.node))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile.

    A million operations hold no cycles, and looking for them takes a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_algorithm(setup: Setup) -> None:
    """Raise `ConfigurationError` if there is no such algorithm."""
    if setup.algorithm not in ALGORITHMS:
        raise ConfigurationError(f"no algorithm {setup.algorithm!r}", hint=f"There are {', '.join(ALGORITHMS)}.")


def _direct(programs: Sequence[Noted]) -> bool:
    """Return whether programs have messages outside of collectives."""
    return any(op.kind == OpKind.ISEND for each in programs for ops in each.streams for op in ops)


def make_programs(
    setup: Setup, factors: Sequence[float] | None = None, *, fold: bool = True, steps: int | None = None
) -> Programs:
    """Return the programs of the ranks that must be simulated; see `simulate`."""
    size, hosts = setup.ranks, setup.hosts
    first = _noted(setup, 0, 1)
    calls = frozenset(op.label for ops in first.streams for op in ops if op.kind == OpKind.COLLECTIVE)
    found = None
    if (
        fold
        and factors is None
        and setup.given is None
        and setup.settings.name in ALIKE
        and setup.network.topology == "switch"
        and (not setup.node.cores or setup.node.cores >= min(size, setup.network.island))
    ):
        found = symmetry.alike(setup.algorithm, calls, size, hosts)
    members, parts = found or (list(range(size)), 1)
    leaders: dict[int, int] = {}
    for rank, kind in enumerate(members):
        leaders.setdefault(kind, rank)
    per_step = _messages(setup, first, parts, list(leaders.values())) if len(leaders) > 1 else 0
    if per_step > MOST_MESSAGES:
        raise D5Error(
            f"{setup.settings.name} by {setup.algorithm} of {size:,} ranks"
            + (f" on a {setup.network.topology}" if setup.network.topology != "switch" else "")
            + (" that are not alike" if factors is not None else "")
            + f" sends about {per_step:.2g} messages a step; at most {MOST_MESSAGES:.2g} are simulated",
            hint="Choose fewer ranks, or ranks that are alike: all_reduce by ring or halving_doubling on one switch.",
        )
    if steps is None:
        serves = setup.settings.name not in ALIKE and setup.settings.name != "parameter_server"
        steps = 1 if len(leaders) == 1 or (per_step * STEPS > MANY_STEPS and not serves) else STEPS
    numbers = {kind: number for number, kind in enumerate(leaders)}
    roles: dict[int, Noted] = {}

    def program(rank: int) -> Noted:
        role = _role(setup, rank)
        if role not in roles:
            own = _noted(setup, role, steps)
            roles[role] = _shortened(own) if len(leaders) > MANY_RANKS else own
        own = roles[role] if factors is None else _slowed(roles[role], factors[rank])
        made = expanded(own, rank, size, hosts, setup.algorithm, parts, bytes_per_s=setup.node.bytes_per_s)
        return Noted(symmetry.folded(made.streams, members, numbers), made.marks) if found else made

    made = [program(rank) for rank in leaders.values()]
    streams = [each.streams for each in made]
    if found:
        last = {kind: rank for rank, kind in enumerate(members)}
        for kind in list(leaders)[:COMPARED]:
            if program(last[kind]).streams != streams[numbers[kind]]:
                raise D5Error(
                    f"ranks {leaders[kind]} and {last[kind]} are not alike",
                    hint="A fault of d5suite; please report it.",
                )
        symmetry.check(streams)
    counts, marks = Counter(members), [each.marks for each in made]
    return Programs(streams, [counts[kind] for kind in leaders], [numbers[each] for each in members], parts > 1, marks)


def _role(setup: Setup, rank: int) -> int:
    """Return the rank whose program a rank has."""
    if setup.given is not None:
        return rank % len(setup.given)
    if setup.settings.name not in SIMULATED:
        raise ConfigurationError(f"the scheme {setup.settings.name} is not simulated", hint=NOT_SIMULATED)
    if getattr(setup.settings, "cross_barrier", False):
        raise ConfigurationError("cross_barrier is not simulated", hint="Steps are simulated with a barrier between.")
    return SIMULATED[setup.settings.name](setup.settings, rank)


def _noted(setup: Setup, rank: int, steps: int) -> Noted:
    if setup.given is not None:
        return setup.given[rank]
    return noted(
        setup.settings, setup.step, rank, setup.ranks, setup.hosts, steps=steps, early=setup.early,
        bytes_per_s=setup.node.bytes_per_s, staged=setup.staged, plan=functools.partial(_planned, setup),
        tell_s=_tell_s(setup),
    )  # fmt: skip


def _tell_s(setup: Setup) -> float:
    """Return the seconds of a small broadcast: the depth of its tree."""
    return setup.network.latency_s * (setup.ranks - 1).bit_length()


def _planned(setup: Setup, buckets: Sequence[tuple[int, tuple[str, ...]]]) -> list[int]:
    """Return in which order buckets go if the link always takes the first one that is ready.

    A bucket is ready once its last gradient is computed, and takes as long as the model of its
    algorithm says, a ring's where there is none, after the choice was told.
    """
    now = sum(each.seconds for each in setup.step.forward)
    known: dict[str, float] = {}
    for each in setup.step.backward:
        now += each.seconds
        known.update(dict.fromkeys(each.parameters, now))
    link = Link(setup.network.latency_s, 1 / setup.network.bytes_per_s)
    name = setup.algorithm if setup.algorithm in MODELS else "ring"
    return planned(
        [max(known.get(each, now) for each in names) for _, names in buckets],
        [_tell_s(setup) + algorithm_s(name, setup.ranks, nbytes, link) for nbytes, _ in buckets],
    )


def _messages(setup: Setup, first: Noted, parts: int, leaders: Sequence[int]) -> int:
    """Return the messages that these ranks send in a step, from a few of them."""
    chosen = sorted({leaders[place * (len(leaders) - 1) // (SAMPLED - 1)] for place in range(SAMPLED)})
    sent = []
    for rank in chosen:
        own = first if setup.given is None and _role(setup, rank) == 0 else _noted(setup, _role(setup, rank), 1)
        made = expanded(own, rank, setup.ranks, setup.hosts, setup.algorithm, parts)
        sent.append(sum(op.kind == OpKind.ISEND for ops in made.streams for op in ops))
    return math.ceil(len(leaders) * sum(sent[1:] or sent) / len(sent[1:] or sent))


def _shortened(program: Noted) -> Noted:
    """Make one task of several in a row, after none of which anything waits."""
    awaited = {op.ref for ops in program.streams for op in ops if op.kind == OpKind.AFTER and op.peer == 0}
    ends = {mark - 1 for mark in program.marks}
    made: list[Op] = []
    places: list[int] = []
    for index, op in enumerate(program.streams[0]):
        before = index - 1
        if (
            made and op.kind == OpKind.COMPUTE == made[-1].kind
            and before not in awaited and before not in ends
        ):  # fmt: skip
            made[-1] = made[-1]._replace(seconds=made[-1].seconds + op.seconds, label="computing")
        else:
            made.append(op._replace(ref=places[op.ref]) if op.kind == OpKind.WAIT else op)
        places.append(len(made) - 1)
    others = [
        [op._replace(ref=places[op.ref]) if op.kind == OpKind.AFTER and op.peer == 0 else op for op in ops]
        for ops in program.streams[1:]
    ]
    return Noted([made, *others], [places[mark - 1] + 1 for mark in program.marks])


def _slowed(program: Noted, factor: float) -> Noted:
    streams = [
        [op._replace(seconds=op.seconds * factor) if op.kind == OpKind.COMPUTE else op for op in ops]
        for ops in program.streams
    ]
    return Noted(streams, program.marks)
