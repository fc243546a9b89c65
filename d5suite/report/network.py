"""A network before it runs: its cost, and the backends that can run it.

Imports rich, the network and the backends' data.
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.backends import Backend, discover
from d5suite.errors import NetworkError
from d5suite.measurements import discover as discover_measurements
from d5suite.network import Network
from d5suite.network.analysis import NetworkCost, analyse
from d5suite.network.user_network import UserNetwork

WIDTH = 4
"""Bytes of a value in float32."""

STEPS = {
    each.name: each.needs
    for each in sorted(discover_measurements().values(), key=lambda each: (each.level, len(each.needs)))
    if each.of_any_network
}
"""What measurements that take any network need from a backend, besides operators."""


def description(given: UserNetwork, *, batch_size: int) -> dict[str, Any]:
    """Describe a network and the backends that can run it, as JSON-able values.

    Parameters
    ----------
    given : UserNetwork
    batch_size : int
        Used if the network takes any batch size.

    Raises
    ------
    NetworkError
        If the graph does not determine a tensor's size although all backends have all operators.
        If a backend lacks operators, the cost is None instead and ``cost_unknown`` says why.
    """
    network, abilities = given.network, {name: _ability(each, given) for name, each in discover()[0].items()}
    try:
        cost, unknown = (None, given.unread) if given.unread else (analyse(network, batch_size=batch_size), "")
    except NetworkError as error:
        if not any(each["lacks"] for each in abilities.values()):
            raise
        cost, unknown = None, error.what
    trained = sum(network.initializers[name].size for name in network.parameters)
    parameters, activations = WIDTH * trained, cost and cost.activation_bytes
    return {
        "network": network.name,
        "batch_size": network.batch_size or batch_size,
        "inputs": [_tensor(network, name) for name in network.inputs],
        "outputs": [_tensor(network, name) for name in network.outputs],
        "parameters": trained,
        "macs": cost and cost.macs,
        "cost_unknown": unknown,
        "memory_bytes": {
            "inference": {"parameters": parameters, "activations": activations},
            "training_step": {"parameters": parameters, "gradients": parameters, "activations": activations},
        },
        "loss": given.loss,
        "untrainable": given.untrainable,
        "backends": abilities,
    }


def _tensor(network: Network, name: str) -> dict[str, Any]:
    shape, dtype = network.shapes.get(name), network.dtypes.get(name)
    return {"name": name, "shape": None if shape is None else list(shape), "type": str(dtype or "unknown")}


def _ability(backend: Backend, given: UserNetwork) -> dict[str, Any]:
    """Return which measurements a backend can make of a network, and why not the others."""
    known = given.unread or backend.runs_as_written(given.network)
    lacks = [
        {"operator": each.operator, "nodes": list(each.nodes), "reason": each.reason}
        for each in ([] if known else backend.lacks_of(given.network))
    ]
    needed = dict.fromkeys(need for needs in STEPS.values() for need in needs)
    absent: dict[str, list[str]] = {}
    for need in needed:
        if need in backend.absent:
            absent.setdefault(backend.absent[need], []).append(f"no {need}")
    reasons = [f"{', '.join(what)}: {why}" for why, what in absent.items()]
    if given.unread and not backend.reads_files:
        return {"can": [], "lacks": [], "reasons": [given.unread], "installed": backend.problem() is None}
    can = [
        name
        for name, needs in STEPS.items()
        if not lacks
        and not any(key in backend.absent for key in needs)
        and not ("gradient" in needs and given.untrainable)
    ]
    return {"can": can, "lacks": lacks, "reasons": reasons, "installed": backend.problem() is None}


def show_network(described: dict[str, Any], console: Console) -> None:
    """Print a `description`: tensors, cost, and a row per backend."""
    tensors = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for kind in ("inputs", "outputs"):
        for each in described[kind]:
            sizes = each["shape"]
            shape = "×".join("N" if n is None else str(n) for n in sizes or ()) or ("scalar" if sizes == [] else "?")
            tensors.add_row(kind.removesuffix("s"), each["name"], shape, each["type"])
    console.print(tensors)
    if described["cost_unknown"]:
        console.print(f"cost not known: {described['cost_unknown']}")
    for name, parts in described["memory_bytes"].items() if not described["cost_unknown"] else ():
        listed = ", ".join(f"{part} {size / 2**20:,.1f}" for part, size in parts.items())
        console.print(f"memory of {name}, MiB: {listed}; together {sum(parts.values()) / 2**20:,.1f}")
    if described["loss"]:
        console.print(f"loss: {described['loss']}")
    if described["untrainable"]:
        names = " and ".join(name for name, needs in STEPS.items() if "gradient" in needs)
        console.print(f"no {names}: {described['untrainable']}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", *STEPS, "lacks"):
        table.add_column(column, overflow="fold")
    for name, each in described["backends"].items():
        lacks = [
            f"{lacking['operator']} (node {lacking['nodes'][0]}"
            + (f" and {len(lacking['nodes']) - 1} more" if len(lacking["nodes"]) > 1 else "")
            + ")"
            + (f": {lacking['reason']}" if lacking["reason"] else "")
            for lacking in each["lacks"]
        ]
        notes = [*lacks, *([] if lacks else each["reasons"]), *([] if each["installed"] else ["not installed"])]
        table.add_row(name, *("yes" if step in each["can"] else "–" for step in STEPS), "; ".join(notes))
    console.print(table)


def cost_table(cost: NetworkCost, title: str, *, layers: bool) -> Table:
    """Return the parameters, multiply-accumulates and activations, in total or by layer."""
    table = Table(title=title, title_justify="left")
    for column in ("layer", "operator", "output"):
        table.add_column(column)
    for column in ("parameters", "MMAC", "activation KiB"):
        table.add_column(column, justify="right")
    if layers:
        for node in cost.nodes:
            shape = "×".join(str(n) for n in node.output_shape)
            table.add_row(
                node.name, node.op_type, shape, f"{node.parameters:,}", f"{node.macs / 1e6:,.1f}",
                f"{node.activation_bytes / 1024:,.0f}",
            )  # fmt: skip
        table.add_section()
    table.add_row(
        f"{len(cost.nodes)} layers", "", "", f"{cost.parameters:,}", f"{cost.macs / 1e6:,.3f}",
        f"{cost.activation_bytes / 1024:,.0f}",
    )  # fmt: skip
    return table
