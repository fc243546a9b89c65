"""The roofline of nodes and steps, and how a step moves under it as a knob turns.

P = F / T is at most min(P_peak, AI · B), with AI = F / Q (Williams, Waterman and Patterson, CACM
2009). B is the bandwidth of the smallest level that holds what a node touches. Between two points
of a trajectory, Δlog P = Δlog AI + Δlog (Q / T) (Javed, Ibrahim and Lu, CCPE 2019). Imports its
neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from d5suite.models.ceilings import MemoryLevel, Roof

ABOVE = 1.05
"""Share of a roof above which a point contradicts it: two ways to a ceiling agree within 5%."""

ARITHMETIC = "arithmetic"
"""What bounds a node, if no level of memory does."""

MOSTLY = 2 / 3
"""Part of a change from which on one factor explains it."""


@dataclass(frozen=True)
class TimedWork:
    """Counted work and its time.

    Attributes
    ----------
    flops, bytes : float
        Operations, and compulsory traffic; 0 if nothing is counted.
    seconds : float
    """

    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations per byte; infinite if nothing is moved."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def flops_per_s(self) -> float:
        """Rate of arithmetic."""
        return self.flops / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Rate of counted traffic."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class Placed:
    """Work under a roof.

    Attributes
    ----------
    work : TimedWork
    level : str
        The smallest level of memory that holds what is touched; for a step, the level on whose
        traffic its nodes would spend the most time.
    bound : str
        `ARITHMETIC`, or the level.
    ideal_s : float
        Seconds at the roof.
    """

    work: TimedWork
    level: str
    bound: str
    ideal_s: float

    @property
    def share(self) -> float:
        """Part of the roof that is reached."""
        return self.ideal_s / self.work.seconds

    @property
    def above(self) -> bool:
        """Whether the work lies above its own roof."""
        return self.share > ABOVE


def place(work: TimedWork, roof: Roof) -> Placed:
    """Return one node's place under a roof."""
    level = level_of(work.bytes, roof)
    computing, moving = work.flops / roof.flops_per_s, work.bytes / level.bytes_per_s
    return Placed(work, level.name, ARITHMETIC if computing >= moving else level.name, max(computing, moving))


def level_of(size: float, roof: Roof) -> MemoryLevel:
    """Return the smallest level that holds so many bytes; the last one if none does."""
    return next((each for each in roof.levels if each.holds(size)), roof.levels[-1])


def place_all(nodes: Sequence[TimedWork], seconds: float, roof: Roof) -> Placed:
    """Return a step's place: its roof is what its nodes take one after the other, each at its own.

    Parameters
    ----------
    nodes : sequence of TimedWork
        At least one; their times do not matter.
    seconds : float
        Seconds of the step.
    roof : Roof
    """
    placed = [place(each, roof) for each in nodes]
    by_bound: dict[str, float] = {}
    by_level: dict[str, float] = {}
    for each in placed:
        by_bound[each.bound] = by_bound.get(each.bound, 0.0) + each.ideal_s
        by_level[each.level] = by_level.get(each.level, 0.0) + each.work.bytes
    total = TimedWork(sum(each.flops for each in nodes), sum(each.bytes for each in nodes), seconds)
    level, bound = (max(found, key=found.__getitem__) for found in (by_level, by_bound))
    return Placed(total, level, bound, sum(each.ideal_s for each in placed))


@dataclass(frozen=True)
class RooflineStep:
    """A step at one setting of the knobs.

    Attributes
    ----------
    threads, batch : int
    work : TimedWork
    disturbed : bool
        Whether something disturbed the machine while it was measured.
    image : int
        Height and width of an image; 0 without images.
    """

    threads: int
    batch: int
    work: TimedWork
    disturbed: bool = False
    image: int = 0


