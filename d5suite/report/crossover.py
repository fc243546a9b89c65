"""Parameter servers against all-reduce: measured times, predictions beyond, and the crossover.

Imports matplotlib and rich (late), `d5suite.models` and its neighbours.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError
from d5suite.models.algorithms import ALGORITHMS, COLLECTIVE, SERVERS, algorithm_s, crossover
from d5suite.models.communication import Link, gap_s
from d5suite.report.colours import styles
from d5suite.report.formats import figure
from d5suite.report.page.svg import drawing
from d5suite.report.scaling import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

ASSUMES = (
    "Predicted: messages one after the other take α each, those of several ranks to one server g each, and each "
    "rank's own link carries bytes both ways at once; sums take no time, and links are never shared. Ranks of one "
    "host share its cores and memory: there, predictions of many ranks are those of a network of such links."
)
AGAINST = {"ring": ("ring",), "any": COLLECTIVE}
"""All-reduces that servers are compared with: of several, the fastest."""

BURST = 16
"""Messages of ``ping_burst``."""

PANEL = 4.6, 3.6
"""Inches of a panel."""


@dataclass(frozen=True)
class AllReduceStudy:
    """All-reduces of a result file on one communicator.

    Attributes
    ----------
    communicator : str
    link : Link
        One direction: half of the line fitted to `ping_pong`; and the gap of `ping_burst`, if
        measured.
    measured : mapping
        Median seconds by algorithm, number of ranks and bytes.
    """

    communicator: str
    link: Link
    measured: Mapping[tuple[str, int, int], float]

    @property
    def sizes(self) -> list[int]:
        """Bytes that were measured, ascending."""
        return sorted({nbytes for _, _, nbytes in self.measured})

    @property
    def few_sizes(self) -> list[int]:
        """The smallest, the middle and the largest size that were measured."""
        known = self.sizes
        return sorted({known[0], known[len(known) // 2], known[-1]})

    @property
    def algorithms(self) -> list[str]:
        """Algorithms that are measured or have a model."""
        return list(dict.fromkeys([*ALGORITHMS, *sorted({name for name, _, _ in self.measured})]))

    def seconds(self, algorithm: str, ranks: int, nbytes: int, tensors: int) -> float | None:
        """Return the seconds to reduce equal tensors one by one; None if not measured."""
        one = self.measured.get((algorithm, ranks, nbytes // tensors))
        return None if one is None or nbytes % tensors else one * tensors


def studies(records: Mapping[Any, Mapping[str, Any]]) -> list[AllReduceStudy]:
    """Return a study for each communicator of a file's records.

    Raises
    ------
    ConfigurationError
        If the file lacks all-reduces, or messages between two ranks.
    """
    found: dict[str, dict[tuple[str, int, int], float]] = {}
    links: dict[str, tuple[int, Link]] = {}
    played: dict[tuple[str, str, int], float] = {}  # by call, communicator and ranks: seconds of the smallest size
    for (group, *_), info in records.items():
        if info["measurement"] != "collectives":
            continue
        name, ranks = info["communicator"], info["ranks"]
        if group.startswith(("ping_pong/", "ping_burst/")) and info["sizes"]:
            played[group.split("/")[0], name, ranks] = min(info["sizes"], key=lambda each: each["bytes"])["median_s"]
        if group.startswith("all_reduce/"):
            for each in info["sizes"]:
                found.setdefault(name, {})[info["algorithm"], ranks, each["bytes"]] = each["median_s"]
        elif group.startswith("ping_pong/") and (name not in links or ranks < links[name][0]):
            line = info["line"]
            links[name] = ranks, Link(line["alpha_s"] / 2, line["beta_s_per_byte"] / 2)
    both = [name for name in found if name in links]
    if not both:
        raise ConfigurationError(
            "there are no all-reduces and messages between two ranks of one communicator",
            hint="Measure collectives/test_all_reduce.py and collectives/test_ping_pong.py with --ranks 2.",
        )
    made = []
    for name in both:
        ranks, link = links[name]
        single, burst = (played.get((call, name, ranks)) for call in ("ping_pong", "ping_burst"))
        gap = 0.0 if single is None or burst is None else gap_s(single, burst, BURST)
        made.append(AllReduceStudy(name, replace(link, gap_s=gap), found[name]))
    return made


def crossovers(
    study: AllReduceStudy, sizes: Sequence[int], tensors: Sequence[int], most: int
) -> Iterator[dict[str, Any]]:
    """Yield the fewest ranks from which on all-reduce is faster, by bytes, tensors and servers."""
    for nbytes in sizes:
        for count in tensors:
            for name, against in AGAINST.items():
                for servers in SERVERS:
                    first = crossover(servers, nbytes, study.link, range(2, most + 1), tensors=count, against=against)
                    yield {
                        "communicator": study.communicator,
                        "bytes": nbytes,
                        "tensors": count,
                        "against": name,
                        "servers": servers,
                        "crossover_ranks": first,
                    }


def errors(study: AllReduceStudy) -> dict[str, list[float]]:
    """Return measured over predicted times by algorithm."""
    found: dict[str, list[float]] = {}
    for (name, ranks, nbytes), seconds in study.measured.items():
        if name in ALGORITHMS and ranks > 1:
            found.setdefault(name, []).append(seconds / algorithm_s(name, ranks, nbytes, study.link))
    return found


def to_dict(found: Sequence[AllReduceStudy], sizes: Sequence[int], tensors: Sequence[int], most: int) -> dict[str, Any]:
    """Return crossovers, the links that they rest on, and how far predictions are off, for JSON.

    Parameters
    ----------
    found : sequence of AllReduceStudy
    sizes : sequence of int
        Bytes; if empty, `AllReduceStudy.few_sizes`.
    tensors : sequence of int
    most : int
        Largest number of ranks that is predicted.
    """
    return {
        "assumes": ASSUMES,
        "most": most,
        "links": [{"communicator": each.communicator, **asdict(each.link)} for each in found],
        "crossovers": [row for each in found for row in crossovers(each, sizes or each.few_sizes, tensors, most)],
        "off": [
            {"communicator": each.communicator, "algorithm": name, "measured_over_predicted": ratios}
            for each in found for name, ratios in errors(each).items()
        ],
    }  # fmt: skip


def tables(study: AllReduceStudy, sizes: Sequence[int], tensors: Sequence[int], most: int) -> list[Table]:
    """Return the tables of a study: crossovers; how far predictions are off; measured times."""
    from rich import box
    from rich.table import Table

    def table(title: str, *headings: str) -> Table:
        drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        for heading in headings:
            drawn.add_column(heading, justify="right", no_wrap=True)
        return drawn

    servers = [name.removeprefix("parameter_server").removeprefix("_") or "1" for name in SERVERS]
    first = table(
        f"ranks from which on an all-reduce is faster than k servers, predicted up to {most}, {study.communicator}: "
        + _described(study.link),
        "bytes", "tensors", "all-reduce", *(f"k={count}" for count in servers),
    )  # fmt: skip
    rows = list(crossovers(study, sizes, tensors, most))
    for start in range(0, len(rows), len(SERVERS)):
        own = rows[start : start + len(SERVERS)]
        cells = [str(each["crossover_ranks"] or "never") for each in own]
        first.add_row(size_text(own[0]["bytes"]), str(own[0]["tensors"]), own[0]["against"], *cells)
    second = table("measured over predicted", "algorithm", "median", "range", "points")
    for name, ratios in errors(study).items():
        interval = f"{figure(min(ratios))}–{figure(max(ratios))}"
        second.add_row(name, figure(statistics.median(ratios)), interval, str(len(ratios)))
    third = table("measured ms", "algorithm", "ranks", *(size_text(nbytes) for nbytes in study.sizes))
    for name, ranks in sorted({(name, ranks) for name, ranks, _ in study.measured}):
        found = [study.measured.get((name, ranks, nbytes)) for nbytes in study.sizes]
        third.add_row(name, str(ranks), *("–" if s is None else figure(1e3 * s) for s in found))
    return [first, second, third]


def _described(link: Link) -> str:
    gap = f"g {figure(1e6 * link.gap_s)} µs" if link.gap_s else "g unknown"
    return f"α {figure(1e6 * link.alpha_s)} µs, {gap}, 1/β {figure(1e-9 / link.beta_s_per_byte)} GB/s"


def draw(study: AllReduceStudy, sizes: Sequence[int], tensors: Sequence[int], most: int) -> Figure:
    """Draw milliseconds over ranks: a column for each size, a row for each number of tensors."""
    from matplotlib.figure import Figure

    with drawing():
        height = PANEL[1] * len(tensors) + 1.2
        drawn = Figure(figsize=(PANEL[0] * len(sizes), height), layout="constrained")
        grid = drawn.subplots(len(tensors), len(sizes), squeeze=False, sharex=True)
        for row, count in zip(grid, tensors, strict=True):
            for axes, nbytes in zip(row, sizes, strict=True):
                _panel(axes, study, nbytes, count, most)
        for axes in grid[-1]:
            axes.set_xlabel("ranks")
        for row in grid:
            row[0].set_ylabel("ms")
        handles, labels = grid[0][0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        drawn.suptitle(
            f"Parameter servers and all-reduce, {study.communicator}: measured (markers) and predicted (lines) by "
            + _described(study.link)
        )
    return drawn


def _panel(axes: Axes, study: AllReduceStudy, nbytes: int, tensors: int, most: int) -> None:
    ranks = sorted({2**power for power in range(1, most.bit_length()) if 2**power <= most} | {most})
    for name, style in zip(study.algorithms, styles(study.algorithms), strict=True):
        label = name.replace("_", " ")
        if name in ALGORITHMS:
            times = [1e3 * algorithm_s(name, count, nbytes, study.link, tensors=tensors) for count in ranks]
            axes.plot(ranks, times, color=style.colour, linestyle="--" if name in SERVERS else "-", linewidth=1.2)
        counts = sorted({count for of, count, _ in study.measured if of == name})
        points = [(count, study.seconds(name, count, nbytes, tensors)) for count in counts]
        known = [(count, 1e3 * seconds) for count, seconds in points if seconds is not None]
        across, up = zip(*known, strict=True) if known else ((), ())
        line = "none" if name not in ALGORITHMS else "--" if name in SERVERS else "-"
        axes.plot(across, up, color=style.colour, marker=style.marker, markersize=6, linestyle="none")
        axes.plot([], [], color=style.colour, marker=style.marker, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(f"{size_text(nbytes)} in {tensors} tensor{'s' if tensors > 1 else ''}", fontsize=10)
    axes.grid(alpha=0.25)
