"""Advice on a network's training from steps of other networks: the model, and its table.

Imports `d5suite.models`, `d5suite.network` and its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError
from d5suite.models.ceilings import Ceilings, Roof
from d5suite.models.network_plans import (
    BatchCounts,
    GraphNode,
    NetworkAdvice,
    NetworkModel,
    StateBytes,
    deciding_assumption,
    tensor_parallel_bytes,
)
from d5suite.models.node_time import MeasuredStep, NodeTimes, NodeWork, fit_node_times, fit_steps, node_work
from d5suite.models.peak import PeakModel, fit_peaks
from d5suite.models.published import PublishedStep
from d5suite.models.site import Site
from d5suite.network.held import VIEWS, held, passed
from d5suite.network.layers import layer_facts
from d5suite.network.model import Network
from d5suite.network.zoo import build
from d5suite.report.layers import DIRECTIONS
from d5suite.report.model_points import WIDTHS, PointKind, Points, points_of
from d5suite.report.reading import ResultKey

if TYPE_CHECKING:
    from d5suite.report.console import Console

TRAINING = "training_step"

COUNTED = PeakModel(0.0, 1.0, 1.0, 0.0)
"""Memory model without measurements: what is counted, and nothing for the framework itself."""


def training_points(
    records: Mapping[ResultKey, Mapping[str, Any]], ceilings: Ceilings, backend: str | None, threads: int | None
) -> tuple[PointKind, Points]:
    """Return the one kind of training steps that is meant, and the points of all kinds.

    Raises
    ------
    ConfigurationError
        If there is no training step, or several kinds that ``backend`` and ``threads`` do not tell
        apart.
    """
    points = points_of(records, ceilings)
    kinds = [
        each
        for each in points.steps
        if each.measurement == TRAINING and backend in (None, each.backend) and threads in (None, each.threads)
    ]
    if not kinds:
        reasons = list(dict.fromkeys(points.missing.values()))[:3]
        raise ConfigurationError(
            "no result is a training step that a model can be fitted to" + "".join(f"; {each}" for each in reasons),
            hint="Make some: pytest recipes/ --passes layers,memory --benchmark-json FILE.",
        )
    if len(kinds) > 1:
        raise ConfigurationError(
            f"these results are of several kinds: {'; '.join(map(str, kinds))}", hint="Give --backend and --threads."
        )
    return kinds[0], points


def network_model(network: Network, kind: PointKind, points: Points) -> NetworkModel:
    """Return the model of a network's training, fitted to results of other networks.

    Raises
    ------
    ConfigurationError
        If there are too few of them, or none has an operator of this network.
    """
    times = fit_node_times(_elsewhere(points.steps.get(kind, ()), network.name))
    peaks = _elsewhere(points.peaks.get(kind, ()), network.name)
    return _model(network, kind.precision, times, lambda: fit_peaks(peaks), points.slots.get(kind, 0.0))


def published_kind(steps: Sequence[PublishedStep], device: str, threads: int) -> PointKind:
    """Return what published steps have in common.

    Raises
    ------
    ConfigurationError
        If they are of several precisions.
    """
    precisions = sorted({each.precision for each in steps})
    if len(precisions) != 1:
        raise ConfigurationError(
            f"the machine file's steps are of several precisions: {', '.join(precisions)}", hint="Give those of one."
        )
    return PointKind("published steps", TRAINING, device, precisions[0], threads)


def published_points(steps: Sequence[PublishedStep], kind: PointKind, roof: Roof) -> list[MeasuredStep]:
    """Return published steps as points that a model can be fitted to."""
    width = WIDTHS.get(kind.precision, 4)
    made = cache(lambda name, size: build(name, image_size=size).with_classification_loss())
    found = []
    for each in steps:
        network: Network = made(each.network, each.image_size)
        parameters = sum(network.initializers[name].size for name in network.parameters)
        updated = StateBytes(width, width, width).updating * parameters
        nodes = training_nodes(network, each.batch, width)
        found.append(MeasuredStep(each.network, nodes, [], updated, each.batch / each.images_per_s, roof))
    return found


def published_model(network: Network, kind: PointKind, points: Sequence[MeasuredStep]) -> NetworkModel:
    """Return the model of a network's training, fitted to published steps of other networks."""
    times = fit_node_times(_elsewhere(points, network.name), fit_steps)
    return _model(network, kind.precision, times, lambda: COUNTED, 1.0)


def _model(
    network: Network, precision: str, times: NodeTimes, peaks: Callable[[], PeakModel], slots: float
) -> NetworkModel:
    if network.loss is None:
        raise ConfigurationError("this network has no loss to train", where=network.name)
    if network.batch_size is not None:
        raise ConfigurationError(
            f"its file has one batch, {network.batch_size}, so none can be advised", where=network.name
        )
    activation = WIDTHS.get(precision, 4)
    width = max(4, activation)

    @cache
    def counts(batch: int) -> BatchCounts:
        found = held(network, batch_size=batch, bytes_per_value=activation)
        works = _works(network, batch, activation)
        across = passed(network, batch_size=batch, bytes_per_value=activation)
        graph = [
            GraphNode(works.get(name, ()), each.parameters, each.kept, each.crossing) for name, each in across.items()
        ]
        nodes = [each for own in works.values() for each in own]
        return BatchCounts(nodes, found.step, found.recomputed, found.segments, graph)

    first = held(network, bytes_per_value=activation)
    if unknown := times.unknown(training_nodes(network, 1, activation)):
        raise ConfigurationError(
            f"no measurement stands behind {', '.join(unknown)}, so nothing is said",
            where=network.name,
            hint="Measure a network that has them, too.",
        )
    return NetworkModel(first.parameters, first.nodes, StateBytes(width, width, width * slots), counts, times, peaks())


