"""Plans for the training of a network whose steps were measured, with an interval and what decides.

A plan divides a batch among replicas, which sum their gradients, into micro-batches, and a replica
into the stages of a pipeline. ZeRO divides the optimizer's state, gradients and parameters among
replicas (Rajbhandari et al., arXiv:1910.02054); recomputation keeps segments' ends only
(arXiv:1604.06174); m micro-batches and p stages take m + p - 1 turns of the slowest stage
(arXiv:1811.06965). Imports its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from d5suite.errors import ConfigurationError
from d5suite.models.advice import STRETCH, USABLE
from d5suite.models.ceilings import MemoryLevel
from d5suite.models.communication import Link, all_reduce_counts, all_reduce_s, exposed_s
from d5suite.models.node_time import NodeTimes, NodeWork, far_level
from d5suite.models.peak import PeakModel
from d5suite.models.pipeline import MOST_STAGES, balanced
from d5suite.models.plan import STAGES, divisors
from d5suite.models.site import Site


class GraphNode(NamedTuple):
    """A node of the graph in a training step.

    Attributes
    ----------
    works : sequence of NodeWork
        Forward and backward; none of a view.
    parameters : int
        Trainable values that it is the first to read.
    kept_bytes, crossing_bytes : float
        See `d5suite.network.held.Passed`.
    """

    works: Sequence[NodeWork]
    parameters: int
    kept_bytes: float
    crossing_bytes: float


@dataclass(frozen=True)
class BatchCounts:
    """What is counted of a training step of one micro-batch.

    Attributes
    ----------
    nodes : sequence of NodeWork
        Forward and backward.
    alive_bytes, recomputed_bytes : float
        See `d5suite.network.held.Held`.
    segments : int
        Number of segments for recomputation.
    graph : sequence of GraphNode
        In the order in which they run.
    """

    nodes: Sequence[NodeWork]
    alive_bytes: float
    recomputed_bytes: float
    segments: int
    graph: Sequence[GraphNode] = ()


class StateBytes(NamedTuple):
    """Bytes per parameter."""

    weight: float
    gradient: float
    optimizer: float

    @property
    def updating(self) -> float:
        """Bytes that an update moves: it reads all, and writes weights and state."""
        return 2 * self.weight + self.gradient + 2 * self.optimizer

    def saved(self, stage: int, replicas: int) -> float:
        """Return the bytes per parameter that a stage of ZeRO saves on each of some replicas."""
        divided = (self.optimizer, self.gradient, self.weight)[:stage]
        return sum(divided) * (1 - 1 / replicas)

    def held(self, stage: int, replicas: int) -> float:
        """Return the bytes per parameter that a replica holds at a ZeRO stage."""
        return sum(self) - self.saved(stage, replicas)


@dataclass(frozen=True)
class NetworkModel:
    """All that predicts a network's plans.

    Attributes
    ----------
    parameters : int
    node_count : int
    state : StateBytes
    counts : callable
        Returns the `BatchCounts` of a micro-batch.
    times : NodeTimes
    peaks : PeakModel
    """

    parameters: int
    node_count: int
    state: StateBytes
    counts: Callable[[int], BatchCounts]
    times: NodeTimes
    peaks: PeakModel


@dataclass(frozen=True)
class NetworkPlan:
    """A way to train.

    Attributes
    ----------
    data : int
        Replicas.
    batch, micro_batch : int
        Images of a step, and of one pass on a replica.
    recompute : bool
    sharding : int
        Stage of ZeRO.
    pipeline : int
        Stages of a replica, one on each device.
    """

    data: int
    batch: int
    micro_batch: int
    recompute: bool = False
    sharding: int = 0
    pipeline: int = 1

    @property
    def passes(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def devices(self) -> int:
        """Devices of the plan."""
        return self.data * self.pipeline


class PlanTime(NamedTuple):
    """Seconds of a step by part; ``bubble`` is all that a pipeline adds to an even division."""

    computing: float
    recomputing: float
    gradients: float
    update: float
    fixed: float
    bubble: float = 0.0

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(self._fields, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class NetworkAdvice:
    """A plan with its predictions.

    Attributes
    ----------
    plan : NetworkPlan
    time : PlanTime
    seconds : float
        Seconds of a step in which nothing hides the reduction of gradients.
    interval_s : tuple of float
        From all of it hidden behind the backward pass to none, each as far off as nine in ten
        networks that were left out of the fit.
    memory_bytes, most_bytes : float
        On a device, and the end of its interval.
    sent_bytes : float
        By a replica in a step.
    """

    plan: NetworkPlan
    time: PlanTime
    seconds: float
    interval_s: tuple[float, float]
    memory_bytes: float
    most_bytes: float
    sent_bytes: float

    @property
    def per_image_s(self) -> float:
        """Seconds of a step for each image."""
        return self.seconds / self.plan.batch


GOALS: Mapping[str, Callable[[NetworkAdvice], float]] = {
    "time": lambda each: each.per_image_s,
    "memory": lambda each: each.memory_bytes,
    "cost": lambda each: each.per_image_s * each.plan.devices,
}
"""What plans are ranked by: seconds an image, bytes on a device, device-seconds an image."""


def network_plans(site: Site, batches: Sequence[int], *, fewer: bool, stages: int = 1) -> Iterator[NetworkPlan]:
    """Yield all plans: with ``fewer``, of fewer devices, too; without a link, of one.

    A pipeline has at most ``stages`` stages, and neither recomputes nor shards gradients.
    """
    most = site.devices if site.link is not None else 1
    for batch in batches:
        for devices in divisors(most) if fewer else [most]:
            for pipeline in divisors(devices):
                data = devices // pipeline
                if pipeline > max(1, min(stages, MOST_STAGES)) or batch % data:
                    continue
                for micro in divisors(batch // data):
                    for stage in STAGES if data > 1 else STAGES[:1]:
                        for recompute in (False, True):
                            whole = micro * data == batch  # else gradients of each pass would be moved
                            if (stage < 2 or whole) and (pipeline == 1 or (stage < 2 and not recompute)):
                                yield NetworkPlan(data, batch, micro, recompute, stage, pipeline)


def advice_on(model: NetworkModel, site: Site, plan: NetworkPlan) -> NetworkAdvice:
    """Predict one plan."""
    if plan.pipeline > 1:
        return _in_stages(model, site, plan)
    counts, times = model.counts(plan.micro_batch), model.times
    size = model.parameters * model.state.gradient
    far = far_level(counts.nodes, site.roof)
    forward_s, backward_s = (
        _nodes_s(times, [each for each in counts.nodes if each.direction == direction], site, far)
        for direction in ("forward", "backward")
    )
    again = (counts.segments - 1) / counts.segments if plan.recompute else 0.0
    shared = 1.5 if plan.sharding == 3 else 1.0
    reducing = shared * all_reduce_s(size, plan.data, site.link or Link(0.0, 0.0))
    time = PlanTime(
        computing=plan.passes * (forward_s + backward_s),
        recomputing=plan.passes * again * forward_s,
        gradients=reducing,
        update=_update_s(model, site, plan, model.parameters),
        fixed=plan.passes * times.fixed_s,
    )
    alive = counts.recomputed_bytes if plan.recompute else counts.alive_bytes
    memory = _memory(model, plan, model.parameters, alive, model.node_count)
    sent = shared * all_reduce_counts(size, plan.data)[1] if plan.data > 1 else 0.0
    return _advice(model, plan, time, backward_s, memory, sent)


def _in_stages(model: NetworkModel, site: Site, plan: NetworkPlan) -> NetworkAdvice:
    """Predict a plan with a pipeline, which is cut where its slowest stage is fastest."""
    counts, times, link = model.counts(plan.micro_batch), model.times, site.link or Link(0.0, 0.0)
    far = far_level(counts.nodes, site.roof)
    seconds = [_nodes_s(times, node.works, site, far) for node in counts.graph]
    crossing = [link.seconds(2, 2 * node.crossing_bytes) for node in counts.graph]
    stages = balanced(seconds, crossing, plan.pipeline)
    parts = [counts.graph[each.first : each.end] for each in stages]
    parameters = [sum(node.parameters for node in part) for part in parts]
    most = max(parameters)
    reducing = all_reduce_s(most * model.state.gradient, plan.data, link)
    computing = plan.passes * sum(seconds) / plan.pipeline
    time = PlanTime(
        computing=computing,
        recomputing=0.0,
        gradients=reducing,
        update=_update_s(model, site, plan, most),
        fixed=plan.passes * times.fixed_s,
        bubble=(plan.passes + plan.pipeline - 1) * max(each.seconds for each in stages) - computing,
    )
    memory = max(
        _memory(
            model,
            plan,
            own,
            min(plan.passes, plan.pipeline - number) * sum(node.kept_bytes for node in part)
            + max(node.crossing_bytes for node in part),  # a gradient of what crosses
            len(part),
        )
        for number, (part, own) in enumerate(zip(parts, parameters, strict=True))
    )
    between = max(counts.graph[each.end - 1].crossing_bytes for each in stages[:-1])
    sent = all_reduce_counts(most * model.state.gradient, plan.data)[1] if plan.data > 1 else 0.0
    backward = sum(_nodes_s(times, [each for each in node.works if each.direction == "backward"], site, far)
                   for node in counts.graph) / plan.pipeline  # fmt: skip
    return _advice(model, plan, time, backward, memory, sent + 2 * plan.passes * between)


def _nodes_s(times: NodeTimes, nodes: Sequence[NodeWork], site: Site, far: MemoryLevel) -> float:
    return times.scale * times.nodes_s(nodes, site.roof, far) + times.gap_s * len(nodes)


def _update_s(model: NetworkModel, site: Site, plan: NetworkPlan, parameters: int) -> float:
    moved = parameters * model.state.updating / site.roof.levels[-1].bytes_per_s
    return model.times.update * moved / (plan.data if plan.sharding else 1)


def _memory(model: NetworkModel, plan: NetworkPlan, parameters: int, alive: float, nodes: int) -> float:
    found = model.peaks.bytes(parameters * sum(model.state), alive, nodes)
    return found - parameters * model.state.saved(plan.sharding, plan.data)


def _advice(
    model: NetworkModel, plan: NetworkPlan, time: PlanTime, backward_s: float, memory: float, sent: float
) -> NetworkAdvice:
    """Return a plan's predictions; its reduction may hide behind the backward pass."""
    seconds = sum(time)
    hidden = seconds - time.gradients + exposed_s(time.gradients, backward_s)
    return NetworkAdvice(
        plan, time, seconds, (hidden / model.times.factor, seconds * model.times.factor), memory,
        memory * model.peaks.factor, sent,
    )  # fmt: skip


