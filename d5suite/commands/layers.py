"""``d5suite layers``: where the time of a step goes, layer by layer, on every backend."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError
from d5suite.files import given_path

if TYPE_CHECKING:
    from rich.table import Table

    from d5suite.report.console import Console
    from d5suite.report.layers import Comparison, LayerRow

TOP = 15
"""Rows that are shown by default."""

SMALLEST = 0.005
"""The smallest part of a step that is named."""

BY = {"node": "node", "operator": "op_type", "stage": "stage"}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``layers`` to the commands."""
    command = commands.add_parser(
        "layers",
        help="show the time of each layer, on every backend",
        description="Show the layer times of a result that was made with --passes layers.",
    )
    command.add_argument("result", type=given_path, metavar="RESULT.json")
    command.add_argument("-m", "--measurement", metavar="NAME", help="only this measurement, such as inference")
    command.add_argument(
        "--direction", choices=("forward", "backward"), help="only this direction (default: both, in separate rows)"
    )
    command.add_argument("--by", choices=tuple(BY), help="only this table (default: all three)")
    command.add_argument(
        "--sort", choices=("time", "difference", "ratio", "network"), default="time",
        help="sort by the slowest backend's time, by its difference or ratio to the fastest, or as in the network "
        "(%(default)s)",
    )  # fmt: skip
    command.add_argument("--top", type=int, default=TOP, metavar="N", help="rows to show (%(default)s; 0: all)")
    command.add_argument("--csv", type=given_path, metavar="FILE", help="also write all rows as CSV, in seconds")
    command.add_argument("--json", type=given_path, metavar="FILE", help="also write all rows as JSON, in seconds")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from d5suite.files import read_json, write_bytes, write_json
    from d5suite.report.console import Console
    from d5suite.report.layers import comparisons
    from d5suite.report.layers_files import csv_of, json_of
    from d5suite.report.outputs import check_outputs
    from d5suite.report.reading import results_of

    if options.top < 0:
        raise ConfigurationError(f"--top is {options.top}; it must be at least 0")
    check_outputs({"--csv": options.csv, "--json": options.json}, [options.result])
    results = results_of(read_json(options.result, any_number=True), options.result)
    for told in results.refused:
        print(f"left out: {told['message']}", file=sys.stderr)
    found = comparisons(results.records)
    if options.measurement:
        found = [each for each in found if each.title.partition("/")[2] == options.measurement]
    if not found:
        what = f"no layer times of {options.measurement!r}" if options.measurement else "no layer times"
        raise ConfigurationError(
            f"there are {what} here", where=str(options.result), hint="Take them: pytest recipes/ --passes layers."
        )
    console = Console(markup=False, highlight=False)
    for each in found:
        show(each, console, options)
    if options.csv:
        write_bytes(options.csv, csv_of(found))
    if options.json:
        write_json(options.json, json_of(found))
    return 0


def show(found: Comparison, console: Console, options: argparse.Namespace) -> None:
    """Print one measurement's layers as tables."""
    from d5suite.report.layers import not_joined

    console.print(f"{found.title}  ({found.setting})", style="bold")
    for backend, why in found.missing.items():
        console.print(f"  {backend}: no layer times: {why}")
    if not found.parts:
        return
    console.print(_steps(found))
    for by in [options.by] if options.by else BY:
        rows = found.rows if by == "node" else found.aggregate(BY[by])
        chosen = _chosen(rows, options)
        if chosen:
            console.print()
            console.print(_table(found, by, chosen, console.width))
            left = len([row for row in rows if options.direction in (None, row.direction)]) - len(chosen)
            if left:
                console.print(f"  {left} more rows: --top 0 shows all")
        if options.sort == "time" and chosen:
            for line in _order(chosen):
                console.print(line)
        if by == "node":
            for line in _why(chosen):
                console.print(line)
    for backend, part in found.parts.items():
        apart = [f"oneDNN's kernels that have no node: {text}"] if (text := not_joined(part)) else []
        for note in [part["method"], *part.get("notes", []), *apart]:
            console.print(f"  {backend}: {note}")
    console.print()


def _chosen(rows: list[LayerRow], options: argparse.Namespace) -> list[LayerRow]:
    from d5suite.report.layers import SORTS

    kept = [row for row in rows if options.direction in (None, row.direction)]
    if options.sort != "network":
        kept = sorted(kept, key=SORTS[options.sort])
    return kept[: options.top or None]


def _steps(found: Comparison) -> Table:
    """Return how much of each backend's step the layers explain."""
    from d5suite.report.console import table
    from d5suite.report.layers import reorders

    drawn = table("step", "ms", "slow-down", "in nodes", "elsewhere", "left over", "reorders", words=("step",))
    for backend in found.backends:
        part = found.parts[backend]
        step = part["step_s"]
        count, took = reorders(part)
        shares = {name: seconds / step for name, seconds in part["other"].items()}
        elsewhere = ", ".join(f"{name} {_percent(share)}" for name, share in shares.items() if share >= SMALLEST)
        drawn.add_row(
            backend,
            _ms(part["plain_step_s"]),
            f"{part['slowdown']:.2f}",
            _percent(part["coverage"]),
            elsewhere or "–",
            _percent(part.get("left_over_s", 0.0) / step),
            f"{count:.0f}, {_percent(took / part['plain_step_s'])}" if count else "–",
        )
    return drawn


def _table(found: Comparison, by: str, rows: list[LayerRow], width: int) -> Table:
    from d5suite.report.console import table

    backends = found.backends
    ceiling = bool(found.ceiling)
    room = width - 4 - 9 * len(backends) - 6 * (len(backends) > 1)
    counted = room - 7 * ceiling >= 40  # the counted work has room
    further = [*["÷"] * (len(backends) > 1), *["GFLOP", "MB"] * counted, *["of peak"] * ceiling]
    drawn = table(by, "", *backends, *further, words=(by,))
    name_width = max(12, room - 16 * counted - 8 * ceiling)
    for row in rows:
        cells = [_shortened(row.label, name_width), _arrow(row)]
        cells += [_ms(row.seconds[name]) if name in row.seconds else "–" for name in backends]
        if len(backends) > 1:
            cells.append(f"{'' if row.tells_backends_apart else '≈'}{row.ratio:.3g}" if len(row.seconds) > 1 else "–")
        if counted:
            cells.append("–" if row.flops is None else f"{row.flops / 1e9:.3g}")
            cells.append("–" if row.bytes is None else f"{row.bytes / 1e6:.3g}")
        if ceiling:
            part = found.part_of_ceiling(row, row.fastest)
            cells.append("–" if part is None else _percent(part))
        drawn.add_row(*cells)
    return drawn


def _order(rows: list[LayerRow]) -> list[str]:
    """Say which rows may change places in another run."""
    from d5suite.report.layers import not_told_apart

    groups = [", ".join(f"{row.label} {_arrow(row)}" for row in group) for group in not_told_apart(rows)]
    return [f"  order not told apart: {'; '.join(groups)}"] if groups else []


def _arrow(row: LayerRow) -> str:
    return "→" if row.direction == "forward" else "←"


def _why(rows: list[LayerRow]) -> list[str]:
    """Say which implementations ran in the rows, where a library reports them."""
    lines = []
    for row in rows:
        if row.kernels:
            lines.append(f"  {row.label} {_arrow(row)}")
            lines += [f"    {backend}: {text}" for backend, text in row.kernels.items()]
    return lines


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _shortened(text: str, width: int) -> str:
    """Shorten a text to a width: its end stays, which says more than its beginning."""
    return text if len(text) <= width else "…" + text[1 - width :]
