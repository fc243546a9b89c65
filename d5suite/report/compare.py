"""Tables from result files: one file read by a person, or several side by side.

Imports rich and the standard library; knows results, never adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.errors import ConfigurationError
from d5suite.files import read_json

Key = tuple[str, str, str]
"""Group (recipe/measurement), preset with device and precision, and backend."""

Row = tuple[str, str, str, dict[str, Any]]
"""Measurement, backend, number of the file, and the result."""

Cell = Callable[[dict[str, Any]], str]


def load_results(path: Path) -> dict[Key, dict[str, Any]]:
    """Read the d5suite benchmarks of a result file.

    Raises
    ------
    JobError
        If the file cannot be read.
    ConfigurationError
        If it holds none.
    """
    content = read_json(path)
    benchmarks = content.get("benchmarks", []) if isinstance(content, dict) else []
    found = {}
    for bench in benchmarks:
        info = bench.get("extra_info", {}).get("d5suite")
        if info is not None:
            setting = f"{info['preset']}, {info['device']}, {info['precision']}"
            backend = bench["param"]
            if info["level"] == 0:
                backend = backend.partition("-")[2]  # the problem's name, which has no -, comes first
            else:
                setting += f", batch {info['batch_size']}"
            found[bench["group"], setting, backend] = {**info, "data": bench["stats"]["data"]}
    if not found:
        raise ConfigurationError(
            "no d5suite results here",
            where=str(path),
            hint="Make some: pytest recipes/ (or operators/) --benchmark-json FILE",
        )
    return found


def show(paths: Sequence[Path], console: Console) -> None:
    """Print one table per recipe or family of operators, with the backends of one file or of several side by side.

    Parameters
    ----------
    paths : sequence of Path
        Result files. With more than one, each row also gives its median divided by the first file's.
    console : rich.console.Console
    """
    files = [(f"({number})", load_results(path)) for number, path in enumerate(paths, 1)]
    if len(files) > 1:
        for (number, _), path in zip(files, paths, strict=True):
            console.print(f"{number} {path}", highlight=False)
        console.print()
    tables: dict[tuple[str, str], list[Row]] = {}
    for name, found in files:
        for (group, setting, backend), info in found.items():
            title, _, row = group.partition("." if info["level"] == 0 else "/")
            tables.setdefault((title, setting), []).append((row, backend, name, info))
    for (title, setting), chosen in tables.items():
        console.print(_table(f"{title}  ({setting})", chosen, several=len(files) > 1), highlight=False)
    notes: dict[str, None] = {}
    for _, found in files:
        for (group, _, backend), info in found.items():
            for reason in info["machine"]["reasons"]:
                notes[f"{group}, {backend}: {reason}"] = None
    if notes:
        console.print("* disturbed while measured; compare with care:")
        for note in notes:
            console.print(f"  {note}", highlight=False)
    console.print("err/tol: the worst validation error as a part of what is accepted", style="dim")
    if any(info["level"] == 0 for _, found in files for info in found.values()):
        console.print("of peak: of the fastest large matrix product of that run, whose ever it was", style="dim")


def _table(title: str, chosen: Sequence[Row], *, several: bool) -> Table:
    columns = _columns([info for *_, info in chosen], several=several)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", min_width=20)
    for name in (*columns, *(["÷ first"] if several else []), "err/tol"):
        table.add_column(name, justify="right", no_wrap=True)
    first: dict[tuple[str, str], float] = {}
    for measurement in dict.fromkeys(measurement for measurement, *_ in chosen):
        table.add_row(measurement, style="bold")
        for its_measurement, backend, file, info in chosen:
            if its_measurement != measurement:
                continue
            mark = "*" if info["machine"]["disturbed"] else ""
            row = [f"  {backend}{mark}" + (f" {file}" if several else ""), *(cell(info) for cell in columns.values())]
            if several:
                median = info["median_s"]
                row.append(f"{median / first.setdefault((measurement, backend), median):.3f}")
            table.add_row(*row, f"{_worst_share(info):.2g}")
    return table


def _columns(found: Sequence[dict[str, Any]], *, several: bool) -> dict[str, Cell]:
    """Heading to what it shows, for the level of these results."""
    if all(info["level"] == 0 for info in found):
        return {
            "median µs": lambda info: _figure(1e6 * info["median_s"]),
            "95% interval": lambda info: _interval(info["median_ci95"], 1e6),
            "GFLOP/s": lambda info: _rate(info["achieved"]["flops_per_s"]),
            "of peak": lambda info: _part(info["fraction_of_ceiling"]["flops_per_s"]),
            "GB/s": lambda info: _rate(info["achieved"]["bytes_per_s"]),
        }
    columns: dict[str, Cell] = {
        "median ms": lambda info: _figure(1e3 * info["median_s"]),
        "95% interval": lambda info: _interval(info["median_ci95"], 1e3),
    }
    if any("ratio" in info for info in found):
        columns["÷ native"] = lambda info: f"{info['ratio']['median']:.3f}"
        columns["its 95% interval"] = lambda info: "–".join(f"{bound:.3f}" for bound in info["ratio"]["ci95"])
        return columns
    columns["images/s"] = lambda info: _figure(info["throughput"]["value"])
    if not several:
        columns["first s"] = lambda info: f"{info['first_call_s']:.2f}"
        columns["MiB"] = lambda info: (
            "–" if info["peak_memory_bytes"] is None else f"{info['peak_memory_bytes'] / 2**20:.0f}"
        )
    return columns


def _interval(bounds: Sequence[float], factor: float) -> str:
    return "–".join(_figure(factor * bound) for bound in bounds)


def _rate(value: float | None) -> str:
    return "–" if value is None else _figure(value / 1e9)


def _part(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def _worst_share(info: dict[str, Any]) -> float:
    """The largest error as a part of its tolerance; where nothing is tolerated, the error itself."""
    checks = info["validation"]["checks"]
    return max(float(c["error"] / c["tolerance"] if c["tolerance"] else c["error"]) for c in checks)


def _figure(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
