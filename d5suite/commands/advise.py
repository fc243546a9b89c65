"""``d5suite advise``: how to divide the training of a network among devices.

GPT-like transformers have a model that is calibrated with published steps; other networks have one
that is fitted to results of this suite.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError
from d5suite.files import given_path

if TYPE_CHECKING:
    from d5suite.models.advice import Advice
    from d5suite.models.machine import Machine
    from d5suite.models.plan import Plan
    from d5suite.models.transformer import Transformer
    from d5suite.network.model import Network


UNJUDGED = "no measurement stands behind gradients that cross the network"
"""Printed with plans whose replicas lie on several nodes: the calibration was judged on one node,
and on pipelines over many."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser("advise", help="rank ways to divide the training of a network among devices")
    command.add_argument(
        "network", metavar="NAME|FILE.onnx|gpt:layers=N,hidden=N,heads=N",
        help="a network of the zoo, an ONNX file, or a GPT-like transformer, optionally with sequence=N (2048) and "
        "vocabulary=N (51200)",
    )  # fmt: skip
    command.add_argument(
        "--machine", type=given_path, required=True, metavar="FILE", help="a machine file: docs/models.md"
    )
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the machine (%(default)s)")
    command.add_argument(
        "--batch", required=True, metavar="N[,…]", help="images or sequences per step; several batch sizes compete"
    )
    command.add_argument(
        "--goal", choices=("time", "memory", "cost"), default="time",
        help="minimize seconds, bytes per device, or device-seconds: per step, or per image with several batch sizes "
        "(%(default)s)",
    )  # fmt: skip
    command.add_argument("--top", type=int, default=8, metavar="N", help="plans to show (%(default)s)")
    command.add_argument("--json", action="store_true", help="print all plans as JSON instead of a table")
    own = command.add_argument_group("networks of the zoo and ONNX files")
    own.add_argument(
        "--results",
        type=given_path,
        action="append",
        default=[],
        metavar="RESULT.json",
        help="results of at least three other networks on the machine, made with --passes layers,memory; repeat the "
        "option for several files",
    )
    own.add_argument("--backend", metavar="NAME[:MODE]", help="backend that made the results (default: the only one)")
    own.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads per rank (default: the only number in the results)"
    )
    own.add_argument("--image-size", type=int, default=224, metavar="PIXELS", help="default: %(default)s")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import json

    from d5suite.models.advice import advise
    from d5suite.models.machine import read_machine
    from d5suite.models.transformer import PREFIX, parse_transformer
    from d5suite.report.console import Console

    for name in ("nodes", "top"):
        if not 1 <= getattr(options, name) < 2**20:
            raise ConfigurationError(f"--{name} is {getattr(options, name)}; it must be from 1 to {2**20 - 1}")
    batches = _batches(options.batch)
    if not options.network.startswith(PREFIX):
        return _of_results(options, batches)
    if len(batches) > 1:
        raise ConfigurationError("a transformer's plans have one batch", where=f"--batch {options.batch}")
    network, machine = parse_transformer(options.network), read_machine(options.machine)
    found = advise(network, machine, nodes=options.nodes, batch=batches[0], goal=options.goal)
    if options.json:
        print(json.dumps({"machine": machine.name, "plans": [to_dict(each) for each in found]}, indent=1))
    else:
        show(network, machine, found, Console(markup=False, highlight=False), top=options.top)
        if options.goal == "time" and len(found) > 1:
            print(_lead(network, machine, found[0], found[1]))
    return 0


def _batches(text: str) -> list[int]:
    found = text.split(",")
    if not all(each.isascii() and each.isdigit() and 1 <= int(each) < 2**20 for each in found):
        raise ConfigurationError(f"--batch is {text}; each must be from 1 to {2**20 - 1}")
    return list(dict.fromkeys(map(int, found)))