@dataclass(frozen=True)
class Segment:
    """From one point of a trajectory to the next.

    Attributes
    ----------
    kind : {"strong", "weak", "size", "image"}
        More threads for one batch; as many images for each of more threads; a larger batch for as
        many threads; larger images.
    first, second : RooflineStep
    """

    kind: str
    first: RooflineStep
    second: RooflineStep

    @property
    def knob(self) -> float:
        """By how much the knob turns."""
        if self.kind == "size":
            return self.second.batch / self.first.batch
        if self.kind == "image":
            return self.second.image / self.first.image
        return self.second.threads / self.first.threads

    @property
    def rate(self) -> float:
        """Ratio of the rates of arithmetic: intensity times bandwidth."""
        return self.second.work.flops_per_s / self.first.work.flops_per_s

    @property
    def intensity(self) -> float:
        """Ratio of the intensities: locality."""
        return self.second.work.intensity / self.first.work.intensity

    @property
    def bandwidth(self) -> float:
        """Ratio of the rates of counted traffic."""
        return self.second.work.bytes_per_s / self.first.work.bytes_per_s

    @property
    def disturbed(self) -> bool:
        """Whether nothing follows, because something disturbed the machine."""
        return self.first.disturbed or self.second.disturbed

    @property
    def serial_part(self) -> float | None:
        """Amdahl's serial part of strong scaling; None where the rate grows by all, or not at all.

        A speed-up s of n threads is 1 / (f + (1 - f) / n), of the first point's step.
        """
        if self.kind != "strong" or self.disturbed or not 1 < self.rate < self.knob:
            return None
        return (self.knob / self.rate - 1) / (self.knob - 1)

    @property
    def why(self) -> str:
        """Which factor explains the change: ``locality``, ``bandwidth``, or ``both``."""
        change = math.log(self.rate)
        if abs(change) < math.log(ABOVE):
            return "neither"
        part = math.log(self.intensity) / change
        return "locality" if part >= MOSTLY else "bandwidth" if part <= 1 - MOSTLY else "both"


TRAJECTORIES: Sequence[tuple[str, Callable[[RooflineStep], tuple[float, ...]], Callable[[RooflineStep], float]]] = (
    ("strong", lambda step: (step.batch, step.image), lambda step: step.threads),
    ("weak", lambda step: (step.batch / step.threads, step.image), lambda step: step.threads),
    ("size", lambda step: (step.threads, step.image), lambda step: step.batch),
    ("image", lambda step: (step.threads, step.batch), lambda step: step.image),
)
"""Kinds of trajectories: what their points have in common, and what orders them."""


def trajectories(steps: Sequence[RooflineStep]) -> list[list[Segment]]:
    """Return the trajectories through steps: by kind, apart.

    Each needs two points or more. A setting that occurs twice counts once, the faster one.
    """
    best: dict[tuple[int, int, int], RooflineStep] = {}
    for each in sorted(steps, key=lambda step: -step.work.seconds):
        best[each.threads, each.batch, each.image] = each
    found = []
    for kind, group, order in TRAJECTORIES:
        lines: dict[tuple[float, ...], list[RooflineStep]] = {}
        for each in best.values():
            lines.setdefault(group(each), []).append(each)
        for _, own in sorted(lines.items()):
            own.sort(key=order)
            if len(own) > 1:
                found.append([Segment(kind, one, other) for one, other in itertools.pairwise(own)])
    return found


def explained(segment: Segment) -> str:
    """Say how a step moves, and which factor explains it."""
    one, other = segment.first, segment.second
    if segment.kind == "image":
        turned = (
            f"images {one.image} → {other.image}, batch {one.batch}, {one.threads} thread{'s' * (one.threads != 1)}"
        )
    elif segment.kind == "size":
        turned = f"batch {one.batch} → {other.batch}, {one.threads} thread{'s' * (one.threads != 1)}"
    else:
        turned = f"threads {one.threads} → {other.threads}, batch {one.batch}"
        turned += f" → {other.batch}" if other.batch != one.batch else ""
    factors = f"intensity ×{segment.intensity:.3g} · bandwidth ×{segment.bandwidth:.3g}"
    text = f"{turned}: rate ×{segment.rate:.3g} = {factors}"
    if segment.disturbed:
        return f"{text}; disturbed, so nothing follows"
    if segment.kind == "weak":
        return f"{text}; efficiency {segment.rate / segment.knob:.0%}"
    if segment.kind in ("size", "image"):
        said = {
            "locality": "mostly locality: less traffic per operation", "bandwidth": "mostly a better rate of traffic",
            "both": "locality and rate", "neither": "the size hardly matters",
        }  # fmt: skip
        return f"{text}; {said[segment.why]}"
    if segment.serial_part is not None:
        return f"{text}; of ×{segment.knob:.3g} at most: serial part {segment.serial_part:.0%}"
    if segment.rate <= 1:
        return f"{text}; more threads do not help"
    return f"{text}; linear or better"
