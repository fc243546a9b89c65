"""Tables from result files: one file read by a person, or several side by side.

Imports rich and the standard library; knows results, never adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from d5suite.errors import ConfigurationError
from d5suite.files import read_json

Key = tuple[str, str, str]
"""Group (recipe/measurement), preset with device and precision, and backend."""


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
            setting = f"{info['preset']}, {info['device']}, {info['precision']}, batch {info['batch_size']}"
            found[bench["group"], setting, bench["param"]] = {**info, "data": bench["stats"]["data"]}
    if not found:
        raise ConfigurationError(
            "no d5suite results here", where=str(path), hint="Make some: pytest recipes/ --benchmark-json FILE"
        )
    return found


def show(paths: Sequence[Path], console: Console) -> None:
    """Print one table per measurement: all backends of one file, or the same measurements of several files.

    Parameters
    ----------
    paths : sequence of Path
        Result files. With more than one, each row also gives its median divided by the first file's.
    console : rich.console.Console
    """
    files = [(path.name, load_results(path)) for path in paths]
    groups = dict.fromkeys((group, setting) for _, found in files for group, setting, _ in found)
    for group, setting in groups:
        table = Table(title=f"{group}  ({setting})", title_justify="left", title_style="bold")
        if len(files) > 1:
            table.add_column("file", overflow="fold")
        table.add_column("backend")
        table.add_column("median ms", justify="right")
        table.add_column("95% interval", justify="right")
        table.add_column("images/s", justify="right")
        ratio_name = _ratio_name(files, group, setting)
        if ratio_name:
            table.add_column(ratio_name, justify="right")
        else:
            table.add_column("first call s", justify="right")
            table.add_column("peak MiB", justify="right")
        table.add_column("error/tol", justify="right")
        if len(files) > 1:
            table.add_column("ratio", justify="right")
        first: dict[str, float] = {}
        for name, found in files:
            for (a, b, backend), info in found.items():
                if (a, b) != (group, setting):
                    continue
                row = [name] if len(files) > 1 else []
                median = info["median_s"]
                row += _row(backend, info, bool(ratio_name))
                if len(files) > 1:
                    row.append(f"{median / first.setdefault(backend, median):.3f}")
                table.add_row(*row)
        console.print(table)
    notes = {
        f"{backend}: {reason}"
        for _, found in files
        for (_, _, backend), info in found.items()
        for reason in info["machine"]["reasons"]
    }
    if any(info["machine"]["disturbed"] for _, found in files for info in found.values()):
        console.print("* disturbed while measured; compare with care:")
        for note in sorted(notes):
            console.print(f"  {note}", highlight=False)


def _ratio_name(files: Sequence[tuple[str, dict[Key, dict[str, Any]]]], group: str, setting: str) -> str | None:
    for _, found in files:
        for (a, b, _), info in found.items():
            if (a, b) == (group, setting) and "ratio" in info:
                return f"÷ {info['compared_with'].replace('_', ' ')}"
    return None


def _row(backend: str, info: dict[str, Any], with_ratio: bool) -> list[str]:
    low, high = (1e3 * bound for bound in info["median_ci95"])
    row = [
        backend + ("*" if info["machine"]["disturbed"] else ""),
        _figure(1e3 * info["median_s"]),
        f"{_figure(low)}–{_figure(high)}",
        _figure(info["throughput"]["value"]),
    ]
    if with_ratio:
        ratio = info["ratio"]
        row.append(f"{ratio['median']:.3f} ({ratio['ci95'][0]:.3f}–{ratio['ci95'][1]:.3f})")
    else:
        peak = info["peak_memory_bytes"]
        row += [f"{info['first_call_s']:.2f}", "–" if peak is None else f"{peak / 2**20:.0f}"]
    shares = [c["error"] / c["tolerance"] if c["tolerance"] else c["error"] for c in info["validation"]["checks"]]
    return [*row, f"{max(shares):.2g}" if shares else "–"]


def _figure(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
