"""``d5suite machine``: measure this machine's ceilings into a machine file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from d5suite.backends import Selection

QUICK: dict[str, Any] = {
    "product": 512, "seconds": 0.05, "storage_bytes": 16 << 20, "transfer_bytes": 16 << 20, "largest_set": 64 << 20,
}  # fmt: skip
"""Sizes and budgets of ``--quick``."""

MOST_THREADS = 4096

LOGGP = (("o", "overhead"), ("g", "gap"), ("L", "latency"))
"""LogGP's parameters: symbol in the table (microseconds), and name in a machine file."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "machine",
        help="measure this machine's ceilings: arithmetic, caches, memory, transports, storage",
        description="Measure in several ways how much this machine computes, moves, sends and reads at most; write a "
        "machine file for d5suite roofline and explain. Disturbed measurements are marked and not kept.",
    )
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the machine file")
    command.add_argument("--threads", metavar="N[,…]", help="CPU threads (default: 1, and all allowed CPUs)")
    command.add_argument(
        "--precision", default="fp32", metavar="NAME[,…]", help="precision of arithmetic (%(default)s)"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    command.add_argument(
        "--backend", metavar="NAME[:MODE][,…]",
        help="frameworks to measure with, or none (default: all installed, in their default modes)",
    )  # fmt: skip
    command.add_argument(
        "--only", metavar="KIND[,…]", help="only these ceilings: flops, bandwidth, transport, storage, …"
    )
    command.add_argument(
        "--storage",
        type=Path,
        metavar="DIR",
        help="folder on the file system to read (default: the output file's folder)",
    )
    command.add_argument("--quick", action="store_true", help="small sizes and short sampling, for a first look")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import sys

    from d5suite.ceilings.machine import MachinePlan, measure_machine
    from d5suite.files import check_targets, write_json
    from d5suite.instruments.threads import allowed_cpus
    from d5suite.models.ceilings import KINDS
    from d5suite.network.operation import PRECISIONS
    from d5suite.report.console import Console

    cpus = len(allowed_cpus())
    usual = [1, cpus] if options.device == "cpu" else [cpus]  # a device does not compute with CPU threads
    threads = _numbers(options.threads) if options.threads else list(dict.fromkeys(usual))
    if max(threads) > cpus:
        raise ConfigurationError(
            f"{max(threads)} threads are more than the {cpus} CPUs that they may use", where="--threads"
        )
    precisions = _listed(options.precision, "--precision", tuple(PRECISIONS))
    kinds = _listed(options.only, "--only", KINDS) if options.only else list(KINDS)
    check_targets(options.output)
    storage = options.storage or options.output.resolve().parent
    if "storage" in kinds and not storage.is_dir():
        raise ConfigurationError("there is no such folder", where=f"--storage {storage}")
    plan = MachinePlan(
        threads, precisions, _backends(options.backend, options.device), options.device, kinds, storage,
        **(QUICK if options.quick else {}),
    )  # fmt: skip
    content = measure_machine(plan, lambda what: print(f"d5suite machine: {what}", file=sys.stderr, flush=True))
    if options.quick:
        content["missing"].append("measured with --quick: small sizes, few samples")
    write_json(options.output, content)
    show(content, Console(markup=False, highlight=False))
    return 0


def _backends(given: str | None, device: str) -> list[Selection]:
    from d5suite.backends import Selection, discover, select

    if given == "none":
        return []
    if given:
        return [select(name) for name in given.split(",")]
    return [
        Selection(each, each.default_mode)
        for each in discover()[0].values()
        if not each.reduced and not each.on_request and device in each.devices and each.problem() is None
    ]


def _numbers(text: str) -> list[int]:
    found = text.split(",")
    if not all(each.isascii() and each.isdigit() and 1 <= int(each) <= MOST_THREADS for each in found):
        raise ConfigurationError(f"{text!r} is not a list of numbers from 1 to {MOST_THREADS}", where="--threads")
    return list(dict.fromkeys(map(int, found)))


def _listed(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    if unknown := [each for each in found if each not in known]:
        raise ConfigurationError(f"there is no {unknown[0]!r}", where=option, hint=f"Known: {', '.join(known)}.")
    return list(dict.fromkeys(found))


def show(content: Mapping[str, Any], console: Any) -> None:
    """Print the ceilings as a table, then what was not kept and what is missing."""
    from d5suite.report.console import table

    console.print(content["name"], style="bold")
    words = ("ceiling", "best way", "independent way")
    drawn = table("ceiling", "threads", "value", "best way", "independent way", words=words)
    for each in content["ceilings"]:
        ways = each.get("ways", ())
        if each.get("agrees") is None:
            following = "–" if each["what"] == "transport" else "none"
        else:
            following = f"{each['apart']:.0%} below" + ("" if each["agrees"] else ": no agreement")
        best = ways[0]["way"] if ways else "ping-pong"
        drawn.add_row(name_of(each), str(each.get("threads", "")), figure_of(each), best, following)
    console.print(drawn)
    for title, lines in (
        ("* measured on a disturbed machine, and not kept:", [
            f"{name_of(each)}, {each['way']}: {'; '.join(each['disturbed'])}" for each in content["not_kept"]
        ]),
        ("missing:", content["missing"]),
    ):  # fmt: skip
        if lines:
            console.print("\n  ".join([title, *(line.partition("\n")[0] for line in lines)]))


def name_of(each: Mapping[str, Any]) -> str:
    """Name a ceiling for people."""
    what = each["what"]
    if what == "flops":
        return f"arithmetic, {each.get('precision', '?')}"
    if what == "bandwidth":
        return str(each.get("level", "memory"))
    if what == "transport":
        return f"{each['transport']}, a message"
    return str(what).replace("_", " ")


def figure_of(each: Mapping[str, Any]) -> str:
    """Return a ceiling's figure with its unit."""
    if each["what"] == "transport":
        low, high = each["alpha_interval_s"]
        slow, fast = each["beta_interval_s_per_byte"][::-1]
        rate = 1e-9 / each["beta_s_per_byte"] if each["beta_s_per_byte"] else float("inf")
        ends = [f"{1e-9 / beta:.3g}" if beta else "∞" for beta in (slow, fast)]
        alpha = f"{1e6 * each['alpha_s']:.3g} µs ({1e6 * low:.3g} – {1e6 * high:.3g})"
        text = f"{alpha}, {rate:.3g} GB/s ({' – '.join(ends)})"
        own = [(name, each.get("loggp", {}).get(f"{key}_s")) for name, key in LOGGP]
        return text + "".join(f", {name} {1e6 * found[0]:.3g} µs" for name, found in own if found)
    return f"{each['value'] / 1e9:.4g} {'GFLOP/s' if each['what'] == 'flops' else 'GB/s'}"
