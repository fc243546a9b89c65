"""Writes the timeline of a trace as a page in one file.

Imports `d5suite.traces` and its neighbours.
"""

from __future__ import annotations

from pathlib import Path

from d5suite.report.document import document
from d5suite.report.timeline.pack import pack
from d5suite.report.timeline.tables import headline, remarks, tables
from d5suite.traces.analysis import Analysis

ROWS = 30
"""Most regions and steps in a table."""


def page(found: Analysis, *, title: str, step: str = "step") -> str:
    """Return a timeline as a page that needs no other file and no network.

    Parameters
    ----------
    found : Analysis
    title : str
    step : str
        The region that is one step.
    """
    facts, columns, notices = pack(found, step=step)
    return document(
        Path(__file__).with_name("timeline.html"),
        title=title,
        subtitle=headline(found),
        notices=[*notices, *remarks(found)],
        data=facts,
        columns=columns,
        tables=tables(found, rows=ROWS),
    )
