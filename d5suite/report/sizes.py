"""Tables of collectives by size. Imports rich and its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table as RichTable

from d5suite.report.formats import figure
from d5suite.report.scaling import size_text

NOTE = (
    "min, mean, max µs: each rank's median of a call, over ranks; median: of the slowest rank; overlap: part of the "
    "time in which ranks can compute"
)


def size_table(name: str, record: Mapping[str, Any]) -> RichTable:
    """Return the table of one collective on one communicator, a line for each size.

    Parameters
    ----------
    name : str
        Title of the table.
    record : mapping
        A record of the measurement ``collectives``; earlier versions have fewer figures.
    """
    drawn = RichTable(title=name, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("size", "median µs", "interval", "min", "mean", "max", "bus GB/s", "overlap"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for each in record["sizes"]:
        ranks, overlap = each.get("ranks_s"), each.get("overlap")
        drawn.add_row(
            size_text(each["bytes"]),
            figure(1e6 * each["median_s"]),
            "–".join(figure(1e6 * bound) for bound in each["median_ci95"]),
            *(figure(1e6 * ranks[which]) if ranks else "–" for which in ("min", "mean", "max")),
            figure(1e-9 * each["bus_bytes_per_s"]),
            "–" if overlap is None else f"{overlap:.0%}",
        )
    return drawn