def _elsewhere(points: Sequence[Any], name: str) -> list[Any]:
    """Return the points of other networks, so that this one is predicted, not looked up."""
    return [each for each in points if not each.network.endswith(name)]


def training_nodes(network: Network, batch: int, bytes_per_value: int) -> list[NodeWork]:
    """Return the work of a training step's nodes, without views, which do nothing.

    Raises
    ------
    ConfigurationError
        If a node has no count.
    """
    return [each for own in _works(network, batch, bytes_per_value).values() for each in own]


def _works(network: Network, batch: int, bytes_per_value: int) -> dict[str, list[NodeWork]]:
    """Return the work of each node of a training step, by name."""
    needed = {node.name for node in network.nodes_for([network.require_loss()[1]])}
    found = {}
    forward, backward = DIRECTIONS
    for name, facts in layer_facts(network, batch_size=batch, bytes_per_value=bytes_per_value).items():
        if name not in needed or facts.op_type in VIEWS:
            continue
        if facts.bytes is None:
            raise ConfigurationError(
                f"node {name} has no count, because {facts.op_type} has none here, so nothing is said",
                where=network.name,
            )
        found[name] = [node_work(vars(facts), forward, bytes_per_value)]
        if facts.backward_bytes != 0:
            found[name].append(node_work(vars(facts), backward, bytes_per_value))
    return found


def to_dict(each: NetworkAdvice) -> dict[str, Any]:
    """Return a plan and its predictions, in seconds and bytes."""
    return {
        "plan": asdict(each.plan),
        "time_s": {**each.time._asdict(), "total": each.seconds},
        "interval_s": list(each.interval_s),
        "memory_bytes": each.memory_bytes,
        "most_memory_bytes": each.most_bytes if math.isfinite(each.most_bytes) else None,
        "sent_bytes": each.sent_bytes,
        "bound": each.time.bound,
    }


def show_network(
    network: Network,
    kind: PointKind,
    model: NetworkModel,
    site: Site,
    found: Sequence[NetworkAdvice],
    console: Console,
    *,
    top: int,
) -> None:
    """Print the best plans, what bounds the first one, and what decides."""
    from rich.table import Table

    console.print(
        f"{network.name}: {model.parameters / 1e6:.3g} million parameters; {kind}; {site.devices} device"
        f"{'s' * (site.devices != 1)}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("d × p", "batch", "micro", "again", "ZeRO", "step", "interval", "images/s", "GiB", "bound by"):
        left = name in ("d × p", "again", "bound by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for each in found[:top]:
        plan, (low, high) = each.plan, each.interval_s
        table.add_row(
            f"{plan.data} × {plan.pipeline}", *map(str, (plan.batch, plan.micro_batch)),
            "all" if plan.recompute else "–", str(plan.sharding), f"{each.seconds:.3g} s", f"{low:.3g}–{high:.3g} s",
            f"{1 / each.per_image_s:.3g}", f"{each.memory_bytes / 2**30:.3g}", each.time.bound,
        )  # fmt: skip
    console.print(table)
    if len(found) > top:
        console.print(f"{len(found) - top} more plans fit (--top, --json)")
    known = math.isfinite(model.peaks.factor)
    memory = f"memory: {model.peaks.factor - 1:.0%}" if known else "memory is counted, without the framework's own"
    console.print(
        "d × p: replicas and stages of a pipeline; micro: images of a pass; again: what the backward pass computes "
        "again; interval: from all of the reduction of gradients hidden to none, each as far off as nine in ten "
        f"networks left out of the fit: {model.times.factor - 1:.0%} ({memory})"
    )
    for assumption in site.assumptions:
        console.print(f"assumed: {assumption}")
    if any(each.plan.pipeline > 1 for each in found[:top]):
        console.print("assumed: stages wait for nothing but each other; no measurement stands behind a pipeline")
    first = found[0]
    if site.devices > 1 and site.link is not None:
        console.print(_no_tensor(model, site, first))
    console.print(f"The first: {first.time.bound} is {getattr(first.time, first.time.bound) / first.seconds:.0%}.")
    if len(found) > 1:
        console.print(_lead(model, site, first, found[1]))


def _no_tensor(model: NetworkModel, site: Site, first: NetworkAdvice) -> str:
    """Say why no plan divides channels, with the traffic that it would cause."""
    devices = site.devices
    divided = tensor_parallel_bytes(model.counts(first.plan.batch).nodes, devices)
    reduced = 2 * (devices - 1) / devices * model.parameters * model.state.gradient
    said = f"at least {divided / 1e9:.3g} GB a device in a step of {first.plan.batch}"
    text = f"Tensor parallelism is not ranked: gathering output channels and summing gradients of inputs sends {said}"
    if divided > reduced:
        return f"{text}, {divided / reduced:.3g} times what the gradients of replicas take."
    return f"{text}. That is less than the gradients of replicas take, but no measurement stands behind it."


def _lead(model: NetworkModel, site: Site, first: NetworkAdvice, second: NetworkAdvice) -> str:
    ratio = second.per_image_s / first.per_image_s
    name, turns = deciding_assumption(model, site, first.plan, second.plan)
    said = "more than the model's error." if ratio > model.times.factor else "within the model's error: measure both."
    turning = ", enough to turn the order" if turns else ""
    return f"The second needs {ratio:.3f} times as long for an image: {said}\nThe order rests most on {name}{turning}."