def tensor_parallel_bytes(nodes: Sequence[NodeWork], devices: int) -> float:
    """Return the least bytes that a device sends in a step whose products are divided by channels.

    Each device computes a part of the output channels of each product with weights. The next
    product reads all of them, so they are gathered; gradients of inputs are sums over all devices,
    which are added up. Counted are the outputs and the inputs, each once and in one direction.
    """
    products = [each for each in nodes if each.direction == "forward" and each.far_bytes]
    return (devices - 1) / devices * sum(each.bytes - each.far_bytes for each in products)


def advise_network(model: NetworkModel, site: Site, batches: Sequence[int], *, goal: str) -> list[NetworkAdvice]:
    """Rank all plans that fit into memory, the best first.

    Raises
    ------
    ConfigurationError
        If the model has not seen an operator of the network, no plan divides the batch, or none
        fits into memory.
    """
    stages = len(model.counts(1).graph)
    tried = [advice_on(model, site, plan) for plan in network_plans(site, batches, fewer=goal != "time", stages=stages)]
    if not tried:
        raise ConfigurationError(
            f"no plan divides a batch of {', '.join(map(str, batches))} among {site.devices} devices",
            hint="Choose a batch that is a multiple of the number of devices.",
        )
    room = USABLE * site.memory_bytes
    fitting = [each for each in tried if each.memory_bytes <= room]
    if not fitting:
        least = min(each.memory_bytes for each in tried)
        raise ConfigurationError(
            f"no plan fits into {room / 2**30:.3g} GiB a device: the least needs {least / 2**30:.3g} GiB",
            hint="Use a smaller batch.",
        )
    return sorted(fitting, key=lambda each: (GOALS[goal](each), each.per_image_s, each.memory_bytes))


