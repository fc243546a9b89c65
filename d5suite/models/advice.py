"""Ranked plans for a network on a machine, with an interval, what bounds them, and what decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from d5suite.errors import ConfigurationError
from d5suite.models.machine import Calibration, Machine
from d5suite.models.memory import MemoryEstimate, memory_of
from d5suite.models.plan import Plan, plans
from d5suite.models.step_time import StepTime, bytes_between_devices, step_time
from d5suite.models.transformer import Transformer

USABLE = 0.9
"""Part of a device's memory that a plan may fill: the framework's base and its allocator take the
rest."""

STRETCH = 1.2
"""A figure of the machine is made this much worse to see whether the order depends on it."""

FIGURES = ("peak_flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth", "network_latency_s")
CALIBRATED = tuple(f"calibration.{each.name}" for each in fields(Calibration) if each.name != "error_90")
"""Figures of a machine that a step's time rests on."""

GOALS: Mapping[str, Callable[[Advice], float]] = {
    "time": lambda each: each.time.total,
    "memory": lambda each: each.memory.total,
    "cost": lambda each: each.time.total * each.plan.devices,
}
"""What plans are ranked by: seconds of a step, bytes on a device, device-seconds of a step."""


@dataclass(frozen=True)
class Advice:
    """A plan with its predictions.

    Attributes
    ----------
    plan : Plan
    time : StepTime
    memory : MemoryEstimate
    sent_bytes : float
        Bytes that a device sends in a step.
    interval_s : tuple of float
        Holds the step's time for nine in ten of the points that the calibration was judged on.
    """

    plan: Plan
    time: StepTime
    memory: MemoryEstimate
    sent_bytes: float
    interval_s: tuple[float, float]


def advise(
    network: Transformer,
    machine: Machine,
    *,
    nodes: int,
    batch: int,
    goal: str = "time",
    counts: Sequence[int] | None = None,
) -> list[Advice]:
    """Rank all plans that fit into memory, the best first.

    Parameters
    ----------
    network : Transformer
    machine : Machine
    nodes : int
        The number of nodes available.
    batch : int
        Sequences of a step.
    goal : {"time", "memory", "cost"}
        See `GOALS`.
    counts : sequence of int, optional
        Numbers of devices to try; by default all devices, and for ``"cost"`` fewer, too.

    Raises
    ------
    ConfigurationError
        If no plan divides the network and the batch, or none fits into memory; the message names
        the plan that needs the least memory.
    """
    devices = nodes * machine.devices_per_node
    if counts is None:
        counts = [devices] if goal != "cost" else [n for n in _counts(devices) if n <= devices]
    tried = [
        advice_on(network, machine, plan)
        for count in counts
        for plan in plans(network, devices=count, devices_per_node=machine.devices_per_node, batch=batch)
    ]
    if not tried:
        raise ConfigurationError(
            f"no plan divides {network.layers} layers, {network.heads} heads and a batch of {batch} among {devices} "
            "devices",
            hint="Choose a batch that is a multiple of the number of replicas.",
        )
    room = USABLE * machine.memory_bytes
    fitting = [each for each in tried if each.memory.total <= room]
    if not fitting:
        least = min(tried, key=GOALS["memory"])
        raise ConfigurationError(
            f"no plan fits into {room / 2**30:.3g} GiB a device: the least, {least.plan}, needs "
            f"{least.memory.total / 2**30:.3g} GiB",
            hint="Use more nodes, or a smaller batch.",
        )
    return sorted(fitting, key=lambda each: (GOALS[goal](each), each.time.total, each.memory.total))


def advice_on(network: Transformer, machine: Machine, plan: Plan) -> Advice:
    """Predict one plan."""
    time = step_time(network, machine, plan)
    error = machine.calibration.error_90
    return Advice(
        plan,
        time,
        memory_of(network, plan),
        bytes_between_devices(network, plan),
        (time.total / (1 + error), time.total * (1 + error)),
    )


def deciding_figure(network: Transformer, machine: Machine, first: Plan, second: Plan) -> tuple[str, bool]:
    """Return the figure on which the order of two plans depends most, and whether it can turn it.

    Each figure of the machine is made `STRETCH` times worse and better. The one that changes the
    ratio of the two times most decides.
    """

    def ratio(changed: Machine) -> float:
        return step_time(network, changed, first).total / step_time(network, changed, second).total

    changed = {name: _changed(machine, name) for name in (*FIGURES, *CALIBRATED)}
    changes = {name: [ratio(each) for each in machines] for name, machines in changed.items()}
    now = ratio(machine)
    most = max(changes, key=lambda name: max(abs(each - now) for each in changes[name]))
    return most, any((each < 1) != (now < 1) for each in changes[most])


def _changed(machine: Machine, name: str) -> list[Machine]:
    """Return the machine with one figure made `STRETCH` times larger, and smaller."""
    factors = (STRETCH, 1 / STRETCH)
    if name in FIGURES:
        return [replace(machine, **{name: getattr(machine, name) * factor}) for factor in factors]
    known, inner = machine.calibration, name.removeprefix("calibration.")
    calibrations = [replace(known, **{inner: getattr(known, inner) * factor}) for factor in factors]
    return [replace(machine, calibration=each) for each in calibrations]


def _counts(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
