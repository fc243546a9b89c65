"""What models say before a trial: which candidates come first, and which are left out.

=========  =========================================================================================
cores      as many threads as physical cores, and half of those: two threads of one share its units
layers     knobs are first whose operators dominate a step, or its update
roofline   what bounds a step says which knobs are first; and so many threads are left out that even
           at their roof a step takes longer than the default's (`d5suite.models.roofline`)
memory     the largest batch that fits is first; one is left out that cannot fit: activations grow
           with the batch (`d5suite.models.peak`)
=========  =========================================================================================

Imports `d5suite.models`, `d5suite.instruments` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from d5suite.instruments.threads import count_cores
from d5suite.levels.knobs import BATCH, TuningKnob
from d5suite.models.ceilings import Roof
from d5suite.models.peak import PeakModel
from d5suite.models.roofline import ABOVE, ARITHMETIC, TimedWork, place_all
from d5suite.tuning.space import Candidate, Space

DOMINATES = 0.3
"""Part of a step's time from which on operators dominate it."""

THREADS = "threads"


@dataclass(frozen=True)
class StepLayers:
    """What is known of a step's layers.

    Attributes
    ----------
    shares : mapping of str to float
        Parts of the step's time by ONNX operator, and by `d5suite.levels.knobs.UPDATE`.
    works : sequence of TimedWork
        Counted work of the nodes, or groups of nodes, that ran.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    works: Sequence[TimedWork] = ()


def by_layers(space: Space, shares: Mapping[str, float], bound: str = "") -> tuple[Space, list[str]]:
    """Put knobs first that are for what dominates a step; return their names, too.

    Parameters
    ----------
    space : Space
    shares : mapping of str to float
        As `StepLayers.shares`.
    bound : {"", "arithmetic", "memory"}
        What bounds the step, by its roofline.
    """
    parts = {
        knob.name: sum(shares.get(each, 0.0) for each in knob.layers) + DOMINATES * (bound in knob.bound)
        for knob in space.knobs
    }
    first = [name for name in sorted(parts, key=lambda name: -parts[name]) if parts[name] >= DOMINATES]
    known = {knob.name: knob for knob in space.knobs}
    ordered: dict[str, TuningKnob] = {}

    def add(knob: TuningKnob) -> None:
        for name in knob.when:  # what it depends on stays before it
            add(known[name])
        ordered.setdefault(knob.name, knob)

    for name in [*first, *known]:
        add(known[name])
    return Space(tuple(ordered.values())), first


def first_of_knobs(space: Space, names: Sequence[str]) -> list[Candidate]:
    """Return the default with the first other value of each knob, and with what it depends on."""
    found = []
    for name in names:
        values: dict[str, str] = {name: space.knobs[space.places[name]].values[1]}
        waiting = [name]
        while waiting:
            for other, wanted in space.knobs[space.places[waiting.pop()]].when.items():
                if other not in values and space.knobs[space.places[other]].default not in wanted:
                    values[other] = wanted[0]
                    waiting.append(other)
        found.append(space.complete(values))
    return found


def by_cores(space: Space, cores: int | None = None) -> list[Candidate]:
    """Return the default with one thread per physical core, and with half as many threads.

    Parameters
    ----------
    space : Space
    cores : int, optional
        Number of physical cores; by default, the number that this process may use.
    """
    cores = count_cores() if cores is None else cores
    known = space.knobs[space.places[THREADS]].values if THREADS in space.places else ()
    counts = [str(each) for each in dict.fromkeys((cores, cores // 2)) if str(each) in known[1:]]
    return [space.changed(space.default, threads=each) for each in counts]


def by_memory(space: Space, record: Mapping[str, Any], limit: float) -> tuple[list[Candidate], dict[str, str]]:
    """Return the largest batch that fits, and why others do not.

    Parameters
    ----------
    space : Space
        The default of its batch size is that of the record.
    record : mapping
        Record of the default, with ``memory``.
    limit : float
        Bytes that a worker may take.

    Notes
    -----
    The peak is that of the default plus the activations of the further images. Only those count
    that are alive at once by the network's definition, which an implementation can hardly undercut;
    so a batch that is left out is too large, and one that is not may be.
    """
    memory = record.get("memory") or {}
    peak, alive = memory.get("peak_bytes"), memory.get("alive_bytes") or memory.get("activations_bytes")
    if BATCH not in space.places or not peak or not alive:
        return [], {}
    knob = space.knobs[space.places[BATCH]]
    model = PeakModel(base_bytes=peak - alive, parameters=0.0, activations=1.0, node_bytes=0.0)
    needs = {value: model.bytes(0.0, alive * int(value) / int(knob.default), 0) for value in knob.values}
    ruled_out = {
        value: f"{needed / 2**30:.3g} GiB are needed by the memory model, and {limit / 2**30:.3g} GiB are allowed"
        for value, needed in needs.items() if needed > limit and value != knob.default
    }  # fmt: skip
    fitting = max((int(value) for value in knob.values if value not in ruled_out), default=0)
    return [space.changed(space.default, **{BATCH: str(fitting)})] * (str(fitting) != knob.default), ruled_out


def bound_by(layers: StepLayers, seconds: float, roof: Roof | str | None) -> str:
    """Return what bounds a step by its roofline: ``arithmetic`` or ``memory``; empty if unknown."""
    if not isinstance(roof, Roof) or not layers.works:
        return ""
    return ARITHMETIC if place_all(layers.works, seconds, roof).bound == ARITHMETIC else "memory"


def by_roofline(space: Space, layers: StepLayers, seconds: float, roofs: Mapping[int, Roof | str]) -> dict[str, str]:
    """Return why numbers of threads are left out: even at their roof they are slower.

    Parameters
    ----------
    space : Space
    layers : StepLayers
    seconds : float
        Seconds of a step with the default.
    roofs : mapping of int to Roof or str
        By number of threads.
    """
    if THREADS not in space.places or not layers.works:
        return {}
    found = {}
    for value in space.knobs[space.places[THREADS]].values[1:]:
        roof = roofs.get(int(value))
        if not isinstance(roof, Roof):
            continue
        ideal_s = place_all(layers.works, seconds, roof).ideal_s
        if ideal_s > ABOVE * seconds:
            found[value] = (
                f"at the roof of {value} thread{'s' * (value != '1')} a step takes {ideal_s:.3g} s, and the default "
                f"takes {seconds:.3g} s"
            )
    return found
