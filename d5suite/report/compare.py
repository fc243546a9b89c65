"""Tables from result files: one file read by a person, or several side by side.

Imports rich and the standard library; knows results, never adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
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
    """Print one table per recipe: its measurements, and in each the backends of one file or of several side by side.

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
    recipes = dict.fromkeys((group.split("/")[0], setting) for _, found in files for group, setting, _ in found)
    for recipe, setting in recipes:
        chosen = [
            (group.split("/")[1], backend, name, info)
            for name, found in files
            for (group, its_setting, backend), info in found.items()
            if (group.split("/")[0], its_setting) == (recipe, setting)
        ]
        console.print(_table(f"{recipe}  ({setting})", chosen, several=len(files) > 1), highlight=False)
    notes: dict[str, None] = {}
    for _, found in files:
        for (group, _, backend), info in found.items():
            for reason in info["machine"]["reasons"]:
                notes[f"{group.split('/')[1]}, {backend}: {reason}"] = None
    if notes:
        console.print("* disturbed while measured; compare with care:")
        for note in notes:
            console.print(f"  {note}", highlight=False)
    console.print("err/tol: the worst validation error as a part of what is accepted", style="dim")


def _table(title: str, chosen: Sequence[tuple[str, str, str, dict[str, Any]]], *, several: bool) -> Table:
    with_ratio = any("ratio" in info for *_, info in chosen)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", min_width=20)
    columns = ["median ms", "95% interval"]
    columns += ["÷ native", "95% interval"] if with_ratio else ["images/s"]
    columns += ["÷ first"] if several else [] if with_ratio else ["first s", "MiB"]
    for name in (*columns, "err/tol"):
        table.add_column(name, justify="right", no_wrap=True)
    first: dict[tuple[str, str], float] = {}
    for measurement in dict.fromkeys(measurement for measurement, *_ in chosen):
        table.add_row(measurement, style="bold")
        for its_measurement, backend, file, info in chosen:
            if its_measurement != measurement:
                continue
            median = info["median_s"]
            low, high = (1e3 * bound for bound in info["median_ci95"])
            mark = "*" if info["machine"]["disturbed"] else ""
            row = [f"  {backend}{mark}" + (f" {file}" if several else ""), _figure(1e3 * median)]
            row.append(f"{_figure(low)}–{_figure(high)}")
            if with_ratio:
                ratio = info["ratio"]
                row += [f"{ratio['median']:.3f}", f"{ratio['ci95'][0]:.3f}–{ratio['ci95'][1]:.3f}"]
            else:
                row.append(_figure(info["throughput"]["value"]))
            if several:
                row.append(f"{median / first.setdefault((measurement, backend), median):.3f}")
            elif not with_ratio:
                peak = info["peak_memory_bytes"]
                row += [f"{info['first_call_s']:.2f}", "–" if peak is None else f"{peak / 2**20:.0f}"]
            table.add_row(*row, f"{_worst_share(info):.2g}")
    return table


def _worst_share(info: dict[str, Any]) -> float:
    """The largest error as a part of its tolerance; where nothing is tolerated, the error itself."""
    checks = info["validation"]["checks"]
    return max(float(c["error"] / c["tolerance"] if c["tolerance"] else c["error"]) for c in checks)


def _figure(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