def _of_results(options: argparse.Namespace, batches: list[int]) -> int:
    """Advise on a network by results of other networks, or by a machine file's published steps."""
    import json

    from d5suite.models.ceilings import read_ceilings
    from d5suite.models.network_plans import advise_network
    from d5suite.models.published import read_published
    from d5suite.models.site import read_site
    from d5suite.report.console import Console
    from d5suite.report.network_advice import (
        network_model,
        published_kind,
        published_model,
        published_points,
        show_network,
        to_dict,
        training_points,
    )
    from d5suite.report.reading import load_results

    published = read_published(options.machine)
    if not options.results and not published:
        raise ConfigurationError(
            "d5suite does not know how long this network takes: only GPT-like transformers are known without results",
            where=options.network,
            hint="Give --results of other networks, made with --passes layers,memory; add published steps to the "
            "machine file (docs/models.md); or write gpt:layers=24,hidden=1024,heads=16.",
        )
    network, ceilings = _network(options.network, options.image_size), read_ceilings(options.machine)
    if options.results:
        records = {key: each for path in options.results for key, each in load_results(path).items()}
        kind, points = training_points(records, ceilings, options.backend, options.threads)
    else:
        devices = [str(each["device"]) for each in ceilings.entries if each["what"] == "flops" and "device" in each]
        kind = published_kind(published, devices[0] if devices else "cuda", options.threads or 1)
    site = read_site(
        options.machine, ceilings, nodes=options.nodes, device=kind.device, precision=kind.precision,
        threads=kind.threads,
    )  # fmt: skip
    if options.results:
        model = network_model(network, kind, points)
    else:
        model = published_model(network, kind, published_points(published, kind, site.roof))
    found = advise_network(model, site, batches, goal=options.goal)
    if options.json:
        print(json.dumps({"machine": ceilings.name, "plans": [to_dict(each) for each in found]}, indent=1))
    else:
        show_network(network, kind, model, site, found, Console(markup=False, highlight=False), top=options.top)
    return 0


def _network(name: str, image_size: int) -> Network:
    """Return a network of the zoo or an ONNX file, with a loss if one fits."""
    from d5suite.network.user_network import load_user_network
    from d5suite.network.zoo import build

    if name.endswith(".onnx"):
        return load_user_network(name, shapes={}, batch_size=1).network
    if not 1 <= image_size < 2**16:
        raise ConfigurationError(f"--image-size is {image_size}; it must be from 1 to {2**16 - 1}")
    return build(name, image_size=image_size).with_classification_loss()


def to_dict(advice: Advice) -> dict[str, Any]:
    """Return a plan and its predictions, in seconds and bytes."""
    from dataclasses import asdict

    return {
        "plan": asdict(advice.plan),
        "time_s": {**asdict(advice.time), "total": advice.time.total},
        "interval_s": list(advice.interval_s),
        "memory_bytes": {**asdict(advice.memory), "total": advice.memory.total},
        "sent_bytes": advice.sent_bytes,
        "bound": advice.time.bound,
    }


def crosses_nodes(plan: Plan, machine: Machine) -> bool:
    """Return whether a plan's replicas lie on several nodes."""
    return plan.data > 1 and plan.data * plan.tensor > machine.devices_per_node


def show(network: Transformer, machine: Machine, found: list[Advice], console: Any, *, top: int) -> None:
    """Print the best plans, and what bounds the first one."""
    from rich.table import Table

    console.print(
        f"{network.parameters / 1e9:.3g} billion parameters, {network.layers} layers, sequences of {network.sequence}; "
        f"{found[0].plan.batch} sequences a step\n{machine.name}: {found[0].plan.devices} devices"
    )
    table = Table(box=None, pad_edge=False)
    names = ("d × t × p", "micro", "again", "ZeRO", "step", "interval", "GiB", "bound by")
    for name in names:
        table.add_column(name, justify="left" if name in ("d × t × p", "again", "bound by") else "right", no_wrap=True)
    for each in found[:top]:
        plan, (low, high) = each.plan, each.interval_s
        table.add_row(
            f"{plan.data} × {plan.tensor} × {plan.pipeline}",
            *map(str, (plan.micro_batch, plan.recompute, plan.sharding)),
            _seconds(each.time.total), f"{_seconds(low)} – {_seconds(high)}", f"{each.memory.total / 2**30:.3g}",
            each.time.bound,
        )  # fmt: skip
    console.print(table)
    if len(found) > top:
        console.print(f"{len(found) - top} more plans fit (--top, --json)")
    first = found[0]
    console.print(
        "d × t × p: data, tensor and pipeline parallel; micro: sequences of a pass; again: what the backward pass "
        "recomputes; interval: held nine in ten of the steps that the calibration was judged on"
    )
    if any(crosses_nodes(each.plan, machine) for each in found[:top]):
        console.print(f"{UNJUDGED}: plans whose replicas lie on several nodes may be off by more.")
    console.print(f"The first: {first.time.bound} is {getattr(first.time, first.time.bound) / first.time.total:.0%}.")


def _lead(network: Transformer, machine: Machine, first: Advice, second: Advice) -> str:
    """Say whether the first plan's lead is beyond the model's error, and what it rests on."""
    from d5suite.models.advice import deciding_figure

    ratio = second.time.total / first.time.total
    figure, turns = deciding_figure(network, machine, first.plan, second.plan)
    known = machine.sources.get(figure, "")
    beyond = ratio > 1 + machine.calibration.error_90
    text = f"The second needs {ratio:.3f} times as long: " + (
        "more than the model's error." if beyond else "within the model's error, so measure both."
    )
    turning = ", enough to turn the order if it is 20% off" if turns else ""
    return f"{text}\nIt rests most on {figure}{turning} ({known})."


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