def deciding_assumption(model: NetworkModel, site: Site, first: NetworkPlan, second: NetworkPlan) -> tuple[str, bool]:
    """Return the assumption that two plans' order depends on most, and whether it can reverse it.

    Each figure is made `STRETCH` times larger and smaller, and the reduction of gradients hidden.
    """

    def ratio(changed: Site, *, hidden: bool = False) -> float:
        one, other = (advice_on(model, changed, plan) for plan in (first, second))
        ends = [each.interval_s[0] * model.times.factor if hidden else each.seconds for each in (one, other)]
        return ends[0] / ends[1]

    changes = {"that nothing hides the reduction of gradients": [ratio(site, hidden=True)]}
    for factor in (STRETCH, 1 / STRETCH):
        for name, changed in _changed(site, factor).items():
            changes.setdefault(name, []).append(ratio(changed))
    now = ratio(site)
    most = max(changes, key=lambda name: max(abs(each - now) for each in changes[name]))
    return most, any((each < 1) != (now < 1) for each in changes[most])


def _changed(site: Site, factor: float) -> dict[str, Site]:
    """Return the site with each figure changed."""
    levels = tuple(MemoryLevel(each.name, each.capacity_bytes, each.bytes_per_s * factor) for each in site.roof.levels)
    found = {
        "the ceiling of arithmetic": replace(site, roof=replace(site.roof, flops_per_s=site.roof.flops_per_s * factor)),
        "the bandwidth of memory": replace(site, roof=replace(site.roof, levels=levels)),
    }
    if site.link is not None:
        alpha, beta = site.link.alpha_s, site.link.beta_s_per_byte
        found["the latency between devices"] = replace(site, link=Link(alpha * factor, beta))
        found["the bandwidth between devices"] = replace(site, link=Link(alpha, beta * factor))
    return found
