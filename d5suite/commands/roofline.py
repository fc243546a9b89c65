"""``d5suite roofline``: results under a machine's roofs, and their trajectories over knobs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from d5suite.report.console import Console
    from d5suite.report.roofline import Roofline, Spot

TOP = 8
"""Nodes of a result that are shown by default."""

NAMED = 5
"""Findings and results without a roof that are named."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "roofline",
        help="place nodes and steps under a machine's roofs; follow them over threads and batch sizes",
        description="Place the nodes and steps of results made with --passes layers under the ceilings of a machine "
        "file. Bytes are counted, not measured. Results at several settings, as from --sweep, give trajectories.",
    )
    command.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    command.add_argument("--machine", type=Path, required=True, metavar="FILE", help="from d5suite machine -o")
    command.add_argument("-m", "--measurement", metavar="NAME", help="only this measurement, such as inference")
    command.add_argument("--top", type=int, default=TOP, metavar="N", help="nodes to show (%(default)s; 0: all)")
    command.add_argument(
        "--other-machine", action="store_true", help="place results of another machine than the file's, and mark them"
    )
    command.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write all places and trajectories")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from d5suite.files import write_bytes, write_json
    from d5suite.models.ceilings import read_ceilings
    from d5suite.report.console import Console
    from d5suite.report.outputs import check_outputs
    from d5suite.report.page.svg import to_svg
    from d5suite.report.reading import load_results
    from d5suite.report.roofline import path_lines, rooflines, to_dict
    from d5suite.report.roofline_picture import draw_rooflines

    if options.top < 0:
        raise ConfigurationError(f"--top is {options.top}; it must be at least 0")
    check_outputs({"--svg": options.svg, "--json": options.json}, [*options.results, options.machine])
    ceilings = read_ceilings(options.machine)
    found: list[Roofline] = []
    missing: dict[str, str] = {}
    for path in options.results:
        records = load_results(path)
        if options.measurement:
            records = {key: each for key, each in records.items() if each["measurement"] == options.measurement}
        placed, lost = rooflines(records, ceilings, elsewhere=options.other_machine)
        found += placed
        missing |= lost
    console = Console(markup=False, highlight=False)
    if not found:
        reasons = list(dict.fromkeys(missing.values())) or [f"there are no results of {options.measurement!r}"]
        another = any("of the machine file is" in each for each in reasons)
        raise ConfigurationError(
            "no result can be placed under a roof: " + "; ".join(reasons[:NAMED]),
            where=", ".join(map(str, options.results)),
            hint="Measure the machine that made the results, or mark them with --other-machine." if another else None,
        )
    show(found, console, top=options.top)
    for line in path_lines(found):
        console.print(line)
    for name, why in list(missing.items())[:NAMED]:
        console.print(f"no roof: {name}: {why}")
    if len(missing) > NAMED:
        console.print(f"and {len(missing) - NAMED} more without a roof (--json)")
    if options.svg:
        write_bytes(options.svg, to_svg(draw_rooflines(found)))
    if options.json:
        write_json(options.json, to_dict(found, missing))
    return 0


def show(found: Sequence[Roofline], console: Console, *, top: int) -> None:
    """Print each result's step and slowest nodes, then what lies above its roof."""
    from d5suite.report.console import table
    from d5suite.report.roofline import COUNTED

    for each in found:
        star = " *" if each.marks else ""
        console.print(f"{each.title}, {each.backend}  ({each.setting}){star}", style="bold")
        headings = ("", "ms", "GFLOP/s", "FLOP/byte", "GB/s", "of its roof", "bound by")
        drawn = table(*headings, words=("", "bound by"))
        drawn.add_row("step", *_cells(each.step))
        for spot in each.nodes[: top or None]:
            arrow = "→" if spot.direction == "forward" else "←"
            label = spot.name.split(" ")[0] + (f" +{spot.nodes - 1}" if spot.nodes > 1 else "")
            drawn.add_row(f"{label} {arrow}", *_cells(spot))
        console.print(drawn)
        for mark in each.marks:
            console.print(f"* {mark}")
        findings = [spot for spot in (each.step, *each.nodes) if spot.finding]
        for spot in findings[:NAMED]:
            console.print(f"! {spot.name or 'step'} {spot.direction}: {spot.finding}")
        if len(findings) > NAMED:
            console.print(f"! and {len(findings) - NAMED} more above their roofs (--json)")
        console.print()
    roofs = {each.threads: each for each in found}
    for threads, each in sorted(roofs.items()):
        levels = ", ".join(f"{level.name} {level.bytes_per_s / 1e9:.4g} GB/s" for level in each.roof.levels)
        console.print(
            f"roof of {threads} thread{'s' * (threads != 1)}: {each.roof.flops_per_s / 1e9:.4g} GFLOP/s; {levels}"
        )
        for note in each.roof.notes:
            console.print(f"  in doubt: {note}")
    console.print(f"bytes are {COUNTED}: compulsory traffic by shapes; bound by: the smallest level that holds them")


def _cells(spot: Spot) -> list[str]:
    placed, work = spot.placed, spot.placed.work
    return [
        f"{1e3 * work.seconds:.3g}",
        f"{work.flops_per_s / 1e9:.3g}" if work.flops else "–",
        f"{work.intensity:.3g}" if work.flops and work.bytes else "–",
        f"{work.bytes_per_s / 1e9:.3g}",
        f"{placed.share:.0%}" + ("!" if spot.finding else ""),
        placed.bound,
    ]
