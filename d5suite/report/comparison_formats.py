"""A comparison as a table, Markdown for a summary page, JUnit XML for a CI server, and JSON.

Names come from files: `d5suite.report.runs` has made them printable; here the special characters of
each format are escaped. Imports rich and its neighbours.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as XML

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.report.formats import figure
from d5suite.report.runs import Entry
from d5suite.report.verdicts import RunComparison, Verdict, found_from, summary

STYLES = {"slower": "red", "worse": "red", "invalid": "red", "missing": "red", "faster": "green", "uncertain": "yellow"}

_NAMED = 3
"""Most benchmarks that are listed for one difference."""


def show_comparison(comparison: RunComparison, console: Console) -> None:
    """Print the table, the evidence for each verdict, and the summary.

    Parameters
    ----------
    comparison : RunComparison
    console : rich.console.Console
    """
    if comparison.verdicts:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold")
        for heading in _headings(comparison):
            table.add_column(heading, justify="left" if heading == "verdict" else "right", no_wrap=True)
        heading = ""
        for each in comparison.verdicts:
            group, backend = split(each.name)
            if group and group != heading:
                table.add_row(group, style="bold")
            heading = group
            style = STYLES.get(each.verdict, "red" if each.regressions else "")
            cells = _cells(each, paired=_is_paired(comparison))
            table.add_row(f"  {backend}" if group else backend, *cells, style=style)
        console.print(table, highlight=False)
        if _is_paired(comparison):
            console.print(OF_PAIRS, style="dim", highlight=False)
    for heading, lines in _remarks(comparison):
        console.print("\n".join([heading, *(f"  {line}" for line in lines)]), highlight=False)
    console.print(f"{summary(comparison)} (exit {int(comparison.exit)})", style="bold", highlight=False)


OF_PAIRS = "A, B: medians; B ÷ A: of pairs measured in turn, so it is not the ratio of these medians"
"""What the columns mean in a comparison of two sides."""


def split(name: str) -> tuple[str, str]:
    """Split a name into group and backend; names of other tools have an empty group."""
    group, space, backend = name.rpartition(" ")
    return (group, backend) if space and "/" in group and " " not in group and "::" not in group else ("", name)


def _is_paired(comparison: RunComparison) -> bool:
    return comparison.base.kind == "side"


def _headings(comparison: RunComparison) -> list[str]:
    if _is_paired(comparison):
        return ["A ms", "B ms", "B ÷ A", "interval", "finds", "pairs", "verdict"]
    return ["base ms", "new ms", "ratio", "interval", "finds", "verdict"]


def _cells(verdict: Verdict, *, paired: bool) -> list[str]:
    ratio = interval = "–"
    if verdict.ratio is not None:
        ratio = f"{verdict.ratio.value:.3f}"
        if math.isfinite(verdict.ratio.high):
            interval = f"{verdict.ratio.low:.2f}–{verdict.ratio.high:.2f}"
    pairs = [str(verdict.ratio.n) if verdict.ratio else "–"] * paired
    return [_median(verdict.base), _median(verdict.new), ratio, interval, _finds(verdict), *pairs, _said(verdict)]


def _finds(verdict: Verdict) -> str:
    """Return the smallest slowdown that would have been found."""
    if verdict.finds is None:
        return "–"
    return f"{verdict.finds:.2f}" if math.isfinite(verdict.finds) else "none"


def _said(verdict: Verdict) -> str:
    """Return the verdict and the regressions other than time."""
    beside = ", ".join(each for each in verdict.regressions if each != "time")
    joint = ": " if verdict.verdict == "worse" else "; "
    return f"{verdict.verdict}{joint}{beside}" if beside else verdict.verdict


def _median(entry: Entry | None) -> str:
    if entry is None or entry.wrong:
        return "–"
    return f"{entry.summary.median / 2**20:.4g} MiB" if entry.is_memory else figure(1e3 * entry.summary.median)


def _remarks(comparison: RunComparison) -> list[tuple[str, Sequence[str]]]:
    """Return remarks below the table: headings with their lines."""
    remarks: list[tuple[str, Sequence[str]]] = []
    if comparison.differences:
        what = "differ, compared anyway:" if comparison.forced else "the runs differ, and are not compared:"
        lines = [f"{difference} ({_counted(names)})" for difference, names in comparison.differences.items()]
        remarks.append((what, lines if comparison.forced else [*lines, "--force compares them anyway"]))
    for verdicts, heading in (
        (("invalid",), "invalid:"),
        (("slower", "worse", "faster", "same", "new"), "found:"),
        (("missing",), "missing:"),
        (("uncertain",), "uncertain:"),
    ):
        reasons = _grouped([(each.name, reason) for each in comparison.verdicts if each.verdict in verdicts
                         for reason in each.reasons])  # fmt: skip
        if reasons:
            remarks.append((heading, reasons))
    facts = _grouped([(each.name, note) for each in comparison.verdicts for note in each.notes])
    if facts:
        remarks.append(("also different:", facts))
    if limits := found_from(comparison):
        remarks.append(("what could be found:", [limits]))
    if comparison.notes:
        remarks.append(("note:", comparison.notes))
    return remarks


def _grouped(remarks: Sequence[tuple[str, str]]) -> list[str]:
    """Group benchmarks by note, one line each."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, what in remarks:
        names[what].append(name)
    return [f"{what} ({_counted(benchmarks)})" for what, benchmarks in names.items()]


