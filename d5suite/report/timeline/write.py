"""Writes the timeline of a trace: a page in one file, or a picture of a step as SVG.

Imports `d5suite.traces`, jinja2, and its neighbours.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from d5suite.report.timeline.pack import pack
from d5suite.traces.analysis import Analysis

ROWS = 30
"""Rows of a table."""


def page(found: Analysis, *, title: str, step: str = "step") -> str:
    """Return a timeline as a page that needs no other file and no network.

    Parameters
    ----------
    found : Analysis
    title : str
    step : str
        The region that is one step.
    """
    import jinja2

    folder = resources.files(__package__)
    read = {name: (folder / f"timeline.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    facts, data, notices = pack(found, step=step)
    script = read["js"].strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    seconds = found.trace.seconds(found.trace.end - found.trace.begin)
    return environment.from_string(read["html"]).render(
        title=title,
        subtitle=f"{len(found.trace):,} events of {len(found.ranks)} ranks in {seconds:.6g} s; "
        f"{found.states.messages:,} messages, {found.states.collectives:,} collective operations",
        notices=notices,
        style=_unescaped(read["css"].strip()),
        script=_unescaped(script),
        script_hash=digest,
        facts=_unescaped(_json(facts)),
        data=data,
        tables=tables(found),
    )


def _unescaped(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704  ours, or JSON in which no tag can begin


def _json(value: Any) -> str:
    """Return JSON that may stand inside of a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def tables(found: Analysis) -> list[dict[str, Any]]:
    """Return the analysis as tables, the same figures as ``d5suite trace analyze``."""
    trace, seconds = found.trace, found.trace.seconds
    whole = trace.end - trace.begin

    def share(ticks: int, of: int = whole) -> str:
        return f"{100 * ticks / of:.1f}%" if of else "–"

    ranks = [
        (
            trace.locations[each.location].process,
            *map(share, (each.computing, each.waiting, each.communicating, each.outside)),
            *map(share, (each.overlapped, each.caused, each.critical)),
        )
        for each in found.ranks
    ]
    waits: list[tuple[str, ...]] = [
        (name, f"{count:,}", f"{seconds(ticks):.4g}", share(ticks, whole * len(found.ranks)))
        for name, (count, ticks) in sorted(found.patterns.items(), key=lambda each: -each[1][1])
    ]
    regions: list[tuple[str, ...]] = [
        (name, f"{seconds(own):.4g}", share(critical), f"{seconds(waiting):.4g}")
        for name, (own, critical, waiting) in list(found.regions.items())[:ROWS]
    ]
    every: list[tuple[str, str, tuple[str, ...], list[tuple[str, ...]]]] = [
        (
            "Ranks",
            "Computing, waiting, in MPI and outside add up to the whole time. Caused: for how long others waited for "
            "this rank, all of them together. Critical: its part of the critical path.",
            ("rank", "computing", "waiting", "in MPI", "outside", "overlap", "caused", "critical"),
            ranks,
        ),
        ("Wait states", "By Scalasca's definitions.", ("wait state", "times", "seconds", "of all ranks' time"), waits),
        (
            "Regions",
            f"Own time on all ranks, outside of MPI; the first {ROWS}.",
            ("region", "seconds", "on the critical path", "waiting in its calls"),
            regions,
        ),
    ]
    return [
        {"title": title, "note": note, "columns": columns, "rows": rows} for title, note, columns, rows in every if rows
    ]
