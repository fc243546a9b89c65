"""Orders of a network's parameters by name, and the tasks of its step that TIC and TAC order.

Imports `d5suite.errors`, `d5suite.network` and its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.distributed.order import Task, TaskGraph, sequence, tac, tic
from d5suite.errors import ConfigurationError
from d5suite.network.analysis import differentiated
from d5suite.network.layers import layer_facts
from d5suite.network.model import Network

ORDERS: Mapping[str, str] = {
    "framework": "as the framework hands out gradients",
    "forward": "as the forward pass needs parameters",
    "backward": "the forward order reversed, which is about that of the backward pass",
    "tic": "by TIC, from the graph alone",
    "tac": "by TAC, from the graph and the nodes' counted work; tac:FILE: from layer times of a result file",
    "random": "random:SEED: at random, the same on all ranks and in all steps",
}
"""Orders of transfers by name."""

FLOPS_PER_S, MEMORY_BYTES_PER_S, LINK_BYTES_PER_S = 1e11, 1e10, 1.25e9
"""Rates with which counted work becomes seconds: about two cores and 10 Gb/s Ethernet. TAC depends
on their ratios, not on their size."""

Seconds = Mapping[tuple[str, str], float]
"""Seconds by node and direction, ``forward`` or ``backward``."""


def check_order(order: str, where: str) -> None:
    """Raise `ConfigurationError` if the text is no order: a name, ``random:SEED``, ``tac:FILE``."""
    name, colon, argument = order.partition(":")
    if name not in ORDERS:
        raise ConfigurationError(f"there is no order {order!r}", where=where, hint=f"Known: {', '.join(ORDERS)}.")
    if name == "random" and not argument.isdecimal():
        raise ConfigurationError(f"{order!r} has no seed", where=where, hint="Give a whole number, as in random:1.")
    if colon and (name not in ("random", "tac") or not argument):
        raise ConfigurationError(f"{order!r} is no order", where=where, hint=f"Give {name} alone.")


def parameter_order(order: str, network: Network) -> tuple[str, ...]:
    """Return the parameters in the order in which they are sent.

    Parameters
    ----------
    order : str
        See `ORDERS`; not ``framework``, whose order is known only when it hands out gradients.
    network : Network
    """
    check_order(order, "order of transfers")
    name, _, argument = order.partition(":")
    if name == "random":
        names = network.parameters
        return tuple(names[place] for place in np.random.default_rng(int(argument)).permutation(len(names)))
    if name in ("forward", "backward"):
        used = _first_use(network)
        return used if name == "forward" else used[::-1]
    seconds = layer_seconds(Path(argument), network) if argument else None
    graph = training_tasks(network, seconds=seconds)
    found = sequence((tic if name == "tic" else tac)(graph))
    return tuple(each.removeprefix("transfer ") for each in found)


def _first_use(network: Network) -> tuple[str, ...]:
    """Return the parameters as the forward pass needs them; those that no node uses come last."""
    known = set(network.parameters)
    used = dict.fromkeys(name for node in network.nodes for name in node.inputs if name in known)
    return (*used, *(name for name in network.parameters if name not in used))


def training_tasks(network: Network, *, seconds: Seconds | None = None) -> TaskGraph:
    """Return the tasks of a step: parameters arrive, then nodes compute forward and backward.

    Parameters
    ----------
    network : Network
    seconds : mapping, optional
        Seconds of nodes, such as from `layer_seconds`. By default the longer of one image's counted
        work at `FLOPS_PER_S` and its compulsory traffic at `MEMORY_BYTES_PER_S`.

    Returns
    -------
    TaskGraph
        ``transfer PARAMETER``, ``forward NODE`` and, if the network has a loss, ``backward NODE``.
        Transfers take their bytes at `LINK_BYTES_PER_S`, and stand in the forward order.
    """
    times = _counted(network) if seconds is None else seconds
    tasks = []
    for name in _first_use(network):
        nbytes = network.initializers[name].size * 4
        tasks.append(Task(f"transfer {name}", "transfer", nbytes / LINK_BYTES_PER_S, nbytes, "link"))
    maker = {output: node.name for node in network.nodes for output in node.outputs if output}
    moved = differentiated(network)
    backward: dict[str, list[str]] = {}
    for node in network.nodes:
        given = dict.fromkeys(name for name in node.inputs if name)
        needs = [f"forward {maker[name]}" if name in maker else f"transfer {name}" for name in given]
        known = [each for each in dict.fromkeys(needs) if not each.startswith("transfer ") or each[9:] in moved]
        took = times.get((node.name, "forward"), 0.0)
        tasks.append(Task(f"forward {node.name}", "compute", took, depends_on=tuple(known)))
        if network.loss and moved & given.keys():
            backward[node.name] = []
    for node in network.nodes:
        for name in node.inputs:
            if node.name in backward and maker.get(name) in backward:
                backward[maker[name]].append(f"backward {node.name}")
    for name, after in reversed(backward.items()):
        needs = [f"forward {name}", *dict.fromkeys(after)]
        tasks.append(Task(f"backward {name}", "compute", times.get((name, "backward"), 0.0), depends_on=tuple(needs)))
    return TaskGraph(tuple(tasks))


def _counted(network: Network) -> Seconds:
    found = {}
    for name, facts in layer_facts(network).items():
        for direction, flops, moved in (
            ("forward", facts.flops, facts.bytes),
            ("backward", facts.backward_flops, facts.backward_bytes),
        ):
            found[name, direction] = max((flops or 0) / FLOPS_PER_S, (moved or 0) / MEMORY_BYTES_PER_S)
    return found


def layer_seconds(path: Path, network: Network) -> Seconds:
    """Read layer times of a network from a result file (``--passes layers``).

    Of several results, the one that names most nodes of the network is used; among equals, a
    training step's. Nodes that ran as one have their time at the last of them, because what follows
    begins after it.

    Raises
    ------
    ConfigurationError
        If the file cannot be read, or has no layer times of this network.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = [bench["extra_info"]["d5suite"] for bench in content["benchmarks"]]
        layers = [
            (_times(each["layers"]["times"], network), each.get("measurement", ""))
            for each in records
            if each.get("layers")
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"cannot read layer times: {error!r}", where=str(path)) from None
    best = max(layers, key=lambda each: (len(each[0]), each[1] == "training_step"), default=({}, ""))[0]
    if not best:
        raise ConfigurationError(
            f"there are no layer times of {network.name}", where=str(path), hint="Measure with --passes layers."
        )
    return best


def _times(times: Sequence[Mapping[str, Any]], network: Network) -> Seconds:
    place = {node.name: number for number, node in enumerate(network.nodes)}
    found: dict[tuple[str, str], float] = {}
    for each in times:
        nodes = sorted((name for name in each["nodes"] if name in place), key=lambda name: place[name])
        if nodes:
            last = nodes[-1] if each["direction"] == "forward" else nodes[0]
            found[last, each["direction"]] = found.get((last, each["direction"]), 0.0) + float(each["seconds"])
    return found