def _counted(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def to_markdown(comparison: RunComparison) -> str:
    """Return a table in GitHub's Markdown, which CI servers show on a job's page."""
    lines = [f"**{_markdown(summary(comparison))}** (exit {int(comparison.exit)})", ""]
    if comparison.verdicts:
        headings = _headings(comparison)
        lines += [f"| benchmark | {' | '.join(headings)} |", f"|:--|{'--:|' * (len(headings) - 1)}:--|"]
        rows = [[each.name, *_cells(each, paired=_is_paired(comparison))] for each in comparison.verdicts]
        lines += [f"| {' | '.join(map(_markdown, row))} |" for row in rows]
        lines += ["", OF_PAIRS] if _is_paired(comparison) else []
    for heading, remarks in _remarks(comparison):
        lines += ["", _markdown(heading), "", *(f"- {_markdown(line)}" for line in remarks)]
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    """Escape text so that nothing is markup: no link, no HTML, no mention of a person."""
    escaped = re.sub(r"([\\`*_{}\[\]()#+!|~>-])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"@|:(?=//)|www(?=\.)", "\\g<0>\u200b", escaped, flags=re.IGNORECASE)


def to_junit(comparison: RunComparison) -> bytes:
    """Return JUnit XML: failures are regressions and missing benchmarks, errors wrong answers."""
    suite = XML.Element("testsuite", name=f"d5suite {'ab' if _is_paired(comparison) else 'compare'}")
    counts = {"failure": 0, "error": 0, "skipped": 0}
    cases = [(each.name, _junit(each), "; ".join(each.reasons)) for each in comparison.verdicts]
    if comparison.refused:
        cases += [(difference, "error", "the runs are not comparable") for difference in comparison.differences]
    elif not comparison.judged:  # servers take a suite without remarks for a success
        cases.append(("no benchmark was judged", "skipped", "; ".join(comparison.notes)))
    for name, kind, message in cases:
        group, backend = split(name)
        case = XML.SubElement(suite, "testcase", classname=group or "benchmark", name=backend)
        if kind:
            counts[kind] += 1
            XML.SubElement(case, kind, message=message)
    numbers = {"failures": counts["failure"], "errors": counts["error"], "skipped": counts["skipped"]}
    for attribute, number in {"tests": len(cases), **numbers}.items():
        suite.set(attribute, str(number))
    XML.indent(suite)
    text = XML.tostring(suite, encoding="utf-8", xml_declaration=True)
    assert isinstance(text, bytes)
    return text + b"\n"


def _junit(verdict: Verdict) -> str:
    if verdict.verdict == "invalid":
        return "error"
    if verdict.regressions or verdict.verdict == "missing":
        return "failure"
    return "skipped" if verdict.verdict == "uncertain" else ""


def to_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison as JSON-able values: times in seconds, infinite numbers as null."""

    def side(entry: Entry | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        return {
            "median_bytes" if entry.is_memory else "median_s": _finite(entry.summary.median),
            "samples": entry.summary.n,
            "peak_memory_bytes": _finite(entry.costs.memory_bytes),
            "first_call_s": _finite(entry.costs.first_call_s),
            "error": _finite(entry.costs.error),
            "figures": {name: each.value for name, each in entry.figures.items()},
            "disturbed": entry.disturbed,
        }

    return {
        "schema": "d5suite-comparison-1",
        "base": {"path": str(comparison.base.path), "kind": comparison.base.kind, "datetime": comparison.base.date},
        "new": {"path": str(comparison.new.path), "kind": comparison.new.kind, "datetime": comparison.new.date},
        "exit": int(comparison.exit),
        "summary": summary(comparison),
        "forced": comparison.forced,
        "differences": comparison.differences,
        "notes": comparison.notes,
        "found_from": found_from(comparison),
        "benchmarks": [
            {
                "name": each.name,
                "verdict": each.verdict,
                "outcome": each.decision and each.decision.outcome,
                "reasons": each.reasons,
                "regressions": each.regressions,
                "ratio": _finite(each.ratio and each.ratio.value),
                "interval": each.ratio and [*map(_finite, each.ratio.interval)],
                "finds": _finite(each.finds),
                "p_value": _finite(each.decision and each.decision.p_value),
                "pairs": each.ratio.n if each.ratio and each.ratio.method == "pairs" else None,
                "base": side(each.base),
                "new": side(each.new),
                "differences": each.notes,
            }
            for each in comparison.verdicts
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
