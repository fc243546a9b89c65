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
    tables: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for name, found in files:
        for (group, setting, backend), info in found.items():
            title, _, row = group.partition("." if info["level"] == 0 else "/")
            kinds = tables.setdefault((title, setting), {})
            kinds.setdefault(_kind(info), []).append((row, backend, name, info))
    for (title, setting), kinds in tables.items():
        console.print(f"{title}  ({setting})", style="bold", highlight=False)
        for kind, chosen in kinds.items():
            table = _table(kind, chosen, several=len(files) > 1, wide=console.width >= _WIDE)
            console.print(table, highlight=False)
    notes: dict[str, None] = {}
    for _, found in files:
        for (group, _, backend), info in found.items():
            for reason in info["machine"]["reasons"]:
                notes[f"{group}, {backend}: {reason}"] = None
    if notes:
        console.print("* disturbed while measured; compare with care:")
        for note in notes:
            console.print(f"  {note}", highlight=False)
    kinds_shown = {_kind(info) for _, found in files for info in found.values()}
    console.print("err/tol: the worst validation error as a part of what is accepted", style="dim")
    for kind, note in _NOTES.items():
        if kind in kinds_shown:
            console.print(note, style="dim")


_NAME_WIDTH = {"operator": 20, "time": 20, "ratio": 20, "loading": 21, "breakdown": 14}
"""Of the first column, at least, by kind of table."""

_NOTES = {
    "operator": "of peak: of the fastest large matrix product of that run, whose ever it was",
    "time": "MiB: peak memory; needed: by definition, in a terminal of 100 columns or more",
    "loading": "per core: images/s by cores of the job; wait: for a batch, without its feeding",
    "breakdown": "parts of a step in ms; feed: from host to device",
}
"""By kind of table: what its headings mean."""


def _table(kind: str, chosen: Sequence[Row], *, several: bool, wide: bool) -> Table:
    columns = _columns(kind, several=several, wide=wide)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", min_width=_NAME_WIDTH[kind])
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    first: dict[tuple[str, str], float] = {}
    for measurement in dict.fromkeys(measurement for measurement, *_ in chosen):
        table.add_row(measurement, style="bold")
        for its_measurement, backend, file, info in chosen:
            if its_measurement != measurement:
                continue
            mark = "*" if info["machine"]["disturbed"] else ""
            first.setdefault((measurement, backend), info["median_s"])
            shown = {**info, "over_first": info["median_s"] / first[measurement, backend]}
            name = f"  {backend}{mark}" + (f" {file}" if several else "")
            table.add_row(name, *(cell(shown) for cell in columns.values()))
    return table


def _kind(info: dict[str, Any]) -> str:
    """Which columns a result has: see `_columns`."""
    if info["level"] == 0:
        return "operator"
    kinds = {"ratio": "ratio", "breakdown_s": "breakdown", "wait_s": "loading"}
    return next((kind for key, kind in kinds.items() if key in info), "time")


def _columns(kind: str, *, several: bool, wide: bool) -> dict[str, Cell]:
    """Heading to what it shows."""
    unit, factor = ("µs", 1e6) if kind == "operator" else ("ms", 1e3)
    columns: dict[str, Cell] = {f"median {unit}": lambda info: _figure(factor * info["median_s"])}
    if wide or kind in ("operator", "time"):
        columns["95% interval"] = lambda info: _interval(info["median_ci95"], factor)
    if kind == "operator":
        columns["GFLOP/s"] = lambda info: _rate(info["achieved"]["flops_per_s"])
        columns["of peak"] = lambda info: _part(info["fraction_of_ceiling"]["flops_per_s"])
        columns["GB/s"] = lambda info: _rate(info["achieved"]["bytes_per_s"])
    elif kind == "ratio":
        columns["÷ native"] = lambda info: f"{info['ratio']['median']:.3f}"
        columns["its 95% interval"] = lambda info: "–".join(f"{bound:.3f}" for bound in info["ratio"]["ci95"])
    elif kind == "breakdown":
        columns.update({heading: _part_of_step(key) for heading, key in _PARTS.items()})
        if several:
            del columns["other"]
        else:
            columns["sum"] = lambda info: _milliseconds(sum(info["breakdown_s"].values()))
    else:
        columns["images/s"] = lambda info: _figure(info["throughput"]["value"])
    if kind == "loading":
        columns["per core"] = lambda info: _figure(info["images_per_s_per_core"])
        columns["wait ms"] = lambda info: _figure(1e3 * info["wait_s"])
    if kind == "time" and not several:
        columns["first s"] = lambda info: f"{info['first_call_s']:.2f}"
        columns["MiB"] = lambda info: _mebibytes(info["peak_memory_bytes"])
        if wide:
            columns["needed"] = lambda info: _mebibytes(_needed_bytes(info))
    if several:
        columns["÷ first"] = lambda info: f"{info['over_first']:.3f}"
    if wide or kind != "breakdown":
        columns["err/tol"] = lambda info: f"{_worst_share(info):.2g}"
    return columns


_WIDE = 100
"""Columns of a terminal from which on tables show more."""

_PARTS = {
    "wait": "data_wait",
    "feed": "host_to_device",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "other": "other",
}
"""Heading by part of a step."""


def _part_of_step(key: str) -> Cell:
    return lambda info: _milliseconds(info["breakdown_s"][key])


def _milliseconds(seconds: float) -> str:
    """With one decimal, so that parts and their sum can be compared."""
    return f"{1e3 * seconds:.1f}"


def _needed_bytes(info: dict[str, Any]) -> int | None:
    """What a network needs by its definition: see ``results/schema.json``."""
    parts = ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes")
    memory = info.get("memory", {})
    return sum(memory.get(part, 0) for part in parts) or None


def _mebibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:.0f}"


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
