"""Tables from result files: one file read by a person, or several side by side.

Imports rich and the standard library; knows results, never adapters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.errors import ConfigurationError
from d5suite.files import read_json

Key = tuple[str, str, str]
"""Group (recipe/measurement), preset with device, precision and data, and backend."""

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
                setting += f", batch {info['batch_size']}{_data(info)}"
            found[bench["group"], setting, backend] = {**info, "data": bench["stats"]["data"]}
    if not found:
        raise ConfigurationError(
            "no d5suite results here",
            where=str(path),
            hint="Make some: pytest recipes/ (or operators/) --benchmark-json FILE",
        )
    return found


def _data(info: dict[str, Any]) -> str:
    """Which data a result is from; empty where it does not say, as results of d5suite before 0.2 do not."""
    if "dataset" not in info:
        return ""
    data = info["dataset"]
    stored = f", {data['format']}" if data.get("format", "folder") != "folder" else ""
    return f", {'drawn ' if data['synthetic'] else ''}{data['kind']} {data['digest'][:6]}{stored}"


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
    for (title, setting), rows in _grouped(files).items():
        console.print(f"{title}  ({setting})", style="bold", highlight=False)
        for kind in dict.fromkeys(_kind(info) for *_, info in rows):
            chosen = [row for row in rows if _kind(row[3]) == kind]
            table = _table(kind, chosen, several=len(files) > 1, wide=console.width >= _WIDE)
            console.print(table, highlight=False)
    reduced = {(b, i["batch_size"]) for _, found in files for (_, _, b), i in found.items() if _is_reduced(i)}
    for backend, size in sorted(reduced):
        console.print(f"† {backend} is measured at a reduced size, batch {size}: compare its images/s", highlight=False)
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
    console.print("interval: of the median, 95% sure; of 5 samples 94%, of 4 88%, of 3 75%", style="dim")
    console.print("err/tol: the worst validation error as a part of what is accepted", style="dim")
    for kind, note in _NOTES.items():
        if kind in kinds_shown:
            console.print(note, style="dim")


def _grouped(files: Sequence[tuple[str, dict[Key, dict[str, Any]]]]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each table, by its title and setting; those of a reduced size stand beside the others."""
    tables: dict[tuple[str, str], list[Row]] = {}
    for name, found in files:
        for (group, setting, backend), info in found.items():
            title, _, row = group.partition("." if info["level"] == 0 else "/")
            tables.setdefault((title, setting), []).append((row, backend, name, info))
    for key, rows in list(tables.items()):
        if _is_reduced(rows[0][3]):
            alike = [
                other
                for other, others in tables.items()
                if other != key and other[0] == key[0] and _conditions(others[0][3]) == _conditions(rows[0][3])
            ]
            if len(alike) == 1:
                tables[alike[0]] += tables.pop(key)
    return tables


def _conditions(info: dict[str, Any]) -> tuple[str, str, str]:
    return info["device"], info["precision"], _data(info)


def _is_reduced(info: dict[str, Any]) -> bool:
    return bool(info["preset"] == "reduced")


_NAME_WIDTH = {"operator": 20, "time": 20, "ratio": 20, "loading": 21, "breakdown": 14, "accuracy": 16}
"""Of the first column, at least, by kind of table."""

_NOTES = {
    "operator": "of peak: of the fastest large matrix product of that run, whose ever it was",
    "time": "MiB: peak memory; needed: by definition, in a terminal of 100 columns or more",
    "accuracy": "medians of the runs; the interval is of the time, with its confidence",
    "loading": "per core: images/s by cores of the job; wait: for a batch, without its feeding",
    "breakdown": "parts of a step in ms; feed: from host to device; !: they sum to more than 2% off the step",
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
            mark = "†" * _is_reduced(info) + "*" * info["machine"]["disturbed"] + "!" * _is_off(info)
            first.setdefault((measurement, backend), info["median_s"])
            shown = {**info, "over_first": info["median_s"] / first[measurement, backend]}
            name = f"  {backend}{mark}" + (f" {file}" if several else "")
            table.add_row(name, *(cell(shown) for cell in columns.values()))
    return table


def _kind(info: dict[str, Any]) -> str:
    """Which columns a result has: see `_columns`."""
    if info["level"] == 0:
        return "operator"
    kinds = {"ratio": "ratio", "breakdown_s": "breakdown", "wait_s": "loading", "target": "accuracy"}
    return next((kind for key, kind in kinds.items() if key in info), "time")


def _columns(kind: str, *, several: bool, wide: bool) -> dict[str, Cell]:
    """Heading to what it shows."""
    if kind == "accuracy":
        return _columns_of_accuracy(several=several, wide=wide)
    unit, factor = ("µs", 1e6) if kind == "operator" else ("ms", 1e3)
    columns: dict[str, Cell] = {f"median {unit}": lambda info: _figure(factor * info["median_s"])}
    if wide or kind in ("operator", "time"):
        columns["interval"] = lambda info: _interval(info["median_ci95"], factor) + _less_sure(info, wide)
    if kind == "operator":
        columns["GFLOP/s"] = lambda info: _rate(info["achieved"]["flops_per_s"])
        columns["of peak"] = lambda info: _part(info["fraction_of_ceiling"]["flops_per_s"])
        columns["GB/s"] = lambda info: _rate(info["achieved"]["bytes_per_s"])
    elif kind == "ratio":
        columns["÷ native"] = lambda info: f"{info['ratio']['median']:.3f}"
        columns["its interval"] = lambda info: "–".join(f"{bound:.3f}" for bound in info["ratio"]["ci95"])
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


def _columns_of_accuracy(*, several: bool, wide: bool) -> dict[str, Cell]:
    columns: dict[str, Cell] = {"target": lambda info: _figure(info["target"]["value"])}
    if wide or not several:
        columns["runs"] = lambda info: f"{sum('seconds' in run for run in info['runs'])} of {len(info['runs'])}"
    columns["median s"] = lambda info: _figure(info["median_s"])
    columns["interval"] = lambda info: f"{_interval(info['median_ci95'], 1.0)} ({info['median_ci_confidence']:.0%})"
    columns["steps"] = lambda info: _median_of(info, "steps")
    if wide:
        columns["images"] = lambda info: _median_of(info, "samples")
    if wide or not several:
        columns["epochs"] = lambda info: _median_of(info, "epochs")
    if several:
        columns["÷ first"] = lambda info: f"{info['over_first']:.3f}"
    return columns


def _median_of(info: dict[str, Any], key: str) -> str:
    return _figure(statistics.median(run[key] for run in info["runs"] if key in run))


def _is_off(info: dict[str, Any]) -> bool:
    """Whether the parts of a step do not add up to it."""
    parts = info.get("breakdown_s")
    return parts is not None and abs(sum(parts.values()) / info["median_s"] - 1) > _SUM_TOLERANCE


_CONFIDENCE = 0.95
"""Of intervals, where there are samples enough."""

_SUM_TOLERANCE = 0.02
"""Of the sum of a step's parts; see docs/training.md."""

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


def _less_sure(info: dict[str, Any], wide: bool) -> str:
    """What an interval covers where samples are too few for 95%, if there is room for it."""
    confidence = info["median_ci_confidence"]
    return f" ({confidence:.0%})" if wide and confidence < _CONFIDENCE else ""


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
