"""How results vary over repeated runs of one program: what ``--between-runs`` should be.

Imports rich, its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.errors import ConfigurationError
from d5suite.report.runs import BenchmarkRun
from d5suite.report.verdicts import differ
from d5suite.statistics.medians import Summary
from d5suite.statistics.spread import Spread, spreads_of

FEWEST = 3
"""Fewest runs of a benchmark: two say next to nothing about how runs vary."""

SHOWN = 0.001
"""Step to which a spread is rounded up."""


class Repeats(NamedTuple):
    """How benchmarks vary over repeated runs.

    Attributes
    ----------
    spreads : dict of str to Spread
        Spreads by benchmark.
    between_runs : float
        What ``--between-runs`` should be.
    noisier : list of str
        Benchmarks that vary more and need their own threshold.
    left_out : list of str
        Results that were not used, with reasons.
    """

    spreads: dict[str, Spread]
    between_runs: float
    noisier: list[str]
    left_out: list[str]


def repeats_of(runs: Sequence[BenchmarkRun]) -> Repeats:
    """Return how the benchmarks of repeated runs vary.

    Raises
    ------
    ConfigurationError
        If a benchmark was measured under several conditions, or none has `FEWEST` sound runs.
    """
    found: dict[str, list[Summary]] = defaultdict(list)
    conditions: dict[str, dict[str, str]] = {}
    left_out = []
    for run in runs:
        for entry in run.entries:
            if entry.is_memory:
                continue
            for each in differ(conditions.setdefault(entry.name, entry.conditions), entry.conditions):
                raise ConfigurationError(f"{entry.name}: {each}", where=str(run.path),
                                         hint="Give repeated runs of one program under equal conditions.")  # fmt: skip
            if why := [*entry.wrong, *entry.disturbed]:
                left_out.append(f"{run.path}: {entry.name}: {why[0]}")
            else:
                found[entry.name].append(entry.summary)
    enough = {name: its for name, its in found.items() if len(its) >= FEWEST}
    left_out += [f"{name}: only {len(its)} sound runs" for name, its in found.items() if name not in enough]
    if not enough:
        raise ConfigurationError(
            f"no benchmark has {FEWEST} sound runs" + "".join(f"\n  {each}" for each in left_out[:FEWEST]),
            hint=f"Give result files of at least {FEWEST} runs.",
        )
    spreads = spreads_of(list(enough.values()))
    names = list(enough)
    return Repeats(
        dict(zip(names, spreads.each, strict=True)),
        _up(spreads.all),
        [names[place] for place in spreads.noisier],
        left_out,
    )


def show_repeats(found: Repeats, console: Console) -> None:
    """Print how each benchmark varies, and the option and the thresholds to use."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for heading in ("runs", "varies by", "assume"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, spread in found.spreads.items():
        style = "yellow" if name in found.noisier else ""
        assumed = f"{_up(spread.between_runs):.3f}"
        table.add_row(name, str(spread.runs), f"{spread.observed:.1%}", assumed, style=style)
    console.print(table, highlight=False)
    if found.left_out:
        console.print("\n".join(["left out:", *(f"  {each}" for each in found.left_out)]), highlight=False)
    console.print(f"use: --between-runs {found.between_runs:.3f}", style="bold", highlight=False)
    if found.noisier:
        lines = ["and, as these vary more, in --thresholds FILE.toml:"]
        for name in found.noisier:
            lines += ["[[benchmark]]", f"match = {json.dumps(_literal(name))}"]
            lines += [f"between_runs = {_up(found.spreads[name].between_runs):.3f}"]
        console.print("\n".join(lines), highlight=False)


def _up(spread: float) -> float:
    return max(math.ceil(spread / SHOWN - 1e-9), 1) * SHOWN


def _literal(name: str) -> str:
    """Return the shell pattern that matches this name alone."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)
