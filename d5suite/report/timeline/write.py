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
from d5suite.report.timeline.tables import headline, remarks, tables
from d5suite.traces.analysis import Analysis

ROWS = 30
"""Regions and steps of a table."""


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
    return environment.from_string(read["html"]).render(
        title=title,
        subtitle=headline(found),
        notices=[*notices, *remarks(found)],
        style=_unescaped(read["css"].strip()),
        script=_unescaped(script),
        script_hash=digest,
        facts=_unescaped(_json(facts)),
        data=data,
        tables=tables(found, rows=ROWS),
    )


def _unescaped(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704  ours, or JSON in which no tag can begin


def _json(value: Any) -> str:
    """Return JSON that may stand inside of a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
